"""``import holdfast.dcp as dcp`` in the place of torch.distributed.checkpoint."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast.dcp as dcp
from holdfast.dcp import metadata, staging

pytestmark = pytest.mark.filterwarnings("ignore")


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50,), value), "step": int(value)}


def _check(path: Path, value: float, of: Any = dcp) -> None:
    loaded = _state(-1.0)
    of.load(loaded, checkpoint_id=path)
    assert (loaded["w"] == value).all() and loaded["step"] == value


def test_save_load_and_async_save_take_the_frameworks_arguments(tmp_path: Path) -> None:
    saved = dcp.save(_state(1), checkpoint_id=str(tmp_path / "a"), planner=dcp.DefaultSavePlanner(),
                     process_group=None, no_dist=True, use_collectives=True)  # fmt: skip
    assert set(saved.state_dict_metadata) == {"w", "step"}
    dcp.async_save(_state(2), checkpoint_id=tmp_path / "b",
                   async_checkpointer_type=AsyncCheckpointerType.THREAD).result()  # fmt: skip
    dcp.save(_state(3), storage_writer=dcp.StorageWriter(tmp_path / "c"))
    for value, name in enumerate("abc", 1):
        _check(tmp_path / name, value)
        _check(tmp_path / name, value, stock)
        assert dcp.verify(tmp_path / name)["verdict"] == "sound"
    loaded = _state(-1.0)
    dcp.load(loaded, storage_reader=dcp.StorageReader(tmp_path / "a"), planner=dcp.DefaultLoadPlanner())
    assert (loaded["w"] == 1).all()


def test_other_writers_and_urls_go_to_the_framework(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp.save(_state(1), storage_writer=dcp.FileSystemWriter(tmp_path / "a"))
    dcp.async_save(_state(2), storage_writer=dcp.FileSystemWriter(tmp_path / "b")).result()
    for value, name in ((1, "a"), (2, "b")):
        assert not list((tmp_path / name).glob("*.manifest.json"))
        _check(tmp_path / name, value)
    assert len([r for r in caplog.records if "the framework's own" in r.getMessage()]) == 2
    with pytest.raises(BaseException) as caught:
        dcp.save(_state(1), checkpoint_id="nosuch://bucket/x")
    assert not isinstance(caught.value, dcp.reader.Error)


def test_the_functions_are_not_hidden_and_the_other_names_are_there() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("holdfast.dcp.async_save")
    assert callable(dcp.async_save) and callable(dcp.save) and callable(dcp.load)
    assert dcp.FileSystemReader is stock.FileSystemReader
    with pytest.raises(AttributeError):
        _ = dcp.no_such_name


def test_stagers_take_the_frameworks_options(tmp_path: Path) -> None:
    one = dcp.Stager(StagingOptions(use_pinned_memory=True, use_async_staging=False))
    dcp.async_save(_state(1), checkpoint_id=tmp_path / "a", async_stager=one).result()
    stock.async_save(_state(2), checkpoint_id=tmp_path / "b", async_stager=one).result()  # no response
    both = dcp.Stager(StagingOptions(use_async_staging=True))
    response = dcp.async_save(_state(3), checkpoint_id=tmp_path / "c", async_stager=both)
    assert isinstance(response, AsyncSaveResponse)
    response.upload_completion.result()
    for value, name in enumerate("abc", 1):
        _check(tmp_path / name, value)


def test_a_caching_planner_still_works_with_the_stock_writer(tmp_path: Path) -> None:
    class Planner(stock.DefaultSavePlanner):
        pass

    def save(value: float, writer: Any) -> None:
        stock.save(_state(value), storage_writer=writer, planner=Planner(enable_plan_caching=True))

    try:
        save(1, dcp.StorageWriter(tmp_path / "a"))
        save(2, stock.FileSystemWriter(tmp_path / "b"))
        save(3, dcp.StorageWriter(tmp_path / "c"))
    finally:
        for cache in (v for k, v in vars(SavePlanner).items() if k.startswith("_cached_")):
            cache.pop("Planner", None)
    for value, name in enumerate("abc", 1):
        _check(tmp_path / name, value, stock)


def test_metadata_with_the_ranks_plans_is_read(tmp_path: Path) -> None:
    class Planner(stock.DefaultSavePlanner):
        """As Megatron's, which keeps the plans of all ranks in the metadata."""

        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            plans, found = super().create_global_plan(all_plans)
            found.all_local_plans = all_plans  # type: ignore[attr-defined]
            return plans, found

    dcp.save(_state(1), checkpoint_id=tmp_path / "ours", planner=Planner())
    stock.save(_state(1), checkpoint_id=tmp_path / "stock", planner=Planner())
    for name in ("ours", "stock"):
        data = (tmp_path / name / ".metadata").read_bytes()
        found = metadata.read(tmp_path / name / ".metadata")
        assert found.all_local_plans == pickle.loads(data).all_local_plans  # type: ignore[attr-defined]
        _check(tmp_path / name, 1)
    assert dcp.verify(tmp_path / "ours")["verdict"] == "sound"


def _staged(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"d": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("from_local moves the stand-in to the mesh's device")

    DTensor.from_local = refused  # type: ignore[method-assign]
    copied = staging.stage(state)["d"]
    assert isinstance(copied, DTensor) and copied.placements == state["d"].placements
    assert torch.equal(copied._local_tensor, state["d"]._local_tensor)
    assert copied._local_tensor.data_ptr() != state["d"]._local_tensor.data_ptr()
    assert copied.shape == state["d"].shape


def test_staging_moves_no_stand_in_to_the_meshs_device(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _staged)
