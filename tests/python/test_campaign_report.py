"""What tools/campaign.sh says of its parts: found, nothing found, or that a part did not run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import clone
import pytest

from holdfast.integrity import peers

LONGEST = 900
HAS_ROOT = os.geteuid() == 0
SAVERS = """| saver | rounds | survived | durable lost or unreadable | wrong bytes accepted |
| --- | --- | --- | --- | --- |
| holdfast.dcp | 40 | {} | 0 | 0 |
| dcp-thread | 40 | 33 | 7 | 2 |
"""
# The programs, tests and fuzzers around the script. What each does is in files beside them.
STAND_INS = {
    "bin/dpkg-query": "echo installed",
    "bin/cmake": "exit 0",
    "bin/ctest": """for name in "$@"; do [ "$name" != planted ] || exec cat "$HERE/planted.log"; done
echo "$@" >>"$HERE/ctest"; cat "$HERE/tests.log"; exit "$(cat "$HERE/tests.status")\"""",
    "tools/venv.sh": "exit 0",
    "build/venv/bin/python": "echo holdfast.dcp,dcp-thread; echo '- nvrx-persistent: it is not installed' >&2",
    "build/venv/bin/integrity-fuzz": """part=rounds
while [ $# -gt 0 ]; do
  case "$1" in --report) part=$(basename "$2" .json) report=$2 ;; --savers) part=savers ;; esac; shift
done
[ ! -f "$HERE/$part.json" ] || cp "$HERE/$part.json" "$report"
cat "$HERE/$part.log"; exit "$(cat "$HERE/$part.status")\"""",
    "build/fuzz/fuzz/json_fuzz": "echo '#9 DONE cov: 121 ft: 8'; echo 'stat::number_of_executed_units: 1500'",
}
TESTS = """    Start 1: fault/ring_faults_test
1: [       OK ] Ring.Fails (3 ms)
1: [  SKIPPED ] Ring.Other (0 ms)
1/1 Test #1: fault/ring_faults_test ....   Passed    0.00 sec
"""
SKIPPED = """    Start 1: fault/ring_faults_test
1: [  SKIPPED ] Ring.Fails (0 ms)
1/1 Test #1: fault/ring_faults_test ....***Skipped   0.00 sec
"""


@pytest.fixture(scope="module")
def verdict() -> ModuleType:
    return clone.script("tools/campaign/verdict.py")


# ---- One part.


@pytest.mark.parametrize(
    ("status", "log", "rounds", "expected"),
    [
        (0, "", 40, ("nothing found", "nothing found in 40 rounds")),
        (0, "integrity-fuzz: no rounds on disks of the kinds is late, misreads: dmsetup: no\n", 40,
         ("nothing found", "nothing found in 40 rounds (no rounds on disks of the kinds is late, misreads)")),
        (0, "", 0, ("not run", "nothing ran: its log is empty")),
        (1, "ESCAPE in round 3: (i) lost\nescapes: 1", 40, ("found", "**FOUND** (exit status 1): 1 escapes")),
        (1, 'Traceback (most recent call last):\n  File "x"\nImportError: no holdfast\n', 0, ("not run", "could not run: ImportError: no holdfast")),
        (1, "", 0, ("found", "**FOUND** (exit status 1): an escape")),
        (2, "integrity-fuzz: no seccomp filter\n", 0, ("not run", "could not run: no seccomp filter")),
        (2, "seed 1\nintegrity-fuzz: disk full\nmachine: x\nescapes: 0\n", 7, ("not run", "could not go on after 7 rounds: disk full")),
        (2, 'Traceback (most recent call last):\n  File "x"\nKeyError: 3\nescapes: 0\n', 0, ("not run", "could not run: KeyError: 3")),
        (2, "ESCAPE in round 3: (i) lost\nintegrity-fuzz: disk full", 7, ("found", "**FOUND** (exit status 2): 1 escapes")),
        (124, "", 12, ("nothing found", "ended by its time after 12 rounds; nothing found until then")),
        (124, "30 rounds in 31 s, 3 saves", 0, ("nothing found", "ended by its time after 30 rounds; nothing found until then")),
        (124, "seed 1, in /x\n", 0, ("not run", "ended by its time before any of its rounds had finished")),
        (124, "ESCAPE in round 3: (i) lost", 12, ("found", "**FOUND** (exit status 124): 1 escapes")),
        (126, "timeout: no permission", 0, ("not run", "could not run: timeout: no permission")),
        (130, "", 5, ("not run", "could not go on after 5 rounds: interrupted")),
        (139, "", 5, ("found", "**FOUND** (exit status 139)")),
    ],
)  # fmt: skip
def test_the_verdict_of_rounds(
    verdict: ModuleType, tmp_path: Path, status: int, log: str, rounds: int, expected: tuple[str, str]
) -> None:
    (tmp_path / "rounds.log").write_text(log)
    if rounds:
        (tmp_path / "rounds.json").write_text(json.dumps({"rounds": rounds, "escapes": [], "counts": {}}))
    assert verdict.part(tmp_path, "rounds", status, 100, LONGEST, True) == expected


