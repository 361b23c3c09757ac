"""Objects in a checkpoint, made here and serialized anew for the framework's planner.

The planner unpickles an object itself, with everything allowed. A check in front of it would have to
read the bytes exactly as it does. So the planner never gets those bytes: the object is made through
the allow-list, and what ``torch.save`` writes of it goes to the planner.
"""

from __future__ import annotations

import io
import math
from typing import Any

import torch

from holdfast import _unpickle
from holdfast._constructors import CONSTRUCTORS, STATES, Constructor, Pickle, require
from holdfast.dcp import records
from holdfast.errors import Error


def _integers(numbers: Any) -> bool:
    return isinstance(numbers, tuple) and all(type(n) is int and n >= 0 for n in numbers)


def _check_place(storage: Any, offset: Any, size: Any, stride: Any, itemsize: int) -> None:
    """A tensor's elements lie in its storage, or the storage would grow to hold them."""
    require(type(storage) is torch.storage.TypedStorage, "a tensor of no storage")
    require(_integers((offset,)) and _integers(size) and _integers(stride), "a tensor's place")
    require(len(size) == len(stride), "a tensor's strides")
    if all(size):
        end = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        require(end * itemsize <= storage._untyped_storage.nbytes(), "a tensor beyond its storage")


def _tensor(pickle: Pickle, storage: Any, offset: Any, size: Any, stride: Any) -> Any:
    _check_place(storage, offset, size, stride, storage.dtype.itemsize)
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _tensor_v2(pickle: Pickle, storage: Any, offset: Any, size: Any, stride: Any,
               requires_grad: Any, hooks: Any, *rest: Any) -> Any:  # fmt: skip
    _check_place(storage, offset, size, stride, storage.dtype.itemsize)
    return torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, _no_hooks(hooks), *rest)


def _tensor_v3(pickle: Pickle, storage: Any, offset: Any, size: Any, stride: Any,
               requires_grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Any:  # fmt: skip
    require(isinstance(dtype, torch.dtype), "a tensor of no dtype")
    _check_place(storage, offset, size, stride, dtype.itemsize)
    return torch._utils._rebuild_tensor_v3(storage, offset, size, stride, requires_grad, _no_hooks(hooks), dtype, *rest)


def _no_hooks(hooks: Any) -> Any:
    require(not hooks, "a tensor with hooks")
    return hooks


def _parameter(pickle: Pickle, data: Any, requires_grad: Any = True, hooks: Any = None) -> Any:
    require(isinstance(data, torch.Tensor), "a parameter of no tensor")
    parameter = torch.nn.Parameter(data, bool(requires_grad))
    parameter._backward_hooks = _no_hooks(hooks)
    return parameter


def _parameter_with_state(pickle: Pickle, data: Any, requires_grad: Any, hooks: Any,
                          state: Any) -> Any:  # fmt: skip
    pickle.check_names(state)
    return torch._utils._set_obj_state(_parameter(pickle, data, requires_grad, hooks), state)


def _sparse(pickle: Pickle, layout: Any, data: Any) -> Any:
    """A sparse tensor whose indices are in its shape: those of others are read out of bounds."""
    require(type(data) is tuple, "a sparse tensor")
    tensors = [part for part in data if isinstance(part, torch.Tensor)]
    pickle.charge_copy(sum(tensor.numel() for tensor in tensors))
    if layout is torch.sparse_coo:
        indices, values, size, *rest = data
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=rest[0] if rest else None
        )
    outer, inner, values, size = data
    return torch.sparse_compressed_tensor(outer, inner, values, size, layout=layout, check_invariants=True)


def _quantized(pickle: Pickle, storage: Any, offset: Any, size: Any, stride: Any,
               quantizer: Any, requires_grad: Any, hooks: Any) -> Any:  # fmt: skip
    _check_place(storage, offset, size, stride, storage.dtype.itemsize)
    pickle.charge_copy(math.prod(size))  # elements are allocated before they are set
    return torch._utils._rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, _no_hooks(hooks))


