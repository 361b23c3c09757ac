"""From the items of a plan to the bytes of one `.distcp` file, each tensor where it lies."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from holdfast import _devices, _dtypes, _late, _native
from holdfast.dcp.framing import ALIGNMENT, can_frame, frame
from holdfast.errors import Error


@dataclasses.dataclass
class FilePlan:
    """One rank's file.

    Attributes:
        plan: for the runtime.
        results: one per item, as the framework wants them.
        host: what must live until the runtime's call returns.
        device: tensors that must live until they were copied.
        wait: devices whose current stream must wait for the copies, because what is copied from
            them may change at once.
        watch: of the tensors that are copied behind the training.
        pickled: names of tensors that ``torch.save`` had to serialize.
        contiguous_copies: names of tensors that had to be copied to be saved.
    """

    plan: _native.Plan
    results: list[WriteResult]
    host: list[Any]
    device: list[torch.Tensor]
    wait: set[torch.device]
    watch: _late.Watch
    pickled: list[str]
    contiguous_copies: list[str]


class _Names:
    """Unique names for the manifest: the tensor's own, and where in it a shard begins."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, item: WriteItem) -> str:
        name = item.index.fqn or "~"
        if item.type == WriteItemType.SHARD and item.index.offset is not None:
            name += "@" + ",".join(map(str, item.index.offset))
        candidate, number = name, 1
        while candidate in self._taken:
            number += 1
            candidate = f"{name}~{number}"
        self._taken.add(candidate)
        return candidate


class _File:
    """A file that is being planned; the archive's bytes between two tensors are one literal."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.plan = _native.Plan()
        self.plan.add_file(name)
        self._pending = bytearray()
        self._slots: list[tuple[int, int]] = []
        self._bytes = 0  # of the file, with what is pending

    def begin_item(self) -> int:
        """Pads to where an item may begin and returns that offset."""
        self.literal(bytes(-self._bytes % ALIGNMENT))
        return self._bytes

    def literal(self, data: bytes, slots: tuple[int, ...] = (), segment: int = 0) -> None:
        self._slots += [(len(self._pending) + offset, segment) for offset in slots]
        self._pending += data
        self._bytes += len(data)

    def flush(self) -> None:
        if self._pending:
            self.plan.add_literal(bytes(self._pending), self._slots)
            self._pending, self._slots = bytearray(), []

    def tensor(self, name: str, dtype: str, shape: list[int], address: int, nbytes: int,
               device: Any, stream: int) -> int:  # fmt: skip
        self.flush()
        self._bytes += nbytes
        return self.plan.add_tensor(name, dtype, shape, address, nbytes, device, stream)


def _resolved(planner: SavePlanner, item: WriteItem) -> Any:
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        if not isinstance(data, io.BytesIO):
            raise Error(
                "INVALID_ARGUMENT",
                f"save {item.index.fqn}: the planner gave a {type(data).__name__} for bytes",
            )
        return data
    if not isinstance(data, torch.Tensor):
        raise Error(
            "INVALID_ARGUMENT",
            f"save {item.index.fqn}: the planner gave a {type(data).__name__} for a tensor",
        )
    return data.detach()


def plan_file(plan: SavePlan, planner: SavePlanner, name: str, late: _late.Late) -> FilePlan:
    """Plans the file of one rank. Host memory comes first: it is captured in the runtime's call.

    Args:
        plan, planner: the framework's.
        name: of the file.
        late: device memory that stays unchanged until the save has staged.
    """
    file = _File(name)
    out = FilePlan(file.plan, [], [], [], set(), _late.Watch(()), [], [])
    names = _Names()
    later = []
    for item in plan.items:
        data = _resolved(planner, item)
        if isinstance(data, torch.Tensor) and _devices.device_of(data.device) is not None:
            later.append((item, data))
        else:
            _add(file, out, names.of(item), item, data)
    is_late = late.of([[data] for _, data in later])
    out.watch = _late.Watch(
        (item.index.fqn, data)
        for (item, data), after in zip(later, is_late, strict=True) if after
    )  # fmt: skip
    out.wait = _late.too_much_to_clone(
        (data.device, data.nbytes)
        for (_, data), after in zip(later, is_late, strict=True) if not after
    )  # fmt: skip
    for (item, data), after in zip(later, is_late, strict=True):
        if not after and data.device not in out.wait:
            data = data.clone()
        _add(file, out, names.of(item), item, data)
    file.flush()
    return out


def _add(file: _File, out: FilePlan, name: str, item: WriteItem, data: Any) -> None:
    begin = file.begin_item()
    if isinstance(data, torch.Tensor):
        if data.is_conj() or data.is_neg():
            data = data.resolve_conj().resolve_neg()
            out.contiguous_copies.append(name)
        if can_frame(data):
            length = _add_tensor(file, out, name, data)
        else:
            buffer = io.BytesIO()
            torch.save(data.cpu() if data.device.type != "cpu" else data, buffer)
            out.pickled.append(name)
            length = _add_bytes(file, out, name, buffer)
    else:
        length = _add_bytes(file, out, name, data)
    out.results.append(WriteResult(item.index, length, _StorageInfo(file.name, begin, length)))


def _add_tensor(file: _File, out: FilePlan, name: str, tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
        out.contiguous_copies.append(name)
    framed = frame(tensor.dtype, tuple(tensor.shape))
    device = _devices.device_of(tensor.device)
    (out.host if device is None else out.device).append(tensor)
    file.literal(framed.head)
    segment = file.tensor(
        name, _dtypes.file_name(tensor.dtype), list(tensor.shape),
        tensor.data_ptr() if framed.nbytes else 0, framed.nbytes, device,
        _devices.stream_of(tensor.device),
    )  # fmt: skip
    file.literal(framed.tail, framed.crc32_offsets, segment)
    return framed.length


def _add_bytes(file: _File, out: FilePlan, name: str, data: io.BytesIO) -> int:
    view = data.getbuffer()
    address = 0
    if len(view):
        whole = torch.frombuffer(view, dtype=torch.uint8)
        out.host.append(whole)
        address = whole.data_ptr()
    file.tensor(name, "U8", [len(view)], address, len(view), None, 0)
    return len(view)
