"""Which files one save writes: an attempt id and a generation that all its ranks agree on.

The coordinator chooses both and puts them into the global plan; no call beyond the framework's own
is needed. A planner that caches plans, though, hands `write_data` the plan of an earlier save, with
that save's placement, when a rank's plan did not change. The coordinator's word for this save has
arrived all the same, in a plan that the planner then dropped: so it is noted when it is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from holdfast import _names, _native, _regular
from holdfast._process import PerProcess
from holdfast.errors import Error, of_system


class _Known(PerProcess):
    """By directory: the placement that came last, and this process's attempts and their generations."""

    def clear(self) -> None:
        self.newest: dict[str, Placement] = {}
        self.attempts: dict[str, dict[str, int]] = {}


_known = _Known()
_DIRECTORIES_MAX = 64


@dataclasses.dataclass
class Placement:
    """One rank's part of one save.

    Attributes:
        directory: the checkpoint.
        attempt: of the save, the same on all ranks.
        generation: number in the data files' names, higher than that of any file that is there.
        file_rank: number in the data files' names.
        rank, world_size: as the manifest says.
        used: whether data was written under it.
        reserved: inode of the empty file by which this process has taken the name of the data file.
    """

    directory: str
    attempt: str
    generation: int
    file_rank: int
    rank: int
    world_size: int
    used: bool = False
    reserved: int = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        note(self)

    @property
    def data_file(self) -> str:
        return _names.dcp_data(self.file_rank, self.generation)

    @property
    def prefix(self) -> str:
        """What the framework's own writer asks of a plan that a planner has kept."""
        return _names.dcp_prefix(self.file_rank)

    @property
    def manifest(self) -> str:
        return _names.manifest(self.rank, self.world_size, self.attempt)


def note(placement: Placement) -> None:
    """Remembers the newest word of a directory's coordinator."""
    with _known.lock:
        _known.newest.pop(placement.directory, None)
        _known.newest[placement.directory] = placement
        while len(_known.newest) > _DIRECTORIES_MAX:
            del _known.newest[next(iter(_known.newest))]


def take(planned: Any, directory: str) -> Placement:
    """The placement of the save that is going on: the plan's, unless a cache has kept it.

    Raises:
        Error: INTERNAL if there is none, because some planner dropped the plan's storage data.
    """
    with _known.lock:
        found = planned
        if not isinstance(found, Placement) or found.used or found.directory != directory:
            found = _known.newest.get(directory)
        if found is None or found.used:
            raise Error(
                "INTERNAL",
                f"save {directory}: its plan does not say where to write; does the planner keep "
                "SavePlan.storage_data?",
            )
        found.used = True
        return found


def choose(directory: Path, attempt: str, file_ranks: list[int], alone: bool) -> list[Placement]:
    """The placements of a new save, by its coordinator.

    Args:
        directory: the checkpoint.
        attempt: a new attempt id.
        file_ranks: of the ranks that save.
        alone: each rank is its own coordinator and has its own metadata.
    """
    generation = 0
    with of_system(f"save {directory}: list it"):
        names = os.listdir(directory)
    for rank, its_generation in _data_files(names):
        if not alone or rank in file_ranks:
            generation = max(generation, its_generation + 1)
    key = str(directory)
    generation, inode = _register(key, attempt, generation, file_ranks[0])
    world = len(file_ranks)
    places = [Placement(key, attempt, generation, r, i, world) for i, r in enumerate(file_ranks)]
    places[0].reserved = inode
    return places


def follow(directory: Path, attempt: str, generation: int, rank: int, world_size: int) -> Placement:
    """The placement of one rank in a save that all ranks begin without an exchange.

    Args:
        directory, attempt, rank, world_size: of the save.
        generation: that all ranks expect; this one's is higher if it has such files already, or if
            a rank has that this job lacks.
    """
    with of_system(f"save {directory}: list it"):
        there = _data_files(os.listdir(directory))
    generation = max([generation, *(g + 1 for r, g in there if r == rank or r >= world_size)])
    if rank == 0:
        generation, inode = _register(str(directory), attempt, generation, rank)
    else:
        generation, inode = _reserve(str(directory), rank, generation)
    return Placement(str(directory), attempt, generation, rank, rank, world_size, reserved=inode)


def _register(directory: str, attempt: str, generation: int, file_rank: int) -> tuple[int, int]:
    """Notes an attempt of this process; its generation is above that of all before.

    Returns:
        As `_reserve`.
    """
    with _known.lock:
        known = _known.attempts.pop(directory, {})
        generation = max([generation, *(g + 1 for g in known.values())])
        generation, inode = _reserve(directory, file_rank, generation)
        known[attempt] = generation
        _known.attempts[directory] = known
        while len(_known.attempts) > _DIRECTORIES_MAX:
            del _known.attempts[next(iter(_known.attempts))]
    return generation, inode


