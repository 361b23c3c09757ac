"""The order of what a trainer asks for: saves that go on, and removals and links that wait behind them.

A trainer saves a checkpoint, removes the one before it and moves a link, as if each were done when the
call returns. With asynchronous saves the removal and the link wait here for the save, and are given up
if it fails: at every moment there is a whole checkpoint, and a link leads to one. A checkpoint that
stays stands in for the one that has failed, and goes when that is to be removed.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from holdfast._process import PerProcess
from holdfast.errors import add_note

logger = logging.getLogger("holdfast.lightning")


@dataclasses.dataclass(eq=False)
class Begun:
    """A save that was begun.

    Attributes:
        path: where it will stand.
        durable: its future; `ended_well` says how it has ended.
    """

    path: str
    durable: Any
    has_ended: bool = False
    is_durable: bool = False


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A removal or a link that waits.

    Attributes:
        what: for messages: ``"remove PATH"``.
        path: what is removed, or where the link will stand.
        run: does it.
        target: of a link, where it will lead; "" of a removal.
        successor: the save that must become durable before.
        others: saves that must have ended before.
        why_held: names what it must wait for besides, or "".
        was_held: what it waited for when that was asked last.
    """

    what: str
    path: str
    run: Callable[[], None]
    target: str
    successor: Begun | None
    others: Sequence[Begun]
    why_held: Callable[[], str]
    was_held: str = ""

    @property
    def is_removal(self) -> bool:
        return not self.target

    def is_given_up(self) -> bool:
        return self.successor is not None and self.successor.has_ended and not self.successor.is_durable

    def is_ready(self) -> bool:
        if self.was_held or (self.successor is not None and not self.successor.has_ended):
            return False
        return all(save.has_ended for save in self.others)


def _not_held() -> str:
    return ""


_orders: weakref.WeakSet[Order] = weakref.WeakSet()


def wait_for_all(path: str) -> None:
    """Waits for `path` in all orders of this process.

    Raises:
        BaseException: of a save of `path` that has failed, if it was not raised yet.
    """
    for order in list(_orders):
        order.wait_for(path)
        order.raise_error_of(path)


