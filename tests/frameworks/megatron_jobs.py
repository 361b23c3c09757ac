"""Jobs of gloo ranks that save with Megatron-Core, each rank a process."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_ranks
import psutil
import torch
import torch.distributed as dist

import holdfast

# Long enough for a machine with three times the work; a test that passes never waits for it.
DEADLINE = 120.0
ROWS = 64
ARENA_BYTES = 32 << 20

dcp_ranks.context.set_forkserver_preload(["holdfast.dcp", "megatron.core.dist_checkpointing"])


def run(world_size: int, scratch: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``body(rank, *args)`` on every rank; returns what they return, or fails."""
    return dcp_ranks.run_ranks(world_size, scratch, body, *args, arena_bytes=ARENA_BYTES, timeout=DEADLINE,
                               time_answer_max=2 * DEADLINE)  # fmt: skip


class State:
    """A small sharded state: rows of a matrix by rank, a replica, and an object."""

    def __init__(self, seed: int, columns: int = 256) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.rows = torch.rand(ROWS, columns, generator=generator)
        self.replica = torch.full((100,), float(seed))
        self.step = torch.tensor(float(seed))

    def sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {
            "rows": ShardedTensor.from_rank_offsets("rows", self.rows, (0, self.rank, self.world)),
            "replica": ShardedTensor.from_rank_offsets("head.replica", self.replica, replica_id=self.rank),
            "step": ShardedTensor.from_rank_offsets("step", self.step, replica_id=self.rank),
            "note": {"iteration": 7},
        }

    def train(self) -> None:
        """Changes everything, as the next step does."""
        for tensor in (self.rows, self.replica, self.step):
            tensor.add_(1)

    def wrong_elements_in(self, directory: str | Path) -> int:
        """How many elements of a checkpoint are not this state's, by Megatron's own loader."""
        from megatron.core.dist_checkpointing import load

        target = State(0, self.rows.shape[1])
        found = load(target.sharded(), str(directory))
        assert found["note"] == {"iteration": 7}
        pairs = [(found["rows"], self.rows), (found["replica"], self.replica), (found["step"], self.step)]
        return sum(int((a != b).sum()) for a, b in pairs)


def strategy_of(**options: Any) -> Any:
    """Megatron's strategy; its oldest version has no default for the format."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return TorchDistSaveShardedStrategy("torch_dist", 1, **options)


def save(state: State, directory: str, strategy: Any, **options: Any) -> Any:
    """`dist_checkpointing.save`, with those options that the version takes."""
    from megatron.core.dist_checkpointing import save

    known = inspect.signature(save).parameters
    return save(state.sharded(), directory, strategy, **{k: v for k, v in options.items() if k in known})


def queue_of(dialect: str) -> Any:
    """The queue that Megatron takes for a dialect."""
    from megatron.core.dist_checkpointing.strategies import async_utils, torch

    if hasattr(torch, "get_async_strategy"):
        return torch.get_async_strategy(dialect)[1]["AsyncCallsQueue"]()
    return async_utils.AsyncCallsQueue()


def stock_queue(caller: str) -> Any:
    """A library's own queue, by the name of its caller: ``mcore`` or ``nvrx``, then ``temporal`` or ``persistent``."""
    if caller.startswith("nvrx"):
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    else:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    # nvidia-resiliency-ext's worker takes a GPU otherwise.
    options = {"cpu_shm_mode": True} if caller == "nvrx persistent" else {}
    return AsyncCallsQueue(persistent=caller.endswith("persistent"), **options)


def fresh(directory: str | Path) -> str:
    """Makes a checkpoint's directory, which Megatron wants to be there."""
    os.makedirs(directory, exist_ok=True)
    if dist.is_initialized():
        dist.barrier()
    return str(directory)


def held_worker() -> int:
    """Starts a worker that is kept, and stops it: what is saved from now on does not end. Its pid."""
    holdfast.configure(launcher="persistent")
    holdfast.warm_up()
    (worker,) = psutil.Process().children()
    os.kill(worker.pid, signal.SIGSTOP)
    return worker.pid


def finalize(queue: Any, *, number: int = 1) -> None:
    """Asks the queue as a training does, until so many requests are finalized."""
    deadline = time.monotonic() + DEADLINE
    while number:
        number -= len(queue.maybe_finalize_async_calls())
        assert time.monotonic() < deadline, "a request was never finalized"
        time.sleep(0.005)
