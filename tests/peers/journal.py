"""What happens in the tests of others: lines in a file, from all their processes.

As a plugin of pytest (``-p journal``) it notes what became of each test.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

JOURNAL = "HOLDFAST_PEERS_JOURNAL"
TEST = "HOLDFAST_PEERS_TEST"


def note(kind: str, **what: Any) -> None:
    """Adds a line to the journal: one write, so that lines of several processes do not mix."""
    line = json.dumps({"kind": kind, "test": os.environ.get(TEST, ""), **what}) + "\n"
    fd = os.open(os.environ[JOURNAL], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def notes(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines so far."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if os.path.exists(path) else []


# ---- The plugin.


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which need not be there")


def pytest_runtest_protocol(item: Any) -> None:
    os.environ[TEST] = item.nodeid


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        outcome = "expected failure" if hasattr(report, "wasxfail") else report.outcome
        note("outcome", outcome=outcome, reason=reason, seconds=report.duration, rank=int(os.environ.get("RANK", "0")))
