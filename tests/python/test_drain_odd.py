"""`holdfast drain` with odd names, damaged records, many failures, and interruptions: one checkpoint holds no other up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import descriptors
import pytest
import torch
from command_line import holdfast as command
from draining import PLAIN, bound, names, save, swept, until, verdicts

import holdfast
from holdfast.drain import Drain, beside
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.drain.remote import fetch, let_go
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


def _events(run: Path, far: Any, **options: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    following = Following(open_place(str(run)), far, Drain(), events.append, **options)
    refused = following.sweep()
    assert refused is None, refused
    return events


@pytest.mark.parametrize("name", ["a\nb", "a\x7fb"])
def test_a_file_that_a_store_has_no_name_for_holds_no_other_checkpoint_up(name: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    run = tmp_path / "run"
    holdfast.save({"w": torch.zeros(9)}, run / "step-1", step=1, files={name: b"x"})
    save(run, 2, elements=10)
    far = open_place(*bucket)
    (failed,) = [event for event in _events(run, far) if event["event"] == "failed"]
    assert failed["code"] == "FAILED_PRECONDITION" and repr(name) in failed["message"] and "step-1" in failed["message"]
    assert names(far) == ["step-2"]
    assert swept(open_place(str(run)), open_place(str(tmp_path / "far"))) and verdicts(tmp_path / "far") == ["sound", "sound"]


def test_names_that_are_not_utf_8_end_no_drain(tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / os.fsdecode(b"far\xff")
    save(run, 1, 2, 3, elements=10)
    odd = run / "step-1" / os.fsdecode(b"caf\xe9")
    odd.touch()
    done = command("drain", run, far, "--keep-source", "1", torch=False)
    assert done.status == 0 and "caf" in done.error, done
    assert sorted(os.listdir(far)) == ["step-1", "step-2", "step-3"] and names(open_place(str(run))) == ["step-1", "step-3"]
    (far / "step-1" / odd.name).touch()  # retention there, too
    assert command("drain", run, far, "--keep-last", "1", torch=False).status == 0
    assert odd.exists() and (far / "step-1" / odd.name).exists()


def test_a_damaged_record_of_files_beside_keeps_no_checkpoint_from_being_fetched(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    run, far = tmp_path / "run", open_place(*bucket)
    save(run, 1, elements=10, format="dcp")
    (run / "step-1" / "common.pt").write_bytes(b"of a framework")
    swept(open_place(str(run)), far)
    (info,) = far.complete()[0]
    record = beside.record_of(info, beside.recorded(far, info))
    content = record.content[:-9] + b"?" + record.content[-8:]
    far.write(info.slot, record._replace(content=content), lambda begin, end: content[begin:end], False)
    with pytest.raises(Error, match="DATA_LOSS|is not|digest") as damaged:
        beside.recorded(far, info)
    assert damaged.value.code == "DATA_LOSS"
    swept(far, open_place(str(tmp_path / "back")))
    assert verdicts(tmp_path / "back") == ["sound"] and not (tmp_path / "back/step-1/common.pt").exists()


def test_a_recovery_leaves_what_a_load_has_fetched_beside_another_save(tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    save(run, 1, elements=10, format="dcp")
    save(far, 1, elements=10, format="dcp")
    (info,) = open_place(str(far)).complete()[0]
    path = fetch(open_place(str(far)), info, str(run), PLAIN)
    again = fetch(open_place(str(far)), info, str(run), PLAIN)
    assert path == again and Path(path).parent.parent == run
    holdfast.recover(run)
    assert os.path.exists(path)
    let_go(path)  # of the first load
    holdfast.recover(run)
    assert os.path.exists(path)
    let_go(path)
    assert os.listdir(run) == ["step-1"]
    fetch(open_place(str(far)), info, str(run), PLAIN)
    holdfast.drain.remote._asides.clear()  # as when the process has ended
    holdfast.recover(run)
    assert os.listdir(run) == ["step-1"]


def test_what_cannot_be_removed_is_one_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, *range(1, 7), elements=10, format="dcp")
    for step in range(1, 7):
        (run / f"step-{step}" / "own.bin").mkdir()  # no drain takes a directory
    far = open_place(str(tmp_path / "far"))
    events = _events(run, far, keep_local=1)
    kept = [event["message"] for event in events if event["event"] == "trouble" and "the directory is kept" in event["message"]]
    assert len(kept) <= 6 and "likewise 4 other checkpoints" in kept[-1], kept
    assert len(names(far)) == 6


def test_each_other_error_of_a_removal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    save(run, *range(1, 6), elements=10)
    source = open_place(str(run))
    codes = dict.fromkeys(("step-1", "step-2"), "FAILED_PRECONDITION")

    def refuse(info: Any) -> None:
        raise Error(codes.get(info.name, "PERMISSION_DENIED"), f"remove {info.name}", 1)

    monkeypatch.setattr(source, "remove", refuse)
    events: list[dict[str, Any]] = []
    following = Following(source, open_place(str(tmp_path / "far")), Drain(), events.append, keep_local=1)
    refused = following.sweep()
    assert refused is not None and refused.message == "remove step-3"
    told = [event["message"] for event in events if event["event"] == "trouble"]
    assert told[-2:] == ["remove step-1; likewise 1 other checkpoint", "remove step-4"], told


def test_failed_copies_hold_no_descriptors(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, *range(1, 6), elements=10)
    for step in range(1, 6):
        data = max((run / f"step-{step}").iterdir(), key=lambda path: path.stat().st_size)
        data.write_bytes(bytes(data.stat().st_size))
    following = Following(open_place(str(run)), open_place(str(tmp_path / "far")), Drain(), lambda _: None)
    before = descriptors.of_files_below(tmp_path)
    following.sweep()
    assert len(following.failed) == 5 and descriptors.of_files_below(tmp_path) == before
    for step in range(1, 6):
        shutil.rmtree(run / f"step-{step}")
    following._cleaned_at = float("-inf")
    following.sweep()
    assert os.listdir(tmp_path / "far") == []  # what was begun for checkpoints that are gone


@pytest.mark.parametrize("options", [[], ["--json"], ["--watch"]], ids=["once", "json", "watch"])
def test_ctrl_c_is_130(options: list[str], tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=1 << 20)
    drain = subprocess.Popen([sys.executable, "-m", "holdfast", "drain", tmp_path / "run", tmp_path / "far", "--rate", "100k", *options],
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert until(lambda: (tmp_path / "far").exists() and any((tmp_path / "far").iterdir()))
        drain.send_signal(signal.SIGINT)
        error = drain.communicate(timeout=30)[1]
        assert (drain.returncode, error) == (130, b"")
    finally:
        drain.kill()
        drain.wait()


def test_a_reader_that_goes_ends_a_drain_that_watches(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    drain = subprocess.Popen([sys.executable, "-m", "holdfast", "drain", tmp_path / "run", tmp_path / "far", "--watch", "--json"],
                             stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert drain.stdout is not None and drain.stdout.readline()
        drain.stdout.close()
        save(tmp_path / "run", 2, elements=10)
        assert drain.wait(60) == 141
    finally:
        drain.kill()
        drain.wait()


def test_verify_takes_urls_and_paths_apart(tmp_path: Path, url: str) -> None:
    save(tmp_path / "run", 1, elements=10)
    done = command("verify", url, tmp_path / "run", torch=False)
    assert done.status == 64 and f"{tmp_path / 'run'} is a path" in done.error and "Traceback" not in done.error, done


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_name_that_the_file_system_takes_for_another_replaces_nothing(tmp_path: Path) -> None:
    """As on a file system without the case of letters, where `Best` leads to `best`."""
    run, far = tmp_path / "run", tmp_path / "far"
    for name in ("best", "Best"):
        holdfast.save({"w": torch.randn(9)}, run / name, step=1)
    shutil.copytree(run / "best", far / "best")
    (far / "Best").mkdir()
    with bound(far / "best", far / "Best"):
        (failed,) = [event for event in _events(run, open_place(str(far))) if event["event"] == "failed"]
        assert failed["name"] == "Best" and "takes this name for that of best" in failed["message"]
    assert holdfast.verify(far / "best")["verdict"] == "sound"
    assert (far / "best" / "holdfast.commit.json").read_bytes() == (run / "best" / "holdfast.commit.json").read_bytes()
