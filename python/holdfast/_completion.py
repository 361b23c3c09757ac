"""How a save ends: in a thread that sees it through, with futures that end whatever happens there."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # before Python 3.11 not the built-in one
from typing import Any

from holdfast.errors import Error, TimeoutError

logger = logging.getLogger("holdfast")

_here = threading.local()


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Around observers and done-callbacks: no wait for a save may begin in this thread meanwhile."""
    before, _here.telling = getattr(_here, "telling", False), True
    try:
        yield
    finally:
        _here.telling = before


def check_may_wait(what: str) -> None:
    """Refuses a wait inside of an observer or a done-callback.

    The thread there is the one that ends the save, and younger saves may wait for it in turn.

    Raises:
        Error: FAILED_PRECONDITION.
    """
    if getattr(_here, "telling", False):
        raise Error(
            "FAILED_PRECONDITION",
            f"{what} inside of an observer or a done-callback: it would wait for itself; use the "
            "arguments that the observer is given, or wait in another thread",
        )


def waitable(timeout: float | None) -> float | None:
    """The time-out, or the longest that a wait of the interpreter's can have: three centuries."""
    return None if timeout is None else min(timeout, threading.TIMEOUT_MAX)


class SeenFuture(Future):
    """A future of a save.

    Attributes:
        seen: whether its outcome was asked for.
        report: of a DCP save that has ended well, whose result is the framework's metadata.
    """

    seen = False
    report: dict[str, Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    @property
    def ended_well(self) -> bool:
        """Whether the future has a result. This is no look at the outcome."""
        return self.done() and super().exception() is None

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            check_may_wait("wait for a save")
        try:
            return super().result(waitable(timeout))
        finally:
            self.seen = self.seen or self.done()

    def of_save(self, path: str, timeout: float | None) -> Any:
        """The result.

        Raises:
            TimeoutError: the save of `path` goes on.
        """
        try:
            return self.result(timeout)
        except FutureTimeoutError:
            raise TimeoutError("DEADLINE_EXCEEDED", f"wait for {path}: not durable yet") from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            check_may_wait("wait for a save")
        try:
            return super().exception(waitable(timeout))
        finally:
            self.seen = self.seen or self.done()


def log_failure(message: str, *arguments: Any) -> None:
    """Logs the exception that is being handled. A handler that raises ends no save either."""
    with contextlib.suppress(BaseException):
        logger.exception(message, *arguments)


def end(future: Future, value: Any, error: BaseException | None) -> None:
    """Ends a future, if it has not ended. Never raises, whatever its done-callbacks do."""
    if future.done():
        return
    try:
        with telling():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)
    except BaseException:  # the base class catches only Exception of a callback
        log_failure("a done-callback of a save failed")


class _Thread(threading.Thread):
    """A thread whose `start` does not wait: `has_set` waits once, for the thread and what it does first.

    A new thread takes memory for its first frame. Without any, it ends at once, and the `start` of
    the base class waits for its signal for ever.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        # A daemon thread's children are daemons by default, and the interpreter waits for no daemon.
        super().__init__(target=run, name=name, daemon=False)
        self._started: threading.Event = _Started()
        self._entry: weakref.ref[Any] | None = None

    @property
    def _bootstrap(self) -> Callable[[], None]:
        # The new thread alone holds this object, until its end.
        entry = functools.partial(threading.Thread._bootstrap, self)  # type: ignore[attr-defined]
        self._entry = weakref.ref(entry)
        return entry

    def has_set(self, event: threading.Event | None) -> bool:
        """Waits for what the thread sets, None: until it runs. False: it ended before it ran."""
        event = event or self._started
        while not threading.Event.wait(event, 1.0 if self._started.is_set() else 0.05):
            ended = self._entry is None or self._entry() is None
            if ended and not event.is_set():  # asked last: it may have run, and ended, meanwhile
                return False
        return True


class _Started(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return True


class Completion:
    """Calls `run` in a thread of its own, for which the interpreter waits before it exits.

    Where there can be no such thread, at the end of the interpreter or at a limit, `start` itself
    calls `run`: the caller waits for the save, and the save still ends.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._thread = _Thread(run, name)

    def start(self, until: threading.Event | None = None) -> None:
        """Starts, and waits for what `run` sets; None: until the thread runs."""
        # The interpreter has waited for its threads once the main thread counts as ended.
        if threading.main_thread().is_alive():
            why = "the new thread ended before it ran"
            try:
                self._thread.start()
            except (RuntimeError, MemoryError) as error:
                why = str(error)
            else:
                if self._thread.has_set(until):
                    return
            logger.warning("%s: %s; the call waits for the save", self._thread.name, why)
        self._thread.run()

    @property
    def has_started(self) -> bool:
        """Whether there is a thread, also after an interrupted `start`."""
        return self._thread._entry is not None and self._thread.has_set(None)

    def name(self, name: str) -> None:
        self._thread.name = name

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self._thread.is_alive():  # not if `start` has called `run` itself
            self._thread.join(timeout)
