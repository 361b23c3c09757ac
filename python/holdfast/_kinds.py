"""The kinds of containers and values in a state: how each is described, built and filled.

A kind is one class. `flatten` puts a value's structure and contents on a walk, `node` makes its
node of a description, `children` gives the nodes inside, `build` makes a new value and `fill` reads
into one that is there. `_tensor_kinds` has the kinds that consist of tensors.
"""

from __future__ import annotations

import collections
import functools
import json
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from holdfast import _plain, _records
from holdfast._modules import does_more_at_a_load, is_own_memory, is_stateful, refuses_by_groups, state_of
from holdfast._plain import Node, class_name
from holdfast.errors import Error

# Factories of a defaultdict that a load makes again without being allowed to.
_FACTORIES = frozenset(
    [f"builtins:{n}" for n in "bool bytes complex dict float frozenset int list set str tuple".split()]
    + [f"collections:{n}" for n in "Counter OrderedDict defaultdict deque".split()]
)

DIFFERS = "differs"


class Later:
    """A value that exists once everything was read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def value(self) -> Any:
        return self._make()


def resolved(value: Any) -> Any:
    return value.value() if isinstance(value, Later) else value


def under(path: str, name: Any) -> str:
    """The path of an entry, as people write it: ``model.layers.0.weight``."""
    return f"{path}.{name}" if path else str(name)


class Kind:
    """One kind of node. A `token` of a walk is what `flatten` put there: this kind, and more."""

    names: tuple[str, ...] = ()

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        """Puts a value on a walk: a token, which is all that a structure has of it, and its contents."""
        raise NotImplementedError

    def node(self, outline: Any, path: str, token: Any) -> Node:
        """The node of a token, and of those of its contents, which follow."""
        raise NotImplementedError

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        """The nodes inside, with their paths."""
        return iter(())

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        """Plans a new value; what it returns makes the value once all bytes are read."""
        raise NotImplementedError

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        """Plans the filling of a target. Returns what belongs in its place: by default a new value."""
        return filling.new(node, path)

    def fits(self, node: Node, value: Any) -> bool:
        """Whether all tensors of a node have one of the same shape and dtype in `value`."""
        return True


class Plain(Kind):
    """Scalars and sets, which hold nothing but plain values."""

    names = ("value", "int", "float", "complex", "bytes", "bytearray", "dtype", "device", "size",
             "slice", "numpy", "set", "frozenset")  # fmt: skip

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        if _plain.is_scalar_node(node):
            value = _plain.value_of(node)
        else:
            make = set if node["kind"] == "set" else frozenset
            value = make(builder.key(item, path) for item in node["items"])
        return lambda: value


class Object(Kind):
    """What is none of the others: pickled."""

    names = ("object",)

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        _plain.check_no_method(path, value)
        # A class, a function or such a value is its name in a pickle.
        if value is Ellipsis or value is NotImplemented:
            name = f"builtins:{value!r}"
        else:
            name = _plain.name_of(value) if isinstance(value, (type, types.FunctionType)) else class_name(value)
        walk.add((self, name))
        walk.objects.append(value)

    def node(self, outline: Any, path: str, token: Any) -> Node:
        return {"kind": "object", "name": outline.name_object(path), "class": token[1]}

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        value = builder.object(node["name"])  # at once: nothing has been read into a target yet
        return lambda: value


class Sequence(Kind):
    """Lists, tuples and deques. A list's node is a list."""

    names = ("list", "tuple", "deque")

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        walk.add((self, type(value).__name__, len(value), getattr(value, "maxlen", None)))
        walk.children(value, path, range(len(value)), value)

    def node(self, outline: Any, path: str, token: Any) -> Node:
        _, name, count, length_max = token
        items = [outline.node(under(path, i)) for i in range(count)]
        if name == "list":
            return items
        return {"kind": name, **({"maxlen": length_max} if name == "deque" else {}), "items": items}

    def _items(self, node: Node) -> list[Node]:
        return node if isinstance(node, list) else node.get("items", ())

    def _plain_values(self, node: Node) -> Any:
        """All items, if they are bytes of numbers or scalars that stand for themselves."""
        packed = _plain.packed_items(node)
        if packed is not None:
            return packed
        items = self._items(node)
        return None if {dict, list} & set(map(type, items)) else items

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        return ((under(path, i), item) for i, item in enumerate(self._items(node)))

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        name = "list" if isinstance(node, list) else node["kind"]
        make: Any = {"list": list, "tuple": tuple}.get(name)
        if name == "deque":
            make = functools.partial(collections.deque, maxlen=node["maxlen"])
        values = self._plain_values(node)
        if values is not None:
            return lambda: make(values)
        plans = [builder.plan(n, under(path, i)) for i, n in enumerate(self._items(node))]
        return lambda: make([plan() for plan in plans])

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        if not isinstance(target, (list, tuple, collections.deque)):
            _refuse_full(filling, target, path, "list")
            return filling.new(node, path)
        values = self._plain_values(node)
        count = len(self._items(node) if values is None else values)
        if len(target) != count:
            raise filling.complaint(path, f"it has {count} entries, the target {len(target)}")
        items = values
        if items is None:
            items = [
                filling.fill(n, t, under(path, i))
                for i, (n, t) in enumerate(zip(self._items(node), target, strict=True))
            ]
        if isinstance(target, tuple):
            return Later(lambda: tuple(map(resolved, items)))

        def assign() -> None:
            for i, value in enumerate(items):
                target[i] = resolved(value)

        filling.after(assign)
        return target

    def fits(self, node: Node, value: Any) -> bool:
        values = self._plain_values(node)
        items = self._items(node) if values is None else values
        if not isinstance(value, (list, tuple, collections.deque)) or len(value) != len(items):
            return False
        return values is not None or all(fits(n, v) for n, v in zip(items, value, strict=True))


