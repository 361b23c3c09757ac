"""The kernel's end of a process that is over its memory limit: a control group, and a program that fills it.

Needs root, or a group that the user may write. The groups of version 1 and 2 differ in the names of their files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import subprocess
import time
import zlib

_TIME_END_MAX = 10.0  # seconds in which a killed process ends
_LIMIT = 8 << 20  # of a group; the program that fills it stops nowhere else
_ROOTS = (  # where groups can be, and the files of their limits
    ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")),
    ("/sys/fs/cgroup", ("memory.max", "memory.swap.max")),
)
_numbers = itertools.count()


@functools.cache
def _root() -> tuple[str, tuple[str, ...]]:
    """Where a group can be made, and its files; "" where none can."""
    for root, files in _ROOTS:
        probe = os.path.join(root, f"holdfast-integrity-probe-{os.getpid()}-{next(_numbers)}")  # threads ask at once
        with contextlib.suppress(OSError):
            os.mkdir(probe)
            try:
                if os.access(os.path.join(probe, files[0]), os.W_OK):
                    return root, files
            finally:
                os.rmdir(probe)
    return "", ()


def why_not() -> str:
    """Why no group with a memory limit can be made here; "" where one can."""
    return "" if _root()[0] else "no memory control group can be made here (it needs root, and the controller of memory)"


def _prefix(key: str) -> str:
    return f"holdfast-integrity-{zlib.crc32(key.encode()):08x}-"


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def kill(pid: int, key: str) -> bool:
    """Puts a process into a group without memory and fills the group, until the kernel kills the process.

    Args:
        pid: of the process. This one's own is possible.
        key: under which `clean` finds the group.

    Returns:
        Whether the process has ended.
    """
    root, files = _root()
    group = os.path.join(root, f"{_prefix(key)}{os.getpid()}-{next(_numbers)}")
    try:
        os.mkdir(group)
        _write(os.path.join(group, files[0]), str(_LIMIT))
        with contextlib.suppress(OSError):  # without swap there is no such file
            _write(os.path.join(group, files[1]), "0" if files[1] == "memory.swap.max" else str(_LIMIT))
        with contextlib.suppress(OSError):  # it is gone
            _write(f"/proc/{pid}/oom_score_adj", "1000")
            _write(os.path.join(group, "cgroup.procs"), str(pid))
        # The program is the kernel's second choice, and ends likewise: what it fills is no memory of its own, and has no name.
        fill = 'echo $$ >"$1/cgroup.procs" && exec 3>"$2" && rm "$2" && exec cat /dev/zero >&3'
        subprocess.run(["sh", "-c", fill, "sh", group, f"/dev/shm/{os.path.basename(group)}"],
                       stderr=subprocess.DEVNULL, timeout=60, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        _remove(group)
    end = time.monotonic() + _TIME_END_MAX
    while (is_alive := _is_alive(pid)) and time.monotonic() < end:
        time.sleep(0.01)
    return not is_alive


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _remove(group: str) -> None:
    end = time.monotonic() + 5
    while os.path.isdir(group) and time.monotonic() < end:
        with contextlib.suppress(OSError):  # a killed process is in it for a moment
            os.rmdir(group)
            return
        time.sleep(0.01)


def clean(key: str) -> None:
    """Removes the groups of a key, whose makers may have been killed in them."""
    root, _ = _root()
    for name in os.listdir(root) if root else ():
        if name.startswith(_prefix(key)):
            _remove(os.path.join(root, name))
