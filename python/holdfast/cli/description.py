"""The plain values and objects in the description of a saved state, read without PyTorch.

A node is a plain value of JSON, a list of nodes, or an object with a ``kind`` and its children in
``items``, ``state`` or beside. Version 1 writes every value with its kind. Nodes of unknown kinds are
passed over, and what they hold is listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TENSOR_KINDS = ("tensor", "dtensor", "sparse", "subclass", "ndarray")
_MAPPING_KINDS = ("dict", "ordered_dict", "counter", "default_dict", "user_dict", "mapping_proxy", "namespace")


def _text(node: Any) -> str:
    if not isinstance(node, dict):
        return repr(node)
    if "packed" in node:
        return f"packed numbers {node['packed']}"
    kind: str = node["kind"]
    value: Any = node.get("value", node.get("name", ""))
    if kind == "float" and "0x" in value:
        return repr(float.fromhex(value))
    return repr(value) if kind in ("value", "bytes", "bytearray") else str(value)


def _key(key: Any) -> str:
    if isinstance(key, dict):
        return _text(key) if key["kind"] != "tuple" else f"({', '.join(map(_key, key['items']))})"
    return str(key)


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    items = node if isinstance(node, list) else node.get("items", [])
    if isinstance(node, dict) and node["kind"] in _MAPPING_KINDS:
        yield from ((_key(key), item) for key, item in items)
    else:
        names = node.get("fields") if isinstance(node, dict) else None
        yield from zip(names or map(str, range(len(items))), items, strict=False)
    if isinstance(node, dict) and "state" in node:
        yield "", node["state"]


def _leaves(structure: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and node of each plain value, object and tensor, in the order of the state."""
    stack = [iter([("", structure["root"])])]
    while stack:
        path, node = next(stack[-1], (None, None))
        if path is None:
            stack.pop()
        elif isinstance(node, dict) and node["kind"] == "deep":  # its node stands beside the root
            stack.append(iter([(path, structure["deep"][node["index"]])]))
        elif _is_tensor(node):
            yield path, node
        elif isinstance(node, list) or (isinstance(node, dict) and ("items" in node or "state" in node)):
            stack.append(iter([(".".join(filter(None, (path, name))), child) for name, child in _children(node)]))
        else:
            yield path, node


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


def values(structure: dict[str, Any]) -> dict[str, str]:
    """The plain values by name, as text."""
    return {name: _text(node) for name, node in leaves(structure) if not _is_object(node)}


def objects(structure: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """The pickled objects by name: class, and place and length among the pickles."""
    classes = {node["name"]: node.get("class", "") for _, node in leaves(structure) if _is_object(node)}
    return {name: (classes.get(name, ""), *place) for name, place in structure.get("objects", {}).items()}
