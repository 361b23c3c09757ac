"""Bugs that corrupted checkpoints elsewhere: each is shown happening, and prevented or reported here.

Cached handles that give identical checkpoints are in test_snapshots.py, buffers that the next forward
pass changes in test_late_copies.py.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp

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
    holdfast.configure(launcher="fork", arena_bytes=16 << 20, bytes_per_second_max=32 << 20)
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


class NoCopyStager:
    """Stages by reference: live CPU tensors are aliased, as some stagers do."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self.wait = threading.Event()

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        staged: Future[dict[str, Any]] = Future()

        def later() -> None:
            self.wait.wait(60)
            staged.set_result(state_dict)

        threading.Thread(target=later).start()
        return staged

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.filterwarnings("ignore")
def test_live_cpu_tensors_aliased_by_a_background_save(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1,
                                         store=torch.distributed.HashStore())
    try:
        step = torch.tensor(1.0)
        stager = NoCopyStager()
        answer = dcp.async_save({"step": step}, checkpoint_id=tmp_path / "peer", async_stager=stager)
        step.fill_(2.0)  # the optimizer goes on
        stager.wait.set()
        answer.upload_completion.result(60)
        peer = {"step": torch.zeros(())}
        dcp.load(peer, checkpoint_id=tmp_path / "peer")
        assert peer["step"] == 2.0, "the peer's way wrote the value of the call"

        step.fill_(1.0)
        future = holdfast.dcp.async_save({"step": step}, checkpoint_id=tmp_path / "ours")
        step.fill_(2.0)
        future.result(60)
        ours = {"step": torch.zeros(())}
        dcp.load(ours, checkpoint_id=tmp_path / "ours")
        assert ours["step"] == 1.0
    finally:
        torch.distributed.destroy_process_group()
