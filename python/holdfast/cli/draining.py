"""``holdfast drain``: copies committed checkpoints to a second place, and applies retention to both."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
from typing import Any

from holdfast.cli import storage_options, text
from holdfast.drain.following import Following
from holdfast.drain.options import BEHIND, VERIFY, Drain
from holdfast.drain.places import (
    Seen,
    check_apart,
    check_place,
    open_place,
    path_of,
    scheme_of,
    seen_now,
    warn_of_one_file_system,
)
from holdfast.drain.running import Running, Telling, follow_commands, on_signals
from holdfast.errors import Error, of_system

_DESCRIPTION = """\
Copies the complete checkpoints of SRC to DST, the oldest first, each with its commit record last: a
reader of DST finds a checkpoint when all of it has arrived and is proven. What is there already by
length and digest is not sent again, so that the command may be killed and repeated at any moment.
"""
_EPILOG = """\
SRC and DST are directories, or URLs (with obstore: pip install 'obstore>=0.8'):
  s3://BUCKET/PREFIX   gs://BUCKET/PREFIX   az://CONTAINER/PREFIX   https://HOST/PATH (WebDAV)
Credentials and endpoints are taken from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT, ...), from
--storage-file, and from --storage, whose words every user of the machine sees in the list of processes.

examples:
  holdfast drain run /lustre/me/run
  holdfast drain run s3://bucket/run --watch --keep-last 20 --rate 200M
  holdfast drain s3://bucket/run run --name step-1200     # back

