"""``holdfast top``: the saves in flight of all ranks on this node, again and again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from holdfast import directories
from holdfast.cli import node, text
from holdfast.errors import Error, counted, of_system

_DESCRIPTION = """\
Shows the saves in flight of all ranks on this node: phase, rate, time left, staging memory held, and
the last errors. Reads the memory of trainers and workers through /proc, as their user or as root;
they take no part in it. In a container, run it there.
"""
_EPILOG = """\
columns:
  RANK      of the save, and how many ranks it has
  PID       of the trainer; - where it is dead and its worker finishes the save
  PHASE     staging (copies into staging memory; the worker writes meanwhile), queued (the worker has not
            begun), writing, syncing, reading back, manifest, waiting for ranks (with their numbers),
            committing, removing (older checkpoints); quarantined: the save has ended, and its memory is held until its last transfer
            has landed
  DONE      written bytes
  RATE      bytes written per second: of the last 5 s, at first since the beginning of the save
  LEFT      until all bytes are written, at this rate
  HELD      staged bytes whose memory the save still holds
  CHECKPOINT  (unknown) and the attempt where no process has the checkpoint's directory open

PID, WRITTEN, OF and WORKER need a terminal of 120 columns; one below 80 has fewer yet.

keys: q or Ctrl-C ends. Without a terminal, or on one that moves no cursor, the state is printed once.

examples:
  holdfast top run
  holdfast top --once --json run | jq '.saves[] | select(.phase == "waiting for ranks").rank'

exit status: 0, whatever the saves do; 2 trouble
"""
_ERRORS_SHOWN = 8
_RUNS_SHOWN = 4
_LINES_AROUND = 6  # of the screen: title, summary, note, head of the columns, empty lines
_HEAD = ("RANK", "PID", "STEP", "PHASE", "DONE", "WRITTEN", "OF", "RATE", "LEFT", "HELD", "WORKER", "CHECKPOINT")
_RIGHT = "RANK PID STEP DONE WRITTEN OF RATE LEFT HELD"
# How many columns a terminal has that shows these; the others are always shown.
_NEEDS = {**dict.fromkeys(("PID", "WRITTEN", "OF", "WORKER"), 120), "HELD": 80, "LEFT": 75, "STEP": 70, "RATE": 65, "DONE": 50}


def declare(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("directory", metavar="DIR", nargs="?", help="saves below it; default all of this node")
    parser.add_argument("--once", action="store_true", help="print the state once, after one interval")
    parser.add_argument("--json", action="store_true", help="print one JSON document; means --once")
    parser.add_argument("--interval", metavar="S", type=_seconds, default=1.0, help="seconds between looks (1)")


def _seconds(given: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= float(given) <= 3600:
            return float(given)
    raise argparse.ArgumentTypeError(f"from 0.1 to 3600 seconds, not {given!r}")


def run(arguments: argparse.Namespace) -> int:
    directory = arguments.directory
    if directory is not None:
        with of_system(f"watch {directory}"), os.scandir(directories.local_path(directory, "watch")):
            pass
    watched = node.Node(directory)
    # A terminal that moves no cursor would show nothing at all.
    if arguments.once or arguments.json or not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        watched.look()
        time.sleep(arguments.interval)
        look = watched.look()
        if arguments.json:
            text.document("top", directory=directory, **dataclasses.asdict(look))
        else:
            _print(look, directory)
        return 0
    _show(watched, directory, arguments.interval)
    return 0


def summary(look: node.Look) -> str:
    """One line about all saves."""
    if not look.saves:
        return "no save in flight"
    rates = [s.bytes_per_second for s in look.saves if s.bytes_per_second is not None]
    flying = sum(save.phase != "quarantined" for save in look.saves)
    quarantined = sum(s.bytes_held for s in look.saves if s.phase == "quarantined")
    parts = [
        f"{flying} {'save' if flying == 1 else 'saves'} in flight",
        f"{text.size(sum(s.bytes_written for s in look.saves))} of "
        f"{text.size(sum(s.bytes_total for s in look.saves))} written",
        *([f"{text.size(sum(rates))}/s"] if rates else []),
        f"{text.size(sum(s.bytes_held for s in look.saves))} of staging memory held",
        *([f"{text.size(quarantined)} of it quarantined"] if quarantined else []),
    ]
    return ", ".join(parts)


def row(save: node.Save, directory: str | None) -> list[str]:
    """The cells of a save's row. Checkpoints below `directory` have their path from there."""
    worker = "-" if save.worker_pid is None else str(save.worker_pid)
    path = save.path or f"(unknown) {save.attempt}"
    if directory is not None and save.path is not None:
        path = os.path.relpath(save.path, os.path.realpath(directory))
    return [
        f"{save.rank}/{save.world_size}",
        "-" if save.trainer_pid is None else str(save.trainer_pid),
        str(save.step),
        phase(save),
        f"{100 * save.bytes_written // max(save.bytes_total, 1)} %",
        text.size(save.bytes_written),
        text.size(save.bytes_total),
        "-" if save.bytes_per_second is None else f"{text.size(save.bytes_per_second)}/s",
        "-" if save.seconds_left is None else duration(save.seconds_left),
        text.size(save.bytes_held),
        f"{worker} {save.engine or save.launcher}",
        path,
    ]


