"""Runs PyTorch's own checkpoint tests with Holdfast's writer, reader and stager.

    python tests/peers/run_pytorch_tests.py CHECKOUT [--report docs/peer-tests.md]

CHECKOUT is a source tree of PyTorch, of the installed version as nearly as possible; nothing in it
is changed. A test that passes is believed only if every save in it was Holdfast's and was proved by
its manifests when it was committed. Exit status 0: no test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import journal
import pytest_runs
import pytorch_adaptations as adaptations

HERE = Path(__file__).resolve().parent
TESTS = Path("test/distributed/checkpoint")


@dataclasses.dataclass
class Outcome:
    """What became of one test, run in one way."""

    file: str
    test: str
    own_async_save: bool
    status: str
    reason: str
    seconds: float
    saves: int = 0
    kept: int = 0
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        way = " (with holdfast.dcp.async_save)" if self.own_async_save else ""
        return f"{self.test}{way}"


def run_file(path: Path, name: str, own_async_save: bool, only: str, limit: float) -> list[Outcome]:
    """Runs the tests of a file; a file that does not end in time fails."""
    with tempfile.TemporaryDirectory(prefix="holdfast-peers-") as scratch:
        lines_at = os.path.join(scratch, "journal")
        environment = {
            **os.environ,
            journal.JOURNAL: lines_at,
            "HOLDFAST_PEERS_SCRATCH": scratch,
            "HOLDFAST_ARENA_BYTES": os.environ.get("HOLDFAST_ARENA_BYTES", str(64 << 20)),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": scratch,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-W", "ignore", str(HERE / "run_test_file.py"), str(path), name]
        command += ["--only", only, *(["--own-async-save"] if own_async_save else [])]
        log = Path(scratch) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=out,
                start_new_session=True, text=True,
            )  # fmt: skip
            try:
                output, _ = process.communicate(timeout=limit)
                ended = f"exit status {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
                ended = f"not ended after {limit:.0f} s"
        lines = [line[7:] for line in output.splitlines() if line.startswith("RESULT ")]
        outcomes = []
        for line in map(json.loads, lines):
            outcomes.append(
                Outcome(name, line["test"], own_async_save, line["status"], line["reason"],
                        line["seconds"])
            )  # fmt: skip
        if ended:
            tail = log.read_text(errors="replace")[-3000:]
            outcomes.append(
                Outcome(name, "(the file)", own_async_save, "failed", f"{ended}\n{tail}", limit)
            )
        notes = journal.notes(lines_at)
        for outcome in outcomes:
            judge(outcome, [note for note in notes if note["test"] == outcome.test])
        return outcomes


def judge(outcome: Outcome, notes: list[dict[str, Any]]) -> None:
    """Holds a test that passed against what was written in it."""
    if outcome.status != "passed":
        return
    problems = []
    name = f"{outcome.file}::{outcome.test}"
    for note in notes:
        if note["kind"] == "save":
            outcome.saves += 1
            if note["verdict"] != "sound":
                problems.append(f"the save in {note['path']} is not sound: {note['verdict']}")
            elif note["manifests"] != note["ranks"]:
                problems.append(
                    f"the save in {note['path']} has {note['manifests']} manifests of "
                    f"{note['ranks']} ranks"
                )
        elif note["kind"] == "kept":
            outcome.kept += 1
            if note["verdict"] != "sound" or not note["same"]:
                problems.append("a failed save changed the checkpoint that was there")
        elif note["kind"] == "stock save":
            if not any(fnmatch.fnmatchcase(name, p) for p in adaptations.STOCK_SAVES):
                problems.append(f"a save by PyTorch's {note['writer']} in {note['path']}")
    if not outcome.saves:
        problems.append("no save by Holdfast")
    keys = sorted({note["key"] for note in notes if note["kind"] == "adapted"})
    outcome.changes = tuple(keys)
    if problems:
        outcome.status, outcome.reason = "failed", "; ".join(problems)
    elif keys:
        outcome.status = "adapted"


def write_report(outcomes: list[Outcome], command: str, version: str, seconds: float) -> list[str]:
    """The table, in Markdown, without its title."""
    count = Counter(o.status for o in outcomes)
    order = ("passed", "adapted", "impossible", "skipped", "failed")
    said = ", ".join(f"{count[s]} {s}" for s in order if count[s])
    saves = sum(o.saves for o in outcomes)
    used = sorted({key for o in outcomes for key in o.changes})
    number = {key: i + 1 for i, key in enumerate(used)}
    lines = [
        "PyTorch's tests of storage writers, of the save and load API and of asynchronous saves,",
        "run with Holdfast's writer, reader and stager in the place of `FileSystemWriter`,",
        "`FileSystemReader` and `DefaultStager`. A test counts only if every save in it was made",
        "by Holdfast and proved by its manifests, one for each rank, when it was committed.",
        "",
        f"PyTorch {version}, no GPU: {said}. {saves} saves, every one proved. {seconds:.0f} s.",
        "Made by",
        "",
        f"    {command}",
        "",
        "*passed*: as it is. *adapted*: with the changes named by number below. *impossible*: not",
        "run, for the reason given. *skipped*: by PyTorch, for the reason that it gives.",
        "",
        "| | change | reason |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {number[k]} | {' | '.join(adaptations.CHANGES[k])} |" for k in used]
    for file in dict.fromkeys(o.file for o in outcomes):
        lines += ["", f"### {file}", "", "| test | result | saves | |", "| --- | --- | ---: | --- |"]
        for o in outcomes:
            if o.file != file:
                continue
            if o.changes and o.status == "adapted":
                remark = "changes " + ", ".join(str(number[k]) for k in o.changes)
                if len(o.changes) == 1:
                    remark = remark.replace("changes", "change")
            else:
                remark = " ".join(o.reason.split())[:300].replace("|", "\\|")
            stock = next(
                (reason for pattern, reason in adaptations.STOCK_SAVES.items()
                 if fnmatch.fnmatchcase(f"{o.file}::{o.test}", pattern)), "",
            )  # fmt: skip
            remark = "; ".join(filter(None, [remark, stock]))
            if o.kept:
                remark += f"; {o.kept} failed saves left the checkpoint as it was"
            lines.append(f"| {o.name} | {o.status} | {o.saves or ''} | {remark} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="source tree of PyTorch")
    parser.add_argument("--report", type=Path, help="document for the table")
    parser.add_argument("--files", default="*", help="pattern of files under " + str(TESTS))
    parser.add_argument("--only", default="*", help="pattern of CLASS.TEST")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file")
    arguments = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        parser.error("PyTorch's test classes import expecttest: pip install expecttest")
    if not (arguments.checkout / TESTS).is_dir():
        parser.error(f"{arguments.checkout} is no source tree of PyTorch: no {TESTS} in it")
    import torch

    started = time.monotonic()
    outcomes: list[Outcome] = []
    for name, has_async in adaptations.FILES.items():
        path = arguments.checkout.resolve() / TESTS / name
        if not fnmatch.fnmatchcase(name, arguments.files):
            continue
        if not path.exists() and f"{name}::*" not in adaptations.IMPOSSIBLE:
            print(f"{name}: not in the checkout")
            outcomes.append(Outcome(name, "(the file)", False, "failed", "not in the checkout", 0))
            continue
        found = run_file(path, name, False, arguments.only, arguments.limit)
        if has_async:
            only = adaptations.ASYNC if arguments.only == "*" else arguments.only
            found += run_file(path, name, True, only, arguments.limit)
        for o in found:
            reason = o.reason if o.status == "failed" else o.reason.partition("\n")[0]
            print(f"{o.status:10} {o.seconds:6.1f} s {o.saves:3} saves  {name}::{o.name}  {reason}",
                  flush=True)  # fmt: skip
        outcomes += found
    shown = "python tests/peers/run_pytorch_tests.py CHECKOUT"
    if arguments.report:
        shown += f" --report {arguments.report}"
    report = write_report(outcomes, shown, torch.__version__, time.monotonic() - started)
    if arguments.report:
        pytest_runs.put(arguments.report, "PyTorch's own tests", report)
    count = Counter(o.status for o in outcomes)
    print(", ".join(f"{number} {status}" for status, number in sorted(count.items())))
    return 1 if count["failed"] or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
