"""Zip archives of stored records around bytes that lie elsewhere: what ``torch.save`` writes.

The archive's own bytes are made around gaps in which the bytes of tensors will stand, each at a
multiple of 64 from the beginning of the archive. The one number that is not known then, the CRC-32
of such bytes, has slots, filled while they are staged:

    small records   local header and content
    a gap           local header, the bytes, data descriptor
    the end         central directory and end records

Source of the format: PKWARE's APPNOTE 6.3.10, sections 4.3 (records), 4.4.4 (bit 3: sizes and
checksum follow the data) and 4.5.3 (zip64).
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from typing import Any

from holdfast import _native

ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF  # from here on a 32-bit field says "see the zip64 record"
_RECORDS_MAX = 0xFFFF  # likewise, of the number of records
# Version 4.5 reads zip64; the date is the first that the format can say, as torch writes it.
_VERSION_PLAIN, _VERSION_ZIP64 = 20, 45
_TIME, _DATE = 0, 0x21
_UTF8, _DESCRIPTOR = 0x0800, 0x0008
_CRC32_IN_DESCRIPTOR, _CRC32_IN_DIRECTORY = 4, 16


@dataclasses.dataclass
class _Record:
    """One entry of the archive."""

    name: bytes
    crc32: int
    size: int
    offset: int
    flags: int

    def local_header(self, extra: bytes) -> bytes:
        later = bool(self.flags & _DESCRIPTOR)
        zip64 = self.size >= _LIMIT
        size = _LIMIT if zip64 else 0 if later else self.size
        return (
            struct.pack(
                "<4s5H3I2H", b"PK\3\4", _VERSION_ZIP64 if zip64 else _VERSION_PLAIN, self.flags, 0,
                _TIME, _DATE, 0 if later else self.crc32, size, size, len(self.name), len(extra),
            )
            + self.name
            + extra
        )  # fmt: skip

    def central_header(self) -> bytes:
        """The directory's entry."""
        big = []
        size = offset = _LIMIT
        if self.size >= _LIMIT:
            big += [self.size, self.size]
        else:
            size = self.size
        if self.offset >= _LIMIT:
            big.append(self.offset)
        else:
            offset = self.offset
        extra = struct.pack(f"<2H{len(big)}Q", 1, 8 * len(big), *big) if big else b""
        version = _VERSION_ZIP64 if big else _VERSION_PLAIN
        header = struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", version, version, self.flags, 0, _TIME, _DATE, self.crc32,
            size, size, len(self.name), len(extra), 0, 0, 0, 0, offset,
        )  # fmt: skip
        return header + self.name + extra


class Archive:
    """An archive that is being laid out, from its first byte to its last.

    Attributes:
        length: of what was laid out so far.
    """

    def __init__(self) -> None:
        self.length = 0
        self._records: list[_Record] = []

    def record(self, name: bytes, content: bytes) -> bytes:
        """A whole small record: its bytes."""
        record = _Record(name, zlib.crc32(content), len(content), self.length, _UTF8)
        self._records.append(record)
        return self._laid(record.local_header(b"") + content)

    def begin(self, name: bytes, nbytes: int) -> bytes:
        """What stands in front of a gap of `nbytes`, which begins at a multiple of `ALIGNMENT`."""
        record = _Record(name, 0, nbytes, self.length, _UTF8 | _DESCRIPTOR)
        self._records.append(record)
        # The extra field of the local header: sizes where they need 64 bits, and padding.
        extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT else b""
        bare = self.length + len(record.local_header(extra))
        padding = -(bare + 4) % ALIGNMENT
        # "FB" is what PyTorch's own writer calls its padding.
        extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
        head = self._laid(record.local_header(extra))
        self.length += nbytes
        return head

    def end(self) -> tuple[bytes, int]:
        """What stands behind the gap, and where in it the CRC-32 of the bytes belongs."""
        size = self._records[-1].size
        size_format = "<2Q" if size >= _LIMIT else "<2I"
        descriptor = b"PK\7\x08" + bytes(4) + struct.pack(size_format, size, size)
        return self._laid(descriptor), _CRC32_IN_DESCRIPTOR

    def directory(self) -> tuple[bytes, list[int]]:
        """The archive's end, and where in it the CRC-32 of each gap's bytes belongs, in order."""
        begin, out, slots = self.length, bytearray(), []
        for record in self._records:
            if record.flags & _DESCRIPTOR:
                slots.append(len(out) + _CRC32_IN_DIRECTORY)
            out += record.central_header()
        nbytes, count = len(out), len(self._records)
        if begin >= _LIMIT or nbytes >= _LIMIT or count >= _RECORDS_MAX:
            out += struct.pack(
                "<4sQ2H2I4Q", b"PK\6\6", 44, _VERSION_ZIP64, _VERSION_ZIP64, 0, 0, count, count,
                nbytes, begin,
            )  # fmt: skip
            out += struct.pack("<4sIQI", b"PK\6\7", 0, begin + nbytes, 1)
        few = min(count, _RECORDS_MAX)
        out += struct.pack(
            "<4s4H2IH", b"PK\5\6", 0, 0, few, few, min(nbytes, _LIMIT), min(begin, _LIMIT), 0
        )
        return self._laid(bytes(out)), slots

    def _laid(self, data: bytes) -> bytes:
        self.length += len(data)
        return data


class PlannedFile:
    """A file that is being planned; the archive's bytes between two tensors are one literal.

    Args:
        name: of the file.
        plan: that the file begins with; default a new one.
    """

    def __init__(self, name: str, plan: _native.Plan | None = None) -> None:
        self.name = name
        self.plan = plan or _native.Plan()
        if plan is None:
            self.plan.add_file(name)
        self._pending = bytearray()
        self._slots: list[tuple[int, int]] = []
        self._bytes = self.plan.file_bytes  # of the file, with what is pending

    def begin_file(self, name: str) -> None:
        """Ends the file and begins another one of the same plan."""
        self.flush()
        self.name = name
        self.plan.add_file(name)
        self._bytes = 0

    def begin_item(self) -> int:
        """Pads to where an item may begin and returns that offset."""
        self.literal(bytes(-self._bytes % ALIGNMENT))
        return self._bytes

    def literal(self, data: bytes, slots: tuple[int, ...] = (), segment: int = 0) -> None:
        """Appends bytes of the format's own, with slots for the CRC-32 of one segment."""
        self.literal_of(data, [(offset, segment) for offset in slots])

    def literal_of(self, data: bytes, slots: list[tuple[int, int]]) -> None:
        """As `literal`; a slot is its offset in the bytes, and a segment."""
        self._slots += [(len(self._pending) + offset, segment) for offset, segment in slots]
        self._pending += data
        self._bytes += len(data)

    def flush(self) -> None:
        """Hands what is pending to the plan."""
        if self._pending:
            self.plan.add_literal(bytes(self._pending), self._slots)
            self._pending, self._slots = bytearray(), []

    def content(self, name: str, data: Any) -> int:
        """Appends what lies in the buffer of an object; returns its length."""
        self.flush()
        length = self.plan.add_bytes(name, data)
        self._bytes += length
        return length

    def tensor(self, name: str, dtype: str, shape: list[int], address: int, nbytes: int,
               device: Any, stream: int) -> int:  # fmt: skip
        """Appends the bytes of a tensor; returns their segment."""
        self.flush()
        self._bytes += nbytes
        return self.plan.add_tensor(name, dtype, shape, address, nbytes, device, stream)
