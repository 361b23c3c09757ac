"""The answers of the guests of tools/emulator-campaign.sh as a report.

    table.py [--planted] RESULTS REPORT.md

Exit status 0 if every part has tried something and nothing escaped, 1 if something escaped, 2 if nothing did and a part did not run or
did not end by itself. With `--planted`: 0 if each part has let something escape, otherwise 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

TROUBLE, INTERRUPTED = 2, 130  # of integrity-fuzz


def read(folder: Path) -> dict[str, tuple[int | None, dict[str, Any]]]:
    """The status and the report of each guest; None and {} of one that did not end by itself."""
    found: dict[str, tuple[int | None, dict[str, Any]]] = {}
    for log in sorted(folder.glob("*.log")):
        if log.stem.endswith("-told"):  # was reset
            continue
        report, _, status = (folder / log.stem).read_text(errors="replace").rpartition("status ")
        found[log.stem] = (int(status) if status.strip().isdecimal() else None, json.loads(report) if report.strip() else {})
    return found


def part_of(name: str) -> str:
    return "resets" if name.startswith("reset-") else name


def table(answers: dict[str, tuple[int | None, dict[str, Any]]]) -> str:
    """A row for each part and file system."""
    disks: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, (_, report) in answers.items():
        for key, number in report.get("states", {}).items():
            _, system, kind = key.split(" ", 2)
            disks[part_of(name), system][kind] += number
        for key, number in report.get("counts", {}).items():
            what, system = key.rsplit(" ", 1)
            counts[part_of(name), system][what] += number
    lines = ["| part | file system | disks | saves durable | failed | escapes |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for row, found in disks.items():
        tried = ", ".join(f"{number} {kind}" for kind, number in sorted(found.items()))
        had = counts[row]
        lines.append(f"| {row[0]} | {row[1]} | {tried} | {had['durable']} | {had['failed'] + had['refused']} | {had['escapes']} |")
    return "\n".join(lines)


def problems(answers: dict[str, tuple[int | None, dict[str, Any]]], planted: bool) -> list[str]:
    """What is not as it has to be."""
    found = [f"{name}: it did not end by itself" for name, (status, _) in answers.items() if status is None]
    found += [f"{name}: exit status {status}" for name, (status, _) in answers.items() if status not in (None, 0, *[1] * planted)]
    for part in sorted({part_of(name) for name in answers}):
        mine = [answer for name, answer in answers.items() if part_of(name) == part]
        if not any(report.get("states") for _, report in mine):
            found.append(f"{part}: nothing was tried")
        if planted and not any(status == 1 for status, _ in mine):
            found.append(f"{part}: the planted bug was not found")
    return found or ([] if answers else ["nothing was tried"])


def status_of(answers: dict[str, tuple[int | None, dict[str, Any]]], escapes: int, wrong: list[str], planted: bool) -> int:
    """The exit status. A guest that did not end by itself may have told of escapes before."""
    if not wrong:
        return 0
    has_crashed = any(status not in (None, 0, TROUBLE, INTERRUPTED) for status, _ in answers.values())
    return 1 if planted or escapes or has_crashed else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--planted", action="store_true", help="a bug was planted, which each part must find")
    arguments = parser.parse_args()
    answers = read(arguments.results)
    wrong = problems(answers, arguments.planted)
    kernels = sorted({report["kernel"] for _, report in answers.values() if report})
    seeds = sorted({str(report["seed"]) for _, report in answers.values() if report})
    seconds = sum(report.get("seconds", 0) for _, report in answers.values())
    verdict = "each part found the planted bug" if arguments.planted else "nothing escaped"
    text = [f"# Holdfast under {', '.join(kernels)}", "", f"Seed {', '.join(seeds)}; {seconds} s of rounds.", "",
            *(f"- **{line}**" for line in wrong or [verdict]), "", table(answers)]  # fmt: skip
    escapes = 0
    for name in answers:
        console = (arguments.results / f"{name}.log").read_text(errors="replace").replace("\r", "").splitlines()
        escapes += sum(line.startswith("ESCAPE") for line in console)
        text += [f"\n    {name}: {line}" for line in console if line.startswith(("ESCAPE", "reproduce:", "integrity-fuzz:"))]
    arguments.report.write_text("\n".join(text) + "\n")
    print(arguments.report.read_text())
    return status_of(answers, escapes, wrong, arguments.planted)


if __name__ == "__main__":
    sys.exit(main())
