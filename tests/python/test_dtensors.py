"""Plain saves of DTensors: what each rank has of one comes back only to where it belongs."""

from __future__ import annotations

import os
from pathlib import Path

import dcp_ranks
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast

WHOLE = torch.arange(64.0).reshape(8, 8)


def _into_other_layouts(rank: int, directory: str) -> dict[str, str]:
    square = DeviceMesh("cpu", [[0, 1], [2, 3]])
    turned = DeviceMesh("cpu", [[0, 2], [1, 3]])
    row = DeviceMesh("cpu", [0, 1, 2, 3])
    saved = distribute_tensor(WHOLE, square, [Shard(0), Shard(1)])
    path = os.path.join(directory, "sharded")
    holdfast.save_async({"w": saved}, path).wait(60)
    whole = os.path.join(directory, "whole")
    holdfast.save_async({"w": WHOLE[:4, :4].contiguous()}, whole).wait(60)
    told = {}
    for name, source, target in (
        ("other placements", path, distribute_tensor(torch.zeros(8, 8), square, [Shard(1), Shard(0)])),
        ("other order of ranks", path, distribute_tensor(torch.zeros(8, 8), turned, [Shard(0), Shard(1)])),
        ("replicas", path, distribute_tensor(torch.zeros(4, 4), row, [Replicate()])),
        ("plain", path, torch.zeros(4, 4)),
        ("from plain", whole, distribute_tensor(torch.zeros(8, 8), square, [Shard(0), Shard(1)])),
    ):
        try:
            holdfast.load(source, into={"w": target})
            told[name] = "loaded"
        except holdfast.Error as error:
            told[name] = str(error)
    # The same elements on every rank, written in another way.
    again = distribute_tensor(torch.zeros(8, 8), DeviceMesh("cpu", [[[0], [1]], [[2], [3]]]),
                              [Shard(0), Shard(1), Shard(0)])
    holdfast.load(path, into={"w": again})
    assert torch.equal(again.to_local(), saved.to_local())
    replicas = distribute_tensor(torch.zeros(4, 4), row, [Replicate()])
    holdfast.load(whole, into={"w": replicas})
    assert torch.equal(replicas.to_local(), WHOLE[:4, :4])
    return told


def test_a_shard_is_not_loaded_into_another_layout(tmp_path: Path) -> None:
    for rank, told in enumerate(dcp_ranks.run_ranks(4, tmp_path, _into_other_layouts, str(tmp_path))):
        for name, said in told.items():
            if name == "other order of ranks" and rank in (0, 3):
                assert said == "loaded"  # they are where they were
                continue
            assert said.startswith("load w: it was saved as a "), (rank, name, said)
            assert "holdfast.dcp" in said and said.endswith("[INVALID_ARGUMENT]")
        assert "placed (S(0), S(1)) on a mesh of [2, 2]" in told["other placements"]
        assert "placed (S(1), S(0)) on a mesh of [2, 2]" in told["other placements"]
        assert "the target is a tensor of shape [4, 4]" in told["plain"]


def _replicas_and_shards(rank: int, directory: str) -> None:
    mesh = DeviceMesh("cpu", [[0], [1]])
    alone = DeviceMesh("cpu", [rank], _init_backend=False)  # as a stage of a pipeline has one
    everywhere = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))

    def state_of(value: float) -> dict[str, DTensor]:
        return {
            "replicas": distribute_tensor(everywhere * value, mesh, [Replicate(), Shard(0)]),
            "shards": distribute_tensor(WHOLE * value, mesh, [Shard(0), Replicate()]),
            "stage": DTensor.from_local(torch.full((9,), value * (rank + 1)), alone, [Replicate()]),
        }

    path = os.path.join(directory, "s1")
    saved, into = state_of(1), state_of(0)
    holdfast.save_async(saved, path).wait(60)
    holdfast.load(path, into=into)
    for name, tensor in saved.items():
        assert torch.equal(into[name].to_local(), tensor.to_local()), name


def test_replicas_of_a_dtensor_are_saved_once(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _replicas_and_shards, str(tmp_path))
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "s1").glob("*.safetensors")}
    assert sizes.pop("model-replicas.safetensors") > 1 << 20
    assert max(sizes.values()) < 1 << 16
    assert holdfast.verify(tmp_path / "s1")["verdict"] == "sound"


def _into_a_saved_one(rank: int, directory: str) -> str:
    weight = distribute_tensor(WHOLE, DeviceMesh("cpu", [0]), [Replicate()]).requires_grad_()
    path = os.path.join(directory, "s")
    holdfast.save_async({"w": weight}, path).wait(60)
    squares = (weight * weight).sum()
    holdfast.load(path, into={"w": weight})
    try:
        squares.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_load_between_forward_and_backward_is_seen_by_backward(tmp_path: Path) -> None:
    (told,) = dcp_ranks.run_ranks(1, tmp_path, _into_a_saved_one, str(tmp_path))
    assert "modified by an inplace operation" in told


def _fsdp_resumes(rank: int, directory: str) -> None:
    def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        fully_shard(model, mesh=DeviceMesh("cpu", [0, 1]))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        model(torch.full((3, 4), float(number))).square().sum().backward()
        optimizer.step()

    model, optimizer = start()
    step(model, optimizer, 1)
    path = os.path.join(directory, "s")
    holdfast.save_async({"model": model, "optimizer": optimizer}, path).wait(60)
    step(model, optimizer, 2)
    other, its_optimizer = start()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    holdfast.load(path, into={"model": other, "optimizer": its_optimizer})
    assert all(isinstance(s["exp_avg"], DTensor) for s in its_optimizer.state.values())
    step(other, its_optimizer, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
    plain = torch.nn.Linear(4, 8)
    try:
        holdfast.load(path, into={"optimizer": torch.optim.AdamW(plain.parameters())}, strict=False)
        raise AssertionError("loaded into an optimizer of plain parameters")
    except holdfast.Error as error:
        assert error.code == "FAILED_PRECONDITION" and "holdfast.dcp" in error.message


def test_a_sharded_models_optimizer_resumes_before_its_first_step(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _fsdp_resumes, str(tmp_path))
    with pytest.raises(holdfast.Error, match="differs over the 2 ranks.*save with holdfast.dcp"):
        holdfast.load(tmp_path / "s")
