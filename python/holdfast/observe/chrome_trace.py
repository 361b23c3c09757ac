"""A Chrome trace of saves against the trainer's steps; it opens in Perfetto.

The file is an array of events and closed after every event, so that it is JSON at any moment,
whenever the process is killed. Times are Unix times in microseconds: traces of several ranks, and
of several hosts as far as their clocks agree, lie side by side.

Rows of a rank: its steps and the calls that save; and for each save under way at the same time a
row of staging, one of writing and one of what makes it durable.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from holdfast import _ranks, events
from holdfast._process import PerProcess
from holdfast.errors import Error, of_system

_TRAINER_ROW = 1
_ROWS = ("stage", "write", "sync, manifest, commit")  # of one save; each lane has these
_END = b"\n]\n"


class _Traces(PerProcess):
    def clear(self) -> None:
        self.open: list[_File] = []
        self.marked: tuple[int, int] | None = None  # the step that mark_step began, and when


_traces = _Traces()


class Span(NamedTuple):
    """A part of a save."""

    name: str
    row: int  # index in _ROWS; -1: the trainer's
    begin: float  # seconds on CLOCK_MONOTONIC
    end: float
    args: dict[str, Any]


def spans(report: dict[str, Any]) -> list[Span]:
    """The spans of a durable save, as far as its report has the times.

    All borders are measured, but for the beginning of ``seal``: it is set to the beginning of the
    copies, because sealing begins with the first that has ended.
    """
    entered_ns = report.get("entered_ns")
    if not entered_ns:
        return []
    entered = entered_ns / 1e9
    called = report.get("called_ns", entered_ns) / 1e9
    blocked = report.get("time_blocked", report["time_in_call"])

    def pick(*keys: str) -> dict[str, Any]:
        return {k: report[k] for k in keys if k in report}

    def at(key: str) -> float:
        value = report.get("at_" + key) or 0
        return entered + value if value else 0.0

    copies = entered + max(0.0, report["time_in_call"] - report["time_copying"])
    staged = entered + report["time_to_staged"]
    found = [
        Span(
            "call",
            -1,
            called,
            called + blocked,
            pick("time_in_call", "time_copying", "time_waiting_memory", "time_launching"),
        ),
        Span("stage", 0, entered, staged, pick("bytes", "streamed", "pages")),
        Span("seal", 0, min(copies, staged), staged, {**pick("cpu_sealing"), "begin": "derived"}),
        Span(
            "write",
            1,
            at("first_submit"),
            at("last_complete"),
            pick("bytes_written", "engine", "direct_io", "cpu_worker"),
        ),
        Span("sync", 2, at("last_complete"), at("data_synced"), {}),
        Span("manifest", 2, at("data_synced"), at("manifest_synced"), {}),
        Span("commit", 2, at("manifest_synced"), at("committed"), {}),
        Span("metadata", 2, entered + report["time_to_durable"], at("complete"), {}),
    ]
    return [s for s in found if s.begin and s.end >= s.begin]


class _File:
    """One trace file of one process."""

    def __init__(self, path: str, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._offset = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._rank = rank
        self._lanes: list[float] = []  # until when each is taken
        # Once: the trace stays on one axis when the wall clock is set.
        self._unix = time.time() - time.monotonic()
        os.write(self._fd, b"[" + _END)
        self._offset = 1
        self.add(
            self._name(None, f"rank {rank} (pid {os.getpid()})"),
            self._name(_TRAINER_ROW, "trainer"),
        )

    def _name(self, row: int | None, name: str) -> dict[str, Any]:
        kind = "process_name" if row is None else "thread_name"
        return {"ph": "M", "name": kind, "pid": self._rank, "tid": row or 0, "args": {"name": name}}

    def add(self, *added: dict[str, Any]) -> None:
        """Appends events and closes the array again, with one system call."""
        if os.getpid() != self._pid:
            return  # a forked child: the file is its parent's, and the lock may be held for ever
        texts = [json.dumps(e, default=str, separators=(",", ":")) for e in added]
        with self._lock:
            if self._fd < 0:
                return
            data = ("\n" if self._offset == 1 else ",\n") + ",\n".join(texts)
            body = data.encode()
            text = body + _END
            if os.pwrite(self._fd, text, self._offset) == len(text):
                self._offset += len(body)
            else:  # the disk is full: the file is as before, without the events
                os.pwrite(self._fd, _END, self._offset)
                os.ftruncate(self._fd, self._offset + len(_END))

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def span(
        self, name: str, row: int, begin: float, end: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        # Whole microseconds: fractions of Unix times get lost in the doubles that readers use, and
        # then spans overlap that follow each other.
        first = round((begin + self._unix) * 1e6)
        return {
            "ph": "X",
            "cat": "step" if name.startswith("step ") else "save",
            "name": name,
            "pid": self._rank,
            "tid": row,
            "ts": first,
            "dur": round((end + self._unix) * 1e6) - first,
            "args": args,
        }

    def _rows_from(self, begin: float, end: float) -> tuple[int, list[dict[str, Any]]]:
        """The first row of a lane that is free then, and what names its rows if it is new."""
        with self._lock:
            for lane, until in enumerate(self._lanes):
                if until <= begin:
                    self._lanes[lane] = end
                    return _TRAINER_ROW + 1 + lane * len(_ROWS), []
            self._lanes.append(end)
            first = _TRAINER_ROW + 1 + (len(self._lanes) - 1) * len(_ROWS)
        return first, [self._name(first + i, f"save: {name}") for i, name in enumerate(_ROWS)]

    def save(self, subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
        if os.getpid() != self._pid:
            return
        if report is None:
            name = f"{events.outcome(subject, error)}: {os.path.basename(subject.path)}"
            now = (time.monotonic() + self._unix) * 1e6
            args = {"path": subject.path, "step": subject.step, "error": str(error)}
            self.add(
                {
                    "ph": "i",
                    "s": "p",
                    "cat": "save",
                    "name": name,
                    "pid": self._rank,
                    "tid": _TRAINER_ROW,
                    "ts": round(now),
                    "args": args,
                }
            )
            return
        found = spans(report)
        if not found:
            return
        args = {"path": subject.path, "step": subject.step}
        first, added = self._rows_from(
            min(s.begin for s in found if s.row >= 0), max(s.end for s in found)
        )
        for s in found:
            row = _TRAINER_ROW if s.row < 0 else first + s.row
            added.append(self.span(s.name, row, s.begin, s.end, {**args, **s.args}))
        self.add(*added)


def trace(path: str | os.PathLike[str]) -> events.Handle:
    """Writes a Chrome trace of the saves and steps of this process from now on.

    Args:
        path: of the file, which is replaced; ``{rank}`` in it stands for the rank. Its directory is
            made. One process writes one file.

    Raises:
        Error: of the system.
    """
    rank = _ranks.rank_of_process()
    name = os.fspath(path).replace("{rank}", str(rank))
    with of_system(f"observe.trace {name}"):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        file = _File(name, rank)
    with _traces.lock:
        _traces.open.append(file)

    def end() -> None:
        with _traces.lock:
            _traces.open.remove(file)
        file.close()

    return events.Handle(file.save, end)


def _step_took(n: int, begin_ns: int) -> None:
    end_ns = time.monotonic_ns()
    with _traces.lock:
        files = list(_traces.open)
    for file in files:
        with contextlib.suppress(OSError):  # a full disk does not end a training
            file.add(
                file.span(f"step {n}", _TRAINER_ROW, begin_ns / 1e9, end_ns / 1e9, {"step": n})
            )


@contextlib.contextmanager
def step(n: int) -> Iterator[None]:
    """A step of training in every open trace: ``with holdfast.observe.step(n): ...``."""
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        if _traces.open:
            _step_took(n, begin)


def mark_step(n: int) -> None:
    """Step `n` begins, and the one before it ends: for loops that have no room for a ``with``."""
    before, _traces.marked = _traces.marked, (n, time.monotonic_ns())
    if before is not None and _traces.open:
        _step_took(*before)
