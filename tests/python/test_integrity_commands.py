"""What integrity-fuzz prints and writes to go on with: the command of an escape, and the report of --resume."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest

from holdfast import integrity
from holdfast.integrity import (
    campaign,
    device_mapper,
    injection,
    lanes,
    places,
    power_cuts,
    processes,
    rounds,
    schedule,
)

pytestmark = pytest.mark.long

SMALL = ("--ranks", "1", "--no-mount", "--events", "program", "--bytes", "18", "--tensors", "40")
LATE = ("--plant", "integrity_planted:captures_late")
BROKEN = ("--plant", "integrity_planted:stays_broken_after_a_worker")
SILENT = ("--plant", "integrity_planted:syncs_nothing")


def run(*arguments: str, cwd: Path = Path(__file__).parent) -> subprocess.CompletedProcess[str]:
    """Runs the program where `integrity_planted` is found."""
    return programs.run("-m", "holdfast.integrity", *arguments, cwd=str(cwd), timeout=900)


def printed(said: str) -> list[str]:
    """The arguments of the first command that reproduces an escape."""
    (_, *command) = shlex.split(next(line for line in said.splitlines() if line.startswith("reproduce: ")).removeprefix("reproduce: "))
    return command


def broken(said: str) -> set[str]:
    """The promises of all escapes."""
    return {line.partition(": (")[2].partition(")")[0] for line in said.splitlines() if line.startswith("ESCAPE in ") and ": (" in line}


@pytest.mark.parametrize(("arguments", "reason"), [
    pytest.param((*SMALL, *LATE, "--rounds", "1", "--shrink", "0", "--doors", "save_async"), "", id="rounds"),
    pytest.param((*SMALL, *LATE, "--rounds", "1", "--savers", "holdfast.dcp"), "", id="savers"),
    pytest.param((*BROKEN, "--replay", "replace/fork/pwrite,worker:openat:1:kill"), injection.why_not(), id="kills"),
    pytest.param((*BROKEN, "--replay", "replace/fork/pwrite,worker:fsync:1:EIO"), injection.why_not(), id="faults"),
    pytest.param((*SILENT, "--power-cuts", "ext4", "--ranks", "1", "--doors", "save_async", "--cuts", "1", "--rounds", "1", "--jobs", "1"),
                 places.why_not("fuse"), id="power cuts"),
    pytest.param((*SILENT, "--bad-disks", "ext4", "--ranks", "1", "--doors", "save_async", "--rounds", "1", "--jobs", "1"),
                 places.why_not("fuse") or device_mapper.why_not("flakey", "delay"), id="bad disks"),
])  # fmt: skip
def test_the_command_of_an_escape_finds_it_again(arguments: tuple[str, ...], reason: str) -> None:
    """Another process, without what the first one had in its directory; one run is enough for what is planted."""
    if reason:
        pytest.skip(reason)
    first = run(*arguments, "--seed", "5")
    assert first.returncode == 1, first.stdout + first.stderr
    command = printed(first.stdout)
    assert "--dir" not in command
    again = run(*command, "--repeat", "1")
    assert again.returncode == 1, again.stdout + again.stderr
    assert broken(again.stdout) & broken(first.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="disks need root")
@pytest.mark.parametrize("option", ["--power-cuts", "--bad-disks"])
def test_the_command_of_a_disk_has_the_round_itself(option: str, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Its draw depends on options, and on what the machine has."""
    ran: list[dict[str, Any]] = []

    def made(make: Any, kinds: list[str], numbers: Any, *_: Any) -> Iterator[tuple[int, str, rounds.Result]]:
        draw = make.args[0].args[0]
        for number, kind in itertools.product(numbers, kinds):
            ran.append(draw(number))
            yield number, kind, rounds.Result([{"invariant": "i", "what": "lost"}], Counter(), "", 0.0)

    monkeypatch.setattr(power_cuts, "campaign", made)
    monkeypatch.setattr(device_mapper, "why_not", lambda *_: "")
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    options = ["--ranks", "3", "--doors", "save_file,dcp", "--events", "cancel", "--bytes", "20", "--tensors", "30"]
    assert integrity.main([option, "xfs", "--seed", "5", "--first", "7", "--rounds", "1", *options]) == 1
    assert integrity.main(printed(capsys.readouterr().out)) == 1
    assert ran[0] == ran[1] and (ran[0]["seed"], ran[0]["number"]) == (5, 7)


