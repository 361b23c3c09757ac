"""The saves of all processes of this node, read through /proc.

A trainer and its worker hold the job table of a save open, and a Python process that has saved holds
the outcomes of its last saves: both are files in memory, which processes of the same user, and root,
may open. The watched processes take no part in it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

from holdfast import _native, _recent
from holdfast.errors import Error

_TABLE: str = "/memfd:" + _native.JOB_TABLE_NAME
_OUTCOMES = "/memfd:" + _recent.NAME
_BOARD = "ranks.board"
# Seconds over which a rate is taken: writes end in chunks of 4 MiB.
_RATE_WINDOW = 5.0
# All processes are looked at again in every n-th look; in between those that hold something, and new ones.
_ALL_EVERY = 5


@dataclasses.dataclass
class Save:
    """One rank's part of a save in flight. Unknown numbers and paths are None."""

    path: str | None
    step: int
    rank: int
    world_size: int
    attempt: str
    phase: str
    waits_for: list[int] | None  # ranks whose part is not durable yet; rank 0 where only its commit is missing
    bytes_total: int
    bytes_sealed: int
    bytes_written: int
    bytes_per_second: float | None
    seconds_left: float | None
    bytes_held: int
    streams: bool
    launcher: str
    engine: str | None
    began: float  # Unix seconds
    trainer_pid: int | None  # None: the trainer is dead, or another user's
    worker_pid: int | None


@dataclasses.dataclass
class Process:
    """A process that has saved."""

    pid: int
    rank: int
    world_size: int
    outcomes: dict[str, int]
    last: dict[str, Any] | None  # the last durable save
    errors: list[dict[str, Any]]  # newest first


@dataclasses.dataclass
class Look:
    """What was found at one moment."""

    time: float
    saves: list[Save]
    processes: list[Process]
    unreadable: list[str]  # why tables could not be read
    hidden: int  # workers of other users


@dataclasses.dataclass
class _Table:
    content: dict[str, Any]
    began: float
    holders: dict[int, dict[str, str]]  # pid: targets of its links by descriptor


