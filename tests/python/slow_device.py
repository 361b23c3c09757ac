"""A device whose copies end when a test says so."""

from __future__ import annotations

import ctypes
import threading

from holdfast import _native


class SlowDevice(_native.Device):
    """Copies read their source only when `finish` is called: DMA at its latest."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[int, tuple[int, int, int]] = {}
        self.done: set[int] = set()
        self.waits: list[int] = []  # streams that were made to wait
        self.open = threading.Event()
        self._next = 0
        self._lock = threading.Lock()

    def name(self) -> str:
        return "slow:0"

    def register_memory(self, address: int, nbytes: int) -> None:
        pass

    def unregister_memory(self, address: int, nbytes: int) -> None:
        pass

    def order_after(self, stream: int) -> None:
        pass

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> int:
        with self._lock:
            self._next += 1
            self.pending[self._next] = (destination, source, nbytes)
            return self._next

    def copy_from_host(self, destination: int, source: int, nbytes: int) -> int:
        ctypes.memmove(destination, source, nbytes)
        with self._lock:
            self._next += 1
            self.done.add(self._next)
            return self._next

    def is_done(self, ticket: int) -> bool:
        if not self.open.is_set():
            return ticket in self.done
        with self._lock:
            if ticket in self.pending:
                self._run(ticket)
        return True

    def _run(self, ticket: int) -> None:
        destination, source, nbytes = self.pending.pop(ticket)
        ctypes.memmove(destination, source, nbytes)
        self.done.add(ticket)

    def wait(self, ticket: int, seconds: float) -> bool:
        self.open.wait(seconds)
        return self.is_done(ticket)

    def make_stream_wait(self, stream: int) -> None:
        """What the stream does next comes after the copies: as if they were done here."""
        self.waits.append(stream)
        with self._lock:
            for ticket in list(self.pending):
                self._run(ticket)
