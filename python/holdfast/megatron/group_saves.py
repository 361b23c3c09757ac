"""Attempts and generations of the saves over a process group, which each rank counts without asking the others.

The ranks of a process group agree once, in a planning that they do together anyway, on a random id.
From then on a save's attempt follows from that id, its directory, and the number of the group's saves
so far. All ranks count alike, because all of them save in the same order; the end of the save compares.
"""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holdfast._process import PerProcess
from holdfast.dcp import placement
from holdfast.dcp.placement import Placement

_AHEAD_MAX = 64
_PATHS_MAX = 64


class GroupSaves:
    """The saves over one process group, as this rank counts them.

    Attributes:
        id: what the ranks have agreed on; empty before.
    """

    def __init__(self) -> None:
        self.id = ""
        self._saves = 0
        self._generations: dict[str, int] = {}

    def next(self, path: Path, rank: int, world_size: int) -> Placement:
        """The placement of this rank's part of the next save.

        Raises:
            Error: the directory cannot be listed.
        """
        key = str(path)
        attempt = self._attempt(key, self._saves)
        self._saves += 1
        generation = self._generations.pop(key, 0)
        place = placement.follow(path, attempt, generation, rank, world_size)
        self._generations[key] = place.generation + 1
        while len(self._generations) > _PATHS_MAX:
            del self._generations[next(iter(self._generations))]
        return place

    def skip(self) -> None:
        """Counts a save that this rank cannot take part in."""
        self._saves += 1

    def younger(self, path: Path) -> list[str]:
        """Attempts that other ranks may have begun in a directory since."""
        return [self._attempt(str(path), self._saves + n) for n in range(_AHEAD_MAX)]

    def _attempt(self, path: str, save: int) -> str:
        return hashlib.sha256(f"{self.id} {save} {path}".encode()).hexdigest()[:32]


class _Groups(PerProcess):
    def clear(self) -> None:
        self.by_group: weakref.WeakKeyDictionary[Any, GroupSaves] = weakref.WeakKeyDictionary()
        self.alone = GroupSaves()  # without any process group
        self.alone.id = placement.new_attempt()


_groups = _Groups()


def saves_of(group: Any) -> GroupSaves:
    """The saves over a process group; None: over all ranks."""
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    with _groups.lock:
        if group is None:
            return _groups.alone
        return _groups.by_group.setdefault(group, GroupSaves())
