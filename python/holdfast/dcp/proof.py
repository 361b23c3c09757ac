"""Proving a DCP checkpoint: complete by its metadata, sound by its manifests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from holdfast import directories
from holdfast._names import DCP_MANIFEST, METADATA
from holdfast.dcp import metadata as _metadata
from holdfast.dcp.writer import local_path
from holdfast.errors import Error, of_system

_TRIES = 8  # while saves replace the checkpoint meanwhile


def verify(path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Reads a checkpoint again and compares it with the digests of its save.

    `holdfast.verify` and the command ``verify-checkpoint`` do so, too. This reads ``.metadata``
    besides: where Holdfast has written it, the manifests must be those of its save and name every
    file that it names.

    A checkpoint with a fault that a save has replaced meanwhile is verified again.

    Args:
        path: the checkpoint's directory.
        **options: as of `holdfast.verify`.

    Returns:
        As `holdfast.verify`.

    Raises:
        Error: NOT_FOUND without metadata, PERMISSION_DENIED or DATA_LOSS for what is none.
    """
    directory = local_path(path)
    for _ in range(_TRIES):
        before = _identity(directory)
        try:
            report = _verify(directory, options)
        except Error:
            if _identity(directory) == before:
                raise
        else:
            if report["verdict"] == "sound" or _identity(directory) == before:
                return report
    return _verify(directory, options)


def _identity(directory: Path) -> tuple[int, ...]:
    """What a save into the directory changes, before it removes the older save's files."""
    try:
        status = os.stat(directory / METADATA)
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns


def _verify(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    metadata = _metadata.read(directory / METADATA)
    report = directories.verify(directory, **options)
    save_id = _metadata.save_id_of(metadata)
    if not save_id:  # of another program, which makes no manifests
        return report
    with of_system(f"verify {directory}: list it"):
        matches = [DCP_MANIFEST.fullmatch(name) for name in sorted(os.listdir(directory))]
    found = [m for m in matches if m and m["attempt"] == save_id]
    named = {info.relative_path for info in (metadata.storage_data or {}).values()}
    from holdfast.dcp.reader import Proved

    covered: set[str] = set()
    for match in found:
        try:
            covered.update(Proved(directory, match[0]).files)
        except Error:
            if report["verdict"] == "sound":
                raise
            return report  # which tells it with file, tensor and range
    for name in sorted(named - covered):
        report["faults"].append(
            {
                "file": name, "tensor": "", "begin": 0, "end": 0, "reason": "no manifest",
                "expected": "a manifest of the save that .metadata speaks of", "found": "none",
            }
        )  # fmt: skip
        report["faults_total"] += 1
        if report["verdict"] == "sound":
            report["verdict"] = "incomplete"
    return report
