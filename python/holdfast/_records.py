"""Named tuples and dataclasses: what ``pickle`` stores of them, and how they are made of it."""

from __future__ import annotations

import copyreg
import dataclasses
from collections.abc import Mapping
from typing import Any

from holdfast.errors import Error


def is_record(value: Any) -> bool:
    """Whether it is a named tuple or an instance of a dataclass."""
    return isinstance(value, tuple) and hasattr(value, "_fields") or dataclasses.is_dataclass(type(value))


def contents(value: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The fields of a record, and its further attributes.

    Returns:
        None if its class has a pickle form of its own, as enums and subclasses of dict have.
    """
    cls = type(value)
    if cls.__reduce_ex__ is not object.__reduce_ex__ or cls.__reduce__ is not object.__reduce__:
        return None
    # The dataclasses module gives frozen classes with slots a state that is a list.
    set_state = getattr(cls, "__setstate__", None)
    if set_state is not None and set_state.__module__ != "dataclasses":
        return None
    try:
        function, arguments, state, *items = value.__reduce_ex__(2)
    except Exception:  # the pickler raises it again, and the error names the entry
        return None
    if function is not getattr(copyreg, "__newobj__") or any(part is not None for part in items):  # noqa: B009
        return None
    if set_state is not None:
        state = dict(zip((f.name for f in dataclasses.fields(value)), state, strict=True))
    parts = state if type(state) is tuple else (state,)
    if any(type(part) not in (dict, type(None)) for part in parts):
        return None
    stored = {k: v for part in parts for k, v in (part or {}).items() if is_attribute(k)}
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True)), stored  # type: ignore[attr-defined]
    if len(arguments) != 1:
        return None
    fields = {f.name: stored.pop(f.name) for f in dataclasses.fields(value) if f.name in stored}
    return fields, stored


def is_attribute(name: Any) -> bool:
    """Whether an attribute is the program's. Names as ``__orig_class__`` are Python's."""
    return isinstance(name, str) and not name[:2] == "__" == name[-2:]


def make(cls: Any, path: str, fields: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
    """A record of these contents. No constructor runs: it would compute values once more.

    Fields of a dataclass that the checkpoint lacks get their defaults.

    Raises:
        Error: FAILED_PRECONDITION for a class that cannot have them.
    """
    try:
        if hasattr(cls, "_fields"):
            if tuple(fields) != cls._fields:
                raise AttributeError(f"it has the fields {', '.join(cls._fields)}")
            made = tuple.__new__(cls, fields.values())
            put(made, path, attributes)
        else:
            made = object.__new__(cls)
            put(made, path, {**_defaults(cls, {**fields, **attributes}), **fields, **attributes})
    except (AttributeError, TypeError) as error:
        raise _misfit(cls, path, error) from error
    return made


def _misfit(cls: Any, path: str, error: Exception) -> Error:
    name = getattr(cls, "__qualname__", cls)
    return Error(
        "FAILED_PRECONDITION",
        f"load {path or 'state'}: a {name} cannot hold what was saved: {error}; load with the class that was saved",
    )


def _defaults(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(cls):
        if field.name in given:
            continue
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def put(value: Any, path: str, attributes: Mapping[str, Any]) -> None:
    """Sets attributes, of a frozen dataclass, too.

    Raises:
        Error: DATA_LOSS for a name that no save stores, FAILED_PRECONDITION for one that the class refuses.
    """
    for name, item in attributes.items():
        if not is_attribute(name):
            raise Error("DATA_LOSS", f"load {path or 'state'}: its attribute {name!r:.80} is none that a save stores")
        try:
            object.__setattr__(value, name, item)
        except (AttributeError, TypeError) as error:
            raise _misfit(type(value), path, error) from error
