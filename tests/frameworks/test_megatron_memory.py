"""Host memory of a save beside the state: a synchronous one streams through the staging memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil
import pytest
from megatron_jobs import ROWS, State, finalize, fresh, run
from memory_use import Peak

import holdfast
import holdfast.megatron
from holdfast.dcp import staging

MIB = 1 << 20
STATE = 384 * MIB


def _peak(rank: int, directory: str, way: str) -> tuple[int, int]:
    """Shared and anonymous memory above that before, at the peak of a save."""
    from megatron.core.dist_checkpointing import save

    from holdfast.megatron.queue import AsyncCallsQueue

    del os.environ["HOLDFAST_ARENA_BYTES"]  # as large as a save wants it
    state = State(1, STATE // ROWS // 4)
    strategy, queue = holdfast.megatron.SaveStrategy(), AsyncCallsQueue()
    # What is imported and kept from the first save on.
    save({"x": State(2).sharded()["rows"]}, fresh(f"{directory}/small"), strategy)
    holdfast.trim()
    peak = Peak()
    if way == "synchronous":
        save(state.sharded(), fresh(f"{directory}/large"), strategy)
    else:
        request = save(state.sharded(), fresh(f"{directory}/large"), strategy, async_sharded_save=True, async_strategy="mcore")
        queue.schedule_async_request(request)
        finalize(queue)
    used = peak.stop()
    assert state.wrong_elements_in(f"{directory}/large") == 0
    return used


@pytest.mark.parametrize("way", ["synchronous", "asynchronous"])
def test_a_synchronous_save_takes_no_more_than_its_staging_memory(way: str, tmp_path: Path) -> None:
    ((shared, anonymous),) = run(1, tmp_path, _peak, str(tmp_path / "run"), way)
    told = f"shared {shared / MIB:.0f} MiB, anonymous {anonymous / MIB:.0f} MiB"
    print(told)
    assert anonymous < 48 * MIB, told
    if way == "synchronous":
        # The window, with its slack for the next save's first chunks.
        assert shared <= staging.WINDOW_BYTES + 64 * MIB + 4 * MIB, told
    else:
        assert shared >= STATE, told


def _warmed_up(rank: int, directory: str, arena_bytes: int) -> None:
    from megatron.core.dist_checkpointing import save

    from holdfast.megatron.queue import AsyncCallsQueue

    os.environ["HOLDFAST_ARENA_BYTES"] = str(arena_bytes)
    AsyncCallsQueue.warmup_persistent_caller(rank)
    before = holdfast.staging()
    assert (before["arena_bytes"], before["resident"]) == (arena_bytes, True)
    workers = [child.pid for child in psutil.Process().children()]
    assert len(workers) == 1
    queue, state = AsyncCallsQueue(), State(1, 32 * MIB // ROWS // 4)
    # The kernel gives no page for the copy: faults in the call, by 4 KiB, stay far below the state.
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    request = save(state.sharded(), fresh(directory), holdfast.megatron.SaveStrategy(), async_sharded_save=True, async_strategy="mcore")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 32 * MIB / 4096 / 4
    queue.schedule_async_request(request)
    finalize(queue)
    after = holdfast.staging()
    assert (after["arena_bytes"], after["trims"]) == (arena_bytes, 0)
    assert [child.pid for child in psutil.Process().children()] == workers


def test_a_warm_up_takes_the_memory_of_the_first_save(tmp_path: Path) -> None:
    run(1, tmp_path, _warmed_up, str(tmp_path / "run"), 64 * MIB)
