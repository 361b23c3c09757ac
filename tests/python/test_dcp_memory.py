"""Loading a DCP checkpoint takes a bounded amount of memory beside the tensors."""

from __future__ import annotations

import resource
from pathlib import Path

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast.dcp

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
