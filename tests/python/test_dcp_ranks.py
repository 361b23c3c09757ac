"""holdfast.dcp with several gloo ranks: sharding, resharding, replicas, failures, plan caches."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
import holdfast.dcp
from holdfast import events


class Net(torch.nn.Module):
    """Small, with sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(37, 53)
        self.norm = torch.nn.BatchNorm1d(53)
        self.last = torch.nn.Linear(53, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


class AppState(Stateful):
    """As in the framework's tutorial."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )  # fmt: skip


def sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 37)).sum().backward()
        optimizer.step()


def whole(state: Any) -> Any:
    """All of a state on every rank, as plain tensors."""
    if isinstance(state, DTensor):
        return state.full_tensor().clone()
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    return state


def equal(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            equal(a[key], b[key], f"{path}.{key}")
    else:
        assert a == b, path


def _save(rank: int, path: str, reference: str, way: str) -> None:
    model, optimizer = sharded(1)
    train(model, optimizer, 2)
    state = {"app": AppState(model, optimizer)}
    expected = whole(state["app"].state_dict())
    if way == "save":
        dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
    else:
        future = holdfast.dcp.async_save(state, checkpoint_id=path)
        train(model, optimizer, 2)  # must not be seen in the checkpoint
        future.result()
    if rank == 0:
        torch.save(expected, reference)


def _load(rank: int, path: str, reference: str, ours: bool) -> dict[str, Any]:
    model, optimizer = sharded(7)
    app = AppState(model, optimizer)
    reader = holdfast.dcp.StorageReader(path) if ours else None
    dcp.load({"app": app}, checkpoint_id=path, storage_reader=reader)
    loaded = whole(app.state_dict())
    equal(loaded, torch.load(reference))
    return reader.report if reader else {}


def test_fully_sharded_state_is_saved_by_2_and_loaded_by_2_1_and_3(tmp_path: Path) -> None:
    for way in ("save", "async"):
        path, reference = tmp_path / f"{way}-4", str(tmp_path / "reference")
        dcp_ranks.run_ranks(2, tmp_path, _save, str(path), reference, way)
        assert holdfast.dcp.verify(path)["verdict"] == "sound"
        assert holdfast.verify(path)["verdict"] == "sound"
        for world in (2, 1, 3):
            reports = dcp_ranks.run_ranks(world, tmp_path, _load, str(path), reference, True)
            assert all(r["verified"] and r["bytes"] for r in reports)
    dcp_ranks.run_ranks(3, tmp_path, _load, str(path), reference, False)


def _save_replicas(rank: int, path: str) -> None:
    torch.manual_seed(0)
    state = {"same": torch.randn(1000), "more": torch.randn(500), "number": 5}
    holdfast.dcp.async_save(state, checkpoint_id=path).result()


def test_replicas_are_written_by_one_rank_only(tmp_path: Path) -> None:
    path = tmp_path / "replicas"
    dcp_ranks.run_ranks(2, tmp_path, _save_replicas, str(path))
    manifests = [json.loads(p.read_text()) for p in path.glob("rank-*.manifest.json")]
    assert len({m["attempt"] for m in manifests}) == 1
    names = [t["name"] for m in manifests for t in m["tensors"] if not t["name"].startswith("holdfast:")]
    assert sorted(names) == ["more", "number", "same"]
    loaded = {"same": torch.zeros(1000), "more": torch.zeros(500), "number": 0}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path), no_dist=True)
    assert loaded["number"] == 5
    torch.manual_seed(0)
    assert torch.equal(loaded["same"], torch.randn(1000))


# ---- Failures.


def _fail_on_rank_1(rank: int, path: str) -> dict[str, Any]:
    import resource
    import signal

    from torch.distributed.checkpoint.api import CheckpointException

    state = {f"r{rank}": torch.full((5000,), float(rank)), "step": 1}
    holdfast.dcp.async_save(state, checkpoint_id=path).result()
    dist.barrier()
    before = sorted(os.listdir(path))
    dist.barrier()  # the next save of a rank that is ahead writes there
    result: dict[str, Any] = {}
    for way in ("async", "sync"):
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, old[1]))  # above the job table, below the file
        begin = time.monotonic()
        told: list[str] = []
        observer = events.Handle(lambda s, _, e, told=told: told.append(events.outcome(s, e)))
        try:
            if way == "async":
                holdfast.dcp.async_save({**state, "step": 2}, checkpoint_id=path).result()
            else:
                dcp.save({**state, "step": 2}, storage_writer=holdfast.dcp.StorageWriter(path))
        except CheckpointException as failure:
            (failed,) = failure.failures
            error = failure.failures[failed][0]
            result[way] = (failed, error.errno, str(error), time.monotonic() - begin)
        observer.close()
        result["told", way] = told
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    dist.barrier()
    result["before"] = before
    result["left"] = sorted(os.listdir(path))
    loaded = {f"r{rank}": torch.zeros(5000), "step": 0}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path))
    result["step"] = loaded["step"]
    holdfast.dcp.async_save({**state, "step": 3}, checkpoint_id=path).result()
    dist.barrier()
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path))
    result["after"] = loaded["step"]
    result["final"] = sorted(os.listdir(path))
    return result


def test_a_failing_rank_fails_the_save_on_all_ranks_with_rank_file_and_errno(
    tmp_path: Path,
) -> None:
    results = dcp_ranks.run_ranks(2, tmp_path, _fail_on_rank_1, str(tmp_path / "run"))
    for result in results:
        for way in ("async", "sync"):
            failed, errno, message, seconds = result[way]
            assert failed == 1  # as the exception names the rank
            assert errno == 27  # EFBIG
            assert "__1_" in message
            assert seconds < 20
        # A rank whose own data is durable says no better of the checkpoint.
        assert result["told", "async"] == ["failed"]
        # The previous checkpoint is whole; the next save removes what the failed ones left.
        assert set(result["before"]) <= set(result["left"])
        assert (result["step"], result["after"]) == (1, 3)
        assert len(result["final"]) == 6, result["final"]
    assert holdfast.dcp.verify(tmp_path / "run")["verdict"] == "sound"


def _fail_before_writing(rank: int, path: str) -> tuple[int, str]:
    from torch.distributed.checkpoint.api import CheckpointException

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            if rank == 1:
                raise ValueError("rank 1 has lost its data")
            return super().resolve_data(item)

    state = {f"r{rank}": torch.ones(10)}
    future = holdfast.dcp.async_save(state, checkpoint_id=path, planner=Planner())
    try:
        future.result()
    except CheckpointException as failure:
        ((failed, (error, _)),) = failure.failures.items()
        holdfast.flush()  # rank 1 was told at once: only now do the others know why
        return failed, str(error)
    raise AssertionError("the save did not fail")


def test_a_rank_that_fails_before_it_writes_is_known_to_all(tmp_path: Path) -> None:
    path = tmp_path / "run"
    results = dcp_ranks.run_ranks(2, tmp_path, _fail_before_writing, str(path))
    assert results == [(1, "rank 1 has lost its data")] * 2
    assert not (path / ".metadata").exists()


def _die(rank: int, path: str) -> tuple[float, bool]:
    import signal

    state = {f"r{rank}": torch.full((5000,), float(rank)), "step": 1}
    holdfast.dcp.async_save(state, checkpoint_id=path).result()
    dist.barrier()

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_data(item)

    begin = time.monotonic()
    future = holdfast.dcp.async_save({**state, "step": 2}, checkpoint_id=path, planner=Planner())
    error = future.exception(60)
    return time.monotonic() - begin, error is not None


def test_a_rank_that_is_killed_fails_the_others_and_keeps_the_older_checkpoint(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    seconds, failed = dcp_ranks.run_ranks(2, tmp_path, _die, str(path), dying=1)[0]
    assert failed
    assert seconds < 30  # the connection is closed; no time-out has to pass
    loaded = {"r0": torch.ones(5000), "r1": torch.zeros(5000), "step": 0}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path), no_dist=True)
    assert loaded["step"] == 1
    assert (loaded["r1"] == 1).all()


# ---- Plan caches.


def _cached(rank: int, directory: str, ways: str) -> list[bool]:
    from torch.distributed.checkpoint.planner import SavePlanner

    usable = []

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            usable.append(plan.usable)
            return plan

    def save(state: dict[str, Any], name: str) -> None:
        path = os.path.join(directory, name)
        planner = Planner(enable_plan_caching=True)
        if ways == "async":
            holdfast.dcp.async_save(state, checkpoint_id=path, planner=planner).result()
        else:
            writer = holdfast.dcp.StorageWriter(path)
            dcp.save(state, storage_writer=writer, planner=planner)

    def check(state: dict[str, Any], name: str) -> None:
        loaded = {k: torch.zeros_like(v) for k, v in state.items()}
        path = os.path.join(directory, name)
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path))
        equal(state, loaded)
        assert holdfast.dcp.verify(path)["verdict"] == "sound"

    def state_of(value: float, more: int) -> dict[str, Any]:
        return {
            f"r{rank}.{i}": torch.full((100 + more * rank,), value + i + 10 * rank)
            for i in range(3)
        }

    for name, value, more in (
        ("a", 1.0, 0),
        ("b", 2.0, 0),
        ("c", 3.0, 7),
        ("d", 4.0, 7),
        ("d", 5.0, 7),
    ):
        # "c" changes rank 1's plan, and not rank 0's.
        state = state_of(value, more)
        save(state, name)
        dist.barrier()
        check(state, name)
        dist.barrier()
    for cache in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan",
                  "_cached_metadata", "_cached_final_save_plan"):  # fmt: skip
        getattr(SavePlanner, cache).clear()
    return usable


def test_cached_plans_are_used_and_never_lead_to_an_older_saves_files(tmp_path: Path) -> None:
    for ways in ("async", "sync"):
        directory = tmp_path / ways
        directory.mkdir()
        usable = dcp_ranks.run_ranks(2, tmp_path, _cached, str(directory), ways)
        assert usable[0] == [True, False, False, False, False]
        assert usable[1] == [True, False, True, False, False]


def test_plans_of_a_save_that_failed_are_not_used_for_the_next(tmp_path: Path) -> None:
    class Full(holdfast.dcp.StorageWriter):
        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            raise OSError(28, "No space left on device")

    def save(state: dict[str, Any], name: str, writer: type = holdfast.dcp.StorageWriter) -> None:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        holdfast.dcp.async_save(state, storage_writer=writer(tmp_path / name), planner=planner).result()

    state = {"w": torch.arange(10.0), "more": torch.arange(5.0)}
    save(state, "a")
    with pytest.raises(dcp.api.CheckpointException, match="No space left"):
        save({"other": torch.ones(20)}, "b", Full)
    save(state, "c")
    loaded = {k: torch.zeros_like(v) for k, v in state.items()}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(tmp_path / "c"))
    equal(state, loaded)


# ---- The tutorial's three loops.


def _tutorial(rank: int, directory: str, loop: str) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    model, optimizer = sharded(0)
    future = None
    stager = DefaultStager(StagingOptions(False, False, True, False))
    group = dist.new_group()
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(step)
        loss = model(torch.randn(8, 37)).sum()
        loss.backward()
        if loop == "both futures" and future is not None:
            future.staging_completion.result()
        optimizer.step()
        if future is not None:
            getattr(future, "upload_completion", future).result()
        state = {"app": AppState(model, optimizer)}
        path = os.path.join(directory, f"step-{step}")
        if rank == 0:
            os.makedirs(directory, exist_ok=True)
        reference = whole(state["app"].state_dict())
        if loop == "one future":
            future = holdfast.dcp.async_save(state, checkpoint_id=path)
        elif loop == "writer":
            writer = holdfast.dcp.StorageWriter(path)
            # Stock plans in the background: it needs a group that the training does not use.
            future = dcp.async_save(state, storage_writer=writer, process_group=group)
        else:
            future = holdfast.dcp.async_save(
                state,
                checkpoint_id=path,
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                async_stager=stager,
            )
        if step == 3:
            train(model, optimizer, 1)
            getattr(future, "upload_completion", future).result()
            again, fresh = sharded(5)
            app = AppState(again, fresh)
            dcp.load({"app": app}, storage_reader=holdfast.dcp.StorageReader(path))
            equal(reference, whole(app.state_dict()))
    stager.close()


def test_the_tutorials_three_loops_run(tmp_path: Path) -> None:
    for loop in ("one future", "writer", "both futures"):
        dcp_ranks.run_ranks(2, tmp_path, _tutorial, str(tmp_path / loop), loop)
        for step in range(4):
            report = holdfast.dcp.verify(tmp_path / loop / f"step-{step}")
            assert report["verdict"] == "sound"


def _overlapping(rank: int, directory: str) -> None:
    """Saves in flight while the training uses collectives of its own and plans further saves."""
    futures = []
    for step in range(6):
        state = {f"r{rank}": torch.full((50_000,), float(step)), "all": torch.arange(100.0) + step}
        path = os.path.join(directory, f"step-{step}")
        futures.append(holdfast.dcp.async_save(state, checkpoint_id=path))
        for _ in range(20):
            total = torch.ones(3)
            dist.all_reduce(total)
            assert total[0] == dist.get_world_size()
    for future in futures:
        future.result()


def test_saves_in_flight_do_not_cross_with_the_trainings_collectives(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(3, tmp_path, _overlapping, str(tmp_path / "run"))
    for step in range(6):
        path = tmp_path / "run" / f"step-{step}"
        loaded = {"r0": torch.zeros(50_000), "r2": torch.zeros(50_000), "all": torch.zeros(100)}
        reader = holdfast.dcp.StorageReader(path)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        equal(loaded, {"r0": torch.full((50_000,), float(step)),
                       "r2": torch.full((50_000,), float(step)),
                       "all": torch.arange(100.0) + step})  # fmt: skip


def _subgroup(rank: int, directory: str) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[rank % 2]
    state = {f"r{rank}": torch.full((100,), float(rank))}
    holdfast.dcp.async_save(state, checkpoint_id=f"{directory}/group-{rank % 2}", process_group=mine).result()
    outside = holdfast.Checkpointer(directory, format="dcp", process_group=groups[1 - rank % 2])
    for call in (lambda: outside.save(state, 1), lambda: outside.load(into=state)):
        pytest.raises(holdfast.Error, call).match("this process is not in process_group")


def test_a_process_groups_own_ranks_save_by_themselves(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(3, tmp_path, _subgroup, str(tmp_path))
    for group, ranks in ((0, (0, 2)), (1, (1,))):
        loaded = {f"r{r}": torch.zeros(100) for r in ranks}
        reader = holdfast.dcp.StorageReader(tmp_path / f"group-{group}")
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert all(loaded[f"r{rank}"][0] == rank for rank in ranks)
        assert holdfast.dcp.verify(tmp_path / f"group-{group}")["verdict"] == "sound"


def _unlike_groups(rank: int, directory: str) -> None:
    """Ranks 1 and 2 are in more groups than rank 0, rank 2 in more than rank 1."""
    group = [dist.new_group(members) for members in ([2], [2], [1, 2], [1, 2])][-1]
    if rank:
        holdfast.dcp.save({"x": torch.ones(1)}, checkpoint_id=f"{directory}/some", process_group=group)
    dist.barrier(dist.new_group())  # all ranks can make groups still
    if not rank:  # PyTorch's own could not, from here on
        dist.new_group([rank], use_local_synchronization=True)
    holdfast.dcp.save({"x": torch.ones(1)}, checkpoint_id=f"{directory}/all")


def test_ranks_in_different_numbers_of_groups_save_together(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(3, tmp_path, _unlike_groups, str(tmp_path))
    assert all(holdfast.dcp.verify(tmp_path / name)["verdict"] == "sound" for name in ("some", "all"))


# ---- What a load leaves behind.


def _held() -> dict[str, tuple[int, int, int]]:
    """By device: how many tensors there are, in how much memory of their own, in bytes."""
    import gc

    gc.collect()
    tensors: dict[str, int] = {}
    memory: dict[str, dict[int, int]] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and type(thing).__name__ != "FakeTensor":
            local = thing._local_tensor if isinstance(thing, DTensor) else thing
            storage = local.untyped_storage()
            device = str(local.device)
            tensors[device] = tensors.get(device, 0) + 1
            memory.setdefault(device, {})[storage.data_ptr()] = storage.nbytes()
    return {d: (tensors[d], len(memory[d]), sum(memory[d].values())) for d in tensors}


def _load_and_look(rank: int, path: str, device: str) -> dict[str, dict[str, Any]]:
    """What was there more after loads than before, by device; without a planted bug, and with each."""
    model: torch.nn.Module
    if device == "cpu":
        model, optimizer = sharded(3)
        train(model, optimizer, 1)
    else:  # of a rank alone: gloo has no collectives for it
        model = Net().to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.randn(8, 37, device=device)).sum().backward()
        optimizer.step()
    dcp.save({"app": AppState(model, optimizer)}, storage_writer=holdfast.dcp.StorageWriter(path))

    leaked: list[Any] = []

    def load(leak: str = "") -> None:
        app = AppState(model, optimizer)
        state = app.state_dict()
        dcp.load({"app": state}, storage_reader=holdfast.dcp.StorageReader(path))
        app.load_state_dict(state)
        # The planted bugs: something keeps what was loaded, or moves it where there was less.
        if leak == "copies":
            leaked.append(whole(state))
        elif leak == "views":  # objects, and no memory
            leaked.extend(p.detach() for p in model.parameters())
        elif leak == "elsewhere":
            leaked.append(torch.empty(1000, device="meta"))
        for entry in optimizer.state.values():  # the optimizer's state, moved to the CPU
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    entry[key] = value.to("cpu")

    def more(before: dict[str, tuple[int, int, int]]) -> dict[str, Any]:
        none = (0, 0, 0)
        after = _held()
        return {
            device: (before.get(device, none), now)
            for device, now in after.items()
            if any(x > y for x, y in zip(now, before.get(device, none), strict=True))
        }

    load()
    # A stale reference stays in each round, what a cache or another thread holds in one.
    for _ in range(4):
        before, deadline = _held(), time.monotonic() + 5
        load(), load(), load()
        while (grown := more(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not grown:
            break
    found = {"": grown}
    for leak in ("copies", "views", "elsewhere"):
        load(leak)
        found[leak] = more(before)
        leaked.clear()
    return found


@pytest.mark.planted("keeps_copies", "keeps_views", "keeps_elsewhere")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_load_leaves_no_stale_reference_on_any_device(device: str, tmp_path: Path) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA here")
    ranks = 2 if device == "cpu" else 1
    for found in dcp_ranks.run_ranks(ranks, tmp_path, _load_and_look, str(tmp_path / "run"), device):
        assert found[""] == {}
        # Each stale reference that was planted is found, and where it is.
        for leak, there in (("copies", device), ("views", device), ("elsewhere", "meta")):
            assert any(d.startswith(there) for d in found[leak]), found


# ---- Other shapes of a job.


def _overwrite(rank: int, path: str, seed: int) -> list[str]:
    """A state whose shards are spread over as many ranks as there are, over what was there."""
    torch.manual_seed(seed)
    full = torch.randn(31, 5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    from torch.distributed.tensor import Shard, distribute_tensor

    state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "seed": seed}
    holdfast.dcp.async_save(state, checkpoint_id=path).result()
    dist.barrier()
    return sorted(os.listdir(path))


def test_another_number_of_ranks_overwrites_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for seed, world in enumerate((2, 3, 1)):
        left = dcp_ranks.run_ranks(world, tmp_path, _overwrite, str(path), seed)[0]
        assert len(left) == 2 * world + 2, left
        loaded = {"w": torch.zeros(31, 5), "seed": -1}
        reader = holdfast.dcp.StorageReader(path)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        torch.manual_seed(seed)
        assert torch.equal(loaded["w"], torch.randn(31, 5))
        assert loaded["seed"] == seed
