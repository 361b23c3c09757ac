"""Failures of one rank: every rank learns of them when it finalizes, with file and errno, and none of them hangs."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
import small_disk
import torch.distributed as dist
from megatron_jobs import DEADLINE, State, fresh, held_worker, run
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.megatron
from holdfast import events
from holdfast.dcp import metadata


def _request(state: State, directory: str) -> Any:
    from megatron.core.dist_checkpointing import save

    return save(
        state.sharded(), directory, holdfast.megatron.SaveStrategy(), async_sharded_save=True, async_strategy="mcore"
    )


# Seconds after a fault, on a busy machine. Measured: less than 0.1 (`python/benchmarks/caller_faults.py`).
SOON = 5.0


def _failures(queue: Any, within: float = DEADLINE) -> dict[int, Any]:
    """Asks as a training does, until a request fails."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            assert queue.maybe_finalize_async_calls() == []
        except CheckpointException as error:
            return {rank: failure[0] for rank, failure in error.failures.items()}
        time.sleep(0.005)
    raise AssertionError("no rank has said that it failed")


def _files_of_ranks(path: str) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith((".distcp", ".tmp")) or ".manifest" in name)


def _then_works(queue: Any, path: str) -> None:
    """The next save into the directory: nothing of the failed one stays."""
    queue.schedule_async_request(_request(State(2), path))
    assert len(queue.maybe_finalize_async_calls(blocking=True)) == 1
    assert State(2).wrong_elements_in(path) == 0
    assert holdfast.dcp.verify(path)["verdict"] == "sound"


