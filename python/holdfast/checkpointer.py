"""`Checkpointer`: the checkpoints of one run by step, plain ones or DCP's."""

from __future__ import annotations

import builtins
import collections
import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # before Python 3.11 not the built-in one
from typing import Any, Literal

from holdfast import (
    _arguments,
    _completion,
    _dcp_directories,
    _lineage,
    _names,
    _others,
    _ranks,
    _runtime,
    directories,
    handle,
    loading,
    recovery,
    saving,
)
from holdfast._process import PerProcess
from holdfast.drain import Drain, places
from holdfast.drain import remote as drain_remote
from holdfast.drain import trainer as drain_trainer
from holdfast.errors import Error, TimeoutError, of_system

logger = logging.getLogger("holdfast")

_OF_PLAIN = frozenset(inspect.signature(saving.save_async).parameters)
_OF_PLAIN -= {"state", "path", "step", "keep_last", "keep_every", "runtime"}
_OF_DCP = frozenset({"late", "planner", "replace", "replicas"})


class DcpSave:
    """One DCP save of a `Checkpointer`.

    Attributes:
        path, step, staged: as of `Save`.
        durable: a future of DCP's metadata, done once the checkpoint is complete on all ranks.
        report: of this rank's part, as of `Save`; None until the checkpoint is complete.
        skipped: always false: a DCP save waits for staging memory.
    """

    skipped = False

    def __init__(self, path: str, step: int, staged: Future, durable: Any) -> None:
        self.path = path
        self.step = step
        self.staged = staged
        self.durable = durable

    @property
    def report(self) -> dict[str, Any] | None:
        return self.durable.report

    @_arguments.checked
    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the checkpoint is complete on all ranks. Returns its metadata.

        Raises:
            TimeoutError: the save goes on.
            CheckpointException, Error: the save's own.
        """
        try:
            return self.durable.result(timeout)
        except FutureTimeoutError:
            if self.durable.done():
                raise
            raise TimeoutError("DEADLINE_EXCEEDED", f"wait for {self.path}: not complete yet") from None


class Checkpointer(PerProcess):
    """The checkpoints of one run in one directory, by step.

    ::

        with holdfast.Checkpointer("run", keep_last=3) as checkpointer:
            if last := checkpointer.newest():
                state = checkpointer.load(last["step"], into=state)
            for step in ...:
                checkpointer.save_async(state, step)

    Two Checkpointers share no options and no staging memory, unless `share_memory_with` says so.
    ``newest``, ``list`` and ``load`` see the checkpoints with a name of this Checkpointer's form.

    Args:
        directory: of the checkpoints; made by the first save, with those above it.
        name: of a checkpoint, with ``{step}``, which may have a format (``{step:08d}``); no digit
            may follow it. Without ``{step}`` all saves have one name: pass ``replace=True``.
        format: ``"holdfast"``, or ``"dcp"`` for PyTorch Distributed Checkpoint.
        keep_last: after each save remove all but the newest so many of the names with a step; default all stay.
        keep_every: but keep those whose step is a multiple of this.
        process_group: with ``"dcp"``, the ranks that save and load; default all.
        drain_to: a second place, off the node, to which a process of its own copies every checkpoint: a
            directory, or a URL as ``s3://bucket/run``. See docs/drain.md. `keep_last` and
            `keep_every` then remove only checkpoints of `directory` that have arrived there; those
            of the second place are kept by the options of `drain`.
        drain: a `holdfast.Drain`, its options.
        share_memory_with: a Checkpointer whose staging memory and workers are used, too, or
            ``"process"`` for those of `holdfast.save_async`. Default: memory of its own.
        **options: defaults for the options of `holdfast.save_async` (with ``"dcp"``: ``late``,
            ``planner``, ``replace``), and the options of `holdfast.configure` for this Checkpointer.

    Raises:
        Error: INVALID_ARGUMENT naming the option; FAILED_PRECONDITION where `directory` is a checkpoint.
    """

    @_arguments.checked
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str = "step-{step}",
        format: str = "holdfast",
        keep_last: int | None = None,
        keep_every: int | None = None,
        process_group: Any = None,
        drain_to: str | os.PathLike[str] | None = None,
        drain: Drain | None = None,
        share_memory_with: Checkpointer | str | None = None,
        **options: Any,
    ) -> None:
        text = directories.local_path(directory, "Checkpointer")
        self.directory = directories.absolute_path(text, "Checkpointer")
        directories.check_is_no_checkpoint(self.directory, "Checkpointer")
        self._form = name
        self._pattern = _names.pattern_of(name)
        self.format = format
        of_save = {"holdfast": _OF_PLAIN, "dcp": _OF_DCP}.get(format)
        if of_save is None:
            raise _refusal(f"format {format!r}: there is only 'holdfast' and 'dcp'")
        if process_group is not None and format != "dcp":
            raise _refusal("process_group is for format='dcp'; plain saves are of all ranks")
        self._process_group = process_group
        self._keep_last, self._keep_every = keep_last or 0, keep_every or 0
        if drain is not None and drain_to is None:
            raise _refusal("drain= has the options of a drain; drain_to= says where to")
        self._drain_options = drain or Drain()
        self._drain_to = None if drain_to is None else drain_trainer.checked_target(
            self.directory, directories.path_text(drain_to, "Checkpointer: drain_to")
        )
        self._draining: drain_trainer.Draining | None = None
        self._drains: bool | None = None  # kept from the last save: the job may end its group before the Checkpointer
        if self._drain_to is not None:
            # The drain's process applies retention: it knows what has arrived.
            self._draining = drain_trainer.Draining(
                self.directory, self._drain_to, self._drain_options, self._keep_last, self._keep_every, self._form
            )
            self._keep_last = self._keep_every = 0
            self._draining.let_go_with(self)
            if self._own_drain() is not None:
                places.warn_of_one_file_system(self.directory, self._drain_to)
        self._of_save = of_save
        self._takes = Checkpointer._save_dcp if format == "dcp" else saving.save_async
        self._defaults = {k: v for k, v in options.items() if k in of_save}
        _arguments.check(self._takes, self._defaults, "Checkpointer")
        further = {k: v for k, v in options.items() if k not in of_save}
        if unknown := set(further) - _runtime.OPTIONS:
            raise _refusal(_arguments.unknown(unknown, _OF_OBJECT | of_save | _runtime.TOLD))
        self._runtime = _runtime.Runtime(further, _beside(share_memory_with), "Checkpointer")
        self._closed = False
        super().__init__()

    def clear(self) -> None:
        """In a forked child the parent's saves are not waited for."""
        self._place: Any = None  # of the drain; its library's threads are not there in a child
        self._removals: set[Future] = set()  # of old DCP checkpoints, behind saves in flight
        self._called: collections.Counter[str] = collections.Counter()  # paths of DCP saves whose call is under way

    # ---- Saving.

    def path(self, step: int) -> str:
        """Path of a step's checkpoint, whether it is there or not."""
        step = directories.whole_step(step, f"checkpoint of {self.directory}")
        return os.path.join(self.directory, self._form.format(step=step))

    @_arguments.checked
    def save_async(
        self, state: Any, step: int, *, name: str | None = None, **options: Any
    ) -> handle.Save | DcpSave:
        """Saves a state asynchronously. With ``"dcp"``, all ranks of the group call it.

        Args:
            state: as of `holdfast.save_async`, or a state dict with ``"dcp"``.
            step: of the training; gives the checkpoint its name and is recorded.
            name: of this checkpoint, in place of the usual one: ``"best"``. Its save removes nothing.
            **options: for this save, in place of the defaults.

        Returns:
            The handle: ``path``, ``step``, ``staged``, ``durable``, ``skipped``, ``wait()``.

        Raises:
            Error: as `holdfast.save_async` or `holdfast.dcp.async_save`; FAILED_PRECONDITION after
                `close`.
        """
        if self._closed:
            raise Error("FAILED_PRECONDITION", f"save to {self.directory}: the Checkpointer is closed")
        if unknown := set(options) - self._of_save:
            raise _refusal(f"save: {_arguments.unknown(unknown, self._of_save | {'name'})}")
        if name is not None and (name in ("", os.curdir, os.pardir) or os.path.basename(name) != name):
            raise _refusal(f"name {name!r}: the name of a directory is expected, not a path")
        path = self.path(step) if name is None else os.path.join(self.directory, name)
        options = {**self._defaults, **options}
        # A name that is given may differ in its number alone from another job's: seed-1, seed-2.
        keep_last = self._keep_last if name is None and self._pattern.groups else 0
        if self.format == "dcp":
            _arguments.check(self._takes, options, "save_async")  # a plain save looks itself
            return self._drained(self._save_dcp(state, path, step, keep_last, **options))
        return self._drained(saving.save_async(
            state, path, step=step, keep_last=keep_last, keep_every=self._keep_every if keep_last else 0,
            runtime=self._runtime, **options,
        ))  # fmt: skip

    def _drained(self, save: Any) -> Any:
        """Has a save's checkpoint drained, where this process is the one to see to it: rank 0."""
        if self._draining is None:
            return save
        self._drains = self._is_first(save)
        if not self._drains:
            return save
        draining = self._draining
        draining.start()

        def ring(durable: Any) -> None:
            if durable.ended_well:
                draining.ring()

        save.durable.add_done_callback(ring)
        return save

    def _is_first(self, save: Any) -> bool:
        if self.format == "dcp":
            from holdfast.dcp.agreement import is_coordinator

            return is_coordinator(self._process_group)
        return (_ranks.rank_and_world()[0] if save is None else save.extra["rank"]) == 0

    def _own_drain(self) -> drain_trainer.Draining | None:
        """The drain, where this process sees to it: by its last save, or before the first one as the first of the job."""
        if self._draining is None:
            return None
        drains = self._drains
        if drains is None:
            drains = not _ranks.is_another_of_launcher() and self._is_first(None)
        return self._draining if drains else None

    def save(self, state: Any, step: int, *, name: str | None = None, **options: Any) -> Any:
        """As `save_async`, and waits until the checkpoint is durable. Returns what ``wait()`` does."""
        return self.save_async(state, step, name=name, **options).wait()

    def _save_dcp(self, state: Any, path: str, step: int, keep_last: int, *, late: Iterable[Any] | bool = (), planner: Any = None,
                  replace: bool = False, replicas: Literal["warn", "refuse"] = "warn") -> DcpSave:  # fmt: skip
        import holdfast.dcp
        from holdfast.dcp.agreement import check_member, is_coordinator

        check_member(f"save {path}", self._process_group)
        if late is True:
            raise _refusal("late=True is for plain saves; pass late=[optimizer]")
        writer = holdfast.dcp.StorageWriter(path, step=step, overwrite=replace)
        writer.runtime = self._runtime
        with self._calling(path):
            response: Any = holdfast.dcp.async_save(
                state, storage_writer=writer, planner=planner, process_group=self._process_group,
                async_stager=holdfast.dcp.Stager(late=() if isinstance(late, bool) else late), replicas=replicas,
            )  # fmt: skip
        save = DcpSave(path, step, response.staging_completion, response.upload_completion)
        if keep_last and is_coordinator(self._process_group):
            removal: Future = Future()
            with self.lock:
                self._removals.add(removal)
            save.durable.add_done_callback(lambda durable: self._remove_old(durable, path, removal))
        return save

    @contextlib.contextmanager
    def _calling(self, path: str) -> Iterator[None]:
        """While a call saves into `path`, and until the save is in flight, the path is not removed."""
        with self.lock:
            self._called[path] += 1
        try:
            yield
        finally:
            with self.lock:
                self._called[path] -= 1
                if not self._called[path]:
                    del self._called[path]

    def _remove_old(self, durable: _completion.SeenFuture, path: str, removal: Future) -> None:
        """Runs in the save's own thread."""
        try:
            if durable.ended_well:  # no look at the outcome: the error stays unread
                # A rank's own part may have ended, and still be on its way off the table.
                going = [s for s in handle.in_flight() if not (isinstance(s, handle.Save) and s.durable.done())]
                with self.lock:
                    busy = {*self._called, *(save.path for save in going)}
                directory, name = os.path.split(path)
                _dcp_directories.remove_old(directory, name, self._keep_last, self._keep_every, busy)
        except Error as error:  # no save failed
            logger.warning("an old checkpoint was kept: %s", error)
        finally:
            with self.lock:
                self._removals.discard(removal)
            removal.set_result(None)

    # ---- Finding and loading.

    def list(self) -> list[dict[str, Any]]:
        """The complete checkpoints, as of `holdfast.list_checkpoints`; the newest is the last.

        With `drain_to` those of both places; of a checkpoint in both the path is the local one. Of two saves of one name, as
        after a rollback on another node, it is the later one.

        Raises:
            Error: UNAVAILABLE, ... where the second place cannot be listed: a run must not go back because of that.
        """
        return [c for c in self._listed() if self._pattern.fullmatch(c["name"])]

    def _listed(self) -> builtins.list[dict[str, Any]]:
        """The complete checkpoints of any name."""
        if self._drain_to is None:
            return self._local()
        found = self._second_place().merged(self._local(), self.format)
        if found:
            _lineage.seen(self.directory, found[-1]["saved_at"])
        return found

    def _local(self) -> builtins.list[dict[str, Any]]:
        try:
            return directories.list_checkpoints(self.directory, format=self.format)
        except Error as error:
            if error.code != "NOT_FOUND":  # before the first save
                raise
            return []

    def _second_place(self) -> Any:
        assert self._drain_to is not None and self._draining is not None
        if self._place is None:
            self._place = drain_remote.SecondPlace(self._drain_to, self._drain_options.storage, self._draining.seen)
        return self._place

    def newest(self) -> dict[str, Any] | None:
        """The complete checkpoint that was saved last, as of `list`; None, and a warning of others, when there is none."""
        found = directories.newest(self.directory, format=self.format) if self._drain_to is None else None
        if found is None or not self._pattern.fullmatch(found["name"]):
            found = next(reversed(self.list()), None)
        if found is None:
            _others.warn(self.directory, self.format, self._listed())
        return found

    def load(
        self, step: int | None = None, into: Any = None, *, name: str | None = None, **options: Any
    ) -> Any:
        """Loads a checkpoint. With ``"dcp"``, all ranks of the group call it.

        Args:
            step: whose checkpoint; default the newest. With ``"dcp"`` rank 0's newest counts. A checkpoint that records
                another step is refused.
            into: the state to fill, as of `holdfast.load`; required with ``"dcp"``.
            name: of the checkpoint, in place of the step's.
            **options: of `holdfast.load`; with ``"dcp"`` of `holdfast.dcp.StorageReader`, and ``strict``.

        Returns:
            `into`, or the state.

        Raises:
            Error: NOT_FOUND when there is none, or one of another step, and as `holdfast.load`.
        """
        if self.format == "dcp":
            return self._load_dcp(lambda: self._find(step, name), step, into, **options)
        with self._found(lambda: self._find(step, name)) as path:
            listed = drain_remote.is_url(path) and "storage" not in options
            loaded = loading.load(self._second_place().to_load(path) if listed else path, into, step=step, **options)
            self._descends_from(path)
        return loaded

    @contextlib.contextmanager
    def _found(self, find: Callable[[], str]) -> Iterator[str]:
        """A path that `find` returns; the drain's retention lets it be. Where that was faster, `find` looks once more."""
        with contextlib.ExitStack() as stack:
            path = find()
            if self._drain_to is not None:
                try:
                    stack.enter_context(drain_remote.held(path))
                except FileNotFoundError:
                    path = find()
                    stack.enter_context(drain_remote.held(path))
            yield path

    def _find(self, step: int | None, name: str | None) -> str:
        if name is not None or step is not None:
            path = os.path.join(self.directory, name) if name is not None else self.path(step or 0)
            if self._drain_to is None:
                return path
            there = {c["name"]: c["path"] for c in self._listed()}
            return there.get(os.path.basename(path), path)
        newest = self.newest()
        if newest is None:
            others = _others.words(self.directory, self.format, self._listed())
            with contextlib.suppress(Error):  # before the first save
                passed_over = directories.listed(self.directory, self.format)[1]
                others = "".join(f"; passed over {why}" for why in passed_over) + others
            raise Error("NOT_FOUND", f"load from {self.directory}: there is no complete checkpoint{others}")
        return newest["path"]

    def _descends_from(self, path: str) -> None:
        """Has the next save in the directory name a checkpoint of the second place as its parent."""
        if os.path.dirname(path) == self.directory or self._drain_to is None:
            return
        found = self._second_place().found(path)
        if found is not None:
            _lineage.loaded(os.path.join(self.directory, found.name), found.attempt, found.step)

    def _load_dcp(self, find: Callable[[], str], step: int | None, into: Any, *, strict: bool = True, **options: Any) -> Any:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        import holdfast.dcp
        from holdfast.dcp.agreement import agree_on, check_member
        from holdfast.dcp.plans import check_state
        from holdfast.dcp.targets import load_into

        check_member(f"load from {self.directory}", self._process_group)
        if into is None:
            raise _refusal("a DCP checkpoint is loaded into a state: pass into=")
        check_state(into, f"load from {self.directory}")

        looked: builtins.list[str] = []  # of rank 0

        def find_complete() -> str:
            there: dict[str, Any] | None = None
            looked.append(find())
            place = None if self._drain_to is None else self._second_place().found(looked[-1])
            if place is not None:
                _dcp_directories.check_step(looked[-1], place.name, place.attempt, place.step, step)
            path = self._fetched(looked[-1])
            stack.callback(drain_remote.let_go, path)
            if not _dcp_directories.may_be_loaded(path):
                raise Error("NOT_FOUND", f"load {path}: it has no {_names.METADATA}: {_dcp_directories.why_none(path)}")
            with of_system(f"load {path}"), contextlib.suppress(Error):  # the reader says what is damaged
                there = _dcp_directories.look(path)
            if there is not None:
                _dcp_directories.check_step(path, os.path.basename(path), there["attempt"], there["step"], step)
            return path

        with contextlib.ExitStack() as stack:
            # Rank 0 holds it for all.
            path = agree_on(lambda: stack.enter_context(self._found(find_complete)), self._process_group)
            reader = holdfast.dcp.StorageReader(path, **options)
            planner = DefaultLoadPlanner(allow_partial_load=not strict)
            load_into(into, reader, None, planner, self._process_group, False, strict)
            for place in looked[-1:]:
                self._descends_from(place)
        return into

    def _fetched(self, path: str) -> str:
        """A DCP checkpoint of the second place as one of the directory: its readers know only files."""
        if self._drain_to is None:
            return path
        second = self._second_place()
        info = second.found(path)
        return path if info is None else drain_remote.fetch(second.place, info, self.directory, self._drain_options)

    def recover(self, **options: Any) -> dict[str, Any]:
        """Cleans up after a crash, as `holdfast.recover` does. Before the first save it does nothing.

        To be called before `newest`: it completes a save whose last step is missing.
        """
        if not os.path.isdir(self.directory):
            return {k: [] for k in ("complete", "promoted", "removed", "fenced", "kept_incomplete")}
        return recovery.recover(self.directory, **options)

    # ---- Waiting.

    @_arguments.checked
    def wait(self, timeout: float | None = None, *, drain: bool = False) -> None:
        """Waits for the saves of this Checkpointer and the removals behind them.

        Args:
            timeout: seconds in all.
            drain: wait until they have arrived in the second place, too.

        Raises:
            Error: the first of a save whose error was not read yet; of the drain, as `wait_drained`.
            TimeoutError: they go on after `timeout` seconds in all.
        """
        left = _runtime.Deadline(timeout).left
        with self.lock:
            removals = list(self._removals)
        handle.flush_of(self._runtime, left())
        for removal in removals:
            try:
                removal.result(left())
            except FutureTimeoutError:
                raise TimeoutError(
                    "DEADLINE_EXCEEDED", f"wait for removals in {self.directory}: not done yet"
                ) from None

        if drain:
            self.wait_drained(left())

    flush = wait

    @_arguments.checked
    def wait_drained(self, timeout: float | None = None) -> None:
        """Waits until all checkpoints that are complete now have arrived in the second place.

        On ranks other than 0 it does nothing: a barrier behind it makes it hold for them.

        Raises:
            Error: of a checkpoint that cannot be sent; what kept the drain from sending anything for
                `Drain.give_up` seconds. The drain goes on trying.
            TimeoutError: it goes on after `timeout` seconds.
        """
        if (draining := self._own_drain()) is not None:
            draining.wait(timeout)

    @property
    def drain_report(self) -> dict[str, Any]:
        """Of the drain on rank 0: ``target``, ``arrived``, ``bytes_sent``, ``pending``, ``bytes_done``, ``bytes_total``,
        ``last_arrived``, ``troubles``, ``failed``, ``last_error``. Empty on other ranks, which know nothing of it, and
        without `drain_to`."""
        draining = self._own_drain()
        return {} if draining is None else dict(draining.report)

    def staging(self) -> dict[str, Any]:
        """Statistics of the staging memory; empty before the first save."""
        return self._runtime.staging()

    def close(self, *, drain: bool = True) -> None:
        """Waits for the saves and the drain, then lets go of the staging memory. A second time does nothing.

        Args:
            drain: wait until everything has arrived in the second place. False: its process goes on alone.

        Raises:
            Error: as `wait`. The Checkpointer is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._runtime.close()
            if (draining := self._own_drain()) is not None:
                draining.close() if drain else draining.let_go()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except BaseException as error:  # DCP's CheckpointException is no Exception
            if kind is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            logger.error("close the checkpoints of %s: %s", self.directory, error)


_OF_OBJECT = frozenset(inspect.signature(Checkpointer).parameters) - {"directory", "options"}


def _refusal(reason: str) -> Error:
    return Error("INVALID_ARGUMENT", f"Checkpointer: {reason}")


def _beside(other: Checkpointer | str | None) -> _runtime.Runtime | None:
    if isinstance(other, Checkpointer):
        return other._runtime
    if other == "process":
        return _runtime.default
    if other is not None:
        raise _refusal(f"share_memory_with={other!r}: a Checkpointer or 'process' is expected")
    return None
