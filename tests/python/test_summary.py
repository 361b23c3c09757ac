"""What the test command says of tests that failed, and of those that passed when they ran again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PASSED = '<testcase name="{}" classname="{}"/>'
FAILED = '<testcase name="{}" classname="{}"><failure>why</failure></testcase>'
PROGRAM = """<testcase name="locks_test" classname="locks_test" status="fail"><failure/><system-out>
[       OK ] Locks.Hold (1 ms)
[{}] Locks.End (2 ms)
</system-out></testcase>"""


def _summary(tmp_path: Path, **files: list[str]) -> tuple[int, str]:
    for name, cases in files.items():
        text = f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"
        (tmp_path / f"{name.replace('_', '.')}.xml").write_text(text)
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools/summarize_tests.py"), str(tmp_path), "python"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout


def test_a_test_that_failed_once_is_unstable_and_named(tmp_path: Path) -> None:
    status, told = _summary(
        tmp_path, python=[PASSED.format("a", "m"), FAILED.format("b", "m")], python_retry=[PASSED.format("b", "m")]
    )
    assert status == 0
    assert "UNSTABLE, failed once: m.b" in told and "python: 1 passed, 0 failed, 0 skipped, 1 unstable" in told


def test_a_test_that_failed_twice_has_failed(tmp_path: Path) -> None:
    status, told = _summary(
        tmp_path,
        python=[FAILED.format("a", "m"), FAILED.format("b", "m")],
        python_retry=[FAILED.format("a", "m"), PASSED.format("b", "m")],
    )
    assert status == 1
    assert "  FAILED: m.a" in told and "UNSTABLE, failed once: m.b" in told and "1 failed" in told


def test_a_failed_test_that_did_not_run_again_has_failed(tmp_path: Path) -> None:
    cases = [PASSED.format("a", "m"), FAILED.format("b", "m")]
    assert _summary(tmp_path, python=cases) == (1, "  FAILED: m.b\npython: 1 passed, 1 failed, 0 skipped\n")
    assert _summary(tmp_path, python=cases, python_retry=[PASSED.format("a", "m")])[0] == 1


def test_the_tests_of_a_program_count_one_by_one(tmp_path: Path) -> None:
    failed, passed = PROGRAM.format("  FAILED  "), PROGRAM.format("       OK ").replace(' status="fail"><failure/', "")
    status, told = _summary(tmp_path, python=[failed], python_retry=[failed])
    assert status == 1 and "FAILED: locks_test: Locks.End" in told
    status, told = _summary(tmp_path, python=[failed], python_retry=[passed])
    assert status == 0 and "UNSTABLE, failed once: locks_test: Locks.End" in told


@pytest.mark.parametrize("verdict", ["", "<failure/>"])
def test_a_planted_bug_that_is_found_is_no_failure(verdict: str, tmp_path: Path) -> None:
    output = "[  FAILED  ] Newest.IsTheLast (3 ms)\n"
    case = f'<testcase name="planted/kOne" classname="planted/kOne" status="run">{verdict}<system-out>{output}</system-out></testcase>'
    counted = "1 passed, 0 failed" if not verdict else "0 passed, 1 failed"
    status, told = _summary(tmp_path, python=[case])
    assert (status, told.splitlines()[-1]) == (1 if verdict else 0, f"python: {counted}, 0 skipped")
