"""Entries of each rank's file that describe its save: `.metadata` is made from the files of all ranks.

A data file ends with two kinds of entries beside its items. The *part* lists the items of a plan that
the file has, with their places. The *plan* is the decision of a planning for all ranks; the coordinator
writes it, and a rank that was not in the planning writes its own plan. A checkpoint whose ranks are all
durable can so be committed without any of their processes.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import functools
import hashlib
import json
import pickle
import sys
from collections.abc import Iterable

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from holdfast import _collector
from holdfast.dcp import metadata as _metadata
from holdfast.errors import Error

# Names of the entries in the manifest.
PART, PLAN, DIGESTS = "holdfast:dcp-part", "holdfast:dcp-plan", "holdfast:dcp-digests"
_FORMAT = "holdfast.dcp-part-1"


@dataclasses.dataclass
class Plan:
    """The decision of a planning.

    Attributes:
        id: unique.
        metadata: of all ranks, without the places of items.
        written: for each rank, the items that it writes.
        left_out: for each rank, its items that another rank writes.
        unlike: for each rank, what it has itself of items that it leaves out, where shape or dtype is not what
            the other rank writes. Not in the entry of a file: only the planning of a next save asks for it.
    """

    id: str
    metadata: Metadata
    written: list[list[MetadataIndex]]
    left_out: list[list[MetadataIndex]]
    unlike: list[dict[MetadataIndex, TensorWriteData]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, id: str, metadata: Metadata, local: list[SavePlan], planned: list[SavePlan]) -> Plan:
        """A plan from the plans of all ranks, before and after items that several ranks have were left to one."""
        written = {item.index: item.tensor_data for plan in planned for item in plan.items}
        made = cls(id, metadata, [[item.index for item in plan.items] for plan in planned], [])
        for before, row in zip(local, made.written, strict=True):
            own = set(row)
            left = [item for item in before.items if item.index not in own and item.index in written]
            made.left_out.append([item.index for item in left])
            made.unlike.append(
                {i.index: i.tensor_data for i in left if i.tensor_data is not None and i.tensor_data != written[i.index]}
            )
        return made

    @functools.cached_property
    def data(self) -> bytes:
        """The plan as an entry of a file."""
        with _collector.paused():
            # One object per index: an item that many ranks leave out is pickled once.
            one: dict[MetadataIndex, MetadataIndex] = {}
            left_out = [[one.setdefault(i, i) for i in row] for row in self.left_out]
            return pickle.dumps((self.id, self.metadata, self.written, left_out))

    @classmethod
    def read(cls, data: bytes, path: str) -> Plan:
        """A plan from its entry, through the allow-list of `.metadata`."""
        found = _metadata.unpickle(data, f"read the plan in {path}")
        if not (isinstance(found, tuple) and len(found) == 4 and isinstance(found[1], Metadata)):
            raise Error("DATA_LOSS", f"read the plan in {path}: it is none")
        return cls(*found)

    def digest(self, row: int) -> str:
        """Digest of the items that a rank writes."""
        return self._digests[row]

    @functools.cached_property
    def _digests(self) -> list[str]:
        return [digest_of(row) for row in self.written]

    @functools.cached_property
    def shared(self) -> frozenset[MetadataIndex]:
        """Items that several ranks have and one rank writes."""
        return frozenset().union(*self.left_out)

    def compared(self, row: int) -> list[MetadataIndex]:
        """Items that a rank compares with other ranks, in the order of their digests."""
        return self._compared[row]

    @functools.cached_property
    def _compared(self) -> list[list[MetadataIndex]]:
        if len(self.written) == 1:  # of a rank with another structure: the items of other ranks are unknown
            return [in_order(self.written[0])]
        shared = self.shared
        return [
            in_order([*(i for i in written if i in shared), *left_out])
            for written, left_out in zip(self.written, self.left_out, strict=True)
        ]

    def items(self, row: int, indices: Iterable[MetadataIndex]) -> list[WriteItem]:
        """Items as a rank's own planning makes them."""
        unlike = self.unlike[row] if self.unlike else {}
        return [self._item(index, unlike.get(index)) for index in indices]

    def _item(self, index: MetadataIndex, own: TensorWriteData | None) -> WriteItem:
        of = self.metadata.state_dict_metadata[index.fqn]
        if isinstance(of, BytesStorageMetadata):
            return WriteItem(index, WriteItemType.BYTE_IO)
        own = own or TensorWriteData(self._chunks[index], of.properties, of.size)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=own)

    @functools.cached_property
    def _chunks(self) -> dict[MetadataIndex, ChunkStorageMetadata]:
        found = {}
        for name, of in self.metadata.state_dict_metadata.items():
            for chunk in getattr(of, "chunks", ()):
                found[MetadataIndex(name, chunk.offsets)] = chunk
        return found


def in_order(indices: Iterable[MetadataIndex]) -> list[MetadataIndex]:
    """Indices in an order that is the same on all ranks."""
    return sorted(indices, key=lambda index: (index.fqn, tuple(index.offset or ())))


def digest_of(indices: Iterable[MetadataIndex]) -> str:
    """A digest that is equal for the same items in the same order."""
    digest = hashlib.sha256()
    for index in indices:
        digest.update(f"{index.fqn}\0{index.offset}\0".encode())
    return digest.hexdigest()


