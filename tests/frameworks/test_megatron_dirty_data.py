"""The bug that the project was made for, with the real code: elements of the next step in a checkpoint.

The same with one table of all callers: `tools/gpu-check.sh --only dirty_data`, with `--rehearse` where there is no GPU.

The stock callers hand tensors of the CPU to another process by reference. Memory that is shared with it, as
pinned memory is, is read when the writer comes to it. Here the writer is made to come late: it begins
when the next step has changed the state, as on a busy machine.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from megatron_jobs import (
    DEADLINE,
    State,
    finalize,
    fresh,
    held_worker,
    run,
    save,
    stock_queue,
    strategy_of,
)
from no_gpu import cpu_for_gpu

import holdfast.megatron

pytestmark = pytest.mark.long


def late(flag: str, fn: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a request's function when a file is there."""
    deadline = time.monotonic() + DEADLINE
    while not os.path.exists(flag) and time.monotonic() < deadline:
        time.sleep(0.005)
    fn(*args, **kwargs)


def _of_the_next_step(rank: int, directory: str, caller: str, flag: str) -> tuple[int, float]:
    path = fresh(directory)
    state, saved = State(7), State(7)
    strategy = strategy_of()
    worker = None
    queue: Any
    if caller == "holdfast":
        strategy = holdfast.megatron.SaveStrategy("torch_dist", 1)
        from holdfast.megatron.queue import AsyncCallsQueue

        worker, queue = held_worker(), AsyncCallsQueue()
    else:
        cpu_for_gpu.without_gpu()
        for tensor in (state.rows, state.replica, state.step):
            tensor.share_memory_()  # as pinned memory is for a forked child
        queue = stock_queue(caller)
    dialect = "nvrx" if caller.startswith("nvrx") else "mcore"
    request = save(state, path, strategy, async_sharded_save=True, async_strategy=dialect)
    if worker is None:
        request = request._replace(async_fn=functools.partial(late, flag, request.async_fn))
    queue.schedule_async_request(request)
    state.train()
    if worker is not None:
        os.kill(worker, signal.SIGCONT)
    Path(flag).touch()
    finalize(queue)
    queue.close()
    return saved.wrong_elements_in(path), float(saved.step)


ELEMENTS = 64 * 256 + 100 + 1


@pytest.mark.parametrize(
    ("caller", "wrong"),
    [
        ("mcore temporal", ELEMENTS),
        ("mcore persistent", ELEMENTS),
        ("nvrx temporal", ELEMENTS),
        ("nvrx persistent", ELEMENTS),
        pytest.param("holdfast", 0, marks=pytest.mark.every_version),
    ],
)
def test_elements_of_the_next_step(caller: str, wrong: int, tmp_path: Path) -> None:
    if caller.startswith("nvrx"):
        pytest.importorskip("nvidia_resiliency_ext")
    ((found, _),) = run(1, tmp_path, _of_the_next_step, str(tmp_path / "run"), caller, str(tmp_path / "go"))
    print(f"{caller}: {found} of {ELEMENTS} elements are those of the next step")
    assert found == wrong
