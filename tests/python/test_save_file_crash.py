"""`save_file`: whatever is killed, the old file or the new one is there, whole and proven."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from faults import file_size_limit, save_that_writes

import holdfast
from holdfast import files

LONG = bool(os.environ.get("HOLDFAST_LONG"))
ELEMENTS = 1 << 18


@pytest.fixture(autouse=True)
def fresh_options() -> Iterator[None]:
    yield
    holdfast.flush(60)
    holdfast.configure(bytes_per_second_max=0, launcher="spawn")


def state(number: int) -> dict[str, object]:
    return {"number": number, "x": torch.full((ELEMENTS,), float(number)), "y": torch.arange(number % 7)}


def number_in(path: Path) -> int:
    """Of the state in the file, which is checked against all that stands beside it."""
    loaded = torch.load(path)
    number = loaded["number"]
    assert torch.equal(loaded["x"], torch.full((ELEMENTS,), float(number)))
    report = holdfast.verify(path)
    assert report["verdict"] == "sound", report
    assert report["checked"] == "XXH3-128 digests of the seal", report
    return int(number)


def is_clean(directory: Path, *names: str) -> bool:
    """Whether there are the files, one manifest for each, and nothing else."""
    manifests = [files.manifests_of(directory / name) for name in names]
    return sorted(os.listdir(directory)) == sorted(
        [*names, *(os.path.basename(each) for (each,) in manifests)]
    )


TRAINER = """
import os, sys, torch, holdfast
holdfast.configure(launcher=sys.argv[2])
for number in range(int(sys.argv[3]), 1 << 30):
    state = {"number": number, "x": torch.full((1 << 18,), float(number)), "y": torch.arange(number % 7)}
    holdfast.save_file(state, sys.argv[1], wait=number % 3 == 0)
    print(number, flush=True)
