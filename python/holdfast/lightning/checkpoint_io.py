"""`CheckpointIO`: a trainer's checkpoints, saved asynchronously, in the order that keeps a whole one."""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from holdfast import _runtime
from holdfast._process import PerProcess
from holdfast.errors import Error, add_note
from holdfast.lightning import files, flavor, hooks, urls
from holdfast.lightning.ordering import Begun, Order, wait_for_all

_Base: Any = flavor.fabric("plugins").TorchCheckpointIO
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(:[a-z]|//)")


def location(path: Any, operation: str) -> str:
    """A path as the order of saves has it: absolute, of a link the link's own; or a URL.

    Raises:
        Error: INVALID_ARGUMENT, it is none. The message begins with `operation`.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise Error("INVALID_ARGUMENT", f"{operation} {path!r:.80}: the path of a checkpoint is expected")
    text = os.fsdecode(path)
    if not text:
        raise Error("INVALID_ARGUMENT", f"{operation} '': the path is empty")
    if text.startswith(("file://", "local://")):
        text = text.partition("://")[2]
    if _URL.match(text):
        return text
    directory, name = os.path.split(os.path.abspath(os.path.expanduser(text)))
    return os.path.join(os.path.realpath(directory), name)


@dataclasses.dataclass(eq=False)
class _Notice:
    """What is to be called when a save is durable."""

    begun: Begun
    tell: Callable[[], None]
    is_taken: bool = False


class _Notices(PerProcess):
    """What was not called yet, in the order of the saves."""

    def clear(self) -> None:
        """In a forked child the parent's saves never end."""
        self.waiting: list[_Notice] = []


class CheckpointIO(_Base):
    """Saves the checkpoints of a Trainer, or of Fabric, asynchronously and safely.

    ::

        trainer = Trainer(plugins=[holdfast.lightning.CheckpointIO()])

    A call returns when the state was captured; the file, which ``torch.load`` reads, appears by one
    rename when it is durable, with a manifest beside it (see `holdfast.save_file`). What the
    callbacks ask for follows that:

    - An older checkpoint is removed, and a link moved, when the save before it in the program is
      durable. If that fails, the old checkpoint and the old link stay.
    - A load waits for the save of its path, also for that of another plugin. So do a save and a
      removal. What asks no plugin, such as ``torch.load`` and ``load_from_checkpoint``, does not: `teardown` waits.
    - With several ranks a load by ``ckpt_path`` and by ``Fabric.load`` waits on all for the saves of rank 0, and
      fails on all if one has failed. A call of this plugin, or of ``load_raw``, asks its own process alone.
    - The error of a save is raised once: by the next save (which was begun), by the next load, or at
      the end of ``fit``. There all saves are waited for, also after an exception.
    - Loggers are told of a checkpoint when it is there.
    - A save whose name matches `durable_names` returns when it is durable: Lightning requeues its
      job after such a call.

    It may stand under a wrapper, and be used for several runs, one after the other.

    Attributes:
        order: of what it was asked for.
        runtime: that its saves are begun with; None: that of the process.

    Args:
        durable_names: patterns of file names whose save returns when it is durable; default those in
            front of a requeue, and Lightning's files between two processes (``.temp.ckpt``).
        saves_in_flight_max: a further save waits until one of so many is durable.
        spool: local directory for what goes to a URL; default that for temporary files.
        **options: of `holdfast.configure`, for the saves of this plugin, which then have staging
            memory of their own. Default: those of the process.

    Raises:
        Error: INVALID_ARGUMENT naming the option.
    """

    def __init__(
        self,
        *,
        durable_names: Sequence[str] = ("hpc_ckpt_*", ".*"),
        saves_in_flight_max: int = 2,
        spool: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check(durable_names, saves_in_flight_max, spool)
        self._arguments = {
            "durable_names": durable_names, "saves_in_flight_max": saves_in_flight_max, "spool": spool, **options,
        }  # fmt: skip
        self.durable_names = tuple(durable_names)
        self.spool = spool
        self.runtime = _runtime.Runtime(options, None, "CheckpointIO") if options else None
        self.order = Order(saves_in_flight_max)
        self._url_options: dict[str, Any] = {}
        self._notices = _Notices()
        hooks.install(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process has the options, and no saves."""
        return _remade, (type(self), self._arguments)

    # ---- What Lightning asks for.

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Begins a save; `checkpoint` may be changed when it returns.

        Args:
            checkpoint: any object that ``torch.save`` takes.
            path: a local path or a URL of ``fsspec``.
            storage_options: for a URL, what its file system takes.

        Raises:
            TypeError: `storage_options` for a local path, which has none.
            Error: as `holdfast.save_file`, INVALID_ARGUMENT for a URL without a file system, and that of an earlier save that has failed; this one is
                in flight then. While an exception is handled, a later call raises the latter.
        """
        where = location(path, "save")
        if os.fsdecode(path).endswith("/"):
            raise Error("INVALID_ARGUMENT", f"save {os.fsdecode(path)}: the name of a file is expected")
        if _URL.match(where):
            self._url_options[where] = storage_options
            begin = functools.partial(urls.save, checkpoint, where, storage_options, self.spool, self.runtime)
        elif storage_options is not None:
            raise TypeError(
                f"save {where}: storage_options are for URLs; a local file has none (pass options of "
                "holdfast.configure to holdfast.lightning.CheckpointIO)"
            )
        else:
            begin = functools.partial(files.save, checkpoint, where, self.runtime)
        # A save while an exception is handled must not take its place; the error goes out with the end.
        under_way = sys.exc_info()[1]
        try:
            self.order.save(where, begin)
        except Error as error:
            if under_way is None or not error.errno:
                raise
            self.order.note(error)
        if any(fnmatch.fnmatch(os.path.basename(where), name) for name in self.durable_names):
            self.order.wait_for(where)
        self.deliver()
        if under_way is None:
            self.order.raise_error()

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Loads a checkpoint as ``torch.load`` does, to the CPU by default. Waits for its save.

        Raises:
            Error: of a save that has failed.
            FileNotFoundError: there is none.
            IsADirectoryError: there is a directory.
        """
        where = self.wait_for(path)
        self.order.raise_error()
        if not _URL.match(where) and os.path.isdir(where):
            raise Error(
                "FAILED_PRECONDITION",
                f"load {where}: it is a directory; a sharded checkpoint is loaded by the strategy that saved "
                "it, and one of holdfast.save_async by holdfast.load",
                errno.EISDIR,
            )
        # What is given alone: Lightning before 2.6 has no `weights_only`.
        given = {"map_location": map_location, "weights_only": weights_only}
        further = {name: value for name, value in given.items() if value is not None}
        # A relative path stays as it is, for messages.
        shown = path if os.path.abspath(path) == where else where
        try:
            return super().load_checkpoint(shown, **further)
        except FileNotFoundError:
            raise
        except Exception as error:
            # Some of torch.load's errors name no file.
            how = "" if _URL.match(where) else f"; `holdfast verify {where}` says whether it is whole"
            add_note(error, f"load {where}: torch.load does not read it{how}")
            raise

    def wait_for(self, path: Any) -> str:
        """Waits for the saves of a path that is to be loaded, also those of other plugins; returns its `location`.

        Raises:
            Error: of a save of the path that has failed.
        """
        where = location(path, "load")
        wait_for_all(where)
        if not _URL.match(where):
            wait_for_all(os.path.realpath(where))
        return where

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint behind the save that was begun last, unless that fails."""
        where = location(path, "remove")
        if _URL.match(where):
            options = self._url_options.pop(where, None)
            self.order.remove(where, lambda: urls.remove(where, options))
        else:
            self.order.remove(where, lambda: files.remove(where), lambda: self._why_needed(where))

    def teardown(self) -> None:
        """Waits for all saves. The plugin can be used again afterwards.

        Raises:
            Error: of a save that has failed.
        """
        self.wait()
        self.order.raise_error()

    # ---- What callbacks and loggers do to files, by `hooks`.

    def link_checkpoint(self, target: Any, path: Any) -> None:
        """Puts a link to a checkpoint at `path`, when its save is durable, unless that fails."""
        where, to = location(path, "link"), location(target, "link to")
        self.order.link(where, to, lambda: files.link(where, to))

    def exists(self, path: Any, on_disk: bool) -> bool:
        """Whether a checkpoint will stand at `path` when all that was asked for is done.

        A link to a checkpoint that will be removed by then is none.
        """
        where = location(path, "look for")
        if self.order.is_coming(where):
            target = self.order.target_of(where)
        elif on_disk and not self.order.is_leaving(where):
            target = files.target_of(where)
        else:
            return False
        return not (target and self.order.is_leaving(target))

    def tell_when_durable(self, tell: Callable[[], None]) -> None:
        """Calls `tell` in the thread of the trainer when the save that was begun last is durable.

        Notices come in the order of the saves. Its file stays until then.
        """
        begun = self.order.last
        if begun is not None:
            self._notices.waiting.append(_Notice(begun, tell))
        self.deliver()

    def deliver(self) -> None:
        """Calls what `tell_when_durable` was given, in that order, as far as the saves have ended."""
        told = False
        # A signal handler may come here in the middle of it.
        while (due := next((n for n in self._notices.waiting if not n.is_taken), None)) and due.begun.has_ended:
            due.is_taken = told = True
            try:
                if due.begun.is_durable:
                    due.tell()
            finally:
                self._notices.waiting = [n for n in self._notices.waiting if n is not due]
        if told:
            self.order.advance()

    def wait(self) -> None:
        """Waits for all saves, and what is behind them; raises no error of theirs."""
        self.order.wait_for_saves()
        self.deliver()
        self.order.wait()

    def _why_needed(self, path: str) -> str:
        """Why a checkpoint may not be removed yet, or ""."""
        if any(notice.begun.path == path for notice in list(self._notices.waiting)):
            return "a logger was not told of it yet"
        link = files.links_to(path)
        return link and f"{link} leads there"


def _check(durable_names: Any, saves_in_flight_max: Any, spool: Any) -> None:
    """Looks at the arguments of a plugin.

    Raises:
        Error: INVALID_ARGUMENT naming the first wrong one.
    """
    wrong = ""
    if isinstance(durable_names, str) or not isinstance(durable_names, Collection) or not all(
        isinstance(name, str) for name in durable_names
    ):  # fmt: skip
        wrong = f"durable_names = {durable_names!r}: patterns are expected, in a list or a tuple"
    elif type(saves_in_flight_max) is not int or saves_in_flight_max < 1:
        wrong = f"saves_in_flight_max = {saves_in_flight_max!r}: a number of 1 or more is expected"
    elif spool is not None and not isinstance(spool, (str, os.PathLike)):
        wrong = f"spool = {spool!r}: the path of a directory is expected"
    if wrong:
        raise Error("INVALID_ARGUMENT", f"CheckpointIO: {wrong}")


def _remade(kind: type, arguments: dict[str, Any]) -> Any:
    return kind(**arguments)
