"""The files of the source tree, and how a check reports."""

import argparse
import pathlib
import sys

FOLDERS = ("runtime", "io_uring", "tests", "fuzz", "tools", "python", "cmake", "docs", ".ci")
SUFFIXES = (".cc", ".h", ".py", ".sh", ".md", ".cmake", ".in", ".txt", ".json")
SKIPPED = 77  # As automake has it; SKIP_RETURN_CODE in CMake.


def files(root, suffixes=SUFFIXES):
    """Every file of the project with one of the suffixes, and those without any (scripts)."""
    found = [path for path in root.iterdir() if path.is_file()]
    for folder in FOLDERS:
        found += [path for path in (root / folder).rglob("*") if path.is_file()]
    for path in sorted(found):
        if "__pycache__" not in path.parts and path.suffix in suffixes:
            yield path


def lines(path):
    """Numbered lines, from 1."""
    return enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)


def run(check, description, arguments=()):
    """The main of a check: `check(options)` yields complaints; each is printed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--root", type=pathlib.Path, required=True, help="the source tree")
    for argument, settings in arguments:
        parser.add_argument(argument, **settings)
    complaints = list(check(parser.parse_args()))
    for complaint in complaints:
        print(complaint)
    print(f"{len(complaints)} complaint(s)")
    sys.exit(1 if complaints else 0)


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)
