"""Moving the tensors of a nested state to host memory, by storages and without a copy on the device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import numbers
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from holdfast._tensor_kinds import why_no_storage
from holdfast.errors import Error

# Values that hold no tensors.
_PLAIN = (
    type(None), str, bytes, bytearray, numbers.Number, enum.Enum, torch.Size, torch.dtype, torch.device,
    torch.layout, range, slice, type,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A custom object that stayed as it is: where, and of which class."""

    path: str
    kind: str


class Move:
    """One walk over states: what is met twice, is moved once.

    Attributes:
        tensors: how many were moved.
        bytes_freed: of device storages that the state no longer refers to.
        skipped: the custom objects.

    Args:
        stays: types of the devices whose tensors are not moved.
    """

    def __init__(self, stays: Collection[str] = ("cpu", "meta")) -> None:
        self._stays = stays
        self.tensors = 0
        self.bytes_freed = 0
        self.skipped: list[Skipped] = []
        # By identity; the originals are kept, so that no identity is used again.
        self._done: dict[int, tuple[Any, Any]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._open: set[int] = set()  # tuples that the walk is in
        self._devices: set[torch.device] = set()

    def moved(self, value: Any, path: str) -> Any:
        """A copy of a state, with its device tensors in host memory once `finish` has returned."""
        if isinstance(value, ShardedTensor):
            return self._once(value, lambda: self._sharded(value))
        if isinstance(value, torch.Tensor):
            return self._once(value, lambda: self._tensor(value, path))
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, list):
            new = copy.copy(value)
            self._done[id(value)] = value, new
            new[:] = [self.moved(item, f"{path}.{i}") for i, item in enumerate(value)]
            return new
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        if (type(value) is tuple or is_named) and id(value) not in self._open:
            return self._tuple(value, path, is_named)
        if not isinstance(value, (set, frozenset)) or not all(isinstance(v, _PLAIN) for v in value):
            kind = type(value)
            self.skipped.append(Skipped(path, f"{kind.__module__}.{kind.__qualname__}"))
        return value

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """What is moved inside counts, unless an exception ends it."""
        before = self.tensors, self.bytes_freed, len(self.skipped)
        try:
            yield
        except BaseException:
            self.tensors, self.bytes_freed, skipped = before
            del self.skipped[skipped:]
            raise

    def finish(self) -> None:
        """Blocks until the copies have ended."""
        for device in self._devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        self._devices.clear()

    def _once(self, value: Any, make: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = value, make()
        return self._done[id(value)][1]

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        new = copy.copy(value)  # of the same class, with its attributes
        self._done[id(value)] = value, new
        for key, item in value.items():
            new[key] = self.moved(item, f"{path}.{key}")
        return new

    def _tuple(self, value: Any, path: str, is_named: bool) -> Any:
        self._open.add(id(value))
        try:
            items = [self.moved(item, f"{path}.{i}") for i, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        new = type(value)(*items) if is_named else tuple(items)
        self._done[id(value)] = value, new
        return new

    # ---- Tensors.

    def _tensor(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            if local.device.type in self._stays:
                return tensor
            # Not by `from_local`, which moves the part to the mesh's device.
            whole = DTensor(self._tensor(local, path), tensor._spec, requires_grad=tensor.requires_grad)
            return self._as(tensor, whole)
        if tensor.device.type in self._stays:
            return tensor
        self.tensors += 1
        if not _is_plain(tensor):
            self.bytes_freed += tensor.nbytes if tensor.layout == torch.strided else 0
            return self._as(tensor, tensor.detach().cpu())
        if why := why_no_storage(tensor):
            raise Error("INVALID_ARGUMENT", f"save {path}: {why}")
        with torch._C.DisableTorchFunctionSubclass():
            storage = self._storage(tensor.detach().untyped_storage(), tensor.device)
            new = torch.empty(0, dtype=tensor.dtype, device="cpu")
            new.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
            # A conjugated or negated view of the same bytes.
            new = new.conj() if tensor.is_conj() else new
            new = torch._neg_view(new) if tensor.is_neg() else new
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                new = new.as_subclass(type(tensor))
        return self._as(tensor, new)

    def _as(self, tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The copy with what torch.save writes of a tensor beside its values."""
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
        else:
            new.requires_grad_(tensor.requires_grad)
        for name, value in vars(tensor).items():
            vars(new).setdefault(name, value)  # a subclass that wraps others has its own by now
        return new

    def _storage(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        key = storage._cdata
        if key not in self._storages:
            nbytes = storage.nbytes()
            pinned = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
            # In the order of the current stream, which has what has changed the tensors last.
            pinned.untyped_storage().copy_(storage, non_blocking=True)
            self._storages[key] = storage, pinned.untyped_storage()
            if device.type != "cpu":
                self._devices.add(device)
            self.bytes_freed += nbytes
        return self._storages[key][1]

    def _sharded(self, tensor: Any) -> Any:
        shards = [s.tensor for s in tensor.local_shards() if s.tensor.device.type not in self._stays]
        if not shards:
            return tensor
        self.tensors += 1
        self.bytes_freed += sum(shard.nbytes for shard in shards)
        return tensor.cpu()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a place in a storage, with attributes and a class at most."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
