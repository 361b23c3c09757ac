"""The handle of a save, the table of saves in flight, and how they end: `flush` and the exit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from holdfast import _arguments, _completion, _devices, _late, _native, _runtime, events
from holdfast._process import PerProcess
from holdfast.errors import Error, TimeoutError


class UnderWay(Protocol):
    """What the table of saves in flight holds: a `Save`, or one of `holdfast.dcp`."""

    path: str
    durable: _completion.SeenFuture
    runtime: _runtime.Runtime | None  # that it was begun with
    refused: bool  # it never began: the call has raised, or the save was skipped

    @property
    def staged(self) -> Future:
        """Ends when everything was copied out of the state."""

    def wait(self, timeout: float | None = None) -> Any:
        """Blocks until the save has ended; raises its error, or TimeoutError."""

    def join(self) -> None:
        """Waits until the save's thread has ended, after its futures have."""

    def hold_back_training(self) -> None:
        """Orders what the training changes next behind the save's copies."""


class _Table(PerProcess):
    def clear(self) -> None:
        self.in_flight: set[UnderWay] = set()
        self.failed: list[UnderWay] = []  # whose error was not read
        self.kept: list[Any] = []  # tensors, until the interpreter's end


_table = _Table()


def begun(save: UnderWay) -> None:
    """Puts a save on the table."""
    with _table.lock:
        _table.in_flight.add(save)


def ended(save: UnderWay, *, failed: bool) -> None:
    """Takes a save off the table. Failures whose error was read are forgotten."""
    with _table.lock:
        _table.in_flight.discard(save)
        if failed:
            _table.failed[:] = [s for s in _table.failed if not s.durable.seen] + [save]


def in_flight() -> list[UnderWay]:
    """The saves of this process that have not ended."""
    with _table.lock:
        return list(_table.in_flight)


def _unread() -> list[UnderWay]:
    """The saves that failed, and whose error was not read."""
    with _table.lock:
        return [s for s in _table.failed if not s.durable.seen]