class Order(PerProcess):
    """Saves in flight, and what waits behind them. All paths are absolute, or URLs.

    A removal or a link runs in the thread of the save that it waits for, else in the caller's. A
    signal handler of the caller's thread may call any method, also in the middle of another.

    Args:
        saves_in_flight_max: a further save waits until one of so many has ended.
    """

    def __init__(self, saves_in_flight_max: int) -> None:
        self._saves_in_flight_max = saves_in_flight_max
        super().__init__()
        _orders.add(self)

    def clear(self) -> None:
        """In a forked child the parent's saves are not waited for."""
        self._changed = threading.Condition(self.lock)
        self._saves: list[Begun] = []  # in flight
        self._last: Begun | None = None  # begun last, in flight or not
        self._waiting: list[_Waiting] = []
        self._kept: list[_Waiting] = []  # removals whose successor has failed
        self._running: _Waiting | None = None
        self._is_advancing = False
        self._advances = 0  # how often one was asked for
        self._endings = 0  # saves that have ended, with what waited behind them not done yet
        self._failed: list[Begun] = []  # whose error was not raised yet
        self._errors: list[BaseException] = []  # of removals and links

    # ---- Asking for something.

    def save(self, path: str, start: Callable[[], Any]) -> Begun:
        """Begins a save, after those of the same path have ended, also those of other orders.

        What waits to remove `path`, or to put a link there, is given up: the path is written anew.

        Args:
            path: where it will stand.
            start: begins the save and returns its handle, with the future `durable`.

        Raises:
            BaseException: what `start` raises.
        """
        self._wait_for_others(path)
        with self._changed:
            self._changed.wait_for(lambda: self._may_begin(path))
            self._waiting = [w for w in self._waiting if w.path != path]
            self._kept = [w for w in self._kept if w.path != path]
        try:
            durable = start().durable
        except BaseException:
            with self._changed:  # for a caller that goes on all the same
                self._last = Begun(path, None, has_ended=True)
            raise
        with self._changed:
            begun = self._last = Begun(path, durable)
            self._saves.append(begun)
            self._hand_on(path, begun)
        durable.add_done_callback(lambda _: self._end(begun))
        return begun

    def remove(self, path: str, run: Callable[[], None], why_held: Callable[[], str] = _not_held) -> None:
        """Calls `run` once the save that was begun last is durable, unless it fails.

        A save of `path` itself is no successor; the removal waits until it has ended. One of another order
        has ended when this returns.

        Args:
            path: what is removed.
            run: removes it.
            why_held: names what still needs the path, or returns "". Asked again after each change.
        """
        self._wait_for_others(path)
        with self._changed:
            successor = self._last if self._last is not None and self._last.path != path else None
            own = [save for save in self._saves if save.path == path]
            what = f"remove {path}"
            self._waiting.append(_Waiting(what, path, run, "", successor, own, why_held))
            if successor is not None:
                self._hand_on(path, successor)
        self.advance()

    def link(self, path: str, target: str, run: Callable[[], None]) -> None:
        """Calls `run`, which puts a link to `target` at `path`, once a save of `target` is durable.

        Without a save of `target` in flight it is called now, unless the one that was begun last is of
        `target` and has failed.
        """
        with self._changed:
            saves = [save for save in (self._last, *self._saves) if save is not None and save.path == target]
            successor = saves[-1] if saves else None
            own = [save for save in self._saves if save.path == path]
            what = f"link {path} to {target}"
            self._waiting.append(_Waiting(what, path, run, target, successor, own, _not_held))
        self.advance()

    def _hand_on(self, failed: str, successor: Begun) -> None:
        """Lets what stands in for a save that has failed wait for another one."""
        standing = [w for w in self._kept if w.successor is not None and w.successor.path == failed]
        self._kept = [w for w in self._kept if w not in standing]
        for one in standing:
            one.successor = successor
        self._waiting += standing

    # ---- Looking.

    @property
    def last(self) -> Begun | None:
        """The save that was begun last, whether it has ended or not."""
        return self._last

    def is_coming(self, path: str) -> bool:
        """Whether a save of `path` is in flight, or a link will stand there."""
        with self._changed:
            links = [w for w in self._waiting if w.path == path and not w.is_removal]
            return bool(links) or any(save.path == path for save in self._saves)

    def target_of(self, path: str) -> str:
        """Where the link that will stand at `path` leads; "" if none was asked for, or all are put there."""
        with self._changed:
            return next((w.target for w in reversed(self._waiting) if w.path == path and not w.is_removal), "")

    def is_leaving(self, path: str) -> bool:
        """Whether a removal of `path` waits."""
        with self._changed:
            return any(w.path == path and w.is_removal for w in self._waiting)

    def _is_busy(self, path: str) -> bool:
        running = self._running
        return any(save.path == path for save in self._saves) or (running is not None and running.path == path)

    def _may_begin(self, path: str) -> bool:
        return len(self._saves) < self._saves_in_flight_max and not self._is_busy(path)

    # ---- Waiting.

    def _wait_for_others(self, path: str) -> None:
        for order in list(_orders):
            if order is not self:
                order.wait_for(path)

    def wait_for(self, path: str) -> None:
        """Blocks until no save of `path` is in flight and no link will be put there."""

        def is_done() -> bool:
            links = [w for w in self._waiting if w.path == path and not w.is_removal]
            return not links and not self._endings and not self._is_busy(path)

        with self._changed:
            self._changed.wait_for(is_done)

    def raise_error_of(self, path: str) -> None:
        """Raises as `raise_error`, if a save of `path` has failed whose error was not raised yet."""
        with self._changed:
            has_failed = any(save.path == path for save in self._failed)
        if has_failed:
            self.raise_error()

    def wait_for_saves(self) -> None:
        """Blocks until no save is in flight, and what waited behind them is done, unless it is held."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._saves or self._endings or self._is_advancing))

    def wait(self) -> None:
        """Blocks until no save is in flight, and what waited behind them is done.

        A removal that is held is given up.
        """
        with self._changed:
            self.wait_for_saves()
            held, self._waiting = self._waiting, []
        for one in held:
            logger.info("%s: given up, %s", one.what, one.was_held)

    def note(self, error: BaseException) -> None:
        """Keeps the error of a save that could not begin, to be raised with the others."""
        with self._changed:
            self._errors.append(error)

    def take_error(self) -> BaseException | None:
        """The error of a save that has failed, each once, with the others' in its notes."""
        with self._changed:
            failed, self._failed = self._failed, []
            errors, self._errors = self._errors, []
        errors = [*(save.durable.exception() for save in failed), *errors]
        for other in errors[1:]:
            add_note(errors[0], f"and: {other}")
        return errors[0] if errors else None

    def raise_error(self) -> None:
        """Raises the error of a save that has failed, each once."""
        error = self.take_error()
        if error is not None:
            raise error

    # ---- What happens when a save ends.

    def _end(self, begun: Begun) -> None:
        with self._changed:
            begun.has_ended, begun.is_durable = True, begun.durable.ended_well
            self._saves.remove(begun)
            if not begun.is_durable:
                self._failed.append(begun)
            self._endings += 1
            self._changed.notify_all()
        try:
            self.advance()
        finally:
            with self._changed:
                self._endings -= 1
                self._changed.notify_all()

    def advance(self) -> None:
        """Runs what has become ready, in one thread at a time. Asks again why something is held."""
        with self._changed:
            self._advances += 1
            for one in self._waiting:
                one.was_held = ""
            if self._is_advancing:
                return  # the other thread looks again before it ends
            self._is_advancing = True
        is_done = False
        try:
            while not is_done:
                is_done = self._run_next()
        finally:
            if not is_done:  # an interrupt in the caller's thread
                with self._changed:
                    self._running, self._is_advancing = None, False
                    self._changed.notify_all()

    def _run_next(self) -> bool:
        """Runs what is ready first. Returns true, and ends the advance, if nothing is."""
        with self._changed:
            given_up = [one for one in self._waiting if one.is_given_up()]
            self._waiting = [one for one in self._waiting if one not in given_up]
            self._kept += [one for one in given_up if one.is_removal]
            one = self._running = None if given_up else self._first_ready()
            advances = self._advances
            if one is None and not given_up:
                self._is_advancing = False
                self._changed.notify_all()
        if given_up:  # told before anything that waits for the advance goes on
            for left in given_up:
                assert left.successor is not None
                logger.warning("%s: given up, the save of %s has failed", left.what, left.successor.path)
            return False
        if one is None:
            return True
        held = ""
        try:
            held = one.why_held()
            if not held:
                one.run()
        except Exception as error:
            with self._changed:
                self._errors.append(error)
        with self._changed:
            self._running = None
            if held:
                # Asked for in the meantime: what held it may be over.
                one.was_held = held if advances == self._advances else ""
                self._waiting.append(one)
            else:
                for other in self._waiting:
                    other.was_held = ""
            self._changed.notify_all()
        return False

    def _first_ready(self) -> _Waiting | None:
        """The first that is ready, and takes it from the waiting. What has one path, keeps its order.

        A path is not removed before a link that was asked for earlier leads there: `why_held` sees such a
        link only then, and it may wait for others.
        """
        paths: set[str] = set()
        for one in self._waiting:
            if one.path not in paths and one.is_ready():
                self._waiting.remove(one)
                return one
            paths |= {one.path, one.target}
        return None
