"""Directories of DCP checkpoints: which are complete, and which of them go. Needs no PyTorch.

A DCP checkpoint is complete once its ``.metadata`` stands, which is its save's last file. Where the
save made a commit record (runtime/layout/FORMAT.md, section 5), ``.metadata`` must be as it says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Collection
from typing import Any

from holdfast import _native
from holdfast._durable import sync_directory
from holdfast.errors import Error, of_system

logger = logging.getLogger("holdfast")

METADATA = ".metadata"
_RECORD = re.compile(r"holdfast\.commit-([0-9a-f]{32})\.json")
# What saves through DCP make. A directory with any other entry is kept.
_OWN = re.compile(
    r"(\.metadata|__\d+_\d+\.distcp|rank-\d{5,}-of-\d{5,}-[0-9a-f]{32}\.manifest\.json|"
    + _RECORD.pattern
    + r")(\.tmp)?"
)
_RETIRED = re.compile(r"\.?(?P<name>.+)\.retired-[0-9a-f]{32}")
_LAST_NUMBER = re.compile(r"(\d+)(?=\D*$)")


def series_of(name: str) -> str:
    """A checkpoint's name with its last run of digits replaced: ``step-{}``."""
    return _LAST_NUMBER.sub("{}", name)


def list_complete(directory: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The complete checkpoints, the oldest first, and "NAME: why" of those that are damaged.

    Raises:
        Error: NOT_FOUND and what else the system says of the directory itself.
    """
    complete, passed_over = [], []
    with of_system(f"list {directory}"):
        names = sorted(e.name for e in os.scandir(directory) if e.is_dir())
    for name in names:
        if _RETIRED.fullmatch(name):
            continue
        try:
            with of_system(f"list {os.path.join(directory, name)}"):
                found = look(os.path.join(directory, name))
        except Error as error:
            passed_over.append(f"{name}: {error.message}")
            continue
        if found is not None:
            complete.append({"name": name, "path": os.path.join(directory, name), **found})
    return sorted(complete, key=lambda c: (c["saved_at"], c["step"], c["name"])), passed_over


def may_be_loaded(path: str) -> bool:
    """Whether metadata stands there, of all ranks or of rank 0 alone."""
    return any(os.path.exists(os.path.join(path, name)) for name in (METADATA, "__0" + METADATA))


def look(path: str) -> dict[str, Any] | None:
    """What is known of a complete checkpoint; None for a directory that is none.

    Raises:
        Error: DATA_LOSS where ``.metadata`` is not what the save committed.
        OSError: of the system.
    """
    try:
        with open(os.path.join(path, METADATA), "rb") as file:
            data, changed = file.read(), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
    names = os.listdir(path)
    for name in names:
        match = _RECORD.fullmatch(name)
        # A record whose attempt the metadata does not name is of another save.
        if match is None or match[1].encode() not in data:
            continue
        _native.check_commit_file(path, match[1], METADATA, data)
        with open(os.path.join(path, name), "rb") as file:
            record = json.load(file)
        return {
            "step": record["step"],
            "saved_at": record["saved_at_ns"] / 1e9,
            "attempt": match[1],
            "parent": record["parent"] if record["parent"].strip("0") else None,
            "world_size": record["world_size"],
            "bytes": record["bytes"],
        }
    # Of another writer, or an earlier version: nothing proves it, and the name has the step.
    number = _LAST_NUMBER.search(os.path.basename(path))
    return {
        "step": int(number[1]) if number else 0,
        "saved_at": changed,
        "attempt": "",
        "parent": None,
        "world_size": None,
        "bytes": sum(os.stat(os.path.join(path, n)).st_size for n in names),
    }


def abandoned(checkpoints: list[dict[str, Any]]) -> list[bool]:
    """Whether a rollback has abandoned each of some checkpoints, as listings have them."""
    return _native.find_abandoned(
        [(c["name"], c["saved_at"], c["step"], c["attempt"] or "", c["parent"] or "") for c in checkpoints]
    )


def remove_old(directory: str, saved: str, keep_last: int, keep_every: int,
               busy: Collection[str]) -> None:  # fmt: skip
    """Removes checkpoints of a series, as ``keep_last`` and ``keep_every`` of `save_async` say.

    Those of abandoned branches go first.

    A checkpoint is renamed before its first file goes, so that no crash leaves a part of it under
    its name. What a crash has left of an earlier removal goes, too.

    Args:
        directory: of the checkpoints.
        saved: name of the one that was just completed; it stays.
        keep_last, keep_every: which ones stay.
        busy: paths that saves are going into; they stay.

    Raises:
        Error: of the first checkpoint that could not be removed, after trying all.
    """
    series = series_of(saved)
    every = list_complete(directory)[0]
    gone = {c["name"] for c, is_abandoned in zip(every, abandoned(every), strict=True) if is_abandoned}
    # A branch that a rollback has abandoned goes first.
    complete = sorted((c for c in every if series_of(c["name"]) == series), key=lambda c: c["name"] not in gone)
    first: Error | None = None
    for old in complete[: max(0, len(complete) - keep_last)]:
        if old["name"] == saved or old["path"] in busy:
            continue
        if keep_every and old["step"] % keep_every == 0:
            continue
        try:
            _retire(directory, old)
        except Error as error:
            first = first or error
    with of_system(f"list {directory}"):
        names = os.listdir(directory)
    for name in names:
        match = _RETIRED.fullmatch(name)
        path = os.path.join(directory, name)
        if match and series_of(match["name"]) == series and not _foreign(path):
            _remove(path)
    if first is not None:
        raise first


def _foreign(path: str) -> list[str]:
    try:
        return [name for name in sorted(os.listdir(path)) if not _OWN.fullmatch(name)]
    except OSError:  # removed by another process, or no directory
        return [path]


def _retire(directory: str, old: dict[str, Any]) -> None:
    """Takes a checkpoint's name away. The removal of what it has then follows."""
    foreign = _foreign(old["path"])
    if foreign:
        raise Error(
            "FAILED_PRECONDITION",
            f"remove {old['path']}: {foreign[0]} is no file of a DCP checkpoint, so the directory is "
            "kept; remove it yourself",
        )
    attempt = old["attempt"] or _native.new_attempt()
    retired = os.path.join(directory, f".{old['name']}.retired-{attempt}")
    with of_system(f"remove {old['path']}"):
        before = os.stat(os.path.join(old["path"], METADATA))
        os.rename(old["path"], retired)
        after = os.stat(os.path.join(retired, METADATA))
        if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
            os.rename(retired, old["path"])  # a save was completed there meanwhile
        sync_directory(directory)


def _remove(path: str) -> None:
    """Removes a directory that has lost its checkpoint's name. Another process may do so, too."""
    with of_system(f"remove {path}"), contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(path), key=lambda n: n != METADATA):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)
