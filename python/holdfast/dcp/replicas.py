"""What several ranks have under one name and one of them writes: whether all have it alike.

The framework's planning names one rank for a tensor or object that several ranks have, whatever it is on
the others. Here each of them digests it in the call, the one that writes it, too. The coordinator
compares the digests before it commits.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from holdfast import _native
from holdfast._process import PerProcess
from holdfast._tensor_kinds import as_bytes
from holdfast.dcp.framing import can_frame
from holdfast.dcp.parts import Part, Plan
from holdfast.errors import Error, counted

logger = logging.getLogger("holdfast.dcp")

_DIGEST_BYTES = 16
_NAMES_MAX = 20
_READ_BYTES_MAX = 256 << 20  # of the items of a save that are read from files for their digests
_BATCH_WORDS = 2 << 20  # of memory of a device that is digested at a time


# ---- In the call.


def check_replicas(replicas: str, stock: str = "") -> None:
    """Checks the option of this name. `stock`: why the framework saves, which compares nothing.

    Raises:
        Error: INVALID_ARGUMENT.
    """
    if replicas not in ("warn", "refuse"):
        raise Error("INVALID_ARGUMENT", f"save: replicas is 'warn' or 'refuse', not {replicas!r}")
    if stock and replicas == "refuse":
        raise Error(
            "INVALID_ARGUMENT",
            f"save: {stock}, so the framework's own code would save, which compares nothing over ranks; leave "
            "out replicas='refuse', or pass a path or a holdfast.dcp.StorageWriter",
        )


@dataclasses.dataclass
class Forms:
    """What digests need of the forms of data, the same for data of the same types, dtypes and shapes.

    Attributes:
        digests: of dtypes and shapes: tensors with the same bytes may differ in them.
        plain: positions of tensors that are written as their memory is.
        other: of all else.
    """

    digests: bytes
    plain: list[int]
    other: list[int]

    @staticmethod
    def of(data: Sequence[Any]) -> Forms:
        is_plain = [can_frame(value) for value in data]
        return Forms(
            b"".join(map(_form_of, data)),
            [at for at, plain in enumerate(is_plain) if plain],
            [at for at, plain in enumerate(is_plain) if not plain],
        )


class Digests:
    """Digests of tensors and objects as they are at the call.

    Args:
        data: detached tensors, and the bytes of objects.
        forms: of earlier data of the same types, dtypes and shapes.

    Attributes:
        forms: of the data.
        tensors: one for the host, and one for every device, that together have the digests in the
            order of `data`, see `joined`. The save writes them.
    """

    def __init__(self, data: Sequence[Any], forms: Forms | None = None) -> None:
        self.forms = forms if forms is not None else Forms.of(data)
        addresses, sizes = [0] * len(data), [0] * len(data)
        keep = []
        on_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}

        plain = self.forms.plain
        table = _native.TensorTable([data[at] for at in plain])
        found, bytes_found, others = table.in_host()
        for at, address, size in zip(plain, found, bytes_found, strict=True):
            addresses[at], sizes[at] = address, size
        for at in (*(plain[i] for i in others), *self.forms.other):
            value = _memory_of(data[at])
            keep.append(value)
            if value.is_cpu:
                addresses[at], sizes[at] = value.data_ptr(), value.nbytes
            else:
                on_device.setdefault(value.device, []).append((at, value))
        host = bytearray(joined([_native.digests(addresses, sizes), self.forms.digests]))
        self.tensors = [torch.frombuffer(host, dtype=torch.uint8)]
        self.tensors += [of_device(of, len(data)) for of in on_device.values()]

    def read(self) -> bytes:
        """The digests. Waits for the devices."""
        return joined([tensor.cpu().numpy().tobytes() for tensor in self.tensors])


def joined(parts: list[bytes]) -> bytes:
    """Digests of which the host and every device have some."""
    if not parts:
        return b""
    number = functools.reduce(lambda a, b: a ^ b, (int.from_bytes(part, "little") for part in parts))
    return number.to_bytes(max(map(len, parts)), "little")


def _memory_of(value: Any) -> torch.Tensor:
    """What has a digest of an object, or of a tensor that may be no plain memory, which is then as its item is written."""
    if isinstance(value, torch.Tensor):
        value = value.resolve_conj().resolve_neg()
        if can_frame(value):
            return value.contiguous()
        buffer = io.BytesIO()
        torch.save(value.cpu(), buffer)
        value = buffer
    view = value.getbuffer()
    return torch.frombuffer(view, dtype=torch.uint8) if view else torch.empty(0, device="cpu")


def _form_of(value: Any) -> bytes:
    return _digest_of((value.dtype, value.shape) if isinstance(value, torch.Tensor) else ())


@functools.lru_cache(maxsize=8192)
def _digest_of(form: tuple[Any, ...]) -> bytes:
    return hashlib.blake2b(repr(form).encode(), digest_size=_DIGEST_BYTES).digest()


def of_device(tensors: list[tuple[int, torch.Tensor]], count: int, words_max: int = _BATCH_WORDS) -> torch.Tensor:
    """Digests of tensors of one device, computed there by what its current stream does next.

    A sum of 64-bit words times odd numbers, modulo 2^64: a word that differs always shows, several
    that differ cancel each other in one of 2^64 cases. A tensor's digest does not depend on the others,
    which another rank need not have.

    Args:
        tensors: contiguous, each with its position among the digests.
        count: of the digests.
        words_max: that are digested at a time.

    Returns:
        `count` digests as bytes, zero where no tensor is.
    """
    device = tensors[0][1].device
    sums = torch.zeros(2 * count, dtype=torch.int64, device=device)
    factors = _factors(_BATCH_WORDS, device)
    batch: list[torch.Tensor] = []
    ends: list[int] = []
    rows: list[tuple[int, int]] = []
    words = 0

    def add_batch() -> None:
        nonlocal words
        if not rows:
            return
        memory = torch.cat(batch).view(torch.int64)
        # Each piece begins with the first factor.
        lengths = [end - begin for begin, end in zip([-1, *ends[:-1]], ends, strict=True)]
        totals = (memory * torch.cat([factors[:length] for length in lengths])).cumsum(0)
        found = totals[_moved(ends, device)]
        found[1:] -= found[:-1].clone()
        at, part = _moved(rows, device).T
        sums.index_add_(0, 2 * at, found * factors[part])
        for pieces in (batch, ends, rows):
            pieces.clear()
        words = 0

    for at, tensor in tensors:
        memory = as_bytes(tensor)
        for part, begin in enumerate(range(0, memory.numel(), 8 * words_max)):
            piece = memory[begin : begin + 8 * words_max]
            count_here = -(-piece.numel() // 8)
            if words + count_here > words_max:
                add_batch()
            batch.append(piece)
            if piece.numel() % 8:
                batch.append(torch.zeros(-piece.numel() % 8, dtype=torch.uint8, device=device))
            words += count_here
            ends.append(words - 1)
            rows.append((at, part % _BATCH_WORDS))
    add_batch()
    return sums.view(torch.uint8)


def _moved(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """Numbers on a device, without a wait for what its stream has queued."""
    made = torch.tensor(numbers, device="cpu")
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


@functools.lru_cache(maxsize=16)
def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Odd 64-bit numbers without a pattern (the finalizer of SplitMix64)."""
    # Made by the CPU: a stream of the device would make them for itself, and later calls have other streams.
    x = torch.arange(1, count + 1, device="cpu") * -7046029254386353131
    x = (x ^ ((x >> 30) & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ ((x >> 27) & (1 << 37) - 1)) * -7723592293110705685
    return (x ^ ((x >> 31) & (1 << 33) - 1) | 1).to(device)


# ---- At the end of the save.


@dataclasses.dataclass
class Differing:
    """What the ranks do not have alike.

    Attributes:
        tensors, objects: how many.
        names: at most 20.
        ranks: for each name, the first rank that has it and one with another value.
        unknown: how many of the tensors and objects could not be compared.
    """

    tensors: int = 0
    objects: int = 0
    names: list[str] = dataclasses.field(default_factory=list)
    ranks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    unknown: int = 0

    def report(self) -> dict[str, Any]:
        """The fields of a save's report."""
        return {"tensors_differing": self.tensors, "objects_differing": self.objects, "differing": self.names}

    def __bool__(self) -> bool:
        return bool(self.names)

    def __str__(self) -> str:
        shown = ", ".join(f"{name} (ranks {a} and {b})" for name, (a, b) in zip(self.names, self.ranks, strict=True))
        more = ", ..." if self.tensors + self.objects > len(self.names) else ""
        differing = f"{counted(self.tensors, 'tensor')} and {counted(self.objects, 'object')}"
        unknown = f" ({self.unknown} of them could not be compared in this save; a next one does)" if self.unknown else ""
        return f"{differing} differ between ranks that have them under one name{unknown}: {shown}{more}"


def compare(parts: list[Part], plans: dict[str, Plan], digests: list[bytes], path: str) -> Differing:
    """Compares what several ranks have under one name.

    Args:
        parts: of all ranks.
        plans: that they follow, by id.
        digests: of each rank, of what its plan says.
        path: of the save.

    Raises:
        Error: DATA_LOSS if a rank has not the digests that its plan asks for.
    """
    rows = [plans[part.plan].compared(part.row) for part in parts]
    for part, row, given in zip(parts, rows, digests, strict=True):
        if len(given) != _DIGEST_BYTES * len(row):
            raise Error("DATA_LOSS", f"save {path}: {part.file} lacks digests of what other ranks have, too")
    if all(row is rows[0] or row == rows[0] for row in rows) and len(set(digests)) <= 1:
        return Differing()
    first: dict[MetadataIndex, tuple[int, bytes]] = {}
    apart: dict[MetadataIndex, tuple[int, int]] = {}
    for rank, (row, given) in enumerate(zip(rows, digests, strict=True)):
        for number, index in enumerate(row):
            digest = given[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)]
            before, known = first.setdefault(index, (rank, digest))
            if known != digest:
                apart.setdefault(index, (before, rank))
    found = Differing()
    left = _READ_BYTES_MAX
    for index, rank in _not_compared(parts, plans, rows):
        if index in apart:
            continue
        value, nbytes = _written(parts[rank], plans[parts[rank].plan], index, path, left)
        left -= nbytes
        if index not in first:
            first[index] = rank, b"" if value is None else Digests([value]).read()
            continue
        before, digest = first[index]
        is_known = value is not None and bool(digest)
        if not is_known or not _has_digest(value, digest):
            apart[index] = before, rank
            found.unknown += not is_known
    for index, ranks in apart.items():
        of = next(m for m in (_metadata_of(plans[p.plan], index) for p in parts) if m is not None)
        if isinstance(of, BytesStorageMetadata):
            found.objects += 1
        else:
            found.tensors += 1
        if len(found.names) < _NAMES_MAX:
            found.names.append(index.fqn)
            found.ranks.append(ranks)
    return found


