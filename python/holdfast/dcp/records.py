"""Where a tensor's bytes lie inside an item that ``torch.save`` made, found from its ends alone."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from holdfast.errors import Error

_DIRECTORY_BYTES_MAX = 1 << 26
_PICKLE_BYTES_MAX = 1 << 20

ReadAt = Callable[[int, int], bytes]


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """A tensor as it lies in a file.

    Attributes:
        begin, end: of its storage's record, in the item.
        dtype, shape, stride: as saved.
        storage_offset: of the first element in the record, in elements.
    """

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


class NotPlain(Exception):
    """The item holds something else than one strided tensor; ``torch.load`` can read it."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    name: str
    size: int
    header: int
    compressed: bool


def _zip64(extra: bytes, fields: list[int]) -> list[int]:
    """Replaces the fields that are too large for 32 bits by those of the zip64 record."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            body = io.BytesIO(extra[at + 4 : at + 4 + length])
            result = []
            for value in fields:
                if value == 0xFFFFFFFF:
                    wide = body.read(8)
                    if len(wide) != 8:
                        raise NotPlain("a zip64 record is too short")
                    (value,) = struct.unpack("<Q", wide)
                result.append(value)
            return result
        at += 4 + length
    return fields


def _directory(read: ReadAt, length: int) -> list[_Entry]:
    """The archive's central directory."""
    end_bytes = min(length, 4096)
    end = read(length - end_bytes, end_bytes)
    at = end.rfind(b"PK\5\6")
    if at < 0 or len(end) - at < 22:
        raise NotPlain("no zip archive")
    count, size, begin = struct.unpack_from("<H2I", end, at + 10)
    if begin == 0xFFFFFFFF or size == 0xFFFFFFFF or count == 0xFFFF:
        locator = at - 20
        if locator < 0 or end[locator : locator + 4] != b"PK\6\7":
            raise NotPlain("no zip64 locator")
        (wide_at,) = struct.unpack_from("<Q", end, locator + 8)
        if wide_at + 56 > length:
            raise NotPlain("a zip64 end record outside of the item")
        wide = read(wide_at, 56)
        if wide[:4] != b"PK\6\6":
            raise NotPlain("no zip64 end record")
        count, size, begin = struct.unpack_from("<3Q", wide, 32)
    if size > _DIRECTORY_BYTES_MAX or begin + size > length or count > size // 46:
        raise NotPlain("its directory does not fit")
    raw = read(begin, size)
    entries, at = [], 0
    for _ in range(count):
        if raw[at : at + 4] != b"PK\1\2" or at + 46 > len(raw):
            raise NotPlain("its directory is damaged")
        (method,) = struct.unpack_from("<H", raw, at + 10)
        packed, plain, name_bytes, extra_bytes, comment = struct.unpack_from("<2I3H", raw, at + 20)
        (header,) = struct.unpack_from("<I", raw, at + 42)
        name = raw[at + 46 : at + 46 + name_bytes].decode(errors="replace")
        extra = raw[at + 46 + name_bytes : at + 46 + name_bytes + extra_bytes]
        # APPNOTE 4.5.3: in this order, each only where its field says so.
        plain, packed, header = _zip64(extra, [plain, packed, header])
        entries.append(_Entry(name, plain, header, method != 0 or packed != plain))
        at += 46 + name_bytes + extra_bytes + comment
    return entries


def _content(read: ReadAt, entry: _Entry, length: int) -> tuple[int, int]:
    """The range of an entry's bytes in the item."""
    header = read(entry.header, 30)
    if header[:4] != b"PK\3\4":
        raise NotPlain(f"{entry.name} has no header")
    name_bytes, extra_bytes = struct.unpack_from("<2H", header, 26)
    begin = entry.header + 30 + name_bytes + extra_bytes
    if entry.compressed or begin + entry.size > length:
        raise NotPlain(f"{entry.name} is compressed, or leaves the item")
    return begin, begin + entry.size


