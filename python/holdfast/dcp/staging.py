"""Staged copies of states in shared memory: capped, reused, never reused too early.

DCP's own ``async_save`` stages a state before it plans and hands the copy on, to a thread or, with
tensors by reference, to a process of its own. Nothing tells the stager when that copy is no longer
needed, so the copy itself does: its tensors lie in one storage, and while any of them lives, in the
upload's hands, its memory is held. The upload lets go of them when its writer has returned, and the
writer returns when the worker was joined; in process mode, when the other process has answered or
is gone.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast import _arguments, _runtime, events
from holdfast._process import PerProcess
from holdfast._tensor_kinds import why_no_storage
from holdfast.errors import Error, of_system

# A staged copy is stable, so it streams through this much of the runtime's staging memory.
WINDOW_BYTES = 64 << 20
_ALIGNMENT = 64
_PAGE = 4096
_ANY_STATE = 1 << 62  # bytes: as much as one process may take
_GRACE = 0.25  # seconds until a lack of memory is an error


class _Block:
    """Shared memory for one staged state at a time."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        with of_system(f"stage {nbytes} bytes: make shared memory"):
            self.fd = os.memfd_create("holdfast-staged", os.MFD_CLOEXEC)
            try:
                os.ftruncate(self.fd, nbytes)  # a limit of file sizes is one of such memory, too
            except OSError:
                os.close(self.fd)
                raise
        self._lease: StorageWeakRef | None = None

    @property
    def is_free(self) -> bool:
        """Whether no tensor lies in it any more."""
        return self._lease is None or self._lease.expired()

    def lease(self) -> torch.UntypedStorage:
        """A storage over it; the block is free again once nobody refers to that."""
        with of_system(f"stage {self.nbytes} bytes: share memory"):
            fd = os.dup(self.fd)
        try:
            storage = torch.UntypedStorage._new_shared_fd_cpu(fd, self.nbytes)  # type: ignore[attr-defined]
        except RuntimeError as error:  # it duplicates the descriptor, too
            raise Error("RESOURCE_EXHAUSTED", f"stage {self.nbytes} bytes: {error}") from error
        finally:
            os.close(fd)
        self._lease = StorageWeakRef(storage)
        return storage

    def close(self) -> None:
        os.close(self.fd)


