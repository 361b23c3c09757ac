"""Saves of Megatron-Core through Holdfast: both dialects, synchronous and not, with and without known plans."""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_jobs import State, finalize, fresh, queue_of, run, save, strategy_of

import holdfast
import holdfast.dcp
import holdfast.megatron

ways = pytest.mark.parametrize("way", ["synchronous", "mcore", "nvrx"])
# Also with the oldest Megatron-Core (test_megatron_oldest.py).
every_version = pytest.mark.every_version
worlds = pytest.mark.parametrize("world_size", [1, 2])


def _save(way: str, state: State, directory: str, strategy: Any, *, trains: bool = False, **options: Any) -> Any:
    """Saves; returns the queue in which the request is, where there is one.

    With `trains`, the state changes between the call and the scheduling, too.
    """
    if way == "synchronous":
        save(state, directory, strategy, **options)
        return None
    request = save(state, directory, strategy, async_sharded_save=True, async_strategy=way, **options)
    if trains:
        state.train()
    queue = queue_of(way)
    queue.schedule_async_request(request)
    return queue


def _check(directory: str, state: State) -> None:
    """The checkpoint is there, proven, and has the state."""
    assert state.wrong_elements_in(directory) == 0
    assert holdfast.dcp.verify(directory)["verdict"] == "sound"
    assert holdfast.verify(directory)["verdict"] == "sound"
    assert os.path.exists(f"{directory}/metadata.json")


def saves(rank: int, directory: str, way: str) -> None:
    holdfast.megatron.install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    has_integrity = "verify_integrity" in inspect.signature(dist_checkpointing.save).parameters
    for wraps in (False, True):
        strategy = strategy_of()
        if wraps:
            strategy = FullyParallelSaveStrategyWrapper(strategy)
        state, saved = State(3), State(3)
        path = fresh(f"{directory}/{wraps}")
        queue = _save(way, state, path, strategy, trains=True, verify_integrity=True)
        state.train()
        if queue is not None:
            finalize(queue)
        _check(path, saved)
        assert json.loads(Path(path, "metadata.json").read_text())["sharded_backend"] == "torch_dist"
        assert os.path.exists(f"{path}/integrity.json") == has_integrity


@every_version
@ways
@worlds
def test_a_save_has_the_state_of_the_call(way: str, world_size: int, tmp_path: Path) -> None:
    run(world_size, tmp_path, saves, str(tmp_path / "run"), way)


def _noted(made: list[str], name: str, real: Any, *args: Any, **kwargs: Any) -> Any:
    made.append(name)
    return real(*args, **kwargs)


def _exchanges() -> list[str]:
    """Notes every exchange of this process with other ranks, from now on."""
    made: list[str] = []
    for name in ("all_reduce", "all_gather_object", "gather_object", "broadcast", "broadcast_object_list",
                 "scatter_object_list", "barrier", "all_gather"):  # fmt: skip
        setattr(dist, name, functools.partial(_noted, made, name, getattr(dist, name)))
    return made


def _known_plans(rank: int, directory: str, way: str) -> None:
    holdfast.megatron.install()
    strategy, queue = strategy_of(cached_metadata=True), queue_of(way)
    for number in range(4):
        state, saved = State(number), State(number)
        path = fresh(f"{directory}/iter_{number}")
        made = _exchanges()
        request = save(state, path, strategy, validate_access_integrity=False, async_sharded_save=True, async_strategy=way)
        assert bool(made) == (number < 2), made
        queue.schedule_async_request(request)
        state.train()
        finalize(queue)
        _check(path, saved)
    # Into a directory with a checkpoint: nothing of it stays.
    queue.schedule_async_request(save(State(9), path, strategy, validate_access_integrity=False, async_sharded_save=True,
                                      async_strategy=way))  # fmt: skip
    finalize(queue)
    _check(path, State(9))
    files = [name for name in os.listdir(path) if name.endswith(".distcp")]
    assert sorted(files) == [f"__{r}_1.distcp" for r in range(dist.get_world_size())]


@every_version
@pytest.mark.parametrize("way", ["mcore", "nvrx"])
def test_a_known_plan_needs_no_exchange(way: str, tmp_path: Path) -> None:
    run(2, tmp_path, _known_plans, str(tmp_path / "run"), way)


def _resume(rank: int, directory: str, way: str) -> None:
    """Saves by the plans of the checkpoint that was loaded, as a training does that starts again."""
    holdfast.megatron.install()
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )

    first, second = fresh(f"{directory}/1"), fresh(f"{directory}/2")
    queue = _save(way, State(1), first, TorchDistSaveShardedStrategy())
    finalize(queue)
    load = TorchDistLoadShardedStrategy(cache_metadata=True)
    from megatron.core.dist_checkpointing import load as load_checkpoint

    load_checkpoint(State(0).sharded(), first, load)
    strategy = TorchDistSaveShardedStrategy(cached_metadata=True)
    strategy.cached_global_metadata = load.cached_global_metadata
    finalize(_save(way, State(2), second, strategy))
    of = strategy if way == "mcore" else strategy._metadata_cache
    assert of.validated_loaded_metadata_reuse
    _check(second, State(2))


@pytest.mark.parametrize("way", ["mcore", "nvrx"])
def test_the_plans_of_a_loaded_checkpoint_are_used(way: str, tmp_path: Path) -> None:
    run(2, tmp_path, _resume, str(tmp_path / "run"), way)