class Mappings(Kind):
    """Dicts and what is like them."""

    _TYPES: dict[type, str] = {
        dict: "dict",
        OrderedDict: "ordered_dict",
        collections.Counter: "counter",
        collections.defaultdict: "default_dict",
        collections.UserDict: "user_dict",
        types.MappingProxyType: "mapping_proxy",
        types.SimpleNamespace: "namespace",
    }
    names = tuple(_TYPES.values())

    def takes(self, value: Any) -> bool:
        """Whether keys and factory can be written."""
        if type(value) not in self._TYPES or not _plain.are_keys(_entries(value)):
            return False
        return type(value) is not collections.defaultdict or _is_importable(value.default_factory)

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        entries = _entries(value)
        kinds = set(map(type, entries))
        # Numbers that are equal may have unequal nodes: then the text counts.
        keys: Any = tuple(entries)
        names = keys
        if kinds != {str} and kinds != {int}:
            nodes = [_plain.key_node(k) for k in entries]
            keys, names = json.dumps(nodes), tuple(map(_plain.key_text, nodes))
        walk.add((self, self._TYPES[type(value)], keys, _beside(value)))
        walk.children(value, path, names, entries.values())

    def node(self, outline: Any, path: str, token: Any) -> Node:
        _, name, keys, beside = token
        nodes = json.loads(keys) if isinstance(keys, str) else [_plain.key_node(k) for k in keys]
        items = [[k, outline.node(under(path, _plain.key_text(k)))] for k in nodes]
        return {"kind": name, **json.loads(beside), "items": items}

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        return ((under(path, _plain.key_text(k)), item) for k, item in node["items"])

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        plans = [
            (builder.key(k, path), builder.plan(n, under(path, _plain.key_text(k))))
            for k, n in node["items"]
        ]
        kind = node["kind"]
        factory = builder.factory(node["factory"], path) if kind == "default_dict" else None

        def make() -> Any:
            items = {k: plan() for k, plan in plans}
            if kind == "dict":
                return items
            if kind == "ordered_dict":
                made = OrderedDict(items)
                put_metadata(node, made)
                return made
            if kind == "default_dict":
                return collections.defaultdict(factory, items)
            if kind == "namespace":
                return types.SimpleNamespace(**items)
            return _MAPPING_OF[kind](items)

        return make

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        if isinstance(target, torch.nn.Module):
            return fill_module(filling, node, target, path)
        if isinstance(target, types.MappingProxyType):
            later = self.fill(filling, node, dict(target), path)
            return Later(lambda: types.MappingProxyType(later))
        if isinstance(target, (Mapping, types.SimpleNamespace)):
            self.fill_entries(filling, node, target, path)
            return target
        if is_stateful(target):
            return STATEFUL.fill(filling, {"state": node}, target, path)
        _refuse_full(filling, target, path, "dict")
        return filling.new(node, path)

    def fill_entries(self, filling: Any, node: Node, target: Any, path: str) -> bool:
        """Fills what a mapping holds. Returns whether any of it is made anew and put there."""
        entries = _entries(target)
        # By the text of their nodes: a key need not be made again to be found.
        there = {_plain.key_id(_plain.key_node(k) if _plain.are_keys((k,)) else str(k)): k for k in entries}
        saved = {_plain.key_id(k): (_plain.key_text(k), n) for k, n in node["items"]}
        if filling.strict and saved.keys() != there.keys():
            filling.complain_of_keys(
                [name for k, (name, _) in saved.items() if k not in there],
                [str(name) for k, name in there.items() if k not in saved],
                path,
            )
        values = [
            (there[k], filling.fill(n, entries[there[k]], under(path, name)))
            for k, (name, n) in saved.items()
            if k in there
        ]
        later = [(k, v) for k, v in values if isinstance(v, Later)]

        def assign() -> None:
            for k, v in later:
                entries[k] = v.value()  # type: ignore[index]
            put_metadata(node, target)

        filling.after(assign)
        return bool(later)

    def fits(self, node: Node, value: Any) -> bool:
        if not isinstance(value, (Mapping, types.SimpleNamespace)):
            return False
        entries = _entries(value)
        if len(entries) != len(node["items"]):
            return False
        try:
            pairs = [(n, entries[_plain.key_of(k, _no_class)]) for k, n in node["items"]]
        except (KeyError, Error):
            return False
        return all(fits(n, v) for n, v in pairs)


