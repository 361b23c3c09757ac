"""What holds for all suites."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of long tests start first: one that starts last would hold the whole run."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
