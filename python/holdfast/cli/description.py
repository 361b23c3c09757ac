"""The plain values and objects in the description of a saved state, read without PyTorch.

The description is JSON: a node has a ``kind``, and its children in ``items``, ``state`` or under
other keys. Nodes of unknown kinds are passed through, so that later kinds can still be listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TENSOR_KINDS = ("tensor", "dtensor", "sparse", "subclass", "ndarray")


def _is_node(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kind"), str)


def _text(node: dict[str, Any]) -> str:
    kind, value = node["kind"], node["value"]
    if kind == "float" and isinstance(value, str) and "0x" in value:
        return repr(float.fromhex(value))
    return repr(value) if kind in ("value", "bytes", "bytearray") else str(value)


def _children(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    items = node.get("items", ())
    names = node.get("fields") or [str(i) for i in range(len(items))]
    for name, item in zip(names, items, strict=False):
        if isinstance(item, list) and len(item) == 2 and _is_node(item[1]):
            key, item = item
            yield (str(key.get("value", key)) if isinstance(key, dict) else str(key)), item
        else:
            yield str(name), item
    if _is_node(node.get("state")):
        yield "", node["state"]


def leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and node of each plain value and object, in the order of the state."""
    if not _is_node(node) or node["kind"] in _TENSOR_KINDS:
        return
    if "value" in node or node["kind"] == "object":
        yield ".".join(path), node
        return
    for name, child in _children(node):
        yield from leaves(child, (*path, name) if name else path)


def values(structure: dict[str, Any]) -> dict[str, str]:
    """The plain values by name, as text."""
    return {name: _text(node) for name, node in leaves(structure["root"]) if "value" in node}


def objects(structure: dict[str, Any]) -> dict[str, tuple[str, int, int]]:
    """The pickled objects by name: class, and place and length among the pickles."""
    classes = {node.get("name"): node.get("class", "") for _, node in leaves(structure["root"])}
    return {name: (classes.get(name, ""), *place) for name, place in structure.get("objects", {}).items()}
