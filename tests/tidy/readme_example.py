#!/usr/bin/env python3
"""Checks that the README's example is the one that the tests compile and run."""

import re

import source_tree

EXAMPLE = "tests/consumer/example.cc"


def check(options):
    readme = (options.root / "README.md")
    if not readme.exists():
        source_tree.skip("there is no README.md yet")
    example = (options.root / EXAMPLE).read_text(encoding="utf-8").strip()
    blocks = re.findall(r"^```(?:cpp|c\+\+)\n(.*?)^```", readme.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    programs = [block.strip() for block in blocks if "int main" in block]
    if not programs:
        yield f"README.md: shows no program; it is to show {EXAMPLE}"
    for program in programs:
        if program != example:
            yield f"README.md: its program differs from {EXAMPLE}, which is the one that is tested"


if __name__ == "__main__":
    source_tree.run(check, __doc__)
