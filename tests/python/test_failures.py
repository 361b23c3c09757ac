"""Saves that fail, each kind many times: no process, descriptor, mapping, thread or memory stays."""

from __future__ import annotations

import collections
import ctypes
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import file_size_limit, save_that_writes
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
import holdfast.events
from holdfast import handle
from holdfast.dcp import staging
from holdfast.integrity import processes

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20
ROUNDS = 4
SLOW = 64 << 10  # bytes a second: such a save is still going on when it is killed or cancelled


@pytest.fixture(autouse=True)
def fresh_options() -> Iterator[None]:
    holdfast.flush(60)
    holdfast.configure(arena_bytes=16 * MIB)
    yield
    holdfast.flush(60)
    holdfast.configure(arena_bytes=0, bytes_per_second_max=0, launcher="spawn")


def state() -> dict[str, Any]:
    return {"model": {"w": torch.ones(MIB)}, "note": {"a", "b"}, "step": 1}


def plain(path: Path) -> Any:
    return holdfast.save_async(state(), path).durable


def own_dcp(path: Path) -> Any:
    return holdfast.dcp.async_save(state(), checkpoint_id=path)


def stock_dcp(path: Path) -> Any:
    return dcp.async_save(state(), storage_writer=holdfast.dcp.StorageWriter(path))


def failure_of(begin: Callable[[Path], Any], path: Path) -> BaseException | None:
    """Of the save, or of the call: a worker may fail while the call still copies."""
    try:
        return begin(path).exception(60)
    except holdfast.Error as raised:
        return raised


def too_large(begin: Callable[[Path], Any], path: Path) -> BaseException | None:
    staging.stage(state())  # the framework's staging memory is a file, too: it is there from now on
    with file_size_limit(MIB):
        return failure_of(begin, path)


def too_large_to_stage(begin: Callable[[Path], Any], path: Path) -> BaseException | None:
    staging.trim()
    with file_size_limit(MIB):
        return failure_of(begin, path)


def killed(begin: Callable[[Path], Any], path: Path) -> BaseException | None:
    future = begin(path)
    os.kill(save_that_writes()._native.worker_pid, signal.SIGKILL)
    return future.exception(60)


def cancelled(begin: Callable[[Path], Any], path: Path) -> BaseException | None:
    future = begin(path)
    save_that_writes().cancel()
    return future.exception(60)


def counts() -> collections.Counter[str]:
    """Resources of this process, by kind: those of `processes.held`, threads, and staging memory."""
    holdfast.flush(60)
    gc.collect()
    staging.trim()
    held = processes.held(in_group=False)
    held["threads"] = len(os.listdir("/proc/self/task"))
    held["staging memory held"] = holdfast.staging().get("bytes_held", 0)
    held["staged copies held"] = staging.held_bytes()
    held["saves in flight"] = len(handle.in_flight())
    return held


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed stays in the heap else
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def settled(at_most: collections.Counter[str]) -> dict[str, int]:
    """What is held more than `at_most`, once other threads have let go of what they do in a moment."""
    deadline = time.monotonic() + 20
    while (more := dict(counts() - at_most)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return more


@pytest.mark.parametrize("fault", [too_large, too_large_to_stage, killed, cancelled])
def test_failing_saves_leave_no_process_descriptor_mapping_or_memory(
    fault: Callable[..., BaseException | None], tmp_path: Path
) -> None:
    ways = (plain, own_dcp, stock_dcp)
    holdfast.save_async(state(), tmp_path / "before").wait(60)
    if fault in (killed, cancelled):
        holdfast.configure(bytes_per_second_max=SLOW)

    def once(way: Callable[[Path], Any], number: int) -> None:
        error = fault(way, tmp_path / f"{way.__name__}-{number}")
        assert isinstance(error, holdfast.Error | CheckpointException), (way, error)

    for way in ways:
        once(way, 0)
    before = counts()
    memory = resident()
    for number in range(1, ROUNDS + 1):
        for way in ways:
            once(way, number)
    assert settled(before) == {}
    assert before["staging memory held"] == before["staged copies held"] == before["saves in flight"] == 0
    # One staged state is 4 MiB: a few that were kept would show.
    assert resident() - memory < 16 * MIB
    # On disk there is no checkpoint of them, and what is left in DCP's directories goes with the next save there.
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("plain")) == []
    assert not list(tmp_path.rglob(".metadata"))
    holdfast.configure(bytes_per_second_max=0)
    for way in ways:
        path = tmp_path / f"{way.__name__}-1"
        assert way(path).exception(60) is None
        assert holdfast.verify(path)["verdict"] == "sound"
        assert not list(path.rglob("*.tmp")) and len(list(path.iterdir())) <= 4


def test_a_state_above_the_cap_streams_through_it_under_dcp(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    large = {str(i): torch.randn(6 * MIB) for i in range(2)}  # 24 MiB each, the cap is 16
    expected = {k: v.clone() for k, v in large.items()}
    with holdfast.events.Handle(lambda _, report, error: told.append(report or error)):
        future = holdfast.dcp.async_save(large, checkpoint_id=tmp_path / "run")
        for tensor in large.values():
            tensor.zero_()  # the training goes on
        future.result(60)
        holdfast.flush(60)
    (report,) = told
    assert report["streamed"]
    assert 0 < holdfast.staging()["bytes_held_peak"] <= 16 * MIB
    assert staging.held_bytes() == 0
    dcp.load(large, storage_reader=holdfast.dcp.StorageReader(tmp_path / "run"))
    for name, tensor in expected.items():
        assert torch.equal(large[name], tensor), name
