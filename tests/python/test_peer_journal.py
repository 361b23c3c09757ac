"""The runner of PyTorch's tests believes a test only if its saves were Holdfast's, and sound."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))

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
