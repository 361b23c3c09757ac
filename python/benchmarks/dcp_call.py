"""What the call of a DCP save takes, by the number of tensors: ours beside the framework's.

    python python/benchmarks/dcp_call.py --dir DIR [--tensors 300,2000] [--ranks 1,2] [--rounds 9]

Each rank has its own tensors of 4 KiB and one object. In each round every way saves once, one after
the other, each into a new directory, which is removed when the save has ended. The time of a call is
that of the slowest rank; a figure is the median of the rounds after the first save, which is shown
beside it. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast.dcp

TENSOR_BYTES = 4096


def _stock(kind: AsyncCheckpointerType) -> Callable[[Any, str], Future]:
    return lambda state, path: dcp.async_save(
        state, checkpoint_id=path, async_checkpointer_type=kind
    )  # type: ignore[return-value]


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "holdfast.dcp.async_save": lambda state, path: holdfast.dcp.async_save(state, checkpoint_id=path),
    "dcp.async_save thread": _stock(AsyncCheckpointerType.THREAD),
    "dcp.async_save process": _stock(AsyncCheckpointerType.PROCESS),
}


def _state(tensors: int, rank: int) -> dict[str, Any]:
    elements = TENSOR_BYTES // 4
    model = {f"layers.{i}.rank{rank}.weight": torch.full((elements,), float(i)) for i in range(tensors)}
    return {"model": model, "step": 0}


def _rank(rank: int, world: int, counts: list[int], rounds: int, directory: str, ways: list[str],
          answers: Any) -> None:  # fmt: skip
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # For the framework's process.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    torch.set_num_threads(1)
    port = os.environ["MASTER_PORT"]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for count in counts:
        state = _state(count, rank)
        for turn in range(rounds + 1):
            for way in ways:
                path = os.path.join(directory, f"{count}-{turn}-{way.split()[-1]}")
                state["step"] = turn
                dist.barrier()
                begin = time.perf_counter()
                future = WAYS[way](state, path)
                seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
                future.result()
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if rank == 0:
                    answers.put((count, way, turn, float(seconds)))
                    shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


def _run(world: int, counts: list[int], rounds: int, directory: str, ways: list[str]) -> Any:
    context = mp.get_context("spawn")
    answers = context.Queue()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 20000 + world))
    processes = []
    for rank in range(world):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        arguments = (rank, world, counts, rounds, directory, ways, answers)
        processes.append(context.Process(target=_rank, args=arguments))
        processes[-1].start()
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(len(counts) * (rounds + 1) * len(ways)):
        count, way, _, taken = answers.get(timeout=600)
        seconds.setdefault((count, way), []).append(taken)
    for process in processes:
        process.join()
    return seconds


def _possible(ways: list[str], count: int) -> list[str]:
    """The framework's process takes two descriptors for every tensor of a save."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [w for w in ways if not w.endswith("process") or 2 * count + 500 < limit]


def _cell(taken: list[float]) -> str:
    if not taken:
        return "too many descriptors"
    rest = [1e3 * s for s in taken[1:]]
    return f"{statistics.median(rest):.1f} ({min(rest):.1f} to {max(rest):.1f}); {1e3 * taken[0]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", required=True)
    parser.add_argument("--tensors", default="300,2000,10000,50000")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", default=",".join(WAYS))
    given = parser.parse_args()
    counts = [int(n) for n in given.tensors.split(",")]
    ways = given.ways.split(",")
    ours = ways[0]
    print("| ranks | tensors a rank | " + " | ".join(f"{w}, ms" for w in ways)
          + " | " + " | ".join(f"ours / {w}" for w in ways[1:]) + " |")  # fmt: skip
    print("|" + " --- |" * (2 + 2 * len(ways) - 1))
    for world in map(int, given.ranks.split(",")):
        for count in counts:
            with tempfile.TemporaryDirectory(dir=given.dir) as directory:
                seconds = _run(world, [count], given.rounds, directory, _possible(ways, count))
            cells = [_cell(seconds.get((count, way), [])) for way in ways]
            middle = {way: statistics.median(taken[1:]) for (_, way), taken in seconds.items()}
            ratios = [f"{middle[ours] / middle[w]:.2f}" if w in middle else "" for w in ways[1:]]
            print(f"| {world} | {count} | " + " | ".join(cells + ratios) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
