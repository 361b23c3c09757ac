"""What a part of tools/campaign.sh has found, and what all parts have.

    verdict.py part DIR NAME STATUS SECONDS LONGEST   prints the state and the verdict of a part, with a tab between them
    verdict.py whole DIR                              prints the headline; the exit status is that of tools/campaign.sh

DIR has the log of each part, the reports of integrity-fuzz, and parts.tsv: a line for each part, with its seconds, its state
and its verdict. The part was ended after LONGEST seconds, by the program timeout, unless it ended by itself.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

# States. What is left out lacks root.
FOUND, NOTHING, NOT_RUN, LEFT_OUT = "found", "nothing found", "not run", "left out"
OF_INTEGRITY_FUZZ = ("rounds", "megatron", "program", "steps", "pairs", "savers", "power_cuts", "bad_disks")
ESCAPED, TROUBLE, INTERRUPTED = 1, 2, 130  # of integrity-fuzz
BY_TIME, NOT_STARTED, KILLED = 124, (125, 126, 127), 137  # of timeout

# Lines of ctest --verbose, and of GoogleTest behind the number of ctest's test.
_BEGUN = re.compile(r"^ +Start +(\d+): (\S+)", re.M)
_ENDED = re.compile(r"^ *\d+/\d+ Test +#(\d+): (\S+) .*?(Passed|\*\*\*[A-Z]\w+(?: Run)?)", re.M)
_SINGLE = re.compile(r"^(\d+): \[ *(OK|FAILED|SKIPPED) *\] ([\w./]+)(?:, where .*)? \(\d+ ms\)", re.M)
# Of its summary.
_LISTED = re.compile(r"^\s+\d+ - (\S+) \((.*)\)$", re.M)


class Work(NamedTuple):
    """What a part has done, by its log and its report.

    Attributes:
        finished: rounds, runs, tests or executions.
        unit: of these.
        found: what is wrong; "" for nothing.
        skipped: tests.
        trouble: why the part could not run, if its status says so or that something was found; "" for what was found.
        without: what this machine has not, and was left out.
    """

    finished: int
    unit: str
    found: str = ""
    skipped: int = 0
    trouble: str = ""
    without: str = ""

    def __str__(self) -> str:
        unit = self.unit.removesuffix("s") if self.finished == 1 else self.unit
        return f"{self.finished:,} {unit}" + (f", {self.skipped} skipped" if self.skipped else "") + f" ({self.without})" * bool(self.without)


def _last(log: str) -> str:
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "its log is empty")


def _rounds(directory: Path, name: str, status: int, log: str) -> Work:
    """Of integrity-fuzz."""
    report, escapes = directory / f"{name}.json", 0
    told = json.loads(report.read_text()) if report.exists() else {}
    unit = "runs" if name in ("steps", "pairs") else "rounds"
    finished = [int(n) for n in re.findall(rf"^(\d+) {unit} (?:in|of) ", log, re.M)]
    finished.append(told.get("rounds", told.get("counts", {}).get("runs", 0)))
    if name == "savers":  # what other savers let escape does not count
        rows = re.findall(r"^\| (\w\S*) \| (\d+) \| (\d+) \|", log, re.M)
        finished.append(sum(int(made) for _, made, _ in rows))
        escapes = sum(int(made) - int(survived) for saver, made, survived in rows if saver.startswith("holdfast"))
    else:
        given = told.get("escapes", [])
        escapes = (given if isinstance(given, int) else len(given)) or len(re.findall(r"^ESCAPE", log, re.M))
    found = f"{escapes} escapes" if escapes else ""
    has_raised = "Traceback (most recent call last):" in log
    if status == ESCAPED and not found and (not has_raised or re.search(r"^ESCAPE", log, re.M)):
        found = "an escape"
    trouble = ""
    if status in (ESCAPED, TROUBLE):
        said = re.findall(r"^integrity-fuzz: (.*)", log, re.M)
        if not said and has_raised:
            said = re.findall(r"^\S.*", log[log.rindex("Traceback (most recent call last):") :], re.M)[1:2]
        trouble = said[-1] if said else _last(log)
    elif status == INTERRUPTED:
        trouble = "interrupted"
    without = re.findall(r"^(?:integrity-fuzz: )?(no rounds on .*?): ", log, re.M)
    return Work(max(finished), unit, found, 0, trouble, "; ".join(dict.fromkeys(without)))


def _tests(log: str) -> Work:
    """Of ctest --verbose: single tests, and programs that have none."""
    names = dict(_BEGUN.findall(log))
    ended = {number: result for number, _, result in _ENDED.findall(log)}
    finished, skipped, failed, not_built = 0, 0, [], []
    singles: dict[str, list[str]] = {}
    for number, result, _ in _SINGLE.findall(log):
        singles.setdefault(number, []).append(result)
    for number, name in names.items():
        result, of = ended.get(number, ""), singles.get(number, [])
        if result == "***Not Run":
            not_built.append(name)
        elif result.startswith("***") and result != "***Skipped":
            failed.append(name)
        elif not result and "FAILED" in of and "planted" not in name:  # it was ended after that
            failed.append(name)
        if result == "Passed" and (not of or "FAILED" in of):  # a planted bug that was found
            finished += 1
        else:
            finished += sum(each != "SKIPPED" for each in of)
            skipped += of.count("SKIPPED") or result == "***Skipped"
    trouble = f"{len(not_built)} of {len(names)} test programs are missing: {', '.join(not_built)}" if not_built else _last(log)
    if "No tests were found" in log:
        trouble = "no test has this name"
    return Work(finished, "tests", ", ".join(failed), skipped, trouble)


def _fuzzer(status: int, log: str) -> Work:
    """Of libFuzzer."""
    executed = [int(n) for n in re.findall(r"^(?:#|stat::number_of_executed_units: *)(\d+)", log, re.M)]
    wrong = re.search(r"^.*(?:SUMMARY: |ERROR: |runtime error: ).*", log, re.M)
    found = wrong[0].strip() if wrong else ""
    return Work(max(executed, default=0), "executions", found, 0, _last(log) if status == 1 else "")


def _coverage(log: str) -> Work:
    """Of tools/coverage.sh."""
    listed = _LISTED.findall(log)
    failed = [name for name, result in listed if result not in ("Skipped", "Disabled", "Not Run")]
    of_python = {result: int(n) for n, result in re.findall(r"\b(\d+) (passed|failed|errors?|skipped)\b", log)}
    if wrong := sum(of_python.get(result, 0) for result in ("failed", "error", "errors")):
        failed.append(f"{wrong} Python tests")
    programs = sum(map(int, re.findall(r"^\d+% tests passed, \d+ tests failed out of (\d+)", log, re.M)))
    skipped = sum(result == "Skipped" for _, result in listed)
    return Work(programs - skipped + of_python.get("passed", 0), "tests", ", ".join(failed), skipped + of_python.get("skipped", 0), _last(log))


def part(directory: Path, name: str, status: int, seconds: int, longest: int, has_root: bool) -> tuple[str, str]:
    """The state of a part, and its verdict for people.

    Args:
        directory: of logs and reports.
        name: of the part.
        status: that of timeout.
        seconds, longest: how long the part took, and after which time it was ended.
        has_root: without it a part whose tests were all skipped counts as left out.
    """
    path = directory / f"{name}.log"
    log = path.read_text(errors="replace") if path.exists() else ""
    if name in OF_INTEGRITY_FUZZ:
        work = _rounds(directory, name, status, log)
    elif name.endswith("_fuzz"):
        work = _fuzzer(status, log)
    else:
        work = _coverage(log) if name == "coverage" else _tests(log)
    if work.found:
        return FOUND, f"**FOUND** (exit status {status}): {work.found}"
    if status in NOT_STARTED:
        return NOT_RUN, f"could not run: {_last(log)}"
    if status == BY_TIME or (status == KILLED and seconds >= longest):
        if work.finished:
            return NOTHING, f"ended by its time after {work}; nothing found until then"
        return NOT_RUN, f"ended by its time before any of its {work.unit} had finished" + (f"; {work.skipped} skipped" if work.skipped else "")
    if status == KILLED:
        return NOT_RUN, f"could not go on after {work}: it was killed"
    if status == 0 and work.finished:
        return NOTHING, f"nothing found in {work}"
    if status == 0 and work.skipped:
        return NOT_RUN if has_root else LEFT_OUT, f"nothing ran: {work.skipped} skipped"
    if status == 0:
        return NOT_RUN, f"nothing ran: {_last(log)}"
    if work.trouble:
        return NOT_RUN, f"could not {f'go on after {work}' if work.finished else 'run'}: {work.trouble}"
    return FOUND, f"**FOUND** (exit status {status})"


def as_cell(verdict: str) -> str:
    """One line for a table."""
    text = " ".join(verdict.split()).replace("|", "/")
    return text if len(text) <= 300 else text[:300] + " ..."


def whole(parts: list[tuple[str, str]]) -> tuple[int, str]:
    """The exit status and the headline of a campaign, given the name and the state of each part."""
    states = [state for _, state in parts]
    missing = [name for name, state in parts if state in (NOT_RUN, LEFT_OUT)]
    of = f"{len(missing)} of {len(parts)} parts did not run, or not to the end: {', '.join(missing)}."
    if FOUND in states:
        return 1, "**Something was found: see the rows and their logs.**" + f" {of}" * bool(missing)
    if NOTHING not in states:
        return 2, "**No part ran to its end.**"
    if not missing:
        return 0, "**Nothing was found.**"
    return 2 if NOT_RUN in states else 0, f"**Nothing was found in what ran; {of}**"


def main(argv: list[str]) -> int:
    directory = Path(argv[1])
    if argv[0] == "part":
        status, seconds, longest = map(int, argv[3:6])
        state, verdict = part(directory, argv[2], status, seconds, longest, os.geteuid() == 0)
        print(state, as_cell(verdict), sep="\t")
        return 0
    lines = (line.split("\t") for line in (directory / "parts.tsv").read_text().splitlines())
    status, headline = whole([(name, state) for name, _, state, _ in lines])
    print(headline)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
