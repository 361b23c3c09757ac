"""The process of a drain: until everything has arrived, until it is told to end, or until its trainer has ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.drain.following import POLL_SECONDS, Following, Tell, alone, kept_open, lock_path
from holdfast.errors import Error

_STOP_SECONDS = 3.0  # for the pieces that are on their way
_LOOK_SECONDS = 5.0  # between two listings of places on which another process works


class _SentByAnother(Exception):
    """Everything has arrived, by the work of the process that has the lock."""


class _OtherDirectory(Exception):
    """The directory was made anew, and its lock is another one."""


class Running:
    """Runs a drain in this process.

    Args:
        watch: goes on until `finish`; otherwise it is as if that had been called at the beginning.

    Attributes:
        ended_by: the signal that has ended the drain before its time; 0: none.
    """

    def __init__(self, following: Following, tell: Tell, *, watch: bool) -> None:
        self._following, self._tell, self._watch = following, tell, watch
        self.ended_by = 0
        self._condition = threading.Condition()
        self._tickets: list[int] = []
        self._rung = False
        self._finishing = not watch
        self._rings = 0
        self.rings_heeded = 0  # those before the end was asked for
        self._lock: str | None = None
        self._moved, self._look_at = 0, 0.0

    def ring(self, ticket: int | None = None, *, saved: bool = False) -> None:
        """Asks for a sweep soon, and for an answer to a ticket when all that stands there now has arrived.

        Args:
            saved: the trainer has committed a checkpoint: retention by its options begins.
        """
        with self._condition:
            self._following.retains |= saved
            self._rung = True
            self._rings += 1
            if ticket is not None and not self._finishing:  # else it is for the process that follows
                self._look_at = 0.0
                self._tickets.append(ticket)
                self._following.moved_at = time.monotonic()
            self._condition.notify_all()

    def finish(self) -> None:
        """Ends the drain when everything that is there now has arrived."""
        with self._condition:
            if self._finishing:
                return
            self._finishing, self.rings_heeded = True, self._rings
            self._following.moved_at = time.monotonic()
            self._condition.notify_all()
        with contextlib.suppress(RuntimeError):  # without a thread it is done later
            threading.Thread(target=self._bind, name="holdfast-drain-bind", daemon=True).start()

    def _bind(self) -> None:
        with contextlib.suppress(Error):  # it is tried again
            self._following.bind()

    def stop(self) -> None:
        """Ends the drain soon. What has arrived stays, and a later drain goes on from there."""
        self._following.stop.set()
        with self._condition:
            self._condition.notify_all()

    def run(self, source: str, target: str) -> Error | None:
        """Returns the error that has ended the drain."""
        self._lock = lock_path(source, target)
        try:
            while True:
                with alone(source, target, self._wait_for_lock) as self._following.lock, \
                        kept_open(self._lock, self._following.lock) as is_another:  # fmt: skip
                    with contextlib.suppress(_OtherDirectory):
                        return self._run(is_another)
        except _SentByAnother:
            return None
        except Error as error:
            return error

    def _wait_for_lock(self) -> bool:
        """Another process works on the places: what waits for this one sees what arrives there, and that it goes on."""
        if not self._watch or self._following.stop.is_set():
            return False
        goes_on = self._may_wait()
        if goes_on:
            self._following.stop.wait(POLL_SECONDS)  # not `_pause`: the bell would end it at once
        return goes_on

    def _may_wait(self) -> bool:
        """Answers those who wait, by what is there now, and lets go in the first place what has arrived: the other process may have other
        rules."""
        following = self._following
        with self._condition:
            tickets, finishing = list(self._tickets), self._finishing
        is_awaited = bool(tickets or finishing)
        error = Error("UNAVAILABLE", "drain: another process works on the same places, sends nothing, and does not end")
        moved = self._time_of_lock()
        if moved != self._moved:
            self._moved, following.moved_at = moved, time.monotonic()
        if time.monotonic() >= self._look_at or (is_awaited and following.is_stuck()):  # what ends a wait is of now
            self._look_at = time.monotonic() + _LOOK_SECONDS
            try:
                if finishing:
                    following.bind()
                coming = finishing and following.is_coming()
                if (is_awaited or following.has_too_much()) and following.look():
                    self._answer(tickets, None)
                    if finishing and not coming:
                        raise _SentByAnother
            except Error as of_place:
                error = of_place
                delay = following.trouble(of_place)
                self._look_at = time.monotonic() + (min(delay, following.patience()) if is_awaited else delay)
        if not (is_awaited and following.is_stuck()):
            return True
        self._answer(tickets, error)
        return not finishing

    def _time_of_lock(self) -> int:
        try:
            return os.stat(self._lock or "").st_mtime_ns
        except OSError:
            return 0

    def _run(self, is_another: Callable[[], bool]) -> Error | None:
        while True:
            if is_another():
                raise _OtherDirectory
            with self._condition:
                tickets, finishing, asked = list(self._tickets), self._finishing, self._rung
                self._rung = False
            try:
                if finishing:
                    self._following.bind()
                # Asked before the sweep, which has what is committed in between. A command that runs once waits for no save.
                coming = finishing and self._watch and self._following.is_coming()
                refused = self._following.sweep(asked=asked or (finishing and not coming) or bool(tickets))
            except Error as error:
                if self._following.stop.is_set():
                    return error
                if not self._watch and error.code in _LASTING:
                    return error
                delay = self._following.trouble(error)
                if self._following.is_stuck():
                    self._answer(tickets, error)
                    if finishing:
                        return error
                elif tickets or finishing:
                    delay = min(delay, self._following.patience())
                self._pause(delay, finishing)
                continue
            self._answer(tickets, None)
            delay = POLL_SECONDS if refused is None else self._following.trouble(refused)
            if finishing:
                if self._following.pending:  # a save that was on its way has been committed meanwhile
                    continue
                if not coming or self._following.is_stuck():
                    return None if self._watch else refused
            if self._following.stop.is_set():
                return Error("CANCELLED", "drain: it was asked to end")
            self._pause(delay, finishing)

    def _answer(self, tickets: list[int], error: Error | None) -> None:
        first = error or self._following.first_error()
        for ticket in tickets:
            self._tickets.remove(ticket)
            self._tell({"event": "synced", "ticket": ticket, "error": first and [first.code, first.message, first.errno]})

    def _pause(self, seconds: float, finishing: bool) -> None:
        """Waits until the time is over, the bell has rung, or the drain is to end, which the round has seen or not."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._rung or self._finishing != finishing or self._following.stop.is_set(), seconds
            )


