"""What a pickle's names make: constructors with checked arguments in the place of the real ones.

A real constructor trusts its caller. ``numpy.ndarray`` makes object pointers of given bytes, and
``bytearray(8 << 30)`` takes 8 GiB of memory for 30 bytes of pickle. Here arguments are plain values
that were in the pickle, and every copy of them is charged to a pickle.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import math
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ITEMS = (list, tuple, set, frozenset)
_FRACTION_BITS_MAX = 1 << 16
_DTYPE = re.compile(r"[biufcSUVMmO]\d+")
_UNIT = re.compile(r"[A-Za-z]{1,2}")
_ALIGNED_STRUCT = 0x80  # NPY_ALIGNED_STRUCT


class Pickle(Protocol):
    """The pickle that a constructor is called by."""

    def charge_copy(self, count: int) -> None:
        """Charges bytes or items that are copied: a pickle bounds by its length what it makes."""

    def charge_keys(self, keys: Any) -> None:
        """Charges the hashes of keys."""

    def call(self, function: Any, args: Any) -> Any:
        """Calls what the list has."""

    def check_names(self, state: Any) -> None:
        """Refuses attributes that are methods."""

    def storage_of(self, data: bytes) -> Any:
        """Makes the storage that ``torch.save`` wrote into bytes, and nothing else that is there."""


Constructor = Callable[..., Any]


class Refused(Exception):
    """Arguments or a state that the real constructor never put into a pickle."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Refused(what)


def _plain(make: Callable[..., Any], *also: type) -> Constructor:
    """Takes plain values only, and those of `also`."""

    def constructor(pickle: Pickle, *args: Any) -> Any:
        require(all(type(a) in _PLAIN or isinstance(a, also) for a in args), f"{make} of {args!r:.80}")
        pickle.charge_copy(sum(len(a) for a in args if isinstance(a, (str, bytes))))
        return make(*args)

    return constructor


def _empty(make: Callable[[], Any]) -> Constructor:
    def constructor(pickle: Pickle) -> Any:
        return make()

    return constructor


def _hashed(make: Callable[..., Any]) -> Constructor:
    """A set of items that are in memory already: a range would be filled in at its length."""

    def constructor(pickle: Pickle, items: Any = ()) -> Any:
        require(type(items) in _ITEMS, f"{make} of a {type(items).__name__}")
        pickle.charge_copy(len(items))
        pickle.charge_keys(items)
        return make(items)

    return constructor


def _mapping(make: Callable[..., Any]) -> Constructor:
    def constructor(pickle: Pickle, items: Any = ()) -> Any:
        if type(items) is not dict:
            pairs = type(items) in (list, tuple) and all(type(i) in (list, tuple) and len(i) == 2 for i in items)
            require(pairs, f"{make} of a {type(items).__name__}")
            pickle.charge_keys([key for key, _ in items])
            items = dict(items)
        pickle.charge_copy(len(items))
        pickle.charge_keys(items)
        return make(items)

    return constructor


def _defaultdict(pickle: Pickle, factory: Any = None) -> Any:
    require(factory is None or isinstance(factory, type), "a defaultdict of no class")
    return collections.defaultdict(factory)


def _deque(pickle: Pickle, items: Any = (), maxlen: Any = None) -> Any:
    require(type(items) in (list, tuple), f"a deque of a {type(items).__name__}")
    pickle.charge_copy(len(items))
    return collections.deque(items, maxlen)


def _bytearray(pickle: Pickle, data: Any = b"", encoding: Any = None) -> Any:
    if type(data) is str:
        data = _encode(pickle, data, encoding)
    require(type(data) is bytes, f"a bytearray of a {type(data).__name__}")
    pickle.charge_copy(len(data))
    return bytearray(data)


