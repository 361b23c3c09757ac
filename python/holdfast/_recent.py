"""The outcome of this process's last saves, for `holdfast top` in another process.

It lies in a file in memory, which other processes of the same user open through /proc/PID/fd: no
file stays behind after a crash, and nothing happens between saves.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import time
import zlib
from typing import Any

from holdfast import events
from holdfast._process import PerProcess
from holdfast.errors import Error, printable

NAME = "holdfast-saves"  # behind "/memfd:" in the links of /proc/PID/fd
_ERRORS_MAX = 5
_MESSAGE_MAX = 600
_BYTES_MAX = 64 << 10  # a reader's bound; five errors have far less
_NOEXEC_SEAL = 0x8  # MFD_NOEXEC_SEAL, demanded by hardened systems, unknown before Linux 6.3


class _Recent(PerProcess):
    fd = -1

    def clear(self) -> None:
        if self.fd >= 0:  # a forked child's copy would outlive the process that it describes
            os.close(self.fd)
            self.fd = -1
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.last: dict[str, Any] | None = None
        self.errors: collections.deque[dict[str, Any]] = collections.deque(maxlen=_ERRORS_MAX)


_recent = _Recent()


def _memory() -> int:
    try:
        return os.memfd_create(NAME, os.MFD_CLOEXEC | _NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(NAME, os.MFD_CLOEXEC)


def note(subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
    """The observer that keeps the outcomes. Where the system refuses the memory, nothing is kept."""
    outcome = events.outcome(subject, error)
    # A reader has another current directory. Without one here the path stays as it is.
    path = subject.path
    with contextlib.suppress(OSError):
        path = os.path.abspath(path)
    entry = {"time": time.time(), "outcome": outcome, "path": path, "step": subject.step}
    with _recent.lock:
        _recent.outcomes[outcome] += 1
        if report is not None:
            _recent.last = {**entry, "bytes": report["bytes"], "seconds": report["time_to_durable"]}
        elif error is not None and outcome != "cancelled":
            message = printable(error.message)[:_MESSAGE_MAX]
            _recent.errors.appendleft({**entry, "code": error.code, "message": message})
        content = {
            "pid": os.getpid(),
            "rank": subject.extra.get("rank", 0),
            "world_size": subject.extra.get("world_size", 1),
            "outcomes": _recent.outcomes,
            "last": _recent.last,
            "errors": list(_recent.errors),
        }
        text = json.dumps(content, default=str).encode()
        with contextlib.suppress(OSError):
            if _recent.fd < 0:
                _recent.fd = _memory()
            os.pwrite(_recent.fd, b"%08x %s\n" % (zlib.crc32(text), text), 0)


def read(fd: int) -> dict[str, Any] | None:
    """What `note` of another process has written to its memory; None if it is being written.

    Any process may make such a memory, and one with another version of this package does: what is not
    `_CONTENT` is None, and further keys are left out.
    """
    line = os.pread(fd, _BYTES_MAX, 0).split(b"\n", 1)[0]
    digits, _, text = line.partition(b" ")
    if digits != b"%08x" % zlib.crc32(text):
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return _checked(json.loads(text), _CONTENT)  # type: ignore[no-any-return]
    return None


_TIME_MAX = 1e10  # what time.localtime takes, in any unit of time here
_ENTRY = {"time": float, "outcome": str, "path": str, "step": int}
_CONTENT = {
    "pid": int,
    "rank": int,
    "world_size": int,
    "outcomes": {str: int},
    "last": (None, {**_ENTRY, "bytes": int, "seconds": float}),
    "errors": [{**_ENTRY, "code": str, "message": str}],
}


def _checked(given: Any, form: Any) -> Any:
    """`given` where it has this form, without further keys. Raises ValueError otherwise."""
    if isinstance(form, tuple) and given is None:
        return None
    if isinstance(form, tuple):
        form = form[1]
    if isinstance(form, list) and isinstance(given, list):
        return [_checked(item, form[0]) for item in given]
    if isinstance(form, dict) and isinstance(given, dict):
        if str in form:
            return {key: _checked(value, form[str]) for key, value in given.items()}
        return {key: _checked(given.get(key), of) for key, of in form.items()}
    if form is str and isinstance(given, str) and "\0" not in given:
        return given
    if form is int and isinstance(given, int) and 0 <= given < 1 << 64:
        return given
    if form is float and isinstance(given, (int, float)) and 0 <= given < _TIME_MAX:
        return given
    raise ValueError("it has another form")