def test_a_report_with_an_escape_is_red_without_a_line_of_the_log(verdict: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "power_cuts.json").write_text(json.dumps({"rounds": 3, "escapes": 2, "counts": {}}))
    assert verdict.part(tmp_path, "power_cuts", 124, 100, LONGEST, True)[0] == "found"


@pytest.mark.parametrize(("seconds", "said"), [(960, "ended by its time after 12 rounds; "), (100, "could not go on after 12 rounds: it was killed")])
def test_a_program_that_was_killed_early_was_not_ended_by_its_time(verdict: ModuleType, tmp_path: Path, seconds: int, said: str) -> None:
    (tmp_path / "program.json").write_text(json.dumps({"rounds": 12, "escapes": [], "counts": {}}))
    assert verdict.part(tmp_path, "program", 137, seconds, LONGEST, True)[1].startswith(said)


def test_runs_count_by_their_report_or_their_log(verdict: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "steps.log").write_text("90 runs of 1000 in 60 s, 0 escapes\n")
    assert "after 90 runs" in verdict.part(tmp_path, "steps", 124, 100, LONGEST, True)[1]
    (tmp_path / "steps.json").write_text(json.dumps({"counts": {"runs": 1000}, "escapes": []}))
    assert verdict.part(tmp_path, "steps", 0, 100, LONGEST, True) == ("nothing found", "nothing found in 1,000 runs")


@pytest.mark.parametrize(("status", "survived", "state"), [(0, 40, "nothing found"), (124, 39, "found"), (1, 39, "found")])
def test_what_other_savers_let_escape_does_not_count(
    verdict: ModuleType, tmp_path: Path, status: int, survived: int, state: str
) -> None:
    (tmp_path / "savers.log").write_text("ESCAPE in round 3: (i) lost\n" + SAVERS.format(survived))
    assert verdict.part(tmp_path, "savers", status, 100, LONGEST, True)[0] == state


@pytest.mark.parametrize(
    ("status", "log", "expected"),
    [
        (0, "stat::number_of_executed_units: 1500\n", ("nothing found", "nothing found in 1,500 executions")),
        (124, "#4096\tNEW    cov: 3\n", ("nothing found", "ended by its time after 4,096 executions; nothing found until then")),
        (124, "INFO: Seed: 1\n", ("not run", "ended by its time before any of its executions had finished")),
        (1, "#4096\tNEW\nSUMMARY: AddressSanitizer: leak\n", ("found", "**FOUND** (exit status 1): SUMMARY: AddressSanitizer: leak")),
        (77, "", ("found", "**FOUND** (exit status 77)")),
        (1, "No such directory: /x; exiting\n", ("not run", "could not run: No such directory: /x; exiting")),
    ],
)
def test_the_verdict_of_a_fuzzer(verdict: ModuleType, tmp_path: Path, status: int, log: str, expected: tuple[str, str]) -> None:
    (tmp_path / "json_fuzz.log").write_text(log)
    assert verdict.part(tmp_path, "json_fuzz", status, 100, LONGEST, True) == expected


