"""Queues of requests, with the names and signatures of Megatron's and nvidia-resiliency-ext's."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from holdfast import _runtime
from holdfast._process import PerProcess
from holdfast.errors import Error
from holdfast.megatron.requests import ForkedCall, NoCall, OwnCall
from holdfast.megatron.ticket import save_of

logger = logging.getLogger("holdfast.megatron")

_POLL = 0.02  # seconds between two looks of a blocking wait


def _device_of_exchanges() -> torch.device:
    """Where the default group's backend wants its tensors."""
    return torch.device(c10d._get_object_coll_device(None))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _raise_here(failure: BaseException) -> NoReturn:
    """Raises this rank's failure alone."""
    raise CheckpointException("write", {dist.get_rank() if _has_group() else 0: _wrap_exception(failure)})


def _raise_on_all(failure: BaseException | None) -> NoReturn:
    """Raises the failures of all ranks; all of them call it, those that have none too."""
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, _wrap_exception(failure) if failure is not None else None)
    raise CheckpointException("write", {rank: found for rank, found in enumerate(of_all) if found is not None})


class _Call:
    """A request in the queue.

    Attributes:
        idx: its number, the same on all ranks.
        async_caller: what runs it.
        async_request: as it was scheduled.
        had_group: whether there was a process group then.
    """

    def __init__(self, idx: int, caller: Any, request: Any) -> None:
        self.idx, self.async_caller, self.async_request = idx, caller, request
        self.had_group = _has_group()


