"""What the commands print: tables for people, JSON for machines, and no control characters."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast._log import size

__all__ = ["age", "document", "lines", "printable", "size", "table"]


def printable(text: str) -> str:
    """`text` with escapes for what would move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def lines(texts: Iterable[str]) -> None:
    """Prints a line for each text."""
    for text in texts:
        print(printable(text))


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], right: str = "") -> None:
    """Prints columns; those whose head is a word of `right` are aligned at the right."""
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [title in right.split() for title in head]
    for row in cells:
        parts = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, aligned, strict=True)
        ]
        print("  ".join(parts).rstrip())


def age(since: float) -> str:
    """Time from `since` (Unix seconds) to now, in the largest unit that gives a whole number."""
    seconds = max(0.0, time.time() - since)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def document(command: str, **content: Any) -> None:
    """Prints one JSON document."""
    print(json.dumps({"program": f"holdfast {command}", "version": 1, **content}, indent=2))