"""


@pytest.mark.parametrize("launcher", ["spawn", "thread"])
def test_a_killed_trainer_leaves_a_whole_file(tmp_path: Path, launcher: str) -> None:
    path = tmp_path / "run/last.pt"
    random.seed(7)
    begin, last = 0, -1
    for _ in range(60 if LONG else 2):
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(path), launcher, str(begin)], stdout=subprocess.PIPE, text=True
        )
        assert trainer.stdout is not None
        waited = begin - 1
        for line in trainer.stdout:
            waited = int(line)
            if waited >= begin + random.randrange(3, 9):
                break
        time.sleep(random.random() * 0.05)
        trainer.kill()
        waited = max([waited, *map(int, trainer.stdout.read().split())])
        trainer.wait()
        trainer.stdout.close()
        # An orphan worker may end its save now; what was reported durable stays.
        found = number_in(path)
        assert max(last, waited - waited % 3) <= found <= waited + 1
        begin, last = waited + 2, found
    report = holdfast.recover(path.parent, wait_for_orphans=60)
    deadline = time.monotonic() + 60
    while report["kept_incomplete"] and time.monotonic() < deadline:
        time.sleep(0.05)
        report = holdfast.recover(path.parent)
    assert report["kept_incomplete"] == []
    assert is_clean(path.parent, "last.pt")
    assert number_in(path) >= last
    holdfast.save_file(state(1), path, wait=True)
    assert number_in(path) == 1 and is_clean(path.parent, "last.pt")


def test_a_killed_worker_fails_its_save_and_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    holdfast.save_file(state(1), path, wait=True)
    holdfast.configure(bytes_per_second_max=4 << 20)
    save = holdfast.save_file({"x": torch.zeros(6 << 20)}, path)
    os.kill(save_that_writes()._native.worker_pid, signal.SIGKILL)
    with pytest.raises(holdfast.Error):
        save.wait(60)
    assert number_in(path) == 1 and is_clean(tmp_path, "x.pt")


def test_a_full_disk_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    holdfast.save_file(state(1), path, wait=True)
    with file_size_limit(1 << 19), pytest.raises(holdfast.Error) as error:
        holdfast.save_file({"x": torch.zeros(1 << 20)}, path, wait=True)
    assert error.value.code == "RESOURCE_EXHAUSTED"
    holdfast.configure(launcher="spawn")
    assert number_in(path) == 1 and is_clean(tmp_path, "x.pt")


def test_a_cancelled_save_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    holdfast.save_file(state(1), path, wait=True)
    holdfast.configure(bytes_per_second_max=4 << 20)
    save = holdfast.save_file({"x": torch.zeros(6 << 20)}, path)
    save_that_writes()
    save.cancel()
    with pytest.raises(holdfast.Error) as error:
        save.wait(60)
    assert error.value.code == "CANCELLED"
    assert number_in(path) == 1 and is_clean(tmp_path, "x.pt")


def test_the_last_of_many_saves_in_flight_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    saves = [holdfast.save_file(state(number), path) for number in range(6)]
    outcomes = []
    for save in saves:
        try:
            save.wait(60)
            outcomes.append("durable")
        except holdfast.Error as error:
            outcomes.append(error.code)
    assert set(outcomes) <= {"durable", "ABORTED"} and outcomes[-1] == "durable"
    assert number_in(path) == 5 and is_clean(tmp_path, "x.pt")


def test_saves_of_several_threads_and_processes_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    script = f"import holdfast, sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}; " \
             f"from test_save_file_crash import state\n" \
             f"for n in range(4):\n" \
             f"    try: holdfast.save_file(state(int(sys.argv[1]) + n), {str(path)!r}, wait=True)\n" \
             f"    except holdfast.Error as error: assert error.code == 'ABORTED', error\n"
    others = [subprocess.Popen([sys.executable, "-c", script, str(base)]) for base in (100,)]

    def save_some(base: int) -> None:
        for n in range(4):
            try:
                holdfast.save_file(state(base + n), path).wait(60)
            except holdfast.Error as error:
                assert error.code == "ABORTED", error
            number_in_or_again(path)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(save_some, (300, 400))) == [None, None]
    assert [other.wait(120) for other in others] == [0]
    assert number_in(path) % 100 == 3
    assert is_clean(tmp_path, "x.pt")


def number_in_or_again(path: Path) -> None:
    """The file loads at any moment, whichever save has just replaced it."""
    loaded = torch.load(path)
    assert torch.equal(loaded["x"], torch.full((ELEMENTS,), float(loaded["number"])))


def test_a_directory_of_many_files_is_verified_whatever_its_user_does(tmp_path: Path) -> None:
    for name in ("a.ckpt", "b.ckpt", "c.ckpt", "d.ckpt", "e"):
        holdfast.save_file(state(ord(name[0])), tmp_path / name, wait=True)
    holdfast.save_async({"x": 1}, tmp_path / "step-1").wait(60)
    (tmp_path / "a.ckpt").unlink()
    torch.save({"other": 1}, tmp_path / "b.ckpt")
    (tmp_path / "c.ckpt").rename(tmp_path / "renamed.ckpt")
    (tmp_path / "notes.txt").write_text("mine")
    report = holdfast.verify(tmp_path)
    assert report["verdict"] == "sound", report
    assert "b.ckpt is of another file" in report["note"]
    assert report["files"] == 4 + holdfast.verify(tmp_path / "step-1")["files"]
    assert holdfast.verify(tmp_path / "renamed.ckpt")["verdict"] == "sound"
    assert holdfast.find_newest(tmp_path)["name"] == "step-1"
    assert [each["name"] for each in holdfast.list_checkpoints(tmp_path)] == ["step-1"]
    done = subprocess.run([sys.executable, "-m", "holdfast", "verify", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    with open(tmp_path / "d.ckpt", "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xfe")
    report = holdfast.verify(tmp_path)
    assert report["verdict"] == "corrupt"
    (fault,) = report["faults"]
    assert fault["file"] == "d.ckpt" and fault["tensor"] == "data/0"
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "verify", str(tmp_path / "d.ckpt")], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr

    removed = holdfast.recover(tmp_path)["removed"]
    stale = re.compile(r"\.(a|c)\.ckpt\.holdfast-[0-9a-f]{32}\.json")
    assert len(removed) == 2 and all(stale.fullmatch(name) for name in removed)
    for name in ("b.ckpt", "d.ckpt", "e", "renamed.ckpt"):
        holdfast.remove_file(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "step-1"]


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    holdfast.save_file(state(3), path, wait=True)
    (manifest,) = map(Path, files.manifests_of(path))
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"step":0', b'"step":1'))
    assert holdfast.verify(path)["verdict"] == "corrupt"
    manifest.unlink()
    report = holdfast.verify(path)
    assert (report["verdict"], report["checked"]) == ("sound", "torch zip CRC32s")
    manifest.write_bytes(text)
    os.truncate(path, os.path.getsize(path) - 100)
    report = holdfast.verify(path)
    assert report["verdict"] == "corrupt"
    assert {fault["reason"] for fault in report["faults"]} >= {"size"}
