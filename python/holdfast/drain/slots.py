"""The directory of one checkpoint in a place: what its entries are by their names, what the system says of it alone, and its removal."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterable, Iterator

from holdfast import _durable, _names, _native
from holdfast.drain.places import BESIDE
from holdfast.errors import Error, of_system

# Made first and removed last: without a mark a recovery takes the directory for a user's own (FORMAT.md, section 1).
MARK = _names.RECORD + _names.UNFINISHED
# What a file system says of a name that it cannot have.
_OF_A_NAME = (errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ)
# And of one file or directory.
OF_A_SLOT = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)


@contextlib.contextmanager
def of_name(path: str, numbers: Collection[int] = OF_A_SLOT) -> Iterator[None]:
    """What the system says of one name, and not of the place, fails its checkpoint alone: such an error has no errno.

    Args:
        numbers: errnos that are of what has the name.
    """
    try:
        with of_system(f"write {path}"):
            yield
    except Error as error:
        if error.errno in _OF_A_NAME:
            raise Error("FAILED_PRECONDITION", f"{error.message}; save under another name, or choose another place") from error
        if error.errno in numbers:
            raise Error("FAILED_PRECONDITION", f"{error.message}; make {path} accessible to the drain, or move it away") from error
        raise


@contextlib.contextmanager
def of_copy(path: str) -> Iterator[None]:
    """What is missing where a drain writes was removed or completed by another process: the copy is tried again."""
    try:
        with of_system(f"write {path}"):
            yield
    except Error as error:
        if error.code != "NOT_FOUND":
            raise
        raise Error("ABORTED", f"{error.message}; another process has removed or completed the copy") from error


@contextlib.contextmanager
def in_use(path: str) -> Iterator[None]:
    """Keeps the retention of a drain, which is another process, from a checkpoint.

    Raises:
        Error: NOT_FOUND where retention was faster.
    """
    with of_system(f"open {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_SH)
        with of_system(f"open {path}"):
            os.stat(path)
        yield
    finally:
        os.close(fd)


def stamp(path: str) -> object:
    """What differs once an entry of a directory has changed, and stays when the directory gets another name."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        return None
    with os.scandir(path) as entries:
        return frozenset((e.name, (status := e.stat(follow_symlinks=False)).st_ino, status.st_size, status.st_mtime_ns) for e in entries)


def is_at(path: str, fd: int) -> bool:
    """Whether an open directory has a path still."""
    return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))


def check_at(path: str, fd: int) -> None:
    """Refuses, with ABORTED, to write where another process has given the directory of a copy its name: it is a checkpoint."""
    with of_copy(path):
        if not is_at(path, fd):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def is_under_way(path: str) -> bool:
    """Whether a save or a copy is at work in a directory, perhaps by a worker alone. Where locks tell nothing, there is none."""
    with contextlib.suppress(Error, OSError):  # gone, or no directory
        if not _names.kind_of(os.path.basename(path)):
            return _native.saves_at_work(path) in ("trainer", "orphan")
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return not _durable.locked(fd, fcntl.LOCK_EX)
        finally:
            os.close(fd)
    return False


def touch(name: str, folder: int) -> None:
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=folder))


def is_of_save(name: str) -> bool:
    return _names.is_record(name) and name != _names.METADATA


def may_be_of_save(name: str) -> bool:
    """Whether a file has a name of a checkpoint's data or metadata: lists of files say whether it is."""
    return bool(_names.format_of(name) or _names.DCP_ANY_DATA.fullmatch(name))


def is_list(name: str) -> bool:
    """Whether a file is no data, or is not whole: a list of a checkpoint, or of the files beside it."""
    is_of_format = _names.format_of(_names.finished(name)) and not _names.DATA.fullmatch(name) and not _names.DCP_DATA.fullmatch(name)
    return name == _names.BESIDE_RECORD or bool(is_of_format)


def unrecorded(names: Iterable[str]) -> list[str]:
    """Of the names in a directory those that a drain has put beside the checkpoint, or begun to, without the record of them."""
    marks = sorted(filter(_names.is_unfinished_beside, names))
    return [*(n for n in names if _names.unfinished_beside(BESIDE + n) in marks), *marks]


def _removed_in_turn(name: str) -> int:
    """A list goes behind the files that it names: it tells them from a user's own, after a crash, too."""
    if name == _names.BESIDE_RECORD or _names.is_unfinished_beside(name):
        return 1
    if _names.is_commit_record(_names.finished(name)):
        return 4 if name == MARK else 3
    return 2 if name.endswith(_names.MANIFEST_END) else 0


def remove_unnamed(path: str) -> bool:
    """Removes what has no name, or no longer; false where something stays, or another process uses it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The other process may have given it the name in between.
        if not _durable.locked(fd, fcntl.LOCK_EX) or not is_at(path, fd):
            return False
        for name in sorted(_durable.names_in(fd), key=_removed_in_turn):
            os.unlink(name, dir_fd=fd)
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
