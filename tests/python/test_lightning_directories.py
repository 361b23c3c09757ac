"""Sharded checkpoints of Lightning: kills while one takes the place of another. Needs no Lightning."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import _durable
from holdfast.lightning import directories

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
def test_a_kill_in_a_commit_leaves_a_whole_one(exchanges: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    call = 0
    while True:
        new = directories.unfinished(path)
        for directory, content in ((path, "old"), (new, "new")):
            os.makedirs(directory, exist_ok=True)
            (Path(directory) / ".metadata").write_text(content)
        child = os.fork()
        if child == 0:
            _commit_and_die(new, path, call, exchanges)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        directories.unfinished(path)  # the next save
        assert (Path(path) / ".metadata").read_text() in ("old", "new")
        if status == 0:
            break
        assert status == -signal.SIGKILL
        call += 1
    assert call == (2 if exchanges else 4) and os.listdir(tmp_path) == ["last.ckpt"]


def _commit_and_die(new: str, path: str, call: int, exchanges: bool) -> None:
    counted = 0

    def steps(change: Callable[..., Any]) -> Callable[..., Any]:
        def step(*given: str) -> Any:
            nonlocal counted
            if counted == call:
                os.kill(os.getpid(), signal.SIGKILL)
            counted += 1
            return change(*given)

        return step

    try:
        _durable._exchange = steps(_durable._exchange if exchanges else lambda new, path: False)
        os.rename = steps(os.rename)  # type: ignore[assignment]
        directories.commit(new, path)
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize("left", ["-clears", "-moves"])
def test_what_a_kill_has_left_of_a_commit_outlives_its_directory(left: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    new = Path(directories.unfinished(str(path)) + left)
    new.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (new / name).write_text(name)
    directories.complete(str(path))  # the directory that was to stay is gone
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp"] and os.listdir(tmp_path) == ["last.ckpt"]
