"""`LocalCheckpointManager`: nvidia-resiliency-ext's local checkpoints, by `holdfast.save_file`."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack, to_dlpack

from holdfast._tensor_kinds import as_bytes, in_memory, why_no_storage
from holdfast.directories import verify
from holdfast.errors import Error
from holdfast.files import remove_file, save_file
from holdfast.handle import Save
from holdfast.megatron import stock
from holdfast.nvrx.file_saves import FileSaves
from holdfast.recovery import recover

logger = logging.getLogger("holdfast.nvrx")

_PACKAGE = "nvidia_resiliency_ext.checkpointing."
_Base: Any = stock.get(_PACKAGE + "local.ckpt_managers.local_manager", "LocalCheckpointManager")
_Request: Any = stock.get(_PACKAGE + "async_ckpt.core", "AsyncRequest")
_Failure: Any = stock.get(_PACKAGE + "local.ckpt_managers.base_manager", "CheckpointingException")
_debug_time: Any = stock.get(_PACKAGE + "utils", "debug_time")

_DIGITS = 7  # of an iteration in the name of a file
_WHOLE = re.compile(r"iter_(\d+)_(\d+)_local\.pt")
_NAME = re.compile(r"iter_(\d+)_(\d+)_local.*\.pt")  # also of what the stock manager has not finished

CkptID = tuple[int, int, Any]  # iteration, rank, session


class LocalCheckpointManager(_Base):  # type: ignore[misc]
    """Saves each rank's checkpoint as a file of its own, on a disk of the node.

    Constructor, methods, replication and files are those of nvidia-resiliency-ext's class. It differs:

    - The state is captured in `save`, where it lies. Nothing is forked, and a request can be pickled,
      so that it may be scheduled in a persistent queue, too.
    - A file has its name when it is durable. `find_latest` counts a file that its digests do not
      prove as missing, and logs why: an older iteration, or a replica, is loaded.
    - Older iterations are removed when the newer one is durable on all ranks. A save that fails on
      some rank raises its reason on all of them, and leaves the older iterations.
    - What a killed job has left does not hinder the next one, and is never mixed with its files.
    """

    def __init__(self, root_local_ckpt_dir: Any, session_id: str = "", repl_strategy: Any = None) -> None:
        """A manager of the checkpoints below ``root_local_ckpt_dir/session_id/RANK``.

        Args:
            root_local_ckpt_dir: on a file system of the node.
            session_id: tells workloads apart that share the directory.
            repl_strategy: replicates what is saved, and fetches what is missing.
        """
        super().__init__(root_local_ckpt_dir, session_id, repl_strategy)
        self._damaged: set[CkptID] = set()
        self._whole = -1  # the newest iteration that was found or made whole on all ranks
        self._is_recovered = False

    # ---- Saving.

    @_debug_time("LocalCheckpointManager.save", logger)
    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Saves the state of an iteration; all ranks call it.

        Args:
            state_dict: a ``TensorAwareStateDict``. It may be changed when the call returns.
            iteration: higher than that of the newest checkpoint.
            is_async: return a request, for any queue or for `execute_sync`.

        Returns:
            The request, or None.

        Raises:
            CheckpointingException: no such state or iteration. What fails on one rank is raised on all
                of them: here, or when the request is finalized.
        """
        self._check(state_dict, iteration)
        self.latest_iteration = -1
        again = iteration == self._whole
        saves = FileSaves(f"local checkpoint {iteration}", keep=again)
        for ckpt_id, state in self._copies(state_dict, iteration, saves):
            saves.begin(functools.partial(self._save, state, ckpt_id, again))

        @_debug_time("finalize_fn", logger)
        def finalize_fn() -> None:
            self._finish(saves, iteration, is_async, again)

        if is_async:
            return saves.request(_Request, [finalize_fn])
        finalize_fn()
        return None

    def _check(self, state: Any, iteration: Any) -> None:
        what = f"save local checkpoint {iteration!r}"
        if not hasattr(state, "copy_tensors_to_cpu"):
            raise _Failure(
                f"{what}: a {type(state).__name__} is no TensorAwareStateDict; pass one, as "
                "BasicTensorAwareStateDict(state)"
            )
        if not hasattr(iteration, "__index__") or not 0 <= iteration < 10**_DIGITS:
            raise _Failure(f"{what}: an iteration is a number from 0 to {10**_DIGITS - 1}")
        if iteration <= self.latest_iteration:
            raise _Failure(f"{what}: {self.latest_iteration} is there, and is not older; save a higher one")

    def _copies(self, state: Any, iteration: int, saves: FileSaves) -> Iterable[tuple[CkptID, Any]]:
        """What this rank writes: its own state, and those that it replicates."""
        own = self._ckpt_id(iteration)
        if self.repl_strategy is None:
            saves.begin(lambda: _compact(state))
            return [(own, state)]
        states, ids = self.repl_strategy.replicate(state, own)
        copies = dict(zip(ids, states, strict=True))
        saves.begin(lambda: _to_cpu(copies[own]))  # replicas are there already
        return copies.items()

    def _save(self, state_dict: Any, ckpt_id: CkptID, again: bool = False) -> Save:
        """Captures a state and begins to write its file.

        Args:
            again: the iteration is whole: its file stays until the new one is durable.
        """
        path = self._local_ckpt_path_from_id(ckpt_id)
        self._damaged.discard(ckpt_id)
        # Of a run that was abandoned: with files of this run on other ranks it would look complete.
        if not again and path.exists():
            remove_file(path)
        return save_file(state_dict, path, step=ckpt_id[0])

    def _finish(self, saves: FileSaves, iteration: int, is_async: bool, again: bool) -> None:
        """Compares what the ranks have, and removes older iterations; all ranks call it.

        Raises:
            CheckpointingException: the iteration is not complete, or it was before and some rank has
                no new file of it.
        """
        failure = saves.wait()
        told = _gathered((str(failure) if failure is not None else "", self._available()))
        reasons = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text)
        complete = _complete([ids for _, ids in told])
        self.latest_iteration = -1
        if iteration not in complete or (again and reasons):
            if not again:
                self._cleanup_failed_save(iteration)
            left = [each for each in complete if each <= iteration]
            raise _Failure(
                f"save local checkpoint {iteration}: {reasons or 'files of some rank are missing'}; the newest is "
                f"{f'that of iteration {max(left)}' if left else 'none'}"
            ) from failure
        self._whole = iteration
        if reasons:
            logger.error("save local checkpoint %d: replicas are missing, older iterations stay: %s", iteration, reasons)
            return
        if not is_async:
            self._cleanup(iteration)
            return
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holdfast-local")
        executor.submit(self._cleanup, iteration)
        executor.shutdown(wait=False)

    # ---- Removing.

    def _cleanup(self, iteration: int) -> None:
        """Removes iterations before one that all ranks have."""
        self._remove_files(lambda ckpt_id: ckpt_id[0] < iteration)

    def _cleanup_failed_save(self, iteration: int) -> None:
        """Removes the files of one iteration."""
        self._remove_files(lambda ckpt_id: ckpt_id[0] == iteration)

    def _remove_files(self, which: Callable[[CkptID], bool]) -> None:
        """Removes files, and what the stock manager has not finished of them. An error is logged."""
        for path in self._files():
            named = _NAME.fullmatch(path.name)
            if named is None or not which((int(named[1]), int(named[2]), self.session_id)):
                continue
            try:
                remove_file(path)
            except Error as error:
                logger.warning("remove local checkpoint %s: %s", path, error)

    def _files(self) -> list[Path]:
        """What is in this rank's directory; nothing where it cannot be listed, and the log says why."""
        try:
            self._ensure_dir()
            return sorted(self.local_ckpt_dir.iterdir())
        except OSError as error:
            logger.warning("list local checkpoints in %s: %s", self.local_ckpt_dir, error)
            return []

    # ---- Finding and loading.

    @_debug_time("LocalCheckpointManager.find_latest", logger)
    def find_latest(self) -> int:
        """The newest iteration that is whole on all ranks, in its own file or a replica; -1: there is none.

        All ranks call it. It finishes what a killed job has left, and compares the files of the
        iteration with their digests.
        """
        if self.latest_iteration != -1:
            return int(self.latest_iteration)
        self._recover()
        checked = -1
        while True:
            self.globally_available_ids = _gathered(self._available())
            newest = max(_complete(self.globally_available_ids), default=-1)
            if newest in (-1, checked):
                self.latest_iteration = self._whole = newest
                return newest
            checked = newest
            self._damaged |= {each for each in self._available() if each[0] == newest and not self._is_sound(each)}

    def load(self) -> tuple[Any, CkptID]:
        """Loads the iteration that `find_latest` has found; all ranks call it.

        Newer files, which are damaged or not there on all ranks, are removed: the training is about to
        make those iterations anew.

        Returns:
            The state, on the devices that it was saved from, and its id.

        Raises:
            CheckpointingException: `find_latest` was not called, or the file cannot be loaded.
        """
        loaded = super().load()
        self._remove_files(lambda ckpt_id: ckpt_id[0] > loaded[1][0])
        return loaded  # type: ignore[no-any-return]

    def _my_ckpt_ids(self) -> list[CkptID]:
        names = (_WHOLE.fullmatch(path.name) for path in self._files())
        return [(int(named[1]), int(named[2]), self.session_id) for named in names if named is not None]

    def _available(self) -> list[CkptID]:
        """The files that this rank can load or send."""
        found = [each for each in self._my_ckpt_ids() if each not in self._damaged]
        return found if self.repl_strategy is not None else [each for each in found if each[1] == self.rank]

    def _recover(self) -> None:
        if self._is_recovered or not self._files():
            return
        self._is_recovered = True
        try:
            recover(self.local_ckpt_dir)
        except Error as error:
            logger.warning("%s", error)

    def _is_sound(self, ckpt_id: CkptID) -> bool:
        path = self._local_ckpt_path_from_id(ckpt_id)
        try:
            report = verify(path)
        except Error as error:
            logger.warning("local checkpoint %s: counts as missing: %s", path, error)
            return False
        is_sound = report["verdict"] == "sound"
        if not is_sound:
            faults = report["faults"][:1] or ""
            logger.warning("local checkpoint %s: counts as missing: %s %s", path, report["verdict"], faults)
        return bool(is_sound)

    def _load(self, ckpt_id: CkptID) -> Any:
        path = Path(self._local_ckpt_path_from_id(ckpt_id))
        try:
            return torch.load(path, map_location=_to_this_device, weights_only=False)
        except FileNotFoundError as error:
            raise _Failure(
                f"load local checkpoint {path}: it is gone since find_latest(); call that again on all ranks"
            ) from error
        except Exception as error:
            raise _Failure(f"load local checkpoint {path}: {error}") from error


