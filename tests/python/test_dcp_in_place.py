"""A DCP load changes the state when nothing can fail any more, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
import holdfast.dcp
from holdfast import _runtime

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20


class Unlisted:
    """A class that no load makes without leave."""


def _damage(path: Path, rank: int) -> None:
    """A byte in the middle of a rank's last large tensor changes."""
    file = path / f"__{rank}_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.rindex(b"\x00\x00\x80\x3f" * 100)] ^= 0x40
    file.write_bytes(data)


def _zeros() -> dict[str, Any]:
    return {"a": torch.zeros(3 * MIB), "number": 0, "part": torch.zeros(40, 40).t(), "z": torch.zeros(3 * MIB)}


def _is_untouched(state: dict[str, Any]) -> bool:
    return state["number"] == 0 and not any(t.any() for t in state.values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("partial", [False, True])
def test_a_damaged_checkpoint_changes_nothing(partial: bool, tmp_path: Path) -> None:
    saved = {"a": torch.ones(3 * MIB), "number": 7, "part": torch.ones(40, 40), "z": torch.ones(3 * MIB)}
    holdfast.dcp.save(saved, checkpoint_id=tmp_path / "s")
    _damage(tmp_path / "s", 0)
    state = _zeros()
    reader = holdfast.dcp.StorageReader(tmp_path / "s", partial=partial, buffer_bytes=9 * MIB)
    with pytest.raises(CheckpointException, match="DATA_LOSS"):
        dcp.load(state, storage_reader=reader)
    assert _is_untouched(state) or partial
    state = _zeros()
    for load in (
        lambda: holdfast.dcp.load(state, checkpoint_id=tmp_path / "s"),
        lambda: holdfast.Checkpointer(tmp_path, name="{step}", format="dcp").load(name="s", into=state),
    ):
        with pytest.raises(CheckpointException, match="DATA_LOSS"):
            load()
        assert _is_untouched(state)


@pytest.mark.parametrize("fits", [False, True])
def test_a_sound_checkpoint_is_loaded(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_runtime, "fits_in_page_cache", lambda nbytes: fits)
    saved = {"a": torch.rand(3 * MIB), "number": 7, "part": torch.rand(40, 40), "z": torch.rand(3 * MIB)}
    holdfast.dcp.save(saved, checkpoint_id=tmp_path / "s")
    state = _zeros()
    reader = holdfast.dcp.StorageReader(tmp_path / "s", buffer_bytes=9 * MIB)
    dcp.load(state, storage_reader=reader)
    assert state["number"] == 7
    assert all(torch.equal(state[name], saved[name]) for name in ("a", "part", "z"))
    assert reader.report["verified"] and reader.report["bytes"] >= 24 * MIB


def test_an_object_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    saved = {"a": torch.ones(100), "b": {"number": 7}, "c": Unlisted()}
    holdfast.dcp.save(saved, checkpoint_id=tmp_path / "s")
    state = {"a": torch.zeros(100), "b": {"number": 0}, "c": None}
    with pytest.raises(CheckpointException, match="PERMISSION_DENIED"):
        holdfast.dcp.load(state, checkpoint_id=tmp_path / "s")
    assert not state["a"].any() and state["b"] == {"number": 0}


def _two(rank: int, path: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))

    def sharded(value: float) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.full((2 * MIB,), value), mesh, [Shard(0)])}

    holdfast.dcp.save(sharded(1.0), checkpoint_id=path)
    state = sharded(0.0)
    holdfast.dcp.load(state, checkpoint_id=path)
    loaded = bool(state["w"].to_local().all())
    torch.distributed.barrier()
    if rank == 0:
        _damage(Path(path), 1)
    torch.distributed.barrier()
    state = sharded(0.0)
    try:
        holdfast.dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:
        return [loaded, "DATA_LOSS" in str(error), not state["w"].to_local().any()]
    return [loaded]


def test_damage_that_one_rank_finds_changes_nothing_on_the_others(tmp_path: Path) -> None:
    assert dcp_ranks.run_ranks(2, tmp_path, _two, str(tmp_path / "s")) == [[True] * 3] * 2
