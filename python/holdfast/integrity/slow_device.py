"""A stand-in for a GPU: its copies read their source some time after they were asked for, and in any order."""

from __future__ import annotations

import ctypes
import random
import threading
import time

from holdfast import _native


class SlowDevice(_native.Device):
    """Host memory behind a queue of late copies.

    A stream that is made to wait for the copies finds them done, as the training's next kernel would.
    """

    def __init__(self, seed: int, delay_max: float = 0.02) -> None:
        super().__init__()
        self._choose = random.Random(seed)
        self._delay_max = delay_max
        self.pending: dict[int, tuple[int, int, int, float]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def name(self) -> str:
        return "stand-in:0"

    def register_memory(self, address: int, nbytes: int) -> None:
        pass

    def unregister_memory(self, address: int, nbytes: int) -> None:
        pass

    def order_after(self, stream: int) -> None:
        pass

    def _due(self) -> float:
        """The time at which the next copy runs."""
        return time.monotonic() + self._choose.random() * self._delay_max

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> int:
        with self._lock:
            self._next += 1
            self.pending[self._next] = (destination, source, nbytes, self._due())
            return self._next

    def copy_from_host(self, destination: int, source: int, nbytes: int) -> int:
        ctypes.memmove(destination, source, nbytes)
        with self._lock:
            self._next += 1
            return self._next

    def _run_due(self, now: float) -> None:
        """Copies what is due. The lock must be held."""
        for ticket, (destination, source, nbytes, due) in list(self.pending.items()):
            if due <= now:
                ctypes.memmove(destination, source, nbytes)
                del self.pending[ticket]

    def is_done(self, ticket: int) -> bool:
        with self._lock:
            self._run_due(time.monotonic())
            return ticket not in self.pending

    def wait(self, ticket: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (done := self.is_done(ticket)) and time.monotonic() < end:
            time.sleep(0.001)
        return done

    def make_stream_wait(self, stream: int) -> None:
        with self._lock:
            self._run_due(float("inf"))
