#!/usr/bin/env python3
"""Counts single tests in the JUnit files of ctest and pytest, one file a pass, and prints what failed and what was skipped, and why.

Usage: summarize_tests.py DIRECTORY PASS...   reads DIRECTORY/PASS.xml, and PASS.retry.xml if tests that failed were run again. A test that failed first and
passed then is called unstable. Exit status 1 if a test failed, each time that it ran, or none ran.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

# A line of GoogleTest for one finished test.
RESULT = re.compile(r"^\[ *(OK|FAILED|SKIPPED) *\] ([\w./]+)(?:, where .*)? \(\d+ ms\)", re.MULTILINE)
REASON = re.compile(r"^.*: Skipped\n(.*)\n(?:.*\n)*?\[  SKIPPED \] ([\w./]+)(?:, where .*)? \(", re.MULTILINE)
# unittest of Python.
UNITTEST = re.compile(r"^Ran (\d+) tests? in", re.MULTILINE)


def outcome(case):
    """One of "passed", "failed", "skipped" for a program, as ctest saw it."""
    if case.find("failure") is not None or case.find("error") is not None or case.get("status") == "fail":
        return "failed"
    if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
        return "skipped"
    return "passed"


def program_of(case):
    """The name of a program of ctest, or of a test of pytest."""
    name = case.get("name")
    if case.get("classname") not in (None, "", name) and "/" not in name:
        return f"{case.get('classname')}.{name}"  # pytest's
    return name


def count(case, totals, failed, skipped):
    """Adds one program's tests to the totals."""
    name = program_of(case)
    whole = outcome(case)
    output = case.findtext("system-out") or ""
    results = RESULT.findall(output)
    reasons = {test: reason.strip() for reason, test in REASON.findall(output)}
    single_failures = any(result == "FAILED" for result, _ in results)
    if whole == "passed" and single_failures:
        # The failure is what the program is asked for: it finds a planted bug.
        totals["passed"] += 1
        return
    for result, test in results:
        if result == "OK":
            totals["passed"] += 1
        elif result == "SKIPPED":
            totals["skipped"] += 1
            skipped.append((reasons.get(test, "no reason given"), f"{name}: {test}"))
        else:
            totals["failed"] += 1
            failed.append(f"{name}: {test}")
    if whole == "failed" and not single_failures:
        # A crash, a time-out, a sanitizer's report at the end, or a check without single tests.
        totals["failed"] += 1
        failed.append(name)
    elif not results:
        python = UNITTEST.search(output)
        totals[whole] += int(python.group(1)) if python and whole == "passed" else 1
        if whole == "skipped":
            reason = output.strip().splitlines()[-1] if output.strip() else "disabled in this pass"
            told = case.find("skipped")
            # ctest's own message names no more than the exit status.
            if told is not None and told.get("message") and not told.get("message").startswith("SKIP_"):
                reason = told.get("message").removeprefix("Skipped: ")
            skipped.append((reason.removeprefix("skipped: "), name))


def read(file):
    """The totals of a JUnit file, the tests that failed, those that were skipped with their reason, and the programs that ran."""
    totals, failed, skipped = collections.Counter(), [], []
    cases = list(ElementTree.parse(file).getroot().iter("testcase"))
    for case in cases:
        count(case, totals, failed, skipped)
    return totals, failed, skipped, {program_of(case) for case in cases}


def unstable_of(failed, retried):
    """The failed tests that have passed when they ran again."""
    if not retried.exists():
        return []
    _, failed_again, _, ran = read(retried)
    return [test for test in failed if test not in failed_again and test.split(": ")[0] in ran]


def main(directory, passes):
    broken = False
    for each in passes:
        file = directory / f"{each}.xml"
        if not file.exists():
            print(f"{each}: 0 passed, 1 failed, 0 skipped (the build failed, or no test could be run)")
            broken = True
            continue
        totals, failed, skipped, _ = read(file)
        by_reason = collections.defaultdict(list)
        for reason, test in skipped:
            by_reason[reason].append(test)
        for reason, tests in sorted(by_reason.items()):
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            print(f"  skipped: {tests[0]}{more}: {reason}")
        unstable = unstable_of(failed, directory / f"{each}.retry.xml")
        for test in failed:
            print(f"  UNSTABLE, failed once: {test}" if test in unstable else f"  FAILED: {test}")
        stays = totals["failed"] - len(unstable)
        text = f", {len(unstable)} unstable" if unstable else ""
        print(f"{each}: {totals['passed']} passed, {stays} failed, {totals['skipped']} skipped{text}")
        broken = broken or stays > 0 or totals["passed"] == 0
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2:]))
