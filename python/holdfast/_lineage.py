"""What a save descends from: the checkpoint of its directory that this process loaded or saved before.

A process that has neither loaded nor saved in a directory names no parent; the runtime then takes the
newest of the same series there.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import NamedTuple

from holdfast._process import PerProcess

_DIRECTORIES_MAX = 64
_LOADS_MAX = 64


class _Point(NamedTuple):
    """A checkpoint that a state may descend from.

    Attributes:
        is_save: of this process; else it was loaded.
        before: of a save, the points that it was chosen from.
    """

    attempt: str
    step: int
    is_save: bool = False
    before: tuple[_Point, ...] = ()


class _Points(PerProcess):
    """By directory, the last save and the loads since then, in the order of the calls."""

    def clear(self) -> None:
        self.of: OrderedDict[str, tuple[_Point, ...]] = OrderedDict()
        self.latest_ns: dict[str, int] = {}  # by directory, of saves that are elsewhere

    def put(self, directory: str, points: tuple[_Point, ...]) -> None:
        self.of[directory] = points
        self.of.move_to_end(directory)
        while len(self.of) > _DIRECTORIES_MAX:
            self.of.popitem(last=False)


_points = _Points()


def loaded(path: str, attempt: str, step: int) -> None:
    """Notes that a state was loaded.

    Args:
        path: of the checkpoint, absolute.
        attempt: its id; "" where none is recorded.
        step: its step; 0 where none is recorded.
    """
    if not attempt:
        return
    directory = os.path.dirname(path)
    with _points.lock:
        others = tuple(p for p in _points.of.get(directory, ()) if p.attempt != attempt)
        _points.put(directory, (*others[-_LOADS_MAX:], _Point(attempt, step)))


def seen(directory: str, saved_at: float) -> None:
    """Notes when a checkpoint of the run was saved that is elsewhere: later saves here are younger, whatever the clock says."""
    with _points.lock:
        _points.latest_ns[directory] = max(_points.latest_ns.get(directory, 0), int(saved_at * 1e9) + 1000)


def latest_ns(path: str) -> int:
    """The time after which a save counts, in nanoseconds since 1970; 0 where none is known."""
    with _points.lock:
        return _points.latest_ns.get(os.path.dirname(path), 0)


def begin(path: str, attempt: str, step: int) -> str:
    """Notes a save, and returns the attempt of its parent; "" where none is known.

    A job may load other checkpoints than the one that it resumes from: a teacher's, or one to
    compare with. A save with a higher step than all of them continues the highest one. Otherwise the
    run was rolled back: the save continues the last one of at most its own step.
    """
    directory = os.path.dirname(path)
    with _points.lock:
        points = _points.of.get(directory, ())
        parent = _parent(points, step)
        # Only the last save can be taken back, so its own points suffice.
        before = tuple(p._replace(before=()) for p in points)
        _points.put(directory, (_Point(attempt, step, is_save=True, before=before),))
    return parent.attempt if parent is not None else ""


def resumed_from(path: str, step: int) -> str:
    """The checkpoint that a first save continues, in words; "" where none was loaded, or for a later save."""
    with _points.lock:
        points = _points.of.get(os.path.dirname(path), ())
    parent = _parent(points, step)
    if parent is None or any(p.is_save for p in points):
        return ""
    return f"step {parent.step} (attempt {parent.attempt})"


def _parent(points: tuple[_Point, ...], step: int) -> _Point | None:
    if not points:
        return None
    highest = max(p.step for p in points)
    suitable = [p for p in points if (p.step == highest if step > highest else p.step <= step)]
    return (suitable or points)[-1]


def failed(path: str, attempt: str) -> None:
    """Takes a save back: it is no parent of later ones."""
    directory = os.path.dirname(path)
    with _points.lock:
        points = _points.of.get(directory, ())
        if points and points[0].attempt == attempt:
            _points.put(directory, points[0].before + points[1:])
