"""Jobs of several gloo ranks on this machine, each a process."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ARENA_BYTES = 64 << 20
TIME_ANSWER_MAX = 90.0  # seconds that a rank may take

# Ranks are forked by a server that has imported this, and used nothing of it. Not the tests' own modules: the server does
# not have their directory in its path, and is silent about a module that it does not find.
context = mp.get_context("forkserver")
context.set_forkserver_preload([
    "torch._dynamo",  # what DTensor imports at its first use
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "holdfast.dcp",
    "holdfast.observe",
])  # fmt: skip


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # A child that is forked later has the group and not its threads: its collector would wait for them for ever.
        gc.collect()


def _rank(rank: int, world_size: int, store: str, body: Callable[..., Any], args: tuple[Any, ...],
          answers: Any, arena_bytes: int, timeout: float) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["HOLDFAST_ARENA_BYTES"] = str(arena_bytes)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        answers.put((rank, body(rank, *args), ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    world_size: int, scratch: Path, body: Callable[..., Any], *args: Any, dying: int | None = None,
    arena_bytes: int = ARENA_BYTES, timeout: float = 60.0, time_answer_max: float = TIME_ANSWER_MAX,
) -> list[Any]:  # fmt: skip
    """Runs ``body(rank, *args)`` on every rank; returns what they return, or fails.

    Args:
        world_size: number of ranks.
        scratch: directory of the store by which they meet.
        dying: a rank that is killed or stops for good, and returns None.
        arena_bytes: staging memory of a rank.
        timeout: of the process group, in seconds.
        time_answer_max: seconds until a rank has returned.
    """
    answers = context.Queue()
    store = str(scratch / f"store-{time.monotonic_ns()}")
    processes = [
        context.Process(target=_rank, args=(rank, world_size, store, body, args, answers, arena_bytes, timeout))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    got: dict[int, Any] = {}
    failures = []
    try:
        for _ in range(world_size - (dying is not None)):
            rank, value, failure = answers.get(timeout=time_answer_max)
            got[rank] = value
            if failure:
                failures.append(f"rank {rank}:\n{failure}")
    finally:
        if dying is not None:
            processes[dying].kill()  # stopped, it would be waited for
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
    assert not failures, "\n".join(failures)
    return [got.get(rank) for rank in range(world_size)]
