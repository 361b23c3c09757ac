"""A training state as bytes and a description: what is saved once, and how the state refers to it.

`describe` walks a state down to its leaves (`Walk`). Tensors that overlap in memory share one
entry, a run of bytes with a name: tied weights stay tied. Plain values go into the description,
which is JSON; all else is an object, to be pickled beside. What depends on the structure alone is
an `Outline`, and is kept: the next state of the same structure gives only addresses and values.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from holdfast import _collector, _devices, _dtypes, _native, _plain
from holdfast._constructors import CONSTRUCTORS
from holdfast._kinds import kind_of_node, needed_classes, under
from holdfast._plain import Node
from holdfast._tensor_kinds import PLAIN_TENSORS, TENSOR, in_memory, kind_of
from holdfast.errors import Error

FORMAT_VERSION = 2
VERSIONS_READ = (1, FORMAT_VERSION)

# What is nested this deep in a value stands beside it, so that nothing recurses further.
_DEPTH_MAX = 50
_DEEP = ("deep",)
_OUTLINES_MAX = 4

_recent: deque[Outline] = deque(maxlen=_OUTLINES_MAX)


class Walk:
    """The way down a state.

    Args:
        layouts: whether layouts of tensors are looked at. Nearly all are strided, and a table of
            tensors raises for one that is not.

    Attributes:
        tokens: the structure: of a plain value None, of a strided tensor its class, of all else a
            tuple of its kind and what its node is made of. The tokens of its contents follow.
        tensors, plain, objects: the contents, in the same order.
    """

    def __init__(self, state: Any, layouts: bool = False) -> None:
        self.tokens: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.plain: list[Any] = []
        self.objects: list[Any] = []
        self.add = self.tokens.append
        self._open: set[int] = set()  # containers on the way down, to find cycles
        self._depth = 0
        self._layouts = layouts
        self._deep: deque[tuple[str, Any, set[int]]] = deque()
        self._visit("", state)
        while self._deep:
            path, value, self._open = self._deep.popleft()
            self._visit(path, value)

    def inside(self, owner: Any, path: str, value: Any) -> None:
        """Goes on with the one thing that a value consists of."""
        self._enter(owner, path)
        self._visit(path, value)
        self._leave(owner)

    def children(self, owner: Any, path: str, names: Iterable[Any], values: Collection[Any]) -> None:
        """Goes on with what a value holds."""
        self._enter(owner, path)
        if not self._layouts and PLAIN_TENSORS.issuperset(map(type, values)):
            self.tokens.extend(map(type, values))
            self.tensors.extend(values)
        else:
            for name, value in zip(names, values, strict=True):
                kind = type(value)
                if kind in _plain.TYPES:
                    self.add(None)
                    self.plain.append(value)
                elif kind in PLAIN_TENSORS and not self._layouts:
                    self.add(kind)
                    self.tensors.append(value)
                else:
                    self._visit(under(path, name), value)
        self._leave(owner)

    def _visit(self, path: str, value: Any) -> None:
        if _plain.is_plain(value):
            self.add(None)
            self.plain.append(value)
        elif self._depth == _DEPTH_MAX:
            self.add(_DEEP)
            self._deep.append((path, value, set(self._open)))
        else:
            kind_of(path, value).flatten(self, path, value)

    def _enter(self, owner: Any, path: str) -> None:
        if id(owner) in self._open:
            raise Error("INVALID_ARGUMENT", f"save {path or 'state'}: the state contains itself")
        self._open.add(id(owner))
        self._depth += 1

    def _leave(self, owner: Any) -> None:
        self._open.discard(id(owner))
        self._depth -= 1


class Outline:
    """What a description has of the structure of a state. It keeps no tensor alive.

    Attributes:
        names, dtypes, shapes, nbytes, devices, paths: of each entry.
        device_set: all devices.
        members: of each entry the indices of the tensors in it.
        object_names: of each object.
        contiguous_copies: paths of tensors that are copied to be saved.
        needs_allow: classes that a load of new values must be allowed to make, sorted.
        distributed: of each DTensor its node and the names of its entries.
        kept: what one save has made of the outline for the next one, and does not use any more.
    """

    def __init__(self, walk: Walk, stored: list[torch.Tensor], tables: tuple[Any, Any]) -> None:
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[list[int]] = []
        self.nbytes: list[int] = []
        self.devices: list[torch.device] = []
        self.paths: list[str] = []
        self.object_names: list[str] = []
        self.kept: list[Any] = []
        self._walk_tokens = walk.tokens
        self._tables = tables
        self._shifts: dict[int, int] = {}  # of entries that begin before their first tensor
        self._taken: dict[str, int] = {}
        self._leaves: list[tuple[str, Node]] = []
        self._tokens = iter(walk.tokens)
        self._tensors = iter(walk.tensors)
        self._deep: list[str] = []
        root = self.node("")
        deep: list[Node] = []
        while len(deep) < len(self._deep):
            deep.append(self.node(self._deep[len(deep)]))
        self.contiguous_copies = [self._leaves[i][0] or "state" for i in tables[0].copied()]
        self.members: list[list[int]] = []
        for begin, end, members in tables[1].groups():
            self.members.append(members)
            self._store(begin, end, members, stored)
        description = {"root": root, **({"deep": deep} if deep else {})}
        self.distributed = [
            (n, [leaf["stored"] for _, leaf in tensor_nodes(n)])
            for n in nodes(description) if n["kind"] == "dtensor"
        ]
        made = (n["class"] for n in nodes(description) if n["kind"] == "object")
        self.needs_allow = sorted(
            needed_classes(nodes(description)).union(name for name in made if name not in CONSTRUCTORS)
        )
        self._objects_noted = not self.object_names
        # Between these parts belong the plain values.
        self.device_set = set(self.devices)
        self._text = _encode(description)[1:].encode().split(_encode(_HOLE).encode())
        del self._tokens, self._tensors, self._leaves, self._taken, self._deep

    def fits(self, tokens: list[Any], tables: tuple[Any, Any]) -> bool:
        """Whether a state has this structure: all but addresses, plain values and objects."""
        return not self._shifts and tokens == self._walk_tokens and all(
            ours.equals(theirs) for ours, theirs in zip(tables, self._tables, strict=True)
        )

    def note_objects(self, classes: Callable[[], set[str]]) -> None:
        """Adds to `needs_allow` what the objects have in them, once: later saves have the same structure."""
        if not self._objects_noted:
            self.needs_allow = sorted({*self.needs_allow, *classes()})
            self._objects_noted = True

    # ---- Nodes, from the tokens of a walk.

    def node(self, path: str) -> Node:
        """The node of the next token. What a kind's `node` calls for its contents."""
        token = next(self._tokens)
        if token is None:
            return _HOLE
        if isinstance(token, type):
            return self.leaf(path)
        if token is _DEEP:
            self._deep.append(path)
            return {"kind": "deep", "index": len(self._deep) - 1}
        return token[0].node(self, path, token)

    def leaf(self, path: str) -> Node:
        """The node of the next tensor."""
        node = TENSOR.node_of(path, next(self._tensors))
        self._leaves.append((path, node))
        return node

    def name_object(self, path: str) -> str:
        """The name of the next object."""
        self.object_names.append(unique(path or "state", self._taken))
        return self.object_names[-1]

    # ---- Entries, of tensors that overlap.

    def _store(self, begin: int, end: int, members: list[int], stored: list[torch.Tensor]) -> None:
        group = [(*self._leaves[i], stored[i]) for i in members]
        place = {id(t): t.data_ptr() for _, _, t in group} if end else {}
        # Where the widest elements can begin, so that views over the same bytes can be made again.
        widest = max((t for _, _, t in group), key=lambda t: t.itemsize)
        shift = (begin - place[id(widest)]) % widest.itemsize if end else 0
        if shift and begin - shift >= min(t.untyped_storage().data_ptr() for _, _, t in group):
            begin -= shift
            self._shifts[len(self.names)] = shift
        path, _, first = group[0]
        owner = next(
            (
                (path, tensor) for path, _, tensor in group
                if tensor.is_contiguous()
                and tensor.nbytes == end - begin
                and (not end or place[id(tensor)] == begin)
            ),
            None,
        )
        if owner is not None:
            path, tensor = owner
            name, dtype, shape = path or "state", tensor.dtype, list(tensor.shape)
        else:
            dtype = first.dtype if all(t.dtype == first.dtype for _, _, t in group) else torch.uint8
            name, shape = (path or "state") + "#storage", [(end - begin) // dtype.itemsize]
        self.names.append(unique(name, self._taken))
        self.dtypes.append(_dtypes.file_name(dtype))
        self.shapes.append(shape)
        self.nbytes.append(end - begin)
        self.devices.append(first.device)
        self.paths.append(path)
        for path, node, tensor in group:
            offset = place[id(tensor)] - begin if end else 0
            if offset % tensor.itemsize:
                other = next(p for p, _, t in group if t is not tensor)
                raise Error(
                    "INVALID_ARGUMENT",
                    f"save {path or 'state'}: it overlaps {other or 'state'} in memory, at a byte where "
                    "no tensor of both could be made again; save its clone()",
                )
            node["stored"] = self.names[-1]
            if offset:
                node["offset"] = offset
            if not tensor.is_contiguous():
                node["stride"] = list(tensor.stride())

    def addresses(self, table: Any) -> list[int]:
        """Where each entry begins."""
        found = table.addresses()
        for i, shift in self._shifts.items():
            found[i] -= shift
        return found

    def text(self, header: dict[str, Any], values: list[Any]) -> bytes:
        """The description as JSON, with further fields before it and the plain values of a state."""
        parts = [b""] * (2 * len(self._text) - 1)
        parts[::2] = self._text
        parts[1::2] = [_plain.text_of(value).encode() for value in values]
        # Joined once: it may be long.
        return b"".join((_encode(header)[:-1].encode(), b",", *parts))


_HOLE = _native.new_attempt()  # in no text of a state
_encode: Callable[[Any], str] = _plain.encode


class Entry(NamedTuple):
    """Bytes that are stored under one name; `memory` gives them as a tensor."""

    name: str
    dtype: str
    shape: list[int]
    address: int
    nbytes: int
    device: torch.device
    memory: Callable[[], torch.Tensor]


class Description:
    """A state that `describe` has walked: an outline, and what fills it.

    Attributes:
        outline: of the structure.
        tensors: that own the memory of the entries.
        addresses: of the entries.
        objects: what must be pickled, by name.
    """

    def __init__(self, state: Any) -> None:
        walk = Walk(state)
        try:
            table = _native.TensorTable(walk.tensors)
        except Exception:  # of a tensor that is not strided, or has no memory, or of its class's own code
            walk = Walk(state, layouts=True)
            table = _table_of(walk)
        self.tensors = walk.tensors
        stored = table
        copied = table.copied()
        if copied:
            self.tensors = list(walk.tensors)
            for i in copied:
                self.tensors[i] = in_memory(walk.tensors[i])
            stored = _native.TensorTable(self.tensors)
        tables = (table, stored)
        outline = next((o for o in list(_recent) if o.fits(walk.tokens, tables)), None)
        if outline is None:
            with _collector.paused():
                outline = Outline(walk, self.tensors, tables)
            _recent.appendleft(outline)
        self.outline = outline
        self.addresses = outline.addresses(stored)
        self.objects = dict(zip(outline.object_names, walk.objects, strict=True))
        self._plain = walk.plain

    def text(self, header: dict[str, Any]) -> bytes:
        """The description as JSON, with further fields before it."""
        return self.outline.text(header, self._plain)

    def entries(self) -> list[Entry]:
        """What is stored, one by one."""
        o = self.outline
        memory = [functools.partial(self.memory, i) for i in range(len(o.names))]
        columns = o.names, o.dtypes, o.shapes, self.addresses, o.nbytes, o.devices, memory
        return [Entry(*row) for row in zip(*columns, strict=True)]

    def memory(self, entry: int) -> torch.Tensor:
        """The bytes of an entry, as a tensor over its memory."""
        owners = (self.tensors[t] for t in self.outline.members[entry])
        found = _devices.bytes_of(owners, self.addresses[entry], self.outline.nbytes[entry])
        if found is None:
            raise Error(
                "UNIMPLEMENTED",
                f"save {self.outline.names[entry]}: tensors with storages of their own overlap there in the memory of a device; save clones",
            )
        return found


def _table_of(walk: Walk) -> Any:
    try:
        return _native.TensorTable(walk.tensors)
    except Exception as error:
        empty = _native.TensorTable([])
        Outline(walk, walk.tensors, (empty, empty))  # names the tensor that is wrong
        raise Error("INVALID_ARGUMENT", f"save: a tensor of the state cannot be saved: {error}") from error


def describe(state: Any) -> Description:
    """Describes a state.

    Raises:
        Error: INVALID_ARGUMENT for a tensor that cannot be saved, naming it.
    """
    return Description(state)


def unique(name: str, names: dict[str, int]) -> str:
    """As `numbered`, for names in files.

    Raises:
        Error: INVALID_ARGUMENT for a name that is not UTF-8.
    """
    _plain.check_text(name, f"save {name}")
    return numbered(name, names)


def numbered(name: str, names: dict[str, int]) -> str:
    """`name`, or with a number behind it where two paths read the same.

    Args:
        names: all that were given, each with its last number; gets the new one.
    """
    number = names.get(name)
    if number is None:
        names[name] = 1
        return name
    while (candidate := f"{name}~{number + 1}") in names:
        number += 1
    names[name] = number + 1
    names[candidate] = 1
    return candidate


# ---- Over a description.


def stride_of(node: Node) -> tuple[int, ...]:
    """A tensor node's; row-major ones are not written down."""
    if "stride" in node:
        return tuple(node["stride"])
    strides = []
    expected = 1
    for size in reversed(node["shape"]):
        strides.append(expected)
        expected *= max(size, 1)
    return tuple(reversed(strides))


def elements_of(node: Node) -> int:
    """The number of a tensor node's elements."""
    return math.prod(node["shape"])


def place_of(node: Node, nbytes: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """A tensor node's first byte in its entry, its shape and its stride.

    Raises:
        Error: DATA_LOSS for a tensor that is not inside of an entry of `nbytes`.
    """
    offset, shape, stride = node.get("offset", 0), tuple(node["shape"]), stride_of(node)
    width = _dtypes.torch_dtype(node["dtype"]).itemsize
    if offset % width:
        raise Error(
            "DATA_LOSS",
            f"load {node['stored']}: a {node['dtype']} begins at byte {offset} of it, where none can",
        )
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if math.prod(shape) and (min((offset, *stride)) < 0 or offset + (last + 1) * width > nbytes):
        raise Error("DATA_LOSS", f"load {node['stored']}: a tensor of shape {list(shape)} ends outside of it")
    return offset, shape, stride


def nodes(description: Any) -> Iterator[Node]:
    """All nodes of a description that have a kind."""
    left = [description]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if "kind" in value:
                yield value
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def tensor_nodes(root: Node, deep: list[Node] | None = None) -> Iterator[tuple[str, Node]]:
    """All tensor nodes, with their paths, in the order of the state."""
    stack = [iter([("", root)])]
    seen: set[int] = set()
    while stack:
        path, node = next(stack[-1], (None, None))
        if path is None:
            stack.pop()
        elif isinstance(node, dict) and node["kind"] == "tensor":
            yield path, node
        elif isinstance(node, dict) and node["kind"] == "deep":
            if deep and node["index"] in seen:
                raise Error("DATA_LOSS", f"load {path or 'state'}: its description contains itself")
            seen.add(node["index"])
            stack.append(iter([(path, deep[node["index"]])]) if deep else iter(()))
        elif isinstance(node, (dict, list)):
            stack.append(kind_of_node(node, path).children(node, path))
