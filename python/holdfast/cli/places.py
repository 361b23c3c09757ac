"""What lies at a path, by the names of its files."""

from __future__ import annotations

import os
from typing import Any

from holdfast import _dcp_directories
from holdfast.errors import Error, of_system


def names_in(path: str, operation: str) -> list[str]:
    """Names in a directory, sorted.

    Raises:
        Error: of the system.
    """
    with of_system(f"{operation} {path}"):
        return sorted(os.listdir(path))


def look_at_dcp(path: str) -> dict[str, Any]:
    """What is known of a complete DCP checkpoint: step, saved_at, attempt, world_size, bytes.

    Raises:
        Error: FAILED_PRECONDITION for an incomplete checkpoint, DATA_LOSS for a damaged one, and of
            the system.
    """
    with of_system(f"open {path}"):
        found = _dcp_directories.look(path)
    if found is None and not _dcp_directories.may_be_loaded(path):
        raise Error("FAILED_PRECONDITION", f"open {path}: it has no .metadata: the save has not completed")
    if found and not found["attempt"]:
        found["attempt"] = None
    return found or {}
