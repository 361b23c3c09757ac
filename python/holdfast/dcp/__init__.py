"""PyTorch Distributed Checkpoint through Holdfast: ``import holdfast.dcp as dcp``.

``save``, ``async_save`` and ``load`` take the place of those of ``torch.distributed.checkpoint``, with
the same arguments; its other names are found here, too. `StorageWriter`, `StorageReader` and `Stager`
serve the framework's own functions. The files are ordinary DCP checkpoints either way.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as _stock

from holdfast.dcp.proof import verify
from holdfast.dcp.reader import StorageReader, load
from holdfast.dcp.recovery import recover
from holdfast.dcp.saving import async_save, save
from holdfast.dcp.staging import Stager
from holdfast.dcp.writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter", "async_save", "load", "recover", "save", "verify"]


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_stock)})