class Save:
    """One save. Dropping it does not stop the save.

    Attributes:
        path: where the checkpoint will stand.
        step: the training step that it was given.
        skipped: whether the save was left out, with ``when_full="skip"``. `staged` then has ended
            with None and `durable` with an UNAVAILABLE error, which `flush` and the exit pass over.
            What one rank leaves out, all leave out: this is final when `durable` has ended.
        staged: a future, done once everything was copied out of the state; CPU tensors always are
            when `save_async` returns. Only device tensors that ``late`` names must stay unchanged
            until then.
        durable: a future of the report, done once the checkpoint survives power loss. Its exception
            is the save's.
        objects: paths of what was pickled.
        contiguous_copies: paths of tensors that had to be copied to be saved.
    """

    def __init__(self, start: Callable[[], _native.SaveHandle], path: str, step: int,
                 extra: dict[str, Any], keep: list[Any], door: _native.Checkpointer, *,
                 runtime: _runtime.Runtime, ordered: Iterable[torch.device] = (),
                 watch: _late.Watch | None = None, publishes: bool = True, skips: bool = False,
                 on_failure: Callable[[], None] | None = None) -> None:
        # `start` may wait for memory. It is called in the thread that sees the save through: Ctrl-C
        # ends the caller's wait for it, and never gets between a save that began and its handle.
        self.path = path
        self.step = step
        self.skipped = False
        self.runtime: _runtime.Runtime | None = runtime
        self.staged = _completion.SeenFuture()
        self.durable = _completion.SeenFuture()
        self.objects: list[str] = extra["objects"]
        self.contiguous_copies: list[str] = extra["contiguous_copies"]
        self.extra = extra
        self._native: Any = None  # there once it has begun
        self._start: Callable[[], _native.SaveHandle] | None = start
        self._begun = threading.Event()
        self._refusal: BaseException | None = None
        self.refused = False  # or given up by `cancel`: no failure to tell of
        self._cancelled = False
        self._keep: list[Any] | None = keep
        # It must outlive the save. A handle may live on for long, and keeps no staging memory.
        self._door: _native.Checkpointer | None = door
        self._pid = os.getpid()
        self._publishes = publishes  # False: it is a part of what its owner publishes
        self._skips = skips  # with when_full="skip"
        self._on_failure = on_failure  # called before the futures end
        self._report: dict[str, Any] | None = None
        self._devices = {s.device for s in keep}
        self._late = watch or None
        self._completion = _completion.Completion(self._run, "holdfast-save")
        if self._late is not None:
            _wait_before_steps()
        try:
            self._completion.start(self._begun)
            self._hold_back(ordered)
        except BaseException:
            self.refused = True
            self._give_up()
            raise
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            try:
                raise refusal
            finally:
                del refusal  # its traceback has this frame

    def _run(self) -> None:
        """The save's own thread. Whatever is raised here, `_end` ends the futures."""
        report = None
        error: Error | None = None
        try:
            self._begin()
            report = self._watch()
        except Error as failed:
            error = failed
        except BaseException as failed:
            error = Error("INTERNAL", f"wait for {self.path}: {failed!r}")
        finally:
            self._end(report, error)

    def _begin(self) -> None:
        begun(self)
        start, self._start = self._start, None
        assert start is not None
        try:
            self._native = start()
        except BaseException as refusal:
            refusal.__traceback__ = None  # it would keep what `start` was made of
            self.refused = True
            if self._is_skip(refusal):
                raise
            self._refusal = refusal
            raise Error("CANCELLED", f"save {self.path}: it did not begin") from None
        finally:
            del start  # and all that it was made of
        if self._publishes:
            events.begin(self)
        if "called_ns" in self.extra:
            self.extra["time_blocked"] = (time.monotonic_ns() - self.extra["called_ns"]) / 1e9
        self._begun.set()
        self._completion.name(f"holdfast-save-{self._native.epoch}")

    def _give_up(self) -> None:
        with contextlib.suppress(Error):
            if self._native is not None:
                self._native.cancel()

    def _watch(self) -> dict[str, Any]:
        if self.refused:
            self._give_up()
        try:
            self._native.wait_staged(None)
            if self._late is not None:
                fault = self._late.end()
                self._native.confirm(fault and f"save {self.path}: {fault}")
            self._keep = None
            _completion.end(self.staged, None, None)
        except BaseException:
            pass  # the save's own error, which follows, says why
        return {**self._native.wait_durable(None), **self.extra}

    def _end(self, report: dict[str, Any] | None, error: Error | None) -> None:
        self._keep = None
        if self._cancelled and error is not None and error.code == "CANCELLED":
            self.refused = True
        if error is not None and self._is_skip(error):
            self.refused = self.skipped = self.extra["skipped"] = True
            error = Error("UNAVAILABLE", error.message)  # also where another rank has left it out
        try:
            if self._publishes and (self._native is not None or self.skipped):
                events.publish(self, report, error)
        finally:
            self._report = report
            if report is None and error is None:
                error = Error("INTERNAL", f"save {self.path}: its thread has died")
            if error is not None and self._on_failure is not None:
                self._on_failure()
            self._on_failure = None
            _completion.end(self.staged, None, None if self.skipped else error)
            _completion.end(self.durable, report, error)
            ended(self, failed=error is not None and not self.refused)
            self._door = None
            self._begun.set()

    def _is_skip(self, error: BaseException) -> bool:
        """Whether this rank's runtime has left the save out, as ``when_full="skip"`` asks, or another rank's."""
        codes = ("UNAVAILABLE", "ABORTED") if self._skips else ()
        return isinstance(error, Error) and error.code in codes and ": skipped, " in error.message

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Error(
                "FAILED_PRECONDITION",
                f"use of the save of {self.path} in a process that did not start it",
            )

    @property
    def report(self) -> dict[str, Any] | None:
        """What became of it (see the documentation of reports); None while it is under way."""
        return self._report

    def progress(self) -> dict[str, Any]:
        """``phase``, ``bytes_total``, ``bytes_sealed`` and ``bytes_written``."""
        self._check_process()
        if self._native is None:
            return {"phase": "skipped", "bytes_total": 0, "bytes_sealed": 0, "bytes_written": 0}
        return self._native.progress()

    def cancel(self) -> None:
        """Asks for the save to be given up and its partial files removed.

        `durable` then fails with CANCELLED, unless the save was already committing. `flush` and the exit
        pass over that.
        """
        self._check_process()
        self._cancelled = True
        if self._native is not None:
            self._native.cancel()

    @_arguments.checked
    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Blocks until the checkpoint is durable and returns the report.

        Raises:
            TimeoutError: the save goes on.
            Error: the save's own; FAILED_PRECONDITION inside of an observer, where the save has not
                ended.
        """
        self._check_process()
        return self.durable.of_save(self.path, timeout)

    def wait_staged_on(self, stream: Any = None) -> None:
        """Makes a CUDA stream wait, not the CPU, until this save's copies have ended.

        To be put in front of what changes tensors that `late` names, where that is no optimizer's
        step: these wait by themselves. Without CUDA tensors in the state it does nothing.

        Args:
            stream: a ``torch.cuda.Stream``; default the current one of each device.
        """
        self._check_process()
        if self._late is not None:
            self._late.release()
        for device in self._devices if self._native is not None else ():
            _devices.wait_staged_on(self._native, device, stream)

    def join(self) -> None:
        """Waits until the save's thread has ended, after its futures have."""
        self._completion.join()

    def hold_back_training(self) -> None:
        """Orders what the training changes next behind the save's late copies."""
        if self._late is not None:
            self._late.release()
            self._hold_back(self._devices)

    def _hold_back(self, devices: Iterable[torch.device]) -> None:
        """Makes the current stream of some devices wait for the copies, or else this thread.

        A failed save raises nothing here: its futures and `flush` tell of it.
        """
        try:
            for device in devices if self._native is not None else ():
                _devices.wait_staged_on(self._native, device)
        except Error as error:
            events.logger.warning("wait for the copies of %s: %s", self.path, error)
            self.staged.exception()  # should the save go on, its tensors stay as they are


