"""A device whose copies end when a test says so."""

from __future__ import annotations

import threading
import time

from holdfast.integrity import slow_device


class SlowDevice(slow_device.SlowDevice):
    """Copies read their source only when `open` is set: DMA at its latest."""

    def __init__(self) -> None:
        super().__init__(seed=0)
        self.waits: list[int] = []  # streams that were made to wait
        self.open = threading.Event()

    def name(self) -> str:
        return "slow:0"

    def _due(self) -> float:
        return float("inf")

    def is_done(self, ticket: int) -> bool:
        with self._lock:
            if self.open.is_set():
                self._run_due(float("inf"))
            return ticket not in self.pending

    def wait(self, ticket: int, seconds: float) -> bool:
        self.open.wait(seconds)
        return self.is_done(ticket)

    def reads(self, address: int | None = None) -> bool:
        """Whether a copy is pending whose source has an address; without an address: any copy."""
        with self._lock:
            return any(address is None or s <= address < s + n for _, s, n, _ in self.pending.values())

    def await_copy(self, address: int | None = None) -> None:
        """Returns once `reads`, which the runtime's threads decide, or after 10 s."""
        end = time.monotonic() + 10
        while not self.reads(address) and time.monotonic() < end:
            time.sleep(0.005)

    def make_stream_wait(self, stream: int) -> None:
        """What the stream does next comes after the copies: as if they were done here."""
        self.waits.append(stream)
        super().make_stream_wait(stream)
