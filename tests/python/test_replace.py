"""What `save_async` takes the place of: nothing, an empty directory, or one checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

pytestmark = pytest.mark.long

MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh_options() -> Any:
    yield
    holdfast.flush(60)
    holdfast.configure(bytes_per_second_max=0, launcher="spawn")


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def refusal(path: Path) -> str:
    with pytest.raises(holdfast.Error) as caught:
        holdfast.save_async({"x": 2}, path, replace=True).wait(60)
    assert caught.value.code == "FAILED_PRECONDITION"
    return caught.value.message


def test_a_directory_of_checkpoints_is_not_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    for step in range(2):
        holdfast.save_async({"x": step}, run / f"step-{step}", step=step).wait(60)
    message = refusal(run)
    assert str(run) in message and re.search(r"holds (notes\.txt|step-\d),", message), message
    assert (run / "notes.txt").read_text() == "mine"
    assert holdfast.load(holdfast.find_newest(run)["path"])["x"] == 1
    holdfast.flush(60)
    assert names(tmp_path) == ["run"]


def test_a_directory_of_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert "config.json" in refusal(tmp_path / "model")
    assert (tmp_path / "model/config.json").read_text() == "{}"


@pytest.mark.parametrize("entry", ["config.json", "tokenizer"])
def test_a_checkpoint_with_an_entry_of_others_is_not_replaced(tmp_path: Path, entry: str) -> None:
    holdfast.save_async({"x": 1}, tmp_path / "s").wait(60)
    if "." in entry:
        (tmp_path / "s" / entry).write_text("{}")
    else:
        (tmp_path / "s" / entry).mkdir()
    assert entry in refusal(tmp_path / "s")
    assert entry in names(tmp_path / "s")
    assert holdfast.load(tmp_path / "s")["x"] == 1


def test_an_entry_that_comes_during_the_save_is_kept(tmp_path: Path) -> None:
    holdfast.save_async({"x": 1}, tmp_path / "s").wait(60)
    holdfast.configure(bytes_per_second_max=8 * MIB)
    save = holdfast.save_async({"t": torch.zeros(16 * MIB, dtype=torch.uint8)}, tmp_path / "s", replace=True)
    (tmp_path / "s/config.json").write_text("{}")
    with pytest.raises(holdfast.Error) as caught:
        save.wait(60)
    assert caught.value.code == "FAILED_PRECONDITION" and "config.json" in caught.value.message
    holdfast.flush(60)
    assert names(tmp_path) == ["s"]
    assert (tmp_path / "s/config.json").exists() and holdfast.load(tmp_path / "s")["x"] == 1


def test_retention_keeps_a_checkpoint_with_an_entry_of_others(
        tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.save_async({"x": 1}, tmp_path / "step-1", step=1).wait(60)
    (tmp_path / "step-1/config.json").write_text("{}")
    holdfast.save_async({"x": 2}, tmp_path / "step-2", step=2).wait(60)
    holdfast.save_async({"x": 3}, tmp_path / "step-3", step=3, keep_last=1).wait(60)
    holdfast.flush(60)
    assert "config.json" in caplog.text
    assert names(tmp_path) == ["step-1", "step-3"]
    assert holdfast.load(tmp_path / "step-1")["x"] == 1


@pytest.mark.parametrize("replace", [False, True])
def test_an_empty_directory_is_used(tmp_path: Path, replace: bool) -> None:
    (tmp_path / "s").mkdir()
    holdfast.save_async({"x": 1}, tmp_path / "s", replace=replace).wait(60)
    assert holdfast.load(tmp_path / "s")["x"] == 1
    assert names(tmp_path) == ["s"]


def test_a_symbolic_link_is_called_one(tmp_path: Path) -> None:
    holdfast.save_async({"x": 1}, tmp_path / "step-1").wait(60)
    (tmp_path / "latest").symlink_to("step-1")
    message = refusal(tmp_path / "latest")
    assert "symbolic link to step-1" in message
    assert holdfast.load(tmp_path / "latest")["x"] == 1


@pytest.mark.parametrize("launcher", ["spawn", "fork", "persistent", "thread"])
def test_an_older_save_gives_way_to_a_younger_one(tmp_path: Path, launcher: str) -> None:
    gave_way = 0
    older: dict[str, Any] = {"x": torch.zeros(6 * MIB, dtype=torch.uint8)}
    holdfast.configure(launcher=launcher)
    holdfast.save_async({"x": 0}, tmp_path / "latest", step=0).wait(60)
    for turn in range(50):
        first, second = 2 * turn + 1, 2 * turn + 2
        holdfast.configure(bytes_per_second_max=24 * MIB)
        slow = holdfast.save_async(older, tmp_path / "latest", step=first, replace=True)
        quick = holdfast.save_async({"x": turn}, tmp_path / "latest", step=second, replace=True)
        assert quick.wait(60)["step"] == second
        error = slow.durable.exception(60)
        if error is not None:  # else it was the first to end, as with a kept worker's queue
            assert isinstance(error, holdfast.Error) and error.code == "ABORTED", error
            assert f"step {second}" in error.message
            gave_way += 1
        assert holdfast.load(tmp_path / "latest")["x"] == turn
        holdfast.flush(60)
        assert names(tmp_path) == ["latest"]
    if launcher in ("spawn", "fork"):
        assert gave_way


_OLDER = """
import sys, torch, holdfast
holdfast.configure(bytes_per_second_max=4 << 20)
save = holdfast.save_async({"x": torch.zeros(8 << 20)}, sys.argv[1], step=1, replace=True)
print("begun", flush=True)
print(getattr(save.durable.exception(120), "code", None), flush=True)
"""


def test_an_older_save_of_another_process_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    holdfast.save_async({"x": 0}, path, step=0).wait(60)
    with subprocess.Popen([sys.executable, "-B", "-c", _OLDER, path], stdout=subprocess.PIPE, text=True) as older:
        assert older.stdout is not None and older.stdout.readline() == "begun\n"
        holdfast.save_async({"x": 2}, path, step=2, replace=True).wait(60)
        assert older.stdout.readline() == "ABORTED\n"
    assert holdfast.load(path)["x"] == 2


@pytest.mark.parametrize("change", ["renamed", "removed", "relinked"])
def test_a_directory_above_that_was_made_anew_gets_the_next_save(tmp_path: Path, change: str) -> None:
    run = tmp_path / "run"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    if change == "relinked":
        run.symlink_to("first")
    else:
        run.mkdir()
    report = holdfast.save_async({"x": 1}, run / "a", step=1).wait(60)
    if change == "relinked":
        run.unlink()
        run.symlink_to("second")
    elif change == "renamed":
        run.rename(tmp_path / "old")
        run.mkdir()
    else:
        shutil.rmtree(run)
        run.mkdir()
    for step in range(2, 4):
        report = holdfast.save_async({"x": step}, run / f"step-{step}", step=step).wait(60)
        assert holdfast.load(report["path"])["x"] == step
    assert names(run) == ["step-2", "step-3"]


def test_a_directory_above_that_is_gone_is_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    holdfast.save_async({"x": 1}, run / "a").wait(60)
    shutil.rmtree(run)
    holdfast.save_async({"x": 2}, run / "b").wait(60)
    assert os.listdir(run) == ["b"] and holdfast.load(run / "b") == {"x": 2}
