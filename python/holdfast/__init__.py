"""Fork-safe asynchronous checkpoints: ``h = holdfast.save_async(state, path)``.

The state is copied into pinned, shared staging memory; a writer process writes it from there with
io_uring and O_DIRECT; digests prove that what is on disk is what was there at the call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._native import __version__  # type: ignore[attr-defined]  # its types leave it out
from holdfast.directories import find_newest, list_checkpoints, recover, verify
from holdfast.errors import Error, TimeoutError

if TYPE_CHECKING:
    from holdfast._runtime import configure, staging, trim, warm_up
    from holdfast.handle import Save, flush
    from holdfast.loading import Checkpoint, load, open
    from holdfast.saving import save_async

# What needs torch comes when it is asked for.
_LAZY = {
    "configure": "_runtime",
    "staging": "_runtime",
    "trim": "_runtime",
    "warm_up": "_runtime",
    "Checkpoint": "loading",
    "load": "loading",
    "open": "loading",
    "Save": "handle",
    "flush": "handle",
    "save_async": "saving",
}

__all__ = [
    "Checkpoint",
    "Error",
    "Save",
    "TimeoutError",
    "__version__",
    "configure",
    "find_newest",
    "flush",
    "list_checkpoints",
    "load",
    "open",
    "recover",
    "save_async",
    "staging",
    "trim",
    "verify",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    try:
        if name in _LAZY:
            value = getattr(importlib.import_module(f"holdfast.{_LAZY[name]}"), name)
            globals()[name] = value
            return value
        if name in ("dcp", "observe", "snapshots"):
            return importlib.import_module(f"holdfast.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(f"holdfast.{name} needs PyTorch: install torch", name="torch") from error
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
