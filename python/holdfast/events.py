"""Who is told what became of saves: observers, called for every save of this process.

Whatever saves, plain or DCP, calls `begin` when a save is under way and `publish` when it has
ended. An observer can never fail a save; it runs in the save's own thread, not in the training's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

# Here and not where they are called: an import in the save's thread can fail there, for want of
# descriptors or on a bad disk.
from holdfast import _arguments, _completion, _log, _ranks, _recent, snapshots
from holdfast._process import PerProcess
from holdfast.errors import Error

logger = logging.getLogger("holdfast")

Report = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


class Subject(Protocol):
    """What an observer may ask a save for.

    Attributes:
        path: where the checkpoint stands, or would.
        step: as the caller counts.
        extra: ``rank`` and ``world_size``; ``kind``, ``"state"`` (default) or ``"dcp"``.
    """

    path: str
    step: int
    extra: dict[str, Any]


@dataclasses.dataclass(eq=False)
class Published:
    """A `Subject` for what has no handle of its own."""

    path: str
    step: int
    extra: dict[str, Any]


Observer = Callable[[Any, Report | None, Error | None], None]

# Called with (subject, report or None, error or None), before the save's futures end.
observers: list[Observer] = []

_REFUSALS = frozenset(
    """ALREADY_EXISTS FAILED_PRECONDITION INVALID_ARGUMENT NOT_FOUND RESOURCE_EXHAUSTED UNAVAILABLE
    UNIMPLEMENTED""".split()
)


class _Running(PerProcess):
    def clear(self) -> None:
        self.saves: dict[int, Any] = {}


_running = _Running()


def begin(subject: Subject) -> None:
    """Counts a save as in flight, until it is published."""
    with _running.lock:
        _running.saves[id(subject)] = subject


def in_flight() -> int:
    """How many saves of this process are under way."""
    with _running.lock:
        return len(_running.saves)


def publish(subject: Subject, report: Report | None, error: Error | None) -> None:
    """Tells every observer what became of a save. Never raises.

    Args:
        subject: what was saved where; ``extra["raised"]`` is true if the call itself raised.
        report: of a save that is durable; observers see it as it will be handed to the caller, and
            the comparison with the previous save is added to it here.
        error: of one that is not.
    """
    try:
        with _completion.telling():
            for observer in (snapshots.compare_with_previous, _log.log, _recent.note, *observers):
                try:
                    observer(subject, report, error)
                except BaseException:  # SystemExit, too, would end the save's thread
                    _completion.log_failure("an observer of saves failed on %s", subject.path)
    finally:
        with _running.lock:
            _running.saves.pop(id(subject), None)


def tells_refusals(call: Callable[P, R]) -> Callable[P, R]:
    """Decorates ``save(state, path, *, step=0, ...)``: an `Error` that it raises is published, too.

    Otherwise a save that was skipped or refused would show in no count.
    """

    @functools.wraps(call)
    def counted(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except Error as error:
            given: dict[str, Any] = dict(kwargs)
            path = args[1] if len(args) > 1 else given.get("path", "")
            who = {k: given[k] for k in ("rank", "world_size") if isinstance(given.get(k), int)}
            step = given.get("step")
            publish_raised(str(path), step if isinstance(step, int) else 0, error, **who)
            raise

    return counted


def publish_raised(path: str, step: int, error: Error, **extra: Any) -> None:
    """Publishes what a call raises, of a save that has no handle."""
    rank, world_size = _ranks.rank_and_world()
    who = {"rank": rank, "world_size": world_size, "raised": True}
    publish(Published(path, step, {**who, **extra}), None, error)


def outcome(subject: Subject, error: Error | None) -> str:
    """``"durable"``, ``"failed"``, ``"cancelled"``, ``"skipped"``, or ``"refused"`` by the call."""
    if error is None:
        return "durable"
    if subject.extra.get("skipped"):
        return "skipped"
    if error.code == "CANCELLED":
        return "cancelled"
    # A call also raises what fails while it is staging.
    refused = subject.extra.get("raised") and error.code in _REFUSALS and not error.errno
    return "refused" if refused else "failed"


class Handle:
    """An observer that was added; ``close()``, or the end of a ``with``, removes it.

    Raises:
        Error: INVALID_ARGUMENT for what cannot be called.
    """

    def __init__(self, observer: Observer, on_close: Callable[[], None] = lambda: None) -> None:
        if not callable(observer):
            raise _arguments.wrong("Handle", "observer", observer, "a function of a save, its report and its error")
        self._observer: Observer | None = observer
        self._on_close = on_close
        observers.append(observer)

    def close(self) -> None:
        """Removes the observer; a second time does nothing."""
        if self._observer is not None:
            observers.remove(self._observer)
            self._observer = None
            self._on_close()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
