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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from faults import save_that_writes
from small_disk import mounted

import holdfast
import holdfast.dcp
from holdfast import events
from holdfast.dcp import metadata, uploads, writer

MIB = 1 << 20
GROUP_TIMEOUT = 5.0  # seconds, of the process group of ranks that stop
ELEMENTS = 2 * MIB  # of 4 bytes, for each rank: two chunks, the second of which waits for the rate


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 128) as path:
        yield path


def _state(rank: int, step: int) -> dict[str, Any]:
    return {f"r{rank}": torch.full((ELEMENTS,), float(step)), "step": step}


def _worker_of(begin: Callable[[], Any]) -> tuple[Any, int]:
    """What `begin` returns, and the worker of the save that it began, once it writes."""
    holdfast.configure(bytes_per_second_max=4 * MIB)
    future = begin()
    return future, save_that_writes()._native.worker_pid


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

    def full_on_one_rank(step: int) -> Any:
        filler = _fill(directory, 4 * MIB) if rank == 0 else None  # room for what the other writes
        dist.barrier()
        small = {f"r{rank}": torch.ones(1000), "step": step}
        future = begin(step) if rank == 1 else holdfast.dcp.async_save(small, checkpoint_id=path)
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

    faults = (worker_killed, worker_hangs, full_while_writing, full_on_one_rank, full_at_the_end)
    for step, fault in enumerate(faults, 2):
        since = time.monotonic()
        future = fault(step)
        error = future.exception(60)
        seconds = time.monotonic() - since
        metadata.commit = commit
        holdfast.configure(bytes_per_second_max=0)
        assert isinstance(error, CheckpointException), (fault, error)
        # While rank 1 tries to reserve its space, none may be left for rank 0 either.
        full = fault in (full_while_writing, full_on_one_rank)
        assert len(error.failures) == 1 or full, error.failures
        failed = max(error.failures)
        reason, _ = error.failures[failed]
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
        "worker_killed": ((1,), "ABORTED", 60),
        "worker_hangs": ((1,), "DEADLINE_EXCEEDED", 60),
        "full_while_writing": ((0, 1), "No space left on device", 60),
        # Rank 0 alone where rank 1, while it tries to reserve its space, takes the rest of the disk and hears of rank 0 first.
        "full_on_one_rank": ((0, 1), "No space left on device", 60),
        "full_at_the_end": ((0,), "No space left on device", 60),
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
    assert len(os.listdir(small_disk / "run")) == 6


class _Saving(dcp.DefaultSavePlanner):
    """Calls `end` where a plan is made, or where the data of one is asked for."""

    def __init__(self, phase: str, end: Callable[[], None]) -> None:
        super().__init__()
        self.phase, self.end = phase, end

    def create_local_plan(self) -> Any:
        if self.phase == "planning":
            self.end()
        return super().create_local_plan()

    def resolve_data(self, item: Any) -> Any:
        if self.phase == "staging":
            self.end()
        return super().resolve_data(item)


class _Loading(dcp.DefaultLoadPlanner):
    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self.end = end

    def resolve_tensor(self, item: Any) -> Any:
        self.end()
        return super().resolve_tensor(item)


def _lethal(rank: int, path: str, dying: int, phase: str, number: signal.Signals) -> tuple[str, float]:
    """What a rank is told when the rank `dying` sends itself a signal in a phase, and after how long."""
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT))
    dist.barrier()

    def end() -> None:
        if rank == dying:
            signal.raise_signal(number)  # to this thread: it would run on while another one takes the signal

    def begin(step: int, phase: str = "") -> Any:
        planner = _Saving(phase, end)
        state = _state(rank, step)
        return holdfast.dcp.async_save(state, checkpoint_id=path, planner=planner, process_group=group)

    begin(1).result()
    dist.barrier()
    since = time.monotonic()
    if rank == dying and phase == "writing":
        _worker_of(lambda: begin(2))
        end()
    elif rank == dying and phase == "finalize":
        wait = writer.Written.wait
        # Rank 0 has heard of all data then; another one has told of its own to nobody.
        if rank == 0:
            metadata.commit = lambda *_: end()
        else:
            writer.Written.wait = lambda self: (wait(self), end())[0]  # type: ignore[method-assign]
    try:
        if phase == "loading":
            reader = holdfast.dcp.StorageReader(path)
            dcp.load(_state(rank, 0), storage_reader=reader, planner=_Loading(end), process_group=group)
            return "None", 0.0
        return repr(begin(2, phase).exception(40)), time.monotonic() - since
    except TimeoutError:
        return "None", time.monotonic() - since
    except Exception as error:
        return repr(error), time.monotonic() - since


