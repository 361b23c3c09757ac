"""Names of the file system are bytes: what is not UTF-8 is saved to, found, reported and recovered all the same."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import holdfast as command

import holdfast
import holdfast.dcp
from holdfast import _state

ATTEMPT = "00112233445566778899aabbccddeeff"
STATE = {"w": torch.arange(1000)}


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory whose name is Latin-1."""
    path = tmp_path / os.fsdecode(b"l\xe4ufe")
    path.mkdir()
    return path


def test_a_directory_may_have_any_name(odd: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = holdfast.save(STATE, odd / "new" / "step-1", step=1)
    assert report["path"] == str(odd / "new" / "step-1")
    holdfast.save(STATE, odd / "new" / "step-2", step=2)
    newest = holdfast.find_newest(odd / "new")
    assert newest["path"] == str(odd / "new" / "step-2")
    assert [c["path"] for c in holdfast.list_checkpoints(os.fsencode(odd / "new"))][1] == newest["path"]
    assert torch.equal(holdfast.load(newest["path"])["w"], STATE["w"])
    assert torch.equal(holdfast.open(newest["path"])["w"], STATE["w"])
    verified = holdfast.verify(newest["path"])
    assert (verified["verdict"], verified["path"]) == ("sound", newest["path"])
    with holdfast.Checkpointer(odd / "run", keep_last=1) as checkpointer:
        checkpointer.save(STATE, 1)
        checkpointer.save(STATE, 2)
        checkpointer.wait(60)
        assert [c["step"] for c in checkpointer.list()] == [2]
    assert any(r"l\xe4ufe" in text or r"l\udce4ufe" in text for text in caplog.messages)
    for text in caplog.messages:
        text.encode()


def test_dcp_saves_to_any_directory(odd: Path) -> None:
    holdfast.dcp.async_save(dict(STATE), checkpoint_id=odd / "step-3").result(60)
    assert holdfast.find_newest(odd, format="dcp")["path"] == str(odd / "step-3")
    into = {"w": torch.zeros(1000, dtype=torch.int64)}
    holdfast.dcp.load(into, checkpoint_id=odd / "step-3")
    assert torch.equal(into["w"], STATE["w"])
    assert holdfast.verify(odd / "step-3")["verdict"] == "sound"
    (odd / "step-3" / ".metadata").unlink()
    assert holdfast.recover(odd)["promoted"] == ["step-3"]


def test_errors_name_the_directory_and_can_be_printed(odd: Path) -> None:
    for call in (holdfast.load, holdfast.open, holdfast.find_newest, holdfast.recover):
        with pytest.raises(holdfast.Error, match=r"l\\xe4ufe") as error:
            call(odd / "none")
        assert error.value.code == "NOT_FOUND"
        str(error.value).encode()


def test_a_checkpoint_must_have_a_name_that_is_text(tmp_path: Path) -> None:
    for name, files in ((b"step-\xff", {}), (b"step-1", {os.fsdecode(b"\xff.json"): "{}"})):
        with pytest.raises(holdfast.Error, match="not UTF-8") as error:
            holdfast.save(STATE, tmp_path / os.fsdecode(name), files=files)
        assert error.value.code == "INVALID_ARGUMENT"
    with pytest.raises(holdfast.Error, match=r"a\.\\udcff.*not UTF-8") as error:
        holdfast.save({"a": {"\udcff": torch.ones(2)}}, tmp_path / "step-1")
    assert error.value.code == "INVALID_ARGUMENT"
    assert os.listdir(tmp_path) == []


def test_recover_reports_names_that_are_not_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.save(STATE, tmp_path / "step-1")
    partial = os.fsdecode(b"step-\xff.partial-" + ATTEMPT.encode())
    (tmp_path / partial).mkdir()
    (tmp_path / partial / "holdfast.commit.json.tmp").touch()  # the mark of a save
    (tmp_path / partial / "model-00000-of-00001.safetensors.tmp").write_bytes(b"x")
    foreign = os.fsdecode(b"\xfe.partial-" + ATTEMPT.encode())
    (tmp_path / foreign / "inner").mkdir(parents=True)
    damaged = tmp_path / os.fsdecode(b"\xfd")
    damaged.mkdir()
    (damaged / "holdfast.commit.json").write_text("{")
    (damaged / "rank-00000-of-00001.manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert [c["name"] for c in holdfast.list_checkpoints(tmp_path)] == ["step-1"]
    assert any("\\xfd" in record.getMessage() for record in caplog.records)
    report = holdfast.recover(tmp_path)
    assert report["removed"] == [partial], "as the file system has it"
    kept = [entry for entry in report["kept_incomplete"] if entry.startswith(foreign)]
    assert len(kept) == 1, report
    assert not (tmp_path / partial).exists() and (tmp_path / foreign).exists()


def test_the_command_shows_names_that_are_not_text(tmp_path: Path) -> None:
    partial = os.fsdecode(b"step-\xff.partial-" + ATTEMPT.encode())
    (tmp_path / partial).mkdir()
    (tmp_path / partial / "holdfast.commit.json.tmp").touch()  # the mark of a save
    (tmp_path / partial / "model-00000-of-00001.safetensors.tmp").write_bytes(b"x")
    done = command("ls", tmp_path, torch=False)
    assert done.status == 0 and "step-\\udcff.partial" in done.out, done
    (entry,) = command("ls", "--json", tmp_path, torch=False).json["checkpoints"]
    assert entry["name"] == partial
    done = command("recover", tmp_path, torch=False)
    assert done.status == 0 and "removed: step-\\udcff" in done.out, done
    assert not (tmp_path / partial).exists()


def test_a_callers_reason_may_hold_any_text(tmp_path: Path) -> None:
    def raising(*_: Any) -> Any:
        raise ValueError("odd \ud800 text")

    class Odd:
        state_dict = raising

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    with pytest.raises(ValueError, match="odd"):
        holdfast.save({"o": Odd()}, tmp_path / "s", rank=0, world_size=2, attempt=ATTEMPT)


def test_names_that_read_the_same_get_numbers_in_linear_time(tmp_path: Path) -> None:
    class Counted(dict[str, int]):
        looks = 0

        def __contains__(self, name: object) -> bool:
            Counted.looks += 1
            return super().__contains__(name)

        def get(self, *arguments: Any) -> Any:
            Counted.looks += 1
            return super().get(*arguments)

    names = Counted()
    given = [_state.unique(name, names) for name in ("a", "a", "a~2", "a", "a~4", "a", *["b"] * 1000)]
    assert given[:6] == ["a", "a~2", "a~2~2", "a~3", "a~4", "a~5"]
    assert given[6:] == ["b", *(f"b~{n}" for n in range(2, 1001))]
    assert Counted.looks < 3 * len(given)

    def same(parts: int) -> Any:
        """A state whose tensors all have the path x.x.x.x..."""
        if not parts:
            return torch.zeros(1)
        return {".".join("x" * n): same(parts - n) for n in range(1, parts + 1)}

    report = holdfast.save(same(8), tmp_path / "s")
    assert report["tensors"] == 2**7 + 1  # and the description


def test_items_of_dcp_may_be_called_like_our_own_entries(tmp_path: Path) -> None:
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(("holdfast:x", "holdfast:holdfast:x", "~", ""))}
    holdfast.dcp.async_save(state, checkpoint_id=tmp_path / "d").result(60)
    into = {name: torch.zeros(2) for name in state}
    holdfast.dcp.load(into, checkpoint_id=tmp_path / "d")
    assert all(torch.equal(into[name], state[name]) for name in state)