_MAPPING_OF: dict[str, Callable[[Any], Any]] = {
    "counter": collections.Counter,
    "user_dict": collections.UserDict,
    "mapping_proxy": types.MappingProxyType,
}


def _entries(mapping: Any) -> Mapping[Any, Any]:
    return vars(mapping) if isinstance(mapping, types.SimpleNamespace) else mapping


def _no_class(name: str) -> Any:
    raise Error("PERMISSION_DENIED", name)


def _is_importable(factory: Any) -> bool:
    try:
        return factory is None or _plain.imported(_plain.name_of(factory)) is factory
    except (AttributeError, ImportError, ValueError):
        return False


def _beside(value: Any) -> str:
    """What a mapping's node has beside its items, as JSON."""
    if type(value) is collections.defaultdict:
        factory = value.default_factory
        return json.dumps({"factory": None if factory is None else _plain.name_of(factory)})
    noted = _metadata(value)
    return json.dumps({"metadata": noted}) if noted else "{}"


# ---- What a module's state dict notes beside its entries.


def _metadata(value: Any) -> dict[str, dict[str, Node]]:
    """The plain values that a state dict has of each module, such as its version, as nodes."""
    noted = getattr(value, "_metadata", None)
    if not isinstance(noted, Mapping):
        return {}
    return {
        prefix: {k: _plain.node_of(v) for k, v in own.items() if type(v) in _plain.TYPES}
        for prefix, own in noted.items()
        if isinstance(prefix, str) and isinstance(own, Mapping)
    }


def put_metadata(node: Node, target: Any) -> None:
    """Gives a state dict the metadata that was saved; `load_state_dict` asks it for versions."""
    if "metadata" in node and isinstance(target, OrderedDict):
        target._metadata = OrderedDict(  # type: ignore[attr-defined]
            (prefix, {k: _plain.value_of(v) for k, v in own.items()})
            for prefix, own in node["metadata"].items()
        )


