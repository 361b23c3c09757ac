"""An output of the command that is closed, full, or closed early: a status and one line, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import holdfast
from draining import save


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    save(path, 1, elements=10)
    return path


BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
COMMANDS = ["ls {}", "ls --json {}", "show {}/step-1", "diff {}/step-1 {}/step-1", "recover {}", "drain {} {}-far", "top --once {}",
            "verify {}", "doctor --quick {}", "--help", "ls --help", "--version", "verify --help", "doctor --help", "demo --help"]  # fmt: skip


def said(command: str, run: Path, redirection: str) -> tuple[int, str]:
    """Status and standard error of a command with a redirection of the shell."""
    line = f'"{sys.executable}" -m holdfast {command.replace("{}", str(run))} {redirection}'
    done = subprocess.run(line, shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=100, env=BUFFERED)
    return done.returncode, done.stderr


@pytest.mark.parametrize("redirection, reason", [(">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_takes_nothing_is_named(command: str, redirection: str, reason: str, run: Path) -> None:
    status, error = said(command, run, redirection)
    expected = 3 if command.startswith(("verify", "demo")) and redirection == ">/dev/full" else 2
    assert status == expected and error.count("\n") == 1 and error.endswith(f"standard output: {reason}\n"), error


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_an_error_that_cannot_be_told_leaves_the_status(redirection: str, run: Path) -> None:
    line = f'"{sys.executable}" -m holdfast ls {run}/none {redirection}'
    done = subprocess.run(line, shell=True, executable="/bin/bash", stdout=subprocess.PIPE, timeout=100, env=BUFFERED)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_reader_that_goes_is_no_error(run: Path) -> None:
    assert said("show --json {}/step-1", run, "| true; exit ${PIPESTATUS[0]}")[1] == ""


def test_without_a_command_it_lists_the_commands() -> None:
    done = holdfast(torch=False)
    assert done.status == 2 and done.out == "" and "\n  drain SRC DST " in done.error and "\n  ls DIR " in done.error