def _metadata_of(plan: Plan, index: MetadataIndex) -> Any:
    return plan.metadata.state_dict_metadata.get(index.fqn)


def _not_compared(parts: list[Part], plans: dict[str, Plan],
                  rows: list[list[MetadataIndex]]) -> Iterator[tuple[MetadataIndex, int]]:  # fmt: skip
    """What several ranks have, with each rank that has not digested it: its older plan says that it has this alone."""
    if len({part.plan for part in parts}) == 1:
        return
    having: dict[MetadataIndex, list[int]] = {}
    for rank, part in enumerate(parts):
        plan = plans[part.plan]
        for index in plan.written[part.row] + plan.left_out[part.row]:
            having.setdefault(index, []).append(rank)
    compared = list(map(frozenset, rows))
    for index, ranks in having.items():
        for rank in ranks if len(ranks) > 1 else ():
            if index not in compared[rank]:
                yield index, rank


def _written(part: Part, plan: Plan, index: MetadataIndex, path: str, limit: int) -> tuple[Any, int]:
    """An item that a rank has written, and its bytes; None and 0 for one that is larger than a limit, or cannot be read."""
    at = 2 * plan.written[part.row].index(index)
    offset, length = part.extents[at : at + 2]
    if length > limit:
        return None, 0
    try:
        with open(os.path.join(path, part.file), "rb") as file:
            value: Any = io.BytesIO(os.pread(file.fileno(), length, offset))
        if not isinstance(_metadata_of(plan, index), BytesStorageMetadata):
            value = torch.load(value, map_location="cpu", weights_only=True)
    except Exception as error:
        logger.warning("save %s: compare %s: read %s: %s", path, index.fqn, part.file, error)
        return None, 0
    return value, length


def _has_digest(value: Any, digest: bytes) -> bool:
    """Whether a digest is a value's, as the host or as a device makes it."""
    if digest == Digests([value]).read():
        return True
    on_device = of_device([(0, _memory_of(value).contiguous())], 1).numpy().tobytes()
    return digest == joined([on_device, _form_of(value)])


class _Said(PerProcess):
    """What the log has said of: once is enough."""

    def clear(self) -> None:
        self.of: set[tuple[str, ...]] = set()


_said = _Said()


def settle(found: Differing, parts: list[Part], path: str) -> None:
    """Says in the log what the checkpoint has of one rank alone.

    Raises:
        Error: INVALID_ARGUMENT if a rank refuses that.
    """
    if found and any(part.replicas == "refuse" for part in parts):
        raise Error("INVALID_ARGUMENT", f"save {path}: {found}, and replicas='refuse'")
    key = tuple(found.names)
    with _said.lock:
        if not found or key in _said.of:
            return
        _said.of.add(key)
    logger.warning(
        "save %s: %s. The checkpoint has the value of one rank, as the framework plans it: give each rank a "
        "name of its own, or a DTensor; replicas='refuse' makes this an error", path, found,
    )  # fmt: skip
