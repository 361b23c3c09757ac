"""What ranks have alike is written once, what they have apart by each, and nothing is dropped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_ranks import on_ranks

import holdfast
from holdfast import _agreement

MIB = 1 << 20
LARGE = MIB // 4  # elements of 4 bytes
SIZES = [2, 3, 8]


def random(seed: int, elements: int = LARGE) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


def ddp(rank: int, step: int) -> dict[str, Any]:
    return {"w": random(step), "moments": {"w": random(step + 1)}, "bias": torch.full((3,), step), "step": step}


def tensor_parallel(rank: int, step: int) -> dict[str, Any]:
    return {"shard": random(100 * step + rank), "norm": random(step), "step": step}


def pipeline(rank: int, step: int) -> dict[str, Any]:
    return {f"stage{rank}": {"w": random(100 * step + rank), "b": torch.full((2,), rank)}, "head": random(step)}


def zero(rank: int, step: int) -> dict[str, Any]:
    # Partitions of different sizes, as the last one of a flat state has.
    return {"w": random(step), "optimizer": {"exp_avg": random(rank + step, LARGE + 10 * rank)}}


def random_state(rank: int, step: int) -> dict[str, Any]:
    return {"w": random(step), "torch_manual_seed": torch.full((16,), rank, dtype=torch.uint8), "seed": rank,
            "python": {rank, step}}


KINDS = {f.__name__: f for f in (ddp, tensor_parallel, pipeline, zero, random_state)}
# Of the tensors, those that are written once.
REPLICATED = {"ddp": 2, "tensor_parallel": 1, "pipeline": 1, "zero": 1, "random_state": 1}


def save_each(rank: int, directory: str, kind: str) -> None:
    state = KINDS[kind]
    for step in (1, 2):  # the second without an exchange of digests
        path = os.path.join(directory, f"s{step}")
        report = holdfast.save_async(state(rank, step), path, step=step).wait(120)
        assert report["tensors_replicated"] == REPLICATED[kind], report
        assert report["tensors_on_some_ranks"] == (2 if kind == "pipeline" else 0)
        dist.barrier()
        assert equal(holdfast.load(path), state(rank, step))


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_loads_what_it_had(kind: str, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, save_each, str(tmp_path), kind)
    for step in (1, 2):
        assert holdfast.verify(tmp_path / f"s{step}")["verdict"] == "sound"


def test_a_job_of_another_size_loads_what_all_ranks_had_alike(tmp_path: Path) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        on_ranks(3, save_each, str(tmp_path / kind), kind)
    path = tmp_path / "ddp" / "s1"
    assert equal(holdfast.load(path), ddp(0, 1))  # small tensors, too: equal bytes in three files
    into = {"w": torch.zeros(LARGE), "moments": {"w": torch.zeros(LARGE)}, "bias": torch.zeros(3, dtype=torch.int64),
            "step": 0}
    assert equal(holdfast.load(path, into=into), ddp(0, 1))
    on_ranks(2, load_ddp, str(path))
    opened = holdfast.open(tmp_path / "tensor_parallel" / "s1")
    assert equal(opened["norm"], random(1))
    with pytest.raises(holdfast.Error, match="load shard of .*differs over the 3 ranks.*rank="):
        opened["shard"]
    with pytest.raises(holdfast.Error, match="load shard of"):
        holdfast.load(tmp_path / "tensor_parallel" / "s1")
    with pytest.raises(holdfast.Error, match="load shard of"):
        holdfast.load(tmp_path / "tensor_parallel" / "s1", into={"shard": torch.zeros(LARGE), "norm": torch.zeros(LARGE), "step": 0})
    assert equal(holdfast.open(tmp_path / "pipeline" / "s1")["head"], random(1))
    with pytest.raises(holdfast.Error, match="load stage0 of"):
        holdfast.load(tmp_path / "pipeline" / "s1")
    assert equal(holdfast.load(tmp_path / "pipeline" / "s1", rank=2), pipeline(2, 1))
    with pytest.raises(holdfast.Error, match="load (torch_manual_seed|seed|python) of"):
        holdfast.load(tmp_path / "random_state" / "s1")
    assert equal(holdfast.open(tmp_path / "random_state" / "s1")["w"], random(1))


def load_ddp(rank: int, path: str) -> None:
    assert equal(holdfast.load(path), ddp(0, 1))


def one_diverges(rank: int, directory: str) -> None:
    def save(name: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        return holdfast.save_async(state, os.path.join(directory, name), **options).wait(120)

    save("s1", ddp(rank, 1))
    state = ddp(rank, 2)
    if rank == 1:
        state["moments"]["w"][LARGE // 2] += 1
    with pytest.raises(holdfast.Error, match=r'rank 1 and rank 0 differ in tensor "moments\.w"') as error:
        save("s2", state)
    assert error.value.code == "FAILED_PRECONDITION"
    dist.barrier()
    report = save("s2", state)
    assert (report["tensors_replicated"], report["tensors_per_rank"]) == (1, 2)
    dist.barrier()
    assert equal(holdfast.load(os.path.join(directory, "s2")), state)
    with pytest.raises(holdfast.Error, match=r"moments\.w: not alike on all ranks") as error:
        save("s3", state, replicas="refuse")
    assert error.value.code == "INVALID_ARGUMENT"
    dist.barrier()
    save("s4", ddp(rank, 4), replicas="refuse")


def test_a_replica_that_diverges_fails_one_save_and_is_kept_by_the_next(tmp_path: Path) -> None:
    on_ranks(3, one_diverges, str(tmp_path))
    assert [c["name"] for c in holdfast.list_checkpoints(tmp_path)] == ["s1", "s2", "s4"]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def only_rank_0_calls(rank: int, directory: str) -> None:
    holdfast.configure(time_liveness_max=7.0)
    lines = _Lines()
    logging.getLogger("holdfast").addHandler(lines)
    path = os.path.join(directory, "s1")
    if rank == 0:
        since = time.monotonic()
        os.chdir(directory)  # a relative path may mean another directory on each rank
        with pytest.raises(holdfast.Error, match="rank 1 has not called save_async.*world_size=1") as error:
            holdfast.save_async(ddp(rank, 1), "s1")
        assert repr(path) in str(error.value)
        assert error.value.code == "DEADLINE_EXCEEDED"
        assert time.monotonic() - since < 30
        assert any("rank 1 has not called save_async" in line for line in lines.lines), lines.lines
        holdfast.save_async(ddp(rank, 1), path, rank=0, world_size=1).wait(60)
    dist.barrier()
    holdfast.save_async({**ddp(rank, 2), "class": _Lines}, os.path.join(directory, "s2")).wait(60)
    assert len([line for line in lines.lines if "allow=" in line]) == (rank == 0), lines.lines


def test_a_save_on_rank_0_alone_says_what_is_wrong(tmp_path: Path) -> None:
    on_ranks(2, only_rank_0_calls, str(tmp_path))
    assert equal(holdfast.load(tmp_path / "s1"), ddp(0, 1))
    assert holdfast.verify(tmp_path / "s2")["verdict"] == "sound"


def one_misses_a_save(rank: int, directory: str) -> None:
    holdfast.configure(time_liveness_max=5.0)
    path = os.path.join(directory, "last")
    for step in range(1, 7):
        missing = {2: 1, 4: 0}.get(step)
        if rank == missing:
            pass  # as after an `except` around the save
        elif missing is not None:
            with pytest.raises(holdfast.Error, match=f"rank {missing} has not called"):
                holdfast.save_async(ddp(rank, step), path, step=step, replace=True)
        else:
            holdfast.save_async(ddp(rank, step), path, step=step, replace=True).wait(60)
        dist.barrier()
        last = step if missing is None else step - 1
        assert equal(holdfast.load(path), ddp(rank, last))
        dist.barrier()
    holdfast.flush()


def test_a_missed_save_harms_no_later_one(tmp_path: Path) -> None:
    on_ranks(2, one_misses_a_save, str(tmp_path))
    assert os.listdir(tmp_path) == ["last"]


def restarts(rank: int, directory: str) -> None:
    path = os.path.join(directory, "last")
    for step in range(1, 8):
        holdfast.save_async(zero(rank, step), path, step=step, replace=True).wait(60)
        assert equal(holdfast.load(path), zero(rank, step))
        if step % 2:
            dist.barrier()
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()
            kept = dist.PrefixStore(f"round{step}", store) if step > 3 else store
            dist.init_process_group("gloo", rank=rank, world_size=2, store=kept)


def test_a_restart_of_the_process_group_harms_no_save(tmp_path: Path) -> None:
    on_ranks(2, restarts, str(tmp_path))


class TakenBack:
    """A store from which another rank removes each key right after a look at it."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._store.set_timeout(timedelta(seconds=5))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def check(self, keys: list[str]) -> bool:
        found = self._store.check(keys)
        for key in keys:
            self._store.delete_key(key)
        return found


