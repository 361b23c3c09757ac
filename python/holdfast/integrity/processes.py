"""Processes and what they hold, as the system tells it."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from holdfast import _recent

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
is_program = False  # whether this process is the program's, or a lane of it
_GLIBC_BYTES = 128 << 10  # its own choice of both
_KEPT_BYTES = 64 << 20  # the half is the most that glibc takes for the other one
_LIMITS = {"limit-size": resource.RLIMIT_FSIZE, "limit-files": resource.RLIMIT_NOFILE, "limit-memory": resource.RLIMIT_AS}
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19


def children(pid: int | str = "self") -> dict[int, int]:
    """The children of a process, zombies too, with the time of their start."""
    found = {}
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    with contextlib.suppress(OSError):
                        found[int(child)] = int(_stat(child)[19])
    return found


def _stat(pid: int | str) -> list[str]:
    """The fields of a process after its name; the first is its state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def threads(pid: int | None) -> list[str]:
    """The threads of a process: name, state, and the place in the kernel where each waits."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(OSError):
            place = (task / "wchan").read_text()
            found.append(f"{(task / 'comm').read_text().strip()} {_stat(f'{pid}/task/{task.name}')[0]} {place}")
    return found


# In the stack of a thread of the kernel that takes down the ring of an ended process, or closes files of one.
_TAKING_DOWN = ("io_ring_exit_work", "delayed_fput", "cleanup_mnt")
_PF_EXITING = 4


def ending() -> list[str]:
    """Processes that are ending, and threads of the kernel that take down what ended ones have left: name, state, stack.

    Stacks are for root alone: without it, these are processes alone.
    """
    found = []
    for process in sorted(Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            stat, stack = _stat(process.name), ""
            with contextlib.suppress(PermissionError):
                stack = (process / "stack").read_text()
            is_ending = int(stat[6]) & _PF_EXITING and stat[0] not in "ZX"
            if is_ending or any(name in stack for name in _TAKING_DOWN):
                calls = [line.split()[-1].partition("+")[0] for line in stack.splitlines()]
                found.append(f"{(process / 'comm').read_text().strip()} {stat[0]} {' < '.join(calls)}".strip())
    return found


# What a process group makes and drops behind the scenes.
_OF_GROUPS = frozenset({"socket", "pipe", "anon_inode:[eventpoll]", "anon_inode:[eventfd]"})


def held(in_group: bool, pid: int | str = "self") -> collections.Counter[str]:
    """What a process holds: descriptors by what they are of, children, shared mappings.

    Args:
        in_group: whether there is a process group, whose descriptors do not count.
        pid: of the process; default: this one.
    """
    if pid == "self":
        gc.collect()
    found: collections.Counter[str] = collections.Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
            if link.startswith(f"/memfd:{_recent.NAME}"):
                continue  # one for the life of a process that saves
            of = link if link.startswith("anon_inode") else link.split(":")[0]
            if not in_group or of not in _OF_GROUPS:
                found["descriptor of " + of] += 1
    found["children"] = len(children(pid))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights.endswith("s"):
            found["shared mapping of " + "".join(name)] += 1
    return found


def left(before: collections.Counter[str], seconds: float, in_group: bool, pid: int | str = "self") -> dict[str, int]:
    """What a process holds more than before, once threads that end have ended. Other arguments as of `held`.

    Args:
        before: what it held.
        seconds: in which it lets go; four times as long while something is ending, as a starved kernel takes rings down late.
    """
    begin = time.monotonic()
    while more := dict(held(in_group, pid) - before):
        took = time.monotonic() - begin
        if took >= 4 * seconds or (took >= seconds and not ending()):
            break
        time.sleep(0.01 if took < seconds else 0.5)
    return more


def wrong_end(pid: int | None, status: int | None, fine: Collection[int]) -> str:
    """What is wrong with the end of a trainer that has closed its pipe; "" where nothing is.

    Args:
        pid: of its process.
        status: of its exit, None where it goes on; a negative one is a signal.
        fine: statuses that are right.
    """
    if status is None:
        return f"a trainer has closed its pipe and goes on: {threads(pid)}"
    return "" if status in fine else f"a trainer ended with status {status}, though no event has ended it"


@contextlib.contextmanager
def limited(kind: str, more: int, pids: Iterable[int]) -> Iterator[None]:
    """Limits a resource of processes while it lasts.

    Args:
        kind: of ``schedule.LIMITS``. A process gets one more descriptor than its last one.
        more: bytes that a process may allocate, or of the largest file.
        pids: of the processes; 0 is this one. Those that have ended are left out.
    """
    which, before = _LIMITS[kind], {}
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                old = resource.prlimit(pid, which)
                resource.prlimit(pid, which, (_limit(kind, more, f"/proc/{pid or 'self'}"), old[1]))
                before[pid] = old
        yield
    finally:
        for pid, old in before.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, which, old)


def _limit(kind: str, more: int, process: str) -> int:
    if kind == "limit-files":
        return max(map(int, os.listdir(f"{process}/fd")), default=-1) + 1  # one that has ended has none
    if kind == "limit-memory":
        return int(Path(f"{process}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + more
    return more


def send(pid: int | None, number: signal.Signals) -> None:
    """Sends a signal to a process that may be gone."""
    if pid:  # process 0 would be this one's whole group
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def see(source: str, target: str) -> None:
    """Puts a directory in the place of another for this process alone, which has one thread, and for what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None) != 0
        or libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND, None) != 0
    ):
        raise OSError(ctypes.get_errno(), "a mount of its own for a trainer", target)


