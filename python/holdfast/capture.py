"""What a plain save captures of a state, and when: the plan of a rank's files."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from holdfast import _devices, _late, _native, _ranks, _state
from holdfast.errors import Error, of_system

STRUCTURE = "holdfast:structure"
OBJECTS = "holdfast:objects"
FILE = "holdfast:file:"  # and the name of a further file
FORMAT_VERSION = 1


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
    """

    plan: _native.Plan
    keep: list[Any]
    waiting: set[torch.device]
    watch: _late.Watch
    objects: list[str]
    contiguous_copies: list[str]


def capture(
    state: Any,
    *,
    late: Iterable[Any] | bool,
    objects: str,
    per_rank: Sequence[str] | None,
    rank: int,
    world_size: int,
    attempt: str,
    files: Mapping[str, Any],
) -> Captured:
    """Captures a rank's part of a state. Arguments are those of `holdfast.save_async`.

    Raises:
        Error: INVALID_ARGUMENT naming the entry.
    """
    described = _state.describe(state)
    blob, index = _pickled(described.objects, objects)
    own = _own_of_rank(described, per_rank, world_size) if world_size > 1 else set()
    mine = [s for s in described.stored if world_size == 1 or rank == 0 or s.name in own]
    structure = json.dumps(
        {
            "holdfast_state": FORMAT_VERSION,
            "rank": rank,
            "world_size": world_size,
            "per_rank": sorted(own),
            "objects": index,
            "root": described.root,
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()

    waiting, watch = _clone_early(mine, _late.Late(late, state))
    plan = _native.Plan()
    # Host tensors first: whatever is in host memory is staged before the call returns.
    mine.sort(key=lambda s: _devices.device_of(s.device) is not None)
    tensors: list[Any] = [
        (s.name, s.dtype, list(s.shape), s.address, s.nbytes,
         _devices.device_of(s.device), _devices.stream_of(s.device)) for s in mine
    ]
    part = f"{rank:05d}-of-{world_size:05d}"
    plan.add_safetensors(f"model-{part}.safetensors", tensors, [("format", "pt")], attempt)
    buffers = []
    for file, entry, data in (
        (f"state-{part}.json", STRUCTURE, structure),
        *([(f"objects-{part}.pickle", OBJECTS, blob)] if blob else ()),
        *((name, FILE + name, _content(name, given)) for name, given in files.items() if rank == 0),
    ):
        plan.add_file(file)
        buffer = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        buffers.append(buffer)
        plan.add_tensor(entry, "U8", [len(data)], buffer.data_ptr(), len(data), None, 0)
    return Captured(
        plan, [*mine, *buffers], waiting, watch, sorted(described.objects),
        described.contiguous_copies,
    )


# ---- Captured in the call: clones on the device, and pickled objects.


def _clone(stored: _state.Stored) -> None:
    """Puts a copy on the same device, ordered into the current stream, in the tensor's place."""
    owner = stored.keep[0] if isinstance(stored.keep, list) else stored.keep
    storage = owner.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(
        storage, stored.address - storage.data_ptr(), (stored.nbytes,), (1,)
    )
    copy = view.clone()
    stored.keep, stored.address = copy, copy.data_ptr()


def _clone_early(stored: list[_state.Stored], late: _late.Late
                 ) -> tuple[set[torch.device], _late.Watch]:
    """Clones what may not be copied late; returns devices where that would be too much."""
    on_device = [s for s in stored if s.nbytes and _devices.device_of(s.device) is not None]
    owners = [s.keep if isinstance(s.keep, list) else [s.keep] for s in on_device]
    is_late = late.of(owners)
    early = [s for s, after in zip(on_device, is_late, strict=True) if not after]
    watch = _late.Watch(
        (s.name, owner)
        for s, own, after in zip(on_device, owners, is_late, strict=True) if after
        for owner in own
    )
    wait = _late.too_much_to_clone((s.device, s.nbytes) for s in early)
    for item in early:
        if item.device not in wait:
            _clone(item)
    return wait, watch


def _pickled(objects: dict[str, Any], policy: str) -> tuple[bytes, dict[str, list[int]]]:
    if objects and policy == "refuse":
        raise Error(
            "INVALID_ARGUMENT",
            "save: " + ", ".join(f"{name} ({_state.class_name(o)})" for name, o in objects.items())
            + ": neither tensors nor plain values, and objects='refuse'",
        )
    if policy not in ("pickle", "refuse"):
        raise Error("INVALID_ARGUMENT", "save: objects is 'pickle' or 'refuse'")
    blob, index = bytearray(), {}
    for name, value in objects.items():
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {name}: a {_state.class_name(value)} cannot be pickled ({error}); leave it out "
                "of the state, or give it a state_dict()",
            ) from error
        index[name] = [len(blob), len(data)]
        blob += data
    return bytes(blob), index


def _content(name: str, given: Any) -> bytes:
    """The content of a further file: text, bytes, or those of the file at a path."""
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, os.PathLike):
        with of_system(f"save {name}: read {os.fspath(given)}"), open(given, "rb") as file:
            return file.read()
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    raise Error(
        "INVALID_ARGUMENT",
        f"save {name}: files= takes text, bytes or a pathlib.Path, no {type(given).__name__}",
    )


# ---- With several ranks: what each saves for itself.


def _own_of_rank(described: _state.Description, patterns: Sequence[str] | None,
                 world_size: int) -> set[str]:
    """Names of what each rank saves for itself."""

    def is_own(stored: _state.Stored) -> bool:
        path = _state.join(stored.path)
        if patterns is None:
            return _ranks.is_own(path, stored.dtype)
        return any(fnmatch.fnmatch(path.lower(), p) for p in patterns)

    return _local(described.root, world_size) | {s.name for s in described.stored if is_own(s)}


def _local(root: _state.Node, world_size: int) -> set[str]:
    """Names of what DTensors are stored under, but for those that every rank has a replica of."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("kind") == "dtensor":
                # Over a part of the ranks, as in a pipeline, rank 0 may not have it, or one like it.
                if _state.share_of(node) or math.prod(node["mesh"]) < world_size:
                    found.update(n["stored"] for _, n in _state.tensor_nodes(node))
                return
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(root)
    return found
