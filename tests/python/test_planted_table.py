"""Each bug that is planted in a build for tests has a row in docs/integrity.md, and a test that names it."""

from __future__ import annotations

import re
from pathlib import Path

import test_integrity

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| `([\w/.]+)` \|$", re.MULTILINE)


def planted() -> set[str]:
    """Of the runtime, by the headers that declare them."""
    bugs = re.findall(r"^  (k\w+),", (ROOT / "runtime/base/planted_bugs.h").read_text(), re.MULTILINE)
    flags = re.findall(r"^extern bool (g_\w+);", (ROOT / "runtime/worker/planted_bugs.h").read_text(), re.MULTILINE)
    return {*bugs, *flags} - {"kNone"}


def test_each_planted_bug_of_the_runtime_has_a_row_and_a_test() -> None:
    rows = dict(_ROW.findall((ROOT / "docs/integrity.md").read_text()))
    assert rows.keys() == planted()
    assert len(rows) >= 25
    for bug, test in rows.items():
        assert re.search(rf"\b{bug}\b", (ROOT / test).read_text()), (bug, test)


def test_each_planted_bug_of_the_campaign_has_a_row() -> None:
    text = (ROOT / "docs/integrity.md").read_text()
    assert [bug for bug in test_integrity.PLANTED if f"`{bug}`" not in text] == []