class Lane:
    """In place of `lanes.Lanes`: each second round ends before the one before it; the last one never does."""

    def __init__(self, *_: Any) -> None:
        self.ran: list[int] = []

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, each: Iterator[Any], *_: Any) -> Iterator[Any]:
        for pair in zip(each, each, strict=False):
            for arguments in reversed(pair):
                if len(self.ran) == 3:
                    raise KeyboardInterrupt
                self.ran.append(arguments[0]["number"])
                yield arguments, rounds.Result([], Counter(), "", 0.0)


def test_a_round_that_overtook_another_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_lanes: list[Lane] = []
    monkeypatch.setattr(lanes, "Lanes", lambda *_: made_lanes.append(Lane()) or made_lanes[-1])
    report = tmp_path / "report"
    first = campaign.Campaign(str(tmp_path), 8, schedule.Limits(), str(report), lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        first.run(None, None, 0)
    told = json.loads(report.read_text())
    assert (made_lanes[0].ran, told["rounds"], told["next_round"], told["rounds_ahead"]) == ([1, 0, 3], 3, 2, [3])
    second = campaign.Campaign(str(tmp_path), 9, schedule.Limits(), str(report), lambda _: None)
    second.resume(told)
    with pytest.raises(KeyboardInterrupt):
        second.run(None, None, 0)
    told = json.loads(report.read_text())
    assert (made_lanes[1].ran, told["rounds"], told["next_round"], told["rounds_ahead"]) == ([4, 2, 6], 6, 5, [6])


@pytest.mark.parametrize(("options", "said"), [
    (("--bytes", "18"), "ranks_max 2, now 8; bytes_max 134217728, now 18874368"),
    (("--ranks", "2", "--seed", "9"), "goes on with seed 8 in "),
    (("--ranks", "2", "--first", "3"), "goes on with seed 8 in "),
    (("--ranks", "2", "--dir", "."), "goes on with seed 8 in "),
    (("--ranks", "2", "--power-cuts", "ext4"), "--resume goes on with the rounds of a report"),
    (("--ranks", "2", "--savers", "holdfast.dcp"), "--resume goes on with the rounds of a report"),
    (("--ranks", "2", "--replay", "{}"), "--resume goes on with the rounds of a report"),
    (("--faults",), "--resume goes on with the rounds of a report"),
])  # fmt: skip
def test_a_report_is_not_resumed_by_another_campaign(options: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    arguments = integrity._parser().parse_args(["--ranks", "2", "--seed", "8", "--dir", str(tmp_path)])
    report = tmp_path / "report"
    report.write_text(json.dumps(integrity._campaign(arguments, "").as_json()))
    before = report.read_text()
    capsys.readouterr()
    assert integrity.main(["--resume", str(report), "--rounds", "1", *options]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert report.read_text() == before


def test_a_refused_resume_says_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    arguments = integrity._parser().parse_args([*SMALL, "--seed", "8", "--dir", str(tmp_path)])
    report = tmp_path / "report"
    told = integrity._campaign(arguments, "").as_json()
    report.write_text(json.dumps(told))
    assert integrity.main(["--resume", str(report)]) == 2
    options = "--ranks 1 --tensors 40 --bytes 18 --events program --no-mount"
    assert f"It began with the options {options}: give these" in capsys.readouterr().err
    resumed = integrity._campaign(integrity._parser().parse_args(["--resume", str(report), *options.split()]), "")
    assert resumed.as_json() == told
    report.write_text(json.dumps({**told, "version": 1}))
    assert integrity.main(["--resume", str(report), *options.split()]) == 2
    assert "begin another one with --report" in capsys.readouterr().err
