"""The writer that Megatron's save strategies make for every checkpoint.

The data is captured in `prepare_write_data`, which `dist_checkpointing.save` calls before it returns,
and writing begins there. The request that the caller gets carries work that is under way: its
function only waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from holdfast import _devices, events
from holdfast._durable import sync_directory, sync_file
from holdfast.dcp.items import Layout, resolved
from holdfast.dcp.writer import StorageWriter, Written, remove_data
from holdfast.errors import Error, of_system
from holdfast.megatron import stock
from holdfast.megatron.group_saves import saves_of
from holdfast.megatron.ticket import Mark, give_up, register, wait_until_written

# Whose step alone changes the memory, as of `holdfast.save_async`; or what gives that at each save.
LateNames = Iterable[Any] | Callable[[], Iterable[Any]]

# Written into the directory by Megatron's finalize functions, behind the commit and without an fsync.
_OF_MEGATRON = ("metadata.json", "integrity.json")
_LAYOUTS_MAX = 4
# By the identity of a plan's items, which a strategy that caches plans hands over again.
_layouts: dict[int, tuple[list[WriteItem], str, Layout]] = {}


def checked(late: Any) -> Any:
    """The names of what is copied late, as an attribute of a writer's class.

    Raises:
        Error: INVALID_ARGUMENT, they are none.
    """
    if callable(late):
        return staticmethod(late)
    if not isinstance(late, Iterable):
        raise Error(
            "INVALID_ARGUMENT",
            f"late={type(late).__name__}: optimizers or tensors are expected, in a list, or a function "
            "that returns them",
        )
    return tuple(late)


class Results(list[WriteResult]):
    """What one rank has written, and of which save.

    Attributes:
        path, attempt: of the save.
        files: all data files of the rank.
    """

    path = ""
    attempt = ""
    files: tuple[str, ...] = ()


class FileSystemWriterAsync(StorageWriter):
    """Megatron's asynchronous writer, by the runtime: one for each save.

    A failure of this rank's part raises nothing in the call: the ranks learn of it together, when they
    finalize the request.
    """

    # What is copied behind the training; see `holdfast.megatron.install`.
    late: LateNames = ()
    # Megatron's planner may then turn local plans into global ones without the coordinator.
    can_run_decentralized_global_plan = True
    results_queue = None
    # Whose writer of that name saves to object storage.
    stock_module = stock.STRATEGIES + "filesystem_async"

    def __new__(cls, path: Any, *args: Any, use_msc: bool = False, **kwargs: Any) -> Any:
        if use_msc or str(path).startswith("msc://"):
            return stock.writer_for_msc(cls.stock_module, path, *args, use_msc=True, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        thread_count: int = 1,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        """A writer for one checkpoint.

        Args:
            path: the checkpoint's directory.
            separation_hint: items whose names begin so go to a file of their own.
            use_msc: the stock writer is made instead.
            thread_count, is_multiproc_io, use_cached_data_structure, use_cpu_shm_for_gpu_tensors,
            *args, **kwargs: how the stock writers work; accepted and not used.
        """
        super().__init__(path)
        self.checkpoint_dir = path
        self.separation_hint = separation_hint
        self.thread_count = thread_count
        self.staged = stock.is_synchronous()  # then a small window of memory is enough
        self.mark = Mark()
        self.written: Written | None = None
        self.failure: BaseException | None = None
        self._group: Any = None
        self._counted = False
        self._hold: weakref.finalize[Any, Any] | None = None
        register(self.mark.ticket, self)

    def join(self, group: Any) -> None:
        """Names the process group whose ranks save; None: all."""
        self._group = group

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._group) if dist.is_initialized() else 1

    # ---- Planning.

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self.rank)

    def prepare_decentralized_global_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's part of the global plan. It is equal in each save, so that plans can be compared."""
        return _with_prefix(plan, self.rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [_with_prefix(plan, rank) for rank, plan in enumerate(plans)]

    # ---- This rank's part.

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Captures what the plan's items name and starts to write it.

        Tensors on a device are ordered into its current stream, but for what `late` names.
        """
        called_ns = time.monotonic_ns()
        if self.failure is not None:
            return
        try:
            self._begin(plan, planner, called_ns)
        except Exception as error:
            self.fail(error)

    def _begin(self, plan: SavePlan, planner: SavePlanner, called_ns: int) -> None:
        saves = saves_of(self._group)
        if not saves.id:
            raise Error(
                "FAILED_PRECONDITION",
                f"save {self.path}: another library's save_state_dict_async_plan has planned it; use "
                "the one that get_async_strategy gives",
            )
        data = [_dequantized(resolved(planner, item)) for item in plan.items]
        for item, value in zip(plan.items, data, strict=True):
            _check_shape(item, value, self.path)
        self._counted = True
        place = saves.next(self.path, self.rank, self.world_size)
        self.save_id = place.attempt
        late = self.late() if callable(self.late) else self.late
        layout = _layout_of(plan.items, self.separation_hint or "")
        written = self.begin(place, layout, data, called_ns, late)
        self.written = written
        self._hold = weakref.finalize(self, give_up, [written.save])
        self._hold.atexit = False
        mark, hold = self.mark, self._hold

        def ended(_: Any) -> None:
            mark.set()
            hold.detach()  # else a failure would keep this object: its traceback has it

        written.save.durable.add_done_callback(ended)

    def fail(self, error: BaseException) -> None:
        """Notes why this rank cannot write; the save goes on on the other ranks, and fails at its end."""
        if not self._counted:
            self._counted = True
            saves_of(self._group).skip()
        if not isinstance(error, Error):
            number = error.errno or 0 if isinstance(error, OSError) else 0
            error = Error("UNKNOWN", f"save {self.path}, rank {self.rank}: {error!r}", number)
        error.__traceback__ = None  # its frames have the state
        self.failure = error
        events.publish_raised(str(self.path), self.step, error, kind="dcp", rank=self.rank, world_size=self.world_size)
        self.mark.set()

    def get_save_function_and_args(self) -> tuple[Callable[..., None], None, list[Any]]:
        """What a request runs: a wait for the end of this rank's part, in any process."""
        return wait_until_written, None, [self.mark.ticket]

    @property
    def has_ended(self) -> bool:
        """Whether this rank's part has ended, well or not."""
        return self.written is None or self.written.save.durable.done()

    def wait(self) -> None:
        """Blocks until this rank's part is durable.

        Raises:
            Error: of this rank's part.
        """
        if self.failure is None and self.written is None:
            self.failure = Error("FAILED_PRECONDITION", f"save {self.path}: its data was never prepared")
        if self.failure is not None:
            raise self.failure
        assert self.written is not None
        self.written.wait()

    def outcome(self) -> BaseException | None:
        """Why this rank's part has failed; None while it has not."""
        if not self.has_ended:
            return None
        try:
            self.wait()
        except Error as error:
            return error
        return None

    def cancel(self) -> None:
        """Gives this rank's part up and removes its files, unless the checkpoint was committed after all."""
        self._release()
        if self.written is None:
            return
        save = self.written.save
        save.durable.seen = True
        with contextlib.suppress(Error):
            save.cancel()
        if save.durable.exception() is None:  # it was durable before
            place = self.written.placement
            files = self.written.layout.files(place.data_file)
            remove_data(place.directory, place.attempt, self.metadata_name(), files, place.manifest)

    def sync_added(self) -> None:
        """Syncs the files that Megatron has added, and their names.

        Raises:
            Error: of the system.
        """
        for name in _OF_MEGATRON:
            with of_system(f"save {self.path}: sync {name}"), contextlib.suppress(FileNotFoundError):
                sync_file(self.path / name)
        with of_system(f"save {self.path}: sync the directory"):
            sync_directory(self.path)

    def _release(self) -> None:
        """From now on the save goes on without this object."""
        if self._hold is not None:
            self._hold.detach()

    # ---- The end.

    def retrieve_write_results(self) -> Results | WRAPPED_EXCEPTION:
        """Waits for this rank's part; returns its results, or the failure as the framework's exceptions hold it."""
        self._release()
        try:
            self.wait()
        except Error as error:
            return _wrap_exception(error)
        assert self.written is not None
        results = Results(self.written.results)
        place = self.written.placement
        results.path, results.attempt = place.directory, place.attempt
        results.files = tuple(self.written.layout.files(place.data_file))
        return results

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Commits the checkpoint; called by the coordinator with the results of all ranks.

        Raises:
            Error: FAILED_PRECONDITION where the ranks have saved different checkpoints, ABORTED, or
                what writing says.
        """
        mine = results[self.rank]
        for rank, other in enumerate(results):
            if (other.path, other.attempt) != (mine.path, mine.attempt):
                raise Error(
                    "FAILED_PRECONDITION",
                    f"save {self.path}: rank {rank} saves {other.path} in the same call; all ranks must "
                    "save the same checkpoints in the same order",
                )
        metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
        files = [name for rank in results for name in rank.files]
        self.complete(metadata, len(results), files, saves_of(self._group).younger(self.path))


def _with_prefix(plan: SavePlan, rank: int) -> SavePlan:
    return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))


def _dequantized(value: Any) -> Any:
    """A tensor that can be written: quantized ones on a device know how to become plain."""
    if isinstance(value, torch.Tensor) and "dequantize" in vars(type(value)):
        if type(value) is not torch.Tensor and _devices.device_of(value.device) is not None:
            return value.dequantize()
    return value


def _check_shape(item: WriteItem, value: Any, path: Path) -> None:
    """Compares a tensor with its plan, which may be that of an earlier save.

    Raises:
        Error: FAILED_PRECONDITION.
    """
    if item.tensor_data is not None and value.shape != item.tensor_data.chunk.sizes:
        raise Error(
            "FAILED_PRECONDITION",
            f"save {path}: {item.index.fqn} has the shape {list(value.shape)}, and its plan "
            f"{list(item.tensor_data.chunk.sizes)}; was the plan of another structure kept?",
        )


def _layout_of(found: list[WriteItem], apart: str) -> Layout:
    known = _layouts.get(id(found))
    if known is not None and known[0] is found and known[1] == apart:
        return known[2]
    layout = Layout(found, apart)
    _layouts[id(found)] = (found, apart, layout)
    while len(_layouts) > _LAYOUTS_MAX:
        del _layouts[next(iter(_layouts))]
    return layout
