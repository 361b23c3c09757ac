"""Megatron-Core saves through Holdfast: ``import holdfast.megatron; holdfast.megatron.install()``.

`install` replaces what Megatron takes its asynchronous writer, its plans and its queue from: the
arguments of a training stay as they are. `SaveStrategy` does the same for one call of
``dist_checkpointing.save`` and replaces nothing. ``python -m holdfast.megatron script.py ...`` installs
and runs a script as it is.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from holdfast._packages import is_installed
from holdfast.megatron.patching import Patch
from holdfast.megatron.writer import FileSystemWriterAsync, LateNames, checked

__all__ = ["SaveStrategy", "install", "uninstall"]

logger = logging.getLogger("holdfast")
_lock = threading.Lock()
_patch: Patch | None = None


def install(*, late: LateNames = ()) -> None:
    """Makes Megatron's saves those of Holdfast, from the next one on; Megatron may be imported later.

    A warning in the log says so where neither it nor nvidia-resiliency-ext is installed.
    Both of its asynchronous strategies, ``mcore`` and ``nvrx``, are then Holdfast's;
    nvidia-resiliency-ext need not be there. Called again, it changes only `late`.

    Args:
        late: optimizers, or tensors, that the training leaves alone until its next step, as of
            `holdfast.save_async`: their GPU memory is copied behind forward and backward. Or a
            function that returns them, called in each save: Megatron makes its optimizers late.
            All other GPU tensors are ordered into the current stream.

    Raises:
        Error: INVALID_ARGUMENT, `late` is none of these; nothing is replaced then.
    """
    global _patch
    with _lock:
        FileSystemWriterAsync.late = checked(late)
        if _patch is None:
            _patch = Patch()
            _patch.start()
            if not (is_installed("megatron.core") or is_installed("nvidia_resiliency_ext")):
                logger.warning("holdfast.megatron.install: neither Megatron-Core nor nvidia-resiliency-ext is installed for %s, so "
                               "nothing saves through Holdfast; install megatron-core, or use another Python", sys.executable)  # fmt: skip


def uninstall() -> None:
    """Puts back what `install` has replaced; requests that are under way stay Holdfast's."""
    global _patch
    with _lock:
        if _patch is not None:
            _patch.stop()
            _patch = None
        FileSystemWriterAsync.late = ()


def __getattr__(name: str) -> Any:
    if name == "SaveStrategy":
        from holdfast.megatron.strategy import SaveStrategy

        return SaveStrategy
    raise AttributeError(f"module {__name__} has no attribute {name}")
