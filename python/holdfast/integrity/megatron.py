"""Checkpoints of Megatron-Core: states as its ranks describe them, and its own load.

Trainers and readers import Megatron-Core when they need it; the program itself looks only whether it is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from holdfast._packages import is_installed
from holdfast.integrity import states

CONFIG = "metadata.json"  # by which Megatron knows its checkpoints; its finalize function writes it
IDS = "ids"  # a tensor of which each rank has a row


def why_not() -> str:
    """Why nothing can be saved through Megatron-Core here; "" where it can."""
    return "" if is_installed("megatron.core") else "Megatron-Core is not installed"


def core() -> Any:
    return importlib.import_module("megatron.core.dist_checkpointing")


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_CAMPAIGN = os.path.dirname(__file__) + os.sep
_CORE = os.sep + os.path.join("megatron", "core") + os.sep


def is_apart(stack: traceback.StackSummary) -> bool:
    """Whether an error was raised apart from this package: in a function that Megatron-Core or the campaign itself calls."""
    for file in (frame.filename for frame in reversed(stack)):
        if file.startswith(_PACKAGE):
            return file.startswith(_CAMPAIGN)
        if _CORE in file:
            return True
    return False


# ---- States, as Megatron describes those of its ranks.


def _sharded(state: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """A state of `states.as_dcp`: what is shared is a replica on each rank, what has a rank's name is its own."""
    found, made = core(), {}
    for name, value in state.items():
        replica = rank if name.startswith("shared.") else 0
        if isinstance(value, torch.Tensor):
            if not value.numel():
                continue  # Megatron divides by the sizes
            made[name] = found.ShardedTensor.from_rank_offsets(name, value, replica_id=replica)
        else:
            made[name] = found.mapping.ShardedObject(name, value, (1,), (0,), replica_id=replica)
    return made


def state_of(made: dict[str, Any], rank: int, ranks: int, step: int) -> dict[str, Any]:
    """What one rank saves: the state of `states.make`, a tensor that all ranks have a row of, and a step for all."""
    state = _sharded(states.as_dcp(made, rank), rank)
    state[IDS] = core().ShardedTensor.from_rank_offsets(IDS, made["id"].view(1, 2), (0, rank, ranks))
    return {**state, "iteration": step}


def whole(of_ranks: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The whole checkpoint, given that of `states.dcp_of_ranks`."""
    made = {name: value for name, value in of_ranks.items() if not isinstance(value, torch.Tensor) or value.numel()}
    return {**made, IDS: torch.stack([of_ranks[f"r{rank}.id"] for rank in range(ranks)])}


# ---- Megatron's own load.


@contextlib.contextmanager
def _in_group() -> Iterator[None]:
    """Megatron asks for the rank, also where one process loads a whole checkpoint."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def has_config(path: str) -> bool:
    """Whether Megatron knows the checkpoint. Its finalize function writes the file, and the queue makes it durable."""
    config = os.path.join(path, CONFIG)
    return os.path.exists(config) and os.path.getsize(config) > 0


def read(path: str, expected: Any) -> Iterator[tuple[int, str]]:
    """A reader of `readers.readers_of`. Without the file by which Megatron knows a checkpoint, it finds nothing."""
    if not has_config(path):
        return
    with _in_group():
        first = _load(path, {"r0.id": torch.zeros(2, dtype=torch.int64)})
        save = int(first["r0.id"][0])
        wanted = expected.dcp(save)
        found = _load(path, states.unlike(wanted))
    step = found.pop("iteration", None)
    said = states.difference(found, wanted)
    if not said and step != expected.step(save):
        said = f"its iteration is {step}, not {expected.step(save)}"
    yield save, said


def _load(path: str, target: dict[str, Any]) -> Any:
    return core().load(_sharded(target), path, validate_access_integrity=False)
