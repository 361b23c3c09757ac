"""Prints the savers of `integrity-fuzz --savers` that are here, with commas, and to the standard error why each other one is not."""

from __future__ import annotations

import sys

from holdfast.integrity import peers


def main() -> int:
    absent = {name: reason for name in peers.NAMES if (reason := peers.why_not(name))}
    print(",".join(name for name in peers.NAMES if name not in absent))
    for reason in absent.values():
        print(f"- {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
