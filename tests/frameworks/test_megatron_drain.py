"""A checkpoint of Megatron-Core that was drained: the node dies, and Megatron loads what comes back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron_jobs import State, finalize, queue_of, run, save, strategy_of

import holdfast
import holdfast.megatron
from holdfast.cli import main


def _drained(rank: int, directory: str) -> None:
    holdfast.megatron.install()
    path, far, back = (f"{directory}/{name}" for name in ("run/iter_0000007", "far", "back"))
    state, saved = State(3), State(3)
    if rank == 0:
        os.makedirs(path)
    dist.barrier()
    queue = queue_of("mcore")
    queue.schedule_async_request(save(state, path, strategy_of(), async_sharded_save=True, async_strategy="mcore", verify_integrity=False))
    state.train()
    if rank == 0:  # the first look may come before Megatron has written its last file
        assert main(["drain", f"{directory}/run", far]) == 0
    finalize(queue)
    dist.barrier()
    if rank == 0:
        assert main(["drain", f"{directory}/run", far]) == 0
        shutil.rmtree(f"{directory}/run")  # the node
        assert main(["drain", far, back, "--newest"]) == 0
    dist.barrier()
    for place in (far, back):  # a directory is loaded from where it is, too
        assert saved.wrong_elements_in(f"{place}/iter_0000007") == 0
        assert holdfast.verify(f"{place}/iter_0000007")["verdict"] == "sound"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_drained_checkpoint_is_loaded_by_megatron(world_size: int, tmp_path: Path) -> None:
    run(world_size, tmp_path, _drained, str(tmp_path))