class _Memory(PerProcess):
    """The blocks of this process. In a forked child they are the parent's, and so is what becomes of them."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        super().__init__()

    def clear(self) -> None:
        for block in self.blocks:
            block.close()
        self.blocks = []


_memory = _Memory()


def held_bytes() -> int:
    """Shared memory that staged states hold now."""
    with _memory.lock:
        return sum(b.nbytes for b in _memory.blocks if not b.is_free)


def kept_bytes() -> int:
    """Shared memory that is kept, held or not."""
    with _memory.lock:
        return sum(b.nbytes for b in _memory.blocks)


def trim() -> None:
    """Gives back what no staged state holds."""
    with _memory.lock:
        for block in [b for b in _memory.blocks if b.is_free]:
            _memory.blocks.remove(block)
            block.close()


def _cap(given: int | None) -> int:
    fixed = given or _runtime.fixed_arena_bytes(_runtime.default.options)
    return fixed or _runtime.default_arena_bytes(_ANY_STATE, kept_bytes())


def _take(nbytes: int, cap: int) -> torch.UntypedStorage:
    """Leases memory, from the blocks that are there or new."""
    nbytes = max(_PAGE, -(-nbytes // _PAGE) * _PAGE)
    deadline = time.monotonic() + _GRACE
    while True:
        storage, held = _try_to_take(nbytes, cap)
        if storage is not None:
            return storage
        if not held or time.monotonic() > deadline:
            break
        # The framework's thread lets go of a state a moment after it said that it is saved, and
        # an error's traceback only when it is collected.
        gc.collect()
        time.sleep(0.01)
    raise Error(
        "RESOURCE_EXHAUSTED",
        f"stage {nbytes} bytes: {held} bytes are held by uploads that go on, and the cap is {cap}; "
        f"set staging_bytes_max to {held + nbytes} or more, wait for the uploads, or use "
        "holdfast.dcp.async_save, which streams",
    )


def _try_to_take(nbytes: int, cap: int) -> tuple[torch.UntypedStorage | None, int]:
    """A lease, or None and how much is held."""
    with _memory.lock:
        free = sorted((b for b in _memory.blocks if b.is_free), key=lambda b: b.nbytes)
        for block in free:
            # A block that is much too large would keep the cap from being used by others.
            if nbytes <= block.nbytes <= 2 * nbytes:
                return block.lease(), 0
        held = sum(b.nbytes for b in _memory.blocks if b not in free)
        if held + nbytes > cap:
            return None, held
        for block in free:  # smallest first: what is too small, and what does not fit beside
            if block.nbytes < nbytes or sum(b.nbytes for b in _memory.blocks) + nbytes > cap:
                _memory.blocks.remove(block)
                block.close()
        block = _Block(nbytes)
        _memory.blocks.append(block)
        return block.lease(), 0


class _Copy:
    """The walk over a state: what must be copied, then the copy."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[Any, ...], tuple[torch.Tensor, int]] = {}
        self.nbytes = 0
        self.storage: torch.UntypedStorage | None = None

    @staticmethod
    def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
        return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
                str(tensor.device), tensor.is_conj(), tensor.is_neg())  # fmt: skip

    @staticmethod
    def _is_plain(value: Any) -> bool:
        return (
            type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.layout == torch.strided
            and not value.is_quantized
            and value.device.type != "meta"
        )

    def count(self, value: Any, path: str = "") -> None:
        """Collects the tensors; `path`, with a dot behind it, is that of `value`."""
        if self._is_plain(value):
            if why := why_no_storage(value):
                raise Error("INVALID_ARGUMENT", f"stage {path[:-1]}: {why}")
            tensor = value.detach()
            key = self._key(tensor)
            if key not in self.tensors:
                self.tensors[key] = (tensor, self.nbytes)
                self.nbytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        elif isinstance(value, DTensor):
            self.count(value._local_tensor, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.count(item, f"{path}{key}.")
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self.count(item, f"{path}{i}.")

    def fill(self) -> None:
        """Copies every tensor once to its place."""
        for key, (tensor, offset) in self.tensors.items():
            place = self._view(tensor, offset)
            with torch.no_grad():
                place.copy_(tensor)
            self.tensors[key] = (place, offset)

    def _view(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        assert self.storage is not None
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
        strides = torch.empty(tensor.shape, device="meta").stride()
        return empty.set_(self.storage, offset // tensor.itemsize, tensor.shape, strides)

    def build(self, value: Any) -> Any:
        if self._is_plain(value):
            return self.tensors[self._key(value.detach())][0]
        if isinstance(value, DTensor):
            local = self.build(value._local_tensor)
            # A DTensor that is made from a tensor with a storage offset takes the offset over. Its
            # address is then not 0, so that pickling takes it for a tensor with memory of its own,
            # and crashes. It is made from one without, and given its memory afterwards.
            stand_in = torch.empty((), dtype=local.dtype, device=local.device).expand(local.shape)
            # Not by from_local, which would move it to the mesh's device, all of it.
            copied = DTensor(stand_in, value._spec, requires_grad=False)
            copied._local_tensor = local
            return copied
        if isinstance(value, dict):
            built = {k: self.build(v) for k, v in value.items()}
            if type(value) is dict:
                return built
            clone = copy.copy(value)
            dict.update(clone, built)  # that of a Counter adds
            return clone
        if isinstance(value, (list, tuple)):
            items = [self.build(v) for v in value]
            if hasattr(value, "_fields"):
                return type(value)(*items)
            return type(value)(items) if type(value) in (list, tuple) else copy.deepcopy(value)
        if isinstance(value, torch.Tensor):
            # Of a kind that is no plain memory: private copies, outside of the shared memory.
            return value.detach().to("cpu", copy=True)
        return copy.deepcopy(value)


def stage(state_dict: STATE_DICT_TYPE, bytes_max: int | None = None) -> STATE_DICT_TYPE:
    """A copy of a state whose tensors lie in shared memory, in the host.

    Args:
        state_dict: nested dicts, lists and tuples of tensors and whatever can be deep-copied.
        bytes_max: cap of what all staged states of this process hold together.

    Raises:
        Error: RESOURCE_EXHAUSTED, at once, naming the cap that would be needed; INVALID_ARGUMENT for a tensor whose memory was freed.
    """
    walk = _Copy()
    walk.count(state_dict)
    if walk.nbytes:
        walk.storage = _take(walk.nbytes, _cap(bytes_max))
        walk.fill()
    return walk.build(state_dict)


class Stager:
    """Tells `holdfast.dcp.async_save` to answer with both futures; a stager for the stock one, too.

    Under `holdfast.dcp.async_save` nothing is staged here: tensors are copied straight to their
    places in the files. ``staging_completion`` ends when all copies have ended. Only
    tensors that `late` names must stay unchanged until then.
    """

    _synchronize_after_execute = False

    @_arguments.checked
    def __init__(self, config: StagingOptions | None = None, late: Iterable[Any] = (), *,
                 staging_bytes_max: int | None = None) -> None:  # fmt: skip
        """A stager; close it after the last save.

        Args:
            config: of the framework's stagers. Without asynchronous staging a save answers with one
                future. What else it says is not needed: the staging memory is pinned and shared.
            late: optimizers, or tensors, whose GPU memory is copied behind forward and backward,
                as of `holdfast.save_async`. All other GPU tensors are ordered into the current
                stream at once.
            staging_bytes_max: cap under the stock ``async_save``, as of `StorageWriter`.
        """
        self.options = config if config is not None else StagingOptions()
        self.late = tuple(late)
        self._staging_bytes_max = staging_bytes_max

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        """For the stock ``async_save``: a copy in shared memory, as a future that is done.

        Without asynchronous staging it is the copy itself.
        """
        try:
            staged = stage(state_dict, self._staging_bytes_max)
        except Error as error:
            events.publish_raised("", 0, error, kind="dcp")  # a stager is not told the path
            raise
        if not self.options.use_async_staging:
            return staged
        future: Future[STATE_DICT_TYPE] = Future()
        future.set_result(staged)
        return future

    def synchronize_staging(self) -> None:
        """Does nothing: `stage` returns when everything was copied."""

    def close(self) -> None:
        """Gives back the shared memory that no upload uses."""
        trim()
