"""Calls that the framework's own ``save`` and ``async_save`` serve."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager

from holdfast import _arguments
from holdfast.dcp.staging import Stager
from holdfast.dcp.writer import StorageWriter
from holdfast.directories import path_text
from holdfast.errors import Error


def answers_with_both(stager: Any) -> bool | None:
    """Whether the framework would answer a stager with both futures; None: who knows."""
    if stager is None or isinstance(stager, (StorageWriter, BlockingAsyncStager)):
        return False
    if isinstance(stager, Stager):
        return stager.options.use_async_staging
    if type(stager) is DefaultStager:
        return bool(stager._config.use_async_staging)
    return None


def why_stock(operation: str, checkpoint_id: Any, writer: Any, stager: Any) -> str | None:
    """Why the framework's own function serves a call; None: ours does.

    Raises:
        Error: INVALID_ARGUMENT for a call that neither serves.
    """
    if writer is None and checkpoint_id is None:
        raise Error("INVALID_ARGUMENT", f"{operation}: pass checkpoint_id or storage_writer")
    if writer is not None and not isinstance(writer, StorageWriter):
        return f"the storage writer is a {type(writer).__name__}"
    if writer is None and checkpoint_id is not None and "://" in path_text(checkpoint_id, "save"):
        return "the checkpoint id is a URL"
    if not (stager is None or hasattr(stager, "stage")):
        raise _arguments.wrong(operation, "async_stager", stager, "a stager or None")
    if answers_with_both(stager) is None:
        return f"the stager is a {type(stager).__name__}"
    return None