def _gathered(mine: Any) -> list[Any]:
    """What all ranks pass, by rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    return of_all


def _complete(ids_of_ranks: list[list[CkptID]]) -> list[int]:
    """The iterations of which some rank has the file of every rank."""
    ranks: dict[int, set[int]] = {}
    for ids in ids_of_ranks:
        for iteration, rank, _ in ids:
            ranks.setdefault(iteration, set()).add(rank)
    return [iteration for iteration, found in ranks.items() if found == set(range(len(ids_of_ranks)))]


def _compact(state: Any) -> None:
    """Makes a state's tensors ones that a file can hold by themselves; their memory stays where it is.

    A file has whole storages. A shard is often a small part of the buffer of all parameters.
    """
    try:
        tensors = list(state.pop_tensors())
    except NotImplementedError:
        _to_cpu(state)
        return
    try:
        dtypes: dict[int, torch.dtype] = {}
        tensors = [_alone(tensor.detach(), dtypes) for tensor in tensors]
    finally:
        state.insert_tensors(tensors)  # also where one has failed: the training goes on with them


def _alone(tensor: torch.Tensor, dtypes: dict[int, torch.dtype]) -> torch.Tensor:
    """A tensor over the same memory, whose storage has nothing else; a copy if that memory is not what a file would have.

    Args:
        tensor: of any kind.
        dtypes: of earlier ones, by address: a file has one dtype for each storage.
    """
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or why_no_storage(tensor):
        return tensor  # the last is refused by name
    if not tensor.nbytes or dtypes.setdefault(tensor.data_ptr(), tensor.dtype) != tensor.dtype:
        return tensor.clone()
    if tensor.untyped_storage().nbytes() == tensor.nbytes and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    memory = in_memory(tensor)
    if memory.data_ptr() != tensor.data_ptr() or memory.untyped_storage().nbytes() == memory.nbytes:
        return memory
    # By its bytes: not every dtype can be exchanged.
    return from_dlpack(to_dlpack(as_bytes(memory))).view(memory.dtype).view(memory.shape)


def _to_cpu(state: Any) -> None:
    state.copy_tensors_to_cpu(non_blocking=True)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _to_this_device(storage: Any, location: str) -> Any:
    """A rank may have another GPU than the one that has saved."""
    return storage.cuda() if location.startswith("cuda") else None
