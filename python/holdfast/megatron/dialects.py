"""What `get_async_strategy` answers: every name of a dialect, by Holdfast."""

from __future__ import annotations

from typing import Any

from holdfast.errors import Error
from holdfast.megatron import stock
from holdfast.megatron.planning import CheckpointMetadataCache, finalize, plan_mcore, plan_nvrx
from holdfast.megatron.queue import AsyncCallsQueue, NvrxAsyncCallsQueue, get_write_results_queue
from holdfast.megatron.requests import request_class
from holdfast.megatron.writer import FileSystemWriterAsync


class NvrxFileSystemWriterAsync(FileSystemWriterAsync):
    """The writer for those who import nvidia-resiliency-ext's by name."""

    stock_module = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"


def finalize_nvrx(storage_writer: Any, global_metadata: Any, dist_wrapper: Any) -> None:
    """`finalize` for those who import nvidia-resiliency-ext's by name."""
    finalize(storage_writer, global_metadata, dist_wrapper)


def names_of(dialect: str, writer: type = FileSystemWriterAsync) -> dict[str, Any]:
    """The names of a dialect, and what stands for each.

    Args:
        dialect: ``mcore`` or ``nvrx``.
        writer: the class of writers.

    Raises:
        TypeError: there is no such dialect.
    """
    if dialect not in ("mcore", "nvrx"):
        raise TypeError(f"there is no async_strategy {dialect}; there are nvrx and mcore")
    names = {
        "AsyncRequest": request_class(dialect),
        "CachedMetadataFileSystemReader": stock.find(
            stock.STRATEGIES + "cached_metadata_filesystem_reader", "CachedMetadataFileSystemReader"
        ),
        "FileSystemWriterAsync": writer,
        "_results_queue": None,
        "get_write_results_queue": get_write_results_queue,
        "save_state_dict_async_finalize": finalize,
    }
    if dialect == "nvrx":
        return {
            **names,
            "AsyncCallsQueue": NvrxAsyncCallsQueue,
            "CheckpointMetadataCache": CheckpointMetadataCache,
            "save_state_dict_async_plan": plan_nvrx,
        }
    return {**names, "AsyncCallsQueue": AsyncCallsQueue, "save_state_dict_async_plan": plan_mcore}


def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
    """In the place of Megatron's function; neither dialect needs nvidia-resiliency-ext.

    Args:
        async_strategy: ``mcore`` or ``nvrx``.
        module: one name of the dialect; None: all of them, as a dict.

    Raises:
        TypeError: there is no such dialect.
        Error: NOT_FOUND, no such name in it.
    """
    names = names_of(async_strategy)
    if module is None:
        return async_strategy, names
    if module not in names:
        raise Error("NOT_FOUND", f"get_async_strategy: {async_strategy} has no {module}")
    return async_strategy, names[module]
