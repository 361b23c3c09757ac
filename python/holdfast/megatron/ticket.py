"""Waiting for a save from whichever process is asked to: a request's function and its one argument.

A save belongs to the process that has begun it. Callers of Megatron run a request's function in a
forked child, in a spawned process, or in the trainer itself. A ticket crosses into all of them: it
says which process to look at, and where that process notes the end of the save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from holdfast import handle
from holdfast.errors import Error, of_system

logger = logging.getLogger("holdfast.megatron")

_POLL_MAX = 0.02  # seconds


class Ticket(NamedTuple):
    """A save, as another process can find it.

    Attributes:
        pid, started: the process of the save, and when it began, in ticks since boot: a number that
            is used again belongs to another process.
        fd, inode: the file in which that process notes the end of the save.
    """

    pid: int
    started: int
    fd: int
    inode: int


class Mark:
    """The note of one save's end. Its file is closed with the last reference."""

    def __init__(self) -> None:
        with of_system("begin a save: make the note of its end"):
            self._fd = os.memfd_create("holdfast-save-ended", os.MFD_CLOEXEC)
        self._pid = os.getpid()
        inode = os.fstat(self._fd).st_ino
        self.ticket = Ticket(self._pid, start_of(self._pid) or 0, self._fd, inode)

    def set(self) -> None:
        """Notes the end."""
        if os.getpid() == self._pid:
            os.pwrite(self._fd, b"1", 0)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def start_of(pid: int) -> int | None:
    """When a process began; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _is_under_way(ticket: Ticket) -> bool:
    if start_of(ticket.pid) != ticket.started:
        return False
    try:
        fd = os.open(f"/proc/{ticket.pid}/fd/{ticket.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return os.fstat(fd).st_ino == ticket.inode and not os.pread(fd, 1, 0)
    finally:
        os.close(fd)


def wait_until_written(ticket: Ticket) -> None:
    """Blocks until a save has ended, well or not, or its process has. The trainer says which.

    Raises:
        OSError: the process of the save may not be looked at.
    """
    pause = 0.001
    while _is_under_way(ticket):
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX)


class Ticketed(Protocol):
    """What this rank does for one request of ours.

    Attributes:
        path: what is saved, for messages.
    """

    path: Any

    @property
    def has_ended(self) -> bool:
        """Whether all of it has ended, well or not."""

    def outcome(self) -> BaseException | None:
        """Why it has failed; None while it has not."""

    def cancel(self) -> None:
        """Gives it up and removes its files."""

    def sync_added(self) -> None:
        """Makes durable what the request's finalize functions have added; called by the rank that runs Megatron's.

        Raises:
            Error: of the system.
        """


# What the live requests of this process stand for.
_ticketed: weakref.WeakValueDictionary[Ticket, Ticketed] = weakref.WeakValueDictionary()


def register(ticket: Ticket, save: Ticketed) -> None:
    """Notes which save a ticket is of."""
    _ticketed[ticket] = save


def save_of(request: Any) -> Ticketed | None:
    """The save of a request of ours; None for another's."""
    arguments = request.async_fn_args
    if request.async_fn is not wait_until_written or not arguments:
        return None
    return _ticketed.get(arguments[0])


def give_up(saves: Iterable[handle.Save]) -> None:
    """Cancels saves whose request is gone: nobody can finalize it any more."""
    for save in saves:
        if save.durable.done():
            continue
        with contextlib.suppress(Error):  # of another process
            save.durable.seen = True
            save.cancel()
            logger.warning("save %s: cancelled: its request was dropped before it was finalized", save.path)
