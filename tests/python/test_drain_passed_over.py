"""`holdfast drain`: checkpoints that it does not send because nothing proves them, and what it says of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import holdfast as command
from draining import PLAIN, names, save, swept, verdicts

import holdfast
from holdfast import _native
from holdfast.drain import Drain
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
RECORDS = [("holdfast", "holdfast.commit.json"), ("dcp", ".metadata")]


def _make_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)  # a loop


@pytest.mark.parametrize("format, record", [("holdfast", "holdfast.commit.json"), ("dcp", ".metadata")])
def test_what_the_listing_passes_over_is_reported(format: str, record: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10, format=format)
    path = tmp_path / "run" / "step-1" / record
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    done = command("drain", tmp_path / "run", tmp_path / "far", torch=False)
    assert done.status == 1 and "arrived: step-2" in done.out and "passed over step-1: " in done.error, done
    done = command("drain", tmp_path / "run", tmp_path / "far", torch=False)
    assert done.status == 1 and done.error.count("passed over step-1: ") == 1, done
    done = command("drain", tmp_path / "run", tmp_path / "far", "--name", "step-2", torch=False)
    assert done.status == 0 and "passed over step-1: " in done.error, done  # as with --newest: it may have been meant


def test_a_wait_says_what_was_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, 2, elements=10)
    record = run / "step-1" / "holdfast.commit.json"
    data = record.read_bytes()
    record.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with holdfast.Checkpointer(run, drain_to=tmp_path / "far") as checkpointer:
        for _ in range(2):
            with pytest.raises(Error, match="passed over step-1: ") as refused:
                checkpointer.flush(drain=True)
            assert refused.value.code == "DATA_LOSS"
        assert names(open_place(str(tmp_path / "far"))) == ["step-2"]
        record.write_bytes(data)
    assert names(open_place(str(tmp_path / "far"))) == ["step-1", "step-2"] and checkpointer.drain_report["arrived"] == 2


def test_a_repaired_checkpoint_is_sent(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 1, elements=10)
    (data,) = (run / "step-1").glob("model-*")
    sound = data.read_bytes()
    data.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with holdfast.Checkpointer(run, drain_to=tmp_path / "far") as checkpointer:
        for _ in range(2):
            with pytest.raises(Error, match="another digest"):
                checkpointer.wait_drained(60)
        assert list(checkpointer.drain_report["failed"]) == ["step-1"]
        data.write_bytes(sound)
        checkpointer.wait_drained(60)
        assert checkpointer.drain_report["failed"] == {} and names(open_place(str(tmp_path / "far"))) == ["step-1"]


@pytest.mark.parametrize("format, record", RECORDS)
def test_a_format_of_which_none_can_be_read_does_not_hold_up_the_other(format: str, record: str, tmp_path: Path) -> None:
    other = "dcp" if format == "holdfast" else "holdfast"
    save(tmp_path / "run", 1, elements=10, format=format)
    save(tmp_path / "run", 2, elements=10, format=other)
    _make_unreadable(tmp_path / "run" / "step-1" / record)
    done = command("drain", tmp_path / "run", tmp_path / "far", torch=False)
    assert done.status == 1 and "arrived: step-2" in done.out and "passed over step-1: " in done.error, done
    # Nor does one of the second place.
    save(tmp_path / "far", 3, elements=10, format=format)
    _make_unreadable(tmp_path / "far" / "step-3" / record)
    save(tmp_path / "run", 4, elements=10, format=other)
    assert [e["event"] for e in swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")))] == ["trouble", "arrived"]
    # A run of that format must not begin anew, or go on from what the other format has.
    with holdfast.Checkpointer(tmp_path / "new", format=format, drain_to=str(tmp_path / "far")) as checkpointer:
        with pytest.raises(Error, match="Too many levels"):
            checkpointer.newest()


def test_metadata_without_a_commit_record_is_reported(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10, format="dcp")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "run" / "step-3", no_dist=True)  # by another program
    metadata = tmp_path / "run/step-1/.metadata"
    (attempt,) = set(re.findall("[0-9a-f]{32}", " ".join(p.name for p in metadata.parent.iterdir())))
    metadata.write_bytes(metadata.read_bytes().replace(attempt.encode(), b"0" * 32))
    done = command("drain", tmp_path / "run", tmp_path / "far", torch=False)
    assert done.status == 1 and "arrived: step-2" in done.out, done
    assert all(f"passed over {name}: no commit record is there of the save" in done.error for name in ("step-1", "step-3")), done
    document = command("drain", tmp_path / "run", tmp_path / "far", "--json", torch=False).json
    assert {text.partition(": ")[0] for text in document["passed_over"]} == {"step-1", "step-3"}
    source, events = open_place(str(tmp_path / "run")), []
    following = Following(source, open_place(str(tmp_path / "far")), PLAIN, events.append)
    following.sweep(), following.sweep()
    assert [e["event"] for e in events] == ["trouble"] * 2 and names(source) == ["step-2"]  # said once


def test_of_damaged_checkpoints_the_newest_good_one_is_sent(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3, elements=10)
    for data in (tmp_path / "run/step-3").glob("*.safetensors"):
        data.write_bytes(bytes(data.stat().st_size))
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    events = swept(source, far, Drain(keep_last=1), keep_local=1)
    assert [(e["event"], e["name"]) for e in events] == [
        ("failed", "step-3"), ("arrived", "step-2"), ("removed", "step-1"), ("removed", "step-2"),
    ]  # fmt: skip
    assert names(far) == ["step-2"] and names(source) == ["step-3"]


def test_what_lacks_a_record_for_a_moment_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the trainer replaces a checkpoint of DCP, or removes it."""
    save(tmp_path / "run", 1, elements=10)
    record = tmp_path / "run/step-1/holdfast.commit.json"
    data = record.read_bytes()
    record.write_bytes(data[:-1])
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    listed = source.complete

    def and_then_it_is_whole(format: str = "") -> object:
        try:
            return listed(format)
        finally:
            record.write_bytes(data)

    monkeypatch.setattr(source, "complete", and_then_it_is_whole)
    assert [e["event"] for e in swept(source, far)] == ["arrived"]


