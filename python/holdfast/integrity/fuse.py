"""The protocol of /dev/fuse, version 7.31 (linux/fuse.h), as far as the servers of this program need it.

A server mounts, reads requests, and answers each with bytes or an error. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

ROOT = 1  # the node that the kernel knows from the start
WRITE_MAX = 1 << 20
BUFFER_BYTES = WRITE_MAX + 8192
TIME_BUSY_MAX = 30.0  # seconds in which a file system that was used is free again
DIRECT_IO = 1  # of an answer to OPEN: no page cache
SIZE_CHANGES = 1 << 3  # of SETATTR, as those that follow
_MNT_DETACH = 2


class Op(enum.IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45


UNANSWERED = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)


class Flag(enum.IntFlag):
    """What a server offers at INIT."""

    ASYNC_READ = 1 << 0
    POSIX_LOCKS = 1 << 1
    BIG_WRITES = 1 << 5
    FLOCK_LOCKS = 1 << 10
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22


_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
TRANSFER = struct.Struct("<QQII")  # handle, offset and size of READ and WRITE
WRITE_DATA = 40  # where the bytes of a WRITE begin
STATISTICS = struct.Struct("<QQQQQIII28x")


class Request(NamedTuple):
    """A request; `body` is valid until the next one is read into the same buffer."""

    opcode: int
    unique: int
    node: int
    body: memoryview


def read(fuse: int, buffer: bytearray) -> Request | None:
    """The next request; None where it was taken back meanwhile.

    Args:
        fuse: descriptor of /dev/fuse.
        buffer: of `BUFFER_BYTES`.

    Raises:
        OSError: the file system is unmounted (ENODEV).
    """
    try:
        size = os.readv(fuse, [buffer])
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
            return None
        raise
    _, opcode, unique, node, *_ = _IN.unpack_from(buffer)
    return Request(opcode, unique, node, memoryview(buffer)[_IN.size : size])


def answer(fuse: int, request: Request, handle: Callable[[Request], bytes | None]) -> None:
    """Answers a request with what `handle` returns, or with the error that it raises."""
    error, body = 0, b""
    try:
        body = handle(request) or b""
    except OSError as raised:
        error = raised.errno or errno.EIO
    if request.opcode not in UNANSWERED:
        with contextlib.suppress(OSError):  # the request was interrupted
            os.write(fuse, _OUT.pack(_OUT.size + len(body), -error, request.unique) + body)


def begin(request: Request, offered: Flag) -> bytes:
    """The answer to INIT."""
    _, _, ahead, flags = struct.unpack_from("<IIII", request.body)
    return struct.pack("<IIIIHHIIHHI28x", 7, 31, ahead, flags & offered, 16, 12, WRITE_MAX, 1, WRITE_MAX >> 12, 0, 0)


def begin_process() -> None:
    """For the process of a server: what ends the driver with all its group leaves this one, which unmounts."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _time(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e9)


def entry(node: int, attributes: bytes, names_for: float, attributes_for: float) -> bytes:
    """The answer to LOOKUP and to what makes entries. The kernel keeps it for so many seconds."""
    (names, names_ns), (attrs, attrs_ns) = _time(names_for), _time(attributes_for)
    return struct.pack("<QQQQII", node, 0, names, attrs, names_ns, attrs_ns) + attributes


def attributes(packed: bytes, kept_for: float) -> bytes:
    """The answer to GETATTR and SETATTR."""
    seconds, nanoseconds = _time(kept_for)
    return struct.pack("<QII", seconds, nanoseconds, 0) + packed


def opened(handle: int, flags: int = 0) -> bytes:
    """The answer to OPEN and OPENDIR."""
    return struct.pack("<QII", handle, flags, 0)


def written(size: int) -> bytes:
    """The answer to WRITE."""
    return struct.pack("<II", size, 0)


def mount(name: str, target: str, options: str = "") -> int:
    """Mounts a file system without a server yet; returns the descriptor of /dev/fuse from which one reads."""
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    data = f"fd={fuse},rootmode=40000,user_id=0,group_id=0{options}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(name.encode(), os.fsencode(target), b"fuse", 0, data.encode()) != 0:
        number = ctypes.get_errno()
        os.close(fuse)
        raise OSError(number, f"mount fuse: {os.strerror(number)}", target)
    return fuse


def detach(target: str) -> None:
    """Unmounts what is mounted there, if anything is; open files keep the file system until they are closed."""
    ctypes.CDLL(None).umount2(os.fsencode(target), _MNT_DETACH)


def retried(attempt: Callable[[], object], passes: Callable[[Any], bool], seconds: float) -> None:
    """Tries again for some seconds while an error is one that passes.

    Raises:
        OSError, subprocess.CalledProcessError: of the last attempt.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            attempt()
            return
        except (OSError, subprocess.CalledProcessError) as error:
            if not passes(error) or time.monotonic() > end:
                raise
        time.sleep(0.02)


def unmount(target: str) -> None:
    """Waits for what keeps files open: the ring of a killed process does, for a moment after its end."""
    retried(lambda: subprocess.run(["umount", target], check=True, capture_output=True, text=True),
            lambda error: "busy" in getattr(error, "stderr", ""), TIME_BUSY_MAX)  # fmt: skip
