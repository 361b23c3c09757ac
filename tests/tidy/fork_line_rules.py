#!/usr/bin/env python3
"""Checks the symbols of the objects that may run in a forked child: they import only what is safe there, and have no
static constructors."""

import pathlib
import re
import subprocess

import source_tree

ARGUMENTS = (
    ("--objects", {"type": pathlib.Path, "required": True, "help": "a file that lists the objects, one a line"}),
    ("--nm", {"default": "nm"}),
    ("--objdump", {"default": "objdump"}),
    ("--skip", {"default": "", "help": "why this build cannot be checked"}),
)
ALLOWED = pathlib.Path(__file__).with_name("fork_line_symbols.txt")
# Sections that exist where something runs before main or after exit, or where an exception can pass.
SECTIONS = re.compile(r"\s(\.(?:init_array|ctors|fini_array|dtors|gcc_except_table)[\w.]*)\s")


def allowed_symbols():
    """One regular expression of all lines of the list."""
    patterns = []
    for _, line in source_tree.lines(ALLOWED):
        patterns += line.split("#")[0].split()
    return re.compile("|".join(pattern.replace("*", r"\w*") for pattern in patterns))


def symbols(options, flag, objects):
    """Pairs of object and symbol, as nm lists them under the flag."""
    output = subprocess.run([options.nm, "-A", "-P", flag, *objects], capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        place, rest = line.split(": ", 1)
        name, kind = rest.split()[:2]
        yield place, name, kind


def readable(name):
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=False).stdout.strip() or name


def check(options):
    if options.skip:
        source_tree.skip(options.skip)
    objects = [line for _, line in source_tree.lines(options.objects) if line.strip()]
    if not objects:
        yield f"{options.objects}: lists no objects"
        return
    defined = {name for _, name, _ in symbols(options, "--defined-only", objects)}
    allowed = allowed_symbols()
    for place, name, _ in symbols(options, "--undefined-only", objects):
        if name not in defined and not allowed.fullmatch(name):
            yield f"{pathlib.Path(place).name}: imports {readable(name)}"
    for place, name, _ in symbols(options, "--defined-only", objects):
        if name.startswith("_ZGV"):
            yield f"{pathlib.Path(place).name}: {readable(name)}: initialized at its first use"
    for each in objects:
        headers = subprocess.run([options.objdump, "-h", each], capture_output=True, text=True, check=True).stdout
        for section in sorted(set(SECTIONS.findall(headers))):
            yield f"{pathlib.Path(each).name}: has a section {section}"


if __name__ == "__main__":
    source_tree.run(check, __doc__, ARGUMENTS)
