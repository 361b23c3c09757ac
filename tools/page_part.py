"""The part of a page that a program writes: what stands between two comments."""

from __future__ import annotations


def read(page: str, begin: str, end: str) -> str:
    """The part as it is."""
    return page.split(begin, 1)[1].split(end, 1)[0]


def replaced(page: str, begin: str, end: str, part: str) -> str:
    """The page with another part."""
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n{part}\n{end}{rest.split(end, 1)[1]}"
