"""The log of device-mapper's target log-writes (Documentation/admin-guide/device-mapper/log-writes.rst, drivers/md/dm-log-writes.c).

A write is logged when it has ended and the next flush is asked for, or at once where it asks to be durable itself.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQI")  # magic, version, entries, bytes of a sector
_ENTRY = struct.Struct("<QQQQ")  # sector, sectors, flags, bytes of a mark
_LAST = b"dm-log-writes-end"


class _Flag(enum.IntFlag):
    FLUSH = 1
    FUA = 2
    DISCARD = 4
    MARK = 8


class Entry(NamedTuple):
    """One entry of a log.

    Attributes:
        offset, data: bytes of a write, or the text of a mark.
        is_mark: whether it is one.
        is_flush: whether all entries before it are durable.
        is_durable: whether it is itself, and those before it.
    """

    offset: int
    data: bytes
    is_mark: bool
    is_flush: bool
    is_durable: bool


def entries(file: BinaryIO) -> Iterator[Entry]:
    """The entries of a log, but the target's own last one.

    Raises:
        ValueError: it is no log, or the log's disk was full.
    """
    fd = file.fileno()
    magic, version, count, sector = _SUPER.unpack(os.pread(fd, _SUPER.size, 0))
    if (magic, version) != (MAGIC, 1):
        raise ValueError(f"{file.name}: no log of log-writes, version 1")
    place, data = sector, b""
    for _ in range(count):
        at, sectors, flags, mark_bytes = _ENTRY.unpack(os.pread(fd, _ENTRY.size, place))
        place += sector
        if flags & _Flag.MARK:
            data = os.pread(fd, mark_bytes, place - sector + _ENTRY.size)
            if data == _LAST:
                return
        elif flags & _Flag.DISCARD:
            data = bytes(sectors * sector)
        else:
            data = os.pread(fd, sectors * sector, place)
            place += len(data)
        yield Entry(at * sector, data, bool(flags & _Flag.MARK), bool(flags & _Flag.FLUSH), bool(flags & _Flag.FUA))
    raise ValueError(f"{file.name}: the log has no end: its disk was full")
