"""The trainer of the kill campaign that saves and loads with Megatron's `dist_checkpointing`."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import resume_trainer
import torch
import torch.distributed as dist
from resume_trainer import Hold, Sharded, complete, gpt, tell
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import holdfast.megatron

LAST = "metadata.json"
KEEP = 2


def sharded(value: Any, key: str) -> Any:
    """A state as Megatron takes it: this rank's parts, and what all ranks have."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(value, dict):
        return {name: sharded(each, f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, DTensor):
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        return ShardedTensor(key=key, data=value.to_local(), dtype=value.dtype, local_shape=tuple(shape),
                             global_shape=tuple(value.shape), global_offset=tuple(offset),
                             axis_fragmentations=None)  # fmt: skip
    if isinstance(value, torch.Tensor):
        return ShardedTensor.from_rank_offsets(key, value, replica_id=dist.get_rank())
    return value


def state_of(job: Sharded) -> dict[str, Any]:
    return {name: sharded(value, name) for name, value in job.state().items()}


def random_state() -> dict[str, Any]:
    """That of each rank, which no other number of ranks can use."""
    from megatron.core.dist_checkpointing import ShardedObject

    return {"random": ShardedObject("random", torch.get_rng_state(), (dist.get_world_size(),), (dist.get_rank(),))}


def load(job: Sharded, path: Path, strategy: Any) -> int:
    """Loads a checkpoint in place; returns its step."""
    from megatron.core import dist_checkpointing

    saved = dist_checkpointing.load_common_state_dict(str(path))
    is_of_as_many = saved["ranks"] == dist.get_world_size()
    state = job.state()
    wanted = {name: sharded(value, name) for name, value in state.items()}
    loaded = dist_checkpointing.load(wanted | (random_state() if is_of_as_many else {}), str(path), strategy)
    # The parts were loaded in place; the rest of an optimizer comes back with the common state.
    state["optimizer"]["param_groups"] = loaded["optimizer"]["param_groups"]
    job.set_state(state)
    if is_of_as_many:
        torch.set_rng_state(loaded["random"])
    return saved["step"]


def train(arguments: argparse.Namespace, hold: Hold) -> None:
    holdfast.megatron.install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
        get_async_strategy,
    )

    resume_trainer.hold_commits(hold)
    job = Sharded(gpt.SIZES[arguments.size])
    # As a training does that keeps plans: those of the checkpoint that was loaded, too.
    saving, loading = TorchDistSaveShardedStrategy(cached_metadata=True), TorchDistLoadShardedStrategy(cache_metadata=True)
    first = 0
    if arguments.every and (found := complete(arguments.dir, LAST)):
        tell("load", int(found[-1].name.removeprefix("step-")))
        hold.load()
        first = job.loader.step = load(job, found[-1], loading)
        saving.cached_global_metadata = loading.cached_global_metadata
        if arguments.digests:
            tell("restored", job.whole_digest())
    tell("loaded", first)
    dialect = ("mcore", "nvrx")[first // max(arguments.every, 1) % 2]
    queue = get_async_strategy(dialect)[1]["AsyncCallsQueue"]()

    def saved(step: int) -> None:
        tell("durable", step)
        if job.rank == 0:
            for old in complete(arguments.dir, LAST)[:-KEEP]:
                shutil.rmtree(old)

    for step in range(first + 1, arguments.steps + 1):
        job.train_step()
        tell("train", step)
        queue.maybe_finalize_async_calls()
        if arguments.every and step % arguments.every == 0:
            queue.maybe_finalize_async_calls(blocking=True)
            if arguments.digests:
                tell("saved", f"{step} {job.whole_digest()}")
            path = os.path.join(arguments.dir, f"step-{step}")
            os.makedirs(path, exist_ok=True)
            tell("save", step)
            with hold.staging(step):
                now = {**state_of(job), **random_state(), "step": step, "ranks": dist.get_world_size()}
                request = dist_checkpointing.save(now, path, saving, async_sharded_save=True, async_strategy=dialect)
            request.add_finalize_fn(lambda step=step: saved(step))
            queue.schedule_async_request(request)
            tell("called", step)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    job.end()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resume_trainer.run({"megatron": train})