def _encode(pickle: Pickle, text: Any, encoding: Any = None) -> bytes:
    """How protocol 2 writes bytes. Other codecs import modules, and some compress."""
    require(type(text) is str and encoding in ("latin1", "latin-1"), f"bytes in {encoding!r:.40}")
    pickle.charge_copy(len(text))
    encoded: bytes = text.encode("latin-1")
    return encoded


def _decimal(pickle: Pickle, text: Any = "0") -> Any:
    """From text, as it is pickled. Conversion from an integer takes the square of its length."""
    require(type(text) is str, f"a decimal of a {type(text).__name__}")
    pickle.charge_copy(len(text))
    return decimal.Decimal(text)


def _fraction(pickle: Pickle, numerator: Any = 0, denominator: Any = 1) -> Any:
    if type(numerator) is str:
        require(re.fullmatch(r"-?\d+(/\d+)?", numerator) is not None, "a fraction with an exponent")
        above, _, below = numerator.partition("/")
        numerator, denominator = int(above), int(below or 1)
    require(type(numerator) is int and type(denominator) is int, "a fraction of no integers")
    bits = numerator.bit_length(), denominator.bit_length()
    require(max(bits) <= _FRACTION_BITS_MAX, f"a fraction of {max(bits)} bits")
    pickle.charge_copy(bits[0] * bits[1] >> 16)  # the greatest common divisor is quadratic
    return fractions.Fraction(numerator, denominator)


def _range(pickle: Pickle, *args: Any) -> Any:
    require(all(type(a) is int for a in args), "a range of no integers")
    return range(*args)


def _slice(pickle: Pickle, *args: Any) -> Any:
    return slice(*args)


def _size(pickle: Pickle, sizes: Any = ()) -> Any:
    require(type(sizes) in (list, tuple) and all(type(n) is int for n in sizes), "a size")
    pickle.charge_copy(len(sizes))
    return torch.Size(sizes)


# ---- Arrays. No dtype is ever given a state: each is made by numpy from its description.


def _dtype(pickle: Pickle, name: Any, align: Any = False, copy: Any = True) -> Any:
    import numpy

    require(type(name) is str and _DTYPE.fullmatch(name) is not None, f"a dtype {name!r:.40}")
    return numpy.dtype(name)


def built_dtype(dtype: Any, state: Any) -> Any:
    """The dtype that ``dtype.__setstate__`` would have made of this one."""
    import numpy

    require(type(state) is tuple and len(state) in (8, 9), "the state of a dtype")
    _, order, sub, names, fields, itemsize, _, flags = state[:8]
    if sub is not None:
        base, shape = sub
        require(isinstance(base, numpy.dtype) and _is_shape(shape), "a dtype's shape")
        dtype = numpy.dtype((base, shape))
    elif names is not None:
        require(type(names) is tuple and type(fields) is dict, "the fields of a dtype")
        parts = [fields[name] for name in names]
        require(all(isinstance(part[0], numpy.dtype) for part in parts), "a field's dtype")
        described: Any = {
            "names": list(names),
            "formats": [part[0] for part in parts],
            "offsets": [part[1] for part in parts],
            "itemsize": itemsize,
        }
        if any(len(part) > 2 for part in parts):
            described["titles"] = [part[2] if len(part) > 2 else None for part in parts]
        dtype = numpy.dtype(described, align=bool(flags & _ALIGNED_STRUCT))
    elif len(state) == 9 and dtype.kind in "mM":
        unit, count = state[8][1][:2]
        if unit != b"generic":
            require(_UNIT.fullmatch(unit.decode()) is not None and type(count) is int, "a unit")
            dtype = numpy.dtype(f"{dtype.kind}8[{count}{unit.decode()}]")
    else:
        require(len(state) == 8 or not state[8], "a dtype with metadata of its own")
    return dtype.newbyteorder(order) if order in ("<", ">") else dtype


def _is_shape(shape: Any) -> bool:
    return type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)


