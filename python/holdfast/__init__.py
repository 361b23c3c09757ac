"""Fork-safe asynchronous checkpoints: ``h = holdfast.save_async(state, path)``.

Or ``checkpointer = holdfast.Checkpointer(directory, keep_last=3)`` for a run's checkpoints by step.

The state is copied into pinned, shared staging memory; a writer process writes it from there with
io_uring and O_DIRECT; digests prove that what is on disk is what was there at the call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._native import __version__  # type: ignore[attr-defined]  # its types leave it out
from holdfast.directories import find_newest, list_checkpoints, newest, verify
from holdfast.drain import Drain
from holdfast.errors import Error, needs_torch
from holdfast.errors import TimeoutError as TimeoutError
from holdfast.recovery import recover

if TYPE_CHECKING:
    from holdfast._runtime import configure, staging, trim, warm_up
    from holdfast.checkpointer import Checkpointer
    from holdfast.files import remove_file, save_file
    from holdfast.handle import Save, flush
    from holdfast.loading import Checkpoint, load
    from holdfast.loading import open as open
    from holdfast.saving import save, save_async

# What needs torch comes when it is asked for.
_LAZY = {
    "Checkpoint": "loading",
    "Checkpointer": "checkpointer",
    "Save": "handle",
    "configure": "_runtime",
    "flush": "handle",
    "load": "loading",
    "open": "loading",
    "save": "saving",
    "remove_file": "files",
    "save_async": "saving",
    "save_file": "files",
    "staging": "_runtime",
    "trim": "_runtime",
    "warm_up": "_runtime",
}
_MODULES = ("dcp", "events", "lightning", "megatron", "nvrx", "observe", "snapshots")
# Not in `dir`: its import fails without the framework, and `help` and `inspect.getmembers` import all that `dir` names.
_UNLISTED = ("torchtitan",)

# Without `open` and `TimeoutError`, which would shadow the built-in ones.
__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Drain",
    "Error",
    "Save",
    "__version__",
    "configure",
    "find_newest",
    "flush",
    "list_checkpoints",
    "load",
    "newest",
    "recover",
    "remove_file",
    "save",
    "save_async",
    "save_file",
    "staging",
    "trim",
    "verify",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    with needs_torch(f"holdfast.{name}"):
        if name in _LAZY:
            value = getattr(importlib.import_module(f"holdfast.{_LAZY[name]}"), name)
            globals()[name] = value
            return value
        if name in _MODULES or name in _UNLISTED:
            return importlib.import_module(f"holdfast.{name}")
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