class _Queue(PerProcess):
    """Requests in their order; all ranks schedule and finalize in the same one.

    In a forked child it is empty: the requests are the parent's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.call_idx = -1
        _queues.add(self)

    def clear(self) -> None:
        """Begins without requests. Those of the parent are kept: what they hold may not be freed in a child."""
        self._of_the_parent = getattr(self, "async_calls", None)
        self.async_calls: deque[_Call] = deque()

    def schedule_async_request(self, async_request: Any) -> int:
        """Takes a request into the queue; all ranks call it.

        One of ours is under way already. Another's runs in a forked child, whatever its class is.

        Returns:
            Its number.

        Raises:
            Error: INVALID_ARGUMENT for what is no request.
        """
        for name in ("async_fn", "async_fn_args", "finalize_fns"):
            if not hasattr(async_request, name):
                raise Error(
                    "INVALID_ARGUMENT",
                    f"schedule a {type(async_request).__name__}: it has no {name}, so it is no request",
                )
        save = save_of(async_request)
        call: Any
        if save is not None:
            call = OwnCall(save, async_request)
        elif async_request.async_fn is None:
            call = NoCall(async_request)
        else:
            call = ForkedCall(async_request)
        self.call_idx += 1
        self.async_calls.append(_Call(self.call_idx, call, async_request))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalizes what has ended on all ranks; all ranks call it.

        What was scheduled with a process group that is gone is not finalized, and the log says so.

        Args:
            blocking: wait until all requests have ended.
            no_dist: look at this rank alone, as where there was never a process group.

        Returns:
            The numbers of the finalized requests.

        Raises:
            CheckpointException: a request has failed on some rank: on all of them, with the failures of
                all. What the other ranks have under way of it is cancelled. Its finalize functions
                are not called, unless what failed is to make durable what they have written.
        """
        finalized: list[int] = []
        while self.async_calls:
            call = self.async_calls[0]
            is_orphan = call.had_group and not _has_group()
            if is_orphan and not self._is_done(call, blocking):
                break
            if not is_orphan and not self._has_ended(call, blocking, no_dist or not _has_group()):
                break
            self.async_calls.popleft()
            if is_orphan:
                self._log_orphan(call.async_caller)
                continue
            for fn in call.async_request.finalize_fns:
                fn()
            self._sync_added(call, no_dist or not _has_group())
            finalized.append(call.idx)
        return finalized

    def _is_done(self, call: _Call, blocking: bool) -> bool:
        """Whether a request has ended on this rank."""
        while not call.async_caller.is_done:
            if not blocking:
                return False
            time.sleep(_POLL)
        return True

    def _has_ended(self, call: _Call, blocking: bool, no_dist: bool) -> bool:
        """Whether a request has ended on all ranks, or with `no_dist` on this one.

        Raises:
            CheckpointException: it has failed on some rank.
        """
        if no_dist:
            if not self._is_done(call, blocking):
                return False
            failure = call.async_caller.failure()
            if failure is not None:
                self.async_calls.popleft()
                _raise_here(failure)
            return True
        while True:
            caller = call.async_caller
            done = caller.is_done
            failure = caller.failure() if done else None
            under_way, failed_early, failed = self._of_all(
                [int(not done), failure is not None and caller.may_fail_early, failure is not None], call.idx
            )
            if failed_early or (failed and not under_way):
                self._fail(call, failure)
            if not under_way:
                return True
            if not blocking:
                return False
            time.sleep(_POLL)

    def _of_all(self, mine: list[Any], idx: int) -> list[int]:
        """The greatest of each number over all ranks, in one exchange.

        Raises:
            Error: FAILED_PRECONDITION, the ranks are not at the same request.
        """
        numbers = torch.tensor([*map(int, mine), idx, -idx], dtype=torch.int64, device=_device_of_exchanges())
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        *most, highest, lowest = numbers.tolist()
        if highest != -lowest:
            raise Error(
                "FAILED_PRECONDITION",
                f"finalize request {idx}: other ranks are at the requests {-lowest} to {highest}; all ranks "
                "must schedule and finalize the same requests in the same order",
            )
        return most

    def _fail(self, call: _Call, failure: BaseException | None) -> None:
        """Ends a request that has failed on some rank, on every rank alike."""
        self.async_calls.popleft()
        if failure is None:
            call.async_caller.cancel()
        _raise_on_all(failure)

    def _sync_added(self, call: _Call, no_dist: bool) -> None:
        """Makes durable what the finalize functions have written, on rank 0, which writes Megatron's files.

        Raises:
            CheckpointException: this has failed: on all ranks alike.
        """
        is_writer = not _has_group() or dist.get_rank() == 0
        failure = call.async_caller.sync_added() if is_writer else None
        if no_dist:
            if failure is not None:
                _raise_here(failure)
        elif self._of_all([failure is not None], call.idx) != [0]:
            _raise_on_all(failure)

    def _log_orphan(self, caller: Any) -> None:
        """Says what became of a request that no process group is left to finalize."""
        failure = caller.failure()
        if failure is not None:
            logger.error("%s: failed, and no process group is left to tell the other ranks: %s", caller, failure)
            return
        logger.warning(
            "%s: written, and not committed: the process group is gone; finalize what is scheduled "
            "before destroy_process_group()",
            caller,
        )

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are in the queue."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalizes what is in the queue; all ranks call it.

        Args:
            abort: cancel it instead, and leave no file of it.
        """
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        while self.async_calls:
            self.async_calls.popleft().async_caller.cancel()

    @classmethod
    def get_instances(cls) -> list[Any]:
        """The queues of this process."""
        return list(_queues)


_queues: weakref.WeakSet[_Queue] = weakref.WeakSet()


def _warm_up(cpu_priority: int | None, io_priority: int | None) -> None:
    """Starts a kept worker with these priorities. Options that `holdfast.configure` has set stay."""
    wanted: dict[str, Any] = {"launcher": "persistent", "nice": cpu_priority, "io_priority_class": io_priority}
    runtime = _runtime.default
    options = {k: v for k, v in wanted.items() if v is not None and k not in runtime.options}
    try:
        if options:
            runtime.configure(options)
        runtime.warm_up()
    except Error as error:
        logger.warning("warm up: %s", error)


class AsyncCallsQueue(_Queue):
    """The queue with the signatures of Megatron-Core."""

    def __init__(self, persistent: bool = False) -> None:
        """A queue.

        Args:
            persistent: how the stock one works; accepted and not used.
        """
        super().__init__()
        self.persistent = persistent

    @classmethod
    def warmup_persistent_caller(
        cls, rank: int, mp_mode: str = "spawn", cpu_priority: int = 10, io_priority: int | None = None
    ) -> None:
        """Starts a worker that is kept.

        Args:
            rank, mp_mode: accepted and not used.
            cpu_priority: nice value of the worker.
            io_priority: its class of I/O priorities; None: as it is.
        """
        _warm_up(cpu_priority, io_priority)


class NvrxAsyncCallsQueue(_Queue):
    """The queue with the signatures of nvidia-resiliency-ext."""

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """A queue.

        Args:
            persistent, is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode: how the
                stock one works; accepted and not used.
        """
        super().__init__()
        self.persistent = persistent

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        otel_bootstrap: Any = None,
    ) -> None:
        """As of `AsyncCallsQueue`."""
        _warm_up(cpu_priority, io_priority)

    def close(self, abort: bool = False) -> None:
        """As of `AsyncCallsQueue`; the next request has the number 0 again."""
        super().close(abort)
        self.call_idx = -1


class _NoManager:
    def shutdown(self) -> None:
        """Does nothing: no process was started."""


class _NoResults:
    """In the place of the stock writers' queue of results: ours come from the runtime."""

    _manager = _NoManager()


def get_write_results_queue(mp_mode: str = "spawn") -> Any:
    """In the place of the stock function: nothing is sent through it, and no process starts."""
    return _NoResults()
