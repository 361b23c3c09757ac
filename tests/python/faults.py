"""Faults that tests make, and the moment to make them in."""

from __future__ import annotations

import contextlib
import resource
import signal
import time
from collections.abc import Iterator

from holdfast import handle


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Of this process and of the workers that it starts."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def save_that_writes() -> handle.Save:
    """The save that goes on, once its worker writes."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        saves = [s for s in handle.in_flight() if isinstance(s, handle.Save) and s._native]
        for save in saves:
            if save._native.worker_pid and save.progress()["phase"] == "writing":
                return save
        time.sleep(0.001)
    raise AssertionError("its worker was never seen writing")
