"""Local checkpoints under kill: what two ranks resume from is whole, of one run, and no older than what was finalized."""

from __future__ import annotations

import os
import random
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import dcp_ranks
import torch
import torch.distributed as dist
from megatron_jobs import DEADLINE
from nvrx_jobs import State, expected

LONG = bool(os.environ.get("HOLDFAST_LONG"))


def _train(rank: int, store: str, directory: str, number: int, out: str, slow: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    import holdfast
    from holdfast.megatron.queue import NvrxAsyncCallsQueue
    from holdfast.nvrx import LocalCheckpointManager

    holdfast.configure(arena_bytes=32 << 20, bytes_per_second_max=slow)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=DEADLINE))  # fmt: skip
    manager, queue = LocalCheckpointManager(directory), NvrxAsyncCallsQueue()
    found = manager.find_latest()
    runs: list[Any] = [None, None]
    if found != -1:
        state, _ = manager.load()
        assert state.values_of() == expected(found, rank)
        dist.all_gather_object(runs, state.run)
    with open(out, "a", buffering=1) as lines:
        lines.write(f"found {found} {runs[0] == runs[1]}\n")
        first = max(found, 0) + 1
        for iteration in range(first, 1 << 20):
            state = State(iteration, rank)
            state.run = number  # type: ignore[attr-defined]
            queue.schedule_async_request(manager.save(state, iteration, is_async=True))
            state.train()
            for done in queue.maybe_finalize_async_calls(blocking=iteration % 3 == 0):
                lines.write(f"finalized {first + done}\n")


def _lines(out: Path) -> list[list[str]]:
    if not out.exists():
        return []
    return [line.split() for line in out.read_text().split("\n")[:-1]]


def test_killed_ranks_resume_from_what_was_finalized(tmp_path: Path) -> None:
    choose = random.Random(11)
    finalized = -1
    for number in range(20 if LONG else 3):
        outs = [tmp_path / f"out-{number}-{rank}" for rank in range(2)]
        ranks = [
            dcp_ranks.context.Process(target=_train, args=(rank, str(tmp_path / f"store-{number}"), str(tmp_path / "local"),
                                                  number, str(outs[rank]), choose.choice((0, 8 << 20))))
            for rank in range(2)
        ]  # fmt: skip
        for process in ranks:
            process.start()
        wanted = choose.randrange(1, 9)
        deadline = time.monotonic() + DEADLINE
        while any(len(_lines(out)) <= wanted for out in outs):
            assert time.monotonic() < deadline and all(process.is_alive() for process in ranks)
            time.sleep(0.005)
        choose.shuffle(ranks)
        for process in ranks:
            time.sleep(choose.random() * 0.05)
            process.kill()
        for process in ranks:
            process.join()
        for out in outs:
            (_, found, is_one_run), *ends = _lines(out)
            assert int(found) >= finalized, f"{found} was found, and {finalized} was finalized"
            assert found == "-1" or is_one_run == "True", "the ranks have loaded files of different runs"
        finalized = max(int(end[1]) for out in outs for end in _lines(out)[1:])