def _reserve(directory: str, file_rank: int, generation: int) -> tuple[int, int]:
    """Takes the name of a data file, of this generation or a later one, by an empty file.

    Two jobs that save into one directory by mistake see the same files there. With one name, one of
    their workers would rename what the other one has not written yet.

    Returns:
        The generation, and the inode of the file.
    """
    with of_system(f"save {directory}: take a name"):
        while True:
            name = os.path.join(directory, _names.dcp_data(file_rank, generation))
            with contextlib.suppress(FileExistsError):
                # The worker makes it anew. If it never does, `release` or the next save removes it.
                with open(f"{name}.tmp", "xb", 0) as file:  # an object: an interrupt cannot lose its descriptor
                    try:
                        inode = os.fstat(file.fileno()).st_ino
                    except BaseException:
                        os.unlink(f"{name}.tmp")
                        raise
                try:
                    os.stat(name)
                except FileNotFoundError:  # after another error the name may be in use
                    return generation, inode
                os.unlink(f"{name}.tmp")
            generation += 1


def release(place: Placement) -> None:
    """Gives the name of a failed save's data file back, where the worker has not made the file anew."""
    path = os.path.join(place.directory, f"{place.data_file}.tmp")
    with contextlib.suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        if (found.st_ino, found.st_size) == (place.reserved, 0):
            os.unlink(path)


def rank_of(name: str) -> int | None:
    """The rank whose data file has a name; None for another file."""
    match = _names.DCP_ANY_DATA.fullmatch(name)
    return int(match["rank"]) if match else None


def _data_files(names: Iterable[str]) -> list[tuple[int, int]]:
    """Ranks and generations of the data files among some names, also of those being written."""
    matches = map(_names.DCP_DATA.fullmatch, map(_names.finished, names))
    return [(int(m["rank"]), int(m["generation"])) for m in matches if m]


def began_before(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether a save to data files of these names began before the save to the others; not where one of them has none.

    Each rank counts its generations itself, and may be behind others: so those of one rank are compared. For a rank
    without such a file the highest generation is, which was above those of all its files that were there.
    """
    own, of_others = dict(sorted(_data_files(names))), dict(sorted(_data_files(others)))
    most = max(own.values(), default=None)
    return most is not None and any(number > own.get(rank, most) for rank, number in of_others.items())


def leftovers(directory: Path, attempt: str, keep: set[str], rank: int | None,
              younger: Container[str]) -> list[str]:  # fmt: skip
    """Files of earlier saves and failed ones in a checkpoint that was just committed.

    Args:
        directory: the checkpoint.
        attempt: the committed one. Nothing of a younger one is named.
        keep: names of its data files.
        rank: only of this rank, where each has metadata of its own.
        younger: further attempts of which nothing is named.
    """
    with _known.lock:
        known = dict(_known.attempts.get(str(directory), {}))
    own = known.get(attempt, 0)
    # Ranks that follow a known plan choose their generations themselves.
    of_rank = dict(_data_files(keep))
    # Manifests first: a manifest that is listed here has its data files in the second list.
    proofs = [(n, saved_by) for n in os.listdir(directory) if (saved_by := _names.dcp_attempt_of(_names.finished(n)))]
    result, newer = [], []
    for name in os.listdir(directory):
        for its_rank, generation in _data_files([name]) if name not in keep else ():
            if generation >= of_rank.get(its_rank, own):
                newer.append(_names.finished(name))
            elif rank is None or its_rank == rank:
                result.append(name)
    # Saves that other ranks, or another job, have begun since: manifests of the latter name data files that are newer.
    others = {a for n, a in proofs if a not in known and (a in younger or _is_manifest(n) and lists(directory / n, newer))}
    for name, saved_by in proofs:
        if saved_by != attempt and saved_by not in others and known.get(saved_by, -1) < own:
            if rank is None or _is_of_rank(directory / name, rank):
                result.append(name)
    with _known.lock:
        for older in [a for a, g in _known.attempts.get(str(directory), {}).items() if g <= own]:
            del _known.attempts[str(directory)][older]
    # Data last: a file without its manifest is known to be incomplete, not corrupt.
    return sorted(result, key=lambda n: (bool(_data_files([n])), n))


def _is_manifest(name: str) -> bool:
    return _names.DCP_MANIFEST.fullmatch(_names.finished(name)) is not None


def is_being_written(name: str) -> bool:
    """Whether a data file or a manifest is not whole yet."""
    return name != _names.finished(name) and (_is_manifest(name) or bool(_data_files([name])))


def lists(manifest: Path, files: list[str]) -> bool:
    """Whether a manifest names one of some files."""
    try:
        text = _regular.read_whole(manifest, "read", _regular.MANIFEST_BYTES_MAX)[0] if files else b""
    except (OSError, Error):
        return False
    return any(f'"{name}"'.encode() in text for name in files)


def _is_of_rank(path: Path, rank: int) -> bool:
    """Whether a manifest names data files of a rank, or a commit record its metadata."""
    try:
        found = json.loads(_regular.read_whole(path, "read", _regular.MANIFEST_BYTES_MAX)[0])
        if "commit_file" in found:
            return found["commit_file"]["name"] == _names.dcp_metadata(rank)
        of_ranks = [its_rank for its_rank, _ in _data_files(file["name"] for file in found["files"])]
    except (OSError, Error, ValueError, KeyError, TypeError, AttributeError):
        return False
    return rank in of_ranks


def new_attempt() -> str:
    """A random attempt id."""
    return _native.new_attempt()