def _new_array(pickle: Pickle, cls: Any, shape: Any, code: Any) -> Any:
    import numpy

    require(isinstance(cls, type) and issubclass(cls, numpy.ndarray), f"an array, {cls!r:.80}")
    return numpy.ndarray.__new__(cls, (0,), numpy.int8)


def set_array(pickle: Pickle, array: Any, state: Any) -> None:
    """Gives a new array its elements."""
    import numpy

    require(type(state) is tuple and len(state) == 5, "the state of an array")
    _, shape, dtype, fortran, data = state
    require(isinstance(dtype, numpy.dtype) and _is_shape(shape), "the shape of an array")
    require(dtype.kind == "O" or not dtype.hasobject, "object references inside of a dtype")
    require(type(data) is (list if dtype.hasobject else bytes), "the elements of an array")
    nbytes = math.prod(shape) * (1 if dtype.hasobject else dtype.itemsize)
    require(len(data) == nbytes, f"{len(data)} bytes for an array of {nbytes}")
    pickle.charge_copy(len(data))
    array.__setstate__((1, shape, dtype, bool(fortran), data))


def _array_scalar(pickle: Pickle, dtype: Any, data: Any) -> Any:
    import numpy

    require(isinstance(dtype, numpy.dtype) and not dtype.hasobject, "a scalar of an object")
    require(type(data) is bytes and len(data) == dtype.itemsize, "the bytes of a scalar")
    pickle.charge_copy(len(data))
    return numpy.ndarray((), dtype, data).copy()[()]


def _numpy_plain(name: str) -> Constructor:
    def constructor(pickle: Pickle, *args: Any) -> Any:
        import numpy

        return _plain(getattr(numpy, name))(pickle, *args)

    return constructor


# ---- Tensors in objects. Their memory is a storage that `Pickle.storage_of` makes, or an archive's record.


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
            indices, values, size, device=values.device, check_invariants=True,
            is_coalesced=rest[0] if rest else None,
        )
    outer, inner, values, size = data
    return torch.sparse_compressed_tensor(
        outer, inner, values, size, layout=layout, device=values.device, check_invariants=True
    )


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


def storage_at(pid: Any, memory_of: Callable[[str], bytes], place: Callable[[str], str]) -> Any:
    """The storage of a persistent id of ``torch.save``.

    Args:
        pid: the id.
        memory_of: gives the bytes of its key.
        place: gives the device for the one that it was saved from, unless that is host memory.
    """
    require(type(pid) is tuple and len(pid) >= 5 and pid[0] == "storage", "a persistent id")
    _, cls, key, location, count = pid[:5]
    require(cls in torch._storage_classes and type(key) is str, "a storage")
    dtype = torch.uint8
    if cls is not torch.UntypedStorage:
        dtype = torch.storage._get_dtype_from_pickle_storage_type(cls.__name__)
    data = bytearray(memory_of(key))
    require(count * dtype.itemsize == len(data), f"{count} elements in {len(data)} bytes")
    memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, device="cpu")
    require(type(location) is str, "a location")
    if location != "cpu":
        torch.device(location)  # else it is damaged
        location = place(location)
    storage = torch.serialization.default_restore_location(memory.untyped_storage(), location)
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _storage(pickle: Pickle, data: Any) -> Any:
    """Of the bytes by which plain pickles write a storage. The real one unpickles all that it finds in these."""
    require(type(data) is bytes, "a storage of no bytes")
    return pickle.storage_of(data)


# ---- States that pickles give to what these constructors made.


def _set_attributes(pickle: Pickle, target: Any, state: Any) -> None:
    require(type(state) is dict, "attributes")
    target.__dict__.update(state)


def _set_uuid(pickle: Pickle, target: Any, state: Any) -> None:
    require(type(state) is dict and set(state) <= {"int", "is_safe"}, "the state of a UUID")
    number = state["int"]
    require(type(number) is int and 0 <= number < 1 << 128, "the number of a UUID")
    target.__setstate__(state)


