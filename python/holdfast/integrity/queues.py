"""Trainers whose saves are requests in a queue, which all ranks ask together: those of Megatron-Core."""

from __future__ import annotations

import collections
import contextlib
import errno
import importlib
import os
import time
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import holdfast.megatron
from holdfast.integrity import megatron, trainer
from holdfast.megatron.ticket import save_of

DIALECTS = ("mcore", "nvrx")
_POLL = 0.005


class Requests:
    """The saves of a life, in the order in which all ranks schedule and finalize them.

    Args:
        queue: whose `maybe_finalize_async_calls` is asked.
        strategy: that saves.
        dialect: of both; "" where Megatron-Core has no names for them.
    """

    def __init__(self, queue: Any, strategy: Any, dialect: str) -> None:
        self._queue, self._strategy, self._dialect = queue, strategy, dialect
        self._pending: collections.deque[Scheduled] = collections.deque()
        self.broken = False  # nothing can be saved any more

    def save(self, state: dict[str, Any], path: str) -> Scheduled:
        """Saves and schedules."""
        _make_on_all_ranks(path)
        options = {"async_strategy": self._dialect} if self._dialect else {}
        request = megatron.core().save(state, path, self._strategy, async_sharded_save=True, **options)
        made = Scheduled(path, request)
        self._queue.schedule_async_request(request)
        self._pending.append(made)
        return made

    def ask(self) -> None:
        """Finalizes what has ended, as a training does after each step."""
        before = self._queue.get_num_unfinalized_calls()
        failure: BaseException | None = None
        try:
            self._queue.maybe_finalize_async_calls()
        except trainer.Exiting:
            raise
        except BaseException as error:  # as the framework's own
            failure = error
        ended = before - self._queue.get_num_unfinalized_calls()
        for left in reversed(range(ended)):
            self._pending.popleft().end(failure if left == 0 else None)
        if failure is not None and (ended == 0 or not isinstance(failure, CheckpointException)):
            self.abandon(failure)  # the exchange of the ranks is broken

    def drain(self, seconds: float) -> bool:
        """Asks until all has ended; returns whether it has in this time."""
        end = time.monotonic() + seconds
        while self._pending and time.monotonic() < end:
            self.ask()
            if self._pending:
                time.sleep(_POLL)
        return not self._pending

    def abandon(self, failure: BaseException) -> None:
        """Gives all up, as a training does that ends with an exception."""
        self.broken = True
        with contextlib.suppress(Exception):
            self._queue.close(abort=True)
        while self._pending:
            self._pending.popleft().end(failure)


def _make_on_all_ranks(path: str) -> None:
    """Makes a directory, as a training does before its save; it is there on all ranks, or all of them fail."""
    errnos = [0] * dist.get_world_size()
    failure: OSError | None = None
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        failure, errnos[dist.get_rank()] = error, error.errno or errno.EIO
    if len(errnos) > 1:
        dist.all_gather_object(errnos, errnos[dist.get_rank()])
    if failure is not None:
        raise failure
    if any(errnos):
        raise OSError(max(errnos), "another rank could not make it", path)


class Scheduled:
    """A save whose request is scheduled.

    Attributes:
        path: of the checkpoint.
        durable: ends when the request is finalized.
    """

    def __init__(self, path: str, request: Any) -> None:
        self.path = path
        self.durable: Future[Any] = Future()
        self._own = save_of(request)  # None: of another saver

    def end(self, failure: BaseException | None) -> None:
        """Tells the end, with the report of this rank's part."""
        own, self._own = self._own, None
        if failure is not None:
            self.durable.set_exception(failure)
        else:
            self.durable.set_result(own.written.save.durable.result() if own else {})  # type: ignore[attr-defined]

    def wait_for_part(self, seconds: float) -> None:
        """Waits until this rank's part has ended; the others need not know of that."""
        end = time.monotonic() + seconds
        while self._own is not None and not self._own.has_ended and time.monotonic() < end:
            time.sleep(_POLL)


class Trainer(trainer.Trainer):
    """A rank that saves through Megatron-Core, in whose place `holdfast.megatron.install` has put Holdfast's parts."""

    has_group = True

    def run(self) -> None:
        super().run()
        if self._requests.broken:
            raise trainer.Exiting(0)  # the others wait for this rank until its connections are closed

    def _open(self, rate: int = 0) -> None:
        self._requests = self._make()
        super()._open(rate)

    def _make(self) -> Requests:
        holdfast.megatron.install()
        of_torch = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
        dialect = DIALECTS[self.round["number"] % len(DIALECTS)] if hasattr(of_torch, "get_async_strategy") else ""
        if dialect:
            queue = of_torch.get_async_strategy(dialect)[1]["AsyncCallsQueue"]()
        else:  # Megatron-Core 0.16
            queue = importlib.import_module("megatron.core.dist_checkpointing.strategies.async_utils").AsyncCallsQueue()
        return Requests(queue, of_torch.TorchDistSaveShardedStrategy("torch_dist", 1), dialect)

    def _save(self, action: dict[str, Any]) -> None:
        if not self._requests.broken:
            super()._save(action)
            self._requests.ask()

    def _call(self, action: dict[str, Any], state: dict[str, Any]) -> Any:
        path = os.path.join(self.directory, self.name_of(action))
        try:
            return self._requests.save(state, path)
        except trainer.Exiting:
            raise
        except BaseException as error:
            self._requests.abandon(error)
            raise

    def _state(self, action: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
        number, made, _ = super()._state(action)
        return number, made, megatron.state_of(made, self.rank, self.round["ranks"], action["step"])

    def _await_part(self, save: Any, ended: Any) -> None:
        save.wait_for_part(trainer.TIME_OUTCOME_MAX)

    def _wait(self, action: dict[str, Any]) -> None:
        if not self.exiting and not self._requests.drain(trainer.TIME_OUTCOME_MAX):
            self.tell_hang()
            self._requests.abandon(TimeoutError("a save hangs"))
        self.outcomes.clear()