def _worker_dies(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    told: list[Any] = []
    # The rank itself is told at once, whether it asks or not.
    with events.Handle(lambda save, report, error: told.append(error)):
        worker = held_worker()
        queue.schedule_async_request(_request(State(1), path))
        os.kill(worker, signal.SIGKILL if rank == 1 else signal.SIGCONT)
        deadline = time.monotonic() + DEADLINE
        while not told and time.monotonic() < deadline:
            time.sleep(0.005)
    assert (told[0] is not None) == (rank == 1)
    dist.barrier()  # from here on the next call says so, on both ranks
    failures = _failures(queue, SOON)
    assert list(failures) == [1]
    assert "signal 9" in str(failures[1]) or "SIGKILL" in str(failures[1])
    assert f"save {path}, rank 1" in str(failures[1])
    dist.barrier()
    assert not [name for name in os.listdir(path) if not name.startswith("holdfast")], os.listdir(path)
    _then_works(queue, path)


def test_a_dead_worker_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    run(2, tmp_path, _worker_dies, str(tmp_path / "run"))


def _fails_and_goes(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    worker = held_worker()
    queue.schedule_async_request(_request(State(1), fresh(directory)))
    os.kill(worker, signal.SIGKILL)
    assert list(_failures(queue)) == [0]
    holdfast.flush()
    gc.collect()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [link for link in links if "holdfast-save-ended" in link], links


def test_nothing_of_a_failed_save_is_kept(tmp_path: Path) -> None:
    """Each would keep a descriptor, and what it had captured."""
    run(1, tmp_path, _fails_and_goes, str(tmp_path / "run"))


def _file_limit(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    _request(State(0), path).execute_sync()  # the staging memory counts as a file, too
    with faults.file_size_limit(8192 if rank == 1 else 1 << 30):
        queue.schedule_async_request(_request(State(1), path))
        dist.barrier()
        failures = _failures(queue, SOON)
    assert list(failures) == [1]
    assert failures[1].errno == errno.EFBIG, failures[1]
    assert f"{path}/__1_1.distcp" in str(failures[1])
    _then_works(queue, path)
    dist.barrier()
    before = _files_of_ranks(path)
    with faults.file_size_limit(8192 if rank == 1 else 1 << 30), pytest.raises(CheckpointException):
        _request(State(1), path).execute_sync()
    dist.barrier()
    assert _files_of_ranks(path) == before  # rank 0, whose files were durable, has removed them


def test_the_others_are_told_file_and_errno(tmp_path: Path) -> None:
    run(2, tmp_path, _file_limit, str(tmp_path / "run"))


def _disk_full(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    queue.schedule_async_request(_request(State(1, columns=1 << 15), path))
    failures = _failures(queue)
    assert {failure.errno for failure in failures.values()} == {errno.ENOSPC}
    assert all(".distcp" in str(failure) for failure in failures.values())
    _then_works(queue, path)


def test_a_full_disk_says_so(tmp_path: Path) -> None:
    with small_disk.mounted(tmp_path / "disk", 4) as disk:
        run(2, tmp_path, _disk_full, str(disk / "run"))


def _refused(rank: int, directory: str) -> None:
    from holdfast.dcp.writer import StorageWriter
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    begin: Callable[..., Any] = StorageWriter.begin
    if rank == 1:

        def refuses(*_: Any, **__: Any) -> None:
            raise holdfast.Error("RESOURCE_EXHAUSTED", "no memory here", errno.ENOMEM)

        StorageWriter.begin = refuses
    request = _request(State(1), path)  # no rank fails in the call: the others would wait
    StorageWriter.begin = begin
    queue.schedule_async_request(request)
    failures = _failures(queue)
    assert list(failures) == [1]
    assert failures[1].errno == errno.ENOMEM
    _then_works(queue, path)
    # Of a synchronous save, too.
    if rank == 1:
        StorageWriter.begin = refuses
    with pytest.raises(CheckpointException) as raised:
        _request(State(1), path).execute_sync()
    StorageWriter.begin = begin
    assert list(raised.value.failures) == [1]
    assert State(2).wrong_elements_in(path) == 0  # the older checkpoint


def test_what_a_rank_refuses_in_the_call_fails_at_the_end(tmp_path: Path) -> None:
    run(2, tmp_path, _refused, str(tmp_path / "run"))


def _abandoned(rank: int, directory: str) -> None:
    """As after a kill between the last write and the finalize functions: only these can complete a checkpoint."""
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(f"{directory}/iter_0000001")
    queue.schedule_async_request(_request(State(1), path))
    queue._is_done(queue.async_calls.popleft(), blocking=True)
    dist.barrier()
    if rank == 0:
        assert holdfast.recover(directory, wait_for_orphans=0)["promoted"] == []
        assert not os.path.exists(f"{path}/.metadata")
    dist.barrier()
    _then_works(queue, path)
    assert sorted(name for name in os.listdir(path) if name.endswith(".distcp")) == ["__0_1.distcp", "__1_1.distcp"]


def test_a_save_that_was_never_finalized_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    run(2, tmp_path, _abandoned, str(tmp_path / "run"))


def _commit_fails(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    os.makedirs(f"{path}/.metadata", exist_ok=True)
    called: list[int] = []
    request = _request(State(1), path)
    request.add_finalize_fn(lambda: called.append(1))
    queue.schedule_async_request(request)
    failures = _failures(queue)
    assert list(failures) == [0]
    assert failures[0].errno == errno.EISDIR
    assert not called
    assert not os.path.exists(f"{path}/metadata.json")


def test_a_commit_that_fails_is_told_to_all(tmp_path: Path) -> None:
    run(2, tmp_path, _commit_fails, str(tmp_path / "run"))


def _no_room_for_the_commit(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue, path = AsyncCallsQueue(), fresh(directory)
    _request(State(2), path).execute_sync()
    dist.barrier()
    before = _files_of_ranks(path)
    for step in ("_write", "_sync"):
        real: Callable[..., None] = getattr(metadata, step)

        def fails(where: Path, name: str, *data: bytes, step: str = step, real: Callable[..., None] = real) -> None:
            if name == ".metadata":
                raise holdfast.Error("RESOURCE_EXHAUSTED", f"{step} {name}: no room", errno.ENOSPC)
            real(where, name, *data)

        for way in ("queue", "execute_sync"):
            setattr(metadata, step, fails if rank == 0 else real)
            if way == "queue":
                queue.schedule_async_request(_request(State(3), path))
                failures = _failures(queue)
            else:
                with pytest.raises(CheckpointException) as raised:
                    _request(State(3), path).execute_sync()
                failures = {number: failed[0] for number, failed in raised.value.failures.items()}
            setattr(metadata, step, real)
            assert [(number, failed.errno) for number, failed in failures.items()] == [(0, errno.ENOSPC)]
            dist.barrier()
            # Behind the rename the checkpoint is the new one, and stays whole.
            assert step == "_sync" or _files_of_ranks(path) == before
            assert State(2 if step == "_write" else 3).wrong_elements_in(path) == 0
            dist.barrier()
    _then_works(queue, path)


def test_a_commit_that_fails_leaves_nothing_of_the_save(tmp_path: Path) -> None:
    run(2, tmp_path, _no_room_for_the_commit, str(tmp_path / "run"))


def _sync_fails(rank: int, directory: str) -> None:
    from holdfast.megatron import writer
    from holdfast.megatron.queue import AsyncCallsQueue

    queue, path = AsyncCallsQueue(), fresh(directory)
    synced: list[str] = []

    def fails(file: Any) -> None:
        synced.append(str(file))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sync_file = writer.sync_file
    writer.sync_file = fails
    queue.schedule_async_request(_request(State(1), path))
    failures = _failures(queue)
    writer.sync_file = sync_file
    assert synced == [f"{path}/metadata.json"] * (rank == 0)
    assert list(failures) == [0]
    assert failures[0].errno == errno.EIO and "metadata.json" in str(failures[0])
    assert State(1).wrong_elements_in(path) == 0  # it may be gone after a power cut, and is there now
    _then_works(queue, path)


def test_a_file_of_megatron_that_cannot_be_synced_is_told_to_all(tmp_path: Path) -> None:
    run(2, tmp_path, _sync_fails, str(tmp_path / "run"))


def _other_plan(rank: int, directory: str) -> None:
    """A known plan whose state has changed is an error, not a wrong checkpoint."""
    from megatron.core.dist_checkpointing import save

    strategy = holdfast.megatron.SaveStrategy(cached_metadata=True)
    for number in range(3):
        state = State(1, columns=256 if number < 2 else 512)
        request = save(state.sharded(), fresh(f"{directory}/{number}"), strategy, validate_access_integrity=False,
                       async_sharded_save=True)  # fmt: skip
        if number < 2:
            request.execute_sync()
            continue
        with pytest.raises(CheckpointException, match=r"rows has the shape \[64, 512\], and its plan \[64, 256\]"):
            request.execute_sync()
    assert not os.path.exists(f"{directory}/2/.metadata")


def test_a_plan_of_another_structure_is_refused(tmp_path: Path) -> None:
    run(2, tmp_path, _other_plan, str(tmp_path / "run"))


def _plan_unfinished(rank: int, directory: str) -> None:
    """The planner of one rank fails in its last step; the plan is known, so no rank asks another."""
    from megatron.core.dist_checkpointing import save
    from torch.distributed.checkpoint import DefaultSavePlanner

    strategy = holdfast.megatron.SaveStrategy(cached_metadata=True)
    finish_plan: Callable[..., Any] = DefaultSavePlanner.finish_plan

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no plan")

    for number in range(6):
        if number == 3 and rank == 1:
            DefaultSavePlanner.finish_plan = fails
        path = fresh(f"{directory}/{number}")
        request = save(State(number).sharded(), path, strategy, validate_access_integrity=False, async_sharded_save=True)
        DefaultSavePlanner.finish_plan = finish_plan
        if number != 3:
            request.execute_sync()
            assert State(number).wrong_elements_in(path) == 0
            continue
        with pytest.raises(CheckpointException) as raised:
            request.execute_sync()
        assert [(rank, failed[0].errno) for rank, failed in raised.value.failures.items()] == [(1, errno.ENOMEM)]
        assert not os.path.exists(f"{path}/.metadata")


def test_a_plan_that_one_rank_cannot_finish_fails_at_the_end(tmp_path: Path) -> None:
    run(2, tmp_path, _plan_unfinished, str(tmp_path / "run"))


def _nothing_left(rank: int) -> int:
    return events.in_flight()


def test_nothing_counts_as_in_flight_in_a_new_rank(tmp_path: Path) -> None:
    assert run(1, tmp_path, _nothing_left) == [0]
