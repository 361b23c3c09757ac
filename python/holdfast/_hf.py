"""The files that `from_pretrained` of the Hugging Face libraries loads: a model's tensors and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast import _plain, _state
from holdfast.errors import Error

SHARD_BYTES_MAX = 5_000_000_000
INDEX = "model.safetensors.index.json"


class File(NamedTuple):
    """A safetensors file: its entries, and the metadata in its header."""

    name: str
    entries: list[_state.Entry]
    metadata: list[tuple[str, str]]


def flat(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model by name: its state dict, or such a dict itself.

    Raises:
        Error: INVALID_ARGUMENT for anything else, naming the entry.
    """
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, Mapping):
        raise _refusal("state", f"a {_plain.class_name(state)}")
    for name, value in state.items():
        if not isinstance(name, str):
            raise _refusal(repr(name), "a key that is no text")
        if not isinstance(value, torch.Tensor):
            raise _refusal(name, f"a {_plain.class_name(value)}")
        if value.layout != torch.strided or hasattr(value, "__tensor_flatten__"):
            raise _refusal(name, f"a {_plain.class_name(value)} that is more than one strided tensor")
    return dict(state)


def _refusal(name: str, what: str) -> Error:
    return Error(
        "INVALID_ARGUMENT",
        f"save {name}: {what}; layout='hf' takes the state dict of a model, names to strided tensors; "
        "save all else in another checkpoint",
    )


def describe(tensors: dict[str, torch.Tensor]) -> _state.Description:
    """Describes tensors so that each is an entry of its own; tied ones are one, of the first name.

    Tensors that overlap otherwise are copied.
    """
    described = _state.describe(tensors)
    outline, named = described.outline, list(tensors.items())
    apart = {}
    for name, members in zip(outline.names, outline.members, strict=True):
        group = [named[m] for m in members]
        if name not in tensors or not all(_is_same(group[0][1], tensor) for _, tensor in group):
            apart.update({n: t.detach().clone(memory_format=torch.contiguous_format) for n, t in group})
    return _state.describe({**tensors, **apart}) if apart else described


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def files_of(described: _state.Description, tensors: dict[str, torch.Tensor], shard_bytes_max: int
             ) -> tuple[list[File], str]:
    """The files of a description, and the text of the index; "" where one file holds everything."""
    names = list(tensors)
    place = {name: i for i, name in enumerate(names)}
    shards: list[list[_state.Entry]] = [[]]
    room = shard_bytes_max
    for entry in sorted(described.entries(), key=lambda e: place[e.name]):
        if shards[-1] and entry.nbytes > room:
            shards.append([])
            room = shard_bytes_max
        shards[-1].append(entry)
        room -= entry.nbytes
    tied: dict[str, list[tuple[str, str]]] = {}  # by the name that is stored
    for stored, members in zip(described.outline.names, described.outline.members, strict=True):
        tied[stored] = [(names[m], stored) for m in members if names[m] != stored]
    if len(shards) == 1:
        file_names = ["model.safetensors"]
    else:
        file_names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    files = [
        File(name, shard, [("format", "pt"), *(pair for entry in shard for pair in tied[entry.name])])
        for name, shard in zip(file_names, shards, strict=True)
    ]
    if len(files) == 1:
        return files, ""
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry.nbytes for file in files for entry in file.entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files, json.dumps(index, indent=2) + "\n"
