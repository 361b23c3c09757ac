"""The result of the Python tests against an installed wheel, as a row of the table of versions.

    suite_row.py RESULTS.xml [PAGE]

Runs with the interpreter whose row it is. PAGE gets the row in the place of the one for the same versions, or behind the last one.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import summarize_tests

NAMES_MAX = 4  # of tests that failed, in a row
HEAD = "| Python | PyTorch | tested |"


def row(results: Path) -> str:
    totals, failed, _, _ = summarize_tests.read(results)
    version = torch.__version__.split("+")[0]
    build = "CPU" if torch.version.cuda is None else "CUDA build" + ("" if torch.cuda.is_available() else " without a GPU")
    names = sorted({re.sub(r"\[.*", "", name).rsplit(".", 1)[-1] for name in failed})
    more = f" and {len(names) - NAMES_MAX} others" if len(names) > NAMES_MAX else ""
    named = ": " + ", ".join(f"`{name}`" for name in names[:NAMES_MAX]) + more if names else ""
    return (f"| {platform.python_version()} | {version}, {build}; the wheel | all tests: {totals['passed']:,} pass, "
            f"{totals['failed']} fail{named}, {totals['skipped']} skipped |")


def with_row(page: str, new: str) -> str:
    lines = page.splitlines(keepends=True)
    first = lines.index(HEAD + "\n") + 2
    last = first
    key = new.split("|")[1:3]
    while last < len(lines) and lines[last].startswith("|"):
        if lines[last].split("|")[1:3] == key:
            lines[last] = new + "\n"
            return "".join(lines)
        last += 1
    return "".join([*lines[:last], new + "\n", *lines[last:]])


if __name__ == "__main__":
    told = row(Path(sys.argv[1]))
    print(told)
    for page in map(Path, sys.argv[2:]):
        page.write_text(with_row(page.read_text(), told))