def without_data(path: Path) -> None:
    next(p for p in path.iterdir() if p.suffix in (".safetensors", ".distcp")).unlink()


def without_manifest(path: Path) -> None:
    next(path.glob("*.manifest.json")).unlink()


def with_short_data(path: Path) -> None:
    os.truncate(next(p for p in path.iterdir() if p.suffix in (".safetensors", ".distcp")), 100)


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("lose", [without_data, without_manifest, with_short_data])
def test_a_copy_that_has_lost_a_file_has_not_arrived(lose: Callable[[Path], None], format: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=1000, format=format)
    source, far = open_place(str(tmp_path / "run")), tmp_path / "far"
    swept(source, open_place(str(far)))
    lose(far / "step-2")
    with holdfast.Checkpointer(tmp_path / "new", format=format, drain_to=far) as checkpointer:
        assert [c["name"] for c in checkpointer.list()] == ["step-1"]
        assert checkpointer.load(into={"w": torch.zeros(1000), "step": torch.tensor(0)})["step"] == 1
        checkpointer.close(drain=False)
    # Nor is the first place's copy removed for it.
    events = swept(source, open_place(str(far)), keep_local=1, form="step-{step}")
    assert [(e["event"], e["name"]) for e in events] == [("arrived", "step-2"), ("removed", "step-1")]
    assert names(open_place(str(far))) == ["step-1", "step-2"] and verdicts(far) == ["sound", "sound"]


def test_a_purge_while_the_drain_runs_is_noticed(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=1000)
    with holdfast.Checkpointer(tmp_path / "run", drain_to=tmp_path / "far") as checkpointer:
        checkpointer.flush(drain=True)
        without_data(tmp_path / "far/step-1")
        checkpointer.flush(drain=True)
        assert verdicts(tmp_path / "far") == ["sound"]


def test_a_listing_looks_at_the_files_of_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, 2, 3, elements=10)
    looked: list[str] = []
    inspect = _native.inspect
    monkeypatch.setattr(_native, "inspect", lambda path: (looked.append(path), inspect(path))[1])
    source = open_place(str(tmp_path / "run"))
    assert names(source) == names(source) == ["step-1", "step-2", "step-3"] and len(looked) == 3
    (tmp_path / "run/step-2/notes.txt").touch()
    assert names(source) == ["step-1", "step-2", "step-3"] and looked[3:] == [str(tmp_path / "run/step-2")]
