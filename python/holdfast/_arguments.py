"""Arguments of public functions, compared with their annotations before anything begins."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import numbers
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from holdfast.errors import Error

P = ParamSpec("P")
R = TypeVar("R")
# Arguments that may hold secrets: no message shows them.
_SECRET = frozenset({"storage"})
# What says whether a value is one that an argument takes, and words for such values.
Kind = tuple[Callable[[Any], bool], str]


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number from 0 to 2^64 - 1."""
    try:
        return not isinstance(value, bool) and 0 <= operator.index(value) < 1 << 64
    except TypeError:
        return False


def is_number(value: Any) -> bool:
    """Whether a value is a real number; NaN is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value == value


_KINDS: dict[Any, Kind] = {
    bool: (lambda value: isinstance(value, bool), "True or False"),
    int: (is_whole, "a whole number from 0 to 2^64 - 1"),
    float: (is_number, "a number"),
    str: (lambda value: isinstance(value, str), "a str"),
    type(None): (lambda value: value is None, "None"),
    dict: (lambda value: isinstance(value, dict), "a dict"),
    collections.abc.Mapping: (lambda value: isinstance(value, collections.abc.Mapping), "a dict"),
}


def _series(origin: Any, inner: tuple[Any, ...]) -> Kind:
    """Several values; text is none of these."""
    of_text = inner == (str,)

    def is_one(value: Any) -> bool:
        if isinstance(value, (str, bytes)) or not isinstance(value, origin):
            return False
        return not of_text or all(isinstance(each, str) for each in value)

    return is_one, "a list or a tuple" + (" of str" if of_text else "")


def _kind(annotation: Any) -> Kind | None:
    """What a value of the annotation is; None: anything, or what the function itself says more of."""
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType):
        inner = typing.get_args(annotation)
        kinds = [kind for kind in map(_kind, inner) if kind is not None]
        if len(kinds) < len(inner):
            return None
        return (lambda value: any(test(value) for test, _ in kinds)), " or ".join(words for _, words in kinds)
    if origin is typing.Literal:
        choices = typing.get_args(annotation)
        return (lambda value: isinstance(value, str) and value in choices), f"one of {', '.join(choices)}"
    if origin in _KINDS:
        return _KINDS[origin]
    if origin in (collections.abc.Iterable, collections.abc.Collection, collections.abc.Sequence):
        return _series(origin, typing.get_args(annotation))
    package = origin.__module__.partition(".")[0] if isinstance(origin, type) else ""
    if package == "holdfast":
        return (lambda value: isinstance(value, origin)), f"a {origin.__module__}.{origin.__qualname__}"
    if package == "torch":  # its classes have names of private modules
        return (lambda value: isinstance(value, origin)), f"PyTorch's {origin.__qualname__}"
    return None


@functools.cache
def _kinds(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Kind]]:
    """The names of a function's parameters, and what those are that are compared."""
    hints = typing.get_type_hints(function)
    names = tuple(inspect.signature(function).parameters)
    kinds = {name: _kind(hints.get(name)) for name in names}
    return names, {name: kind for name, kind in kinds.items() if kind is not None}


def check(function: Callable[..., Any], given: dict[str, Any], operation: str) -> None:
    """Compares arguments, by name, with the annotations of a function that takes them.

    Raises:
        Error: INVALID_ARGUMENT naming the first wrong one.
    """
    kinds = _kinds(function)[1]
    for name, value in given.items():
        if name in kinds and not kinds[name][0](value):
            raise wrong(operation, name, value, kinds[name][1])


def wrong(operation: str, name: str, value: Any, expected: str) -> Error:
    """The error of an argument that is none of the values that are expected."""
    shown = f"of type {type(value).__name__}" if name in _SECRET else reprlib.repr(value)
    return Error("INVALID_ARGUMENT", f"{operation}: {name} {shown}: {expected} is expected")


def check_seconds(operation: str, **times: float) -> None:
    """Refuses a negative time.

    Raises:
        Error: INVALID_ARGUMENT naming the first one.
    """
    for name, seconds in times.items():
        if seconds < 0:
            raise wrong(operation, name, seconds, "a number of seconds from 0")


def unknown(names: Iterable[str], known: Iterable[str]) -> str:
    """What to say of names that are no options: the nearest ones that are, and all."""
    listed, known = sorted(names), sorted(known)
    nearest = dict.fromkeys(each for name in listed for each in difflib.get_close_matches(name, known, 1))
    hint = f" (did you mean {', '.join(nearest)}?)" if nearest else ""
    return f"there is no option {', '.join(listed)}{hint}; there is {', '.join(known)}"


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function, or ``__init__``: what its annotations exclude is refused when it is called.

    An annotation `int` stands for a number of things: from 0.
    """
    operation = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    parameters = inspect.signature(function).parameters.values()
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in ("self", "runtime")}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if not takes_any and (others := kwargs.keys() - by_name - {"runtime"}):
            raise TypeError(f"{operation}: {unknown(others, by_name)}")
        # Too many arguments, and one given twice, are the function's own to tell.
        check(function, {**dict(zip(_kinds(function)[0], args)), **kwargs}, operation)  # noqa: B905
        return function(*args, **kwargs)

    return called
