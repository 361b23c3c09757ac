"""Sharded checkpoints: written into a directory of another name, which takes its own when it is whole."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil

from holdfast._durable import exchange, sync_directory
from holdfast.errors import of_system

META = "meta.pt"


def _prefix(path: str) -> str:
    # Not the name itself: Lightning looks for parts of names, of a requeue's checkpoint for one.
    return f".holdfast-{hashlib.sha256(os.path.basename(path).encode()).hexdigest()[:16]}-"


def unfinished(path: str) -> str:
    """A new name beside `path` for its directory until it is whole; removes those that a crash left."""
    directory, prefix = os.path.dirname(path), _prefix(path)
    if os.path.isdir(directory):
        for name in os.listdir(directory):
            if name.startswith(prefix):
                shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    return os.path.join(directory, prefix + secrets.token_hex(8))


def commit(new: str, path: str) -> None:
    """Gives the directory `new`, which is whole and durable, the name `path`.

    What stands at `path` until then stays whole, and is removed afterwards.

    Raises:
        Error: of the system.
    """
    with of_system(f"complete {path}"):
        if os.path.lexists(path):
            exchange(new, path)
        else:
            os.rename(new, path)
        sync_directory(os.path.dirname(path))
        if os.path.lexists(new):
            _remove(new)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
