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
        told = programs.run("-m", "holdfast", *arguments, timeout=timeout)
        return Run(told.returncode, told.stdout, told.stderr)
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, *map(str, arguments)], capture_output=True, timeout=timeout)
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode())


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
    done = programs.run("-c", _EACH, json.dumps([[str(argument) for argument in line] for line in lines]), timeout=400)
    assert done.returncode == 0, done.stderr
    return [Run(*run) for run in json.loads(done.stdout)]


def refused(done: Run, *said: str) -> None:
    """Asserts a user's error: status 2, one line on stderr with all of `said`, nothing on stdout."""
    assert (done.status, done.out) == (2, ""), done
    assert "Traceback" not in done.error and done.error.count("\n") == 1, done.error
    assert done.error.startswith("holdfast "), done.error
    for words in said:
        assert words in done.error, done.error
