"""A rank that dies, hangs or runs out of space, at each phase of a save by several ranks.

Its own save fails with the reason, the other ranks learn of it at the end of theirs, nobody hangs, the previous
checkpoint stays whole, and the next save works.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_disk import mounted

import holdfast
import holdfast.dcp
from holdfast import events
from holdfast.dcp import metadata

MIB = 1 << 20
ELEMENTS = 2 * MIB  # of 4 bytes, for each rank: two chunks, the second of which waits for the rate


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 128) as path:
        yield path


def _state(rank: int, step: int) -> dict[str, Any]:
    return {f"r{rank}": torch.full((ELEMENTS,), float(step)), "step": step}


def _worker_of(begin: Callable[[], Any]) -> tuple[Any, int]:
    """What `begin` returns, and the worker of the save that it began, once it writes."""
    from holdfast import saving

    holdfast.configure(bytes_per_second_max=4 * MIB)
    future = begin()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with saving._lock:
            saves = [s for s in saving._in_flight if isinstance(s, saving.Save) and s._native]
        for save in saves:
            if save._native.worker_pid and save.progress()["phase"] == "writing":
                return future, save._native.worker_pid
        time.sleep(0.001)
    raise AssertionError("its worker was never seen writing")


def _fill(directory: str, leave: int) -> Path:
    filler = Path(directory) / "filler"
    free = os.statvfs(directory)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, free.f_bavail * free.f_frsize - leave))
    return filler


def _survivable(rank: int, directory: str) -> list[tuple[str, str, int, float, int, int]]:
    from torch.distributed.checkpoint.api import CheckpointException

    path = os.path.join(directory, "run")
    holdfast.configure(time_stalled_max=2.0)
    holdfast.dcp.async_save(_state(rank, 1), checkpoint_id=path).result()
    dist.barrier()
    found = []
    commit = metadata.commit

    def begin(step: int) -> Any:
        return holdfast.dcp.async_save(_state(rank, step), checkpoint_id=path)

    def signalled(step: int, number: signal.Signals) -> Any:
        if rank != 1:
            return begin(step)
        future, worker = _worker_of(lambda: begin(step))
        os.kill(worker, number)
        return future

    def worker_killed(step: int) -> Any:
        return signalled(step, signal.SIGKILL)

    def worker_hangs(step: int) -> Any:
        return signalled(step, signal.SIGSTOP)

    def full_while_writing(step: int) -> Any:
        filler = _fill(directory, 9 * MIB) if rank == 0 else None  # room for one of them
        dist.barrier()
        future = begin(step)
        future.exception(30)
        if filler is not None:
            filler.unlink()
        return future

    def full_at_the_end(step: int) -> Any:
        def full(*arguments: Any) -> None:
            filler = _fill(directory, 0)
            try:
                commit(*arguments)
            finally:
                filler.unlink()

        metadata.commit = full
        future = begin(step)
        future.exception(30)
        return future

    for step, fault in enumerate((worker_killed, worker_hangs, full_while_writing, full_at_the_end), 2):
        since = time.monotonic()
        future = fault(step)
        error = future.exception(60)
        seconds = time.monotonic() - since
        metadata.commit = commit
        holdfast.configure(bytes_per_second_max=0)
        assert isinstance(error, CheckpointException), (fault, error)
        assert len(error.failures) == 1 or fault is full_while_writing, error.failures
        failed, (reason, _) = next(iter(error.failures.items()))
        assert isinstance(reason, holdfast.Error), reason
        dist.barrier()
        loaded = {f"r{rank}": torch.zeros(ELEMENTS), "step": 0}
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path))
        value = int(loaded[f"r{rank}"][-1])
        found.append((fault.__name__, str(reason), failed, seconds, loaded["step"], value))
        dist.barrier()
    holdfast.dcp.async_save(_state(rank, 9), checkpoint_id=path).result()
    return found


def test_a_rank_that_fails_at_any_phase_fails_the_save_and_nothing_else(small_disk: Path) -> None:
    results = dcp_ranks.run_ranks(2, small_disk.parent, _survivable, str(small_disk))
    expected = {
        "worker_killed": ((1,), "ABORTED", 20),
        "worker_hangs": ((1,), "DEADLINE_EXCEEDED", 30),
        "full_while_writing": ((0, 1), "No space left on device", 20),
        "full_at_the_end": ((0,), "No space left on device", 20),
    }
    for rank, found in enumerate(results):
        assert [f[0] for f in found] == list(expected)
        for fault, reason, failed, seconds, step, value in found:
            at, words, limit = expected[fault]
            assert failed in at and (step, value) == (1, 1), (rank, fault, reason)
            assert words in reason, (rank, fault, reason)
            assert seconds < limit, (rank, fault)
    assert holdfast.dcp.verify(small_disk / "run")["verdict"] == "sound"
    # Of the failed saves nothing is left.
    assert len(os.listdir(small_disk / "run")) == 5


def _lethal(rank: int, directory: str, dying: int, phase: str) -> tuple[str, float]:
    path = os.path.join(directory, "run")
    holdfast.dcp.async_save(_state(rank, 1), checkpoint_id=path).result()
    dist.barrier()
    since = time.monotonic()

    def begin() -> Any:
        return holdfast.dcp.async_save(_state(rank, 2), checkpoint_id=path)

    if rank == dying:
        if phase == "writing":
            _worker_of(begin)
            os.kill(os.getpid(), signal.SIGKILL)
        metadata.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        begin().exception(60)
    error = begin().exception(60)
    return repr(error), time.monotonic() - since


@pytest.mark.parametrize(("dying", "phase"), [(1, "writing"), (0, "finalize")])
def test_a_rank_that_is_killed_at_any_phase_hangs_nobody(dying: int, phase: str, tmp_path: Path) -> None:
    results = dcp_ranks.run_ranks(2, tmp_path, _lethal, str(tmp_path), dying, phase, dying=dying)
    told, seconds = results[1 - dying]
    assert told != "None", "it was told that the save is complete"
    assert seconds < 20
    path = tmp_path / "run"
    for rank in (0, 1):
        loaded = {f"r{rank}": torch.zeros(ELEMENTS), "step": 0}
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path), no_dist=True)
        assert loaded["step"] == 1
        assert (loaded[f"r{rank}"] == 1).all()
    # The orphan of the killed rank may still be at work; the next save removes what is left.
    dcp_ranks.run_ranks(2, tmp_path, _save_again, str(path))
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    assert len(os.listdir(path)) == 5


def _save_again(rank: int, path: str) -> None:
    holdfast.dcp.async_save(_state(rank, 3), checkpoint_id=path).result()
    holdfast.flush()


def _one_hangs(rank: int, directory: str, way: str) -> tuple[str, float]:
    limit = timedelta(seconds=3)
    if way == "group":
        group = dist.new_group(timeout=limit)
    else:
        group = dist.group.WORLD
        holdfast.configure(time_ranks_max=limit.total_seconds())
    pids: list[Any] = [None, None, None]
    dist.all_gather_object(pids, os.getpid())
    path = os.path.join(directory, "run")
    holdfast.dcp.async_save(_state(rank, 1), checkpoint_id=path).result()

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().resolve_data(item)

    future = holdfast.dcp.async_save(
        _state(rank, 2), checkpoint_id=path, planner=Planner(), process_group=group
    )
    since = time.monotonic()
    error = future.exception(60)
    seconds = time.monotonic() - since
    time.sleep(3)  # so that the other rank has its own error before any connection ends
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[1], signal.SIGKILL)
    return str(error), seconds


@pytest.mark.parametrize("way", ["group", "configured"])
def test_a_rank_that_hangs_fails_the_others_within_the_jobs_time_out(way: str, tmp_path: Path) -> None:
    results = dcp_ranks.run_ranks(3, tmp_path, _one_hangs, str(tmp_path), way, dying=1)
    for rank in (0, 2):
        told, seconds = results[rank]
        assert "exchange with the other ranks" in told and told.endswith("[UNAVAILABLE]"), told
        assert seconds < 10, (rank, told)
    loaded = {"r1": torch.zeros(ELEMENTS), "step": 0}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(tmp_path / "run"), no_dist=True)
    assert loaded["step"] == 1


def _one_fails_early(rank: int, directory: str) -> tuple[float, Any, list[str]]:
    path = os.path.join(directory, "run")
    holdfast.dcp.async_save(_state(rank, 1), checkpoint_id=path).result()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        holdfast.configure(bytes_per_second_max=2 * MIB)
    else:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    dist.barrier()
    told: list[str] = []
    with events.Handle(lambda s, _, e: told.append(events.outcome(s, e))):
        since = time.monotonic()
        error = holdfast.dcp.async_save(_state(rank, 2), checkpoint_id=path).exception(60)
        seconds = time.monotonic() - since
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        holdfast.flush()  # nobody has missed it, and the exchange has ended
        assert time.monotonic() - since > 2
    return seconds, error.failures, told


def test_a_rank_hears_of_its_own_failure_at_once(tmp_path: Path) -> None:
    slow, failing = dcp_ranks.run_ranks(2, tmp_path, _one_fails_early, str(tmp_path))
    assert failing[0] < 1 < 2 < slow[0]
    for _, failures, told in (slow, failing):
        ((rank, (reason, _)),) = failures.items()
        assert (rank, reason.errno) == (1, errno.EFBIG)
        assert told == ["failed"]
