"""Runs the command ``holdfast``."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import programs


class Run(NamedTuple):
    status: int
    out: str
    error: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from holdfast.cli import main
sys.exit(main())
"""


def holdfast(*arguments: object, torch: bool = True, timeout: float = 200) -> Run:
    """Runs ``holdfast ARGUMENTS``; `torch`: whether PyTorch can be imported there."""
    if torch:
        done = programs.run("-m", "holdfast", *arguments, timeout=timeout)
    else:
        command = [sys.executable, "-c", _WITHOUT_TORCH, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    return Run(done.returncode, done.stdout, done.stderr)


_EACH = """
import contextlib, io, json, sys
from holdfast.cli import main

runs = []
for arguments in json.loads(sys.argv[1]):
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(arguments)
        except SystemExit as usage:
            status = usage.code
    runs.append([status, out.getvalue(), error.getvalue()])
print(json.dumps(runs))
"""


def each(*lines: list[object]) -> list[Run]:
    """Runs command lines one after the other in one process."""
    program = programs.Program(["-c", _EACH, json.dumps([[str(argument) for argument in line] for line in lines])])
    out, error = program.communicate(400)
    assert program.wait() == 0, error
    return [Run(*run) for run in json.loads(out)]


def refused(done: Run, *said: str) -> None:
    """Asserts a user's error: status 2, one line on stderr with all of `said`, nothing on stdout."""
    assert (done.status, done.out) == (2, ""), done
    assert "Traceback" not in done.error and done.error.count("\n") == 1, done.error
    assert done.error.startswith("holdfast "), done.error
    for words in said:
        assert words in done.error, done.error