# Each phase with each signal, and each phase with each rank. A rank that is killed while it stages: test_dcp_ranks.py.
LETHAL = {
    signal.SIGKILL: [(0, "planning"), (1, "writing"), (0, "finalize"), (1, "loading")],
    signal.SIGSTOP: [(1, "planning"), (0, "staging"), (0, "writing"), (1, "finalize"), (0, "loading")],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", LETHAL, ids=["killed", "stopped"])
def test_a_rank_that_ends_at_any_phase_hangs_nobody(number: signal.Signals, tmp_path: Path) -> None:
    cases = LETHAL[number]

    def run(case: tuple[int, str]) -> tuple[str, float]:
        dying, phase = case
        scratch = tmp_path / phase
        scratch.mkdir()
        path = str(scratch / "run")
        return dcp_ranks.run_ranks(2, scratch, _lethal, path, dying, phase, number, dying=dying)[1 - dying]

    with ThreadPoolExecutor(len(cases)) as pool:  # they wait most of the time
        answers = list(pool.map(run, cases))
    limit = 50 if number == signal.SIGKILL else GROUP_TIMEOUT + 50
    for (dying, phase), (told, seconds) in zip(cases, answers, strict=True):
        assert told != "None", f"{phase}: nobody was told that rank {dying} has ended"
        assert seconds < limit, (phase, told)
        path = tmp_path / phase / "run"
        loaded = {"r0": torch.zeros(ELEMENTS), "r1": torch.zeros(ELEMENTS), "step": 0}
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(path), no_dist=True)
        assert loaded["step"] == 1, phase
        assert (loaded["r0"] == 1).all() and (loaded["r1"] == 1).all(), phase
        # The orphan of the rank that has ended may still be at work; a later save removes what is left.
        for _ in range(10):
            holdfast.dcp.async_save({"w": torch.ones(9)}, checkpoint_id=path).result(60)
            assert holdfast.dcp.verify(path)["verdict"] == "sound", phase
            if len(os.listdir(path)) == 4:
                break
            time.sleep(1)
        assert len(os.listdir(path)) == 4, (phase, os.listdir(path))


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
                signal.raise_signal(signal.SIGSTOP)
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


def _one_comes_too_late(rank: int, directory: str) -> None:
    holdfast.configure(time_ranks_max=2)
    failed, path = os.path.join(directory, "failed"), os.path.join(directory, "run")
    holdfast.dcp.async_save(_state(rank, 1), checkpoint_id=path).result()
    while rank == 1 and not os.path.exists(failed):
        time.sleep(0.01)
    for step in (2, 3):
        with pytest.raises(holdfast.Error, match=r"exchange with .* start the job again, .* destroy_process_group\(\) and init_.*\[UNAVAILABLE\]"):
            holdfast.dcp.async_save(_state(rank, step), checkpoint_id=path).result()
        if (rank, step) == (0, 2):
            open(failed, "x").close()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{directory}/again", rank=rank, world_size=2)
    holdfast.dcp.async_save(_state(rank, 4), checkpoint_id=path).result()


def test_ranks_that_have_waited_in_vain_save_again_in_a_new_process_group(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _one_comes_too_late, str(tmp_path))
    assert holdfast.newest(tmp_path, format="dcp")["step"] == 0
    assert holdfast.dcp.verify(tmp_path / "run")["verdict"] == "sound"


def _one_stops_in_the_first_call(rank: int, path: str) -> tuple[str, float]:
    """The first save makes groups. A rank stops when all have met for that, and before it connects."""
    uploads._TIME_CONNECTING_MAX = timedelta(seconds=1)
    if rank == 1:
        dist.new_group = lambda *_, **__: signal.raise_signal(signal.SIGSTOP)
    since = time.monotonic()
    with pytest.raises(holdfast.Error) as failed:
        holdfast.dcp.async_save(_state(rank, 1), checkpoint_id=path)
    return str(failed.value), time.monotonic() - since


def test_a_rank_that_stops_while_groups_are_made_fails_the_others_soon(tmp_path: Path) -> None:
    (told, seconds), _ = dcp_ranks.run_ranks(2, tmp_path, _one_stops_in_the_first_call, str(tmp_path / "run"), dying=1)
    assert "make a group of the other ranks" in told and told.endswith("[UNAVAILABLE]"), told
    assert seconds < 30, told  # the process group's time-out is 60


def _one_is_late(rank: int, path: str) -> str:
    uploads._TIME_CONNECTING_MAX = timedelta(seconds=1)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            time.sleep(2 * rank)
            return super().resolve_data(item)

    time.sleep(3 * rank)
    holdfast.dcp.async_save({f"r{rank}": 1}, checkpoint_id=path, planner=Planner()).result()
    return holdfast.dcp.verify(path)["verdict"]


def test_groups_wait_for_a_late_rank_as_long_as_the_job(tmp_path: Path) -> None:
    assert dcp_ranks.run_ranks(2, tmp_path, _one_is_late, str(tmp_path / "run")) == ["sound"] * 2


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
