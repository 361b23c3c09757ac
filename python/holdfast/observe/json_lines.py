"""Reports as JSON lines: one line per save, written with one system call."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

from holdfast import _ranks, events
from holdfast._process import PerProcess
from holdfast.errors import Error, of_system


def record(subject: Any, report: dict[str, Any] | None, error: Error | None) -> dict[str, Any]:
    """What a line says: the report, or the error, and what both have.

    The keys are in docs/python.md.
    """
    return {
        "time": time.time(),
        "outcome": events.outcome(subject, error),
        "path": subject.path,
        "step": subject.step,
        **{k: v for k, v in subject.extra.items() if k not in ("raised", "skipped")},
        **(report or {}),
        "error": error and {"code": error.code, "message": error.message, "errno": error.errno},
    }


def jsonl(path: str | os.PathLike[str]) -> events.Handle:
    """Appends a line to a file for every save that ends, or that is refused.

    Several processes may share a file: lines do not mix, and a process that is killed leaves whole
    ones.

    Args:
        path: of the file; ``{rank}`` in it stands for the rank. Its directory is made.

    Raises:
        Error: of the system.
    """
    name = os.fspath(path).replace("{rank}", str(_ranks.rank_of_process()))
    with of_system(f"observe.jsonl {name}"):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        file = _File(name)

    def append(subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
        file.append(json.dumps(record(subject, report, error), default=str, separators=(",", ":")).encode() + b"\n")

    return events.Handle(append, file.close)


class _File(PerProcess):
    """A file of lines. A save may end while another thread closes the file, and its descriptor becomes another file's."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        super().__init__()

    def clear(self) -> None:
        self._left = b""  # what a full disk has not taken of a line

    def append(self, line: bytes) -> None:
        with self.lock:
            if self._fd >= 0:
                text = self._left + line
                self._left = text[os.write(self._fd, text) :]

    def close(self) -> None:
        with self.lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a file that `jsonl` wrote.

    Raises:
        Error: INVALID_ARGUMENT for a line that it did not write; of the system.
    """
    name = os.fspath(path)
    with of_system(f"read {name}"):
        lines = open(path, encoding="utf-8", errors="replace")
    with lines as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict) or "outcome" not in line:
                raise Error("INVALID_ARGUMENT", f"read {name}: line {number} is none that holdfast.observe.jsonl writes")
            yield line
