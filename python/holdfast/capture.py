"""What a plain save captures of a state, and when: the plan of a rank's files."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast import _devices, _hf, _late, _names, _native, _plain, _regular, _state, _tensor_kinds, _unpickle
from holdfast._names import REPLICAS
from holdfast.errors import Error, of_system

STRUCTURE = "holdfast:structure"
OBJECTS = "holdfast:objects"
FILE = "holdfast:file:"  # and the name of a further file
FILE_BYTES_MAX = 1 << 30  # of a further file that is given by its path


@dataclasses.dataclass
class Captured:
    """A rank's part of a state, ready for the runtime.

    Attributes:
        plan: files, tensors and their addresses.
        keep: tensors and buffers that own the plan's memory, until the save has staged.
        waiting: devices whose current stream must wait for the copies.
        watch: of the tensors that are copied behind the training.
        objects: paths of pickled entries.
        contiguous_copies: paths of tensors that had to be copied to be saved.
        needs_allow: classes that a load must be allowed to make.
        release: to be called once the runtime has taken the plan.
    """

    plan: _native.Plan
    keep: list[Any]
    waiting: set[torch.device]
    watch: _late.Watch
    objects: list[str]
    contiguous_copies: list[str]
    needs_allow: list[str]
    release: Callable[[], None]


class Part:
    """A rank's part of a state, described and pickled.

    Attributes:
        own: names of what is this rank's own, whatever others have: shards of DTensors.
        count: of the rank's tensors.
    """

    def __init__(self, state: Any, *, objects: str, files: Mapping[str, Any], rank: int,
                 world_size: int, layout: str = "holdfast",
                 shard_bytes_max: int = _hf.SHARD_BYTES_MAX) -> None:
        """Arguments are those of `holdfast.save_async`.

        Raises:
            Error: INVALID_ARGUMENT naming the entry.
        """
        self._state, self._rank, self._world = state, rank, world_size
        self._shard_bytes_max = shard_bytes_max
        self._model: dict[str, torch.Tensor] | None = None
        if layout == "hf":
            if world_size != 1:
                raise Error(
                    "INVALID_ARGUMENT",
                    f"save: layout='hf' is of one rank, not of {world_size}: gather the state dict on one and "
                    "save it there, with rank=0, world_size=1",
                )
            self._model = _hf.flat(state)
            self._described = _hf.describe(self._model)
        else:
            self._described = _state.describe(state)
        self._blob, self._index = _pickled(self._described.objects, objects)
        self._described.outline.note_objects(lambda: _classes_in(self._blob, self._index))
        self._files = {name: _content(name, given) for name, given in files.items() if rank == 0}
        for name in files:
            _check_file_name(name, layout)
        self.own = _shards(self._described.outline, world_size)
        self.count = len(self._described.outline.names)

    def entries(self) -> list[_state.Entry]:
        """The rank's tensors, as they are stored."""
        return self._described.entries()

    def plan(self, *, late: Iterable[Any] | bool, replicated: Collection[str], attempt: str
             ) -> Captured:
        """Captures the part.

        Args:
            late: of `holdfast.save_async`.
            replicated: names of the tensors that all ranks have alike.
            attempt: id of the save.
        """
        described, outline = self._described, self._described.outline
        structure = described.text(
            {
                "holdfast_state": _state.FORMAT_VERSION,
                "rank": self._rank,
                "world_size": self._world,
                "objects": self._index,
            }
        )
        mine: Sequence[int] = range(len(outline.names))
        keep: list[Any] = [_Kept(device, described.tensors) for device in outline.device_set]
        waiting, watch = _clone_early(described, mine, _late.Late(late, self._state), keep)
        if replicated:
            mine = [i for i, name in enumerate(outline.names) if name not in replicated]
        part = f"{self._rank:05d}-of-{self._world:05d}"
        plan = self._model_plan(mine, f"model-{part}.safetensors", attempt)
        if replicated:
            # Byte for byte the same file on all ranks.
            alike = sorted((e for e in described.entries() if e.name in replicated), key=lambda e: e.name)
            plan.native.add_safetensors(REPLICAS, _sources(alike), [("format", "pt")], attempt, True)
        for file, entry, data in (
            (f"state-{part}.json", STRUCTURE, structure),
            *([(f"objects-{part}.pickle", OBJECTS, self._blob)] if self._blob else ()),
            *((name, FILE + name, content) for name, content in self._files.items()),
        ):
            keep.append(_Kept(_HOST, [data]))
            plan.native.add_file(file)
            plan.native.add_bytes(entry, data)
        return Captured(
            plan.native, keep, waiting, watch, sorted(described.objects), outline.contiguous_copies,
            outline.needs_allow, plan.release,
        )


    def _model_plan(self, mine: Sequence[int], file: str, attempt: str) -> _Plan | _HfPlan:
        if self._model is None:
            return _Plan(self._described, mine, file, attempt)
        files, index = _hf.files_of(self._described, self._model, self._shard_bytes_max)
        if index:
            self._files[_hf.INDEX] = index.encode()
        return _HfPlan(files, attempt)