@pytest.mark.parametrize(
    ("status", "log", "expected"),
    [
        (0, "100% tests passed, 0 tests failed out of 150\n\t  2 - cuda/x (Skipped)\n90 passed, 4 skipped in 9 s\n",
         ("nothing found", "nothing found in 239 tests, 5 skipped")),
        (1, "98% tests passed, 1 tests failed out of 150\n\t  2 - fault/x (Failed)\n90 passed in 9 s\n", ("found", "**FOUND** (exit status 1): fault/x")),
        (1, "100% tests passed, 0 tests failed out of 150\n2 failed, 90 passed in 9 s\n", ("found", "**FOUND** (exit status 1): 2 Python tests")),
        (1, "the build failed; see build.log\n", ("not run", "could not run: the build failed; see build.log")),
    ],
)  # fmt: skip
def test_the_verdict_of_coverage(verdict: ModuleType, tmp_path: Path, status: int, log: str, expected: tuple[str, str]) -> None:
    (tmp_path / "coverage.log").write_text(log)
    assert verdict.part(tmp_path, "coverage", status, 100, LONGEST, True) == expected


# ---- Tests, in the words of a real ctest.

OK, NO, SKIP = "[       OK ] A.B (3 ms)", "[  FAILED  ] A.C (0 ms)", "[  SKIPPED ] A.D (0 ms)"
PROGRAMS = {
    "ok": f"echo '{OK}'; echo '{SKIP}'; echo '[  SKIPPED ] A.D'",
    "whole": "exit 0",
    "skip": f"echo '{SKIP}'; exit 77",
    "bad": f"echo '{NO}'; exit 1",
    "crash": "kill -SEGV $$",
    "found_planted": f"echo '{NO}'; exit 0",
    "long": f"echo '{OK}'; sleep 60",
    "long_bad": f"echo '{NO}'; sleep 60",
    "long_planted": f"echo '{NO}'; sleep 60",
    "silent": "sleep 60",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("cmake") and shutil.which("ctest")):
        pytest.skip("there is no CMake")
    directory = tmp_path_factory.mktemp("project")
    lines = ["cmake_minimum_required(VERSION 3.25)", "project(x NONE)", "enable_testing()"]
    for name, script in PROGRAMS.items():
        (directory / name).write_text(script)
        lines.append(f"add_test(NAME a/{name} COMMAND sh {directory / name})")
        lines.append(f"set_tests_properties(a/{name} PROPERTIES SKIP_RETURN_CODE 77)")
    lines.append("add_test(NAME a/absent COMMAND /no/such/program)")
    (directory / "CMakeLists.txt").write_text("\n".join(lines))
    subprocess.run(["cmake", "-S", directory, "-B", directory / "build"], check=True, capture_output=True)
    return directory / "build"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("ok|whole", ("nothing found", "nothing found in 2 tests, 1 skipped")),
        ("skip", ("not run", "nothing ran: 1 skipped")),
        ("ok|skip", ("nothing found", "nothing found in 1 test, 2 skipped")),
        ("ok|bad", ("found", "**FOUND** (exit status 8): a/bad")),
        ("crash", ("found", "**FOUND** (exit status 8): a/crash")),
        ("found_planted", ("nothing found", "nothing found in 1 test")),
        ("absent", ("not run", "could not run: 1 of 1 test programs are missing: a/absent")),
        ("none", ("not run", "could not run: no test has this name")),
        ("long", ("nothing found", "ended by its time after 1 test; nothing found until then")),
        ("long_bad", ("found", "**FOUND** (exit status 124): a/long_bad")),
        ("long_planted", ("nothing found", "ended by its time after 1 test; nothing found until then")),
        ("silent", ("not run", "ended by its time before any of its tests had finished")),
    ],
)
def test_the_verdict_of_tests(verdict: ModuleType, project: Path, tmp_path: Path, names: str, expected: tuple[str, str]) -> None:
    longest = "2" if "long" in names or names == "silent" else "60"
    command = ["timeout", longest, "ctest", "--test-dir", str(project), "--no-tests=error", "--verbose", "-R", f"/({names})$"]
    with (tmp_path / "dead_writes.log").open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    assert verdict.part(tmp_path, "dead_writes", status, int(longest), int(longest), True) == expected


def test_tests_that_were_all_skipped_without_root_are_left_out(verdict: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "dead_writes.log").write_text(SKIPPED)
    assert verdict.part(tmp_path, "dead_writes", 0, 1, LONGEST, False) == ("left out", "nothing ran: 1 skipped")


def test_each_saver_is_here_or_has_a_reason() -> None:
    script = clone.ROOT / "tools/campaign/savers.py"
    if not script.exists():
        pytest.skip("there is no clone around the tests")
    done = subprocess.run([sys.executable, "-B", script], capture_output=True, text=True, timeout=120, check=True)
    here = done.stdout.strip().split(",")
    assert here[:3] == ["holdfast.dcp", "dcp-thread", "dcp-process"]
    assert sorted([*here, *re.findall(r"^- (\S+): .+ not installed$", done.stderr, re.M)]) == sorted(peers.NAMES)


