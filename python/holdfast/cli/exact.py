"""One text for each value, whatever process and format it comes from: equal texts are equal values."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch

from holdfast import _plain
from holdfast._tensor_kinds import PLAIN_TENSORS, as_bytes, in_memory, sparse_parts
from holdfast.cli import description


def text(value: Any) -> str:
    """A plain value, or containers of such, as Python writes them. All else is its class and a digest."""
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        items = ", ".join(map(text, value))
        return f"[{items}]" if kind is list else f"({items})" if kind is tuple else f"torch.Size([{items}])"
    if kind is dict:
        return "{" + ", ".join(f"{text(key)}: {text(item)}" for key, item in value.items()) + "}"
    if kind in (set, frozenset):
        return f"{kind.__name__}({', '.join(sorted(map(text, value)))})"
    if _plain.is_plain(value) and kind is not slice:
        return description.text(_plain.node_of(value))
    return f"{_plain.shown_class(value)}, SHA-256 {_digest(value)}"


def _digest(value: Any) -> str:
    """Of a pickle in which a value that occurs again is written again: whether two are one object is no part of their values."""
    for is_fast in (True, False):  # the latter for an object that contains itself
        data = io.BytesIO()
        pickler = _Pickler(data, protocol=4)
        pickler.fast = is_fast
        try:
            pickler.dump(value)
            break
        except (ValueError, RecursionError):
            if not is_fast:
                raise
    return hashlib.sha256(data.getvalue()).hexdigest()[:32]


class _Pickler(pickle.Pickler):
    """Writes tensors and arrays by their elements, and sets in an order."""

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in (set, frozenset):
            return text(value)
        if kind in PLAIN_TENSORS:
            return kind.__name__, str(value.dtype), str(value.layout), tuple(value.shape), _elements(value)
        is_array = kind.__module__ == "numpy" and kind.__name__ == "ndarray"
        if is_array and value.dtype.names is None and not value.dtype.hasobject:
            return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest()
        return None


def _elements(tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        return None
    if tensor.layout != torch.strided:
        return [_elements(part) for part in sparse_parts(tensor).values()]
    memory = in_memory(tensor.dequantize() if tensor.is_quantized else tensor)
    return hashlib.sha256(as_bytes(memory).numpy().data).digest()
