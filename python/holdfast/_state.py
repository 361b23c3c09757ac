"""A training state as bytes and a description: what is saved once, and how the state refers to it.

`describe` walks nested dicts, lists, tuples, dataclasses and whatever has a ``state_dict`` down to
its leaves. Tensors become `Stored` entries (runs of bytes with a name) and *views* of them; tensors
that overlap in memory share one entry, so tied weights stay tied. Plain values go into the
description, which is JSON. Everything else is an *object*, to be pickled beside.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast import _dtypes
from holdfast.errors import Error

Node = dict[str, Any]
Path = tuple[str, ...]

# A strided view that spans this many times its own bytes is saved as a contiguous copy instead.
_SPAN_MAX = 2


@dataclasses.dataclass
class Stored:
    """Bytes that are saved under one name, and the memory that they are in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    nbytes: int
    device: torch.device
    keep: Any  # whatever owns the memory
    path: Path = ()


@dataclasses.dataclass
class Description:
    """What `describe` found."""

    root: Node
    stored: list[Stored]
    objects: dict[str, Any]
    contiguous_copies: list[str]


@dataclasses.dataclass
class _Leaf:
    path: Path
    tensor: torch.Tensor
    node: Node
    begin: int  # of its bytes, an address
    end: int


def join(path: Path) -> str:
    """A path as people write it: ``model.layers.0.weight``."""
    return ".".join(path) or "state"


def is_stateful(value: Any) -> bool:
    """Whether it hands out its state by itself: modules, optimizers, schedulers, loaders."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def state_of(value: Any) -> Any:
    """Its state, with parameters as they are rather than detached copies."""
    if isinstance(value, torch.nn.Module):
        return value.state_dict(keep_vars=True)
    return value.state_dict()


def class_name(value: Any) -> str:
    """``module:qualified.name`` of its class."""
    kind = type(value)
    return f"{kind.__module__}:{kind.__qualname__}"


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


# ---- Plain values.


def _float_text(value: float) -> str:
    """Every bit of it: as C's %a, a NaN (which has a payload) as its eight bytes."""
    return value.hex() if value == value else "nan:" + struct.pack(">d", value).hex()


def _float_of(text: str) -> float:
    if text.startswith("nan:"):
        return struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    return float.fromhex(text)


def _scalar(value: Any) -> Node | None:
    """The node of a plain value; None if it is not one."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return {"kind": "value", "value": value}
    if kind is int:
        # Beyond 2^53 other readers of JSON lose digits.
        return {"kind": "value", "value": value} if abs(value) < 2**53 else {"kind": "int", "value": str(value)}
    if kind is float:
        return {"kind": "float", "value": _float_text(value)}
    if kind is complex:
        return {"kind": "complex", "value": [_float_text(value.real), _float_text(value.imag)]}
    if kind in (bytes, bytearray):
        return {"kind": kind.__name__, "value": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"kind": "dtype", "value": _dtypes.torch_name(value)}
    if kind is torch.device:
        return {"kind": "device", "value": str(value)}
    if kind is slice:
        parts = [_scalar(p) for p in (value.start, value.stop, value.step)]
        return {"kind": "slice", "items": parts} if all(parts) else None
    return None


_FROM_SCALAR: dict[str, Callable[[Node], Any]] = {
    "value": lambda n: n["value"],
    "int": lambda n: int(n["value"]),
    "float": lambda n: _float_of(n["value"]),
    "complex": lambda n: complex(_float_of(n["value"][0]), _float_of(n["value"][1])),
    "bytes": lambda n: base64.b64decode(n["value"]),
    "bytearray": lambda n: bytearray(base64.b64decode(n["value"])),
    "dtype": lambda n: _dtypes.torch_dtype(n["value"]),
    "device": lambda n: torch.device(n["value"]),
    "slice": lambda n: slice(*(scalar_of(p) for p in n["items"])),
}


def is_scalar(node: Node) -> bool:
    return node["kind"] in _FROM_SCALAR


def scalar_of(node: Node) -> Any:
    """The plain value of a node."""
    return _FROM_SCALAR[node["kind"]](node)


def _key(key: Any) -> Any:
    """A mapping's key as JSON: strings as they are, other plain values as nodes; None: neither."""
    if type(key) is str:
        return key
    node = _scalar(key)
    if node is None and type(key) is tuple:
        items = [_key(k) for k in key]
        node = None if None in items else {"kind": "tuple", "items": items}
    return node


def key_of(key: Any) -> Any:
    """The key that `_key` wrote."""
    if isinstance(key, str):
        return key
    if key["kind"] == "tuple":
        return tuple(key_of(k) for k in key["items"])
    return scalar_of(key)


