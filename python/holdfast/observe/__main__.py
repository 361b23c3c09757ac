"""``python -m holdfast.observe plot run.jsonl out.png``."""

from __future__ import annotations

import argparse
import sys

from holdfast.errors import Error
from holdfast.observe.picture import plot


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.observe")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("plot", help="draw the saves of a run")
    one.add_argument("lines", help="the file that holdfast.observe.jsonl wrote")
    one.add_argument("picture", help="the file to make: .png, .svg, .pdf")
    one.set_defaults(run=lambda given: plot(given.lines, given.picture))
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (Error, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
