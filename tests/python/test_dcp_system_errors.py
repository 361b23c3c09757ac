"""What the system says of a DCP directory is an error of the package, and no checkpoint looks absent for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.dcp


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


def test_a_name_that_cannot_be_looked_at_is_not_taken_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed file of another save may have it."""
    from holdfast.dcp import placement

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("stat", "fstat"):
        with monkeypatch.context() as patch:
            before = len(os.listdir("/proc/self/fd"))
            patch.setattr(os, call, refuse)
            with pytest.raises(holdfast.Error, match=r"take a name: Input/output error \[UNAVAILABLE\]"):
                placement._reserve(str(tmp_path), 0, 0)
        assert len(os.listdir("/proc/self/fd")) == before
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
