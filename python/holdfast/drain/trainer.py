"""The trainer's side of a drain: starts its process, asks it to look, and hears what has arrived.

The process is a fresh interpreter in a session of its own. It goes on when the trainer ends, until everything that was
committed has arrived, and no error of it fails a save.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # before Python 3.11 not the built-in one
from pathlib import Path
from typing import Any

from holdfast import _lineage, _native
from holdfast._completion import waitable
from holdfast._process import PerProcess
from holdfast.drain.following import is_held, lock_path
from holdfast.drain.options import Drain
from holdfast.drain.places import Seen, check_apart, check_place, open_place, path_of, seen_now
from holdfast.errors import Error, TimeoutError, counted

logger = logging.getLogger("holdfast")

# "" in front of the path would be the trainer's working directory, whose files may have any name.
_PROGRAM = """
import sys
package = sys.argv.pop(1)
sys.path = [package, *(p for p in sys.path if p not in ("", package))]
from holdfast.cli import main
sys.exit(main())
"""
_RESTART_MAX = 60.0
_MARGIN = 10.0  # seconds after `Drain.give_up`: the process gives up first, where it can, and knows why
_TELL_AGAIN = 60.0  # seconds after which an error that goes on is logged again

# For metrics: those of this process.
drains: weakref.WeakSet[Draining] = weakref.WeakSet()


class Draining(PerProcess):
    """A drain of one directory.

    Attributes:
        report: ``target``, ``arrived`` (checkpoints), ``bytes_sent``, ``pending`` (checkpoints that have not arrived),
            ``bytes_done`` and ``bytes_total`` of the one under way, ``last_arrived`` (its step), ``troubles`` (errors that
            were tried again), ``failed`` (errors by name of the checkpoint), ``last_error``.
    """

    def __init__(self, directory: str, target: str, options: Drain, keep_last: int, keep_every: int, form: str) -> None:
        self.target = target
        self._given: dict[str, Any] = {
            "options": dataclasses.asdict(options), "keep_local": keep_last, "keep_local_every": keep_every, "form": form,
            # As of now, then as the process tells: one that is started again may find both places gone.
            "seen": [seen_now(directory), seen_now(target)],
            "saves": False,  # whether this trainer has saved
        }  # fmt: skip
        try:
            json.dumps(self._given)
        except (TypeError, ValueError) as error:
            raise Error("INVALID_ARGUMENT", f"Drain: storage: {error}; another process gets it, as text and numbers") from None
        self._directory, self._give_up = directory, options.give_up
        super().__init__()
        drains.add(self)

    def clear(self) -> None:
        """In a forked child the parent's process is not to be asked."""
        self._process: subprocess.Popen[bytes] | None = None
        self._is_started = self._closing = False
        self._rings = self._rings_heeded = 0  # of the process that runs: commands, and those that it has obeyed before its end
        self._tickets: dict[int, tuple[Future, float]] = {}  # with the time of the call
        self._last_ticket = 0
        self._heard_at = 0.0  # when the process has said something (monotonic)
        self._logged = ("", 0.0)
        self.report: dict[str, Any] = {
            "target": self.target, "arrived": 0, "bytes_sent": 0, "pending": 0, "bytes_done": 0, "bytes_total": 0,
            "last_arrived": None, "troubles": 0, "failed": {}, "last_error": None,
        }  # fmt: skip

    def start(self) -> None:
        """Starts the process, if it does not run. An error is logged, and no save fails; the next one tries again."""
        with self.lock:
            self._is_started = True
            if self._process is None:
                try:
                    self._spawn()
                    threading.Thread(target=self._attend, args=(self._process,), name="holdfast-drain", daemon=True).start()
                except (OSError, RuntimeError) as error:  # no process, or no thread that would hear it
                    if self._process is not None:
                        self._process.kill()
                        self._process.communicate()
                        self._process = None
                    self._trouble(f"drain to {self.target}: start its process: {error}")

    def _spawn(self) -> None:
        program = [sys.executable, "-c", _PROGRAM, str(Path(_native.__file__).parents[1]), "drain", self._directory,
                   self.target, "--controlled", str(os.getpid())]  # fmt: skip
        # Another session: Ctrl-C is for the trainer. Its standard error stays with it alone: a launcher may wait for its end.
        # The process has the mask of this thread: until it waits for SIGTERM, one stays pending, and does not kill it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self._process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                             start_new_session=True)  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._command(self._given)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # no save waits for a process that is stopped; its rings are many
        self._rings = self._rings_heeded = 0
        for ticket in self._tickets:
            self._command({"sync": ticket})
        if self._closing:
            self._command({"finish": True})

    def _command(self, command: dict[str, Any]) -> None:
        """Sends a command. A process that has died gets it when it is started again."""
        process = self._process
        self._rings += 1
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # dead, or seen to be dead
                os.write(process.stdin.fileno(), json.dumps(command).encode() + b"\n")

    def ring(self) -> None:
        """Says that a checkpoint was committed. A process that has ended meanwhile is started again."""
        with self.lock:
            self._given["saves"] = True
            self.start()
            self._command({"saved": True})

    def wait(self, timeout: float | None = None) -> None:
        """Waits until everything that is committed now has arrived, also from before this process.

        Raises:
            Error: the first of a checkpoint that cannot be sent; what kept the drain from sending for `Drain.give_up`.
            TimeoutError: it goes on after `timeout` seconds.
        """
        with self.lock:
            self.start()
            if self._process is None:
                raise Error("UNAVAILABLE", self.report["last_error"])
            self._last_ticket += 1
            future: Future = Future()
            since = time.monotonic()
            self._tickets[self._last_ticket] = future, since
            self._command({"sync": self._last_ticket})
        self._result(future, since, timeout)

    def _result(self, future: Future, since: float, timeout: float | None) -> None:
        end = float("inf") if timeout is None else since + timeout
        while True:
            # A process that is stopped, or waits in a call of the system, answers nothing.
            heard, patience = max(self._heard_at, since), self._give_up + _MARGIN
            try:
                error = future.result(waitable(max(0.0, min(heard + patience, end) - time.monotonic())))
                break
            except FutureTimeoutError:
                last = self.report["last_error"]
                why = (f", {counted(pending, 'checkpoint')} to go" if (pending := self.report["pending"]) else "") + (
                    f"; the last error: {last}" if last else "")  # fmt: skip
                if time.monotonic() >= end:
                    raise TimeoutError("DEADLINE_EXCEEDED", f"drain to {self.target}: not all has arrived yet{why}") from None
                if self._heard_at <= heard:
                    raise Error("UNAVAILABLE", f"drain to {self.target}: its process has told nothing for {patience:.0f} s: a file system "
                                f"or server hangs, or the process is stopped{why}") from None  # fmt: skip
        if error is not None:
            raise Error(*error)

    def close(self, timeout: float | None = None) -> None:
        """As `wait`; the process then ends.

        Without a save it waits for what a trainer before has left, unless another process works on that.
        """
        if not self._is_started:
            lock = lock_path(self._directory, self.target)
            if not any(open_place(self._directory, seen=self._given["seen"][0]).complete()) or (lock is not None and is_held(lock)):
                return
        try:
            self.wait(timeout)
        finally:
            self.let_go()

    @property
    def seen(self) -> Seen | None:
        """What is known of the second place, where it is a directory."""
        return self._given["seen"][1]

    def let_go(self) -> None:
        """Ends the process when everything that is committed now has arrived, and does not wait for it."""
        with self.lock:
            # Once: a process that has ended would be started again for a second command.
            if not self._closing:
                self._closing = True
                self._command({"finish": True})

    def let_go_with(self, owner: object) -> None:
        """Has the process end, as `let_go`, once nobody has its owner any longer."""
        # At the end of the interpreter the process sees that its trainer ends.
        weakref.finalize(owner, self._let_go_elsewhere).atexit = False

    def _let_go_elsewhere(self) -> None:
        """In a thread of its own: the garbage collector waits for no lock. `threading` would wait for the thread's start."""
        if self._process is not None:
            with contextlib.suppress(RuntimeError):  # the system has no thread
                _thread.start_new_thread(self.let_go, ())

    # ---- The thread that hears the process.

    def _attend(self, process: Any) -> None:
        delay = 1.0
        while True:
            began, stdin, stdout = time.monotonic(), process.stdin, process.stdout
            for line in stdout:
                self._heard_at = time.monotonic()
                self._hear(line)
            status = process.wait()
            with self.lock:
                if self._process is not process:  # a forked child's
                    return
                stdin.close()
                stdout.close()
                # It has done what it was asked to, or has said what keeps it from that.
                is_done = not self._tickets and (status == 2 or (status == 0 and self._rings_heeded >= self._rings))
                if is_done or (self._closing and delay >= _RESTART_MAX):
                    self._process = None
                    last = self.report["last_error"] or f"drain to {self.target}: its process has ended"
                    self._answer_all(["UNAVAILABLE", last, 0])
                    return
            delay = 1.0 if time.monotonic() - began > 60 else min(_RESTART_MAX, delay * 2)
            self._trouble(f"drain to {self.target}: its process has ended with status {status}; it is started again "
                          f"in {delay:.0f} s")  # fmt: skip
            process = self._spawned_again(delay)

    def _spawned_again(self, delay: float) -> Any:
        while True:
            time.sleep(delay)
            with self.lock:
                self._answer_all(["UNAVAILABLE", self.report["last_error"], 0], waiting=self._give_up)
                try:
                    self._spawn()
                    return self._process
                except OSError as error:
                    self._trouble(f"drain to {self.target}: start its process: {error}")

    def _answer_all(self, error: list[Any] | None, waiting: float = 0.0) -> None:
        """Ends the waits that have lasted for at least so many seconds."""
        for ticket, (future, since) in list(self._tickets.items()):
            if time.monotonic() - since >= waiting:
                del self._tickets[ticket]
                future.set_result(error)

    def _hear(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError):
            logger.warning("drain to %s: %s", self.target, line.decode(errors="backslashreplace").rstrip())
            return
        report = self.report
        if kind == "progress":
            report.update({k: v for k, v in event.items() if k in ("pending", "bytes_done", "bytes_total")})
            if "latest" in event:
                _lineage.seen(self._directory, event["latest"])
        elif kind == "arrived":
            report["arrived"] += 1
            report["failed"].pop(event["name"], None)
            report["bytes_sent"] += event["bytes_sent"]
            report["last_arrived"], report["last_error"] = event["step"], None
            logger.info("drained %s to %s: %d bytes, %.3f s, proven by %s", event["name"], self.target, event["bytes_sent"],
                        event["seconds"], "reading back" if event["verified"] == "read" else "the store's checksum")  # fmt: skip
        elif kind == "failed":
            report["failed"][event["name"]] = event["message"]
            report["last_error"] = event["message"]
            logger.error("drain %s to %s: %s", event["name"], self.target, event["message"])
        elif kind == "trouble":
            report["troubles"] += 1
            self._trouble(event["message"])
        elif kind == "seen":
            self._given["seen"] = [Seen.of(told) for told in event["places"]]
        elif kind == "removed":
            logger.debug("drain to %s: removed %s of the %s: %s", self.target, event["name"], event["place"], event["why"])
        elif kind == "synced":
            with self.lock:
                waiting = self._tickets.pop(event["ticket"], None)
            if waiting is not None:
                waiting[0].set_result(event["error"])
        elif kind == "ended":
            self._rings_heeded = event["rings"]
            if event["error"]:
                self._trouble(event["error"][1])
                with self.lock:
                    self._answer_all(event["error"])

    def _trouble(self, message: str) -> None:
        """Logs an error once, and again when it goes on."""
        self.report["last_error"] = message
        text, at = self._logged
        if text != message or time.monotonic() - at > _TELL_AGAIN:
            self._logged = message, time.monotonic()
            logger.warning("%s", message)


def checked_target(directory: str, target: str) -> str:
    """The second place of a directory as the process gets it: an absolute path, or a URL for which `obstore` is there.

    Raises:
        Error: UNIMPLEMENTED, INVALID_ARGUMENT.
    """
    check_place(target)
    check_apart(directory, target)
    path = path_of(target)
    if path is None:
        from holdfast.drain.object_store import find_library

        find_library()
        return target
    return os.path.abspath(path)
