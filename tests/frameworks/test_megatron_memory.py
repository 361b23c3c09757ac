"""Host memory of a save beside the state: a synchronous one streams through the staging memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from megatron_jobs import ROWS, State, finalize, fresh, run
from memory_use import Peak

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
