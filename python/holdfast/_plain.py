"""Plain values as nodes of a description, which are JSON, and back: bit for bit.

None, bool, str, finite float and int stand for themselves, a list of plain values for a list. All
other nodes are objects with a ``kind``. Version 1 of the format wrote every value as an object, and
floats in C's hexadecimal form.
"""

from __future__ import annotations

import array
import base64
import enum
import importlib
import json
import math
import re
import reprlib
import struct
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from holdfast import _dtypes
from holdfast.errors import Error

Node = Any
Classes = Callable[[str], Any]  # the class of a name, or an error

# Beyond 2^53 other readers of JSON lose digits.
_INT_MAX = 2**53
# Longer lists of numbers are kept as their bytes: text takes ten times as long.
_PACKED_MIN = 1024
_PACKED = {int: "q", float: "d"}
_NUMBERS = ("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
            "float16", "float32", "float64", "complex64", "complex128")  # fmt: skip
_CLASS_NAME = re.compile(r"[^\s:]+:[^\s:]+")
_DOTTED = re.compile(r"\w+(\.\w+)+")
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}


def name_of(item: Any) -> str:
    """``module:qualified.name`` of a class or function, or the text itself."""
    return item if isinstance(item, str) else f"{item.__module__}:{item.__qualname__}"


def allowed(allow: Iterable[Any], operation: str) -> frozenset[str]:
    """The names of what `allow` has: classes and functions, or their names.

    Raises:
        Error: INVALID_ARGUMENT for the first that is neither.
    """
    names = []
    for item in allow:
        is_text = isinstance(item, str)
        named = is_text or all(isinstance(getattr(item, n, None), str) for n in ("__module__", "__qualname__"))
        if not named or is_text and not _CLASS_NAME.fullmatch(item):
            text = reprlib.repr(item)
            hint = f", as {':'.join(item.rsplit('.', 1))!r}" if is_text and _DOTTED.fullmatch(item) else ""
            raise Error("INVALID_ARGUMENT", f"{operation}: allow {text}: a class or \"module:Class\" is expected{hint}")
        names.append(name_of(item))
    return frozenset(names)


def is_method(value: Any) -> bool:
    """Whether it is a method of an object or a class. A pickle of it has the object, and no load makes it."""
    owner = getattr(value, "__self__", None)
    return isinstance(value, (types.MethodType, types.BuiltinMethodType)) and not isinstance(owner, (type(None), types.ModuleType))


def check_no_method(path: str, value: Any) -> None:
    """Refuses a method in a state, as where the parentheses of a call are missing.

    Raises:
        Error: INVALID_ARGUMENT.
    """
    if is_method(value):
        raise Error("INVALID_ARGUMENT", f"save {path or 'state'}: {value.__qualname__} is a method; call it: {value.__name__}()")


def check_text(text: str, operation: str) -> None:
    """Refuses a name with lone surrogates, as bytes that are not UTF-8 have.

    Raises:
        Error: INVALID_ARGUMENT.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        said = operation.encode(errors="backslashreplace").decode()
        raise Error("INVALID_ARGUMENT", f"{said}: the name is not UTF-8") from None


def shown_class(value: Any) -> str:
    """The class of a value in a message."""
    return class_name(value).removeprefix("builtins:")


def class_name(value: Any) -> str:
    """``module:qualified.name`` of the class of a value."""
    return name_of(type(value))


def imported(name: str) -> Any:
    """What ``module:qualified.name`` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


# ---- Scalars.


def _float_text(value: float) -> str:
    """Infinity by name, a NaN, which has a payload, by its eight bytes."""
    return repr(value) if value == value else "nan:" + struct.pack(">d", value).hex()


def _float_of(text: Any) -> float:
    if isinstance(text, float):
        return text
    if text.startswith("nan:"):
        return struct.unpack(">d", bytes.fromhex(text[4:]))[0]
    return float.fromhex(text) if "x" in text else float(text)


def _int_node(value: int) -> Node:
    if -_INT_MAX < value < _INT_MAX:
        return value
    # Python bounds the digits of a decimal text.
    return {"kind": "int", "value": str(value) if value.bit_length() < 1000 else hex(value)}


def _float_node(value: float) -> Node:
    return value if math.isfinite(value) else {"kind": "float", "value": _float_text(value)}


def _complex_node(value: complex) -> Node:
    return {"kind": "complex", "value": [_float_text(value.real), _float_text(value.imag)]}


def _bytes_node(value: bytes | bytearray) -> Node:
    return {"kind": type(value).__name__, "value": base64.b64encode(value).decode()}


def _itself(value: Any) -> Node:
    return value


_OF_TYPE: dict[type, Callable[[Any], Node]] = {
    type(None): _itself,
    bool: _itself,
    str: _itself,
    int: _int_node,
    float: _float_node,
    complex: _complex_node,
    bytes: _bytes_node,
    bytearray: _bytes_node,
    torch.dtype: lambda v: {"kind": "dtype", "value": _dtypes.torch_name(v)},
    torch.device: lambda v: {"kind": "device", "value": str(v)},
    torch.Size: lambda v: {"kind": "size", "items": list(v)},
}
# Types whose every value is plain.
TYPES = frozenset(_OF_TYPE)
_CONTAINERS = frozenset([list, tuple, dict])


def is_plain(value: Any) -> bool:
    """Whether it is a plain value, or a container of nothing else."""
    kind = type(value)
    if kind in TYPES:
        return True
    if kind in _CONTAINERS:
        values = value.values() if kind is dict else value
        return TYPES.issuperset(map(type, values)) and (kind is not dict or are_keys(value))
    if kind in _SETS:
        return are_keys(value)
    if kind is slice:
        return TYPES.issuperset(map(type, (value.start, value.stop, value.step)))
    return _is_number(kind)


