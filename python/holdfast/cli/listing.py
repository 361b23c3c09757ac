"""``holdfast ls``: the checkpoints of a directory, whether they are complete, and their lineage."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from holdfast import _names, _native, directories
from holdfast.cli import places, recovering, storage_options, text
from holdfast.drain.places import open_place
from holdfast.drain.remote import is_url
from holdfast.errors import Error

_DESCRIPTION = """\
Lists the checkpoints of a directory, plain and DCP, newest first. Reads commit records and sizes, no
data: `holdfast verify DIR` reads and compares every byte. Changes nothing.
"""
_EPILOG = """\
columns:
  STEP, AGE, SIZE, RANKS   as recorded at the save; - where nothing recorded them
  FORMAT                   holdfast, or dcp (PyTorch Distributed Checkpoint)
  PARENT                   what the run had saved before, or resumed from: a name, or the first
                           digits of the attempt id of a checkpoint that is gone
  STATE                    complete; newest (of its format); abandoned (complete, but the newest checkpoint of its
                           series does not descend from it: the run was rolled back); incomplete, damaged or unreadable
                           with the reason; saving (under way); orphan (its trainer is dead, its worker
                           works); unfinished (`holdfast recover` finishes or removes it); retired

examples:
  holdfast ls run
  holdfast ls --json run | jq -r '.checkpoints[] | select(.state == "newest") | .path'

exit status: 0 listed, whatever the states are; 2 trouble
"""
_STATE_OF_CODE = {"FAILED_PRECONDITION": "incomplete", "NOT_FOUND": "incomplete", "DATA_LOSS": "damaged"}
_RUNNING = "a save is running there"


@dataclasses.dataclass
class Entry:
    """One directory. Unknown numbers are None; `reason` is empty for a complete checkpoint."""

    name: str
    path: str
    format: str
    state: str
    reason: str = ""
    step: int | None = None
    saved_at: float | None = None
    bytes: int | None = None
    world_size: int | None = None
    attempt: str | None = None
    parent: str | None = None
    parent_name: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.state in ("complete", "newest", "abandoned")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("directory", metavar="DIR", help="where checkpoints are saved, or one checkpoint; or a URL that a drain fills")
    storage_options.declare(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    found = entries(arguments.directory, storage_options.given(arguments, "ls"))
    if arguments.json:
        checkpoints = [dataclasses.asdict(entry) for entry in found]
        text.document("ls", directory=arguments.directory, checkpoints=checkpoints)
        return 0
    head = ("NAME", "STEP", "AGE", "SIZE", "RANKS", "FORMAT", "PARENT", "STATE")
    text.table(head, map(_row, found), right="STEP AGE SIZE RANKS")
    return 0


def entries(directory: str, storage: dict[str, Any] | None = None) -> list[Entry]:
    """The checkpoints of a directory, newest first, or the directory itself where it is one.

    Args:
        storage: options of the store, for a URL.

    Raises:
        Error: the directory cannot be listed.
    """
    if is_url(directory):
        found = _of_store(directory, storage)
    elif directories.format_of(names := places.names_in(directory, "list")):
        found = [_of(os.path.abspath(directory), names)]
    else:
        found = [e for e in map(_below, (os.path.join(directory, n) for n in names)) if e is not None]
        _explain_uncommitted(directory, found)
    found.sort(key=lambda e: (e.saved_at or 0.0, e.step or 0, e.name), reverse=True)
    # A save may continue one of the other format.
    by_attempt: dict[str | None, str] = {e.attempt: e.name for e in found if e.is_complete and e.attempt}
    for entry in found:
        entry.parent_name = by_attempt.get(entry.parent)
    for kind in ("holdfast", "dcp"):
        _trace_lineage([e for e in found if e.is_complete and e.format == kind])
    return found


def _of_store(url: str, storage: dict[str, Any] | None) -> list[Entry]:
    place = open_place(url, storage)
    complete, damaged = place.complete()
    found = [Entry(format=c.format, state="complete", **c.listed(place)) for c in complete]
    for text_ in damaged:
        name, _, why = text_.partition(": ")
        found.append(Entry(name, place.path(name), "", "damaged", why))
    return found


def _below(path: str) -> Entry | None:
    """The checkpoint at `path`; None for anything else."""
    name = os.path.basename(path)
    match = _names.UNCOMMITTED.fullmatch(name)
    if os.path.islink(path) or not os.path.isdir(path):
        return None
    try:
        names = places.names_in(path, "list")
    except Error as error:
        return None if error.code == "NOT_FOUND" else Entry(name, path, "", "unreadable", error.message)
    if match:
        state = "retired" if match["kind"] == "retired" else "unfinished"
        return Entry(name, path, "holdfast", state, attempt=match["attempt"])
    if not directories.format_of(names):
        return None
    entry = _of(path, names)
    return entry if entry.is_complete or os.path.isdir(path) else None  # removed meanwhile


def _of(path: str, names: list[str]) -> Entry:
    entry = Entry(os.path.basename(path), path, directories.format_of(names), "complete")
    try:
        info = places.look_at_dcp(path) if entry.format == "dcp" else _native.inspect(path)
        for key in ("step", "saved_at", "bytes", "world_size", "attempt", "parent"):
            setattr(entry, key, info.get(key))
    except Error as error:
        entry.state = _STATE_OF_CODE.get(error.code, "unreadable")
        entry.reason = error.message.removeprefix("open ").removeprefix(f"{path}: ").removeprefix("incomplete: ")
    return entry


def _explain_uncommitted(directory: str, found: list[Entry]) -> None:
    """Gives the reasons that recovery gives."""
    uncommitted = {e.name: e for e in found if e.state in ("unfinished", "retired")}
    if not uncommitted:
        return
    try:
        outlook = recovering.outlook(directory)
    except Error as error:
        outlook = {"promote": [], "remove": [], "keep": dict.fromkeys(uncommitted, str(error))}
    for name, entry in uncommitted.items():
        if name in outlook["promote"]:
            entry.reason = "complete; `holdfast recover` gives it its final name"
        elif name in outlook["remove"]:
            entry.reason = "`holdfast recover` removes it"
        elif name in outlook["keep"]:
            entry.reason = outlook["keep"][name]
        if entry.state == "unfinished" and entry.reason == _RUNNING:
            entry.state = "saving"
        elif entry.state == "unfinished" and entry.reason.startswith("a worker without a trainer"):
            entry.state = "orphan"


def _trace_lineage(complete: list[Entry]) -> None:
    """Marks the newest checkpoint and those of abandoned branches.

    Args:
        complete: of one format, newest first.
    """
    saved = [(e.name, e.saved_at or 0.0, e.step or 0, e.attempt or "", e.parent or "") for e in complete]
    for entry, is_abandoned in zip(complete, _native.find_abandoned(saved), strict=True):
        if is_abandoned:
            entry.state = "abandoned"
    if complete:
        complete[0].state = "newest"


def _row(entry: Entry) -> list[Any]:
    def known(value: Any, show: Any = str) -> str:
        return "-" if value is None else show(value)

    parent = entry.parent_name or (entry.parent or "-")[:8]
    state = f"{entry.state}: {entry.reason}" if entry.reason else entry.state
    return [
        entry.name, known(entry.step), known(entry.saved_at, text.age), known(entry.bytes, text.size),
        known(entry.world_size), entry.format or "-", parent, state,
    ]  # fmt: skip
