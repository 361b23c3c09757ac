"""What is in a directory of checkpoints: the newest, all, and cleaning up after a crash."""

from __future__ import annotations

import os
from typing import Any

from holdfast import _native
from holdfast.errors import Error


def local_path(path: str | os.PathLike[str], operation: str, instead: str = "") -> str:
    """A path as text; `instead` is what to do with a URL.

    Raises:
        Error: INVALID_ARGUMENT for a URL.
    """
    text = os.fsdecode(path)
    if "://" in text:
        raise Error(
            "INVALID_ARGUMENT",
            f"{operation} {text}: only directories of mounted file systems are supported, no URLs"
            + (instead and f"; {instead}"),
        )
    return text


def find_newest(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The newest complete checkpoint: name, path, step, attempt, world_size, bytes.

    Raises:
        Error: NOT_FOUND when there is none.
    """
    return _native.find_newest(local_path(directory, "list"))


def list_checkpoints(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All complete checkpoints by step, newest last; changes nothing."""
    return _native.list_checkpoints(local_path(directory, "list"))


def recover(
    directory: str | os.PathLike[str],
    *,
    wait_for_orphans: float = 30.0,
    promote: bool = True,
    clean_up: bool = True,
    age_without_locks: float = 86400.0,
) -> dict[str, Any]:
    """Makes the directory clean after a crash; safe beside running saves, harmless to repeat.

    Args:
        directory: where checkpoints are saved.
        wait_for_orphans: seconds to wait for a worker whose trainer is dead, before it is fenced.
        promote: give complete but unfinished checkpoints their final name.
        clean_up: remove incomplete ones.
        age_without_locks: seconds that a partial checkpoint must be old where locks tell nothing.

    Returns:
        ``complete`` (as `list_checkpoints`), ``promoted``, ``removed``, ``fenced``,
        ``kept_incomplete``.
    """
    return _native.recover(
        local_path(directory, "recover"), wait_for_orphans, promote, clean_up, age_without_locks
    )


def verify(
    path: str | os.PathLike[str],
    *,
    threads: int = 0,
    buffer_bytes: int = 64 << 20,
    engine: str = "auto",
    direct_io: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint again and compares it with the digests of its save.

    Returns:
        ``verdict`` (``"sound"``, ``"corrupt"``, ``"incomplete"``, ``"unreadable"``), ``faults``
        (file, tensor, byte range, expected and found), ``bytes``, ``seconds``, ...
    """
    return _native.verify(local_path(path, "verify"), threads, buffer_bytes, engine, direct_io)