def _is_number(kind: type) -> bool:
    return kind.__module__ == "numpy" and kind.__name__ in (*_NUMBERS, "bool")


def are_keys(keys: Iterable[Any]) -> bool:
    """Whether `key_node` can write all of them."""
    return TYPES.issuperset(map(type, keys)) or all(
        are_keys(key) if kind is tuple
        else isinstance(key, enum.Enum) and key.name in kind.__members__ or _is_number(kind)
        for key in keys
        if (kind := type(key)) not in TYPES
    )


def node_of(value: Any) -> Node:
    """The node of a plain value."""
    kind = type(value)
    scalar = _OF_TYPE.get(kind)
    if scalar is not None:
        return scalar(value)
    if kind in (list, tuple):
        return _sequence(value)
    if kind is dict:
        return {"kind": "dict", "items": [[key_node(k), node_of(v)] for k, v in value.items()]}
    if kind in _SETS:
        return {"kind": _SETS[kind], "items": [key_node(v) for v in value]}
    if kind is slice:
        return {"kind": "slice", "items": [node_of(p) for p in (value.start, value.stop, value.step)]}
    return _number_node(value)


def _sequence(values: list[Any] | tuple[Any, ...]) -> Node:
    name = type(values).__name__
    kinds = set(map(type, values))
    if len(values) >= _PACKED_MIN and len(kinds) == 1 and kinds <= _PACKED.keys():
        code = _PACKED[kinds.pop()]
        try:
            packed = base64.b64encode(array.array(code, values)).decode()
            return {"kind": name, "packed": code, "value": packed}
        except OverflowError:  # an int of more than 64 bits
            pass
    items = [_OF_TYPE[type(v)](v) for v in values]
    return items if name == "list" else {"kind": name, "items": items}


def _number_node(value: Any) -> Node:
    plain = value.item()
    exact = type(value)(plain).tobytes() == value.tobytes()
    return {"kind": "numpy", "dtype": str(value.dtype), "value": node_of(plain if exact else value.tobytes())}


def _number_of(node: Node) -> Any:
    import numpy

    value = value_of(node["value"])
    dtype = numpy.dtype(node["dtype"])
    return numpy.frombuffer(value, dtype)[0] if type(value) is bytes else dtype.type(value)


def _items(node: Node) -> list[Any]:
    if "packed" in node:
        return array.array(node["packed"], base64.b64decode(node["value"])).tolist()
    return [value_of(n) for n in node["items"]]


_OF_KIND: dict[str, Callable[[Node], Any]] = {
    "value": lambda n: n["value"],
    "int": lambda n: int(n["value"], 0),
    "float": lambda n: _float_of(n["value"]),
    "complex": lambda n: complex(*map(_float_of, n["value"])),
    "bytes": lambda n: base64.b64decode(n["value"]),
    "bytearray": lambda n: bytearray(base64.b64decode(n["value"])),
    "dtype": lambda n: _dtypes.torch_dtype(n["value"]),
    "device": lambda n: torch.device(n["value"]),
    "size": lambda n: torch.Size(n["items"]),
    "slice": lambda n: slice(*_items(n)),
    "numpy": _number_of,
}


def is_scalar_node(node: Node) -> bool:
    """Whether a node is of a value that is no container."""
    return not isinstance(node, (dict, list)) or isinstance(node, dict) and node["kind"] in _OF_KIND


def packed_items(node: Node) -> Any:
    """The list or tuple of a node that holds the bytes of numbers; None for any other node."""
    if not isinstance(node, dict) or "packed" not in node:
        return None
    return tuple(_items(node)) if node["kind"] == "tuple" else _items(node)


def value_of(node: Node) -> Any:
    """The value of a node that `is_scalar_node`."""
    return _OF_KIND[node["kind"]](node) if isinstance(node, dict) else node


# ---- Keys.


def key_node(key: Any) -> Node:
    """The node of a mapping's key, or of an item of a set: plain, a tuple or a member of an enum."""
    if type(key) is tuple:
        return {"kind": "tuple", "items": [key_node(k) for k in key]}
    if isinstance(key, enum.Enum):
        return {"kind": "enum", "class": class_name(key), "name": key.name}
    return node_of(key)


def key_of(node: Node, classes: Classes) -> Any:
    """The key that `key_node` wrote."""
    if isinstance(node, dict):
        if node["kind"] == "tuple":
            return tuple(key_of(k, classes) for k in node["items"])
        if node["kind"] == "enum":
            return classes(node["class"])[node["name"]]
    return value_of(node)


def key_text(node: Node) -> str:
    """A key in a path, as ``str(key)`` has it."""
    return str(key_of(node, _EnumText))


def key_id(node: Node) -> str:
    """One text for each key, of the node of any version."""
    if isinstance(node, str):  # most keys
        return "s" + node
    if isinstance(node, dict) and node["kind"] == "tuple":
        return "(" + ",".join(map(key_id, node["items"])) + ")"
    return encode(node_of(value_of(node)) if is_scalar_node(node) else node)


class _EnumText:
    """In the place of an enum's class: members by their text."""

    def __init__(self, name: str) -> None:
        self._name = name.rpartition(".")[2].rpartition(":")[2]

    def __getitem__(self, member: str) -> str:
        return f"{self._name}.{member}"


# ---- Text.

encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def text_of(value: Any) -> str:
    """The JSON of a plain value."""
    return encode(node_of(value))

