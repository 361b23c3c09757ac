"""The pauses of Python's garbage collector, beside threads and forks."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import pytest

from holdfast import _collector


@pytest.fixture(autouse=True)
def _enabled() -> None:
    assert gc.isenabled()


@contextlib.contextmanager
def _paused_by_another_thread() -> Iterator[None]:
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        with _collector.paused():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=pause)
    other.start()
    assert entered.wait(60)
    yield
    leave.set()
    other.join()


def test_pauses_of_threads_that_overlap_end_with_the_last() -> None:
    with contextlib.ExitStack() as other:
        with _collector.paused():
            other.enter_context(_paused_by_another_thread())
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_leaves_a_collector_that_was_off() -> None:
    gc.disable()
    try:
        with _collector.paused(), _collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def _in_child() -> int:
    """The status of a forked child: whether its collector works, then within a pause, then after it."""
    pid = os.fork()
    if pid == 0:
        states = [gc.isenabled()]
        with _collector.paused():
            states.append(gc.isenabled())
        states.append(gc.isenabled())
        os._exit(sum(state << i for i, state in enumerate(states)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_forked_in_the_pause_of_another_thread_collects() -> None:
    with _paused_by_another_thread():
        assert _in_child() == 0b101
    assert gc.isenabled()


def test_a_child_forked_in_a_pause_of_its_own_thread_is_paused() -> None:
    with _collector.paused():
        assert _in_child() == 0
    assert gc.isenabled()