def test_an_offer_that_is_taken_back_is_not_waited_for() -> None:
    call = object.__new__(_agreement.Call)
    call._store = object.__new__(_agreement._Store)
    call._store._store, call._offer = TakenBack(), "offer"
    call._store.set("offer", b"attempt")
    began = time.monotonic()
    assert call._take_offer() in ("attempt", None)
    call._store.drop("offer")
    assert call._take_offer() is None
    assert time.monotonic() - began < 4


def counts_keys(rank: int, directory: str) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    calls: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                calls.append(name)
                return getattr(store, name)(*arguments)

            return call

    holdfast.save_async(ddp(rank, 1), os.path.join(directory, "s1")).wait(60)
    dist.barrier()
    dist.distributed_c10d._get_default_store = lambda: Counted()
    before = store.num_keys()
    dist.barrier()
    for step in (2, 3, 4):
        calls.clear()
        holdfast.save_async(ddp(rank, step), os.path.join(directory, f"s{step}")).wait(60)
        assert len(calls) < 30, calls
    dist.barrier()
    assert store.num_keys() <= before + 4  # of the barriers
    dist.barrier()


def test_a_save_leaves_no_key_and_makes_a_fixed_number_of_calls(tmp_path: Path) -> None:
    on_ranks(4, counts_keys, str(tmp_path))


