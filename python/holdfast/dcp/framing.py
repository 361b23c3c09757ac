"""The zip around a tensor's bytes: what ``torch.save`` writes, made without touching the bytes.

A `.distcp` file is a run of items, each what ``torch.save`` makes of one tensor: a zip archive of
stored records (see `holdfast._framing`). All small records come first, so that everything in front
of the bytes depends on dtype and shape alone:

    head   archive/data.pkl, archive/byteorder, archive/version, local header of archive/data/0
    gap    the tensor's bytes, at a multiple of 64 from the beginning of the item
    tail   data descriptor, central directory, end records
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import math
import pickle
import sys
import warnings
from typing import Any

import torch

from holdfast._framing import Archive
from holdfast.errors import Error


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
            function, arguments = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)
            storage, _, _, _, _, _, *more = arguments
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        if isinstance(storage, torch.UntypedStorage):
            return function, torch.UntypedStorage, True, tuple(more)
        return function, getattr(torch, storage.pickle_storage_type()), False, tuple(more)


def can_frame(tensor: Any) -> bool:
    """Whether a tensor's item can be made around its bytes; all others ``torch.save`` makes."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
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


@functools.lru_cache(maxsize=8192)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """The archive around the bytes of a contiguous tensor, in the machine's byte order.

    Raises:
        Error: INVALID_ARGUMENT for a dtype that torch saves in another way.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    archive = Archive()
    head = archive.record(b"archive/data.pkl", _pickled(dtype, shape))
    head += archive.record(b"archive/byteorder", sys.byteorder.encode())
    head += archive.record(b"archive/version", b"3\n")
    head += archive.begin(b"archive/data/0", nbytes)
    descriptor, slot = archive.end()
    directory, slots = archive.directory()
    # Without bytes the checksum is that of nothing, zero, and needs no slot.
    offsets = (slot, *(len(descriptor) + offset for offset in slots)) if nbytes else ()
    return Frame(head, nbytes, descriptor + directory, offsets)
