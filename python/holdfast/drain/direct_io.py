"""Reads and writes past the page cache, where a file system allows it: the training keeps the cache and the CPU that it costs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator

from holdfast.drain.places import Read
from holdfast.errors import of_system

_ALIGNMENT = 4096
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # of a file system that opens a file for direct I/O, and does none
_BUFFER_BYTES_MIN = 4 << 20


def reading(fd: int, path: str) -> Read:
    """A read of a file that is open with O_DIRECT. Its ranges begin at multiples of 4096; it returns views.

    Args:
        path: of the file, for errors.
    """
    mine = threading.local()

    def read(begin: int, end: int) -> memoryview:
        length = -(-(end - begin) // _ALIGNMENT) * _ALIGNMENT
        with of_system(f"read {path} @ {begin}"):
            if getattr(mine, "buffer", None) is None or len(mine.buffer) < length:
                mine.buffer = mmap.mmap(-1, max(length, _BUFFER_BYTES_MIN))
            view, got = memoryview(mine.buffer)[:length], 0
            while got < end - begin and (more := _read(fd, view[got:], begin + got)):
                got += more
        return view[: min(got, end - begin)]

    return read


def _read(fd: int, into: memoryview, at: int) -> int:
    try:
        return os.preadv(fd, [into], at)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
    # The file system wants another alignment: of this thread, or of another that was here before. What the cache has is not read.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return os.preadv(fd, [into], at)


@contextlib.contextmanager
def writing(fd: int) -> Iterator[Callable[[memoryview, int], None]]:
    """A function that writes at a place in a file, past the page cache where file system and memory allow it.

    Args:
        fd: of the file, for what cannot be written so: its end, and data at any address.

    Raises:
        OSError: of the system, also at the end.
    """
    try:  # not by its name, which may be another file's by now
        direct = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:  # the file system has no direct I/O, or there is no /proc
        direct = -1
    is_taken = direct >= 0

    def write(data: memoryview, at: int) -> None:
        nonlocal is_taken
        while data:
            count = 0
            if is_taken and len(data) >= _ALIGNMENT:
                try:
                    count = os.pwrite(direct, data[: len(data) // _ALIGNMENT * _ALIGNMENT], at)
                except OSError as error:
                    if error.errno not in _REFUSED:
                        raise
                    is_taken = False
            if not count:
                count = os.pwrite(fd, data, at)
                # Begins the writing to the disk, beside the reading of what follows.
                os.posix_fadvise(fd, at, count, os.POSIX_FADV_DONTNEED)
            data, at = data[count:], at + count

    try:
        yield write
    finally:
        if direct >= 0:
            os.close(direct)
