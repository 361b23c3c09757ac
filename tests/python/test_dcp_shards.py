"""holdfast.dcp with several gloo ranks: shards of other kinds, and ranks that save by themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import holdfast
import holdfast.dcp
from holdfast.dcp import uploads


def _columns(rank: int, path: str, save: bool) -> None:
    """Shards along every dimension, cut anew on load."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    full = torch.randn(23, 19, 7, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if save:
        state = {str(d): distribute_tensor(full, mesh, [Shard(d)]) for d in range(3)}
        dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
        return
    for shift in range(1, 4):
        placements = [Shard(d) for d in range(3)] + [Replicate()]
        state = {
            str(d): distribute_tensor(torch.zeros_like(full), mesh, [placements[(d + shift) % 4]])
            for d in range(3)
        }
        dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path, buffer_bytes=2048))
        for d in range(3):
            assert torch.equal(state[str(d)].full_tensor(), full)


def test_shards_of_any_dimension_are_cut_anew(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    dcp_ranks.run_ranks(2, tmp_path, _columns, path, True)
    dcp_ranks.run_ranks(3, tmp_path, _columns, path, False)


def _own_shards(rank: int, directory: str, way: str) -> None:
    """Each rank saves its shards of DTensors without the other ranks."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    groups = [dist.new_group([r]) for r in range(2)]
    options: dict[str, Any] = {"no_dist": True} if way == "no_dist" else {"process_group": groups[rank]}
    path = Path(directory, f"r{rank}")

    def state(step: int) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.arange(8.0) + 10 * step, mesh, [Shard(0)]), "step": step}

    def check(step: int) -> None:
        for load in (holdfast.dcp.load, dcp.load):
            target = state(9)
            reader = holdfast.dcp.StorageReader(path)
            load(target, storage_reader=reader, **options)
            assert reader.report["verified"] and target["step"] == step
            assert torch.equal(target["w"].to_local(), state(step)["w"].to_local())
        assert holdfast.dcp.verify(path)["verdict"] == "sound"

    for step in (1, 2):
        holdfast.dcp.save(state(step), checkpoint_id=path, **options)
        check(step)
        assert len(list(path.glob("*.distcp"))) == 1
    assert holdfast.dcp.recover(path) == []
    reduce = uploads.Exchange.reduce

    def lost(*_: Any) -> Any:
        raise RuntimeError("lost")

    uploads.Exchange.reduce = lost  # type: ignore[method-assign]
    assert holdfast.dcp.async_save(state(3), checkpoint_id=path, **options).exception(60) is not None  # type: ignore[union-attr]
    uploads.Exchange.reduce = reduce  # type: ignore[method-assign]
    assert holdfast.dcp.recover(path) == [".metadata"]
    check(3)
    whole = {"w": torch.full((8,), -1.0)}
    for load in (holdfast.dcp.load, dcp.load):
        with pytest.raises(CheckpointException, match="r.* has a part of it alone, of the rank that saved it"):
            load(whole, storage_reader=holdfast.dcp.StorageReader(path), **options)
    other = {"w": distribute_tensor(torch.full((8,), -1.0), mesh, [Shard(0)])}
    if rank == 1:  # the checkpoint has nothing of its part
        with pytest.raises(CheckpointException, match="has a part of it alone"):
            holdfast.dcp.load(other, checkpoint_id=Path(directory, "r0"), **options)
    assert (whole["w"] == -1).all() and (other["w"].to_local() == -1).all()
    stock = Path(directory, f"stock{rank}")
    dcp.save(state(1), checkpoint_id=stock, **options)
    with pytest.raises(holdfast.Error, match="no commit record that proves this.*no_dist=True"):
        holdfast.dcp.StorageReader(stock).read_metadata()


@pytest.mark.parametrize("way", ["no_dist", "a group of one rank"])
def test_shards_that_one_rank_saves_alone_are_loaded_by_it(way: str, tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _own_shards, str(tmp_path), way)


def _alone(rank: int, path: str) -> None:
    state = {"w": torch.full((100,), float(rank)), "rank": rank}
    for step in range(2):
        state["step"] = step
        holdfast.dcp.async_save(state, checkpoint_id=path, use_collectives=False).result()
    dist.barrier()
    reader = holdfast.dcp.StorageReader(path)
    loaded = {"w": torch.zeros(100), "rank": -1, "step": -1}
    metadata = reader.read_metadata(rank=rank)
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner(loaded, metadata, True)
    reader.set_up_storage_reader(metadata, True, rank=rank, use_collectives=False)
    reader.read_data(planner.create_local_plan(), planner)
    assert loaded["w"][0] == loaded["rank"] == rank
    assert loaded["step"] == 1
    assert reader.report["verified"]


def test_ranks_may_save_without_collectives(tmp_path: Path) -> None:
    path = tmp_path / "run"
    dcp_ranks.run_ranks(2, tmp_path, _alone, str(path))
    names = sorted(p.name for p in path.iterdir() if p.name[:5] not in ("rank-", "holdf"))
    assert len(names) == 4 and names[:2] == ["__0.metadata", "__0_1.distcp"], names


def _sharded_tensor(rank: int, directory: str) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in range(dist.get_world_size())])

    def make(value: float) -> Any:
        tensor = sharded_tensor.empty(spec, 11, 3)
        for shard in tensor.local_shards():
            shard.tensor.fill_(value + rank)
        return tensor

    group = dist.new_group()
    for way in ("ours", "stock"):
        path = os.path.join(directory, way)
        state = {"s": make(5.0)}
        if way == "ours":
            future = holdfast.dcp.async_save(state, checkpoint_id=path)
        else:
            writer = holdfast.dcp.StorageWriter(path)
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
        for shard in state["s"].local_shards():
            shard.tensor.zero_()
        future.result()
        loaded = {"s": make(0.0)}
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path))
        for shard in loaded["s"].local_shards():
            assert (shard.tensor == 5.0 + rank).all(), way


def test_sharded_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _sharded_tensor, str(tmp_path))


def _same_directory(rank: int, path: str) -> list[str]:
    futures = []
    for step in range(8):
        state = {f"r{rank}": torch.full((20_000 * (rank + 1),), float(step)), "step": step}
        futures.append(holdfast.dcp.async_save(state, checkpoint_id=path))
    for future in futures:
        future.result()
    dist.barrier()
    return sorted(os.listdir(path))


def test_saves_in_flight_into_one_directory_end_with_the_last(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for left in dcp_ranks.run_ranks(3, tmp_path, _same_directory, str(path)):
        assert len(left) == 8, left
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    loaded = {**{f"r{r}": torch.zeros(20_000 * (r + 1)) for r in range(3)}, "step": -1}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path), no_dist=True)
    assert loaded["step"] == 7
    assert all((loaded[f"r{r}"] == 7).all() for r in range(3))
