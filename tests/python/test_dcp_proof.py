"""`.metadata` is proven like the data: removed, cut, damaged or another save's, it is found."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_corruption import sealed
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast import _dcp_directories, directories
from holdfast._programs import program

pytestmark = pytest.mark.filterwarnings("ignore")


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((64, 33), value), "step": int(value)}


def _save(path: Path, value: float = 1, way: str = "save") -> None:
    if way == "save":
        dcp.save(_state(value), storage_writer=holdfast.dcp.StorageWriter(path))
    else:
        holdfast.dcp.async_save(_state(value), checkpoint_id=path).result(60)


def _load(path: Path, **options: Any) -> tuple[float, bool]:
    """The value of the state that is there, and whether it was proven."""
    state = _state(-1)
    reader = holdfast.dcp.StorageReader(path, **options)
    dcp.load(state, storage_reader=reader)
    assert torch.equal(state["weight"], _state(state["step"])["weight"])
    return state["step"], reader.report["verified"]


def _verdict(path: Path) -> str:
    report = holdfast.verify(path)
    assert [f["file"] for f in report["faults"]] in ([], [".metadata"]), report
    return report["verdict"]


def _flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_metadata_that_is_gone_or_damaged_is_found(way: str, tmp_path: Path) -> None:
    path, metadata = tmp_path / "run", tmp_path / "run/.metadata"
    _save(path, way=way)
    assert _verdict(path) == "sound"
    assert holdfast.verify(path)["note"] == ""
    assert _load(path) == (1, True)
    data = metadata.read_bytes()
    for damaged in (data[:50], data[:-1], data + b"x", b"", b"x" * len(data)):
        metadata.write_bytes(damaged)
        assert _verdict(path) == "corrupt"
    for bit in range(0, 8 * len(data), 41):
        metadata.write_bytes(_flipped(data, bit))
        assert _verdict(path) == "corrupt", bit
    metadata.write_bytes(data)
    assert _verdict(path) == "sound"
    metadata.unlink()
    assert _verdict(path) == "incomplete"


def test_no_flipped_bit_of_metadata_is_loaded(tmp_path: Path) -> None:
    path, metadata = tmp_path / "run", tmp_path / "run/.metadata"
    _save(path)
    data = metadata.read_bytes()
    bits = range(0, 8 * len(data), 13)
    loaded = []
    for bit in bits:
        metadata.write_bytes(_flipped(data, bit))
        with contextlib.suppress(holdfast.Error, CheckpointException):
            loaded.append(_load(path)[1])
    # Where the save's id is damaged there is nothing to compare with, and the report says so.
    assert not any(loaded)
    assert len(loaded) < len(bits) / 10


def test_metadata_of_another_generation_is_not_taken(tmp_path: Path) -> None:
    path, older = tmp_path / "run", tmp_path / "older"
    _save(path, 1)
    shutil.copy(path / ".metadata", older)
    _save(path, 2)
    assert _verdict(path) == "sound"
    shutil.copy(older, path / ".metadata")
    assert _verdict(path) == "corrupt"
    assert holdfast.dcp.verify(path)["verdict"] == "corrupt"
    with pytest.raises((holdfast.Error, CheckpointException)):
        _load(path)


def test_a_checkpoint_of_an_earlier_version_is_read_and_the_gap_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _save(path)
    (record,) = path.glob("holdfast.commit-*.json")
    record.unlink()
    (manifest,) = path.glob("rank-*.manifest.json")
    manifest.write_bytes(sealed(manifest.read_text().replace('"version":4', '"version":2')))
    assert _verdict(path) == "sound"
    assert re.search(r"Not proven: .*\.metadata\.", holdfast.verify(path)["note"])
    assert _load(path) == (1, True)
    (path / ".metadata").rename(tmp_path / "aside")
    assert _verdict(path) == "incomplete"
    (tmp_path / "aside").rename(path / ".metadata")
    _save(path, 2)
    assert _load(path) == (2, True)
    assert holdfast.verify(path)["note"] == ""


def test_a_commit_record_that_is_gone_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _save(path)
    (record,) = path.glob("holdfast.commit-*.json")
    proof = record.read_bytes()
    record.unlink()
    assert holdfast.verify(path)["verdict"] == "corrupt"
    assert holdfast.dcp.verify(path)["verdict"] == "corrupt"
    with pytest.raises((holdfast.Error, CheckpointException), match="missing: the commit record"):
        _load(path)
    complete, passed_over = _dcp_directories.list_complete(str(tmp_path))
    assert complete == [] and "missing: the commit record" in passed_over[0]
    record.write_bytes(proof)
    assert _load(path) == (1, True)
    record.unlink()
    # Of the stock writer from here on: our manifests are stale.
    dcp.save(_state(2), storage_writer=dcp.FileSystemWriter(path))
    assert _verdict(path) == "sound"
    assert _load(path) == (2, False)


def test_damage_of_other_files_than_metadata_is_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _save(path)
    for pattern, data, verdict in (
        ("*.distcp", b"x" * 1000, "corrupt"), ("*.distcp", None, "incomplete"), ("rank-*", b"", "corrupt"), ("rank-*", None, "incomplete"),
    ):  # fmt: skip
        (file,) = path.glob(pattern)
        sound = file.read_bytes()
        file.unlink()
        if data is not None:
            file.write_bytes(data)
        report = holdfast.dcp.verify(path)
        assert report["verdict"] == verdict and file.name in {fault["file"] for fault in report["faults"]}, report
        file.write_bytes(sound)
    assert holdfast.dcp.verify(path)["verdict"] == "sound"


def test_a_checkpoint_that_is_replaced_while_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    _save(path, 1)
    real, calls = directories.verify, []

    def verify(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            _save(path, 2)
        return real(*args)

    monkeypatch.setattr(directories, "verify", verify)
    assert holdfast.dcp.verify(path)["verdict"] == "sound" and len(calls) == 2
    next(path.glob("rank-*")).write_bytes(b"")
    assert holdfast.dcp.verify(path)["verdict"] == "corrupt" and len(calls) == 3


def _save_rank(rank: int, path: str) -> None:
    dcp.save({f"own-{rank}": torch.full((9,), rank + 1)}, storage_writer=holdfast.dcp.StorageWriter(path))


def test_a_manifest_that_is_gone_among_others_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    dcp_ranks.run_ranks(2, tmp_path, _save_rank, str(path))
    target = {f"own-{rank}": torch.zeros(9, dtype=torch.int64) for rank in range(2)}
    (manifest,) = path.glob("rank-00001-*")
    manifest.unlink()
    (file,) = path.glob("__1_*")
    data = bytearray(file.read_bytes())
    data[data.index(bytes([2, 0, 0, 0, 0, 0, 0, 0]) * 9)] = 3
    file.write_bytes(data)
    with pytest.raises((holdfast.Error, CheckpointException), match=f"manifest of {file.name} is missing"):
        dcp.load(target, storage_reader=holdfast.dcp.StorageReader(path))
    assert not any(tensor.any() for tensor in target.values())
    dcp.load({"own-0": target["own-0"]}, storage_reader=holdfast.dcp.StorageReader(path))
    dcp.load({"own-1": target["own-1"]}, storage_reader=holdfast.dcp.StorageReader(path, verify=False))
    assert target["own-0"].tolist() == [1] * 9 and target["own-1"].tolist() == [3] + [2] * 8


def test_a_manifest_is_compared_with_the_commit_record(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _save(path)
    (manifest,) = path.glob("rank-*.manifest.json")
    (record,) = path.glob("holdfast.commit-*.json")
    _save(tmp_path / "other", 2)
    (other,) = (tmp_path / "other").glob("rank-*.manifest.json")
    shutil.copy(other, manifest)  # sound by itself
    assert holdfast.verify(path)["verdict"] == "corrupt"
    with pytest.raises((holdfast.Error, CheckpointException), match="commit record"):
        _load(path)


def test_the_stock_writer_may_take_the_directory_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _save(path, 1)
    dcp.save(_state(2), storage_writer=dcp.FileSystemWriter(path))
    assert _load(path) == (2, False)
    report = holdfast.verify(path)  # our manifests are stale, and its files have no digests
    assert report["verdict"] == "sound" and "No manifest" in report["note"]
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    damaged = (path / ".metadata").read_bytes()[:-1]
    (path / ".metadata").write_bytes(damaged)
    assert holdfast.verify(path)["verdict"] == "corrupt"  # whose it is cannot be said


def test_a_record_that_cannot_be_written_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    _save(path, 1)
    real: Callable[..., None] = os.rename

    def rename(source: Any, target: Any) -> None:
        if "holdfast.commit" in str(target):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(CheckpointException, match="No space left"):
        _save(path, 2)
    monkeypatch.undo()
    assert _verdict(path) == "sound"
    assert _load(path) == (1, True)


def test_metadata_of_another_directory_is_not_read_without_digests(tmp_path: Path) -> None:
    """Its own manifests are elsewhere. The places that it names are those of files of another save."""
    for value in (1, 2):
        _save(tmp_path / str(value), value)
    shutil.copy(tmp_path / "1/.metadata", tmp_path / "2/.metadata")
    assert _verdict(tmp_path / "2") != "sound"
    with pytest.raises(CheckpointException, match="is of save [0-9a-f]{32}, the manifests are of others"):
        _load(tmp_path / "2")
    _load(tmp_path / "2", verify=False)


def test_the_command_tells_it_by_its_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "run"
    _save(path)
    command = [program("verify-checkpoint"), str(path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    data = (path / ".metadata").read_bytes()
    for contents, status in ((data[:50], 1), (None, 2)):
        (path / ".metadata").unlink()
        if contents is not None:
            (path / ".metadata").write_bytes(contents)
        assert subprocess.run(command, capture_output=True, check=False).returncode == status


def test_a_removed_checkpoint_has_made_room_for_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    _save(run / "step-1", 1)
    _save(tmp_path / "step-2", 2)
    look = _dcp_directories.look

    def meanwhile(path: str) -> Any:
        if path.endswith("step-1"):  # as retention of another process, once the list was begun
            shutil.rmtree(path)
            (tmp_path / "step-2").rename(run / "step-2")
        return look(path)

    monkeypatch.setattr(_dcp_directories, "look", meanwhile)
    assert [c["name"] for c in _dcp_directories.list_complete(str(run))[0]] == ["step-2"]
