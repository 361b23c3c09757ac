"""Bugs that corrupted checkpoints elsewhere: each is shown happening, and prevented or reported here.

More of cached handles is in test_snapshots.py; buffers that the next forward pass changes are in
test_late_copies.py.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_snapshots import CachingTrainer
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import holdfast
import holdfast.dcp
from holdfast import snapshots

ELEMENTS = 3 << 20


def test_staging_memory_reused_under_a_forked_writer(tmp_path: Path) -> None:
    """Pinned memory is shared with a forked child; here shared memory stands in for it."""
    staged = torch.empty(ELEMENTS).share_memory_()
    staged.fill_(1.0)
    may_write, in_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(in_child)
        os.read(may_write, 1)  # the child is late, as children are
        torch.save(staged, tmp_path / "peer.pt")
        os._exit(0)
    staged.fill_(2.0)  # the allocator handed the block to the next copy
    os.write(in_child, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.load(tmp_path / "peer.pt")[0] == 2.0, "the peer's way wrote the bytes of the call"

    source = torch.full((ELEMENTS,), 1.0)
    # A forked writer here, too, and memory for one save only.
    holdfast.configure(launcher="fork", arena_bytes=16 << 20, bytes_per_second_max=8 << 20)
    try:
        first = holdfast.save_async({"t": source}, tmp_path / "first")
        source.fill_(2.0)
        second = holdfast.save_async({"t": source}, tmp_path / "second")  # wants memory as well
        assert first.wait(60)["launcher"] == "fork"
        assert second.wait(60)["time_waiting_memory"] > 0, "the memory was not wanted again"
    finally:
        holdfast.configure(launcher="spawn", arena_bytes=0, bytes_per_second_max=0)
    assert torch.equal(holdfast.load(tmp_path / "first")["t"], torch.full((ELEMENTS,), 1.0))
    assert torch.equal(holdfast.load(tmp_path / "second")["t"], source)


class SlowToCopy:
    """A part of a state whose copy takes long, as that of many gigabytes does."""

    may_go_on = threading.Event()

    def __deepcopy__(self, memo: dict[int, Any]) -> SlowToCopy:
        assert self.may_go_on.wait(60)
        return SlowToCopy()


@pytest.fixture
def one_rank() -> Iterator[None]:
    with dcp_ranks.one_rank():
        yield


def step_of(path: Path) -> float:
    loaded = {"step": torch.zeros(())}
    dcp.load(loaded, checkpoint_id=path)
    return loaded["step"].item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("one_rank")
def test_live_cpu_tensors_that_are_staged_behind_the_call(tmp_path: Path) -> None:
    """By PyTorch's own stager: the state is the trainer's until the background thread has come to it."""
    stager = DefaultStager(StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False))
    step = torch.tensor(1.0)
    state = {"large": SlowToCopy(), "step": step}
    answer = dcp.async_save(state, checkpoint_id=tmp_path / "peer", async_stager=stager)
    assert not answer.staging_completion.done()
    step.fill_(2.0)  # the optimizer goes on
    SlowToCopy.may_go_on.set()
    answer.upload_completion.result(60)
    assert step_of(tmp_path / "peer") == 2.0, "the peer's way wrote the value of the call"

    SlowToCopy.may_go_on.clear()
    step.fill_(1.0)
    answer = holdfast.dcp.async_save(state, checkpoint_id=tmp_path / "ours", async_stager=stager)
    step.fill_(2.0)
    answer.upload_completion.result(60)
    assert step_of(tmp_path / "ours") == 1.0
    SlowToCopy.may_go_on.set()
    stager.close()


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("one_rank")
def test_cached_handles_give_identical_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says a word, except the report here."""
    monkeypatch.setattr(snapshots, "_previous", type(snapshots._previous)())
    trainer = CachingTrainer(planted_bug=True)
    weights, files, shards, reports = [], [], [], []
    for n in (1, 2):
        trainer.step()
        weights.append(trainer.model.weight.detach().clone())
        state = trainer.state(n)["model"]
        directory = tmp_path / f"step-{n}"
        directory.mkdir()
        torch.save(state, directory / "state.pt")
        files.append((directory / "state.pt").read_bytes())
        dcp.save(dict(state), checkpoint_id=directory / "dcp")
        shards.append((directory / "dcp" / "__0_0.distcp").read_bytes())
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "the peer's way said something"
        reports.append(holdfast.save_async(state, tmp_path / f"ours-{n}", step=n).wait(60))
    assert not torch.equal(weights[0], weights[1]), "the model did not change"
    assert files[0] == files[1], "torch.save wrote what is in the model now"
    assert shards[0] == shards[1], "dcp.save wrote what is in the model now"
    assert not reports[0].get("stale")
    assert reports[1]["stale"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "all 2 tensors are identical to the previous save" in warning