@dataclasses.dataclass
class Part:
    """One rank's part of a save.

    Attributes:
        attempt: of the save.
        metadata: name of the file that commits.
        file: the data file.
        plan, row: id of the plan, and number of this rank among its ranks.
        items: digest of the items.
        replicas: the fate of a save whose ranks have unequal values under one name, see `replicas`.
        extents: offset and length of every item, in the plan's order.
    """

    attempt: str
    metadata: str
    file: str
    plan: str
    row: int
    items: str
    replicas: str = "warn"
    extents: array.array = dataclasses.field(default_factory=lambda: array.array("Q"))

    def encode(self) -> bytes:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[:-1]}
        return json.dumps({"format": _FORMAT, **fields}).encode() + b"\n" + _swapped(self.extents).tobytes()

    @classmethod
    def decode(cls, data: bytes, path: str) -> Part:
        try:
            head, _, rest = data.partition(b"\n")
            fields = json.loads(head)
            if fields.pop("format") != _FORMAT:
                raise ValueError("another format")
            return cls(**fields, extents=_swapped(array.array("Q", rest)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Error("DATA_LOSS", f"read the part in {path}: {error}") from error


def _swapped(numbers: array.array) -> array.array:
    """Numbers in the byte order of files, which is little endian."""
    if sys.byteorder == "big":
        numbers = copy.copy(numbers)
        numbers.byteswap()
    return numbers


@_collector.paused()
def assemble(parts: list[Part], plans: dict[str, Plan], path: str) -> Metadata:
    """The metadata of a save from the parts of all its ranks.

    Ranks that followed one plan have its metadata. Where a rank did not, the metadata is made of the
    written items of all ranks; of an item that several ranks have written the first is named.

    Raises:
        Error: FAILED_PRECONDITION for an item that every rank has left to another, or for a plan
            that is not there.
        ValueError: of the framework: the written items do not fit together.
    """
    for part in parts:
        if part.plan not in plans:
            raise Error("FAILED_PRECONDITION", f"save {path}: the plan of {part.file} is not there; save again")
    plan = plans[parts[0].plan]
    if all(p.plan == plan.id and p.row == r for r, p in enumerate(parts)) and len(parts) == len(plan.written):
        metadata, rows = copy.copy(plan.metadata), plan.written
    else:
        metadata, rows = _merged(parts, plans, path)
    places: dict[MetadataIndex, _StorageInfo] = {}
    for part, row in zip(parts, rows, strict=True):
        if part.items != plans[part.plan].digest(part.row) or len(part.extents) != 2 * len(row):
            raise Error("DATA_LOSS", f"save {path}: {part.file} has other items than its plan")
        for index, offset, length in zip(row, part.extents[::2], part.extents[1::2], strict=True):
            places.setdefault(index, _StorageInfo(part.file, offset, length))
    metadata.storage_data = places
    return metadata


def _merged(parts: list[Part], plans: dict[str, Plan],
            path: str) -> tuple[Metadata, list[list[MetadataIndex]]]:  # fmt: skip
    written = [(plans[p.plan], p.row, plans[p.plan].written[p.row]) for p in parts]
    check_kinds([of.items(number, row + of.left_out[number]) for of, number, row in written], path)
    there = {index for _, _, row in written for index in row}
    for part in parts:
        for index in plans[part.plan].left_out[part.row]:
            if index not in there:
                raise Error(
                    "FAILED_PRECONDITION",
                    f"save {path}: {index.fqn} was left to another rank, whose state has changed and lacks it; save again",
                )
    # As the places are: of the first rank. Another one may have another shape or dtype under the name.
    plan = plan_for_all("", written, lowest_rank=True)
    # The planning's own indices say where in the metadata a chunk stands.
    hinted = {index: index for row in plan.written for index in row}
    return plan.metadata, [[hinted[index] for index in row] for _, _, row in written]


def check_kinds(ranks: list[list[WriteItem]], path: str) -> None:
    """Checks that no name is a tensor on one rank and an object on another, which no metadata can say.

    Raises:
        Error: INVALID_ARGUMENT.
    """
    first: dict[str, tuple[int, bool]] = {}
    for rank, items in enumerate(ranks):
        for item in items:
            is_object = item.type == WriteItemType.BYTE_IO
            before, was_object = first.setdefault(item.index.fqn, (rank, is_object))
            if was_object != is_object:
                a, b = (before, rank) if was_object else (rank, before)
                raise Error(
                    "INVALID_ARGUMENT",
                    f"save {path}: {item.index.fqn} is an object on rank {a} and a tensor on rank {b}; give each a name of its own",
                )


def plan_for_all(id: str, ranks: list[tuple[Plan, int, list[MetadataIndex]]], lowest_rank: bool) -> Plan:
    """Plans for ranks that each have the items of a plan, as the framework's planner does.

    Args:
        id: of the new plan.
        ranks: for each, a plan, its number in that plan, and its items of that plan.
        lowest_rank: whether replicas are written by the first rank that has them.
    """
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest_rank)
    local = [
        SavePlan(plan.items(number, indices), planner_data=plan.metadata.planner_data or {})
        for plan, number, indices in ranks
    ]
    planned, metadata = planner.create_global_plan(list(local))
    return Plan.of(id, metadata, local, planned)
