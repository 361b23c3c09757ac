"""Further files of a checkpoint: committed with it, proven with it, kept and removed with it."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import capture

STATE = {"w": torch.arange(1000.0)}


def test_further_files_are_committed_and_proven_with_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\x00tokens" * 1000)
    files = {
        "config.json": '{"layers": 2}',
        "notes.bin": bytearray(b"\x01\x02"),
        "tokenizer.json": tmp_path / "tokenizer.json",
        "empty": b"",
    }
    save = holdfast.save_async(STATE, tmp_path / "s", files=files)
    files["notes.bin"][0] = 9  # captured by the call
    save.wait()
    at = tmp_path / "s"
    assert (at / "config.json").read_text() == '{"layers": 2}'
    assert (at / "tokenizer.json").read_bytes() == b"\x00tokens" * 1000
    assert (at / "empty").read_bytes() == b""
    assert holdfast.open(at).files() == {
        "config.json": b'{"layers": 2}',
        "notes.bin": b"\x01\x02",
        "tokenizer.json": b"\x00tokens" * 1000,
        "empty": b"",
    }
    assert set(holdfast.open(at)) == {"w"}
    assert torch.equal(holdfast.load(at)["w"], STATE["w"])
    assert holdfast.verify(at)["verdict"] == "sound"
    with open(at / "tokenizer.json", "r+b") as file:
        file.write(b"\x07")
    found = holdfast.verify(at)
    assert found["verdict"] == "corrupt"
    assert "tokenizer.json" in str(found["faults"])
    with pytest.raises(holdfast.Error, match="tokenizer.json") as error:
        holdfast.open(at).files()
    assert error.value.code == "DATA_LOSS"


def test_a_checkpoint_with_further_files_is_replaced_and_removed_whole(tmp_path: Path) -> None:
    for step in range(3):
        holdfast.save_async(
            STATE, tmp_path / f"step-{step}", step=step, keep_last=1, files={"config.json": "{}"}
        ).wait()
    holdfast.save_async(STATE, tmp_path / "last", replace=True, files={"a": b"1"}).wait()
    holdfast.save_async(STATE, tmp_path / "last", replace=True, files={"b": b"2"}).wait()
    holdfast.flush()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-2"]
    assert holdfast.open(tmp_path / "last").files() == {"b": b"2"}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a/b": b""}, "has a '/'"),
        ({"..": b""}, "is a directory's"),
        ({"rank-00000-of-00001.manifest.json": b""}, "rank manifest's"),
        ({"holdfast.commit.json": b""}, "commit record's"),
        ({"a.tmp": b""}, "ends in"),
        ({"a": 3}, "takes text, bytes or a pathlib.Path, no int"),
        ({"a": Path("/nowhere/at/all")}, "read /nowhere/at/all: No such file"),
        ({"a": Path("/dev/zero")}, "read /dev/zero: it is no file"),
        ({"a": Path("/tmp")}, "read /tmp: it is no file"),
        ({"a": "\udc80"}, "a: files=: its text is not Unicode"),
    ],
)
def test_a_file_that_cannot_be_saved_is_refused_by_name(
    tmp_path: Path, files: dict[str, object], reason: str
) -> None:
    with pytest.raises(holdfast.Error, match=reason) as error:
        holdfast.save_async(STATE, tmp_path / "s", files=files)
    assert next(iter(files)) in error.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(holdfast.Error, match="pipe: it is no file"):
        holdfast.save_async(STATE, tmp_path / "s", files={"a": tmp_path / "pipe"})


def test_a_checkpoint_with_any_name_of_a_further_file_is_replaced_and_removed(tmp_path: Path) -> None:
    """A manifest writes some characters of a name as escapes."""
    files = {name: name.encode() for name in ("a\nb", 'say "x"', "back\\slash", "\t\r\x01\x7f", "\u00e9\u2603", "n")}
    for step in (1, 2):
        holdfast.save(STATE, tmp_path / "last", replace=True, files=files)
        holdfast.save(STATE, tmp_path / f"step-{step}", step=step, keep_last=1, files=files)
    holdfast.flush()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-2"]
    assert holdfast.open(tmp_path / "last").files() == files
    assert holdfast.verify(tmp_path / "step-2")["verdict"] == "sound"


@pytest.mark.parametrize(
    "name",
    [".metadata", "__0.metadata", "__0_0.distcp", "state-00001-of-00002.json", "model-00007-of-00008.safetensors",
     "objects-00000-of-00001.pickle", "model-replicas.safetensors"],
)
def test_a_name_that_readers_take_for_another_file_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="readers take it for another file") as error:
        holdfast.save_async(STATE, tmp_path / "s", files={name: b"1"})
    assert error.value.code == "INVALID_ARGUMENT" and name in error.value.message
    assert list(tmp_path.iterdir()) == []


def test_the_index_of_shards_is_not_replaced_by_a_further_file(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="readers take it"):
        holdfast.save(STATE, tmp_path / "s", layout="hf", files={"model.safetensors.index.json": "{}"})


def test_a_file_is_in_memory_once(tmp_path: Path) -> None:
    """And not at all once the save has copied it."""
    holdfast.save(STATE, tmp_path / "first")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        save = holdfast.save_async(STATE, tmp_path / "s", files={"large": tmp_path / "large"})
        assert tracemalloc.get_traced_memory()[1] < 70 << 20
        save.wait()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "s/large").stat().st_size == 64 << 20


def test_a_file_that_is_too_long_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "FILE_BYTES_MAX", 1 << 20)
    for length, fits in ((1 << 20, True), ((1 << 20) + 1, False)):
        (tmp_path / "file").write_bytes(bytes(length))
        if fits:
            holdfast.save(STATE, tmp_path / "s", files={"a": tmp_path / "file"})
            assert (tmp_path / "s/a").stat().st_size == length
        else:
            with pytest.raises(holdfast.Error, match="a: .*file is longer than 1 MiB"):
                holdfast.save(STATE, tmp_path / "t", files={"a": tmp_path / "file"})


def test_a_file_whose_length_the_system_does_not_tell_is_read_to_its_end(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "s", files={"version": Path("/proc/version")})
    assert (tmp_path / "s/version").read_bytes() == Path("/proc/version").read_bytes() != b""


def test_dots_behind_a_link_lead_where_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "releases/42").mkdir(parents=True)
    (tmp_path / "releases/ckpt").mkdir()
    (tmp_path / "current").symlink_to("releases/42")
    monkeypatch.chdir(tmp_path)
    for path in ("current/../ckpt/a.pt", f"{tmp_path}/current/../ckpt/b.pt"):
        holdfast.save_file({"x": 2}, path).wait(60)
        assert torch.load(path) == {"x": 2}
    holdfast.save({"x": torch.ones(2)}, "current/../ckpt/step-1")
    assert sorted(p.name for p in (tmp_path / "releases/ckpt").iterdir() if p.name[0] != ".") == ["a.pt", "b.pt", "step-1"]
    holdfast.save({"x": torch.ones(2)}, "new/../other/step-1")  # by the text, where nothing stands
    assert (tmp_path / "other/step-1").is_dir()
