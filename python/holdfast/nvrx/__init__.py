"""nvidia-resiliency-ext through Holdfast: its asynchronous callers, and its local checkpoints.

`install` replaces what its users import by name; it is the function of `holdfast.megatron`, which does
both. `LocalCheckpointManager` and `TorchAsyncCheckpoint` may be used without it: each is a subclass, or
has all methods, of the class of that name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.megatron import install, uninstall

if TYPE_CHECKING:
    from holdfast.nvrx.local_manager import LocalCheckpointManager
    from holdfast.nvrx.torch_checkpoint import TorchAsyncCheckpoint

# Both come when they are asked for: nvidia-resiliency-ext may be missing.
_LAZY = {"LocalCheckpointManager": "local_manager", "TorchAsyncCheckpoint": "torch_checkpoint"}

__all__ = ["LocalCheckpointManager", "TorchAsyncCheckpoint", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast.nvrx' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"holdfast.nvrx.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("nvidia_resiliency_ext"):
            raise
        raise ModuleNotFoundError(
            f"holdfast.nvrx.{name} needs nvidia-resiliency-ext: install nvidia-resiliency-ext", name=error.name
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