class Archive:
    """What ``torch.save`` wrote: stored records, by their names below the archive's own.

    Raises:
        NotPlain: it is none, or not in this machine's byte order.
    """

    def __init__(self, read: ReadAt, length: int) -> None:
        self.read = read
        self._length = length
        entries = _directory(read, length)
        self._entries = {entry.name.partition("/")[2]: entry for entry in entries}
        if sum(entry.size for entry in entries) > length:
            raise NotPlain("its records overlap")
        if "byteorder" in self._entries and self.record("byteorder", 16) != b"little":
            raise NotPlain("its byte order is not this machine's")

    def find(self, name: str) -> tuple[int, int]:
        """The range of a record's bytes."""
        if name not in self._entries:
            raise NotPlain(f"no record {name}")
        return _content(self.read, self._entries[name], self._length)

    def record(self, name: str, bytes_max: int | None = None) -> bytes:
        begin, end = self.find(name)
        if bytes_max is not None and end - begin > bytes_max:
            raise NotPlain(f"its {name} is too long")
        return self.read(begin, end - begin)


@dataclasses.dataclass
class _Storage:
    key: str
    dtype: torch.dtype | None  # None: untyped


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of one tensor and makes nothing: everything that it names is looked at."""

    def persistent_load(self, pid: Any) -> _Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage":
            raise NotPlain("an unknown persistent id")
        return _Storage(str(pid[2]), pid[1])

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}:{name}"
        if full == "torch._utils:_rebuild_tensor_v2":
            return _rebuilt
        if full == "torch._utils:_rebuild_tensor_v3":
            return _rebuilt_untyped
        if full == "collections:OrderedDict":
            return dict
        if full == "torch.storage:UntypedStorage":
            return None
        if module == "torch":
            if name.endswith("Storage") and isinstance(getattr(torch, name, None), type):
                dtype = getattr(getattr(torch, name), "dtype", None)
                if isinstance(dtype, torch.dtype):
                    return dtype
            if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
        raise NotPlain(f"it needs {full}")


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, *rest: Any) -> tuple[Any, ...]:
    return _rebuilt_untyped(storage, offset, shape, stride, grad, hooks, getattr(storage, "dtype", None), *rest)


def _rebuilt_untyped(storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any,
                     dtype: Any, *rest: Any) -> tuple[Any, ...]:  # fmt: skip
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise NotPlain("its storage is of an unknown type")
    if hooks or any(rest):  # such as {"conj": True}: then the elements are not what is stored
        raise NotPlain("it is more than what is stored")
    return storage, dtype, offset, shape, stride


def _check(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or not all(type(n) is int and n >= 0 for n in numbers):
        raise NotPlain("its shape is none")
    return numbers


def find_tensor(read: ReadAt, length: int) -> TensorRecord:
    """Where an item's tensor lies.

    Args:
        read: ``read(offset, n)`` gives bytes of the item.
        length: of the item.

    Raises:
        NotPlain: it is no archive of one strided tensor in this machine's byte order.
        Error: DATA_LOSS when the tensor does not fit its storage.
    """
    try:
        return _find_tensor(read, length)
    except (NotPlain, Error):
        raise
    except Exception as error:
        raise NotPlain(f"it cannot be read: {error}") from error


def _find_tensor(read: ReadAt, length: int) -> TensorRecord:
    archive = Archive(read, length)
    archive.find("data/0")
    described = _TensorUnpickler(io.BytesIO(archive.record("data.pkl", _PICKLE_BYTES_MAX))).load()
    if not isinstance(described, tuple) or len(described) != 5:
        raise NotPlain("it is no tensor")
    storage, dtype, offset, shape, stride = described
    shape, stride = _check(shape), _check(stride)
    (offset,) = _check((offset,))
    if storage.key != "0" or len(shape) != len(stride):
        raise NotPlain("it is no tensor")
    begin, end = archive.find("data/0")
    elements = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if math.prod(shape) and elements * dtype.itemsize > end - begin:
        raise Error("DATA_LOSS", f"a tensor of shape {list(shape)} is larger than its storage")
    return TensorRecord(begin, end, dtype, shape, stride, offset)
