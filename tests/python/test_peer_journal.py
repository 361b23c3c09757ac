"""The runner of PyTorch's tests believes a test only if its saves were Holdfast's, and sound."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))

import pytest_runs
import run_pytorch_tests as runner

SOUND = {"kind": "save", "path": "/c", "verdict": "sound", "manifests": 2, "ranks": 2}


def _judged(*notes: dict[str, Any], status: str = "passed") -> runner.Outcome:
    outcome = runner.Outcome("test_checkpoint.py", "T.test", False, status, "", 0.0)
    runner.judge(outcome, list(notes))
    return outcome


def test_a_test_whose_saves_are_proved_has_passed() -> None:
    outcome = _judged(SOUND, SOUND)
    assert (outcome.status, outcome.saves) == ("passed", 2)


def test_a_change_makes_it_adapted() -> None:
    assert _judged(SOUND, {"kind": "adapted", "key": "no GPU"}).status == "adapted"


@pytest.mark.parametrize(
    "notes, reason",
    [
        ([], "no save by Holdfast"),
        ([{**SOUND, "verdict": "corrupt"}], "not sound"),
        ([{**SOUND, "manifests": 1}], "1 manifests of 2 ranks"),
        ([SOUND, {"kind": "stock save", "path": "/c", "writer": "FileSystemWriter"}], "PyTorch's"),
        ([SOUND, {"kind": "kept", "verdict": "sound", "same": False}], "changed the checkpoint"),
    ],
)
def test_a_test_that_passed_otherwise_has_failed(notes: list[Any], reason: str) -> None:
    outcome = _judged(*notes)
    assert outcome.status == "failed" and reason in outcome.reason


# ---- Tests of others that pytest runs.


def _passed(rank: int = 0, **what: Any) -> dict[str, Any]:
    return {"kind": "outcome", "test": "f.py::t", "outcome": "passed", "reason": "", "rank": rank, **what}


def _save(verdict: str) -> dict[str, Any]:
    return {"kind": "save", "test": "f.py::t", "path": "/c", "verdict": verdict}


@pytest.mark.parametrize(
    "notes, status, reason",
    [
        ([_passed(), _passed(1), _save("sound")], "passed", ""),
        ([_passed()], "failed", "not all of 2 ranks"),
        ([_passed(), _passed(1, outcome="failed", reason="no")], "failed", "no"),
        ([_passed(), _passed(1), _save("corrupt")], "failed", "the save of /c is corrupt"),
        ([_passed(outcome="skipped"), _passed(1, outcome="skipped")], "skipped", ""),
    ],
)
def test_a_test_has_passed_if_all_ranks_and_saves_have(notes: list[Any], status: str, reason: str) -> None:
    (outcome,) = pytest_runs._outcomes("f.py", notes, ranks=2)
    assert outcome.status == status and reason in outcome.reason


def test_a_part_of_a_document_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text("# All\n\nof them\n")
    for title, text in (("A", "1"), ("B", "2"), ("A", "3")):
        pytest_runs.put(document, title, [text])
    assert document.read_text() == "# All\n\nof them\n\n## A\n\n3\n\n## B\n\n2\n"
