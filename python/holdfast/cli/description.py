"""The plain values and objects in the description of a saved state, read without PyTorch.

A node is a plain value of JSON, a list of nodes, or an object with a ``kind`` and its children in
``items``, ``state`` or beside. Version 1 writes every value with its kind. Nodes of unknown kinds are
passed over, and what they hold is listed.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from holdfast.errors import Error

_TENSOR_KINDS = ("tensor", "dtensor", "sparse", "subclass", "ndarray")
_MAPPING_KINDS = ("dict", "ordered_dict", "counter", "default_dict", "user_dict", "mapping_proxy", "namespace")


def _float_text(value: str) -> str:
    return repr(float.fromhex(value)) if "0x" in value else value


# Kinds whose text is more than their value.
_TEXT: dict[str, Callable[[Any], str]] = {
    "value": repr,
    "int": str,
    "float": _float_text,
    "complex": lambda parts: f"complex({', '.join(map(_float_text, parts))})",
    "bytes": lambda value: repr(base64.b64decode(value)),
    "bytearray": lambda value: repr(bytearray(base64.b64decode(value))),
    "dtype": lambda value: f"torch.{value}",
    "device": lambda value: f"device({value})",
}


def text(node: Any) -> str:
    """The text of a node without children. Other values have other texts."""
    if not isinstance(node, dict):
        return repr(node)
    kind = node["kind"]
    value: Any = node.get("value")
    if "packed" in node:
        return f"{kind} of {len(value) * 3 // 4 // 8} packed numbers {node['packed']}, SHA-256 {_digest(value)}"
    if kind == "numpy":
        return f"numpy.{node['dtype']}({text(value)})"
    if kind == "enum":
        return f"{node['class']}.{node['name']}"
    return _TEXT[kind](value) if kind in _TEXT else json.dumps(node, sort_keys=True)


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:32]


def _key(key: Any) -> str:
    if isinstance(key, dict):
        return text(key) if key["kind"] != "tuple" else f"({', '.join(map(_key, key['items']))})"
    return str(key)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    items = node if isinstance(node, list) else node.get("items", [])
    kind = "list" if isinstance(node, list) else node["kind"]
    if kind in _MAPPING_KINDS:
        yield from ((_key(key), item) for key, item in items)
    elif "fields" in node:
        yield from zip((*node["fields"], *node.get("attributes", ())), items, strict=True)
    else:
        # A set has no order.
        yield from ((str(i), item) for i, item in enumerate(sorted(items, key=json.dumps) if kind in ("set", "frozenset") else items))
    if isinstance(node, dict) and "state" in node:
        yield "", node["state"]


def _nodes(structure: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and node of everything, in the order of the state."""
    stack = [iter([("", structure["root"])])]
    seen: set[int] = set()
    while stack:
        path, node = next(stack[-1], (None, None))
        if path is None:
            stack.pop()
        elif isinstance(node, dict) and node["kind"] == "deep":  # its node stands beside the root, and is the value of one alone
            if node["index"] in seen:
                raise Error("DATA_LOSS", f"load {path or 'state'}: its description contains itself")
            seen.add(node["index"])
            stack.append(iter([(path, structure["deep"][node["index"]])]))
        else:
            yield path, node
            if _is_container(node):
                stack.append(iter([(".".join(filter(None, (path, name))), child) for name, child in _children(node)]))


def _leaves(structure: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and node of each plain value, object and tensor, in the order of the state."""
    return ((name, node) for name, node in _nodes(structure) if not _is_container(node))


def _is_container(node: Any) -> bool:
    return isinstance(node, list) or isinstance(node, dict) and not _is_tensor(node) and ("items" in node or "state" in node)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, dict) and node["kind"] in _TENSOR_KINDS


def _is_object(node: Any) -> bool:
    return isinstance(node, dict) and node["kind"] == "object"


def leaves(structure: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and node of each plain value and object, in the order of the state."""
    return ((name, node) for name, node in _leaves(structure) if not _is_tensor(node))


def tied(structure: dict[str, Any]) -> dict[str, str]:
    """The names of tied tensors that are stored under another name, with that name."""

    def view(node: Any) -> list[Any]:
        return [node.get(key) for key in ("dtype", "shape", "offset", "stride")]

    tensors = {name: node for name, node in _leaves(structure) if _is_tensor(node) and "stored" in node}
    return {
        name: node["stored"]
        for name, node in tensors.items()
        if name != node["stored"] in tensors and view(tensors[node["stored"]]) == view(node)
    }


def views(structure: dict[str, Any]) -> dict[str, str]:
    """The tensors by name, with their places in what is stored, as text."""
    return {name: json.dumps(_form(node), sort_keys=True) for name, node in _leaves(structure) if _is_tensor(node)}


def _form(node: Any) -> Any:
    """A node without what says nothing of the elements: where the tensor was, and whether it had a gradient."""
    if not isinstance(node, dict):
        return node
    return {key: _form(item) for key, item in node.items() if key not in ("device", "parameter", "requires_grad")}


def values(structure: dict[str, Any]) -> dict[str, str]:
    """The plain values by name, as text. Other values have other texts. A further value of one name has its number behind it."""
    found: dict[str, str] = {}
    counts: collections.Counter[str] = collections.Counter()
    for name, node in leaves(structure):
        if not _is_object(node):
            counts[name] += 1
            found[name if counts[name] == 1 else f"{name} ({counts[name]})"] = text(node)
    return found


def containers(structure: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """The kinds of the containers by name, as text, and whether they are empty."""
    return {name: (_shell(node), not any(_children(node))) for name, node in _nodes(structure) if _is_container(node)}


def _shell(node: Any) -> str:
    """A container without what it holds."""
    if isinstance(node, list):
        return "list"
    rest = {key: item for key, item in node.items() if key in ("class", "factory", "maxlen")}
    return f"{node['kind']} {json.dumps(rest, sort_keys=True)}" if rest else str(node["kind"])


def objects(structure: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """The pickled objects by name: class, and place and length among the pickles."""
    classes = {node["name"]: node.get("class", "") for _, node in leaves(structure) if _is_object(node)}
    return {name: (classes.get(name, ""), begin, length) for name, (begin, length) in structure.get("objects", {}).items()}
