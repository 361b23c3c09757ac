"""What the system says of a DCP directory is an error of the package, and no checkpoint looks absent for it."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import dcp_ranks
import descriptors
import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast import _dcp_directories, _regular
from holdfast.dcp import recovery


def test_a_directory_that_cannot_be_locked_or_looked_at_is_an_error_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.dcp import metadata

    with pytest.raises(holdfast.Error, match=r"lock it: .*\[NOT_FOUND\]"), metadata.locked(tmp_path / "gone"):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(BaseException, match=r"look for an older checkpoint: .*\[UNAVAILABLE\]"):  # the framework's, around it
        holdfast.dcp.async_save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "a", storage_writer=holdfast.dcp.StorageWriter(
            tmp_path / "a", overwrite=False)).result()  # fmt: skip


def test_a_recovery_says_of_which_save_it_could_not_make_the_name_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.dcp.save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "step-1")
    (tmp_path / "step-1/.metadata").unlink()

    def refuse(_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(recovery, "sync_directory", refuse)
    for _ in range(2):  # a further recovery does not pass over it
        with pytest.raises(holdfast.Error, match="step-1: make its name durable: Read-only"):
            holdfast.dcp.recover(tmp_path / "step-1")
    monkeypatch.setattr(recovery, "_candidates", refuse)  # a step that says nothing of its own
    with pytest.raises(holdfast.Error, match=r"recover .*step-1: Read-only file system"):
        holdfast.dcp.recover(tmp_path / "step-1")


def test_a_record_that_ends_early_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the file becomes shorter while it is read, or a network file system has an old size."""
    holdfast.dcp.save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "step-1")
    open_to_read = _regular.open_to_read

    def at_its_end(path: Any, *given: Any) -> int:
        fd = open_to_read(path, *given)
        if "holdfast.commit-" in os.fspath(path):
            os.lseek(fd, 0, os.SEEK_END)
        return fd

    monkeypatch.setattr(_regular, "open_to_read", at_its_end)
    with pytest.raises(holdfast.Error, match=r"holdfast.commit-.*: it ends after 0 of \d+ bytes .*\[DATA_LOSS\]"):
        _dcp_directories.look(str(tmp_path / "step-1"))


def test_a_name_that_cannot_be_looked_at_is_not_taken_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed file of another save may have it."""
    from holdfast.dcp import placement

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("stat", "fstat"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(holdfast.Error, match=r"take a name: Input/output error \[UNAVAILABLE\]"):
                placement._reserve(str(tmp_path), 0, 0)
        assert descriptors.of_files_below(tmp_path) == []
        (tmp_path / "__0_0.distcp.tmp").unlink(missing_ok=True)


@pytest.mark.parametrize("file", ["holdfast.commit-", ".metadata"])
@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_commit_that_fails_leaves_nothing(file: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(os, call)

    def full(of: Any, *others: Any) -> Any:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else of)
        if name.startswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(of, *others)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(BaseException, match="No space left on device"):  # the framework's, around it
        holdfast.dcp.save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "run" / "a")
    assert os.listdir(tmp_path / "run") == []


def test_metadata_that_may_stand_keeps_its_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def broken(fd: int) -> None:
        if (tmp_path / "a" / ".metadata").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(BaseException, match="Input/output error"):  # the framework's, around it
        holdfast.dcp.save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    assert holdfast.dcp.verify(tmp_path / "a")["verdict"] == "sound"


def test_nothing_readable_is_no_empty_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.dcp.async_save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "run/a").result()
    real = os.listdir

    def refuse(path: Any = ".") -> list[str]:
        if str(path).endswith("/a"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(holdfast.Error, match="Input/output error"):
        holdfast.newest(tmp_path / "run", format="dcp")


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_a_checkpoint_does_not_look_absent_for_lack_of_descriptors_or_memory(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training would go on from the older one."""
    for name in ("a", "b"):
        holdfast.dcp.async_save({"x": torch.zeros(3)}, checkpoint_id=tmp_path / "run" / name).result()
    real = os.listdir

    def refuse(path: Any = ".") -> list[str]:
        if str(path).endswith("/b"):
            raise OSError(number, os.strerror(number))
        return real(path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(holdfast.Error, match=r"run/b: .*\[RESOURCE_EXHAUSTED\]"):
        holdfast.find_newest(tmp_path / "run", format="dcp")


@pytest.mark.parametrize("kind", [OSError, KeyError])
def test_what_ends_the_search_of_the_first_rank_ends_that_of_all(kind: type[Exception], tmp_path: Path) -> None:
    assert dcp_ranks.run_ranks(2, tmp_path, _cannot_look, str(tmp_path / "run"), kind) == [True, True]


def _cannot_look(rank: int, directory: str, kind: type[Exception]) -> bool:
    checkpointer = holdfast.Checkpointer(directory, format="dcp")
    state = {"x": torch.zeros(3)}
    checkpointer.save(state, 1)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO)) if kind is OSError else kind("planted")

    if rank == 0:
        _dcp_directories.look = refuse
    began = time.monotonic()
    with pytest.raises((holdfast.Error, kind), match="Input/output error" if kind is OSError else "planted"):
        checkpointer.load(step=1, into=state)
    return time.monotonic() - began < 30


def test_a_save_waits_no_longer_than_told_for_another_that_commits(tmp_path: Path) -> None:
    """As of a job that was stopped between its lock and its metadata."""
    checkpointer = holdfast.Checkpointer(tmp_path, format="dcp", time_ranks_max=1)
    (tmp_path / "step-1").mkdir()
    fd = os.open(tmp_path / "step-1", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        with pytest.raises(BaseException, match=r"another process has its lock.*DEADLINE_EXCEEDED"):  # the framework's, around it
            checkpointer.save_async({"x": torch.ones(3)}, 1).wait(60)
    finally:
        os.close(fd)
    checkpointer.save({"x": torch.ones(3)}, 2)
    checkpointer.close()
