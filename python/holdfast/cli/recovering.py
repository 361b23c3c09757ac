"""``holdfast recover``: promotes complete checkpoints of a crashed run and removes the others."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast import recovery
from holdfast.cli import text

_DESCRIPTION = """\
Cleans a directory after a crash: saves that are complete get their final name, incomplete ones are
removed. Safe beside running saves, which are left alone. A repeated recovery does no harm.
"""
_EPILOG = """\
examples:
  holdfast recover --dry-run run     # what would be done
  holdfast recover run
  holdfast recover --wait 0 run      # without waiting for workers whose trainer is dead

exit status: 0 done, 2 trouble
"""

# The reasons by which the runtime keeps a directory when promotion and removal are switched off.
_WOULD_PROMOTE = "complete, but promotion is switched off"
_WOULD_REMOVE = "incomplete"
# Whether a DCP checkpoint can be completed, only the recovery finds out.
_MAY_PROMOTE = "all ranks' data is there, and it was not completed"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("directory", metavar="DIR", help="where checkpoints are saved")
    parser.add_argument("-n", "--dry-run", action="store_true", help="change nothing; say what would be done")
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS",
        help="how long to wait without progress for a worker whose trainer is dead (default 30; ten times that in all)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def outlook(directory: str) -> dict[str, Any]:
    """What a recovery would do: lists of names ``promote``, ``complete`` and ``remove``, and ``keep`` with reasons."""
    report = recovery.recover(directory, wait_for_orphans=0.0, promote=False, clean_up=False)
    found: dict[str, Any] = {"promote": [], "complete": [], "remove": [], "keep": {}}
    for entry in report["kept_incomplete"]:
        name, _, why = entry.partition(": ")
        if why == _WOULD_PROMOTE:
            found["promote"].append(name)
        elif why == _MAY_PROMOTE:
            found["complete"].append(name)
        elif why == _WOULD_REMOVE:
            found["remove"].append(name)
        else:
            found["keep"][name] = why
    return found


def run(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    if arguments.dry_run:
        found = outlook(directory)
        done = {"would promote": found["promote"], "may promote": found["complete"], "would remove": found["remove"]}
        kept = [f"{name}: {why}" for name, why in found["keep"].items()]
    else:
        report = recovery.recover(directory, wait_for_orphans=arguments.wait)
        done = {verb: report[verb] for verb in ("promoted", "removed", "fenced")}
        kept = report["kept_incomplete"]
    if arguments.json:
        keys = {verb.replace(" ", "_"): names for verb, names in done.items()}
        text.document("recover", directory=directory, dry_run=arguments.dry_run, **keys, kept=kept)
        return 0
    text.lines(f"{verb}: {name}" for verb, names in done.items() for name in names)
    text.lines(f"kept: {entry}" for entry in kept)
    if not any(done.values()):
        print("nothing to recover")
    return 0