def _set_bytes(pickle: Pickle, target: Any, state: Any) -> None:
    require(type(state) is tuple and len(state) == 3 and not state[2], "the state of a BytesIO")
    data, position, _ = state
    require(type(data) is bytes and type(position) is int, "the state of a BytesIO")
    require(0 <= position <= len(data), "a position beyond the bytes")
    pickle.charge_copy(len(data))
    target.__setstate__((data, position, None))


def _set_generator(pickle: Pickle, generator: Any, state: Any) -> None:
    seed, offset, values = state
    require(type(seed) is int and (offset is None or type(offset) is int), "a generator's seed")
    require(type(values) is torch.Tensor and values.dtype == torch.uint8, "a generator's state")
    generator.__setstate__(state)


STATES: dict[type, Callable[[Pickle, Any, Any], None]] = {
    collections.OrderedDict: _set_attributes,
    types.SimpleNamespace: _set_attributes,
    uuid.UUID: _set_uuid,
    io.BytesIO: _set_bytes,
    torch.Generator: _set_generator,
}

_PATHS = (pathlib.Path, pathlib.PosixPath, pathlib.PurePath, pathlib.PurePosixPath)

# Classes of storages. No pickle calls these: they stand for dtypes.
STORAGES: dict[str, Constructor | None] = {
    "torch.storage:UntypedStorage": None,
    "torch.storage:TypedStorage": None,
    **{f"torch:{cls.__name__}": None for cls in torch._storage_classes},
}

# By "module:name". None: a class or value that may be named, as a defaultdict's factory, and not called.
CONSTRUCTORS: dict[str, Constructor | None] = {
    **{f"builtins:{name}": None for name in "list dict tuple int float bool str Ellipsis NotImplemented".split()},
    "builtins:object": _empty(object),
    "builtins:bytes": _empty(bytes),
    "builtins:complex": _plain(complex),
    "builtins:set": _hashed(set),
    "builtins:frozenset": _hashed(frozenset),
    "builtins:bytearray": _bytearray,
    "builtins:slice": _slice,
    "builtins:range": _range,
    "collections:OrderedDict": _mapping(collections.OrderedDict),
    "collections:Counter": _mapping(collections.Counter),
    "collections:defaultdict": _defaultdict,
    "collections:deque": _deque,
    "datetime:datetime": _plain(datetime.datetime, datetime.tzinfo),
    "datetime:date": _plain(datetime.date),
    "datetime:time": _plain(datetime.time, datetime.tzinfo),
    "datetime:timedelta": _plain(datetime.timedelta),
    "datetime:timezone": _plain(datetime.timezone, datetime.timedelta),
    "decimal:Decimal": _decimal,
    "fractions:Fraction": _fraction,
    "uuid:UUID": _empty(lambda: uuid.UUID.__new__(uuid.UUID)),
    "uuid:SafeUUID": _plain(uuid.SafeUUID),
    **{f"pathlib:{cls.__name__}": _plain(cls) for cls in _PATHS},
    "types:SimpleNamespace": _empty(types.SimpleNamespace),
    "_io:BytesIO": _empty(io.BytesIO),
    "_codecs:encode": _encode,
    "numpy:dtype": _dtype,
    "numpy:ndarray": None,
    **{f"numpy:{n}": _numpy_plain(n) for n in "float64 float32 int64 int32 bool_".split()},
    "numpy.core.multiarray:_reconstruct": _new_array,
    "numpy._core.multiarray:_reconstruct": _new_array,
    "numpy.core.multiarray:scalar": _array_scalar,
    "numpy._core.multiarray:scalar": _array_scalar,
    "torch:Size": _size,
    "torch:device": _plain(torch.device),
    "torch:dtype": None,
    "torch.serialization:_get_layout": _plain(torch.serialization._get_layout),
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
    **STORAGES,
    "torch.storage:_load_from_bytes": _storage,
}
