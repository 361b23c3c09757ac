"""Local checkpoints of nvidia-resiliency-ext by Holdfast: their bytes, their order, and what damage and failures leave."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import faults
import pytest
import small_disk
import torch
import torch.distributed as dist
from megatron_jobs import finalize, held_worker, run
from no_gpu import cpu_for_gpu
from nvidia_resiliency_ext.checkpointing.async_ckpt import core
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager as Stock
from nvrx_jobs import State, expected, files, flip, name, replicated, saved, wait_for_files

import holdfast
from holdfast.nvrx import LocalCheckpointManager


def _loaded(manager: Any) -> Any:
    state, ckpt_id = manager.load()
    assert ckpt_id[1] == dist.get_rank()
    return state.values_of()


def _in_any_queue(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue, NvrxAsyncCallsQueue

    cpu_for_gpu.without_gpu()
    manager = LocalCheckpointManager(directory, "session")
    assert manager.find_latest() == -1
    queues = [None, AsyncCallsQueue(), NvrxAsyncCallsQueue(), core.AsyncCallsQueue(persistent=False)]
    for iteration, queue in enumerate(queues, 1):
        state = State(iteration, rank)
        request = manager.save(state, iteration, is_async=True)
        assert isinstance(request, core.AsyncRequest)
        assert len(pickle.dumps(request[:2])) < 1000
        state.train()
        if queue is None:
            request.execute_sync()
        else:
            queue.schedule_async_request(request)
            finalize(queue)
            queue.close()
        wait_for_files(manager, name(iteration, rank))
        path = Path(directory, "session", str(rank), name(iteration, rank))
        assert path.stat().st_size < 1 << 18, "the file has the whole buffer of the shard"
        assert holdfast.verify(path)["verdict"] == "sound"
        for kind in (LocalCheckpointManager, Stock):
            fresh = kind(directory, "session")
            assert fresh.find_latest() == iteration
            assert _loaded(fresh) == expected(iteration, rank)


def test_the_values_are_those_of_the_call_in_any_queue(tmp_path: Path) -> None:
    run(1, tmp_path, _in_any_queue, str(tmp_path / "local"))


class _Odd(State):
    """Parts of storages that are not what a file would have of them."""

    def __init__(self, iteration: int, rank: int) -> None:
        super().__init__(iteration, rank)
        numbers, pairs = torch.arange(8.0), torch.arange(8.0) * (1 + 2j)
        last = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
        self._tensors += [last, pairs[:4].conj(), pairs.imag[:1], numbers[:4], numbers[:4].view(torch.int32), torch.eye(3).to_sparse()]


def _odd(rank: int, directory: str) -> None:
    manager = LocalCheckpointManager(directory)
    manager.save(_Odd(1, rank), 1)
    assert manager.find_latest() == 1
    for before, after in zip(_Odd(1, rank).tensors, manager.load()[0].tensors, strict=True):
        assert torch.equal(before.to_dense(), after.to_dense())
        assert before.dim() < 4 or before.stride() == after.stride()
    state = _Odd(2, rank)
    (freed, *_) = state.tensors
    freed.untyped_storage().resize_(0)
    with pytest.raises(CheckpointingException, match="its storage has 0 of the"):
        manager.save(state, 2)
    assert len(list(state.tensors)) == 9 and manager.find_latest() == 1


def test_tensors_of_any_form_are_saved_or_stay_with_the_trainer(tmp_path: Path) -> None:
    run(1, tmp_path, _odd, str(tmp_path / "local"))


def _beside_stock(rank: int, directory: str) -> None:
    saved(Stock(directory), 3)
    manager = LocalCheckpointManager(directory)
    assert manager.find_latest() == 3
    assert _loaded(manager) == expected(3, rank)
    saved(manager, 4)
    assert files(manager) == [name(4, rank)]
    # The stock manager is killed in a save: it leaves a file that no later save of it gets past.
    (Path(manager.local_ckpt_dir) / f"iter_0000005_{rank}_local.dirty.pt").touch()
    with pytest.raises(CheckpointingException):
        saved(Stock(directory), 5)
    saved(manager, 5)
    saved(manager, 6)
    assert files(manager) == [name(6, rank)]
    flip(Path(manager.local_ckpt_dir) / name(6, rank))
    assert Stock(directory).find_latest() == 6
    assert LocalCheckpointManager(directory).find_latest() == -1
    # A stock file has no digests; its checksums are compared.
    saved(Stock(directory), 7)
    flip(Path(manager.local_ckpt_dir) / name(7, rank))
    assert LocalCheckpointManager(directory).find_latest() == -1


def test_files_are_exchanged_with_the_stock_manager(tmp_path: Path) -> None:
    run(1, tmp_path, _beside_stock, str(tmp_path / "local"))


def _order(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import NvrxAsyncCallsQueue

    manager, queue = LocalCheckpointManager(directory), NvrxAsyncCallsQueue()
    saved(manager, 1)
    worker = held_worker() if rank == 1 else 0
    queue.schedule_async_request(manager.save(State(2, rank), 2, is_async=True))
    for _ in range(50):
        assert queue.maybe_finalize_async_calls() == []
    assert name(1, rank) in files(manager)
    dist.barrier()
    if rank == 1:
        os.kill(worker, signal.SIGCONT)
    finalize(queue)
    wait_for_files(manager, name(2, rank))
    # A worker that dies: every rank learns of it, and the older iteration stays.
    if rank == 1:
        worker = held_worker()
    queue.schedule_async_request(manager.save(State(3, rank), 3, is_async=True))
    if rank == 1:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(CheckpointingException, match="save local checkpoint 3: rank 1: .*; the newest is that of iteration 2"):
        finalize(queue)
    assert files(manager) == [name(2, rank)]
    assert manager.find_latest() == 2
    assert _loaded(manager) == expected(2, rank)
    # A request that nobody schedules is given up.
    manager.save(State(4, rank), 4, is_async=True)
    saved(manager, 5)
    assert files(manager) == [name(5, rank)]


def test_an_older_iteration_stays_until_all_ranks_have_the_newer_one(tmp_path: Path) -> None:
    run(2, tmp_path, _order, str(tmp_path / "local"))


def _no_space(rank: int, directory: str, is_async: bool) -> None:
    from holdfast.megatron.queue import NvrxAsyncCallsQueue

    manager, queue = LocalCheckpointManager(directory), NvrxAsyncCallsQueue()
    saved(manager, 1)
    with faults.file_size_limit(8192 if rank == 1 else 1 << 30):
        with pytest.raises(CheckpointingException, match="rank 1: .*iter_0000002_1_local.pt") as caught:
            if is_async:
                queue.schedule_async_request(manager.save(State(2, rank), 2, is_async=True))
                finalize(queue)
            else:
                saved(manager, 2)
    if rank == 1:
        assert getattr(caught.value.__cause__, "errno", 0) == errno.EFBIG
    left = [entry for entry in os.listdir(manager.local_ckpt_dir) if "0000002" in entry]
    assert not left
    assert files(manager) == [name(1, rank)]
    saved(manager, 2)
    assert files(manager) == [name(2, rank)]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_disk_without_space_on_one_rank_is_told_to_all(tmp_path: Path, is_async: bool) -> None:
    run(2, tmp_path, _no_space, str(tmp_path / "local"), is_async)


def _disk_full(rank: int, directory: str) -> None:
    manager = LocalCheckpointManager(directory)
    saved(manager, 1)
    with pytest.raises(CheckpointingException, match="iter_0000002_.*: No space left on device.*the newest is that of iteration 1"):
        manager.save(State(2, rank, shard=1 << 20), 2)
    assert files(manager) == [name(1, rank)]
    fresh = LocalCheckpointManager(directory)
    assert fresh.find_latest() == 1
    assert _loaded(fresh) == expected(1, rank)
    saved(fresh, 2)


def test_a_full_disk_leaves_the_older_iteration(tmp_path: Path) -> None:
    with small_disk.mounted(tmp_path / "disk", 6) as disk:
        run(2, tmp_path, _disk_full, str(disk / "local"))


def _again(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import NvrxAsyncCallsQueue

    manager, queue = LocalCheckpointManager(directory), NvrxAsyncCallsQueue()
    saved(manager, 9)
    saved(manager, 10)

    def is_whole(values: Any = None) -> None:
        assert files(manager) == [name(10, rank)]
        fresh = LocalCheckpointManager(directory)
        assert fresh.find_latest() == 10
        assert _loaded(fresh) == (values or expected(10, rank))

    # Without space, and with a worker that is killed.
    with faults.file_size_limit(8192 if rank == 0 else 1 << 30):
        with pytest.raises(CheckpointingException, match="save local checkpoint 10: rank 0: .*the newest is that of iteration 10"):
            manager.save(State(10, rank), 10)
    is_whole()
    worker = held_worker() if rank == 1 else 0
    queue.schedule_async_request(manager.save(State(10, rank), 10, is_async=True))
    assert files(manager) == [name(10, rank)], "the durable file goes before there is a new one"
    if rank == 1:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(CheckpointingException, match="save local checkpoint 10: rank 1: "):
        finalize(queue)
    is_whole()
    # A request that is cancelled, durable or not, takes no file away.
    request = manager.save(State(10, rank), 10, is_async=True)
    holdfast.flush()
    queue.schedule_async_request(request)
    queue.close(abort=True)
    del request
    is_whole()
    other = State(10, rank)
    other.train()
    values = other.values_of()
    manager.save(other, 10)
    is_whole(values)
    saved(manager, 11)
    assert files(manager) == [name(11, rank)]


def test_a_second_save_of_an_iteration_leaves_the_first_until_it_is_durable(tmp_path: Path) -> None:
    run(2, tmp_path, _again, str(tmp_path / "local"))


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("holdfast.nvrx").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _older(rank: int, directory: str) -> None:
    manager = LocalCheckpointManager(directory)
    mine = Path(manager.local_ckpt_dir)
    saved(manager, 1)
    shutil.copytree(mine, mine.with_name(f"{rank}-kept"))
    saved(manager, 2)
    shutil.copytree(mine.with_name(f"{rank}-kept"), mine, dirs_exist_ok=True)
    if rank == 0:
        flip(mine / name(2, 0))
    dist.barrier()
    log, fresh = _Log(), LocalCheckpointManager(directory)
    assert fresh.find_latest() == 1
    assert any(name(2, 0) in line and "counts as missing" in line for line in log.lines) == (rank == 0), log.lines
    assert _loaded(fresh) == expected(1, rank)
    # The training makes iteration 2 anew: rank 1's old file of it must not be taken for a part of that.
    assert files(fresh) == [name(1, rank)]
    saved(fresh, 2)
    assert LocalCheckpointManager(directory).find_latest() == 2


def test_a_damaged_file_counts_as_missing(tmp_path: Path) -> None:
    run(2, tmp_path, _older, str(tmp_path / "local"))


def _abandoned(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import NvrxAsyncCallsQueue

    saved(LocalCheckpointManager(directory), 1)
    if rank == 1:
        shutil.rmtree(Path(directory) / "1")
    dist.barrier()
    manager, queue = LocalCheckpointManager(directory), NvrxAsyncCallsQueue()
    assert manager.find_latest() == -1
    worker = held_worker() if rank == 0 else 0
    queue.schedule_async_request(manager.save(State(1, rank), 1, is_async=True))
    # Killed here, the job must not find rank 0's old file beside rank 1's new one.
    if rank == 0:
        assert files(manager) == []
        os.kill(worker, signal.SIGCONT)
    finalize(queue)
    assert manager.find_latest() == 1


def test_a_file_of_an_abandoned_run_completes_no_iteration(tmp_path: Path) -> None:
    run(2, tmp_path, _abandoned, str(tmp_path / "local"))


def _replica(rank: int, directory: str) -> None:
    cpu_for_gpu.on_the_cpu()
    manager = LocalCheckpointManager(directory, repl_strategy=replicated())
    mine = Path(manager.local_ckpt_dir)
    state = State(1, rank)
    request = manager.save(state, 1, is_async=True)
    request.execute_sync()
    saved(manager, 2)
    assert files(manager) == [name(2, 0), name(2, 1)]
    if rank == 1:
        flip(mine / name(2, 1))
    dist.barrier()
    fresh = LocalCheckpointManager(directory, repl_strategy=replicated())
    assert fresh.find_latest() == 2
    assert _loaded(fresh) == expected(2, rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(mine)
    dist.barrier()
    # Of rank 1's own file there is no good copy any more.
    fresh = LocalCheckpointManager(directory, repl_strategy=replicated())
    assert fresh.find_latest() == -1
    saved(fresh, 3)
    if rank == 0:
        shutil.rmtree(mine)
    dist.barrier()
    fresh = LocalCheckpointManager(directory, repl_strategy=replicated())
    assert fresh.find_latest() == 3
    assert _loaded(fresh) == expected(3, rank)


def test_a_replica_takes_the_place_of_what_is_damaged_or_gone(tmp_path: Path) -> None:
    run(2, tmp_path, _replica, str(tmp_path / "local"))


def _bad_input(rank: int, directory: str) -> None:
    manager = LocalCheckpointManager(directory)
    for state, iteration, said in (
        ({"x": torch.zeros(1)}, 1, "a dict is no TensorAwareStateDict; pass one, as BasicTensorAwareStateDict"),
        (State(1, 0), -1, "save local checkpoint -1: an iteration is a number from 0 to 9999999"),
        (State(1, 0), 10**7, "an iteration is a number from 0 to 9999999"),
        (State(1, 0), "1", "save local checkpoint '1': an iteration is a number"),
    ):
        with pytest.raises(CheckpointingException, match=said):
            manager.save(state, iteration)
    with pytest.raises(CheckpointingException, match="find_latest"):
        manager.load()
    saved(manager, 5)
    assert manager.find_latest() == 5
    with pytest.raises(CheckpointingException, match="save local checkpoint 4: 5 is there, and is not older"):
        saved(manager, 4)
    os.unlink(Path(manager.local_ckpt_dir) / name(5, rank))
    with pytest.raises(CheckpointingException, match="it is gone since find_latest"):
        manager.load()
    state = State(6, rank)
    state.note = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(CheckpointingException, match="save local checkpoint 6: rank 0: .*cannot be pickled"):
        manager.save(state, 6)
    (Path(directory) / "file").touch()
    refused = LocalCheckpointManager(Path(directory) / "file")
    assert refused.find_latest() == -1
    with pytest.raises(CheckpointingException, match="file/0"):
        saved(refused, 1)


def test_bad_input_is_refused_with_reason(tmp_path: Path) -> None:
    run(1, tmp_path, _bad_input, str(tmp_path / "local"))
