"""Errors are also the built-in exceptions that callers of other libraries catch."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from pathlib import Path

import pytest
import small_disk
import torch

import holdfast
from holdfast import errors

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
