"""What tools/emulator-campaign.sh judges with: the log of log-writes, the lines that a witness got, and the report."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import clone
import pytest

from holdfast.integrity import (
    bad_disks,
    device_mapper,
    jobs,
    judge,
    log_writes,
    power_cuts,
    processes,
    resets,
    schedule,
)

PAGE = 4096
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
LIMITS = schedule.Limits(ranks_max=1, mounts=())


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return clone.script("tools/emulator/table.py")


def log_of(path: Path, *entries: tuple[int, int, int, bytes]) -> Path:
    """A log as the kernel writes it: sector, sectors, flags, and the bytes or the mark of each entry."""
    data = struct.pack("<QQQI", log_writes.MAGIC, 1, len(entries), PAGE).ljust(PAGE, b"\0")
    for sector, sectors, flags, body in entries:
        head = struct.pack("<QQQQ", sector, sectors, flags, len(body) if flags & MARK else 0)
        data += (head + body if flags & MARK else head).ljust(PAGE, b"\0") + (b"" if flags & MARK else body)
    path.write_bytes(data)
    return path


def test_a_log_is_read_in_its_order(tmp_path: Path) -> None:
    path = log_of(
        tmp_path / "log", (5, 1, 0, b"a" * PAGE), (0, 0, FLUSH, b""), (0, 0, MARK, b"7"), (2, 2, FUA, b"b" * 2 * PAGE), (9, 1, DISCARD, b""),
        (0, 0, MARK, b"dm-log-writes-end"),
    )  # fmt: skip
    with path.open("rb") as file:
        write, flush, mark, durable, discard = log_writes.entries(file)
    assert (write.offset, write.data, write.is_flush, write.is_durable) == (5 * PAGE, b"a" * PAGE, False, False)
    assert flush.is_flush and not flush.data
    assert mark.is_mark and mark.data == b"7"
    assert (durable.offset, durable.data, durable.is_durable) == (2 * PAGE, b"b" * 2 * PAGE, True)
    assert (discard.offset, discard.data) == (9 * PAGE, bytes(PAGE))


def test_a_log_whose_disk_was_full_is_refused(tmp_path: Path) -> None:
    with log_of(tmp_path / "log", (5, 1, 0, b"a" * PAGE)).open("rb") as file, pytest.raises(ValueError, match="no end"):
        list(log_writes.entries(file))


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file, pytest.raises(ValueError, match="no log"):
        list(log_writes.entries(file))


@pytest.mark.parametrize("attack", bad_disks.ATTACKS)
def test_a_round_goes_on_after_its_disk_was_bad(attack: str) -> None:
    for number in range(40):
        made = bad_disks.prepared(schedule.draw(1, number, LIMITS), attack)
        assert len(made["lives"]) == 2
        assert attack != "is late" or made["launcher"] != "thread"  # there is a worker to kill
        numbers = [a["n"] for actions in made["lives"] for a in actions if a["do"] == "save"]
        assert numbers == sorted(set(numbers))


def test_a_disk_goes_bad_after_the_call_that_was_drawn() -> None:
    happened: list[int] = []
    lines = bad_disks._Telling(2, 0.0, lambda: happened.append(len(lines)))
    for event in ("call", "called", "call"):
        lines.append({"event": event})
    lines._timer.join()
    lines.append({"event": "durable"})
    lines.close()
    assert (lines.before, happened) == (3, [3])


def test_a_witness_that_was_told_nothing_has_no_state(tmp_path: Path) -> None:
    witness = tmp_path / "told"
    witness.write_text("round 3\r\nbeg")
    (judged,) = resets.judge("ext4", "/dev/null", str(witness), 1, LIMITS)
    assert judged[0] == 3 and judged[2].counts == {}


@pytest.mark.parametrize("told", ["", "rou", 'begin\n{"event": "durable"}\n'])
def test_a_witness_without_a_round_is_refused(told: str, tmp_path: Path) -> None:
    witness = tmp_path / "told"
    witness.write_text(told)
    with pytest.raises(ValueError, match="no round"):
        resets.judge("ext4", "/dev/null", str(witness), 1, LIMITS)


def test_only_the_last_round_of_a_witness_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, heard = tmp_path / "told", []

    def look(round_: dict[str, Any], log: Any, cut: power_cuts.Cut, *_: Any) -> list[dict[str, str]]:
        heard.append((round_["number"], log.operations[: cut.at]))
        return [{"invariant": "i", "what": "lost"}]

    monkeypatch.setattr(power_cuts, "look", look)
    durable, call = '{"event": "durable"}', '{"event": "call"}'
    witness.write_text("\r\n".join(["round 3", "begin", durable, "life", "round 4", "begin", call, durable, '{"event": "dur']))
    ((number, kind, result),) = resets.judge("xfs", "/dev/null", str(witness), 1, LIMITS)
    assert heard == [(4, ["begin", call, durable])]
    assert (number, kind, [p["what"] for p in result.problems]) == (4, "xfs", ["lost"])
    assert result.counts == {"states xfs reset": 1, "durable xfs": 1}


def test_what_goes_wrong_before_a_reset_is_told_to_the_witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds: the first leaves a process, and the reset comes in the second."""
    witness, looked = tmp_path / "told", []

    def record(round_: dict[str, Any], told: Any, *_: Any) -> judge.Judge:
        told.mark("begin")
        if round_["number"] == 4:
            raise KeyboardInterrupt
        made = judge.Judge(round_, str(tmp_path))
        made.blame("iv", "a process\nis left")
        told.mark("life")
        return made

    monkeypatch.setattr(resets, "make", lambda *_: None)
    monkeypatch.setattr(resets, "mounted", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(power_cuts, "record", record)
    monkeypatch.setattr(power_cuts, "look", lambda *of: looked.append(of[1].operations) or [])
    with pytest.raises(KeyboardInterrupt):
        resets.run("ext4", "/dev/null", str(witness), 1, LIMITS, 3)
    before, last = resets.judge("ext4", "/dev/null", str(witness), 1, LIMITS)
    assert (before[0], before[2].problems) == (3, [{"invariant": "iv", "what": "without a reset: a process\nis left"}])
    assert (last[0], last[2].problems, looked) == (4, [], [["begin"]])


class Witness:
    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.told: list[str] = []

    def mark(self, text: str) -> None:
        self.told.append(text)


@pytest.mark.parametrize(("plant", "left", "said"), [("crashes", {}, "status -11"), ("", {7: "sleep"}, "outlive their trainers")])
def test_what_goes_wrong_while_a_disk_is_recorded_is_told(
    plant: str, left: dict[int, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.Orphans, "wait", lambda *_: left)
    jobs.start_server()
    round_ = schedule.draw(3, 0, LIMITS) | {"door": "save_async", "jobs": 1, "forbidden": {}}
    save = {"do": "save", "n": 1, "step": 1, "mutate": True, "rate": 0, "spec": {"tensors": 2, "bytes": 4096, "wide": False, "objects": False}}
    with processes.adopting():
        done = power_cuts.record(round_ | {"lives": [[save]]}, Witness(tmp_path), str(tmp_path), f"integrity_planted:{plant}" if plant else "")
    assert [said in p["what"] for p in done.problems] == [True], done.problems


def answers(folder: Path, status: str, escapes: int, states: int = 90) -> Path:
    report = {"kernel": "Linux 6.1", "seed": 1, "seconds": 5, "states": {"states ext4 flush": states, "states ext4 loses writes": 1} if states else {},
              "counts": {"durable ext4": 4, "escapes ext4": escapes, "failed ext4": 2}}  # fmt: skip
    (folder / "log_writes.log").write_text("ESCAPE in round 0: (i) lost\r\n" if escapes else "")
    (folder / "log_writes").write_text(json.dumps(report) + status)
    for name in ("reset-ext4-0", "reset-ext4-0-told"):
        (folder / f"{name}.log").touch()
        (folder / name).write_text(json.dumps(report | {"states": {"states ext4 reset": 1}}) + status)
    return folder


def test_a_report_has_a_row_for_each_part(table: ModuleType, tmp_path: Path) -> None:
    found = table.read(answers(tmp_path, "status 0\r\n", 0))
    assert table.problems(found, planted=False) == []
    assert table.table(found).splitlines()[2:] == [
        "| log_writes | ext4 | 90 flush, 1 loses writes | 4 | 2 | 0 |",
        "| resets | ext4 | 1 reset | 4 | 2 | 0 |",
    ]


@pytest.mark.parametrize(
    ("status", "escapes", "states", "said"),
    [
        ("status 1\n", 3, 90, "log_writes: exit status 1"),
        ("", 0, 90, "log_writes: it did not end by itself"),
        ("status 0\n", 0, 0, "log_writes: nothing was tried"),
    ],
)
def test_a_report_is_red(table: ModuleType, tmp_path: Path, status: str, escapes: int, states: int, said: str) -> None:
    assert said in table.problems(table.read(answers(tmp_path, status, escapes, states)), planted=False)


@pytest.mark.parametrize(
    ("status", "escapes", "planted", "expected"),
    [("status 0\n", 0, False, 0), ("status 1\n", 3, False, 1), ("status 139\n", 0, False, 1), ("status 2\n", 0, False, 2),
     ("", 0, False, 2), ("", 3, False, 1), ("status 0\n", 0, True, 1)],
)  # fmt: skip
def test_the_status_of_a_report_tells_an_escape_from_a_part_that_did_not_run(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, escapes: int, planted: bool, expected: int
) -> None:
    (tmp_path / "results").mkdir()
    arguments = [str(answers(tmp_path / "results", status, escapes)), str(tmp_path / "report.md"), *["--planted"] * planted]
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments])
    assert table.main() == expected