def other_steps(rank: int, directory: str) -> None:
    with pytest.raises(holdfast.Error, match="rank 0 saves step 0, rank 1 step 1"):
        holdfast.save_async(ddp(rank, 1), os.path.join(directory, "s1"), step=rank)
    dist.barrier()
    holdfast.save_async(ddp(rank, 1), os.path.join(directory, "s1"), step=2).wait(60)


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    on_ranks(2, other_steps, str(tmp_path))


def without_agreement(rank: int, directory: str) -> None:
    path = os.path.join(directory, "s1")
    with pytest.raises(holdfast.Error, match="pass attempt=, one id on all ranks"):
        holdfast.save_async(ddp(rank, 1), path, rank=rank, world_size=3)
    report = holdfast.save_async(tensor_parallel(rank, 1), path, attempt="0123456789abcdef" * 2).wait(60)
    assert (report["tensors_replicated"], report["tensors_per_rank"]) == (0, 2)
    dist.barrier()
    assert equal(holdfast.load(path), tensor_parallel(rank, 1))


def test_without_an_agreement_every_rank_writes_all_that_it_holds(tmp_path: Path) -> None:
    on_ranks(2, without_agreement, str(tmp_path))
    opened = holdfast.open(tmp_path / "s1")
    assert equal(opened["norm"], random(1))
