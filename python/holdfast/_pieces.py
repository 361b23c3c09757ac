"""From where a tensor lies in a file to where it belongs: straight, or through a bounded buffer."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from holdfast import _devices

_ALIGNMENT = 64
_READ_BYTES_MIN = 8 << 20  # one chunk is read while another is compared


@dataclasses.dataclass(frozen=True)
class Source:
    """A strided tensor in a file.

    Attributes:
        reader: that reads it.
        name: by which the reader knows the bytes.
        base: of the tensor's first element in those bytes.
        dtype, shape, stride: of it.
    """

    reader: Any
    name: str
    base: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def narrow(self, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Source:
        """A box of it."""
        moved = sum(o * s for o, s in zip(offsets, self.stride, strict=True))
        return dataclasses.replace(
            self, base=self.base + moved * self.dtype.itemsize, shape=tuple(lengths)
        )

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_run(self) -> bool:
        """Whether it is one run of bytes, in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclasses.dataclass
class Piece:
    """A part of a source and the part of a tensor that it fills."""

    source: Source
    target: torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the file's bytes are the target's."""
        target = self.target
        return (
            target.dtype == self.source.dtype
            and type(target) in (torch.Tensor, torch.nn.Parameter)
            and target.layout == torch.strided
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
            and self.source.is_run()
        )

    def direct_target(self) -> tuple[str, int, int, Any, int]:
        return (
            self.source.name, self.target.data_ptr(), self.target.nbytes,
            _devices.device_of(self.target.device), self.source.base,
        )  # fmt: skip

    def halves(self) -> Iterator[Piece]:
        """Two pieces, cut where the file's bytes are farthest apart."""
        reach = [(n - 1) * s for n, s in zip(self.source.shape, self.source.stride, strict=True)]
        dim = reach.index(max(reach))
        size = self.source.shape[dim]
        for begin, end in ((0, size // 2), (size // 2, size)):
            offsets = [0] * len(reach)
            lengths = list(self.source.shape)
            offsets[dim], lengths[dim] = begin, end - begin
            yield Piece(
                self.source.narrow(tuple(offsets), tuple(lengths)),
                self.target.narrow(dim, begin, end - begin),
            )


def cut(piece: Piece, buffer_bytes: int) -> Iterator[Piece]:
    """Parts of a piece that are direct, or whose span fits the buffer; in the file's order."""
    if not math.prod(piece.source.shape):
        return
    if piece.is_direct or piece.source.span <= buffer_bytes:
        yield piece
    else:
        for half in piece.halves():
            yield from cut(half, buffer_bytes)


class Loading:
    """Reads pieces: direct ones together, the others a buffer full at a time.

    Attributes:
        report: of all that was read so far: ``bytes``, ``bytes_read``, ``seconds``, ``verified``,
            and the last reading's ``engine``, ``engine_reason`` and ``direct_io``.
    """

    def __init__(self, verify: bool, buffer_bytes: int, threads: int, engine: str = "auto",
                 direct_io: bool = True) -> None:  # fmt: skip
        self._verify = verify
        self._buffer_bytes = buffer_bytes
        # Half for what must be laid out anew, half for the reading itself.
        self._piece_bytes = buffer_bytes // 2
        self._options = (threads, engine, direct_io)
        # By the memory that they fill: tied tensors are the same, and once is enough.
        self._direct: dict[int, tuple[Any, dict[tuple[int, int, Any], Any]]] = {}
        self._devices: set[torch.device] = set()
        self._bounced: list[Piece] = []
        self._compared: list[tuple[Any, str, int, int]] = []
        self._targets: list[torch.Tensor] = []
        self.report: dict[str, Any] = {
            "bytes": 0, "bytes_read": 0, "seconds": 0.0, "verified": verify,
        }  # fmt: skip

    def add(self, source: Source, target: torch.Tensor) -> None:
        """Asks for a box of the same shape."""
        self.changes(target)
        for piece in cut(Piece(source, target), self._piece_bytes):
            if piece.is_direct:
                reader, wanted = piece.source.reader, piece.direct_target()
                _, address, nbytes, device, _ = wanted
                targets = self._direct.setdefault(id(reader), (reader, {}))[1]
                targets[address, nbytes, device] = wanted
                self._devices.add(target.device)
            else:
                self._bounced.append(piece)

    def add_whole(self, reader: Any, name: str, target: torch.Tensor) -> None:
        """Asks for all bytes of an entry, for a contiguous tensor of as many."""
        nbytes = target.nbytes
        if nbytes:
            address, device = target.data_ptr(), _devices.device_of(target.device)
            targets = self._direct.setdefault(id(reader), (reader, {}))[1]
            targets[address, nbytes, device] = (name, address, nbytes, device, 0)
            self._devices.add(target.device)

    def changes(self, target: torch.Tensor) -> None:
        """Notes a tensor whose values change: a backward pass that has saved the old ones raises."""
        self._targets.append(target)

    def run(self) -> None:
        """Reads everything that was asked for.

        A reading that fails may have filled a part of the targets.
        """
        try:
            self._read_all()
        finally:
            torch.autograd.graph.increment_version(t for t in self._targets if not t.is_inference())
            self._targets.clear()

    def beside(self) -> Loading:
        """Another one with the same options, whose reading counts in the same report."""
        other = copy.copy(self)
        other._direct, other._bounced, other._compared, other._targets, other._devices = {}, [], [], [], set()
        return other

    @property
    def direct_io(self) -> bool:
        """Whether the page cache is passed by."""
        return self._options[2]

    def add_compared(self, source: Source) -> None:
        """Asks `check`, and no reading, for the bytes of a box."""
        stand_in = torch.empty(source.shape, dtype=source.dtype, device="meta")
        for piece in cut(Piece(source, stand_in), self._piece_bytes):
            box = piece.source
            self._compared.append((box.reader, box.name, box.base, box.span))

    def check(self, fits: Callable[[int], bool]) -> None:
        """Reads and compares everything that was asked for, and keeps nothing of it but in the page cache.

        Args:
            fits: whether the page cache may take so many bytes. Then `run` reads them from there;
                else from the disk again.

        Raises:
            Error: DATA_LOSS for a byte that is not what was saved.
        """
        if not self._verify:
            return
        parts: dict[int, tuple[Any, list[tuple[str, int, int]]]] = {}
        for reader, targets in self._direct.values():
            parts[id(reader)] = reader, [(name, base, nbytes) for name, _, nbytes, _, base in targets.values()]
        bounced = ((p.source.reader, p.source.name, p.source.base, p.source.span) for p in self._bounced)
        for reader, name, base, nbytes in (*bounced, *self._compared):
            parts.setdefault(id(reader), (reader, []))[1].append((name, base, nbytes))
        threads, engine, direct_io = self._options
        if fits(sum(nbytes for _, found in parts.values() for _, _, nbytes in found)):
            self._options = threads, engine, False
        for reader, found in parts.values():
            # All of it goes to one place: nobody looks at it.
            nowhere = _devices.host_bytes(min(self._piece_bytes, max(n for _, _, n in found)))
            address, most = nowhere.data_ptr(), nowhere.nbytes
            counted = self.report["bytes"]
            self.read(reader, [
                (name, address, min(most, base + length - begin), None, begin)
                for name, base, length in found for begin in range(base, base + length, most)
            ], self._buffer_bytes // 2)  # fmt: skip
            self.report["bytes"] = counted

    def _read_all(self) -> None:
        # Memory of a device may still be written, by its last owner or by what initializes it.
        for device in self._devices:
            _devices.order_after_current(device)
        self._devices.clear()
        for reader, targets in self._direct.values():
            self.read(reader, list(targets.values()))
        self._direct.clear()
        if not self._bounced:
            return
        # In the order of the files, so that pieces of one chunk are read together.
        self._bounced.sort(key=lambda p: (id(p.source.reader), p.source.name, p.source.base))
        nbytes = min(
            max(self._piece_bytes, _ALIGNMENT), sum(_aligned(p.source.span) for p in self._bounced)
        )
        buffer = _devices.host_bytes(nbytes + _ALIGNMENT)
        batch: list[tuple[Piece, int]] = []
        filled = 0
        for piece in self._bounced:
            needed = _aligned(piece.source.span)
            if batch and (filled + needed > buffer.numel()
                          or batch[0][0].source.reader is not piece.source.reader):  # fmt: skip
                self._bounce(buffer, batch)
                batch, filled = [], 0
            batch.append((piece, filled))
            filled += needed
        self._bounce(buffer, batch)
        self._bounced.clear()

    def _bounce(self, buffer: torch.Tensor, batch: list[tuple[Piece, int]]) -> None:
        self.read(
            batch[0][0].source.reader,
            [
                (p.source.name, buffer.data_ptr() + at, p.source.span, None, p.source.base)
                for p, at in batch
            ],
            self._buffer_bytes // 2,
        )
        for piece, at in batch:
            source = piece.source
            raw = buffer[at : at + source.span].view(source.dtype)
            with torch.no_grad():
                piece.target.copy_(raw.as_strided(source.shape, source.stride))

    def read(self, reader: Any, targets: list[Any], buffer_bytes: int = 0) -> None:
        """Reads parts to addresses."""
        threads, engine, direct_io = self._options
        nbytes = max(buffer_bytes or self._buffer_bytes, _READ_BYTES_MIN)
        report = reader.load(targets, self._verify, nbytes, threads, engine, direct_io)
        for key in ("bytes", "bytes_read", "seconds"):
            report[key] += self.report[key]
        self.report.update(report)  # in place: of those beside, too


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
