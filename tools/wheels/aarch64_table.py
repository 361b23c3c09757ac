"""The results of tools/test-aarch64.sh as tables: the counts of each size of a page, and why tests were skipped.

    aarch64_table.py --labels LABEL,... [--write] RESULTS PAGE_BYTES...

RESULTS/PAGE_BYTES.xml is ctest's, RESULTS/saves has one line for each checkpoint that was verified. `--write` puts the tables into
docs/install.md if nothing failed. Exit status 1 if something failed.
"""

from __future__ import annotations

import argparse
import collections
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import page_part
import summarize_tests

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "install.md"
BEGIN, END = "<!-- aarch64: written by tools/test-aarch64.sh --write -->", "<!-- aarch64: end -->"


def short(reason: str) -> str:
    """A reason without what differs from run to run, such that equal ones are counted together."""
    return re.sub(r"/\S*/", "", " ".join(reason.split())).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("pages", nargs="+", type=int)
    parser.add_argument("--labels", required=True, help="those of the tests that ran, separated by commas")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/install.md")
    arguments = parser.parse_args()
    saves = [line.split() for line in (arguments.results / "saves").read_text().splitlines()]
    lines = ["| pages | tests of | passed | failed | skipped | checkpoints of worker processes verified on aarch64 and x86-64 |",
             "| --- | --- | --- | --- | --- | --- |"]
    reasons: dict[str, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    labels = ", ".join(f"`{label}`" for label in arguments.labels.split(","))
    broken = False
    for page in arguments.pages:
        totals, failed, skipped, _ = summarize_tests.read(arguments.results / f"{page}.xml")
        verdicts = [verdict for of_page, _, _, verdict in saves if of_page == str(page)]
        for name in failed:
            print(f"  FAILED, pages of {page} bytes: {name}")
        for reason, _ in skipped:
            reasons[short(reason)][page] += 1
        sound = verdicts.count("sound")
        lines.append(f"| {page >> 10} KiB | {labels} | {totals['passed']} | {totals['failed']} | {totals['skipped']} | "
                     f"{sound // 2} of {len(verdicts) // 2} |")
        broken = broken or bool(failed) or not totals["passed"] or not verdicts or sound < len(verdicts)
    if reasons:
        lines += ["", "| skipped, " + " and ".join(f"{page >> 10} KiB" for page in arguments.pages) + " | why |", "| --- | --- |"]
        for reason, counts in sorted(reasons.items(), key=lambda one: -sum(one[1].values())):
            lines.append(f"| {', '.join(str(counts[page]) for page in arguments.pages)} | {reason} |")
    table = "\n".join(lines)
    print(table)
    if arguments.write and not broken:
        PAGE.write_text(page_part.replaced(PAGE.read_text(), BEGIN, END, table))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
