"""The campaign: rounds, what failed made small, and a report."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import holdfast
from holdfast.integrity import jobs, judge, lanes, peers, processes, rounds, schedule

VERSION = 2


def file_system_of(directory: str) -> str:
    """Type, source and mount point of the file system of a directory."""
    best: tuple[int, str] = (-1, "unknown")
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        real = os.path.realpath(directory)
        for line in mounts:
            before, _, after = line.partition(" - ")
            point = before.split()[4].encode().decode("unicode_escape")
            if os.path.commonpath([real, point]) == point and len(point) >= best[0]:
                kind, source = after.split()[:2]
                best = (len(point), f"{kind} ({source} on {point})")
    return best[1]


def total(counts: collections.Counter[str], prefix: str) -> int:
    """The sum of all counts of a kind."""
    return sum(count for key, count in counts.items() if key.startswith(prefix))


def damages(counts: collections.Counter[str]) -> int:
    """How many checkpoints were damaged on purpose."""
    return total(counts, "damage ") - counts["damage refused by a load"]


def table_of_events(counts: collections.Counter[str]) -> list[str]:
    """How often each kind of event met I/O in flight, by launcher and rung; "-" where a launcher has no worker process."""
    cells = {tuple(k.removeprefix("in flight ").split(" x ")): n for k, n in counts.items()
             if k.startswith("in flight ") and " x " in k}  # fmt: skip
    if not cells:
        return []
    rungs = sorted({rung for _, _, rung in cells})
    kinds = sorted({kind for kind, _, _ in cells})
    lines = ["in flight, by launcher: " + ", ".join(rungs)]
    lines.append(" " * 20 + "".join(f"{launcher:>{6 * len(rungs)}}" for launcher in schedule.LAUNCHERS))
    for kind in kinds:
        row = f"  {kind:<18}"
        for launcher in schedule.LAUNCHERS:
            has_none = launcher == "thread" and kind in {*schedule.OF_WORKERS, schedule.KILL_RECOVER} - {"kill-both"}
            row += "".join(f"{'-' if has_none else cells.get((kind, launcher, rung), 0):>6}" for rung in rungs)
        lines.append(row)
    return lines


def as_argument(round_: dict[str, Any]) -> str:
    """A schedule as the value of --replay. The command needs no file, which might end with the program or the machine."""
    return shlex.quote(json.dumps(round_, separators=(",", ":")))


class Campaign:
    """A seed, the rounds so far, and what they found.

    Args:
        directory: on the file system that is tried; each round makes and removes one in it.
        seed: of all rounds.
        limits: of the rounds.
        report: file of the report, written after each round; "" for none.
        tell: prints a line.
        saver: of `peers.SAVERS`, whose rounds are reduced to what every saver offers; "" for whole rounds.
        plant: as of `trainer.serve`, for tests of this program.
        is_named: whether the user named the directory; another one ends with the program.
        options: those of the user that decide which rounds are drawn.
    """

    def __init__(self, directory: str, seed: int, limits: schedule.Limits, report: str = "",
                 tell: Callable[[str], None] = print, saver: str = "", plant: str = "", is_named: bool = True,
                 options: str = "") -> None:  # fmt: skip
        self.directory = os.path.abspath(directory)
        self._is_named = is_named
        self._plant, self._options = plant, options
        self.seed = seed
        self.limits = limits
        self.saver = saver
        self.counts: collections.Counter[str] = collections.Counter()
        self.escapes: list[dict[str, Any]] = []
        self.done = 0
        self.next = 0
        self._ahead: set[int] = set()  # rounds behind the next one that have overtaken it
        self.seconds = 0.0
        self._report = report
        self._tell = tell

    # ---- The report.

    @property
    def _series(self) -> dict[str, Any]:
        """The values that rounds of one report share, beside the seed."""
        return {**json.loads(json.dumps(dataclasses.asdict(self.limits))), "saver": self.saver, "plant": self._plant}

    def as_json(self) -> dict[str, Any]:
        """Everything that the report says."""
        machine = os.uname()
        return {
            "program": "integrity-fuzz",
            "version": VERSION,
            "holdfast": holdfast.__version__,
            "seed": self.seed,
            "options": self._options,
            "series": self._series,
            "next_round": self.next,
            "rounds_ahead": sorted(self._ahead),
            "rounds": self.done,
            "seconds": round(self.seconds, 1),
            "directory": self.directory if self._is_named else "",
            "file_system": file_system_of(self.directory),
            "kernel": f"{machine.sysname} {machine.release} {machine.machine}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "counts": dict(sorted(self.counts.items())),
            "escapes": self.escapes,
        }

    def resume(self, given: dict[str, Any]) -> None:
        """Goes on from a report of an earlier run.

        Raises:
            ValueError: its rounds are of another series.
        """
        if given.get("version") != VERSION:
            raise ValueError("the report is of another version of this program: begin another one with --report")
        was = given["series"]
        if other := [f"{key} {was.get(key)}, now {value}" for key, value in self._series.items() if was.get(key) != value]:
            raise ValueError(f"the rounds of the report are of another series: {'; '.join(other)}. It began with the options "
                             f"{given['options'] or '(none)'}: give these, as the same user, or begin another report with --report")  # fmt: skip
        self.seed = given["seed"]
        self.next = given["next_round"]
        self._ahead = set(given["rounds_ahead"])
        self.done = given["rounds"]
        self.seconds = given["seconds"]
        self.counts.update(given["counts"])
        self.escapes = given["escapes"]

    def _write(self) -> None:
        if self._report:
            temporary = f"{self._report}.tmp"
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(self.as_json(), file, indent=1)
                file.write("\n")
            os.replace(temporary, self._report)

    # ---- Rounds.

    def run(self, rounds_max: int | None, seconds_max: float | None, shrink_seconds: float, at_once: int = 1) -> None:
        """Runs rounds until a count or a time is over.

        Args:
            rounds_max, seconds_max: no round begins after so many rounds or seconds, but the first.
            shrink_seconds: longest time to simplify a failing round.
            at_once: rounds that run beside each other.

        Raises:
            KeyboardInterrupt: the report has every round that was finished.
            ChildProcessError: a process that runs rounds has ended.
        """
        began, before = time.monotonic(), self.seconds
        first, told, end = self.next, before, None if seconds_max is None else began + seconds_max
        numbers = itertools.islice(itertools.filterfalse(frozenset(self._ahead).__contains__, itertools.count(first)), rounds_max)

        def drawn() -> Iterator[tuple[dict[str, Any]]]:
            for number in numbers:
                if number > first and end is not None and time.monotonic() >= end:
                    return
                round_ = schedule.draw(self.seed, number, self.limits)
                yield (peers.reduce(round_, self.saver) if self.saver else round_,)

        jobs.preload(self.limits.doors)
        count = at_once if rounds_max is None else max(1, min(at_once, rounds_max))
        with lanes.Lanes(count, functools.partial(rounds.Bench, self.directory, self.limits.doors, self._plant)) as beside:
            for (round_,), result in beside.run(drawn(), rounds.crashed):
                self._ahead.add(round_["number"])
                while self.next in self._ahead:
                    self._ahead.remove(self.next)
                    self.next += 1
                self.seconds = before + time.monotonic() - began
                self._count(round_, result, 0 if result.is_lost else shrink_seconds)
                self._write()
                if self.seconds - told >= 30:
                    told = self.seconds
                    self._tell(self.progress())

    def _count(self, drawn: dict[str, Any], result: rounds.Result, shrink_seconds: float) -> None:
        self.done += 1
        self.counts.update(result.counts)
        for key in ("door", "launcher", "engine", "device"):
            self.counts[f"rounds {key} {drawn[key]}"] += 1
        self.counts[f"rounds ranks {drawn['ranks']}"] += 1
        self.counts[f"rounds place {schedule.place_of(drawn)}"] += 1
        for call, error in drawn["forbidden"].items():
            self.counts[f"forbidden {call} {error}"] += 1
        if result.problems:
            self._escape(drawn, result, shrink_seconds)

    def _escape(self, drawn: dict[str, Any], result: rounds.Result, shrink_seconds: float) -> None:
        first = result.problems[0]
        self._tell(f"ESCAPE in round {drawn['number']}: ({first['invariant']}) {first['what']}")
        escape = {"round": drawn["number"], "problems": result.problems, "log": result.log, "schedule": drawn,
                  "before": result.before, "runs_to_shrink": 0, "command": self._command(drawn)}  # fmt: skip
        self.escapes.append(escape)
        if shrink_seconds > 0:
            self._write()  # an interruption from here on loses the simpler schedule alone
            self._tell(f"making it smaller for at most {shrink_seconds:g} s ...")
            broken = {p["invariant"] for p in result.problems}
            jobs.start_server()
            with processes.adopting():
                small, runs = rounds.shrink(drawn, self.directory, broken, shrink_seconds, plant=self._plant)
            escape.update(schedule=small, runs_to_shrink=runs, command=self._command(small))
        self._tell(f"reproduce: {escape['command']}")

    def _command(self, round_: dict[str, Any]) -> str:
        """One command that reproduces an escape."""
        where = f" --dir {shlex.quote(self.directory)}" if self._is_named else ""
        plant = f" --plant {self._plant}" if self._plant else ""
        return f"integrity-fuzz{where}{plant} --replay {as_argument(round_)} --repeat 20"

    def replay(self, given: dict[str, Any], repeat: int) -> None:
        """Runs one schedule several times."""
        jobs.start_server()
        with processes.adopting():
            for _ in range(repeat):
                result = rounds.run(given, self.directory, self._plant)
                self.seconds += result.seconds
                self._count(given, result, 0)
                self._write()

    # ---- For people.

    def progress(self) -> str:
        return (f"{self.done} rounds in {self.seconds:.0f} s, {self.counts['calls']} saves, "
                f"{self._sum('event ')} events, {len(self.escapes)} escapes")  # fmt: skip

    def _sum(self, prefix: str) -> int:
        return total(self.counts, prefix)

    def _of(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key, count in sorted(self.counts.items()):
            if key.startswith(prefix):
                yield key.removeprefix(prefix), count

    def summary(self) -> str:
        """The report as text, to paste."""
        report, counts = self.as_json(), self.counts
        lines = [
            f"integrity-fuzz of Holdfast {report['holdfast']}, seed {self.seed}",
            f"machine: {report['kernel']}, {report['cpus']} CPUs, Python {report['python']}, torch {report['torch']}",
            f"file system: {report['file_system']}",
            f"{self.done} rounds in {self.seconds:.0f} s: {counts['calls']} calls of save by the ranks, "
            f"{counts['durable']} durable ({counts['bytes'] / (1 << 30):.1f} GiB), {counts['failed']} failed, {counts['refused']} refused, "
            f"{counts['skipped']} skipped",
            f"{counts['reads']} reads of whole checkpoints compared bit for bit, {counts['verifications']} verifications, "
            f"{counts['loads by trainers']} rollbacks, {damages(counts)} damages",
            "event                 all  while I/O was in flight",
        ]
        for kind, count in self._of("event "):
            lines.append(f"  {kind:<18}{count:>6}{counts[f'in flight {kind}']:>6}")
        lines += table_of_events(counts)
        for key in ("door", "launcher", "engine", "device", "ranks", "place"):
            lines.append(f"rounds by {key}: " + ", ".join(f"{k} {n}" for k, n in self._of(f"rounds {key} ")))
        if self._sum("forbidden "):
            lines.append("rounds without a system call: " + ", ".join(f"{k} {n}" for k, n in self._of("forbidden ")))
        if self._sum("error "):
            lines.append("errors of the file system: " + ", ".join(f"{k} {n}" for k, n in self._of("error ")))
        lines.append("codes of errors: " + (", ".join(f"{k} {n}" for k, n in self._of("code ")) or "none"))
        for escape in self.escapes:
            first = escape["problems"][0]
            lines.append(f"ESCAPE in round {escape['round']}: {judge.NAMES[first['invariant']]}: {first['what']}")
            lines.append(f"  {escape['command']}")
        lines.append(f"escapes: {len(self.escapes)}")
        return "\n".join(lines)
