"""The C++ tests of the CUDA device: programs that were built before, with or without a CUDA toolkit. Needs no PyTorch.

    cuda_tests.py --out FILE --build DIR    DIR has cuda_gpu_test, cuda_save_test, cuda_lost_context_test and holdfast-worker
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from driver import gpu_name
from report import REHEARSAL, Report

PROGRAMS = ("cuda_gpu_test", "cuda_save_test", "cuda_lost_context_test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--build", type=Path, required=True)
    given = parser.parse_args()
    name = gpu_name()
    with tempfile.TemporaryDirectory() as scratch:
        report = Report("C++ tests", given.out, bool(name), name or REHEARSAL, Path(scratch))
        for program in PROGRAMS:
            with report.part(program):
                _run(report, given.build, program)


def _run(report: Report, build: Path, program: str) -> None:
    path = build / program
    if not path.exists():
        report.skip(program, f"it was not built: there is no {path}")
        return
    result = report.scratch / f"{program}.json"
    worker = {"HOLDFAST_WORKER": str(build / "holdfast-worker")}
    # Not those on the fake driver, nor of HIP: they say nothing about this GPU.
    command = [str(path), f"--gtest_output=json:{result}", "--gtest_filter=-*Fake*:*Hip*"]
    done = subprocess.run(command, env={**os.environ, **worker}, timeout=60)
    if not result.exists():
        raise RuntimeError(f"it ended with {done.returncode}")
    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for suite in json.loads(result.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            outcome = "failed" if "failures" in test else "skipped" if test["result"] == "SKIPPED" else "passed"
            outcomes[outcome].append(f"{suite['name']}.{test['name']}")
    count = sum(map(len, outcomes.values()))
    if len(outcomes["skipped"]) == count and not report.cuda:
        report.skip(program, "no GPU")
        return
    report.check(f"{program}: tests that passed, of all", f"{len(outcomes['passed'])} of {count}", not outcomes["failed"])
    for test in outcomes["failed"]:
        report.check(test, "failed", False)
    if outcomes["skipped"]:
        report.note(f"{program}: skipped", ", ".join(outcomes["skipped"]))


if __name__ == "__main__":
    main()
