"""State that belongs to one process: a forked child begins without the parent's."""

from __future__ import annotations

import os
import threading
import weakref


class PerProcess:
    """State with its lock. In a forked child the lock is new and `clear` has been called.

    The parent's threads are not there in the child: a lock that one of them holds stays held.
    """

    def __init__(self) -> None:
        _all.add(self)
        self.lock = threading.RLock()
        self.clear()

    def clear(self) -> None:
        """Drops what is the parent's. Called by the constructor, too."""
        raise NotImplementedError


_all: weakref.WeakSet[PerProcess] = weakref.WeakSet()


def _in_child() -> None:
    for state in list(_all):
        state.lock = threading.RLock()
        state.clear()


os.register_at_fork(after_in_child=_in_child)
