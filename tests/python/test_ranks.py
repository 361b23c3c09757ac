"""Plain saves of several ranks: what is the same everywhere once, what is each rank's own by each."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dcp_ranks  # its server, which has imported PyTorch, forks the ranks
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import holdfast
from holdfast import _lineage, _native, loading

RANKS = 2


def _begin(rank: int, ranks: int, port: int, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    body(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int, body: Callable[..., None], *arguments: Any, join: bool = True) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.start_processes(
        _begin, (ranks, store.port, body, arguments), nprocs=ranks, join=join, start_method="forkserver"
    )
    if context is not None:
        context.store = store  # the ranks need its server
    return context


def state_of(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {"weight": torch.randn(1 << 18, generator=generator)},
        "rng": torch.full((16,), rank + 10 * step, dtype=torch.uint8),
        "sampler": {"position": torch.tensor(rank), "epoch": step},
        "step": step,
    }


def save_and_load(rank: int, directory: str) -> None:
    path = os.path.join(directory, "s1")
    report = holdfast.save_async(state_of(rank, 1), path, step=1).wait(60)
    assert report["world_size"] == RANKS
    assert report["tensors_replicated"] == 1 and report["tensors_per_rank"] == 2
    assert report["tensors_on_some_ranks"] == 0
    loaded = holdfast.load(path)
    assert torch.equal(loaded["model"]["weight"], state_of(rank, 1)["model"]["weight"])
    assert loaded["rng"].tolist() == [rank + 10] * 16
    assert int(loaded["sampler"]["position"]) == rank
    into = {"model": {"weight": torch.zeros(1 << 18)}, "rng": torch.zeros(16, dtype=torch.uint8),
            "sampler": {"position": torch.tensor(-1), "epoch": 0}, "step": 0}
    holdfast.load(path, into=into)
    assert int(into["sampler"]["position"]) == rank


def test_replicas_are_saved_once_and_random_state_by_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ranks(RANKS, save_and_load, str(tmp_path))
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "s1").glob("*.safetensors")}
    assert sizes.pop("model-replicas.safetensors") > 1 << 20
    assert len(sizes) == RANKS and max(sizes.values()) < 1 << 16
    assert holdfast.verify(tmp_path / "s1")["verdict"] == "sound"
    opened: list[int] = []
    real = _native.CheckpointReader.open

    def count(path: str, rank: int) -> _native.CheckpointReader:
        opened.append(rank)
        return real(path, rank)

    # The manifest of every rank was read for each reader.
    monkeypatch.setattr(loading, "_native", SimpleNamespace(CheckpointReader=SimpleNamespace(open=count)))
    one = holdfast.open(tmp_path / "s1", rank=1)
    assert opened == [0]
    assert one["rng"].tolist() == [11] * 16


def late_in_a_file_store(rank: int, directory: str) -> None:
    if rank == 1:
        time.sleep(2)
    holdfast.save_async(state_of(rank, 1), os.path.join(directory, "s1"), step=1).wait(60)


def test_a_late_rank_is_waited_for_whatever_the_store(tmp_path: Path) -> None:
    """The time-out of a FileStore has no class of its own."""
    dcp_ranks.run_ranks(RANKS, tmp_path, late_in_a_file_store, str(tmp_path))
    assert holdfast.verify(tmp_path / "s1")["verdict"] == "sound"


def threads_save(rank: int, directory: str) -> None:
    """Three threads of each rank, which do not wait for each other, save at once."""
    of = [holdfast.Checkpointer(directory, name=f"{thread}-{{step}}", keep_last=2) for thread in range(3)]
    in_calls = [0.0] * len(of)

    def save_all(thread: int) -> None:
        for step in range(12):
            time.sleep(0.01 * ((thread + rank) % 3))
            before = time.monotonic()
            of[thread].save_async({"w": torch.full((1 << 19,), float(100 * step + 10 * thread + rank))}, step)
            in_calls[thread] += time.monotonic() - before

    threads = [threading.Thread(target=save_all, args=(thread,)) for thread in range(len(of))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for checkpointer in of:
        checkpointer.wait(60)
    assert max(in_calls) < 12 * 0.5, in_calls
    dist.barrier()
    for thread, checkpointer in enumerate(of):
        assert float(checkpointer.load(11)["w"][0]) == 1100 + 10 * thread + rank
        checkpointer.close()
    assert not (rank == 0 and [n for n in os.listdir(directory) if "partial" in n])


def test_threads_of_the_ranks_save_at_once(tmp_path: Path) -> None:
    """A thread that waits for another rank keeps no other thread from its save."""
    on_ranks(RANKS, threads_save, str(tmp_path))


def one_rank_has_no_memory(rank: int, directory: str) -> None:
    checkpointer = holdfast.Checkpointer(
        directory, when_full="skip", arena_bytes=(64, 16)[rank] << 20, bytes_per_second_max=8 << 20
    )
    state = {"w": torch.full((3 << 20,), float(rank))}
    saves = [checkpointer.save_async(state, step) for step in range(4)]
    checkpointer.wait(60)  # raises nothing of the saves that were left out
    assert [save.skipped for save in saves] == [False, True, True, True]
    for save in saves[1:]:
        with pytest.raises(holdfast.Error, match="rank 1 failed: .*skipped" if rank == 0 else "skipped") as error:
            save.wait(60)
        assert error.value.code == "UNAVAILABLE"
    assert [c["step"] for c in checkpointer.list()] == [0]
    checkpointer.save(state, 4)
    dist.barrier()
    checkpointer.close()


def test_a_save_that_one_rank_skips_is_skipped_by_all(tmp_path: Path) -> None:
    on_ranks(RANKS, one_rank_has_no_memory, str(tmp_path))


def save_shards(rank: int, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.arange(64.0).reshape(8, 8)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    path = os.path.join(directory, "s1")
    holdfast.save_async({"w": sharded}, path).wait(60)
    target = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0)])
    holdfast.load(path, into={"w": target})
    assert torch.equal(target.to_local(), sharded.to_local())


def test_local_shards_are_each_ranks_own(tmp_path: Path) -> None:
    on_ranks(RANKS, save_shards, str(tmp_path))
    assert holdfast.verify(tmp_path / "s1")["verdict"] == "sound"


def ranks_resume_from_two_checkpoints(rank: int, directory: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    checkpointer = holdfast.Checkpointer(directory)
    for step in (1, 2, 3):
        checkpointer.save({"w": torch.full((10,), float(step))}, step)
    dist.barrier()
    assert not said
    _lineage._points.clear()  # a new job
    checkpointer.load(1 + rank)
    for step in (4, 5):
        checkpointer.save({"w": torch.full((10,), float(step))}, step)
    dist.barrier()
    checkpointer.close()
    warnings = [text for text in said if "different checkpoints" in text]
    assert len(warnings) == (rank == 0), said
    if rank == 0:
        assert "rank 0 has loaded step 1 (attempt " in warnings[0] and "rank 1 step 2 (attempt " in warnings[0]


def test_ranks_that_have_loaded_different_checkpoints_are_warned_of(tmp_path: Path) -> None:
    on_ranks(RANKS, ranks_resume_from_two_checkpoints, str(tmp_path))


class WithoutTail(dict[str, Any]):
    def state_dict(self) -> dict[str, Any]:
        return {"tail": self["tail"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def one_rank_fails(rank: int, directory: str) -> None:
    holdfast.save_async(state_of(rank, 1), os.path.join(directory, "s1"), step=1).wait(60)
    state: dict[str, Any] = state_of(rank, 2)
    path = os.path.join(directory, "s2")
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(holdfast.Error, match="cannot be pickled"):
            holdfast.save_async({**state, "f": lambda: 1}, path, step=2)
        assert time.monotonic() - begin < 1
    else:  # it has the reason at once, and does not wait for a deadline
        with pytest.raises(holdfast.Error, match="rank 1 failed: .*cannot be pickled") as error:
            holdfast.save_async(state, path, step=2).wait(60)
        assert error.value.code == "ABORTED"
        assert time.monotonic() - begin < 30
    dist.barrier()
    with pytest.raises(KeyError if rank == 1 else holdfast.Error, match="rank 1 failed: KeyError\\('tail'\\)|^'tail'$"):
        holdfast.save({**state, "head": WithoutTail() if rank == 1 else {}}, path, step=2)
    dist.barrier()
    # The failed save counts on both ranks: the next one works, of the same name and of another.
    holdfast.save_async(state, path, step=2).wait(60)
    holdfast.save_async(state, os.path.join(directory, "s3"), step=3).wait(60)


def test_a_rank_that_fails_fails_the_save_and_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    on_ranks(RANKS, one_rank_fails, str(tmp_path))
    holdfast.recover(tmp_path, age_without_locks=0)
    assert [c["name"] for c in holdfast.list_checkpoints(tmp_path)] == ["s1", "s2", "s3"]
    for name in ("s1", "s2", "s3"):
        assert holdfast.verify(tmp_path / name)["verdict"] == "sound"


def one_rank_dies(rank: int, directory: str) -> None:
    holdfast.configure(time_liveness_max=3.0)
    holdfast.save_async(state_of(rank, 1), os.path.join(directory, "s1"), step=1).wait(60)
    if rank == 1:
        os._exit(3)
    with pytest.raises(holdfast.Error) as error:
        holdfast.save_async(state_of(rank, 2), os.path.join(directory, "s2"), step=2).wait(60)
    Path(directory, "told").write_text(str(error.value))
    os._exit(0)


def one_rank_is_slow_to_call(rank: int, directory: str) -> None:
    holdfast.configure(time_liveness_max=3.0)

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            time.sleep(7.0 if rank == 1 else 0.0)  # as making the staging memory may take
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    state = {**state_of(rank, 1), "slow": Slow()}
    holdfast.save_async(state, os.path.join(directory, "s1"), step=1).wait(60)


def test_a_rank_that_is_busy_before_its_save_begins_is_waited_for(tmp_path: Path) -> None:
    on_ranks(RANKS, one_rank_is_slow_to_call, str(tmp_path))
    assert holdfast.verify(tmp_path / "s1")["verdict"] == "sound"


def test_a_rank_that_dies_hangs_nobody(tmp_path: Path) -> None:
    # Joined one by one: PyTorch's own join would end the other rank as soon as one is dead.
    context = on_ranks(RANKS, one_rank_dies, str(tmp_path), join=False)
    ranks = context.processes
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 3]
    told = (tmp_path / "told").read_text()
    assert "rank 1 has not called save_async" in told and "[DEADLINE_EXCEEDED]" in told, told
    holdfast.recover(tmp_path, wait_for_orphans=30.0, age_without_locks=0)
    assert [c["name"] for c in holdfast.list_checkpoints(tmp_path)] == ["s1"]


def one_rank_dies_while_it_describes(rank: int, dying: int, directory: str) -> None:
    holdfast.configure(time_liveness_max=3.0)
    holdfast.save_async(state_of(rank, 1), os.path.join(directory, "s1"), step=1).wait(60)

    class Killed:
        def state_dict(self) -> dict[str, Any]:
            if rank == dying:
                os.kill(os.getpid(), signal.SIGKILL)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    # A structure that is new: what is alike is found out, which takes two exchanges.
    state = {**state_of(rank, 2), "more": torch.zeros(1 << 18), "killed": Killed()}
    with pytest.raises(holdfast.Error) as error:
        holdfast.save_async(state, os.path.join(directory, "s2"), step=2).wait(60)
    Path(directory, f"told-{rank}").write_text(str(error.value))
    os._exit(0)


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_while_it_describes_its_state_hangs_nobody(dying: int, tmp_path: Path) -> None:
    context = on_ranks(3, one_rank_dies_while_it_describes, dying, str(tmp_path), join=False)
    for process in context.processes:
        process.join(60)  # the ranks wait up to 30 minutes for one that lives
    assert [process.exitcode for process in context.processes] == [-9 if r == dying else 0 for r in range(3)]
    told = {rank: (tmp_path / f"told-{rank}").read_text() for rank in range(3) if rank != dying}
    for text in told.values():
        assert f"rank {dying} has given no sign of life for 3 s" in text, told
    holdfast.recover(tmp_path, wait_for_orphans=30.0, age_without_locks=0)
    assert [c["name"] for c in holdfast.list_checkpoints(tmp_path)] == ["s1"]


@pytest.mark.parametrize(("first", "second"), [(True, 1), (1, 1.0), (0.0, -0.0)])
def test_values_that_only_python_takes_for_equal_differ_between_ranks(first: Any, second: Any, tmp_path: Path) -> None:
    attempt = _native.new_attempt()
    saves = [
        holdfast.save_async({"w": torch.ones(4), "v": value}, tmp_path / "s", rank=rank, world_size=2, attempt=attempt)
        for rank, value in enumerate((first, second))
    ]
    for save in saves:
        save.wait(60)
    with pytest.raises(holdfast.Error, match="v"):
        holdfast.load(tmp_path / "s")
    loaded = holdfast.load(tmp_path / "s", rank=1)["v"]
    assert (type(loaded), str(loaded)) == (type(second), str(second))
