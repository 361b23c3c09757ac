"""The storage writer: DCP's own files, written by the runtime's worker and proved by a manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from holdfast import (
    _arguments,
    _dcp_directories,
    _late,
    _lineage,
    _names,
    _regular,
    _runtime,
    directories,
    events,
    handle,
)
from holdfast._durable import Presence, begin_directory, sync_directory
from holdfast._names import METADATA
from holdfast.dcp import items, placement, staging
from holdfast.dcp import metadata as _metadata
from holdfast.dcp.parts import Part
from holdfast.errors import Error, of_operation, of_system

logger = logging.getLogger("holdfast.dcp")

_T = TypeVar("_T")

# Directories that failed saves have made and could not remove: files of a save that another rank has begun since are there.
_left: set[str] = set()

_TIME_SHOWN_MAX = 5.0  # seconds
_TIME_TO_REMOVE = 5.0  # seconds that a failed save waits for its turn to remove its files
_POLL = 0.02

_OVERTAKEN = (
    "another job saves into this directory, and has completed a save meanwhile, or the ranks do not see one directory; "
    "give each job a directory of its own, on a file system that all of its ranks share"
)


def local_path(checkpoint_id: str | os.PathLike[str]) -> Path:
    """The directory that a checkpoint id names.

    Raises:
        Error: INVALID_ARGUMENT for a URL.
    """
    text = directories.local_path(
        checkpoint_id,
        "open",
        "use the framework's own reader and writer, or holdfast.dcp.async_save, which hands URLs on to them",
    )
    return Path(directories.absolute_path(text, "open"))


@dataclasses.dataclass
class Written:
    """One rank's data on its way to the disk: the save, and what it will have written."""

    save: handle.Save
    layout: items.Layout
    extents: Any
    placement: placement.Placement

    @property
    def results(self) -> list[WriteResult]:
        """One per item, as the framework wants them."""
        return self.layout.results(self.extents, self.placement.data_file)

    def wait(self) -> None:
        """Blocks until the rank's data is durable.

        Raises:
            Error: the save's, with the rank in its message.
        """
        try:
            self.save.wait()
        except Error as error:
            place = self.placement
            reason = error.message.removeprefix(f"save {place.directory}: ")
            message = f"save {place.directory}, rank {place.file_rank}: {reason}"
            if error.code == "NOT_FOUND" and os.path.isdir(place.directory):
                raise Error("ABORTED", f"{message}: {_OVERTAKEN}") from error
            raise Error(error.code, message, error.errno) from error


class _Results(list):
    """Results of a rank. The framework holds the list until the save of all ranks has ended, well or not."""

    presence: Presence | None = None


