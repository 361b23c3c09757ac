"""Directories that survive power loss, and the locks of those who work there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from typing import Any

from holdfast._process import PerProcess
from holdfast.errors import of_operation, of_system

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_TRAINER_BYTE = 0  # of a framework's directory, see runtime/directory/locks.h


def locked(fd: int, kind: int) -> bool:
    """Takes a lock without waiting; whether no other process keeps it. A file system without locks has none that does."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Presence(PerProcess):
    """A trainer's lock of a framework's directory, as the runtime takes it while it writes; until `clear`, or for its own life.

    A drain has it in the directory of a copy. A forked child has none, nor has a copy in another process.

    Raises:
        FileNotFoundError: the directory is gone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd: int | None = None
        super().__init__()
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without such locks: recoveries judge by age there
            lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, _TRAINER_BYTE, 1, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)

    def clear(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def names_in(fd: int) -> list[str]:
    """The names in an open directory, as they are now: Btrfs lists those that were there when the descriptor was opened."""
    now = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        return os.listdir(now)
    finally:
        os.close(now)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Makes a file durable, and not its name."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: str) -> None:
    """Makes a directory and those above it, durably: else a crash takes them with all in them.

    Raises:
        Error: of the system. Where a file stands in the way, the caller's next step finds it.
    """
    for above in begin_directory(path):
        with of_system(f"make directory {path}"):
            sync_directory(above)


def make_directory_of(path: str) -> None:
    """Makes the directory in which a save makes `path`.

    Raises:
        Error: as of `make_directory`; it names the save.
    """
    with of_operation(f"save {path}"):
        make_directory(os.path.dirname(path))


def begin_directory(path: str) -> list[str]:
    """Makes a directory and those above it; returns those that must still be synced, in order.

    Raises:
        Error: as of `make_directory`.
    """
    above = os.path.dirname(path)
    if os.path.exists(path):
        _sync_name(path)
        return []
    made = begin_directory(above)
    with of_system(f"make directory {path}"):
        with contextlib.suppress(FileExistsError):  # another rank has made it
            os.mkdir(path)
    return [*made, above]


_NAMED_MAX = 1000
_named: dict[str, tuple[int, int]] = {}  # directories that stood there, whose names this process has synced


def _sync_name(path: str) -> None:
    """Makes the name of a directory durable that another process may have made and, killed, has not synced; once for each directory.

    That the directory above cannot be opened or synced fails no save: it may be of another file system, or another user's.
    """
    with contextlib.suppress(OSError):
        found = os.stat(path)
        if _named.get(path) != (found.st_dev, found.st_ino):
            if len(_named) >= _NAMED_MAX:
                _named.clear()
            _named[path] = found.st_dev, found.st_ino
            sync_directory(os.path.dirname(path))


def replace_directory(new: str, path: str, aside: str) -> str:
    """Gives a directory the name of another one, in one step where the file system can.

    Args:
        aside: where the other one goes where it cannot. A crash in between leaves both, and none under `path`.

    Returns:
        The path that the other one has now.

    Raises:
        OSError: of the system; `path` is as it was.
    """
    if _exchange(new, path):
        return new
    os.rename(path, aside)
    try:
        os.rename(new, path)
    except OSError:
        os.rename(aside, path)
        raise
    return aside


def _exchange(new: str, path: str) -> bool:
    """Exchanges the names of two entries; false where the file system cannot, as NFS."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), path)
    return False
