"""Commits what a job has left: saves that are durable on all ranks and lack only `.metadata`."""

from __future__ import annotations

import collections
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from holdfast import _arguments, _native, directories
from holdfast._durable import sync_directory
from holdfast._names import DCP_MANIFEST
from holdfast._pieces import Loading
from holdfast.dcp import metadata as _metadata
from holdfast.dcp import placement
from holdfast.dcp.matching import out_of_order
from holdfast.dcp.parts import DIGESTS, PART, PLAN, Part, Plan, assemble
from holdfast.dcp.replicas import compare, joined, settle
from holdfast.dcp.writer import StorageWriter
from holdfast.errors import Error, of_system

logger = logging.getLogger("holdfast.dcp")

_POLL = 0.05
_WAITS = 10  # for a worker that makes progress, in all
_SILENCE = 3.0  # seconds without a change after which, without locks, no worker is taken to be at work


@_arguments.checked
def recover(path: str | os.PathLike[str], wait_for_orphans: float = 30.0) -> list[str]:
    """Commits the youngest save into a directory whose ranks are all durable.

    A save that is older than the checkpoint that is there, that lacks a rank, whose ranks have called with different
    steps, or that was not made by `holdfast.dcp.async_save` or ``save``, is left alone. The next save into the directory deletes it.
    Safe beside running saves, harmless to repeat.

    Args:
        path: the checkpoint's directory.
        wait_for_orphans: seconds to wait without progress for workers of a dead trainer, and ten times that in all;
            and for a process that completes a save there.

    Returns:
        Names of the metadata files that were written.

    Raises:
        Error: DATA_LOSS for a damaged manifest, and what reading and writing say.
    """
    _arguments.check_seconds("recover", wait_for_orphans=wait_for_orphans)
    directory = Path(directories.absolute_path(directories.local_path(path, "recover"), "recover"))
    with of_system(f"recover {directory}"):  # what no step below says more of
        _wait_for_workers(directory, wait_for_orphans)
        return _complete(directory, time.monotonic() + wait_for_orphans)


def _complete(directory: Path, end: float) -> list[str]:
    """Commits what all ranks have written; returns the names of the metadata files."""
    committed: list[str] = []
    candidates = _candidates(directory)
    for attempt, manifests in candidates:
        try:
            name = _commit(directory, attempt, manifests, committed, end)
        except Error as error:
            logger.warning("recover %s: %s", directory, error.message)
            continue
        if name:
            committed.append(name)
    if candidates:  # also of an earlier recovery, which may have ended before this
        with of_system(f"recover {directory}: make its name durable"):
            sync_directory(directory.parent)
    return committed


def _names(directory: Path) -> list[str]:
    with of_system(f"recover {directory}: list it"):
        return sorted(os.listdir(directory))


def _wait_for_workers(directory: Path, seconds: float) -> None:
    """Waits while workers of dead trainers make progress: those of a living one are not waited for."""
    seen, since = None, time.monotonic()
    longest = since + _WAITS * seconds
    while time.monotonic() < min(longest, since + seconds):
        at_work = _native.saves_at_work(str(directory))
        if at_work in ("none", "trainer"):
            return
        writing = _files_being_written(directory)
        if writing != seen:
            seen, since = writing, time.monotonic()
        # Where locks tell nothing, files that change do.
        if at_work == "unknown" and (not writing or time.monotonic() - since > _SILENCE):
            return
        time.sleep(_POLL)


def _files_being_written(directory: Path) -> list[tuple[str, tuple[int, int]]]:
    """Unfinished data files and manifests, and what of them changes."""
    return [
        (name, _changed(directory / name))
        for name in _names(directory)
        if placement.is_being_written(name)
    ]


def _changed(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_blocks


def _candidates(directory: Path) -> list[tuple[str, list[str]]]:
    """Attempts whose manifests are all there, and these by rank; the youngest first."""
    found: dict[tuple[str, int], dict[int, str]] = collections.defaultdict(dict)
    for name in _names(directory):
        match = DCP_MANIFEST.fullmatch(name)
        if match:
            found[match["attempt"], int(match["world_size"])][int(match["rank"])] = name
    whole = [
        (attempt, [ranks[r] for r in range(world)])
        for (attempt, world), ranks in found.items()
        if len(ranks) == world
    ]
    return sorted(whole, key=lambda w: _changed(directory / w[1][0]), reverse=True)


def _commit(directory: Path, attempt: str, manifests: list[str], committed: list[str], end: float) -> str:
    """Commits one attempt; returns the name of its metadata, "" if there was nothing to do."""
    parts, plans, digests, steps = [], {}, [], []
    for manifest in manifests:
        part, needed, of_data, step = _read(directory, manifest)
        if part is None:
            return ""
        parts.append(part)
        steps.append(step)
        digests.append(of_data)
        plans.update({plan.id: plan for plan in needed})
    name = parts[0].metadata
    if name in committed or not _is_younger(directory, name, manifests, attempt):
        return ""
    if len(set(steps)) > 1:
        rank = next(rank for rank, step in enumerate(steps) if step != steps[0])
        raise out_of_order(str(directory), f"rank {rank} has saved step {steps[rank]} there, and rank 0 step {steps[0]}")
    if any(digests):
        settle(compare(parts, plans, digests, str(directory)), parts, str(directory))
    writer = StorageWriter(directory)
    writer.adopt(attempt, name)
    files = [part.file for part in parts]
    writer.complete(assemble(parts, plans, str(directory)), len(parts), files, deletes=False, lock_end=end)
    return name


def _is_younger(directory: Path, name: str, manifests: list[str], attempt: str) -> bool:
    """Whether the checkpoint that is there, if any, is older than an attempt."""
    try:
        there = _metadata.read(directory / name)
    except Error as error:
        if error.code == "NOT_FOUND":
            return True
        raise
    by = _metadata.save_id_of(there)
    if by == attempt:
        return False
    # Of two saves of ours the numbers of the files tell, see `StorageWriter.complete`.
    committed = _changed(directory / name)
    return bool(by) or committed < min(_changed(directory / m) for m in manifests)


def _read(directory: Path, manifest: str) -> tuple[Part | None, list[Plan], bytes, int]:
    """A rank's part of a save, the plans and digests in its file, and the step."""
    reader = _native.CheckpointReader.open_manifest(str(directory), manifest, None)
    loading = Loading(True, 1 << 20, 1)
    part, plans, digests = None, [], []
    for name, _, _, _, begin, end in reader.tensors():
        if name == PART:
            part = Part.decode(_bytes(loading, reader, name, end - begin), manifest)
        elif name.startswith(PLAN):
            plans.append(Plan.read(_bytes(loading, reader, name, end - begin), manifest))
        elif name.startswith(DIGESTS):
            digests.append(_bytes(loading, reader, name, end - begin))
    return part, plans, joined(digests), reader.step


def _bytes(loading: Loading, reader: Any, name: str, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view = torch.frombuffer(data, dtype=torch.uint8)
    loading.read(reader, [(name, view.data_ptr(), nbytes, None, None)])
    return bytes(data)