def _sources(entries: list[_state.Entry]) -> list[Any]:
    # Host tensors first: whatever is in host memory is staged before the call returns.
    ordered = sorted(entries, key=lambda e: _devices.device_of(e.device) is not None)
    return [
        (e.name, e.dtype, e.shape, e.address, e.nbytes,
         _devices.device_of(e.device), _devices.stream_of(e.device)) for e in ordered
    ]


_HOST = torch.device("cpu")
# The longest pickle of an object that is searched for classes: it takes some 20 ms.
_SEARCHED_MAX = 64 << 10


@dataclasses.dataclass
class _Kept:
    """Owners of memory, some of which is on a device."""

    device: torch.device
    owners: list[Any]


class _Plan:
    """The plan of a description's tensors. One that another save has released is made use of again.

    Attributes:
        native: the plan.
    """

    def __init__(self, described: _state.Description, mine: Sequence[int], file: str,
                 attempt: str) -> None:
        outline = described.outline
        placed = {d: (_devices.device_of(d), _devices.stream_of(d)) for d in outline.device_set}
        on_device = {d for d, (device, _) in placed.items() if device is not None}
        if on_device:
            # Host tensors first: whatever is in host memory is staged before the call returns.
            mine = sorted(mine, key=lambda i: outline.devices[i] in on_device)
        self._kept = outline.kept
        self._key = (file, mine)
        key, native = self._kept.pop() if self._kept else (None, None)
        if key != self._key:
            columns = outline.names, outline.dtypes, outline.shapes, outline.nbytes
            make: Any = _native.ModelPlan
            native = make(file, *(_of(column, mine) for column in columns), [("format", "pt")])
        assert native is not None
        self.native = native
        where = [placed[outline.devices[i]] for i in mine] if on_device else []
        native.renew(
            attempt, _of(described.addresses, mine),
            [device for device, _ in where], [stream for _, stream in where],
        )

    def release(self) -> None:
        """Leaves the plan to the next save, once this one's call has returned."""
        if not self._kept:
            self._kept.append((self._key, self.native))


class _HfPlan:
    """A plan of the files of a Hugging Face model; made for each save.

    Attributes:
        native: the plan.
    """

    def __init__(self, files: list[_hf.File], attempt: str) -> None:
        self.native = _native.Plan()
        for file in files:
            self.native.add_safetensors(file.name, _sources(file.entries), file.metadata, attempt)

    def release(self) -> None:
        """Does nothing: no later save uses the plan."""


def _of(column: list[Any], entries: Sequence[int]) -> list[Any]:
    """Of a column of all entries those that a rank saves."""
    return column if isinstance(entries, range) else [column[i] for i in entries]


# ---- Captured in the call: clones on the device, and pickled objects.


def _clone_early(described: _state.Description, mine: Sequence[int], late: _late.Late,
                 keep: list[Any]) -> tuple[set[torch.device], _late.Watch]:
    """Clones what may not be copied late; returns devices where that would be too much."""
    outline, addresses = described.outline, described.addresses
    devices = {d for d in outline.device_set if _devices.device_of(d) is not None}
    if not devices:
        return set(), _late.Watch(())
    on_device = [i for i in mine if outline.nbytes[i] and outline.devices[i] in devices]
    owners = [[described.tensors[t] for t in outline.members[i]] for i in on_device]
    is_late = late.of(owners)
    watch = _late.Watch(
        (outline.names[i], owner)
        for i, own, after in zip(on_device, owners, is_late, strict=True) if after
        for owner in own
    )
    early = [i for i, after in zip(on_device, is_late, strict=True) if not after]
    wait = _late.too_much_to_clone((outline.devices[i], outline.nbytes[i]) for i in early)
    for i in early:
        if outline.devices[i] not in wait:
            # A copy on the same device, ordered into the current stream.
            copy = described.memory(i).clone()
            keep.append(copy)
            addresses[i] = copy.data_ptr()
    return wait, watch


