"""``ls`` and ``verify`` of URLs: the second places of drains."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from holdfast.cli import storage_options, text
from holdfast.drain.copying import verify as verify_one
from holdfast.drain.places import open_place
from holdfast.drain.remote import find
from holdfast.errors import Error, counted

_WRONG_LINE = 64  # as of verify-checkpoint


def verify(arguments: Sequence[str]) -> int:
    """``holdfast verify URL...``, of a run or of one checkpoint; statuses as of verify-checkpoint."""
    parser = argparse.ArgumentParser("holdfast verify", description="Verifies checkpoints of a store.", allow_abbrev=False)
    parser.add_argument("urls", metavar="URL", nargs="+", help="a place that a drain fills, or one checkpoint of it")
    storage_options.declare(parser)
    try:
        parsed = parser.parse_args(arguments)
        storage = storage_options.given(parsed, "verify")
    except SystemExit as end:  # other options are for directories
        return _WRONG_LINE if end.code else 0
    except Error as error:
        return _trouble(error)
    worst = 0
    for url in parsed.urls:
        try:
            worst = max(worst, _verify(url, storage))
        except Error as error:
            worst = _trouble(error)
    return worst


def _trouble(error: Error) -> int:
    print(text.printable(f"holdfast verify: {error.message}"), file=sys.stderr)
    return 3


def _verify(url: str, storage: dict[str, Any]) -> int:
    place = open_place(url, storage)
    found, damaged = place.complete()
    if not found and not damaged:
        place, one = find(url, storage)
        found = [one]
    text.lines(f"{place.url}/{entry}" for entry in damaged)
    status = 2 if damaged else 0
    for info in found:
        since = time.monotonic()
        faults, files, nbytes = verify_one(place, info)
        took = time.monotonic() - since
        text.lines(f"{place.path(info.slot)}: corrupt: {fault}" for fault in faults)
        if faults:
            status = 1
        else:
            text.lines([f"{place.path(info.slot)}: sound: {counted(files, 'file')}, {text.size(nbytes)} in {took:.2f} s "
                        f"({text.size(nbytes / max(took, 1e-9))}/s); checked: XXH3-128 digests of the seal"])  # fmt: skip
    return status