class StorageWriter(_StorageWriter):
    """Writes DCP checkpoints: ``dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))``.

    The files are ordinary: ``__R_N.distcp`` per rank and ``.metadata``, which the framework's own
    reader loads; beside them stand a manifest per rank and a commit record with digests, by which
    `holdfast.verify` proves the checkpoint. ``.metadata`` appears, by one rename, when the data
    of all ranks is durable; until then an older checkpoint in the same directory stays whole, and
    its files are deleted afterwards.

    Under the framework's ``async_save`` it is the stager, too; `holdfast.dcp.async_save` is better.

    Attributes:
        path: the checkpoint's directory.
        step: recorded in manifests and reports.
    """

    # What stock `async_save` asks of a stager.
    _synchronize_after_execute = False
    # Options and staging memory of a `holdfast.Checkpointer`; None: those of `holdfast.configure`.
    runtime: _runtime.Runtime | None = None

    @_arguments.checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        step: int | None = None,
        staging_bytes_max: int | None = None,
    ) -> None:
        """A writer for one checkpoint, or, with `reset`, for one after the other.

        Args:
            path: the checkpoint's directory; made if it is not there.
            overwrite: whether a checkpoint that is there may be replaced, as DCP allows by default.
            step: of the training; default the last number in the directory's name, unless letters
                follow it as in ``llama-8b``; else 0.
            staging_bytes_max: cap of the shared memory that stock ``async_save`` stages in; default
                that of the staging memory (see `holdfast.configure`), else a quarter of what is
                available.

        Raises:
            Error: INVALID_ARGUMENT for a URL.
        """
        super().__init__()
        self.path = local_path(path)
        self.overwrite = overwrite
        self._step = None if step is None else directories.whole_step(step)
        self._staging_bytes_max = staging_bytes_max
        self.staged = False
        self._fresh()

    def _fresh(self) -> None:
        self.save_id = placement.new_attempt()
        self._save_id_used = False
        self._rank: int | None = None
        self._use_collectives = True
        self._made: list[str] = []
        self._makes_directory = False
        self._presence: Presence | None = None
        self._place: placement.Placement | None = None
        self._parent = ""

    @property
    def step(self) -> int:
        if self._step is not None:
            return self._step
        return _dcp_directories.step_of(self.path.name)

    @property
    def has_step(self) -> bool:
        """Whether the caller has given the step."""
        return self._step is not None

    # ---- What the framework calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self._fresh()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.make_directory()
        self.sync_made()
        return plan

    def make_directory(self) -> None:
        """Makes the checkpoint's directory; `sync_made` makes it durable.

        Raises:
            Error: ALREADY_EXISTS: a plain checkpoint is there; or any, without `overwrite`.
        """
        try:
            self._begin_directory()
        except Error as error:
            if error.code != "NOT_FOUND":
                raise
            self._begin_directory()  # a recovery has removed what a killed save had left there
        with of_system(f"save {self.path}: look for an older checkpoint"):
            plain = (self.path / _names.RECORD).exists() and not _dcp_directories.may_be_loaded(str(self.path))
            exists = not self.overwrite and (self.path / self.metadata_name(reading=True)).exists()
        if plain:
            raise Error(
                "ALREADY_EXISTS",
                f"save {self.path}: a plain Holdfast checkpoint is there, which a DCP checkpoint cannot replace; "
                "choose another name, or remove it",
            )
        if exists:
            raise Error(
                "ALREADY_EXISTS",
                f"save {self.path}: Checkpoint already exists, and overwrite=False; choose another name, remove it, or pass "
                "overwrite=True (replace=True to a Checkpointer)",
            )

    def _begin_directory(self) -> None:
        # Noted first: an interrupt may come when the directory is there.
        self._makes_directory = self._makes_directory or not os.path.lexists(self.path)
        with of_operation(f"save {self.path}"):
            self._made += begin_directory(str(self.path))
        self._enter()

    def _enter(self) -> None:
        """From now on recoveries see the save, also before and after this rank writes: other ranks may come later."""
        with of_system(f"save {self.path}: lock it"):
            try:
                self._presence = Presence(self.path)
            except NotADirectoryError:
                raise Error(
                    "FAILED_PRECONDITION", f"save {self.path}: a file is there; choose another name, or remove it", errno.ENOTDIR
                ) from None

    def in_directory(self, act: Callable[[], _T]) -> _T:
        """The result of `act`, again in a new directory while another process has removed it since `make_directory`.

        A file system of a network may show the old directory for some time: then nothing makes a new one.
        """
        end = time.monotonic() + _TIME_SHOWN_MAX
        is_anew = False
        while True:
            try:
                if is_anew:
                    self.make_directory()
                    self.sync_made()
                return act()
            except Error as error:
                if error.code != "NOT_FOUND" or time.monotonic() > end:
                    raise
            if is_anew:
                time.sleep(_POLL)
            is_anew = True

    def sync_made(self) -> None:
        """Makes the directories durable that this rank has made."""
        while self._made:
            with of_system(f"save {self.path}: make its name durable"):
                sync_directory(self._made.pop(0))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._save_id_used:
            self.save_id = placement.new_attempt()
        self._save_id_used = True
        alone = not self._use_collectives
        ranks = [self._rank or 0] if alone else list(range(len(plans)))
        places = self.in_directory(lambda: placement.choose(self.path, self.save_id, ranks, alone))
        self._place = places[0]
        if len(places) == 1:
            placement.note(places[0])  # it may reach `write_data` without having been pickled
        return [
            dataclasses.replace(plan, storage_data=place)
            for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        called_ns = time.monotonic_ns()
        try:
            place = placement.take(plan.storage_data, str(self.path))
            data = [items.resolved(planner, item) for item in plan.items]
            written = self.begin(place, items.Layout(plan.items), data, called_ns)
            written.wait()
        except BaseException:
            self.take_back()
            raise
        results = _Results(written.results)
        # This writer hears nothing of the save's end, or failure, on another rank.
        results.presence, self._presence = self._presence, None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def begin(self, place: placement.Placement, layout: items.Layout, data: list[Any], called_ns: int,
              late: Iterable[Any] = (), *, part: Part | None = None, plans: Iterable[bytes] = (),
              digests: Iterable[torch.Tensor] = (), addresses: list[int] | None = None,
              publishes: bool = True) -> Written:  # fmt: skip
        """Starts writing. Host tensors are captured when it returns.

        Tensors on a device are copied behind it. What `late` does not name is cloned on the device
        up to a bound, beyond that the current stream waits for the copies: either way it may be
        changed at once by what the stream does next.

        Args:
            place: where.
            layout, data: the items, and what is written of each.
            called_ns: when the call began, by the monotonic clock.
            late: optimizers or tensors whose memory stays unchanged until the save has staged.
            part, plans, digests: what the file says of itself, see `parts` and `replicas`.
            addresses: as of `Layout.plan_file`.
            publishes: whether observers are told of this rank's data. Not by whoever tells them of
                the checkpoint.

        Raises:
            Error: of this rank's own part.
        """
        self._place = place
        try:
            file = layout.plan_file(data, place.data_file, _late.Late(late), part, plans, digests, addresses)
        except BaseException:
            self.release_name()
            raise
        nbytes = file.plan.total_bytes
        if self.staged:
            # The staged copy is stable: it goes through a small window of the staging memory.
            nbytes = min(nbytes, staging.WINDOW_BYTES)
        runtime = self.runtime or _runtime.default
        door = runtime.door(
            str(self.path.parent), self.path.name, nbytes, rank=place.rank, world_size=place.world_size
        )
        extra = {
            "kind": "dcp",
            "called_ns": called_ns,
            "rank": place.rank,
            "world_size": place.world_size,
            "objects": file.pickled,
            "contiguous_copies": file.contiguous_copies,
        }

        def begin() -> Any:
            if self._presence is None:  # another program has made the directory
                self._enter()
            return door.save(self.path.name, file.plan, self.step, False, place.attempt, True, bool(file.watch),
                             saved_after_ns=_lineage.latest_ns(str(self.path)))

        self._parent = _lineage.begin(str(self.path), place.attempt, self.step)
        save = handle.Save(
            lambda: self.in_directory(begin), str(self.path), self.step, extra, file.device, door, runtime=runtime,
            ordered=file.wait, watch=file.watch, publishes=publishes,
            on_failure=functools.partial(placement.release, place),
        )  # fmt: skip
        layout.release(file)
        return Written(save, layout, file.extents, place)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        self.complete(metadata, len(results))

    def complete(self, metadata: Metadata, world_size: int, files: Iterable[str] = (),
                 younger: Container[str] = (), *, deletes: bool = True, lock_end: float | None = None) -> None:  # fmt: skip
        """Commits a save whose data is durable on all ranks, and deletes what is older.

        Does nothing if the save is committed already.

        Args:
            metadata: with the places of all items.
            world_size: of the save.
            files: all its data files, those without items, too.
            younger: ids of attempts that other ranks may have begun since.
            deletes: whether older files are deleted.
            lock_end: as of `metadata.locked`; None: after `time_ranks_max`.

        Raises:
            Error: ABORTED (another save was completed, which is younger or has removed files of this
                one), or what writing says.
        """
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        name = self.metadata_name()
        named = {info.relative_path for info in (metadata.storage_data or {}).values()}
        time_max = (self.runtime or _runtime.default).options.get("time_ranks_max")
        if lock_end is None and time_max:
            lock_end = time.monotonic() + time_max
        with _metadata.locked(self.path, lock_end):
            older, by = self._found(self.path / name)
            if by == self.save_id:
                return
            keep = named | set(files)
            if placement.began_before(keep, older):
                raise Error(
                    "ABORTED",
                    f"save {self.path}: a save that began later was completed in the meantime; the "
                    "younger checkpoint stays",
                )
            self._check_files(keep, world_size)
            _metadata.commit(self.path, name, metadata, self.save_id, self._parent, world_size)
            # Within the lock: what another job commits meanwhile is not to be taken for older.
            if deletes:
                self._delete_older(keep, older - keep, younger)
        self.leave()

    def _check_files(self, data: set[str], world_size: int) -> None:
        """Refuses to commit a save that lacks a file: jobs may save into one directory by mistake."""
        with of_system(f"save {self.path}: list it"):
            there = set(os.listdir(self.path))
        manifests = {_names.manifest(rank, world_size, self.save_id) for rank in range(world_size)}
        gone = sorted((data | manifests) - there)
        if gone:
            raise Error("ABORTED", f"save {self.path}: {gone[0]} is gone: {_OVERTAKEN}")

    def leave(self) -> None:
        """Ends the save for those who ask whether one is at work in the directory."""
        self._presence = None
        _left.discard(str(self.path))

    def release_name(self) -> None:
        """Gives the name of the data file back if it is not written yet: a save has failed in the call."""
        if self._place is not None:
            placement.release(self._place)

    def take_back(self) -> None:
        """Ends a save that has failed: it is no parent of later ones, and an empty directory that failed saves have made goes."""
        _lineage.failed(str(self.path), self.save_id)
        self.release_name()
        removes = self._makes_directory or str(self.path) in _left
        self.leave()
        if removes:
            try:
                os.rmdir(self.path)
            except FileNotFoundError:  # another rank was faster
                pass
            except OSError:
                _left.add(str(self.path))

    def adopt(self, attempt: str, name: str) -> None:
        """Makes this the writer of a save that another process has begun.

        Args:
            attempt: of the save.
            name: of its metadata file.
        """
        self.save_id = attempt
        self._use_collectives = name == METADATA
        self._rank = None if self._use_collectives else int(name.removeprefix("__").split(".")[0])

    def _found(self, path: Path) -> tuple[set[str], str]:
        """What the metadata that is there names, of this directory itself, and whose it is."""
        try:
            metadata = _metadata.read(path)
            names = {info.relative_path for info in (metadata.storage_data or {}).values()}
        except Error as error:
            if error.code != "NOT_FOUND":
                logger.warning("%s; the files that it names will stay", error.message)
            return set(), ""
        except AttributeError:  # another writer's metadata, with storage data of its own
            return set(), ""
        names = {n for n in names if isinstance(n, str) and os.path.basename(n) == n}
        return names, _metadata.save_id_of(metadata)

    def _delete_older(self, keep: set[str], older: set[str], younger: Container[str]) -> None:
        """Deletes what no metadata names any more. The checkpoint stands: errors are only told."""
        try:
            rank = None if self._use_collectives else self._rank or 0
            left = placement.leftovers(self.path, self.save_id, keep, rank, younger)
            for name in [*left, *sorted(older - set(left))]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path / name)
        except OSError as error:
            logger.warning("delete older files of %s: %s", self.path, error)

    def metadata_name(self, reading: bool = False) -> str:
        if self._use_collectives:
            return METADATA
        return _names.dcp_metadata(0 if reading else self._rank or 0)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        if "://" in os.fspath(checkpoint_id):
            return False
        parents = Path(os.path.abspath(checkpoint_id)).parents
        return any(p.exists() and os.access(p, os.W_OK) for p in parents)

    # ---- As the stager of the framework's own async_save.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Copies a state into shared memory that is reused once the upload has let go of it.

        Raises:
            Error: RESOURCE_EXHAUSTED naming the cap that would be needed.
        """
        self.staged = True
        try:
            with of_operation(f"save {self.path}"):
                return staging.stage(state_dict, self._staging_bytes_max)
        except Error as error:
            events.publish_raised(str(self.path), self.step, error, kind="dcp")
            raise

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns when everything was copied."""

    def close(self) -> None:
        """Gives back the shared memory that no upload uses."""
        staging.trim()


def remove_data(directory: str, attempt: str, name: str, files: list[str], manifest: str) -> None:
    """Removes a rank's files of a save that has failed on all ranks. Does nothing where it was committed after all.

    Errors are only told: the next save into the directory, or a recovery, removes the files then.

    Args:
        directory: of the save.
        attempt: of the save.
        name: of its metadata file.
        files, manifest: names of the rank's data files and manifest.
    """
    path = Path(directory)
    try:
        with _metadata.locked(path, time.monotonic() + _TIME_TO_REMOVE):
            with contextlib.suppress(FileNotFoundError):
                if attempt.encode() in _regular.read_whole(path / name, "read", _regular.METADATA_BYTES_MAX)[0]:
                    return
            # The manifest proves that the data file is the save's own. It goes last: a file that a crash leaves is still proven.
            if placement.lists(path / manifest, files):
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path / file)
                os.unlink(path / manifest)
    except (OSError, Error) as error:
        if os.path.isdir(path):
            logger.warning("remove the files of a failed save from %s: %s", directory, error)