exit status: 0 everything has arrived; 1 a checkpoint, or a file beside it, has not, for it is damaged,
cannot be read or proven, or another entry of DST has its name; 2 trouble
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("source", metavar="SRC", help="where checkpoints are")
    parser.add_argument("target", metavar="DST", help="where they are copied to")
    parser.add_argument("--watch", action="store_true", help="go on; SIGTERM ends it when everything has arrived")
    parser.add_argument("--name", action="append", default=[], metavar="NAME", help="copy this checkpoint; may be repeated")
    parser.add_argument("--newest", action="store_true", help="copy the newest checkpoint alone")
    parser.add_argument("--keep-last", type=_count, default=0, metavar="N", help="of DST: the newest N of a series stay (default all)")
    parser.add_argument("--keep-every", type=_count, default=0, metavar="N", help="but those whose step is a multiple of N stay")
    parser.add_argument("--keep-source", type=_count, default=0, metavar="N", help="of SRC: of those that have arrived, the newest N stay (default all)")
    parser.add_argument("--rate", type=_rate, metavar="BYTES", help="the most bytes per second: 200M, 1G, or a number")
    parser.add_argument("--verify", choices=VERIFY, default="auto", help="how arrival is proven: by the store's checksum, or by reading back")
    parser.add_argument("--behind", choices=BEHIND, default="keep", help="with --keep-source: keep what has not arrived, or skip it")
    parser.add_argument("--give-up", type=_seconds, default=600.0, metavar="SECONDS", help="end after this time without progress (default 600)")
    storage_options.declare(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document; with --watch one line for each event")
    parser.add_argument("--controlled", type=int, metavar="PID", help=argparse.SUPPRESS)


def _rate(value: str) -> float:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    factor = units.get(value[-1:].upper(), 1)
    with contextlib.suppress(ValueError):
        if (rate := float(value[:-1] if factor > 1 else value) * factor) > 0:
            return rate
    raise argparse.ArgumentTypeError(f"200M, 1G, or a number of bytes above 0, not {value!r}")


def _seconds(value: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(value)) >= 0:
            return seconds
    raise argparse.ArgumentTypeError(f"a number of seconds, 0 or more, not {value!r}")


def _count(value: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 <= int(value) < 1 << 64:
            return int(value)
    raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^64 - 1, not {value!r}")


def run(arguments: argparse.Namespace) -> int:
    if arguments.controlled is not None:
        return _run_for_trainer(arguments)
    storage = storage_options.given(arguments, "drain")
    options = Drain(
        keep_last=arguments.keep_last, keep_every=arguments.keep_every, bytes_per_second=arguments.rate,
        verify=arguments.verify, behind=arguments.behind, give_up=arguments.give_up, storage=storage,
    )  # fmt: skip
    for place in (arguments.source, arguments.target):
        check_place(place)
    if not scheme_of(arguments.source) and not arguments.watch:
        with of_system(f"drain {arguments.source}"):
            os.listdir(arguments.source)
    events: list[dict[str, Any]] = []
    unprinted: list[OSError] = []

    def unheard(error: OSError) -> None:  # of the output: the drain ends; to the sweep it would be an error of a place
        unprinted.append(error)
        running.stop()

    tell = Telling(sys.stdout.fileno(), unheard) if arguments.json and arguments.watch else None

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "seen":  # for a trainer
            return
        if tell is not None:
            tell(event)
            return
        events.append(event) if event["event"] != "progress" else None
        try:
            _print(event, quiet=arguments.json)
        except OSError as error:
            unheard(error)

    check_apart(arguments.source, arguments.target)
    if (directory := path_of(arguments.source)) is not None:
        warn_of_one_file_system(directory, arguments.target)
    source, target = (open_place(place, storage, seen_now(place)) for place in (arguments.source, arguments.target))
    chosen = _only(arguments)
    following = Following(source, target, options, note, keep_local=arguments.keep_source, only=chosen)
    running = Running(following, note, watch=arguments.watch)
    on_signals(running, arguments.watch)
    error = running.run(arguments.source, arguments.target)
    if tell is not None:
        tell.end()
    if unprinted:
        raise unprinted[0]
    if arguments.json and not arguments.watch:
        ended = error and {"code": error.code, "message": error.message}
        text.document("drain", source=arguments.source, target=arguments.target, error=ended, passed_over=following.passed_over, **{
            kind: [{k: v for k, v in e.items() if k != "event"} for e in events if e["event"] == kind]
            for kind in ("arrived", "removed", "failed")
        })  # fmt: skip
    if running.ended_by:
        return 128 + running.ended_by
    if error is not None:
        raise error
    if not arguments.json and not arguments.watch and not events:
        print("everything has arrived" if source.complete()[0] else f"no complete checkpoint in {arguments.source}")
    return 1 if following.failed or following.late or (following.passed_over and chosen is None) else 0


def _only(arguments: argparse.Namespace) -> Any:
    if not arguments.name and not arguments.newest:
        return None

    missing = set(arguments.name)

    def chosen(complete: list[Any]) -> list[Any]:
        missing.difference_update(c.name for c in complete)  # later one may have gone by --keep-source
        if missing:
            raise Error("NOT_FOUND", f"drain {arguments.source}: it has no complete checkpoint {min(missing)}")
        return [c for c in complete if c.name in arguments.name or (arguments.newest and c is complete[-1])]

    return chosen


def _print(event: dict[str, Any], quiet: bool) -> None:
    kind = event["event"]
    if kind == "arrived" and not quiet:
        rate = event["bytes_sent"] / max(event["seconds"], 1e-9)
        text.lines([f"arrived: {event['name']}, {text.size(event['bytes'])}, {text.size(event['bytes_sent'])} sent in "
                    f"{event['seconds']:.1f} s ({text.size(rate)}/s), proven by "
                    + ("reading back" if event["verified"] == "read" else "the store's checksum")])  # fmt: skip
    elif kind == "removed" and not quiet:
        text.lines([f"removed: {event['name']} of the {event['place']}: {event['why']}"])
    elif kind in ("trouble", "failed"):
        again = f"; next try in {event['retry_in']:.0f} s" if event.get("retry_in") else ""
        print(text.printable(f"holdfast drain: {event['message']}{again}"), file=sys.stderr, flush=True)
    sys.stdout.flush()


def _run_for_trainer(arguments: argparse.Namespace) -> int:
    """The process that a `Checkpointer` starts: options and commands on the standard input, events on the output."""
    tell = Telling(sys.stdout.fileno())
    commands = sys.stdin.fileno()
    given = json.loads(_line(commands))
    options = Drain(**given["options"])
    with contextlib.suppress(OSError):
        os.nice(options.nice)
    try:
        seen = [Seen.of(told) for told in given["seen"]]
        source, target = open_place(arguments.source, seen=seen[0]), open_place(arguments.target, options.storage, seen[1])
    except Error as error:
        tell({"event": "ended", "error": [error.code, error.message, error.errno], "rings": 0})
        tell.end(lambda: os.getppid() == arguments.controlled)
        return 2
    following = Following(source, target, options, tell, keep_local=given["keep_local"],
                          keep_local_every=given["keep_local_every"], form=given["form"])  # fmt: skip
    following.retains = given["saves"]
    running = Running(following, tell, watch=True)
    on_signals(running, True, has_trainer=True)
    follow_commands(running, commands, arguments.controlled)
    threading.current_thread().name = "holdfast-drain"
    ended = running.run(arguments.source, arguments.target)
    tell({"event": "ended", "error": ended and [ended.code, ended.message, ended.errno], "rings": running.rings_heeded})
    tell.end(lambda: os.getppid() == arguments.controlled)
    return 2 if ended else 0


def _line(descriptor: int) -> bytes:
    """Reads one line and nothing behind it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line