# ---- The whole campaign.


@pytest.mark.parametrize(
    ("states", "status", "headline"),
    [
        (["nothing found"] * 3, 0, "**Nothing was found.**"),
        (["nothing found", "left out", "left out"], 0, "**Nothing was found in what ran; 2 of 3 parts did not run, or not to the end: b, c.**"),
        (["nothing found", "not run", "left out"], 2, "**Nothing was found in what ran; 2 of 3 parts did not run, or not to the end: b, c.**"),
        (["left out", "left out", "not run"], 2, "**No part ran to its end.**"),
        (["found", "nothing found", "nothing found"], 1, "**Something was found: see the rows and their logs.**"),
        (["found", "not run", "nothing found"], 1,
         "**Something was found: see the rows and their logs.** 1 of 3 parts did not run, or not to the end: b."),
    ],
)  # fmt: skip
def test_the_headline(verdict: ModuleType, states: list[str], status: int, headline: str) -> None:
    assert verdict.whole(list(zip("abc", states, strict=True))) == (status, headline)


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """The script in a folder whose programs do what their files say; nothing is found."""
    if not (clone.ROOT / "tools/campaign.sh").exists():
        pytest.skip("there is no clone around the tests")
    (tmp_path / "tools/campaign").mkdir(parents=True)
    for name in ("campaign.sh", "setup.sh", "campaign/verdict.py", "campaign/savers.py"):
        shutil.copy(clone.ROOT / "tools" / name, tmp_path / "tools" / name)
    for name, script in STAND_INS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\nHERE={tmp_path}\n{script}\n")
        path.chmod(0o755)
    for name in ("rounds", "power_cuts", "bad_disks"):
        said(tmp_path, name, 0, f"escapes: 0 of {name}\n", {"rounds": 40, "escapes": 0, "counts": {}})
    said(tmp_path, "savers", 0, SAVERS.format(40))
    said(tmp_path, "tests", 0, TESTS)
    said(tmp_path, "planted", 0, TESTS)
    return tmp_path


def said(folder: Path, name: str, status: int, log: str, report: dict[str, object] | None = None) -> None:
    (folder / f"{name}.log").write_text(log)
    (folder / f"{name}.status").write_text(str(status))
    (folder / f"{name}.json").unlink(missing_ok=True)
    if report:
        (folder / f"{name}.json").write_text(json.dumps(report))


def run(campaign: Path, parts: str, *options: str) -> tuple[int, dict[str, str], str]:
    """The exit status, the result in each row of the report, and the report."""
    environment = {**os.environ, "PATH": f"{campaign / 'bin'}:{os.environ['PATH']}"}
    command = [str(campaign / "tools/campaign.sh"), "0.01", str(campaign / "out"), "--seed", "7", "--parts", parts, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    report = campaign / "out/report.md"
    text = report.read_text() if report.exists() else done.stderr
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and " s | " in line]
    return done.returncode, {row[0].removeprefix("| "): row[2] for row in rows}, text


def test_a_report_says_what_ran(campaign: Path) -> None:
    status, rows, text = run(campaign, "rounds,savers,planted,tests,fuzzers")
    assert status == 0 and "\n**Nothing was found.**\n" in text
    assert rows["rounds"] == "nothing found in 40 rounds"
    assert rows["savers"] == "nothing found in 80 rounds" and "- nvrx-persistent: it is not installed" in text
    assert rows["planted"] == rows["trainer_killed"] == "nothing found in 1 test, 1 skipped"
    assert rows["json_fuzz"] == "nothing found in 1,500 executions"
    assert "- json_fuzz: executions: 1500, edges reached: 121\n" in text
    assert len(rows) == 12
    assert "--savers holdfast.dcp,dcp-thread --time" in text
    asked = (campaign / "ctest").read_text().splitlines()
    assert len(asked) == 8
    for line in asked:
        words = line.split()
        assert int(words[words.index("--timeout") + 1]) > 600 and "--verbose" in words


