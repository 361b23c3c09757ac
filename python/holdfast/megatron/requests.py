"""Requests: what a save hands to whoever schedules it, and those of other people."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast import _collector
from holdfast.errors import Error, add_note
from holdfast.megatron import stock
from holdfast.megatron.ticket import Ticketed

_PICKLED_BYTES_MAX = 1 << 15  # of an exception that comes home
_TEXT_MAX = 1 << 14  # characters of its traceback
_ENDED_WELL = (b"", "")  # what a child says that has not failed


class _Request(NamedTuple):
    """A request where no framework has a class for it; the fields are Megatron's.

    Attributes:
        async_fn: what runs in the background; None: nothing.
        async_fn_args, async_fn_kwargs: its arguments.
        finalize_fns: called in the trainer, in order, when `async_fn` has ended on all ranks.
        preload_fn: called in the trainer; gives the second argument of `async_fn`.
        is_frozen: whether `add_finalize_fn` is over.
        call_idx: number in the queue.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: Any
    finalize_fns: list[Callable[[], None]]
    async_fn_kwargs: dict[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Adds a function to the end of `finalize_fns`.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("the request is frozen: it takes no further finalize function")
        self.finalize_fns.append(fn)

    def freeze(self) -> _Request:
        """The same request, frozen."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Runs the request in this process; all ranks call it."""
        arguments = _arguments_of(self)
        if self.async_fn is not None:
            self.async_fn(*arguments, **(self.async_fn_kwargs or {}))
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Calls the finalize functions; returns the number in the queue."""
        for fn in self.finalize_fns:
            fn()
        return self.call_idx


def _arguments_of(request: Any) -> list[Any]:
    arguments = list(request.async_fn_args or ())
    preload = getattr(request, "preload_fn", None)
    if preload is not None:
        arguments[1] = preload()
    return arguments


def request_class(dialect: str) -> type:
    """The framework's own class: its callers take no other for a request."""
    found = None
    if dialect == "nvrx":
        found = stock.find("nvidia_resiliency_ext.checkpointing.async_ckpt.core", "AsyncRequest")
    else:
        found = stock.find(stock.STRATEGIES + "async_utils", "AsyncRequest")
    return found or _Request


class OwnCall:
    """A request of ours in the queue: the save is under way since the request was made."""

    may_fail_early = True

    def __init__(self, save: Ticketed, request: Any) -> None:
        self._save = save
        self.request = request

    @property
    def is_done(self) -> bool:
        return self._save.has_ended

    def failure(self) -> BaseException | None:
        """Why it has failed, once it is done."""
        return self._save.outcome()

    def cancel(self) -> None:
        """Gives the save up and removes its files."""
        self._save.cancel()

    def sync_added(self) -> Error | None:
        """Makes durable what the finalize functions have added; returns why it cannot."""
        try:
            self._save.sync_added()
        except Error as error:
            return error
        return None

    def __str__(self) -> str:
        return f"save {self._save.path}"


class NoCall:
    """A request without anything to run."""

    may_fail_early = False
    is_done = True

    def __init__(self, request: Any) -> None:
        self.request = request

    def failure(self) -> None:
        return None

    def cancel(self) -> None:
        pass

    def sync_added(self) -> None:
        return None

    def __str__(self) -> str:
        return "a request with nothing to run"


class ForkedCall:
    """Somebody else's request: it runs in a forked child.

    What its preload function has returned is held until the child has been joined: the child may
    read memory that the parent could give to others.
    """

    may_fail_early = False

    def __init__(self, request: Any) -> None:
        self.request = request
        self._answer: tuple[bytes, str] | None = None
        self._failure: BaseException | None = None
        self._was_cancelled = False
        self._held: list[Any] | None = _arguments_of(request)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        keywords = dict(getattr(request, "async_fn_kwargs", None) or {})
        context = multiprocessing.get_context("fork")
        self._answers, answers = context.Pipe(duplex=False)
        self._process: Any = context.Process(
            target=_run, args=(answers, request.async_fn, self._held, keywords),
            name="holdfast-request",
        )  # fmt: skip
        with _collector.paused():
            self._process.start()
        answers.close()

    @property
    def is_done(self) -> bool:
        if self._process is None:
            return True
        self._receive()
        if self._is_running():
            return False
        self._process.join()
        self._receive()
        self._failure = self._outcome(self._process.exitcode)
        self._answers.close()
        if self._process.exitcode is not None:  # `multiprocessing` closes none whose status it lacks
            self._process.close()
        self._process = self._held = None
        return True

    def _is_running(self) -> bool:
        if not self._process.is_alive():
            return False
        # Where SIGCHLD is ignored, or other code waits for all children, `multiprocessing` never learns of the end.
        try:
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def _receive(self) -> None:
        """Takes what the child has to say. It does not end before: a pipe holds only a part."""
        with contextlib.suppress(EOFError, OSError):
            if self._answer is None and self._answers.poll():
                self._answer = self._answers.recv()

    def _outcome(self, status: int | None) -> BaseException | None:
        """Why it has failed; None if it has not. A status of None is one that other code has taken."""
        if self._answer is not None and self._answer != _ENDED_WELL:
            return _unpacked(*self._answer, self)
        if status == 0 or (status is None and self._answer is not None):
            return None
        if status is None:
            return Error("UNAVAILABLE", f"run {self}: its process has ended without an answer, and its exit status is lost: "
                         "SIGCHLD is ignored, or other code has waited for the process")  # fmt: skip
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        code = "CANCELLED" if self._was_cancelled else "UNAVAILABLE"
        return Error(code, f"run {self}: its process was {how}" if status < 0 else f"run {self}: its process {how}")

    def failure(self) -> BaseException | None:
        return self._failure

    def cancel(self) -> None:
        """Ends the child."""
        if not self.is_done:
            self._was_cancelled = True
            self._process.kill()
            self._process.join()
            assert self.is_done

    def sync_added(self) -> None:
        """Their files are their own."""
        return None

    def __str__(self) -> str:
        fn = self.request.async_fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        return f"the request {getattr(fn, '__qualname__', fn)}"


def _run(answers: Any, fn: Callable[..., Any], arguments: list[Any], keywords: dict[str, Any]) -> None:
    """The forked child."""
    try:
        fn(*arguments, **keywords)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code and isinstance(error.code, int):
            raise  # its exit status says enough
        if isinstance(error, SystemExit) and not error.code:  # the end of a process that has done its work
            answers.send(_ENDED_WELL)
            return
        text = "".join(traceback.format_exception(error))[-_TEXT_MAX:]
        data = b""
        with contextlib.suppress(Exception):
            error.__traceback__ = None
            data = pickle.dumps(error)
        answers.send((data if len(data) < _PICKLED_BYTES_MAX else b"", text))
        answers.close()
        sys.exit(1)
    answers.send(_ENDED_WELL)


def _unpacked(data: bytes, text: str, call: ForkedCall) -> BaseException:
    """A child's exception; where it cannot be pickled, its traceback as text."""
    with contextlib.suppress(Exception):
        if data:
            error = pickle.loads(data)
            add_note(error, text)
            return error
    return Error("UNKNOWN", f"run {call}: {text}")
