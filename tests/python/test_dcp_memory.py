"""Memory beside the state: loading a DCP checkpoint takes a bounded amount, saving through a process no second copy."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from memory_use import Peak
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast.dcp
from holdfast.dcp import staging

MIB = 1 << 20
_ROWS = 24 * MIB // 4 // 1024


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _load(rank: int, path: str, layout: str) -> tuple[int, bool]:
    shape = (_ROWS, 1024)
    if layout == "row-major":
        state = {str(i): torch.ones(shape) for i in range(8)}
    else:  # nothing can be read in place
        state = {str(i): torch.ones(shape[::-1]).t() for i in range(8)}
    warm = {"0": torch.ones(shape)}
    dcp.load(warm, storage_reader=holdfast.dcp.StorageReader(path))
    before = _peak()
    dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path))
    grown = _peak() - before
    right = all(bool((state[str(i)] == i).all()) for i in range(8))
    return grown, right


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_loading_grows_the_process_by_the_buffer_at_most(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "large"  # 192 MiB
    state = {str(i): torch.full((_ROWS, 1024), float(i)) for i in range(8)}
    if writer == "ours":
        dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))
    del state
    for layout in ("row-major", "transposed"):
        ((grown, right),) = dcp_ranks.run_ranks(1, tmp_path, _load, str(path), layout)
        assert right
        assert grown < 96 * MIB, f"{layout}: {grown / MIB:.0f} MiB"


def _through_a_process(rank: int, path: str, nbytes: int) -> tuple[int, int]:
    """At the peak of a save through the framework's checkpoint process."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    del os.environ["HOLDFAST_ARENA_BYTES"]  # as large as a save wants it
    for step, state in enumerate(({"w": torch.ones(1000)}, {str(i): torch.ones(nbytes // 8 // 4) for i in range(8)})):
        peak = Peak()  # of the second: the first one starts the process
        writer = holdfast.dcp.StorageWriter(os.path.join(path, str(step)), staging_bytes_max=2 * nbytes)
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        future.result()
        used = peak.stop()
    del future
    executor._CHECKPOINT_PROCESS = None
    return used


@pytest.mark.filterwarnings("ignore")
def test_a_save_through_a_process_takes_one_copy_of_the_state_and_a_window(tmp_path: Path) -> None:
    state = 192 * MIB
    ((shared, anonymous),) = dcp_ranks.run_ranks(1, tmp_path, _through_a_process, str(tmp_path / "run"), state)
    told = f"shared {shared / MIB:.0f} MiB, anonymous {anonymous / MIB:.0f} MiB"
    print(told)
    # The staged copy, and the memory that it streams through, with its slack for the next save's first chunks.
    assert shared >= state, told
    assert shared <= state + staging.WINDOW_BYTES + 64 * MIB + 4 * MIB, told
    assert anonymous < 48 * MIB, told
