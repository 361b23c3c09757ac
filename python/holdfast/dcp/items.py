"""From the items of a plan to the bytes of one `.distcp` file, each tensor where it lies."""

from __future__ import annotations

import array
import dataclasses
import functools
import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from holdfast import _collector, _devices, _dtypes, _late, _native
from holdfast._framing import PlannedFile
from holdfast._plain import check_no_method
from holdfast._state import numbered
from holdfast._tensor_kinds import QUANTIZED, local_of, sparse_parts, why_no_data
from holdfast.dcp.failures import of_object
from holdfast.dcp.framing import can_frame, frame
from holdfast.dcp.parts import DIGESTS, PART, PLAN, Part, digest_of
from holdfast.errors import Error, of_operation

_OWN = "holdfast:"  # how the names of entries begin that are no items


@dataclasses.dataclass
class FilePlan:
    """One rank's file.

    Attributes:
        plan: for the runtime.
        extents: offset and length of every item, in the order of the items.
        host: what must live until the runtime's call returns.
        device: tensors that must live until they were copied.
        wait: devices whose current stream must wait for the copies, because what is copied from
            them may change at once.
        watch: of the tensors that are copied behind the training.
        fixed: the plan, where the layout can use it again; see `Layout.release`.
        pickled: names of tensors that ``torch.save`` had to serialize.
        contiguous_copies: names of tensors that had to be copied to be saved.
    """

    plan: _native.Plan
    extents: array.array
    host: list[Any] = dataclasses.field(default_factory=list)
    device: list[torch.Tensor] = dataclasses.field(default_factory=list)
    wait: set[torch.device] = dataclasses.field(default_factory=set)
    watch: _late.Watch = dataclasses.field(default_factory=lambda: _late.Watch(()))
    fixed: _native.Plan | None = None
    pickled: list[str] = dataclasses.field(default_factory=list)
    contiguous_copies: list[str] = dataclasses.field(default_factory=list)


def _names(items: list[WriteItem]) -> list[str]:
    """Unique names for the manifest: the tensor's own, and where in it a shard begins."""
    taken: dict[str, int] = {}
    names = []
    for item in items:
        name = item.index.fqn or "~"
        if item.type == WriteItemType.SHARD and item.index.offset is not None:
            name += "@" + ",".join(map(str, item.index.offset))
        names.append(numbered("~" + name if name.startswith(_OWN) else name, taken))
    return names


def check_layouts(state: Mapping[str, Any]) -> None:
    """Raises INVALID_ARGUMENT for a method, and for an entry that DCP cannot hold: its metadata has boxes of strided tensors alone, and a
    quantized tensor would come back with the scale and zero point of what it is loaded into.

    Args:
        state: as the planner has flattened it.
    """
    for name, value in state.items():
        tensor = local_of(value) if isinstance(value, DTensor) else value
        if not isinstance(tensor, torch.Tensor):
            check_no_method(name, tensor)
        if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "local_shards"):
            continue  # a ShardedTensor has no layout to ask for
        why = why_no_data(tensor) or _why_no_box(tensor) or _why_no_part(value)
        if why is not None:
            raise Error("INVALID_ARGUMENT", f"save {name}: {why}")


def _why_no_box(tensor: torch.Tensor) -> str | None:
    """Why the metadata cannot hold a tensor with elements; None if it can."""
    if tensor.is_quantized:
        return QUANTIZED
    if tensor.is_nested:
        return "nested tensors are not supported; save unbind()"
    if tensor.layout == torch.strided:
        return None
    parts = " and ".join(f"{part}()" for part in sparse_parts(tensor.detach()))
    return f"tensors of layout {tensor.layout} are not supported; save its {parts or 'to_dense()'}"


def _why_no_part(tensor: torch.Tensor) -> str | None:
    """Why a rank has no elements of a DTensor; None if it has, or may have none."""
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        return "a DTensor with partial placements is a sum that was not taken; redistribute it first, or leave it out of the state"
    return None


