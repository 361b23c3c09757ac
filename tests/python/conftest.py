"""What holds for every test of the package."""

from __future__ import annotations

import logging
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import s3_server


def pytest_configure() -> None:
    """Programs that tests start are to end by Ctrl-C, also where a shell has started the tests in its background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(autouse=True)
def no_test_changes_the_process() -> Iterator[None]:
    """What a test leaves switched off, a later one misses."""
    yield
    assert (logging.root.manager.disable, signal.getsignal(signal.SIGTERM)) == (logging.NOTSET, signal.SIG_DFL)


@pytest.fixture(scope="session")
def server_of_all() -> Iterator[s3_server.Server]:
    with s3_server.serving() as running:
        yield running


@pytest.fixture
def server(server_of_all: s3_server.Server) -> s3_server.Server:
    """A server that speaks S3, and fails as a test asks for."""
    server_of_all.faults.__init__()  # type: ignore[misc]
    return server_of_all


@pytest.fixture
def bucket(server: s3_server.Server, request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    """A prefix of its own, and the options of its store."""
    return f"s3://{s3_server.BUCKET}/{request.node.name}", server.storage()


@pytest.fixture
def url(bucket: tuple[str, dict[str, str]]) -> str:
    return bucket[0]