class Node:
    """Looks at the node again and again; rates are those between looks."""

    def __init__(self, directory: str | None) -> None:
        """Args: directory: saves below it count; None: all."""
        self._directory = None if directory is None else os.path.realpath(directory)
        self._looks = 0
        self._seen: set[int] = set()
        self._holders: set[int] = set()
        self._written: dict[tuple[str, int], collections.deque[tuple[float, int]]] = {}

    def look(self) -> Look:
        now = time.time()
        tables: dict[int, _Table] = {}
        processes: dict[int, Process] = {}
        unreadable: set[str] = set()
        hidden = 0
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        due = pids if self._looks % _ALL_EVERY == 0 else pids & (self._holders | (pids - self._seen))
        self._looks += 1
        self._seen, self._holders = pids, self._holders & pids
        for pid in due:
            try:
                links = dict(_links(pid))
            except PermissionError:
                hidden += _is_worker(pid)
                continue
            except OSError:  # it has ended
                continue
            for fd, target in links.items():
                if not target.startswith((_TABLE, _OUTCOMES)):
                    continue
                self._holders.add(pid)
                try:
                    self._read(pid, fd, target, links, tables, processes)
                except Error as error:
                    if error.code == "FAILED_PRECONDITION" and any(map(self._has, links.values())):
                        unreadable.add(f"pid {pid}: {error.message}")
                except (OSError, ValueError):
                    continue  # closed meanwhile, or it is another program's file of that name
        saves = [save for table in tables.values() if (save := self._save(table, now)) is not None]
        current = {(save.attempt, save.rank) for save in saves}
        self._written = {key: samples for key, samples in self._written.items() if key in current}
        saves.sort(key=lambda s: (s.path or "", s.rank, s.began))
        kept = sorted(filter(self._concerns, processes.values()), key=lambda p: (p.rank, p.pid))
        return Look(now, saves, kept, sorted(unreadable), hidden)

    def _read(
        self, pid: int, fd: str, target: str, links: dict[str, str], tables: dict[int, _Table],
        processes: dict[int, Process]
    ) -> None:  # fmt: skip
        opened = _open(pid, fd)
        try:
            status = os.fstat(opened)
            if target.startswith(_OUTCOMES):
                content = _recent.read(opened)
                if content is not None and content["pid"] == _inner_pid(pid):
                    processes[pid] = Process(**{**content, "pid": pid})
                return
            if status.st_ino not in tables:
                tables[status.st_ino] = _Table(_native.read_save_in_flight(opened), status.st_ctime, {})
            tables[status.st_ino].holders[pid] = links
        finally:
            os.close(opened)

    def _save(self, table: _Table, now: float) -> Save | None:
        content = dict(table.content)
        if content["phase"] == "done":
            return None  # the process has yet to close the table
        name, partial = content.pop("name"), content.pop("partial")
        inner = content.pop("worker_pid")
        is_thread = content["launcher"] == "thread"
        workers = [pid for pid in table.holders if inner and not is_thread and _inner_pid(pid) == inner]
        trainers = [pid for pid in table.holders if pid not in workers]
        path = _path_of(name, partial, [[*table.holders[pid].values()] for pid in (*workers, *trainers)])
        if not self._has(path or ""):
            return None  # a save that has not opened its directory yet is seen at the next look
        rate = self._rate((content["attempt"], content["rank"]), now, table.began, content["bytes_written"])
        left = content["bytes_total"] - content["bytes_written"]
        is_writing = content["phase"] in ("staging", "queued", "writing") and left > 0
        return Save(
            **{**content, "engine": content["engine"] if content["engine"] != "auto" else None},
            path=path,
            waits_for=_ranks_waited_for(content, partial, table.holders),
            bytes_per_second=rate if is_writing else None,
            seconds_left=left / rate if is_writing and rate else None,
            began=table.began,
            trainer_pid=trainers[0] if trainers else None,
            worker_pid=trainers[0] if is_thread and trainers else workers[0] if workers else None,
        )

    def _rate(self, key: tuple[str, int], now: float, began: float, written: int) -> float | None:
        """Bytes a second: of the last seconds, or since the save's beginning at the first look."""
        samples = self._written.setdefault(key, collections.deque([(min(began, now), 0)]))
        if len(samples) > 1 and written < samples[-1][1]:
            samples.clear()  # all files are written once more
        samples.append((now, written))
        while len(samples) > 2 and samples[1][0] < now - _RATE_WINDOW:
            samples.popleft()
        (since, before), elapsed = samples[0], now - samples[0][0]
        return (written - before) / elapsed if len(samples) > 1 and elapsed > 0 and since < now else None

    def _has(self, path: str) -> bool:
        """Whether a path without links, as the kernel gives it, counts."""
        return self._directory is None or path.startswith(os.path.join(self._directory, ""))

    def _concerns(self, process: Process) -> bool:
        if self._directory is None:
            return True
        entries = [entry for entry in (process.last, *process.errors) if entry is not None]
        process.errors = [e for e in process.errors if self._has(os.path.realpath(e["path"]))]
        return any(self._has(os.path.realpath(entry["path"])) for entry in entries)


def _links(pid: int) -> Iterator[tuple[str, str]]:
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield fd, os.readlink(f"{folder}/{fd}")


def _open(pid: int, fd: str) -> int:
    # Another file may be behind the descriptor by now: a pipe without a writer would never open.
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _ranks_waited_for(content: dict[str, Any], partial: str, holders: dict[int, dict[str, str]]) -> list[int] | None:
    """By the rank board, which trainer and worker have open; None: unknown, or none is waited for."""
    if content["phase"] != "waiting for ranks":
        return None
    boards = ((pid, fd) for pid, links in holders.items() for fd, target in links.items()
              if target.endswith(f"/{partial}/{_BOARD}"))  # fmt: skip
    for pid, fd in boards:
        with contextlib.suppress(OSError, Error):  # closed meanwhile
            opened = _open(pid, fd)
            try:
                return _native.read_ranks_waited_for(opened, content["attempt"], content["world_size"])
            finally:
                os.close(opened)
    return None


def _inner_pid(pid: int) -> int:
    """The id of a process in its own pid namespace."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def _is_worker(pid: int) -> bool:
    """Whether a process that may not be looked into has a worker's name."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as comm:
        return comm.read().startswith(("hf:", "holdfast-worker"))
    return False


def _path_of(name: str, partial: str, holders: list[list[str]]) -> str | None:
    """The checkpoint's path: a holder has its directory, or the file, open and locked."""
    for wanted in filter(None, (partial, name)):
        for links in holders:
            found = {os.path.dirname(link) for link in links if os.path.basename(link) == wanted}
            if len(found) == 1:
                return os.path.join(found.pop(), name)
    return None