def phase(save: node.Save) -> str:
    """The phase, with the ranks that the save waits for: ``waiting for ranks 1, 4-7``."""
    runs: list[list[int]] = []
    for rank in save.waits_for or ():
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_RUNS_SHOWN]]
    return " ".join([save.phase, ", ".join([*said, *(["..."] if len(runs) > _RUNS_SHOWN else [])])]).rstrip()


def duration(seconds: float) -> str:
    """``5 s``, ``2:05 min``, ``1:02 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h"


def outcomes(process: node.Process) -> str:
    """What has become of a process's saves."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(process.outcomes.items()))
    said = f"rank {process.rank}, pid {process.pid}: {counts}"
    if process.last is not None:
        said += f"; last durable: {process.last['path']}, {text.age(process.last['time'])} ago"
    return said


def errors(look: node.Look) -> list[str]:
    """The newest errors of all processes, and what could not be read."""
    found = [(entry, process) for process in look.processes for entry in process.errors]
    found.sort(key=lambda pair: pair[0]["time"], reverse=True)
    said = [
        f"{time.strftime('%H:%M:%S', time.localtime(entry['time']))} rank {process.rank}, pid {process.pid}, "
        f"step {entry['step']} {entry['outcome']}: {entry['code']}: {entry['message']}"
        for entry, process in found[:_ERRORS_SHOWN]
    ]
    if look.hidden:
        said.append(f"not shown: {counted(look.hidden, 'save')} of other users; run this as that user, or as root")
    return [*said, *look.unreadable]


def _print(look: node.Look, directory: str | None) -> None:
    text.lines([summary(look)])
    if look.saves:
        text.table(_HEAD, (row(save, directory) for save in look.saves), right=_RIGHT)
    text.lines([*map(outcomes, look.processes), *errors(look)])


def _show(watched: node.Node, directory: str | None, interval: float) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise Error(
            "UNIMPLEMENTED",
            "the screen needs the package rich; pip install 'rich>=13', or use --once",
        ) from error
    # Ctrl-C and kill have to give the terminal back.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console()
    with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, Live(
        console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            live.update(screen(watched.look(), directory, *console.size), refresh=True)
            if pressed(interval) == "q":
                return


def screen(look: node.Look, directory: str | None, width: int, height: int) -> Any:
    """What a terminal of so many columns and lines shows, as a renderable of rich.

    Where not all fits, the newest errors have a third of it, and the saves are those that have done least.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def said(line: str, style: str = "") -> Text:
        return Text(text.printable(line), style=style, overflow="fold")

    saves = Table(expand=True, box=None, padding=(0, 1, 0, 0), header_style="bold")
    kept = [title for title in _HEAD if width >= _NEEDS.get(title, 0)]
    for title in kept:
        side: Any = "right" if title in _RIGHT.split() else "left"
        saves.add_column(title, justify=side, no_wrap=True, overflow="ellipsis", ratio=1 if title == _HEAD[-1] else None)
    said_errors: list[str] = []
    lines = 0
    for line in errors(look):
        needed = -(-len(text.printable(line)) // max(width, 1))
        if said_errors and lines + needed > height // 3:
            break
        said_errors.append(line)
        lines += needed
    shown, fit = look.saves, max(3, height - lines - _LINES_AROUND)
    if len(shown) > fit:
        least = sorted(range(len(shown)), key=lambda i: shown[i].bytes_written / max(shown[i].bytes_total, 1))
        shown = [shown[i] for i in sorted(least[:fit])]
    for save in shown:
        cells: dict[str, Any] = dict(zip(_HEAD, map(said, row(save, directory)), strict=True))
        cells["DONE"] = ProgressBar(max(save.bytes_total, 1), save.bytes_written, width=12)
        saves.add_row(*(cells[title] for title in kept))
    where = directory if directory is not None else "this node"
    top = said(f"holdfast top {where}   {time.strftime('%H:%M:%S', time.localtime(look.time))}", "bold")
    parts: list[Any] = [top, said(summary(look)), Text(), *([saves, Text()] if look.saves else [])]
    if len(shown) < len(look.saves):
        parts.insert(2, said(f"the {len(shown)} that have done least; --once shows all", "dim"))
    parts += [said(line, "red") for line in said_errors]
    parts += [said(outcomes(process), "dim") for process in look.processes]
    return Group(*parts)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits for a key: its character, or "" after so many seconds."""
    import termios
    import tty

    if not sys.stdin.isatty():

        def slept(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield slept
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        return os.read(keyboard, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