def unique(name: str, names: set[str]) -> str:
    """`name`, or with a number behind it where two paths read the same; it is one of `names` now."""
    candidate, number = name, 1
    while candidate in names:
        number += 1
        candidate = f"{name}~{number}"
    names.add(candidate)
    return candidate


# ---- What a tensor consists of.


def _flattened(tensor: Any) -> tuple[list[str], Any] | None:
    """Names of the tensors that it wraps, and what else it is made of, if its class says so."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return None
    return tensor.__tensor_flatten__()


def _sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a sparse one by their names; none if its layout is not known."""
    if tensor.layout == torch.sparse_coo:
        # Not coalesced here: that would change what is loaded.
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
    else:
        return {}
    return {name: getattr(tensor, name)() for name in names}


def foreign_array(value: Any) -> torch.Tensor | None:
    """The memory of another framework's array (DLPack) as a tensor; None if it is none."""
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return None
    try:
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype or a device that torch lacks
        return None


def memory_of(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Begin and end of the memory of a tensor, or of each that it consists of."""
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        yield from memory_of(local)
    elif (flattened := _flattened(tensor)) is not None:
        for name in flattened[0]:
            yield from memory_of(getattr(tensor, name))
    elif tensor.layout != torch.strided:
        for part in _sparse_parts(tensor.detach()).values():
            yield from memory_of(part)
    elif tensor.numel():
        yield tensor.data_ptr(), tensor.data_ptr() + span_of(tensor)


# ---- What a module's state dict notes beside its entries.


def _metadata(value: Any) -> dict[str, dict[str, Node]]:
    """The plain values that a state dict has of each module, such as its version, as nodes."""
    noted = getattr(value, "_metadata", None)
    if not isinstance(noted, Mapping):
        return {}
    return {
        prefix: {k: node for k, v in own.items() if (node := _scalar(v)) is not None}
        for prefix, own in noted.items()
        if isinstance(prefix, str) and isinstance(own, Mapping)
    }


def put_metadata(node: Node, target: Any) -> None:
    """Gives a state dict the metadata that was saved; `load_state_dict` asks it for versions."""
    if "metadata" in node and isinstance(target, OrderedDict):
        target._metadata = OrderedDict(  # type: ignore[attr-defined]
            (prefix, {k: scalar_of(v) for k, v in own.items()})
            for prefix, own in node["metadata"].items()
        )


def is_of_other_version(node: Node, state_dict: Any) -> bool:
    """Whether the metadata of a module in both, the saved and this state dict, differ."""
    saved, there = node.get("metadata", {}), _metadata(state_dict)
    return any(saved[prefix] != there[prefix] for prefix in saved.keys() & there.keys())


# ---- How a tensor lies over the ranks.


def layout_of(tensor: torch.Tensor) -> Node:
    """A DTensor's placements on its mesh, and where in that this rank is; a plain tensor has none."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return {"shape": list(tensor.shape), "placements": [], "mesh": [], "coordinate": []}
    return {
        "shape": list(tensor.shape),
        "placements": [str(p) for p in tensor.placements],  # type: ignore[attr-defined]
        "mesh": list(mesh.shape),
        "coordinate": list(mesh.get_coordinate() or [None] * mesh.ndim),
    }


def share_of(layout: Node) -> list[tuple[str, int, int]]:
    """Which share of the tensor a rank has: placements that divide it, among how many, and its place.

    Of tensors of one shape, equal shares are the same elements.
    """
    axes = zip(layout["placements"], layout["mesh"], layout["coordinate"], strict=True)
    return [axis for axis in axes if axis[0] != "R" and axis[1] > 1]


# ---- The walk down.


class _Walk:
    def __init__(self) -> None:
        self.leaves: list[_Leaf] = []
        self.stored: list[Stored] = []
        self.objects: dict[str, Any] = {}
        self.copies: list[str] = []
        self.names: set[str] = set()
        self._open: set[int] = set()  # containers on the way down, to find cycles

    def node(self, path: Path, value: Any) -> Node:
        node = _scalar(value)
        if node is not None:
            return node
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        if isinstance(value, torch.Size):
            return {"kind": "size", "items": list(value)}
        if id(value) in self._open:
            raise Error("INVALID_ARGUMENT", f"save {join(path)}: the state contains itself")
        self._open.add(id(value))
        try:
            return self._container(path, value)
        finally:
            self._open.discard(id(value))

    def _container(self, path: Path, value: Any) -> Node:
        if is_stateful(value):
            return {
                "kind": "stateful",
                "class": class_name(value),
                "state": self.node(path, state_of(value)),
            }
        if type(value) in (dict, OrderedDict):
            keys = [_key(k) for k in value]
            if None not in keys:
                noted = _metadata(value)
                return {
                    "kind": "dict" if type(value) is dict else "ordered_dict",
                    "items": [
                        [k, self.node((*path, str(key)), item)]
                        for k, (key, item) in zip(keys, value.items(), strict=True)
                    ],
                    **({"metadata": noted} if noted else {}),
                }
        if type(value) in (list, tuple):
            return {"kind": type(value).__name__, "items": self._items(path, value)}
        if is_namedtuple(value):
            return {
                "kind": "namedtuple",
                "class": class_name(value),
                "fields": list(value._fields),
                "items": [
                    self.node((*path, f), v) for f, v in zip(value._fields, value, strict=True)
                ],
            }
        if type(value) in (set, frozenset) and all(_scalar(v) for v in value):
            return {"kind": type(value).__name__, "items": [_scalar(v) for v in value]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [f.name for f in dataclasses.fields(value)]
            return {
                "kind": "dataclass",
                "class": class_name(value),
                "fields": names,
                "items": [self.node((*path, n), getattr(value, n)) for n in names],
            }
        if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
            array = self._array(path, value)
            if array is not None:
                return array
        foreign = foreign_array(value)
        if foreign is not None:
            return self._tensor(path, foreign)
        if isinstance(value, Mapping) and not isinstance(value, enum.Enum):
            # defaultdict and the like: what they are beyond a mapping only pickle can keep.
            pass
        name = unique(join(path), self.names)
        self.objects[name] = value
        return {"kind": "object", "name": name, "class": class_name(value)}

    def _items(self, path: Path, values: Any) -> list[Node]:
        return [self.node((*path, str(i)), v) for i, v in enumerate(values)]

    def _array(self, path: Path, value: Any) -> Node | None:
        try:
            tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
        except (TypeError, ValueError):  # object, datetime, strings, negative strides
            return None
        return {"kind": "ndarray", "tensor": self._tensor(path, tensor)}

    def _tensor(self, path: Path, value: torch.Tensor) -> Node:
        name = join(path)
        if value.is_quantized:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {name}: quantized tensors are not supported; save int_repr(), scale and "
                "zero point instead",
            )
        if value.device.type == "meta":
            raise Error("INVALID_ARGUMENT", f"save {name}: a tensor on the meta device has no data")
        local = getattr(value, "_local_tensor", None)
        if local is not None and hasattr(value, "placements"):
            return {"kind": "dtensor", "local": self._tensor(path, local), **layout_of(value)}
        marks: Node = {}
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            marks["class"] = class_name(value)
        if isinstance(value, torch.nn.Parameter):
            marks["parameter"] = True
        if value.requires_grad:
            marks["requires_grad"] = True
        flattened = _flattened(value)
        if flattened is not None:
            names, context = flattened
            inner = {n: self.node((*path, n), getattr(value, n)) for n in names}
            key = unique(name + "#context", self.names)
            self.objects[key] = (type(value), context, tuple(value.shape), tuple(value.stride()))
            return {"kind": "subclass", **marks, "inner": inner, "context": key}
        if value.layout != torch.strided:
            return {**self._sparse(path, value), **marks}
        if "class" in marks and value.numel() and not value.data_ptr():
            raise Error(
                "INVALID_ARGUMENT",
                f"save {name}: a {marks['class']} has no memory of its own and no "
                "__tensor_flatten__ that says what it wraps; save that instead",
            )
        node: Node = {
            "kind": "tensor",
            **marks,
            "dtype": _dtypes.torch_name(value.dtype),
            "shape": list(value.shape),
            "device": str(value.device),
        }
        tensor = value.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
            self.copies.append(name)
        if tensor.numel() == 0:
            self._store(path, tensor, node, tuple(tensor.shape))
            return node
        span = span_of(tensor)
        if not tensor.is_contiguous() and span > _SPAN_MAX * tensor.numel() * tensor.itemsize:
            tensor = tensor.contiguous()
            span = span_of(tensor)
            self.copies.append(name)
        begin = tensor.data_ptr()
        self.leaves.append(_Leaf(path, tensor, node, begin, begin + span))
        return node

    def _sparse(self, path: Path, value: torch.Tensor) -> Node:
        value = value.detach()
        parts = _sparse_parts(value)
        if not parts:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {join(path)}: tensors of layout {value.layout} are not supported; convert "
                "with to_dense()",
            )
        return {
            "kind": "sparse",
            "layout": str(value.layout).removeprefix("torch."),
            "shape": list(value.shape),
            "coalesced": value.layout == torch.sparse_coo and value.is_coalesced(),
            "parts": {n: self._tensor((*path, n), t) for n, t in parts.items()},
        }

    # ---- What is stored.

    def _store(self, path: Path, tensor: torch.Tensor, node: Node, shape: tuple[int, ...]) -> None:
        name = unique(join(path), self.names)
        nbytes = tensor.numel() * tensor.itemsize
        node["stored"] = name
        self.stored.append(
            Stored(name, _dtypes.file_name(tensor.dtype), shape, tensor.data_ptr() if nbytes else 0,
                   nbytes, tensor.device, tensor, path)
        )

    def store_leaves(self) -> None:
        """Groups the leaves by overlapping memory and stores each group once."""
        order = sorted(
            range(len(self.leaves)),
            key=lambda i: (str(self.leaves[i].tensor.device), self.leaves[i].begin),
        )
        groups: list[list[_Leaf]] = []
        end = 0
        for i in order:
            leaf = self.leaves[i]
            if groups and leaf.begin < end and groups[-1][0].tensor.device == leaf.tensor.device:
                groups[-1].append(leaf)
                end = max(end, leaf.end)
            else:
                groups.append([leaf])
                end = leaf.end
        # In the order of the walk, so that files stay the same from save to save.
        position = {id(leaf): i for i, leaf in enumerate(self.leaves)}
        for group in groups:
            group.sort(key=lambda leaf: position[id(leaf)])
        for group in sorted(groups, key=lambda g: position[id(g[0])]):
            self._store_group(group)

    def _store_group(self, group: list[_Leaf]) -> None:
        begin = min(leaf.begin for leaf in group)
        end = max(leaf.end for leaf in group)
        # Where the widest elements can begin, so that views over the same bytes can be made again.
        widest = max(group, key=lambda leaf: leaf.tensor.itemsize).tensor
        aligned = begin - (begin - widest.data_ptr()) % widest.itemsize
        if aligned < begin and aligned >= min(x.tensor.untyped_storage().data_ptr() for x in group):
            begin = aligned
        owner = next(
            (
                leaf
                for leaf in group
                if leaf.begin == begin and leaf.end == end and leaf.tensor.is_contiguous()
            ),
            None,
        )
        if owner is not None:
            self._store(owner.path, owner.tensor, owner.node, tuple(owner.tensor.shape))
            name = owner.node["stored"]
        else:
            first = group[0].tensor
            same = all(leaf.tensor.dtype == first.dtype for leaf in group)
            item = first.itemsize if same else 1
            name = unique(join(group[0].path) + "#storage", self.names)
            self.stored.append(
                Stored(name, _dtypes.file_name(first.dtype if same else torch.uint8),
                       ((end - begin) // item,), begin, end - begin, first.device,
                       [leaf.tensor for leaf in group], group[0].path)
            )
        for leaf in group:
            if (leaf.begin - begin) % leaf.tensor.itemsize:
                other = next(x for x in group if x is not leaf)
                raise Error(
                    "INVALID_ARGUMENT",
                    f"save {join(leaf.path)}: it overlaps {join(other.path)} in memory, at a byte where "
                    "no tensor of both could be made again; save its clone()",
                )
            leaf.node["stored"] = name
            if leaf.begin != begin:
                leaf.node["offset"] = leaf.begin - begin
            if not leaf.tensor.is_contiguous():
                leaf.node["stride"] = list(leaf.tensor.stride())


def stride_of(node: Node) -> tuple[int, ...]:
    """A tensor node's; row-major ones are not written down."""
    stride = node.get("stride")
    return tuple(torch.empty(node["shape"], device="meta").stride() if stride is None else stride)


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def describe(state: Any) -> Description:
    """Describes a state.

    Raises:
        Error: INVALID_ARGUMENT for a tensor that cannot be saved, naming it.
    """
    walk = _Walk()
    root = walk.node((), state)
    walk.store_leaves()
    return Description(root, walk.stored, walk.objects, walk.copies)


# ---- Over a description.


def nodes(description: Any) -> Iterator[Node]:
    """All nodes of a description, of every kind."""
    left = [description]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "kind" in value:
                yield value
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def tensor_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """All tensor nodes below a node, with their paths."""
    kind = node["kind"]
    if kind == "tensor":
        yield path, node
    elif kind in ("dict", "ordered_dict"):
        for key, item in node["items"]:
            yield from tensor_nodes(item, (*path, str(key_of(key))))
    elif kind in ("list", "tuple"):
        for i, item in enumerate(node["items"]):
            yield from tensor_nodes(item, (*path, str(i)))
    elif kind in ("namedtuple", "dataclass"):
        for name, item in zip(node["fields"], node["items"], strict=True):
            yield from tensor_nodes(item, (*path, name))
    elif kind == "stateful":
        yield from tensor_nodes(node["state"], path)
    elif kind == "ndarray":
        yield from tensor_nodes(node["tensor"], path)
    elif kind == "dtensor":
        yield from tensor_nodes(node["local"], path)
    elif kind == "sparse":
        for name, item in node["parts"].items():
            yield from tensor_nodes(item, (*path, name))
    elif kind == "subclass":
        for name, item in node["inner"].items():
            yield from tensor_nodes(item, (*path, name))
