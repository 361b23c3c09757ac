"""Device tensors that are copied behind the training: what changes at once is captured in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from slow_device import SlowDevice
from torch.distributed.checkpoint.api import CheckpointException

import holdfast.dcp
from holdfast import _devices, _late

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _memory_goes_first() -> Iterator[None]:
    yield
    holdfast.flush(60)
    holdfast.configure()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(300, 200)
        self.norm = torch.nn.BatchNorm1d(200)
        flat = torch.zeros(16)  # one storage, as some keep small state
        self.scale = torch.nn.Parameter(flat[:8])
        self.register_buffer("amax", flat[8:])


def _save(path: Path, late: bool, mutate_late: bool = False) -> tuple[dict[str, Any], SlowDevice]:
    """Saves a model whose BatchNorm runs on while the copies are under way; what it was before."""
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    device = SlowDevice()
    with _devices.stand_in("cpu", device):
        optimizer = torch.optim.SGD(model.parameters())
        stager = holdfast.dcp.Stager(late=[optimizer]) if late else None
        response = holdfast.dcp.async_save(
            {"model": model.state_dict()}, checkpoint_id=path, async_stager=stager
        )
        if late:
            assert not response.staging_completion.done()
        # The next forward.
        model.norm.running_mean.fill_(7)
        model.norm.num_batches_tracked += 1
        model.amax.fill_(7)
        if mutate_late:
            with torch.no_grad():
                model.linear.weight.fill_(9)
        device.open.set()
        if late:
            response.staging_completion.result()
            response.upload_completion.result()
        else:
            response.result()
    return before, device


def _check(path: Path, before: dict[str, Any]) -> None:
    loaded = {"model": {k: torch.zeros_like(v) for k, v in before.items()}}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path))
    for name, value in before.items():
        assert torch.equal(loaded["model"][name], value), name


def test_without_a_stager_everything_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, device = _save(tmp_path / "x", late=False, mutate_late=True)
    _check(tmp_path / "x", before)
    monkeypatch.setattr(_late, "CLONE_MAX", 0)
    before, device = _save(tmp_path / "y", late=False, mutate_late=True)
    assert device.waits
    _check(tmp_path / "y", before)


def test_buffers_that_forward_changes_are_captured_before_a_late_copy(tmp_path: Path) -> None:
    before, device = _save(tmp_path / "x", late=True)
    assert not device.waits
    _check(tmp_path / "x", before)


@pytest.mark.planted("copies_everything_late")
def test_copying_everything_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug of the test above."""
    monkeypatch.setattr(_late.Late, "of", lambda _, entries: [True] * len(entries))
    with pytest.raises(CheckpointException, match="(?s)amax.*DATA_LOSS"):
        _save(tmp_path / "x", late=True)
    assert not (tmp_path / "x" / ".metadata").exists()


def test_what_is_too_much_to_clone_makes_the_stream_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_late, "CLONE_MAX", 0)
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    device = SlowDevice()
    with _devices.stand_in("cpu", device):
        response = holdfast.dcp.async_save(
            {"model": model.state_dict()},
            checkpoint_id=tmp_path / "x",
            async_stager=holdfast.dcp.Stager(late=[torch.optim.SGD(model.parameters())]),
        )
        assert device.waits
        model.norm.running_mean.fill_(7)
        device.open.set()
        response.upload_completion.result()
    _check(tmp_path / "x", before)


@pytest.mark.parametrize("late", [False, True])
def test_a_recovery_finds_the_places_of_device_tensors(late: bool, tmp_path: Path) -> None:
    """They stand behind what a file says of itself."""
    path = tmp_path / "run" / "x"
    before, _ = _save(path, late)
    made = dcp.FileSystemReader(path).read_metadata().storage_data
    for name in (".metadata", next(path.glob("holdfast.commit-*")).name):  # a crash before the commit
        (path / name).unlink()
    assert holdfast.recover(tmp_path / "run")["promoted"] == ["x"]
    assert dcp.FileSystemReader(path).read_metadata().storage_data == made
    _check(path, before)


def test_the_optimizers_step_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = SlowDevice()
    with _devices.stand_in("cpu", device):
        response = holdfast.dcp.async_save(
            {"model": model.state_dict()},
            checkpoint_id=tmp_path / "x",
            async_stager=holdfast.dcp.Stager(late=[optimizer]),
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert not device.waits
        optimizer.step()
        assert device.waits
        device.open.set()
        response.upload_completion.result()
    _check(tmp_path / "x", before)
