"""What a directory has for another name or format, where a resume finds nothing of its own."""

from __future__ import annotations

import contextlib
from typing import Any

from holdfast import _log, directories
from holdfast.errors import Error


def words(directory: str, format: str, of_other_names: list[dict[str, Any]]) -> str:
    """The newest checkpoints of another name, and of the other format, to end a message with; else empty."""
    other = "holdfast" if format == "dcp" else "dcp"
    of_other: list[dict[str, Any]] = []
    with contextlib.suppress(Error):
        of_other = directories.list_checkpoints(directory, format=other)
    found = ((of_other_names, "another name (name=)"), (of_other, f"another format (format={other!r})"))
    said = [f"{checkpoints[-1]['name']} is of {what}" for checkpoints, what in found if checkpoints]
    return "; there are others: " + ", ".join(said) if said else ""


def warn(directory: str, format: str, of_other_names: list[dict[str, Any]]) -> None:
    """Tells once of them."""
    if said := words(directory, format, of_other_names):
        _log.warn_of_directory(directory, f"newest in {directory}: there is no complete checkpoint{said}")
