#!/usr/bin/env python3
"""Checks that the example in docs/cpp.md is the one that the tests compile and run."""

import re

import source_tree

PAGE = "docs/cpp.md"
EXAMPLE = "tests/consumer/example.cc"


def check(options):
    page = (options.root / PAGE).read_text(encoding="utf-8")
    example = (options.root / EXAMPLE).read_text(encoding="utf-8").strip()
    blocks = re.findall(r"^```(?:cpp|c\+\+)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    programs = [block.strip() for block in blocks if "int main" in block]
    if not programs:
        yield f"{PAGE}: shows no program; it is to show {EXAMPLE}"
    for program in programs:
        if program != example:
            yield f"{PAGE}: its program differs from {EXAMPLE}, which is the one that is tested"


if __name__ == "__main__":
    source_tree.run(check, __doc__)