@functools.cache
def _wait_before_steps() -> None:
    """From now on the step of every optimizer waits for the copies of saves in flight."""

    def hold_back() -> None:
        for save in in_flight():
            if not save.staged.done():
                save.hold_back_training()

    _late.before_every_step(hold_back)


@_arguments.checked
def flush(timeout: float | None = None) -> None:
    """Waits until no save of this process is in flight, nor a deletion behind one.

    Raises:
        Error: the first of a save whose error was not read yet; FAILED_PRECONDITION inside of an
            observer or a done-callback, where it would wait for itself.
        TimeoutError: saves, or deletions, go on after `timeout` seconds in all.
    """
    flush_of(None, timeout)


def flush_of(runtime: _runtime.Runtime | None, timeout: float | None) -> None:
    """As `flush`, for the saves that were begun with one runtime; None: with any."""
    _completion.check_may_wait("flush")
    waited: list[BaseException] = []
    left = _runtime.Deadline(timeout).left
    for save in in_flight():
        if runtime not in (None, save.runtime):
            continue
        try:
            save.wait(left())
        except TimeoutError:
            raise
        except Error as error:
            if not save.refused:
                waited.append(error)
        save.join()
    for flushed in _runtime.runtimes() if runtime is None else [runtime]:
        flushed.flush(left)  # a time-out here leaves the failures to the next call
    unread = [s for s in _unread() if runtime in (None, s.runtime)]
    errors = [*(s.durable.exception() for s in unread), *waited]
    with _table.lock:
        _table.failed[:] = [s for s in _table.failed if not s.durable.seen]
    if errors and errors[0] is not None:
        raise errors[0]


def _at_exit() -> None:
    """The interpreter has waited for the saves' threads; an unseen failure must show.

    A save is still in flight only where Ctrl-C has ended that wait.
    """
    left = in_flight()
    unseen = _unread()
    if not unseen and not left:
        return
    for save in unseen:
        print(f"holdfast: save {save.path} failed: {save.durable.exception()}", file=sys.stderr)
    for save in left:
        # No thread drops a tensor any more: PyTorch takes the GIL for it, and the interpreter's end then aborts.
        _table.kept += [save._keep] if isinstance(save, Save) else []
        print(
            f"holdfast: save {save.path}: the wait for it was interrupted; it may be incomplete, see "
            "holdfast.list_checkpoints and holdfast.recover",
            file=sys.stderr,
        )
    sys.stderr.flush()
    # sys.exit has no effect here, and exit status 0 would say that all went well. Handlers that were
    # registered before this one have yet to run.
    if not _native.fail_at_exit():
        os._exit(1)


atexit.register(_at_exit)
