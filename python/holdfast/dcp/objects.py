"""Objects in a checkpoint, looked at before anything is made of them.

The framework's planner unpickles an object itself, with everything allowed. So its bytes are read
here first, by an unpickler that makes nothing of what it does not know, and refuses what is not on
the list: what the planner then loads can only use what was found allowed.
"""

from __future__ import annotations

import enum
import io
import zipfile
from typing import Any

import torch

from holdfast import _unpickle
from holdfast.errors import Error

# Rebuild tensors and their like inside of an object; torch allows them in weights-only loads, too.
_TENSORS = frozenset(
    """
    torch._utils:_rebuild_tensor torch._utils:_rebuild_tensor_v2 torch._utils:_rebuild_tensor_v3
    torch._utils:_rebuild_parameter torch._utils:_rebuild_sparse_tensor
    torch._utils:_rebuild_qtensor torch._tensor:_rebuild_from_type_v2
    torch.nn.parameter:Parameter torch:Tensor torch.storage:UntypedStorage
    torch.storage:TypedStorage torch._C:_nn torch:Generator
    """.split()
)

# What is made while looking: it can do nothing but be itself.
_MADE = _unpickle.SAFE | {"builtins:bytes"}

# Names of Python 2, which protocol 2 uses and the unpickler translates back.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class _Opaque:
    """Takes any call and any state, and is nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Opaque:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Looker(_unpickle.AllowList):
    def persistent_load(self, pid: Any) -> Any:
        return _Opaque()

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found
            if isinstance(found, type) and name.endswith("Storage"):
                return _Opaque
        found = super().find_class(module, name)
        if f"{module}:{name}" in _MADE or isinstance(found, enum.EnumMeta):
            return found
        return found if found is _unpickle.enum_member else _Opaque


def check(data: io.BytesIO, entry: str, allow: frozenset[str]) -> None:
    """Refuses an object that ``torch.save`` made if it needs what is not allowed.

    Raises:
        Error: PERMISSION_DENIED naming what it needs, DATA_LOSS for what cannot be read.
    """
    try:
        if data.getbuffer()[:4] != b"PK\3\4":
            # Older formats are several pickles in a row, which torch reads by rules of its own.
            raise Error(
                "PERMISSION_DENIED",
                f"load {entry}: not in torch.save's zip format, so it cannot be looked at first; "
                "if you trust this checkpoint, pass trust=True",
            )
        with zipfile.ZipFile(data) as archive:
            names = archive.namelist()
            described = [n for n in names if n.endswith("data.pkl")]
            if len(described) != 1 or any(n.endswith("constants.pkl") for n in names):
                raise Error(
                    "PERMISSION_DENIED",
                    f"load {entry}: not what torch.save makes of an object (TorchScript?)",
                )
            _Looker(archive.read(described[0]), f"load {entry}", _TENSORS | _MADE, allow).load()
    except Error:
        raise
    except Exception as error:
        raise Error("DATA_LOSS", f"load {entry}: its pickle cannot be read: {error}") from error
    finally:
        data.seek(0)
