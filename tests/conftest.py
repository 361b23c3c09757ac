"""What holds for all suites."""

from __future__ import annotations

import gc
import os

import pytest

# New staging memory is zeroed. With the default size, 64 MiB for a small state, that was a fifth of the tests' time.
os.environ.setdefault("HOLDFAST_ARENA_BYTES", str(16 << 20))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes at once have tests
gc.disable()  # until all modules are imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests start first: one that starts last would hold the whole run."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """A collection then leaves out the objects of PyTorch and of the tests' modules, which stay."""
    gc.collect()
    gc.freeze()
    gc.enable()