def _apart(rank: int, directory: str) -> None:
    holdfast.megatron.install()
    from megatron.core.dist_checkpointing import remove_sharded_tensors

    path = fresh(directory)
    strategy = strategy_of(separation_hint="head.")
    for number in range(2):
        finalize(_save("mcore", State(number), path, strategy))
        _check(path, State(number))
        found = {name for name in os.listdir(path) if name.endswith(".distcp")}
        assert found == {f"__0_{number}.distcp", f"__1_{number}.distcp", f"head.__0_{number}.distcp"}
    of_reader = {"head.replica": torch.zeros(100)}
    reader = holdfast.dcp.StorageReader(path)
    torch.distributed.checkpoint.load(of_reader, storage_reader=reader)
    assert reader.report["verified"]
    assert bool((of_reader["head.replica"] == 1).all())
    dist.barrier()
    if rank == 0:
        remove_sharded_tensors(path, "head.")
        assert not [name for name in os.listdir(path) if name.startswith("head.")]


def test_a_separation_hint_makes_a_file_of_its_own(tmp_path: Path) -> None:
    run(2, tmp_path, _apart, str(tmp_path / "run"))


def _formats(rank: int, directory: str) -> None:
    """What `megatron.training` does for the formats torch_dcp and fsdp_dtensor."""
    holdfast.megatron.install()
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    for dialect in ("mcore", "nvrx"):
        _, names = get_async_strategy(dialect)
        queue = names["AsyncCallsQueue"]()
        for number in range(2):
            path = fresh(f"{directory}/{dialect}-{number}")
            state = {"model": {"w": torch.full((1000,), float(rank + number))}, "iteration": number}
            writer = names["FileSystemWriterAsync"](path, thread_count=2, use_msc=False)
            planned = names["save_state_dict_async_plan"](
                state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True
            )
            fn, preload, arguments = writer.get_save_function_and_args()
            request = names["AsyncRequest"](fn, arguments, [lambda p=planned, f=names: f["save_state_dict_async_finalize"](*p)],
                                            async_fn_kwargs={}, preload_fn=preload)  # fmt: skip
            queue.schedule_async_request(request)
            state["model"]["w"].fill_(-1)
            finalize(queue)
            loaded = {"model": {"w": torch.zeros(1000)}, "iteration": -1}
            torch.distributed.checkpoint.load(loaded, checkpoint_id=path)
            assert loaded["iteration"] == number
            assert float(loaded["model"]["w"][5]) in (number, number + 1)
            assert holdfast.dcp.verify(path)["verdict"] == "sound"


def test_the_other_formats_use_the_same_function(tmp_path: Path) -> None:
    run(2, tmp_path, _formats, str(tmp_path / "run"))


def _without_patch(rank: int, directory: str) -> None:
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    stock = {name: value for name, value in vars(strategies).items() if callable(value)}
    strategy = holdfast.megatron.SaveStrategy("torch_dist", 1, cached_metadata=True)
    wrapped = FullyParallelSaveStrategyWrapper(holdfast.megatron.SaveStrategy("torch_dist", 1))
    for number, used in enumerate([strategy, strategy, wrapped, strategy]):
        path = fresh(f"{directory}/{number}")
        if number == 1:
            _save("synchronous", State(number), path, used)
        else:
            request = save(State(number), path, used, async_sharded_save=True, async_strategy="mcore")
            assert type(request) is strategies.AsyncRequest
            request.execute_sync()
        _check(path, State(number))
    assert {name: value for name, value in vars(strategies).items() if callable(value)} == stock


@every_version
def test_a_strategy_object_needs_no_patch(tmp_path: Path) -> None:
    run(2, tmp_path, _without_patch, str(tmp_path / "run"))


def _synchronous_memory(rank: int, directory: str) -> int:
    os.environ["HOLDFAST_ARENA_BYTES"] = "0"  # as much as the save asks for
    holdfast.megatron.install()
    _save("synchronous", State(1, columns=1 << 20), fresh(directory), strategy_of())
    assert State(1, columns=1 << 20).wrong_elements_in(directory) == 0
    return holdfast.staging()["arena_bytes"]


@every_version
def test_a_synchronous_save_streams(tmp_path: Path) -> None:
    (arena_bytes,) = run(1, tmp_path, _synchronous_memory, str(tmp_path / "run"))
    assert 0 < arena_bytes < 200 << 20  # of a state of 256 MiB


class Quantized(torch.Tensor):
    """As Transformer Engine's: it looks like floats, and only it knows how to become some."""

    def dequantize(self) -> torch.Tensor:
        return torch.full(self.shape, 5.0)


def _special_writers(rank: int, directory: str) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from holdfast import _devices
    from holdfast.megatron.planning import finalize as commit
    from holdfast.megatron.planning import plan_mcore
    from holdfast.megatron.writer import FileSystemWriterAsync

    device_of = _devices.device_of
    writer = FileSystemWriterAsync(fresh(directory))
    begin = writer.begin

    def begins(*of_save: Any) -> Any:
        _devices.device_of = device_of
        return begin(*of_save)

    writer.begin = begins
    _devices.device_of = lambda _: object()  # as if the tensor were on one
    commit(*plan_mcore({"w": torch.zeros(10).as_subclass(Quantized)}, writer, planner=DefaultSavePlanner())[0])
    target = {"w": torch.zeros(10)}
    torch.distributed.checkpoint.load(target, checkpoint_id=writer.path)
    assert bool((target["w"] == 5).all())
    stock = FileSystemWriterAsync("msc://bucket/run", thread_count=2, use_cached_data_structure=True)
    assert type(stock).__module__ == "megatron.core.dist_checkpointing.strategies.filesystem_async"


def test_quantized_tensors_and_object_storage(tmp_path: Path) -> None:
    run(1, tmp_path, _special_writers, str(tmp_path / "run"))
