"""``ls`` and ``verify`` of URLs: the second places of drains."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.cli import storage_options, text
from holdfast.drain.copying import verify as verify_one
from holdfast.drain.places import open_place, scheme_of
from holdfast.drain.remote import find
from holdfast.errors import Error, counted

_WRONG_LINE = 64  # as of verify-checkpoint
# From the best to the worst, each with its exit status.
_VERDICTS = {"sound": 0, "incomplete": 2, "unreadable": 3, "corrupt": 1}


def verify(arguments: Sequence[str]) -> int:
    """``holdfast verify URL...``, of a run or of one checkpoint; statuses as of verify-checkpoint."""
    parser = argparse.ArgumentParser("holdfast verify", description="Verifies checkpoints of a store.", allow_abbrev=False)
    parser.add_argument("urls", metavar="URL", nargs="+", help="a place that a drain fills, or one checkpoint of it")
    storage_options.declare(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document; each fault has its reason alone, as text")
    try:
        parsed = parser.parse_args(arguments)
        for path in parsed.urls:
            if not scheme_of(path):
                parser.error(f"{path} is a path: verify it by a command without URLs")
        storage = storage_options.given(parsed, "verify")
    except SystemExit as end:  # other options are for directories
        return _WRONG_LINE if end.code else 0
    except Error as error:
        return _trouble(error)
    reports = []
    for url in parsed.urls:
        try:
            for report in _verify(url, storage):
                reports.append(report)
                if not parsed.json:
                    _print(report)
        except Error as error:
            reports.append(_report(url, "unreadable", [error.message]))
            if not parsed.json:
                _trouble(error)
    worst = max((report["verdict"] for report in reports), key=list(_VERDICTS).index)
    if parsed.json:
        text.document("verify", verdict=worst, exit_status=_VERDICTS[worst], uncommitted=[], paths=reports)
    return _VERDICTS[worst]


def _trouble(error: Error) -> int:
    print(text.printable(f"holdfast verify: {error.message}"), file=sys.stderr)
    return _VERDICTS["unreadable"]


def _report(path: str, verdict: str, faults: list[str], **more: Any) -> dict[str, Any]:
    return {"path": path, "verdict": verdict, **more,
            "faults_total": len(faults), "faults": [{"reason": fault} for fault in faults]}  # fmt: skip


def _verify(url: str, storage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place = open_place(url, storage)
    found, damaged = place.complete()
    if not found and not damaged:
        place, one = find(url, storage)
        found = [one]
    for entry in damaged:
        name, _, why = entry.partition(": ")
        yield _report(f"{place.url}/{name}", "incomplete", [why])
    for info in found:
        since = time.monotonic()
        faults, files, nbytes = verify_one(place, info)
        took = time.monotonic() - since
        yield _report(
            place.path(info.slot), "corrupt" if faults else "sound", faults, checked="XXH3-128 digests of the seal", bytes=nbytes,
            files=files, seconds=took, bytes_per_second=nbytes / max(took, 1e-9), step=info.step, attempt=info.attempt,
        )  # fmt: skip


def _print(report: dict[str, Any]) -> None:
    path, verdict = report["path"], report["verdict"]
    # An incomplete one is listed as `ls` lists it.
    text.lines(f"{path}: {'corrupt: ' * (verdict == 'corrupt')}{fault['reason']}" for fault in report["faults"])
    if verdict == "sound":
        text.lines([f"{path}: sound: {counted(report['files'], 'file')}, {text.size(report['bytes'])} in {report['seconds']:.2f} s "
                    f"({text.size(report['bytes_per_second'])}/s); checked: {report['checked']}"])  # fmt: skip
