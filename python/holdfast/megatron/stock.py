"""Megatron's own parts, whether they are replaced or not."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("holdfast.megatron")

STRATEGIES = "megatron.core.dist_checkpointing.strategies."

# What stood under a name before it was replaced.
_originals: dict[tuple[str, str], Any] = {}
_synchronous: contextvars.ContextVar[bool] = contextvars.ContextVar("synchronous", default=False)


def remember(module: str, name: str, value: Any) -> None:
    """Notes what a name stands for before it is replaced."""
    _originals.setdefault((module, name), value)


def get(module: str, name: str) -> Any:
    """What a module of another library has under a name, by itself.

    Raises:
        ImportError: there is no such module, or no such name in it.
    """
    found = importlib.import_module(module)
    if (module, name) in _originals:
        return _originals[module, name]
    try:
        return getattr(found, name)
    except AttributeError as error:
        raise ImportError(f"{module} has no {name}") from error


def find(module: str, name: str) -> Any:
    """As `get`; None where there is none."""
    try:
        return get(module, name)
    except ImportError:
        return None


@functools.cache
def _say_msc() -> None:
    logger.warning("msc:// and --enable-msc: the stock writer saves there, without digests and direct I/O")


def writer_for_msc(module: str, path: Any, *args: Any, **kwargs: Any) -> Any:
    """The framework's own writer for object storage."""
    _say_msc()
    for ours in ("is_multiproc_io", "use_cached_data_structure", "use_cpu_shm_for_gpu_tensors"):
        kwargs.pop(ours, None)
    return get(module, "FileSystemWriterAsync")(path, *args, **kwargs)


@contextlib.contextmanager
def synchronously() -> Iterator[None]:
    """Inside, a save is waited for by its caller."""
    token = _synchronous.set(True)
    try:
        yield
    finally:
        _synchronous.reset(token)


def is_synchronous() -> bool:
    """Whether the save that is being made is waited for by its caller."""
    return _synchronous.get()
