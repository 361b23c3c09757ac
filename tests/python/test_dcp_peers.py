"""What PyTorch's own tests showed: words that callers match, and objects that they save."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.dcp import StorageReader, StorageWriter, staging, verify


def test_an_existing_checkpoint_is_refused_in_the_words_of_the_framework(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    dcp.save({"w": torch.ones(4)}, storage_writer=StorageWriter(path))
    with pytest.raises(CheckpointException, match=".*Checkpoint already exists.*; choose another name, remove it, or pass overwrite=True") as caught:
        dcp.save({"w": torch.zeros(4)}, storage_writer=StorageWriter(path, overwrite=False))
    error = caught.value.failures[0][0]
    assert isinstance(error, holdfast.Error) and error.code == "ALREADY_EXISTS"
    assert verify(path)["verdict"] == "sound"
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=StorageReader(path))
    assert torch.equal(loaded["w"], torch.ones(4))


class _TrainState:
    """A step and a stream of bytes, as trainers keep their losses."""

    def __init__(self, step: int, losses: list[float]) -> None:
        self.step, self.losses = step, losses

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": torch.tensor(self.step), "losses": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])


def test_a_stream_in_memory_is_loaded_without_being_allowed(tmp_path: Path) -> None:
    dcp.save({"train": _TrainState(7, [0.5, 0.25])}, storage_writer=StorageWriter(tmp_path / "c"))
    loaded = _TrainState(0, [])
    dcp.load({"train": loaded}, storage_reader=StorageReader(tmp_path / "c"))
    assert (loaded.step, loaded.losses) == (7, [0.5, 0.25])


def test_a_stream_of_a_plain_save_is_loaded_without_being_allowed(tmp_path: Path) -> None:
    holdfast.save_async({"stream": io.BytesIO(b"abc")}, tmp_path / "c").durable.result(60)
    assert holdfast.load(tmp_path / "c")["stream"].getvalue() == b"abc"


def test_a_file_on_disk_is_still_refused(tmp_path: Path) -> None:
    """A pickle that would open one, if it were loaded."""

    class Opens:
        def __reduce__(self) -> Any:
            return (io.open, (str(tmp_path / "made"), "w"))

    dcp.save({"o": Opens()}, storage_writer=StorageWriter(tmp_path / "c"))
    for left in tmp_path.glob("made"):
        left.unlink()
    with pytest.raises(CheckpointException, match="not on the list"):
        dcp.load({"o": 0}, storage_reader=StorageReader(tmp_path / "c"))
    assert not (tmp_path / "made").exists()


def _stage_dtensors(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "weight": distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]),
        "bias": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]),
        "scale": distribute_tensor(torch.arange(3.0), mesh, [Replicate()]),
        "short": distribute_tensor(torch.ones(1), mesh, [Shard(0)]),  # nothing of it on rank 1
        "step": torch.tensor(7),
    }
    staged = staging.stage(state)
    addresses = []
    for name, value in state.items():
        copy = staged[name]
        if isinstance(value, DTensor):
            assert copy.shape == value.shape and copy.placements == value.placements
            assert torch.equal(copy.to_local(), value.to_local())
            assert torch.equal(copy.full_tensor(), value.full_tensor())
            addresses.append(copy.data_ptr())
    # Only if they have no address, else the process would die here.
    if not any(addresses):
        ForkingPickler.dumps(staged)
    return addresses


def test_staged_dtensors_can_be_sent_to_another_process(tmp_path: Path) -> None:
    assert dcp_ranks.run_ranks(2, tmp_path, _stage_dtensors) == [[0] * 4] * 2
