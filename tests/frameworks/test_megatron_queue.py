"""Requests: ours under every queue, other people's under ours, and what ends them."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron_jobs import DEADLINE, State, finalize, fresh, held_worker, run, stock_queue
from no_gpu import cpu_for_gpu
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.megatron
from holdfast import handle


def _request(state: State, directory: str, dialect: str = "mcore") -> Any:
    from megatron.core.dist_checkpointing import save

    return save(
        state.sharded(), directory, holdfast.megatron.SaveStrategy(), async_sharded_save=True, async_strategy=dialect
    )


def _eventually(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# ---- Ours under the stock queues.


def _has_returned(queue: Any, name: str) -> bool:
    """Whether the function of the one request has returned, in its process."""
    if name.endswith("temporal"):
        return not queue.async_calls[0].async_caller.process.is_alive()
    return bool(queue.maybe_finalize_async_calls())


def under_a_stock_queue(rank: int, directory: str, name: str, looks: int = 20) -> None:
    cpu_for_gpu.without_gpu()
    queue = stock_queue(name)
    state, saved = State(1), State(1)
    path = fresh(directory)
    worker = held_worker()
    request = _request(state, path, "nvrx" if name.startswith("nvrx") else "mcore")
    queue.schedule_async_request(request)
    state.train()
    try:
        for _ in range(looks):
            assert not _has_returned(queue, name), "its function returned while the save was under way"
            time.sleep(0.01)
        assert not os.path.exists(f"{path}/.metadata")
    finally:
        os.kill(worker, signal.SIGCONT)
    finalize(queue)
    assert saved.wrong_elements_in(path) == 0
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    queue.close()


@pytest.mark.parametrize("name", ["mcore temporal", "mcore persistent", "nvrx temporal", "nvrx persistent"])
def test_a_request_of_ours_runs_under_a_stock_queue(name: str, tmp_path: Path) -> None:
    if name.startswith("nvrx"):
        pytest.importorskip("nvidia_resiliency_ext")
    run(1, tmp_path, under_a_stock_queue, str(tmp_path / "run"), name)


# ---- Others' under ours.


class TheirRequest:
    """A class of requests that no queue knows."""

    def __init__(self, fn: Any, args: Any, finalize_fns: Any = ()) -> None:
        self.async_fn = fn
        self.async_fn_args = args
        self.finalize_fns = list(finalize_fns)


def _write(path: str, data: Any, *more: Any, mode: str = "w") -> None:
    with open(path, mode) as file:
        file.write(repr(data) + repr(more))


def _others(rank: int, directory: str) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    holdfast.megatron.install()
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    assert AsyncCallsQueue.__module__ == "holdfast.megatron.queue"
    queue = AsyncCallsQueue()
    fresh(directory)
    order: list[str] = []
    ended = functools.partial(order.append, "theirs")
    paths = [f"{directory}/{rank}-{name}" for name in ("a", "b", "c")]
    assert queue.schedule_async_request(TheirRequest(_write, (paths[0], rank), [ended])) == 0
    assert queue.schedule_async_request(
        AsyncRequest(_write, (paths[1], None, 5), [functools.partial(order.append, "preloaded")], preload_fn=lambda: "loaded")
    ) == 1  # fmt: skip
    checkpoint = fresh(f"{directory}/checkpoint")
    request = _request(State(2), checkpoint)
    request.add_finalize_fn(functools.partial(order.append, "ours"))
    assert queue.schedule_async_request(request) == 2
    assert queue.schedule_async_request(AsyncRequest(None, (), [functools.partial(order.append, "nothing")])) == 3
    with pytest.raises(holdfast.Error, match="it has no async_fn"):
        queue.schedule_async_request("a request")
    assert queue.get_num_unfinalized_calls() == 4
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2, 3]
    assert order == ["theirs", "preloaded", "ours", "nothing"]
    assert Path(paths[0]).read_text() == f"{rank}()"
    assert Path(paths[1]).read_text() == "'loaded'(5,)"
    assert State(2).wrong_elements_in(checkpoint) == 0
    # As Megatron does with logits: the finalize functions wait for a second request.
    second = fresh(f"{directory}/second")
    request = _request(State(3), second)
    logits = AsyncRequest(_write, (paths[2], 1), request.finalize_fns.copy())
    request.finalize_fns.clear()
    queue.schedule_async_request(request)
    del request
    queue.schedule_async_request(logits)
    finalize(queue, number=2)
    assert State(3).wrong_elements_in(second) == 0


def test_others_requests_run_in_a_forked_child(tmp_path: Path) -> None:
    run(2, tmp_path, _others, str(tmp_path / "run"))


def _fails() -> None:
    raise OSError(28, "No space left on device", "/there")


def _exits() -> None:
    os._exit(3)


def _is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _unpicklable() -> None:
    class Local(Exception):
        pass

    raise Local("of its own")


class _Long(Exception):
    def __str__(self) -> str:
        return "\N{GRINNING FACE}" * 20_000 + " at the end"


def _fails_at_length() -> None:
    raise _Long("x" * 20_000)  # with its traceback more than a pipe holds


def _failing_others(rank: int) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    for fn, said in [(_fails, "No space left"), (_exits, "exit status 3"), (_is_killed, "killed by SIGKILL"),
                     (_leaves, "exit status 3"), (_unpicklable, "of its own"), (_fails_at_length, "at the end")]:  # fmt: skip
        called: list[int] = []
        queue.schedule_async_request(
            TheirRequest(fn if rank == 1 else time.sleep, () if rank == 1 else (0.01,), [lambda c=called: c.append(1)])
        )
        with pytest.raises(CheckpointException) as raised:
            queue.maybe_finalize_async_calls(blocking=True)
        assert list(raised.value.failures) == [1]
        assert said in str(raised.value.failures[1][0])
        assert not called
        if fn is _fails:
            assert raised.value.failures[1][0].errno == 28
    assert queue.get_num_unfinalized_calls() == 0


def _ends_with_sys_exit(rank: int) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    for code in (None, 0, False):
        called: list[int] = []
        queue.schedule_async_request(TheirRequest(sys.exit, (code,), [lambda c=called: c.append(1)]))
        queue.maybe_finalize_async_calls(blocking=True)
        assert called == [1], code
    queue.schedule_async_request(TheirRequest(sys.exit, ("no room",), []))
    with pytest.raises(CheckpointException, match="no room"):
        queue.maybe_finalize_async_calls(blocking=True)


def _leaves() -> None:
    raise SystemExit(3)


def _status_is_lost(rank: int, directory: str) -> None:
    """The kernel, or other code of the training, takes the exit status of the child."""
    from holdfast.megatron.queue import AsyncCallsQueue

    fresh(directory)
    for way in ("waited for", "ignored"):
        if way == "ignored":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for fn, said in [(_write, ""), (_fails, "No space left"), (_leaves, "its exit status is lost"), (_is_killed, "is lost")]:
            queue = AsyncCallsQueue()
            arguments = (f"{directory}/{way}", way) if fn is _write else ()
            queue.schedule_async_request(TheirRequest(fn, arguments))
            if way == "waited for":
                os.waitpid(-1, 0)
            if not said:
                finalize(queue)
                assert Path(directory, way).read_text() == f"'{way}'()"
                continue
            with pytest.raises(CheckpointException, match=said):
                finalize(queue)
        queue.schedule_async_request(TheirRequest(time.sleep, (3600,)))
        queue.close(abort=True)


def test_a_request_of_others_ends_though_its_exit_status_is_lost(tmp_path: Path) -> None:
    run(1, tmp_path, _status_is_lost, str(tmp_path / "run"))


def test_a_request_of_others_may_end_with_sys_exit(tmp_path: Path) -> None:
    run(1, tmp_path, _ends_with_sys_exit)


def test_a_failure_of_others_comes_home(tmp_path: Path) -> None:
    run(2, tmp_path, _failing_others)


def _preload_is_held(rank: int) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    from holdfast.megatron.queue import AsyncCallsQueue

    class Block:
        pass

    alive: list[Any] = []

    def preload() -> Block:
        import weakref

        block = Block()
        alive.append(weakref.ref(block))
        return block

    reading, writing = os.pipe()
    queue = AsyncCallsQueue()
    queue.schedule_async_request(
        AsyncRequest(lambda path, block: os.read(reading, 1), ("", None), [], preload_fn=preload)
    )
    gc.collect()
    assert queue.maybe_finalize_async_calls() == []
    assert alive[0]() is not None
    os.write(writing, b"x")
    finalize(queue)
    gc.collect()
    assert alive[0]() is None


def test_what_a_preload_returned_is_held_until_the_child_is_joined(tmp_path: Path) -> None:
    run(1, tmp_path, _preload_is_held)


# ---- The end of requests.


def _aborted(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    worker = held_worker()
    queue.schedule_async_request(_request(State(1), path))
    queue.schedule_async_request(TheirRequest(time.sleep, (3600,)))
    os.kill(worker, signal.SIGCONT)
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    dist.barrier()
    assert os.listdir(path) == []
    holdfast.flush()
    # The queue goes on.
    queue.schedule_async_request(_request(State(2), path))
    queue.close()
    assert State(2).wrong_elements_in(path) == 0


def test_an_abort_leaves_no_file(tmp_path: Path) -> None:
    run(2, tmp_path, _aborted, str(tmp_path / "run"))


def _in_a_forked_child(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    path = fresh(directory)
    for is_durable in (False, True):
        worker = held_worker()
        if is_durable:
            os.kill(worker, signal.SIGCONT)
        queue.schedule_async_request(_request(State(1), path))
        queue.schedule_async_request(TheirRequest(time.sleep, (0.2,)))
        if is_durable:
            _eventually(lambda: queue.async_calls[0].async_caller.is_done, "the save did not end")
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                assert queue.get_num_unfinalized_calls() == 0
                queue.close(abort=True)
                queue.schedule_async_request(TheirRequest(None, ()))
                assert queue.maybe_finalize_async_calls(no_dist=True)
                status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(worker, signal.SIGCONT)
        assert len(queue.maybe_finalize_async_calls(blocking=True)) == 2
        assert State(1).wrong_elements_in(path) == 0
        holdfast.flush()


def test_a_forked_child_leaves_the_parents_requests_alone(tmp_path: Path) -> None:
    run(1, tmp_path, _in_a_forked_child, str(tmp_path / "run"))


def _dropped(rank: int, directory: str) -> None:
    path = fresh(directory)
    worker = held_worker()
    request = _request(State(1), path)
    assert handle.in_flight()
    del request
    os.kill(worker, signal.SIGCONT)
    _eventually(lambda: not handle.in_flight(), "the save was not cancelled")
    holdfast.flush()
    assert not [name for name in os.listdir(path) if name != ".metadata" and not name.endswith(".distcp")], os.listdir(
        path
    )
    assert not os.path.exists(f"{path}/.metadata")


def test_a_request_that_nobody_schedules_is_cancelled(tmp_path: Path) -> None:
    run(1, tmp_path, _dropped, str(tmp_path / "run"))


def _group_is_gone(rank: int, directory: str) -> None:
    import logging

    from holdfast.megatron.queue import AsyncCallsQueue

    said: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("holdfast.megatron").addHandler(Collects())
    queue = AsyncCallsQueue()
    path = fresh(directory)
    queue.schedule_async_request(_request(State(1), path))
    dist.barrier()
    dist.destroy_process_group()
    queue.close()
    assert f"save {path}: written, and not committed: the process group is gone" in said[-1]
    assert os.path.exists(f"{path}/__{rank}_0.distcp")
    assert not os.path.exists(f"{path}/.metadata")


def test_without_its_process_group_a_save_is_written_and_not_committed(tmp_path: Path) -> None:
    run(2, tmp_path, _group_is_gone, str(tmp_path / "run"))


def _different_requests(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue

    queue = AsyncCallsQueue()
    for _ in range(rank + 1):
        queue.schedule_async_request(TheirRequest(None, ()))
    assert queue.maybe_finalize_async_calls(no_dist=True)[0] == 0
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls(no_dist=True)
    queue.schedule_async_request(TheirRequest(None, ()))
    with pytest.raises(holdfast.Error, match="other ranks are at the requests 1 to 2"):
        queue.maybe_finalize_async_calls()
    # The same directory for all, or none.
    path = fresh(f"{directory}/{rank}")
    with pytest.raises(CheckpointException, match="all ranks must save the same checkpoints in the same order"):
        _request(State(1), path).execute_sync()


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    run(2, tmp_path, _different_requests, str(tmp_path / "run"))