def _is_of_other_version(node: Node, state_dict: Any) -> bool:
    """Whether the metadata of a module in both, the saved and this state dict, differ."""
    saved = node.get("metadata", {})
    there = _metadata(state_dict)
    return any(
        {k: _plain.value_of(v) for k, v in saved[prefix].items()}
        != {k: _plain.value_of(v) for k, v in there[prefix].items()}
        for prefix in saved.keys() & there.keys()
    )


def _refuse_full(filling: Any, target: Any, path: str, saved: str) -> None:
    """Refuses a target of another kind, which would stay as it is, without a word. None asks for a new value."""
    if filling.strict and target is not None:
        raise filling.complaint(path, f"it is a {saved}, the target a {type(target).__name__}")


def fill_module(filling: Any, node: Node, module: torch.nn.Module, path: str) -> Any:
    """Fills a module's tensors in place, and gives it what had to be made anew."""
    there = state_of(module)
    # A module's own method may lack the argument.
    options = {} if filling.strict else {"strict": False}
    if _is_of_other_version(node, there):  # only the module can convert it
        value = filling.new(node, path)
        with filling.refusable():
            filling.keep(there.values())
            filling.after(lambda: module.load_state_dict(value.value(), **options))
        return module
    does_more = not is_own_memory(module, there) or does_more_at_a_load(module)
    with filling.refusable(does_more or any(_kind_name(n) != "tensor" for _, n in node["items"])):
        anew = MAPPINGS.fill_entries(filling, node, there, path)
        if anew or does_more:
            filling.after(lambda: module.load_state_dict(there, **options))
    return module


def _compare_groups(filling: Any, node: Node, current: Mapping[str, Any], path: str) -> None:
    """Refuses other groups of parameters than an optimizer's before anything is read."""
    groups = {_plain.key_text(k): n for k, n in node["items"]}.get("param_groups")
    if groups is None:
        return
    counts = []
    for _, group in SEQUENCE.children(groups, path):
        of = {_plain.key_text(k): n for k, n in group["items"]}["params"]
        packed = _plain.packed_items(of)
        counts.append(len(list(SEQUENCE.children(of, path)) if packed is None else packed))
    there = [len(group["params"]) for group in current["param_groups"]]
    filling.compare(counts, there, path, "has groups of so many parameters:")


class Stateful(Kind):
    """Whatever has ``state_dict`` and ``load_state_dict``."""

    names = ("stateful",)

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        walk.add((self, class_name(value)))
        walk.inside(value, path, state_of(value))

    def node(self, outline: Any, path: str, token: Any) -> Node:
        return {"kind": "stateful", "class": token[1], "state": outline.node(path)}

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        yield path, node["state"]

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        return builder.plan(node["state"], path)

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        inner = node["state"]
        if isinstance(target, torch.nn.Module) and _kind_name(inner) in Mappings.names:
            return fill_module(filling, inner, target, path)
        if not is_stateful(target):
            return filling.fill(inner, target, path)
        current = target.state_dict()
        with filling.refusable(not refuses_by_groups(target)):
            if fits(inner, current):
                value = filling.fill(inner, current, path)
            else:
                # An optimizer before its first step has nothing to read into.
                value = filling.new(inner, path, like=target)
                if refuses_by_groups(target):
                    _compare_groups(filling, inner, current, path)
            filling.after(lambda: target.load_state_dict(resolved(value)))
        return target


