"""Merges the descriptions of one state by several ranks."""

from __future__ import annotations

import json
from typing import Any

from holdfast._kinds import DIFFERS, Mappings
from holdfast._plain import Node
from holdfast._tensor_kinds import share_of

# Where a node has those inside.
_BELOW = {
    "stateful": "state", "ndarray": "tensor", "dtensor": "local", "list": "items", "tuple": "items",
    "deque": "items", "namedtuple": "items", "dataclass": "items", "sparse": "parts",
    "subclass": "inner",
}  # fmt: skip
# What ranks may have differently. Of DTensors only replicas are compared.
_OWN = {"tensor": "device", "dtensor": "coordinate"}


def _text(node: Node) -> str:
    """Tells apart what Python takes for equal: True, 1 and 1.0; 0.0 and -0.0."""
    return json.dumps(node, sort_keys=True)


def merged(nodes: list[Node]) -> Node:
    """The node that all ranks have at one place; where their nodes differ, one of the kind DIFFERS.

    Args:
        nodes: by rank. Devices of tensors are taken from the first.
    """
    first = nodes[0]
    text = _text(first)
    if all(_text(node) == text for node in nodes):
        return first
    if all(isinstance(node, list) for node in nodes):
        return _each(nodes)
    if any(not isinstance(node, dict) or node["kind"] != nodes[0]["kind"] for node in nodes):
        return _differing()
    kind = first["kind"]
    below = "items" if kind in Mappings.names else _BELOW.get(kind)
    apart = (below, _OWN.get(kind))
    rest = [{k: v for k, v in node.items() if k not in apart} for node in nodes]
    divided = kind == "dtensor" and any(share_of(node) for node in nodes)
    if divided:
        return _differing(shards=True)
    if any(_text(node) != _text(rest[0]) for node in rest):
        return _differing()
    if below is None:
        return first if kind in _OWN else _differing()
    if any(below not in node for node in nodes):
        return _differing()
    inner = [node[below] for node in nodes]
    if kind in Mappings.names:
        return {**first, below: _entries(inner)}
    if isinstance(inner[0], list):
        items = _each(inner)
        return {**first, below: items} if isinstance(items, list) else items
    if kind in ("sparse", "subclass"):
        if any(parts.keys() != inner[0].keys() for parts in inner):
            return _differing()
        return {**first, below: {name: merged([p[name] for p in inner]) for name in inner[0]}}
    return {**first, below: merged(inner)}


def _differing(shards: bool = False) -> Node:
    """`shards`: of a DTensor, which holdfast.dcp would load into any number of ranks."""
    return {"kind": DIFFERS, "shards": shards}


def _each(ranks: list[list[Node]]) -> Node:
    if any(len(items) != len(ranks[0]) for items in ranks):
        return _differing()
    return [merged(list(items)) for items in zip(*ranks, strict=True)]


def _entries(ranks: list[list[Any]]) -> list[Any]:
    """The entries of a mapping; those that some rank lacks differ."""
    known = [{json.dumps(key): (key, item) for key, item in entries} for entries in ranks]
    items = []
    for text in dict.fromkeys(text for rank in known for text in rank):
        key = next(rank[text][0] for rank in known if text in rank)
        everywhere = all(text in rank for rank in known)
        items.append([key, merged([r[text][1] for r in known]) if everywhere else _differing()])
    return items