# The cause is in the command or in the account: a command that runs once does not try again.
_LASTING = ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "UNIMPLEMENTED", "FAILED_PRECONDITION")


def on_signals(running: Running, watch: bool, *, has_trainer: bool = False) -> None:
    """SIGTERM ends a drain that watches when everything has arrived; the second one, or SIGINT, within `_STOP_SECONDS`.

    A thread waits for them: a handler would not run before the main thread's call of a server that hangs has ended.

    Args:
        has_trainer: the drain ends with its trainer: one SIGTERM does nothing. A scheduler sends it to both, and the trainer may save once more.
    """
    ending = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)

    def obey() -> None:
        is_first = watch
        while (number := signal.sigwait(ending)) == signal.SIGTERM and is_first:
            is_first = False
            if not has_trainer:
                running.finish()
        running.ended_by = number
        running.stop()
        time.sleep(_STOP_SECONDS)
        os._exit(128 + number)  # as a kill, which costs time only; at an exit Python would wait for the call

    threading.Thread(target=obey, name="holdfast-drain-signals", daemon=True).start()


def follow_commands(running: Running, commands: int, trainer: int) -> None:
    """Starts the thread that obeys a trainer's commands, one JSON line each, and sees the trainer's end.

    Args:
        commands: descriptor that they are read from.
        trainer: its process id; it must be the parent.
    """
    try:
        ends: int | None = os.pidfd_open(trainer)
    except OSError:
        ends = None
    if os.getppid() != trainer:  # the number may be another process's by now
        ends = None

    def obey() -> None:
        pending = b""
        poll = select.poll()
        poll.register(commands, select.POLLIN)
        if ends is not None:
            poll.register(ends, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(1000)}
            if commands in ready:  # also those that a trainer which has ended has left
                data = os.read(commands, 65536)
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    _obey(running, json.loads(line))
                if not data:
                    break
            elif (ends in ready) if ends is not None else os.getppid() != trainer:
                break
        running.finish()

    threading.Thread(target=obey, name="holdfast-drain-commands", daemon=True).start()


def _obey(running: Running, command: dict[str, Any]) -> None:
    running.ring(command.get("sync"), saved=command.get("saved", False))
    if command.get("finish"):
        running.finish()


class Telling:
    """Writes events as JSON lines, in a thread: a reader that holds the pipe and reads nothing stops no drain. Without a reader they are
    dropped.

    Args:
        descriptor: that they are written to.
        unheard: called with each error of a write.
    """

    def __init__(self, descriptor: int, unheard: Callable[[OSError], None] = lambda error: None) -> None:
        self._descriptor, self._unheard = descriptor, unheard
        self._condition = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._is_writing = False
        self._thread: threading.Thread | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        with self._condition:
            if event["event"] == "progress" and self._events and self._events[-1]["event"] == "progress":
                self._events[-1] = {**self._events[-1], **event}
            else:
                self._events.append(event)
            if self._thread is None:  # not before the first event: until then the main thread may block signals for all
                thread = threading.Thread(target=self._write, name="holdfast-drain-events", daemon=True)
                with contextlib.suppress(RuntimeError):  # the system has no thread; the next event may get one
                    thread.start()
                    self._thread = thread
            self._condition.notify_all()

    def end(self, is_heard: Callable[[], bool] = lambda: True) -> None:
        """Waits until everything is written, for as long as somebody hears it."""
        with self._condition:
            while self._thread and (self._events or self._is_writing) and is_heard():
                self._condition.wait(0.1)

    def _write(self) -> None:
        while True:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._events)
                events, self._events, self._is_writing = self._events, [], True
            text = b"".join(json.dumps(event, separators=(",", ":")).encode() + b"\n" for event in events)
            try:
                while text:
                    text = text[os.write(self._descriptor, text) :]
            except OSError as error:
                self._unheard(error)
