"""Errors are also the built-in exceptions that callers of other libraries catch."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_disk
import torch

import holdfast
import holdfast.dcp
from holdfast import _runtime, errors

STATE = {"w": torch.ones(100)}


class Unlisted:
    pass


def test_a_missing_checkpoint_is_a_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        holdfast.load(tmp_path / "none")
    assert isinstance(error.value, holdfast.Error) and error.value.code == "NOT_FOUND"
    assert error.value.errno == errno.ENOENT
    with pytest.raises(FileNotFoundError):
        holdfast.find_newest(tmp_path)


def test_an_existing_checkpoint_is_a_file_that_exists(tmp_path: Path) -> None:
    holdfast.save_async(STATE, tmp_path / "s").wait(60)
    with pytest.raises(FileExistsError) as error:
        holdfast.save_async(STATE, tmp_path / "s")
    assert isinstance(error.value, holdfast.Error) and error.value.code == "ALREADY_EXISTS"


@pytest.mark.parametrize("save", [holdfast.save_async, holdfast.save_file, holdfast.dcp.async_save])
def test_a_directory_that_cannot_be_made_is_an_error_of_the_save(save: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = str(tmp_path / "file/run/step-1")
    with pytest.raises(BaseException, match="Not a directory") as error:  # DCP raises its own class
        save(STATE, **{"checkpoint_id" if save is holdfast.dcp.async_save else "path": path})
    assert f"save {path}: make directory {tmp_path / 'file/run'}: " in str(error.value)


def test_a_bad_argument_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wait, skip, fail") as error:
        holdfast.save_async(STATE, tmp_path / "s", when_full="maybe")
    assert isinstance(error.value, holdfast.Error) and not isinstance(error.value, OSError)


def test_a_class_that_is_not_allowed_is_a_permission_error(tmp_path: Path) -> None:
    holdfast.save_async({"o": Unlisted()}, tmp_path / "s").wait(60)
    with pytest.raises(PermissionError, match="allow"):
        holdfast.load(tmp_path / "s")


def test_a_full_disk_is_an_os_error_with_its_errno(tmp_path: Path) -> None:
    state = {"w": torch.zeros(8 << 20, dtype=torch.uint8)}
    with small_disk.mounted(tmp_path / "small", 4) as disk:
        with pytest.raises(OSError, match="No space") as error:
            holdfast.save_async(state, disk / "s").wait(60)
        holdfast.flush(60)
    assert isinstance(error.value, holdfast.Error)
    assert (error.value.errno, error.value.strerror) == (errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_wait_that_ends_early_is_a_timeout(tmp_path: Path) -> None:
    error = holdfast.TimeoutError("DEADLINE_EXCEEDED", "wait for x: not durable yet")
    assert isinstance(error, TimeoutError) and isinstance(error, holdfast.Error)
    other = holdfast.Error("DEADLINE_EXCEEDED", "wait for the other ranks")
    assert not isinstance(other, TimeoutError)


@pytest.mark.parametrize(
    "error",
    [
        holdfast.Error("NOT_FOUND", "load x: no such file", errno.ENOENT),
        holdfast.Error("RESOURCE_EXHAUSTED", "write x", errno.ENOSPC),
        holdfast.Error("INVALID_ARGUMENT", "save x", errno.EINVAL),
        holdfast.Error("DATA_LOSS", "load x: damaged"),
        holdfast.TimeoutError("DEADLINE_EXCEEDED", "wait for x"),
    ],
    ids=lambda error: error.code,
)
def test_errors_cross_processes_and_copies(error: holdfast.Error) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.code, again.message, again.errno) == (error.code, error.message, error.errno)
        assert str(again) == str(error)


def test_messages_name_the_options_of_python(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="option arena_bytes = 1000: must be at least"):
        holdfast.configure(arena_bytes=1000)
    error = errors._of_status(8, "take memory: lower StagingOptions::arena_bytes", 0)
    assert error.message == "take memory: lower arena_bytes"
    path = "/staging.d/CheckpointerOptions"
    assert errors._of_status(5, f"load {path}: no such file", 2).message == f"load {path}: no such file"


def test_a_removal_that_stalled_is_no_time_out_of_flush(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"error": errors._of_status(4, "remove old: no progress", 0)}

    class Door:
        def flush(self, timeout: float | None) -> None:
            raise said["error"]

    runtime = _runtime.default
    monkeypatch.setattr(runtime._memory, "doors", {(runtime._number, "a"): Door()})
    holdfast.flush(60)
    assert "an old checkpoint was kept: remove old: no progress" in caplog.text
    monkeypatch.setattr(runtime._memory, "doors", {(runtime._number, "a"): Door()})
    said["error"] = errors._of_status(4, "wait for 1 save in flight: not done yet", 0, True)
    with pytest.raises(holdfast.TimeoutError, match="flush: wait for 1 save in flight"):
        holdfast.flush(60)


def _said(call: Callable[[], object], kind: type[BaseException], *words: str) -> None:
    with pytest.raises(kind) as failed:
        call()
    for word in words:
        assert word in str(failed.value), failed.value


def test_messages_of_common_mistakes_say_what_to_do(tmp_path: Path) -> None:
    state, module = {"w": torch.ones(4), "n": 1}, torch.nn.Linear(2, 2)
    checkpointer = holdfast.Checkpointer(tmp_path / "run")
    checkpointer.save({"model": module}, 1)
    for path in (None, 3, state):
        _said(lambda path=path: holdfast.save(state, path), TypeError, "save: the path is a str or an os.PathLike, not ")
        _said(lambda path=path: holdfast.load(path), TypeError, "load: the path is a str")
        _said(lambda path=path: holdfast.recover(path), TypeError, "recover: the path is a str")
        _said(lambda path=path: holdfast.Checkpointer(path), TypeError, "Checkpointer: the path is a str")
        if path is not None:
            _said(lambda path=path: holdfast.dcp.save(state, checkpoint_id=path), TypeError, "save: the path is a str")
    _said(lambda: holdfast.save(state, ""), ValueError, "save '': the path is empty")
    _said(lambda: holdfast.load(tmp_path / "run"), holdfast.Error, "holds some; load one of them, the newest is step-1")
    _said(lambda: checkpointer.load("step-1"), ValueError, "step 'step-1': a whole number")
    huge = {f"layer {i}": torch.zeros(1000) for i in range(1000)}
    with pytest.raises(ValueError, match="a whole number") as swapped:
        checkpointer.save(1, huge)
    assert len(str(swapped.value)) < 400
    for option in ("keep_last", "keep_every"):
        for value in ("3", -1, 1.5):
            kept: dict[str, Any] = {option: value}
            _said(lambda kept=kept: holdfast.Checkpointer(tmp_path, **kept), ValueError, f"{option} {value!r}: a whole number from 0")
    for save in (holdfast.dcp.save, holdfast.dcp.async_save):
        _said(lambda save=save: save([torch.ones(1)], checkpoint_id=tmp_path / "d"), TypeError, "the state is a dict by names, not list")


def test_a_target_of_another_kind_is_not_left_as_it_is(tmp_path: Path) -> None:
    holdfast.save({"model": torch.nn.Linear(2, 2), "rows": [torch.ones(1)]}, tmp_path / "c")
    targets: tuple[tuple[Any, str], ...] = (
        ([torch.nn.Linear(2, 2)], "load state: it is a dict, the target a list"),
        ({"model": [torch.nn.Linear(2, 2)], "rows": [torch.ones(1)]}, "load model: it is a dict, the target a list"),
        ({"model": torch.nn.Linear(2, 2), "rows": {"0": torch.ones(1)}}, "load rows: it is a list, the target a dict"),
    )
    for target, words in targets:
        _said(lambda target=target: holdfast.load(tmp_path / "c", into=target), ValueError, words)
        holdfast.load(tmp_path / "c", into=target, strict=False)
    assert holdfast.load(tmp_path / "c", into={"model": None, "rows": None})["rows"] == [torch.ones(1)]


def test_the_second_of_two_saves_to_one_name_says_what_to_do(tmp_path: Path) -> None:
    saves: list[holdfast.Save] = []
    holdfast.configure(bytes_per_second_max=8 << 20)
    try:
        with pytest.raises(FileExistsError, match="c: it exists already; choose another name"):
            for _ in range(2):  # the call raises it where the first one is there already
                saves.append(holdfast.save_async({"w": torch.ones(1 << 20)}, tmp_path / "c"))
            for save in saves:
                save.durable.result(60)
    finally:
        holdfast.flush(60)
        holdfast.configure(bytes_per_second_max=0)
