"""Objects are read back through an allow-list: a pickle may otherwise run any code."""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Iterable
from typing import Any

from holdfast.errors import Error

# What common training states hold and what can do nothing but be itself.
SAFE = frozenset(
    """
    builtins:complex builtins:set builtins:frozenset builtins:bytearray builtins:slice builtins:range
    builtins:list builtins:dict builtins:tuple builtins:int builtins:float builtins:bool builtins:str
    collections:OrderedDict collections:defaultdict collections:deque collections:Counter
    datetime:datetime datetime:date datetime:time datetime:timedelta datetime:timezone
    decimal:Decimal fractions:Fraction uuid:UUID uuid:SafeUUID
    pathlib:Path pathlib:PosixPath pathlib:PurePath pathlib:PurePosixPath
    types:SimpleNamespace _io:BytesIO _codecs:encode copyreg:_reconstructor builtins:object
    numpy:dtype numpy:ndarray numpy:float64 numpy:float32 numpy:int64 numpy:int32 numpy:bool_
    numpy.core.multiarray:_reconstruct numpy.core.multiarray:scalar
    numpy._core.multiarray:_reconstruct numpy._core.multiarray:scalar
    torch:Size torch:device torch:dtype torch.serialization:_get_layout
    """.split()
)


def name_of(item: Any) -> str:
    """``module:qualified.name`` of a class or function, or the text itself."""
    return item if isinstance(item, str) else f"{item.__module__}:{item.__qualname__}"


def enum_member(owner: Any, name: Any) -> Any:
    """Stands in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enum.

    Raises:
        Error: PERMISSION_DENIED for any other use of it.
    """
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner[name]
    raise Error("PERMISSION_DENIED", f"it asks {owner!r} for {name!r}, which is no enum's member")


class AllowList(pickle.Unpickler):
    """Makes what is on a list, members of enums on it included, and refuses all else."""

    def __init__(self, data: bytes, operation: str, listed: frozenset[str], allow: frozenset[str]):
        super().__init__(io.BytesIO(data))
        self._operation = operation
        self._listed = listed | allow

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}:{name}"
        if full in self._listed:
            return super().find_class(module, name)
        if full == "builtins:getattr":
            return enum_member
        raise Error(
            "PERMISSION_DENIED",
            f"{self._operation}: it needs {full}, which is not on the list of what may be made; "
            f"if you trust this checkpoint, pass allow=[{full!r}]",
        )


def loads(data: bytes, entry: str, allow: Iterable[Any] = ()) -> Any:
    """Unpickles one object.

    Raises:
        Error: PERMISSION_DENIED naming what it needs, DATA_LOSS for what is no pickle.
    """
    allowed = frozenset(name_of(item) for item in allow)
    try:
        return AllowList(data, f"load {entry}", SAFE, allowed).load()
    except Error:
        raise
    except Exception as error:
        raise Error("DATA_LOSS", f"load {entry}: its pickle cannot be read: {error}") from error
