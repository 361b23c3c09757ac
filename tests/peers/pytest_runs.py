"""Runs files of others' tests with pytest, and makes tables of what became of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import journal

HERE = Path(__file__).resolve().parent
WHOLE = "(the file)"
ORDER = ("passed", "adapted", "impossible", "expected failure", "skipped", "failed")


@dataclasses.dataclass
class Outcome:
    """What became of one test.

    Attributes:
        saves: of Holdfast, each proved when it was durable.
    """

    file: str
    test: str
    status: str
    reason: str = ""
    saves: int = 0


def run(path: str, root: Path, *, tests: Sequence[str] = (), launcher: Sequence[str] = (), arguments: Sequence[str] = (),
        environment: dict[str, str], limit: float, ranks: int = 1) -> list[Outcome]:  # fmt: skip
    """Runs one file; one that does not end in time, or dies, fails.

    Args:
        path: of the file, below `root`.
        root: where pytest is started.
        tests: of the file; default all.
        launcher: arguments of Python in front of ``-m pytest``.
        arguments: of pytest.
        environment: variables of the processes, with PYTHONPATH.
        limit: seconds.
        ranks: processes that run each test.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as scratch:
        lines_at = os.path.join(scratch, "journal")
        search = os.pathsep.join(filter(None, [str(HERE), environment.get("PYTHONPATH", "")]))
        variables = {**os.environ, **environment, "PYTHONPATH": search, journal.JOURNAL: lines_at, "TMPDIR": scratch}
        command = [sys.executable, "-W", "ignore", *launcher, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-p", "journal"]
        command += [*arguments, *([f"{path}::{test}" for test in tests] or [path])]
        with open(os.path.join(scratch, "log"), "w+b") as log:
            process = subprocess.Popen(command, cwd=root, env=variables, stdout=log, stderr=log, start_new_session=True)
            ended = ""
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                ended = f"not ended after {limit:.0f} s"
                os.killpg(process.pid, signal.SIGTERM)  # a launcher ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            with contextlib.suppress(ProcessLookupError):  # with what the tests have left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not ended and process.returncode not in (0, 1):  # 1: a test has failed
                ended = f"the tests' process ended with {process.returncode}: what it had not run is missing here"
            found = _outcomes(path, journal.notes(lines_at), ranks)
            log.seek(0)
            if ended or not found:
                tail = log.read()[-3000:].decode(errors="replace")
                found.append(Outcome(path, WHOLE, "failed", f"{ended or 'no test has run'}\n{tail}"))
    return found


def _outcomes(path: str, notes: list[dict[str, Any]], ranks: int) -> list[Outcome]:
    found = []
    for test in dict.fromkeys(n["test"] for n in notes if n["kind"] == "outcome"):
        mine = [n for n in notes if n["test"] == test]
        ends = [n for n in mine if n["kind"] == "outcome"]
        worst = next((n for status in ("failed", "passed") for n in ends if n["outcome"] == status), ends[0])
        outcome = Outcome(path, test.partition("::")[2], worst["outcome"], worst["reason"])
        saves = [n for n in mine if n["kind"] == "save"]
        outcome.saves = len(saves)
        problems = [f"the save of {n['path']} is {n['verdict']}" for n in saves if n["verdict"] != "sound"]
        if len({n["rank"] for n in ends}) < ranks:
            problems.append(f"not all of {ranks} ranks have ended")
        if outcome.status == "passed" and problems:
            outcome.status, outcome.reason = "failed", "; ".join(problems)
        found.append(outcome)
    return found


def said(outcomes: list[Outcome]) -> str:
    """How many of each."""
    count = Counter(o.status for o in outcomes)
    return ", ".join(f"{count[status]} {status}" for status in ORDER if count[status])


def show(outcomes: list[Outcome]) -> None:
    """Prints a line for each."""
    for o in outcomes:
        reason = o.reason if o.status == "failed" else " ".join(o.reason.split())[:200]
        print(f"{o.status:10} {o.saves:3} saves  {o.file}::{o.test}  {reason}", flush=True)


def table(outcomes: list[Outcome]) -> list[str]:
    """A table for each file, in Markdown."""
    lines = []
    for file in dict.fromkeys(o.file for o in outcomes):
        lines += ["", f"### {Path(file).name}", "", "| test | result | saves | |", "| --- | --- | ---: | --- |"]
        for o in outcomes:
            if o.file == file:
                remark = re.sub(r"\s+", " ", o.reason)[:300].replace("|", "\\|")
                lines.append(f"| {o.test} | {o.status} | {o.saves or ''} | {remark} |")
    return lines


def put(document: Path, title: str, lines: list[str]) -> None:
    """Replaces the part ``## title`` of a document, or adds it at the end; the text above the first part stays."""
    text = document.read_text() if document.exists() else ""
    parts = [part for part in re.split(r"^(?=## )", text, flags=re.MULTILINE) if part.strip()]
    new = "\n".join([f"## {title}", "", *lines]).rstrip() + "\n"
    at = next((i for i, part in enumerate(parts) if part.startswith(f"## {title}\n")), len(parts))
    parts[at : at + 1] = [new]
    document.write_text("\n".join(part.rstrip() + "\n" for part in parts))