def _from_type(pickle: Pickle, function: Any, cls: Any, args: Any, state: Any) -> Any:
    """A tensor of another class, or with attributes."""
    require(isinstance(cls, type) and issubclass(cls, torch.Tensor), "a tensor's class")
    pickle.check_names(state)
    made = pickle.call(function, args)
    require(isinstance(made, torch.Tensor), "a tensor of no tensor")
    return torch._tensor._rebuild_from_type_v2(lambda: made, cls, (), state)


def _generator(pickle: Pickle, device: Any) -> Any:
    require(isinstance(device, torch.device), "a generator without a device")
    return torch.Generator(device)


def _set_generator(pickle: Pickle, generator: Any, state: Any) -> None:
    seed, offset, values = state
    require(type(seed) is int and (offset is None or type(offset) is int), "a generator's seed")
    require(type(values) is torch.Tensor and values.dtype == torch.uint8, "a generator's state")
    generator.__setstate__(state)


# Inside of an object: tensors and their like, and dtypes by the names of their storages.
_TENSORS: dict[str, Constructor | None] = {
    "torch._utils:_rebuild_tensor": _tensor,
    "torch._utils:_rebuild_tensor_v2": _tensor_v2,
    "torch._utils:_rebuild_tensor_v3": _tensor_v3,
    "torch._utils:_rebuild_parameter": _parameter,
    "torch._utils:_rebuild_parameter_with_state": _parameter_with_state,
    "torch._utils:_rebuild_sparse_tensor": _sparse,
    "torch._utils:_rebuild_qtensor": _quantized,
    "torch._tensor:_rebuild_from_type_v2": _from_type,
    "torch.nn.parameter:Parameter": _parameter,
    "torch:Tensor": None,
    "torch._C:Generator": _generator,
    "torch.storage:UntypedStorage": None,
    "torch.storage:TypedStorage": None,
    **{f"torch:{cls.__name__}": None for cls in torch._storage_classes},
}


class _ObjectUnpickler(_unpickle.Unpickler):
    """Makes what ``torch.save`` wrote, from the archive's records."""

    constructors = {**CONSTRUCTORS, **_TENSORS}
    states = {**STATES, torch.Generator: _set_generator}

    def __init__(self, archive: records.Archive, operation: str, allow: frozenset[str]) -> None:
        super().__init__(archive.record("data.pkl"), operation, allow)
        self._archive = archive
        self._storages: dict[str, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        require(type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage", "a persistent id")
        _, cls, key, location, count = pid[:5]
        require(cls in torch._storage_classes and type(key) is str, "a storage")
        if cls is torch.UntypedStorage:
            dtype = torch.uint8
        else:
            dtype = torch.storage._get_dtype_from_pickle_storage_type(cls.__name__)
        if key not in self._storages:
            data = bytearray(self._archive.record(f"data/{key}"))
            require(count * dtype.itemsize == len(data), f"{count} elements in {len(data)} bytes")
            memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
            storage = torch.serialization.default_restore_location(memory.untyped_storage(), location)
            self._storages[key] = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        return self._storages[key]


def resaved(data: io.BytesIO, entry: str, allow: frozenset[str]) -> io.BytesIO:
    """The bytes of an object as ``torch.save`` writes it here, whatever its own bytes are.

    Raises:
        Error: PERMISSION_DENIED naming all that it needs, DATA_LOSS for what cannot be read.
    """
    operation = f"load {entry}"
    try:
        archive = records.Archive(_reader(data), data.getbuffer().nbytes)
        unpickler = _ObjectUnpickler(archive, operation, allow)
    except records.NotPlain as error:
        raise Error(
            "PERMISSION_DENIED",
            f"{operation}: not what torch.save makes of an object: {error}; if you trust this "
            "checkpoint, pass trust=True",
        ) from error
    value = _unpickle.run(unpickler, operation)
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except RecursionError:
        raise Error("DATA_LOSS", f"{operation}: it is nested too deeply") from None
    out.seek(0)
    return out


def _reader(data: io.BytesIO) -> records.ReadAt:
    view = data.getbuffer()
    return lambda offset, nbytes: bytes(view[offset : offset + nbytes])