class Record(Kind):
    """Named tuples and dataclasses: a class is needed to make them again.

    A node has ``attributes`` only if the value has some that are no fields. Their items follow those of the fields.
    """

    names = ("namedtuple", "dataclass")

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        found = _records.contents(value)
        if found is None:
            OBJECT.flatten(walk, path, value)
            return
        fields, attributes = found
        name = "namedtuple" if isinstance(value, tuple) else "dataclass"
        walk.add((self, name, class_name(value), tuple(fields), tuple(attributes)))
        walk.children(value, path, (*fields, *attributes), (*fields.values(), *attributes.values()))

    def node(self, outline: Any, path: str, token: Any) -> Node:
        _, name, cls, fields, attributes = token
        items = [outline.node(under(path, f)) for f in (*fields, *attributes)]
        beside = {"attributes": list(attributes)} if attributes else {}
        return {"kind": name, "class": cls, "fields": list(fields), **beside, "items": items}

    def _items(self, node: Node) -> Iterator[tuple[str, Node]]:
        return zip((*node["fields"], *node.get("attributes", ())), node["items"], strict=True)

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        return ((under(path, f), n) for f, n in self._items(node))

    def _make(self, node: Node, path: str, cls: Any, values: dict[str, Any]) -> Any:
        """A new record of values in the order of a node's names."""
        fields = {f: values.pop(f) for f in node["fields"]}
        return _records.make(cls, path, fields, values)

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        plans = {f: builder.plan(n, under(path, f)) for f, n in self._items(node)}
        cls = builder.class_of(node["class"], path, node["kind"])
        return lambda: self._make(node, path, cls, {f: plan() for f, plan in plans.items()})

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        if not all(hasattr(target, f) for f in node["fields"]):
            _refuse_full(filling, target, path, node["kind"])
            return filling.new(node, path)
        values = {
            f: filling.fill(n, getattr(target, f), under(path, f)) if hasattr(target, f)
            else filling.new(n, under(path, f))
            for f, n in self._items(node)
        }

        def filled() -> dict[str, Any]:
            return {f: resolved(v) for f, v in values.items()}

        if isinstance(target, tuple):
            return Later(lambda: self._make(node, path, type(target), filled()))
        filling.after(lambda: _records.put(target, path, filled()))
        return target


class Deep(Kind):
    """A value that is nested deeply: it stands beside the others, so that nothing recurses far."""

    names = ("deep",)

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        return builder.deep(node["index"], path)

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        return filling.deep(node["index"], target, path)


class Differing(Kind):
    """What the ranks that saved it have differently, in a job of another size."""

    names = (DIFFERS,)

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        raise builder.differs(path, node["shards"])

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        raise filling.differs(path, node["shards"])


PLAIN, OBJECT, SEQUENCE, MAPPINGS, STATEFUL, RECORD = (
    Plain(), Object(), Sequence(), Mappings(), Stateful(), Record()
)  # fmt: skip
BY_NAME: dict[str, Kind] = {
    name: kind
    for kind in (PLAIN, OBJECT, SEQUENCE, MAPPINGS, STATEFUL, RECORD, Deep(), Differing())
    for name in kind.names
}


def _kind_name(node: Node) -> str:
    if isinstance(node, dict):
        return node["kind"]
    return "list" if isinstance(node, list) else "value"


def kind_of_node(node: Node, path: str) -> Kind:
    """The kind of a node.

    Raises:
        Error: UNIMPLEMENTED for one of a newer version.
    """
    name = _kind_name(node)
    kind = BY_NAME.get(name)
    if kind is None:
        raise Error("UNIMPLEMENTED", f"load {path or 'state'}: unknown kind {name!r}")
    return kind


def fits(node: Node, value: Any) -> bool:
    return kind_of_node(node, "").fits(node, value)


def container_kind(value: Any) -> Kind:
    """The kind of a value that is neither plain nor a tensor."""
    if is_stateful(value):
        return STATEFUL
    if MAPPINGS.takes(value):
        return MAPPINGS
    if type(value) in (list, tuple, collections.deque):
        return SEQUENCE
    if _records.is_record(value):
        return RECORD
    return OBJECT


def needed_classes(nodes: Iterator[Node]) -> set[str]:
    """Classes that a load of these nodes needs `allow` for."""
    return {
        node["class"] if "class" in node else node["factory"]
        for node in nodes
        if node["kind"] in ("tensor", "namedtuple", "dataclass", "enum") and "class" in node
        or node["kind"] == "default_dict" and node["factory"] not in (None, *_FACTORIES)
    }


def is_listed_factory(name: str) -> bool:
    return name in _FACTORIES
