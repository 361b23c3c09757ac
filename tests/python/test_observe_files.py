"""The files that observers write, beside a close of theirs and on a full disk."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import events, observe


def _publish(step: int) -> None:
    events.publish_raised("run/a", step, holdfast.Error("UNAVAILABLE", "write run/a: " + 100 * "x"))


@contextlib.contextmanager
def _full_after(nbytes: int) -> Iterator[None]:
    """Files end at this length: a write is cut there, as by a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("opened", [observe.jsonl, observe.trace])
def test_a_save_that_ends_beside_the_close_writes_into_no_other_file(opened: Any, tmp_path: Path) -> None:
    handle = opened(tmp_path / "saves")
    observer = events.observers[-1]
    handle.close()
    with open(tmp_path / "other", "wb") as other:  # has the number of the descriptor
        observer(events.Published("run/a", 1, {}), None, holdfast.Error("UNAVAILABLE", "write run/a"))
        assert (tmp_path / "other").stat().st_size == 0 == other.tell()


@pytest.mark.parametrize("cut", [1, 50])
def test_a_full_disk_tears_no_json_lines(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "saves.jsonl"
    with observe.jsonl(path):
        _publish(1)
        with _full_after(path.stat().st_size + cut):
            _publish(2)
        _publish(3)
    assert [line["step"] for line in observe.read_jsonl(path)] == [1, 2, 3]


@pytest.mark.parametrize("cut", [1, 50])
def test_a_full_disk_tears_no_trace(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def steps() -> list[int]:
        return [e["args"]["step"] for e in json.loads(path.read_bytes()) if e["ph"] == "i"]

    with observe.trace(path):
        _publish(1)
        with _full_after(path.stat().st_size + cut):
            _publish(2)
        assert steps() == [1]
        _publish(3)
        assert steps() == [1, 3]
