"""Python's garbage collector, paused where many objects are made at once and none can be garbage.

Each collection of all generations looks at every object of the trainer, in the thread that happens to
make objects: that took ten times as long as what made them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


class _Pauses(threading.local):
    """Pauses of one thread that have not ended. A forked child has those of its one thread."""

    count = 0


_lock = threading.RLock()  # a signal handler may fork
_own = _Pauses()
_count = 0  # of all threads
_was_enabled = False  # before the first of them


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Around code that waits for nothing; also a decorator. Pauses of threads may overlap."""
    global _count, _was_enabled
    with _lock:
        if _count == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _count += 1
        _own.count += 1
    try:
        yield
    finally:
        with _lock:
            _own.count -= 1
            _set_count(_count - 1)


def _set_count(count: int) -> None:
    global _count
    was_paused, _count = _count > 0, count
    if was_paused and not count and _was_enabled:
        gc.enable()


def _begin_in_child() -> None:
    _set_count(_own.count)
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_in_child)