def test_a_part_that_cannot_run_is_told_from_an_escape(campaign: Path) -> None:
    said(campaign, "tests", 0, SKIPPED)
    said(campaign, "rounds", 2, "integrity-fuzz: no seccomp | filter\n")
    status, rows, text = run(campaign, "rounds,tests,fuzzers")
    assert status == 2
    assert rows["rounds"] == "could not run: no seccomp / filter"
    assert rows["dead_writes"] == "nothing ran: 1 skipped"
    assert "**Nothing was found in what ran; 9 of 10 parts did not run, or not to the end: rounds, ring_faults, " in text


def test_an_escape_beside_a_part_that_cannot_run(campaign: Path) -> None:
    said(campaign, "rounds", 1, "ESCAPE in round 3: (i) lost\n", {"rounds": 3, "escapes": [{}], "counts": {}})
    (campaign / "bin/cmake").write_text("#!/bin/bash\nexit 1\n")
    status, rows, text = run(campaign, "rounds,tests,planted,fuzzers")
    assert status == 1
    assert rows["rounds"] == "**FOUND** (exit status 1): 1 escapes"
    assert rows["tests"] == rows["planted"] == "could not run: the preset release could not be built (see build.log)"
    assert rows["fuzzers"] == "could not run: the preset fuzz could not be built (see build.log)"
    assert "**Something was found: see the rows and their logs.** 3 of 4 parts" in text


@pytest.mark.parametrize("is_there", [False, True])
def test_rounds_of_megatron_need_its_environment(is_there: bool, campaign: Path) -> None:
    said(campaign, "megatron", 0, "escapes: 0\n", {"rounds": 7, "escapes": 0, "counts": {}})
    with_megatron = campaign / "build/venv-frameworks/bin/python"
    if is_there:  # it runs the program, and the script that looks for savers
        with_megatron.parent.mkdir(parents=True)
        with_megatron.write_text(f'#!/bin/bash\nd={campaign}/build/venv/bin; case "$2" in -m) "$d/integrity-fuzz" "$@" ;; *) "$d/python" "$@" ;; esac\n')
        with_megatron.chmod(0o755)
    status, rows, text = run(campaign, "megatron,savers")
    program = "build/venv-frameworks/bin/python -B -m holdfast.integrity" if is_there else "build/venv/bin/integrity-fuzz"
    assert f"`{program} --savers " in text
    if is_there:
        assert (status, rows["megatron"]) == (0, "nothing found in 7 rounds")
        assert f"`{program} --jobs " in text and " --doors megatron`" in text
    else:
        assert status == 2
        assert rows["megatron"] == "could not run: build/venv-frameworks is missing: tools/venv.sh --frameworks makes it"


def test_disks_need_root(campaign: Path) -> None:
    status, rows, text = run(campaign, "power_cuts,bad_disks,fuzzers")
    assert status == 0
    if HAS_ROOT:
        assert rows["bad_disks"] == rows["power_cuts"] == "nothing found in 40 rounds"
        assert "--power-cuts ext4,ext4-nojournal,xfs,btrfs" in text and "--bad-disks ext4,xfs,btrfs" in text
    else:
        assert rows["bad_disks"] == rows["power_cuts"] == "left out: mounting its disks needs root"
        assert "2 of 3 parts did not run" in text


def test_a_former_campaign_in_the_directory_does_not_count(campaign: Path) -> None:
    run(campaign, "rounds,savers")
    said(campaign, "rounds", 2, "integrity-fuzz: mounts are refused\n")
    status, rows, text = run(campaign, "rounds,fuzzers")
    assert status == 2
    assert rows["rounds"] == "could not run: mounts are refused"
    assert "dcp-thread" not in text


@pytest.mark.parametrize("name", ["nothing", "rounds,pears"])
def test_a_campaign_that_cannot_begin_has_status_2(campaign: Path, name: str) -> None:
    status, _, said = run(campaign, name)
    assert status == 2 and "--parts: there is no" in said


def test_a_build_that_fails_is_no_escape(campaign: Path) -> None:
    (campaign / "tools/venv.sh").write_text("#!/bin/bash\nexit 1\n")
    assert run(campaign, "rounds")[0] == 2


def test_sums_that_cannot_be_written_are_no_escape(campaign: Path) -> None:
    (campaign / "build/venv/bin/python").write_text("#!/bin/bash\nexit 1\n")
    status, rows, text = run(campaign, "rounds", "--write")
    assert status == 2 and "**Nothing was found.**" in text and rows
