"""Python's garbage collector, paused where many objects are made at once and none can be garbage.

Each collection of all generations looks at every object of the trainer, in the thread that happens to
make objects: that took ten times as long as what made them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Around code that waits for nothing; also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