def resolved(planner: SavePlanner, item: WriteItem) -> Any:
    if item.type == WriteItemType.BYTE_IO:
        with of_object(item.index.fqn):
            data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise Error(
                "INVALID_ARGUMENT",
                f"save {item.index.fqn}: the planner gave a {type(data).__name__} for bytes",
            )
        return data
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        raise Error(
            "INVALID_ARGUMENT",
            f"save {item.index.fqn}: the planner gave a {type(data).__name__} for a tensor",
        )
    check_layouts({item.index.fqn: data})
    return data.detach()


def detached(value: Any) -> Any:
    """A plain tensor without its graph, as it is written; anything else as it is."""
    if type(value) is torch.nn.Parameter or type(value) is torch.Tensor and value.requires_grad:
        return value.detach()
    return value


class Layout:
    """How the items of a plan lie in a file; kept for the saves that follow the same plan.

    What every save has at the same place comes first: contiguous tensors in host memory. They are
    planned once, and a further save gives only their addresses.

    Args:
        items: of one rank.
        apart: items whose names begin so go to a file of their own, whose name begins so, too.

    Attributes:
        first: positions of the items that are fixed.
    """

    def __init__(self, items: list[WriteItem], apart: str = "") -> None:
        self.items = items
        self._apart = apart
        self._is_apart = [bool(apart) and item.index.fqn.startswith(apart) for item in items]
        self._names = _names(items)
        self._fixed: _native.Plan | None = None  # None while a save uses it
        self._fixed_extent: Any = None  # what of it all saves have
        self.first: list[int] = []
        self._filled: list[int] = []  # places in `first` of those with bytes
        self._rest: list[int] = []
        self._extents = array.array("Q")

    def results(self, extents: array.array, name: str) -> list[WriteResult]:
        """One result per item of a file, as the framework wants them."""
        names = (self._apart + name if apart else name for apart in self._is_apart)
        places = zip(self.items, names, extents[::2], extents[1::2], strict=True)
        return [WriteResult(i.index, length, _StorageInfo(n, at, length)) for i, n, at, length in places]

    def files(self, name: str) -> list[str]:
        """The files of one save, of which `name` is the first."""
        return [name, self._apart + name] if any(self._is_apart) else [name]

    @functools.cached_property
    def digest(self) -> str:
        """Of the items and their order."""
        return digest_of(item.index for item in self.items)

    @property
    def is_fixed(self) -> bool:
        return self._fixed is not None

    def release(self, file: FilePlan) -> None:
        """Leaves the plan to the next save, once the runtime has taken it."""
        self._fixed = file.fixed

    def _is_on_device(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether an item is in memory of a device.

        Raises:
            Error: it is in memory that cannot be saved.
        """
        name = self.items[index].index.fqn
        if why := why_no_data(tensor):
            raise Error("INVALID_ARGUMENT", f"save {name}: {why}")
        with of_operation(f"save {name}"):
            return _devices.device_of(tensor.device) is not None

    @_collector.paused()
    def plan_file(self, data: list[Any], name: str, late: _late.Late,
                  part: Part | None = None, plans: Iterable[bytes] = (),
                  digests: Iterable[torch.Tensor] = (), addresses: list[int] | None = None) -> FilePlan:  # fmt: skip
        """Plans the file of one save. Host memory comes first: it is captured in the runtime's call.

        Args:
            data: of every item, a detached tensor or the bytes of an object. Those that are `first` need
                not be detached.
            name: of the file.
            late: device memory that stays unchanged until the save has staged.
            part: what the file says of itself; gets the places of the items.
            plans: entries that the part needs to be understood.
            digests: of what other ranks have, too, in the host and on devices.
            addresses: of the items that are `first`, where they are known to lie as they did.
        """
        fixed = self._take_fixed(name, data, addresses)
        if fixed is not None:
            file = PlannedFile(name, fixed)
            out = FilePlan(fixed, self._extents[:], host=[data[i] for i in self.first], fixed=fixed)
            rest: Iterable[int] = self._rest
        else:
            file = PlannedFile(name)
            out = FilePlan(file.plan, array.array("Q", bytes(16 * len(data))))
            data = list(map(detached, data))
            rest = range(len(data))
        later, apart = [], []
        for i in rest:
            if isinstance(data[i], torch.Tensor) and self._is_on_device(i, data[i]):
                later.append(i)
            elif self._is_apart[i]:
                apart.append(i)
            else:
                self._add(file, out, i, data[i])
        is_late = dict(zip(later, late.of([[data[i]] for i in later]), strict=True))
        out.watch = _late.Watch((self.items[i].index.fqn, data[i]) for i in later if is_late[i])
        out.wait = _late.too_much_to_clone(
            (data[i].device, data[i].nbytes) for i in later if not is_late[i]
        )
        for number, content in enumerate(plans):
            file.begin_item()
            _add_bytes(file, out, f"{PLAN}-{number}", io.BytesIO(content))
        for number, tensor in enumerate(digests):
            file.begin_item()
            _add_digests(file, out, f"{DIGESTS}-{number}", tensor)
        if part is not None:
            # The places of what follows are put in when they are known.
            part.extents = out.extents
            about = bytearray(part.encode())
            file.begin_item()
            out.host.append(about)
            file.content(PART, about)
        for of_file, further in enumerate(self.files(name)):
            if of_file:
                file.begin_file(further)
                for i in apart:
                    self._add(file, out, i, data[i])
            for i in later:
                if self._is_apart[i] == bool(of_file):
                    clones = not is_late[i] and data[i].device not in out.wait
                    self._add(file, out, i, data[i].clone() if clones else data[i])
        file.flush()
        if part is not None:
            about[:] = part.encode()
        return out

    def _take_fixed(self, name: str, data: list[Any], addresses: list[int] | None) -> _native.Plan | None:
        """The plan that begins with what is fixed; None where the data is not as it was then."""
        plan, self._fixed = self._fixed, None
        if plan is None or not _is_host():
            return None
        if addresses is None:
            try:
                addresses, _, others = _native.TensorTable([data[i] for i in self.first]).in_host()
            except ValueError:  # one has no storage: the plan that is made anew names it
                return None
            if others:
                return None
        plan.renew_to(name, self._fixed_extent, [addresses[k] for k in self._filled])
        return plan

    @_collector.paused()
    def fix(self, data: list[Any]) -> None:
        """Plans what further saves will have at the same place; they have the same kinds of tensors."""
        if not _is_host() or any(self._is_apart):
            return
        self.first = [i for i, d in enumerate(data) if isinstance(d, torch.Tensor) and _is_plain(d) and can_frame(d)]
        self._filled = [k for k, i in enumerate(self.first) if data[i].nbytes]
        first = set(self.first)
        self._rest = [i for i in range(len(data)) if i not in first]
        file = PlannedFile("")
        out = FilePlan(file.plan, array.array("Q", bytes(16 * len(data))))
        for i in self.first:
            self._add(file, out, i, data[i])
        file.flush()
        self._fixed, self._fixed_extent, self._extents = file.plan, file.plan.extent(), out.extents

    def _add(self, file: PlannedFile, out: FilePlan, at: int, data: Any) -> None:
        name, begin = self._names[at], file.begin_item()
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
        out.extents[2 * at], out.extents[2 * at + 1] = begin, length


def _is_host() -> bool:
    """Whether memory of the CPU is the host's, and no test's stand-in for a device's."""
    return _devices.device_of(torch.device("cpu")) is None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its bytes in the file, in host memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _add_tensor(file: PlannedFile, out: FilePlan, name: str, tensor: torch.Tensor) -> int:
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


def _add_digests(file: PlannedFile, out: FilePlan, name: str, tensor: torch.Tensor) -> None:
    device = None if tensor.is_cpu else _devices.device_of(tensor.device)
    (out.host if device is None else out.device).append(tensor)
    stream = _devices.stream_of(tensor.device)
    file.tensor(name, "U8", [tensor.nbytes], tensor.data_ptr(), tensor.nbytes, device, stream)


def _add_bytes(file: PlannedFile, out: FilePlan, name: str, data: io.BytesIO) -> int:
    contents = data.getvalue()  # a view of it would keep a collected BytesIO from closing
    out.host.append(contents)
    return file.content(name, contents)