own: set[int] = set()  # children of this process that are no orphans


class Orphans:
    """Workers whose trainer is dead: they become children of this process, which reaps them."""

    def __init__(self) -> None:
        self._known = set(children())

    def alive(self) -> dict[int, str]:
        """Those that are alive, with their command; those that have ended are reaped."""
        found = {}
        for pid in set(children()) - self._known - own:
            with contextlib.suppress(OSError):
                state = _stat(pid)[0]
                if state == "Z":
                    os.waitpid(pid, os.WNOHANG)
                else:
                    if state == "T":  # its trainer has stopped it, and died before it could go on
                        send(pid, signal.SIGCONT)
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    found[pid] = command[0].decode(errors="replace")
        return found

    def wait(self, seconds: float) -> dict[int, str]:
        """Waits until none is left; those that are left then are killed and returned."""
        end = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < end:
            time.sleep(0.002)
        for pid in left:
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGKILL)
        while left and self.alive() and time.monotonic() < end + 30:
            time.sleep(0.002)
        return left


def cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """While it lasts, orphans of this process's descendants become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class Interrupts:
    """When the signals that end a process may do so. The first one does, and others are ignored."""

    def __init__(self) -> None:
        self._may = True
        self._came = False

    def take(self, *numbers: signal.Signals) -> None:
        """Makes KeyboardInterrupt of these signals."""

        def come(*_: object) -> None:
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)
            self._came = True
            self._raise()

        for number in numbers:
            signal.signal(number, come)

    def _raise(self) -> None:
        if self._came and self._may:
            self._came = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While it lasts, a signal waits: for its end, or for `let`. What is made within is removed within."""
        before, self._may = self._may, False
        try:
            yield
        finally:
            self._may = before
            self._raise()

    @contextlib.contextmanager
    def let(self) -> Iterator[None]:
        """A part of `held` that a signal may end."""
        before, self._may = self._may, True
        try:
            self._raise()
            yield
        finally:
            self._may = before


interrupts = Interrupts()  # of this process


def prepare_program() -> None:
    """For the program: as `prepare_process`, and its trainers' servers are forks of it and of its lanes."""
    global is_program
    is_program = True
    prepare_process()


def prepare_process() -> None:
    """For the program and its lanes: SIGTERM ends them as Ctrl-C does, with the report; warnings of the framework are left
    out; released memory is kept."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    # One state is made after the other: the next one needs no new pages.
    _keep_memory(_KEPT_BYTES // 2, _KEPT_BYTES)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def release_memory() -> None:
    """In a fork of such a process: released memory is given back, as by default."""
    _keep_memory(_GLIBC_BYTES, _GLIBC_BYTES)


def _keep_memory(mapped: int, trimmed: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, mapped)
    libc.mallopt(_M_TRIM_THRESHOLD, trimmed)


def join(store: str, rank: int, ranks: int, seconds: float) -> None:
    """Makes the process group of a job; `store`: a file, or "PORT/NAME" of a server; `seconds`: its time-out."""
    import torch.distributed as dist

    timeout = timedelta(seconds=seconds)
    if store.startswith("/"):
        made: Any = dist.FileStore(store, ranks)
    else:
        port, _, name = store.partition("/")
        made = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", int(port), None, False, timeout))
    dist.init_process_group("gloo", store=made, rank=rank, world_size=ranks, timeout=timeout)
