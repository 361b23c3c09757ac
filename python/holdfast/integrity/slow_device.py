"""A stand-in for a GPU: its copies read their source some time after they were asked for, and in any order."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable

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
        self._on_next_lost: Callable[[], None] | None = None
        self._lost: dict[int, Callable[[], None]] = {}

    def lose_next(self, on_lost: Callable[[], None] | None) -> None:
        """Loses the copy that is started next: its end is an error, before which `on_lost` is called, and no byte was copied."""
        self._on_next_lost = on_lost

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
            if self._on_next_lost:
                self._lost[self._next], self._on_next_lost = self._on_next_lost, None
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
                if ticket not in self._lost:
                    ctypes.memmove(destination, source, nbytes)
                del self.pending[ticket]

    def is_done(self, ticket: int) -> bool:
        with self._lock:
            self._run_due(time.monotonic())
            is_done = ticket not in self.pending
            on_lost = self._lost.pop(ticket, None) if is_done else None
        if on_lost:
            on_lost()
            raise RuntimeError(f"copy {ticket} is lost")
        return is_done

    def wait(self, ticket: int, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (done := self.is_done(ticket)) and time.monotonic() < end:
            time.sleep(0.001)
        return done

    def make_stream_wait(self, stream: int) -> None:
        with self._lock:
            self._run_due(float("inf"))
