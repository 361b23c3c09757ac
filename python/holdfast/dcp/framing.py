"""The zip around a tensor's bytes: what ``torch.save`` writes, made without touching the bytes.

A `.distcp` file is a run of items, each what ``torch.save`` makes of one tensor: a zip archive of
stored records. Here the archive's own bytes are made around a gap in which the tensor's bytes will
stand. The one number that is not known then, the CRC-32 of the tensor's bytes, has slots, filled
while the bytes are staged. All small records come first, so that everything in front of the
bytes depends on dtype and shape alone:

    head   archive/data.pkl, archive/byteorder, archive/version, local header of archive/data/0
    gap    the tensor's bytes, at a multiple of 64 from the beginning of the item
    tail   data descriptor, central directory, end records

Source of the format: PKWARE's APPNOTE 6.3.10, sections 4.3 (records), 4.4.4 (bit 3: sizes and
checksum follow the data) and 4.5.3 (zip64).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import math
import pickle
import struct
import sys
import warnings
import zlib
from typing import Any

import torch

from holdfast.errors import Error

ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF  # from here on a 32-bit field says "see the zip64 record"
_DATA = b"archive/data/0"
# Version 4.5 reads zip64; the date is the first that the format can say, as torch writes it.
_VERSION_PLAIN, _VERSION_ZIP64 = 20, 45
_TIME, _DATE = 0, 0x21
_UTF8, _DESCRIPTOR = 0x0800, 0x0008


@dataclasses.dataclass(frozen=True)
class Frame:
    """What stands around a tensor's bytes.

    Attributes:
        head: in front of them.
        nbytes: how many they are.
        tail: behind them.
        crc32_offsets: where in `tail` the CRC-32 of the bytes belongs, little endian; zero there.
    """

    head: bytes
    nbytes: int
    tail: bytes
    crc32_offsets: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the whole item."""
        return len(self.head) + self.nbytes + len(self.tail)


class _Stub:
    """Stands for a tensor in a pickle, and reduces to what the tensor would."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


class _Storage:
    """Stands for the tensor's storage, which a pickle names and does not contain."""

    def __init__(self, kind: type, elements: int) -> None:
        self.persistent_id = ("storage", kind, "0", "cpu", elements)


class _Pickler(pickle.Pickler):
    def persistent_id(self, item: Any) -> Any:
        return item.persistent_id if isinstance(item, _Storage) else None


@functools.cache
def _reduction(dtype: torch.dtype) -> tuple[Any, type, bool, tuple[Any, ...]] | None:
    """How torch pickles tensors of a dtype, as it does with one that has no elements.

    Returns:
        The function that rebuilds one, the class that its storage is named by, whether the storage
        counts bytes (not elements), and further arguments; None if torch does it another way.
    """
    with warnings.catch_warnings():
        # Of ComplexHalf being experimental, and of TypedStorage, which is what files are made of.
        warnings.simplefilter("ignore")
        try:
            function, arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)
            storage, _, _, _, _, _, *more = arguments
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        if isinstance(storage, torch.UntypedStorage):
            return function, torch.UntypedStorage, True, tuple(more)
        return function, getattr(torch, storage.pickle_storage_type()), False, tuple(more)


def can_frame(tensor: torch.Tensor) -> bool:
    """Whether a tensor's item can be made around its bytes; all others ``torch.save`` makes."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and _reduction(tensor.dtype) is not None
    )


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    reduction = _reduction(dtype)
    if reduction is None:
        raise Error(
            "INVALID_ARGUMENT", f"frame a tensor of {dtype}: torch.save does it differently"
        )
    function, kind, in_bytes, more = reduction
    elements = math.prod(shape)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    storage = _Storage(kind, elements * dtype.itemsize if in_bytes else elements)
    arguments = (
        storage, 0, tuple(shape), tuple(reversed(strides)), False, collections.OrderedDict(), *more,
    )  # fmt: skip
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Stub((function, arguments)))
    return buffer.getvalue()


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

    def central_header(self) -> tuple[bytes, int]:
        """The directory's entry, and where in it the CRC-32 stands."""
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
        return header + self.name + extra, 16


@functools.lru_cache(maxsize=8192)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The archive around the bytes of a contiguous tensor, in the machine's byte order.

    Raises:
        Error: INVALID_ARGUMENT for a dtype that torch saves in another way.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    head = bytearray()
    records = []
    for name, content in (
        (b"archive/data.pkl", _pickled(dtype, shape)),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ):
        record = _Record(name, zlib.crc32(content), len(content), len(head), _UTF8)
        records.append(record)
        head += record.local_header(b"") + content
    data = _Record(_DATA, 0, nbytes, len(head), _UTF8 | _DESCRIPTOR)
    records.append(data)
    # The extra field of the local header: sizes where they need 64 bits, and padding.
    extra = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT else b""
    bare = len(head) + len(data.local_header(extra))
    padding = -(bare + 4) % ALIGNMENT
    # "FB" is what PyTorch's own writer calls its padding.
    extra += struct.pack("<2sH", b"FB", padding) + bytes(padding)
    head += data.local_header(extra)

    size_format = "<2Q" if nbytes >= _LIMIT else "<2I"
    tail = bytearray(b"PK\7\x08" + bytes(4) + struct.pack(size_format, nbytes, nbytes))
    slots = [4]
    directory_begin = len(head) + nbytes + len(tail)
    directory_bytes = 0
    for record in records:
        header, crc32_at = record.central_header()
        if record is data:
            slots.append(len(tail) + crc32_at)
        tail += header
        directory_bytes += len(header)
    directory_end = directory_begin + directory_bytes
    if directory_begin >= _LIMIT:
        tail += struct.pack(
            "<4sQ2H2I4Q", b"PK\6\6", 44, _VERSION_ZIP64, _VERSION_ZIP64, 0, 0, len(records),
            len(records), directory_bytes, directory_begin,
        )  # fmt: skip
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, directory_end, 1)
    tail += struct.pack(
        "<4s4H2IH", b"PK\5\6", 0, 0, len(records), len(records), directory_bytes,
        min(directory_begin, _LIMIT), 0,
    )  # fmt: skip
    # Without bytes the checksum is that of nothing, zero, and needs no slot.
    return Frame(bytes(head), nbytes, bytes(tail), tuple(slots) if nbytes else ())
