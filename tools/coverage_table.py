"""Reads `llvm-cov export -summary-only` from standard input and prints the line coverage of each folder as a table.

    coverage_table.py ROOT PERCENT_MIN

Only `runtime/` and `io_uring/` below ROOT count. Exit status 1: fewer lines were executed than PERCENT_MIN.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from typing import Any, TextIO

COUNTED = ("runtime", "io_uring")


def folders(report: dict[str, Any], root: str) -> dict[str, tuple[int, int]]:
    """Executed lines and all lines of each folder."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for file in report["data"][0]["files"]:
        name = os.path.relpath(file["filename"], root)
        if name.split(os.sep)[0] in COUNTED:
            lines = file["summary"]["lines"]
            for key in (os.path.dirname(name), "all"):
                found[key][0] += lines["covered"]
                found[key][1] += lines["count"]
    return {key: (covered, count) for key, (covered, count) in found.items()}


def main(argv: list[str], source: TextIO = sys.stdin) -> int:
    """Prints the table; returns the exit status."""
    root, least = argv[0], float(argv[1])
    found = folders(json.load(source), root)
    print("| folder | lines | executed | % |\n| --- | ---: | ---: | ---: |")
    for key in sorted(found, key=lambda k: (k == "all", k)):
        covered, count = found[key]
        print(f"| {key} | {count} | {covered} | {100 * covered / max(1, count):.1f} |")
    covered, count = found.get("all", (0, 0))
    return 0 if count and 100 * covered / count >= least else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
