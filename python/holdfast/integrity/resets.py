"""Resets of the whole machine during rounds on a disk of its own: what was told to a witness, and what is there afterwards."""

from __future__ import annotations

import collections
import itertools
import json
import os
import tempfile

from holdfast.integrity import jobs, power_cuts, processes, rounds, schedule
from holdfast.integrity.block_recorder import Log
from holdfast.integrity.served_disk import make, mounted

_ROUND, _ESCAPE = "round ", "escape "


class _Line:
    """A `power_cuts.Witness` outside of the machine.

    Args:
        path: a file or device that outlives a reset: a serial line, a pipe to another machine.
        directory: of the file system that is tried.
    """

    def __init__(self, path: str, directory: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.directory = directory

    def mark(self, text: str) -> None:
        data = text.encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]


def run(kind: str, disk: str, witness: str, seed: int, limits: schedule.Limits, first: int, plant: str = "") -> None:
    """Runs rounds until the machine is reset, each on a file system that is made anew.

    Args:
        kind: of `power_cuts.SIZES`.
        disk: a device, whose content is lost.
        witness: as of `_Line`.
        seed, limits, first: of the rounds.
        plant: as of `trainer.serve`.
    """
    jobs.start_server()
    with tempfile.TemporaryDirectory(prefix="resets-") as base, processes.adopting():
        told = _Line(witness, os.path.join(base, "mounted"))
        for number in itertools.count(first):
            told.mark(f"{_ROUND}{number}")
            make(kind, disk)
            with mounted(disk, told.directory, kind):
                made = power_cuts.record(power_cuts.quiet(schedule.draw(seed, number, limits)), told, base, plant)
            for problem in made.problems:
                told.mark(_ESCAPE + json.dumps(problem))


def judge(kind: str, disk: str, witness: str, seed: int, limits: schedule.Limits) -> list[tuple[int, str, rounds.Result]]:
    """Holds a disk after a reset against what the witness was told. Arguments as of `run`.

    Returns:
        Rounds that had problems before the reset, then the last one: the number, the file system, and the result. The last one has no
        states where the reset came before its first save.

    Raises:
        ValueError: the witness was told of no round.
    """
    with open(witness, encoding="utf-8", errors="replace") as file:
        *lines, _ = file.read().replace("\r", "").split("\n")  # the last one may be cut
    told: list[tuple[int, list[str], list[dict[str, str]]]] = []
    for line in lines:
        if line.startswith(_ROUND):
            told.append((int(line.removeprefix(_ROUND)), [], []))
        elif told and line.startswith(_ESCAPE):
            told[-1][2].append(json.loads(line.removeprefix(_ESCAPE)))
        elif told:
            told[-1][1].append(line)
    if not told:
        raise ValueError(f"--witness {witness}: it was told of no round")
    made = []
    for number, _, problems in told:
        if problems:
            before = [{**p, "what": f"without a reset: {p['what']}"} for p in problems]
            made.append((number, kind, rounds.Result(before, collections.Counter(), "", 0.0)))
    number, operations, _ = told[-1]
    result = rounds.Result([], collections.Counter(), "", 0.0)
    if operations:
        log = Log(0)
        log.operations = [*operations]
        round_ = power_cuts.quiet(schedule.draw(seed, number, limits))
        cut = power_cuts.Cut(len(operations), "reset", [])
        with tempfile.TemporaryDirectory(prefix="resets-") as base:
            result.problems = power_cuts.look(round_, log, cut, disk, os.path.join(base, "mounted"), kind)
        result.counts[f"states {kind} reset"] = 1
        result.counts[f"durable {kind}"] = sum('"event": "durable"' in line for line in operations)
    return [*made, (number, kind, result)]
