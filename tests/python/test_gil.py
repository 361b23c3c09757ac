"""Other Python threads go on while this package loads, verifies, recovers, waits and flushes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

MIB = 1 << 20


class Counter:
    """A thread that counts, a millisecond a step where nothing keeps it from it."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.count += 1
            time.sleep(0.001)

    def __enter__(self) -> Counter:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def steps(self, act: Callable[[], Any], calls: int = 1) -> float:
        """How far it comes during a call, on average."""
        self.count = 0
        for _ in range(calls):
            act()
        return self.count / calls


@pytest.fixture
def counter() -> Iterator[Counter]:
    with Counter() as one:
        yield one


# Whoever holds the GIL for all of a call lets it make one step, or two. The calls below take a tenth of a second and
# more, so that it should make a hundred; on a busy machine it makes some of them.
STEPS = 8


@pytest.mark.planted("holds_the_gil")
def test_a_call_that_holds_it_is_found(counter: Counter) -> None:
    """The planted bug of the tests below."""
    assert counter.steps(lambda: ctypes.PyDLL(None).usleep(200_000), 3) < STEPS
    assert counter.steps(lambda: ctypes.CDLL(None).usleep(200_000), 3) > STEPS


def test_threads_go_on_while_it_loads_and_verifies(counter: Counter, tmp_path: Path) -> None:
    state = {"t": torch.ones(64 * MIB)}
    holdfast.save_async(state, tmp_path / "s").wait(120)
    holdfast.flush(60)
    assert counter.steps(lambda: holdfast.load(tmp_path / "s", into=state), 2) > STEPS
    assert counter.steps(lambda: holdfast.load(tmp_path / "s"), 2) > STEPS
    assert counter.steps(lambda: holdfast.verify(tmp_path / "s"), 2) > STEPS


def test_threads_go_on_while_it_waits_and_flushes(counter: Counter, tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=16 * MIB)
    try:
        state = {"t": torch.ones(4 * MIB)}
        save = holdfast.save_async(state, tmp_path / "a")
        assert counter.steps(lambda: save.wait(60)) > STEPS
        save = holdfast.save_async(state, tmp_path / "b")
        # What the package's own thread waits with.
        assert counter.steps(lambda: save._native.wait_durable(60)) > STEPS
        holdfast.save_async(state, tmp_path / "c")
        assert counter.steps(lambda: holdfast.flush(60)) > STEPS
    finally:
        holdfast.flush(60)
        holdfast.configure(bytes_per_second_max=0)


def test_threads_go_on_while_it_recovers(counter: Counter, tmp_path: Path) -> None:
    """It waits for the worker of a trainer that was killed."""
    state = {"t": torch.ones(2 * MIB)}  # not in the child: OpenMP's threads are not there
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        holdfast.configure(bytes_per_second_max=64 << 10)
        save = holdfast.save_async(state, tmp_path / "s")
        while not save._native.worker_pid:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    found = {}
    assert counter.steps(lambda: found.update(holdfast.recover(tmp_path, wait_for_orphans=0.5))) > STEPS
    assert found["fenced"], found