def test_a_campaign_that_cannot_begin_has_status_2(tmp_path: Path) -> None:
    if not (clone.ROOT / "tools/emulator-campaign.sh").exists():
        pytest.skip("there is no clone around the tests")
    (tmp_path / "tools/rehearse").mkdir(parents=True)
    for name in ("emulator-campaign.sh", "setup.sh", "rehearse/roots.sh"):
        shutil.copy(clone.ROOT / "tools" / name, tmp_path / "tools" / name)
    for name in ("dpkg-query", "apt-get", "mmdebstrap"):  # nothing is installed, and no guest is made
        (tmp_path / name).write_text("#!/bin/sh\necho installed\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [tmp_path / "tools/emulator-campaign.sh", "--wheels", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 2
    assert "needs root" in done.stderr or "no wheel" in done.stderr


def test_a_planted_bug_has_to_be_found(table: ModuleType, tmp_path: Path) -> None:
    assert "log_writes: the planted bug was not found" in table.problems(table.read(answers(tmp_path, "status 0\n", 0)), planted=True)
    assert table.problems(table.read(answers(tmp_path, "status 1\n", 3)), planted=True) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="without root it says that first")
def test_the_program_says_what_a_reset_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.integrity", "--resets", "ext4"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "--resets needs" in done.stderr


def test_a_table_has_its_pieces_in_order() -> None:
    assert device_mapper.table_of((8192, "linear a 0"), (0, "linear b 0"), (PAGE, "linear c 8")) == "0 16 linear a 0\n16 8 linear c 8\n"


def test_messages_have_the_layout_of_the_kernel() -> None:
    assert device_mapper._HEADER.size == 312  # sizeof(struct dm_ioctl)
