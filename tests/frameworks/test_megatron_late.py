"""What `install(late=)` and a strategy's `late` name is copied behind the training, until its optimizer's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_jobs import State, finalize, fresh, queue_of, run, save, strategy_of
from slow_device import SlowDevice
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
import holdfast.megatron
from holdfast import _devices

named = pytest.mark.parametrize("way", ["installed", "installed with a function", "strategy"])


def _named(way: str, late: list[Any]) -> Any:
    """The strategy that saves with `late`."""
    if way == "strategy":
        return holdfast.megatron.SaveStrategy("torch_dist", 1, late=late)
    holdfast.megatron.install(late=late if way == "installed" else lambda: late)
    return strategy_of()


def trains_on(_: int, directory: str, way: str, breaks: bool) -> None:
    holdfast.megatron.install()
    state, saved = State(3), State(3)
    rows = torch.nn.Parameter(state.rows)
    optimizer = torch.optim.SGD([rows], lr=1.0)
    strategy = _named(way, [optimizer])
    path = fresh(f"{directory}/checkpoint")
    device = SlowDevice()
    with _devices.stand_in("cpu", device):
        request = save(state, path, strategy, async_sharded_save=True, async_strategy="mcore")
        queue = queue_of("mcore")
        queue.schedule_async_request(request)
        waits = len(device.waits)
        state.replica.add_(1)  # is not named: captured in the call
        if breaks:
            with torch.no_grad():
                rows.add_(1)
            device.open.set()
            with pytest.raises(CheckpointException, match=r"(?s)late= names changed.*rows.*DATA_LOSS"):
                finalize(queue)
            assert not Path(path, ".metadata").exists()
            return
        rows.grad = torch.ones_like(rows)
        optimizer.step()  # which waits for the copies
        assert len(device.waits) > waits
        assert not torch.equal(state.rows, saved.rows)
        device.open.set()
        finalize(queue)
        assert saved.wrong_elements_in(path) == 0
        assert holdfast.dcp.verify(path)["verdict"] == "sound"
        holdfast.flush(60)
    holdfast.configure()  # the memory lets go of the device


@named
def test_the_step_of_a_named_optimizer_waits_for_the_copies(way: str, tmp_path: Path) -> None:
    run(1, tmp_path, trains_on, str(tmp_path), way, False)


@named
def test_a_change_without_the_step_fails_the_save(way: str, tmp_path: Path) -> None:
    run(1, tmp_path, trains_on, str(tmp_path), way, True)


def unnamed(_: int, directory: str) -> None:
    holdfast.megatron.install(late=[])
    state, saved = State(3), State(3)
    path = fresh(f"{directory}/checkpoint")
    device = SlowDevice()
    with _devices.stand_in("cpu", device):
        request = save(state, path, strategy_of(), async_sharded_save=True, async_strategy="mcore")
        state.train()
        device.open.set()
        queue = queue_of("mcore")
        queue.schedule_async_request(request)
        finalize(queue)
        assert saved.wrong_elements_in(path) == 0
        holdfast.flush(60)
    holdfast.configure()


def test_without_names_the_copies_are_in_order(tmp_path: Path) -> None:
    run(1, tmp_path, unnamed, str(tmp_path))
