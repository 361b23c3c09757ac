"""Resident memory of this process, and its peak."""

from __future__ import annotations

from pathlib import Path


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


class Since:
    """Bytes above those at the making of this object."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)
        self._before = _status("VmRSS")

    def peak(self) -> int:
        return _status("VmHWM") - self._before

    def now(self) -> int:
        return _status("VmRSS") - self._before
