"""Lightning through Holdfast: ``Trainer(plugins=[holdfast.lightning.CheckpointIO()])``.

`CheckpointIO` saves asynchronously, for the Trainer and for Fabric; `ModelParallelStrategy` and
`FSDPStrategy` save sharded checkpoints so; `OffloadCallback` moves a state to the CPU in front of any
other plugin. They serve the package `lightning` or `pytorch_lightning`, whichever was imported first.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.errors import needs_torch

if TYPE_CHECKING:
    from holdfast.lightning.checkpoint_io import CheckpointIO
    from holdfast.lightning.offload import OffloadCallback
    from holdfast.lightning.strategies import FSDPStrategy, ModelParallelStrategy

# Each comes when it is asked for: Fabric alone has no callbacks and no strategies of the Trainer.
_LAZY = {
    "CheckpointIO": "checkpoint_io",
    "FSDPStrategy": "strategies",
    "ModelParallelStrategy": "strategies",
    "OffloadCallback": "offload",
}

__all__ = ["CheckpointIO", "FSDPStrategy", "ModelParallelStrategy", "OffloadCallback"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast.lightning' has no attribute {name!r}")
    with needs_torch(f"holdfast.lightning.{name}"):
        value = getattr(importlib.import_module(f"holdfast.lightning.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