def _pickled(objects: dict[str, Any], policy: str) -> tuple[bytes, dict[str, list[int]]]:
    if objects and policy == "refuse":
        raise Error(
            "INVALID_ARGUMENT",
            "save: " + ", ".join(f"{name} ({_plain.shown_class(o)})" for name, o in objects.items())
            + ": neither tensors nor plain values, and objects='refuse'",
        )
    blob, index = bytearray(), {}
    for name, value in objects.items():
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {name}: a {_plain.shown_class(value)} cannot be pickled ({error}); leave it out "
                "of the state, or give it a state_dict()",
            ) from error
        index[name] = [len(blob), len(data)]
        blob += data
    return bytes(blob), index


def _classes_in(blob: bytes, index: dict[str, list[int]]) -> set[str]:
    """What pickles ask for and no load makes by default; of large ones nothing, as a call has no time for them."""
    ranges = ((begin, begin + nbytes) for begin, nbytes in index.values() if nbytes <= _SEARCHED_MAX)
    return {name for begin, end in ranges for name in _unpickle.unlisted(blob[begin:end])}


# Names that readers interpret: of a rank's own files, and of PyTorch's distributed checkpoints. The runtime
# refuses those of manifests, records and temporary files.
_OF_A_RANK = re.compile(r"(model|state|objects)-\d+-of-\d+\.(safetensors|json|pickle)")


def _check_file_name(name: str, layout: str) -> None:
    _plain.check_text(name, f"save {name}")
    of_dcp = _names.DCP_METADATA.fullmatch(name) or _names.DCP_ANY_DATA.fullmatch(name)
    if _OF_A_RANK.fullmatch(name) or name == REPLICAS or of_dcp or layout == "hf" and name == _hf.INDEX:
        raise Error("INVALID_ARGUMENT", f"save {name}: files= cannot have this name: readers take it for another file")


def _content(name: str, given: Any) -> bytes | bytearray:
    """The content of a further file: text, bytes, or those of the file at a path."""
    if isinstance(given, str):
        try:
            return given.encode()
        except UnicodeEncodeError as error:
            raise Error("INVALID_ARGUMENT", f"save {name}: files=: its text is not Unicode ({error}); pass bytes") from None
    if isinstance(given, os.PathLike):
        reading = f"save {name}: read"
        with of_system(f"{reading} {os.fspath(given)}"):
            fd = _regular.open_to_read(given, reading, code="INVALID_ARGUMENT")
            with open(fd, "rb", buffering=0) as file:
                return _whole(name, given, file)
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    raise Error(
        "INVALID_ARGUMENT",
        f"save {name}: files= takes text, bytes or a pathlib.Path, no {type(given).__name__}",
    )


def _whole(name: str, path: os.PathLike[str], file: io.FileIO) -> bytearray:
    """All of a file, once in memory until the save has copied it."""
    content = bytearray(min(os.fstat(file.fileno()).st_size, FILE_BYTES_MAX) + 1)
    filled = 0
    while count := file.readinto(memoryview(content)[filled:]):
        filled += count
        if filled > FILE_BYTES_MAX:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {name}: {os.fspath(path)} is longer than {FILE_BYTES_MAX >> 20} MiB; files= is for "
                "configuration and tokenizers, put tensors into the state",
            )
        if filled == len(content):  # it has grown
            content.extend(bytes(min(filled, FILE_BYTES_MAX + 1 - filled)))
    del content[filled:]
    return content


# ---- With several ranks: what is each rank's own.


def _shards(outline: _state.Outline, world_size: int) -> set[str]:
    """Names of what DTensors are stored under, but for those that every rank has a replica of."""
    return {
        name
        for layout, names in outline.distributed
        # Over a part of the ranks, as in a pipeline, rank 0 may not have it, or one like it.
        if _tensor_kinds.share_of(layout) or math.prod(layout["mesh"]) < world_size
        for name in names
    }
