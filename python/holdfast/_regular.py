"""Opens regular files alone: a pipe of a checkpoint's name would be waited for. And the digest of their bytes."""

from __future__ import annotations

import ctypes
import os
import stat

from holdfast import _native
from holdfast.errors import Error

# What may be read into memory, as runtime/layout/FORMAT.md says; of DCP's metadata it says nothing.
RECORD_BYTES_MAX = 16 << 20
MANIFEST_BYTES_MAX = 1 << 30
METADATA_BYTES_MAX = 4 << 30


def open_to_read(path: str | os.PathLike[str], operation: str, flags: int = 0, code: str = "DATA_LOSS", folder: int | None = None) -> int:
    """Returns a descriptor of a regular file; `folder`: of the directory that the path begins at.

    Raises:
        Error: with `code`, for anything else.
        OSError: of the system.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=folder)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise Error(code, f"{operation} {os.fspath(path)}: it is no file")


def read_whole(path: str | os.PathLike[str], operation: str, bytes_max: int, flags: int = 0) -> tuple[bytes, os.stat_result]:
    """Bytes and status of a regular file.

    Raises:
        Error: DATA_LOSS for anything else, for a file that is longer than it may be, and for one that ends early.
        OSError: of the system.
    """
    with open(open_to_read(path, operation, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_size > bytes_max:
            raise too_large(f"{operation} {os.fspath(path)}", status.st_size, bytes_max)
        data = file.read(status.st_size)
        if len(data) < status.st_size:
            raise Error("DATA_LOSS", f"{operation} {os.fspath(path)}: it ends after {len(data)} of {status.st_size} bytes")
        return data, status


def too_large(operation: str, nbytes: int, bytes_max: int) -> Error:
    """What reading such a file into memory raises."""
    return Error("DATA_LOSS", f"{operation}: it has {nbytes} bytes, {bytes_max} are the most that it can have")


def digest(data: bytes | memoryview) -> str:
    """XXH3-128 as the files have it, of bytes or of writable memory."""
    if isinstance(data, bytes):
        address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(data)) if data else 0
    raw = _native.digest(address, len(data))
    high, low = (int.from_bytes(raw[at : at + 8], "little") for at in (0, 8))
    return f"{high:016x}{low:016x}"
