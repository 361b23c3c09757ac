"""Bugs that are put in turn the tests red: what they say then is what they watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_megatron_queue
import test_megatron_saves
from megatron_jobs import run

from holdfast.megatron import requests, ticket, writer


def returns_at_once(_: ticket.Ticket) -> None:
    """In the place of the wait."""


def _returns_at_once(rank: int, directory: str) -> None:
    writer.wait_until_written = returns_at_once
    test_megatron_queue.under_a_stock_queue(rank, directory, "mcore temporal", looks=10_000)


def _captures_at_schedule(rank: int, directory: str) -> None:
    capture = writer.FileSystemWriterAsync.prepare_write_data
    is_ours = requests.OwnCall.__init__

    def prepares(self: Any, *plan: Any) -> None:
        self.later = plan

    def scheduled(self: Any, of: Any, request: Any) -> None:
        capture(of, *of.later)
        is_ours(self, of, request)

    writer.FileSystemWriterAsync.prepare_write_data = prepares
    requests.OwnCall.__init__ = scheduled
    test_megatron_saves.saves(rank, directory, "mcore")


@pytest.mark.planted("_returns_at_once", "_captures_at_schedule")
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (_returns_at_once, "its function returned while the save was under way"),
        (_captures_at_schedule, "wrong_elements_in"),
    ],
)
def test_a_planted_bug_is_found(bug: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        run(1, tmp_path, bug, str(tmp_path / "run"))
