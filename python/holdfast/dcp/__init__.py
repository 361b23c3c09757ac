"""PyTorch Distributed Checkpoint through Holdfast.

``holdfast.dcp.async_save`` takes the place of ``torch.distributed.checkpoint.async_save``;
`StorageWriter` and `StorageReader` serve the framework's own ``save``, ``async_save`` and ``load``.
The files are ordinary DCP checkpoints either way.
"""

from __future__ import annotations

from holdfast.dcp.async_save import async_save
from holdfast.dcp.proof import verify
from holdfast.dcp.reader import StorageReader
from holdfast.dcp.staging import Stager
from holdfast.dcp.writer import StorageWriter

__all__ = ["Stager", "StorageReader", "StorageWriter", "async_save", "verify"]
