"""``ls`` and ``verify`` of URLs: the second places of drains."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from holdfast.cli import text
from holdfast.drain.copying import verify as verify_one
from holdfast.drain.places import open_place
from holdfast.drain.remote import find
from holdfast.errors import Error, counted


def verify(arguments: Sequence[str]) -> int:
    """``holdfast verify URL...``, of a run or of one checkpoint; statuses as of verify-checkpoint."""
    worst = 0
    for url in arguments:
        try:
            worst = max(worst, _verify(url))
        except Error as error:
            print(text.printable(f"holdfast verify: {error.message}"), file=sys.stderr)
            worst = 3
    return worst


def _verify(url: str) -> int:
    if url.startswith("-"):
        raise Error("INVALID_ARGUMENT", f"{url}: options are for directories; a URL is verified as it is")
    place = open_place(url)
    found, damaged = place.complete()
    if not found and not damaged:
        place, one = find(url)
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
