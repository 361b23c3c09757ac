"""What holds for every test of the package."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes what is not UTF-8 in a test's output: reports cross processes as UTF-8."""
    report = yield
    report.sections = [(name, _escaped(text)) for name, text in report.sections]
    if report.longrepr is not None and _escaped(str(report.longrepr)) != str(report.longrepr):
        escaped: Any = _escaped(str(report.longrepr))
        report.longrepr = escaped
    return report


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
