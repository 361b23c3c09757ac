"""Power cuts of real saves on real file systems: a round on a recorded disk, and every disk that a cut would have left.

A round runs as in any campaign. Afterwards the disk is made anew for cuts at its flushes and between them, mounted,
recovered and held against the model of what had been told by then.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

from holdfast.integrity import jobs, judge, lanes, processes, rounds, schedule
from holdfast.integrity.block_recorder import Log, Recorder
from holdfast.integrity.served_disk import SECTOR, attached, kernel_log, mounted, repaired

MIB = 1 << 20
# The least that each of them takes, with room for the saves of a round.
SIZES = {"ext4": 192 * MIB, "ext4-nojournal": 192 * MIB, "xfs": 384 * MIB, "btrfs": 256 * MIB}
BYTES_MAX = 2 * MIB
_LEFT_OUT = schedule.LIMITS


def quiet(round_: dict[str, Any]) -> dict[str, Any]:
    """The round without what a cut cannot be told apart from, with states that a small disk can hold."""
    made = copy.deepcopy(round_)
    made |= {"disk": 0, "fuse": {}, "corruptions": [], "ranks": min(2, made["ranks"])}
    for actions in made["lives"]:
        actions[:] = [a for a in actions if a["do"] != "move"]
        for action in actions:
            if action["do"] == "save":
                action["spec"]["bytes"] = min(action["spec"]["bytes"], BYTES_MAX)
                action["spec"]["tensors"] = min(action["spec"]["tensors"], 24)
                if action.get("event", {}).get("kind") in _LEFT_OUT:
                    del action["event"]
                if "event" in action:
                    action["event"]["rank"] %= made["ranks"]
    return made


@dataclasses.dataclass
class Cut:
    """A disk after a power cut.

    Attributes:
        at: how many operations the disk had got.
        kind: which of the writes since the last flush are there: all of them, some, or some and one in part.
        writes: those.
    """

    at: int
    kind: str
    writes: list[tuple[int, bytes]]


def cuts(log: Log, begin: int, count: int | None, choose: random.Random) -> Iterator[tuple[int, Cut]]:
    """Cuts in the order of their flushes: one at each flush, and `count` drawn ones; None: one of each kind before each flush.

    Yields:
        The number of operations that are flushed, and the cut.
    """
    flushes = [i for i in range(begin, len(log.operations)) if log.operations[i] is None]
    places = [(i + 1, "flush") for i in flushes]
    if count is None:
        for before, flush in itertools.pairwise([begin, *flushes]):
            if any(isinstance(operation, tuple) for operation in log.operations[before:flush]):
                places += [(choose.randint(before + 1, flush), "prefix"), (flush, "subset"), (flush, "torn")]
    else:
        places += [(choose.randrange(begin, len(log.operations)), choose.choice(("prefix", "subset", "torn"))) for _ in range(count)]
    for at, kind in sorted(places):
        flushed = max((i + 1 for i in flushes if i < at), default=begin)
        later = [w for w in log.operations[flushed:at] if isinstance(w, tuple)]
        if kind in ("subset", "torn"):
            kept = [w for w in later if choose.random() < 0.5]
            if kind == "torn" and later:
                offset, data = choose.choice(later)
                sectors = choose.randrange(len(data) // SECTOR + 1)
                kept = [w for w in kept if w[0] != offset] + [(offset, data[: sectors * SECTOR])]
            later = kept
        yield flushed, Cut(at, kind, later)


class Disk:
    """The disk as it was at some flush, from which those of cuts are made."""

    def __init__(self, log: Log, scratch: str) -> None:
        self._log, self._applied = log, 0
        self._path = os.path.join(scratch, "flushed")
        self._cut = os.path.join(scratch, "cut")
        with open(self._path, "wb") as file:
            file.truncate(log.size)

    def make(self, flushed: int, cut: Cut) -> str:
        """Makes the disk of a cut, and returns its file. Cuts come in the order of their flushes."""
        with open(self._path, "r+b", buffering=0) as file:
            for operation in self._log.operations[self._applied : flushed]:
                if isinstance(operation, tuple):
                    os.pwrite(file.fileno(), operation[1], operation[0])
        self._applied = max(self._applied, flushed)
        # A new file: another mount namespace may hold the file system of the last one, which then writes to it.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._cut)
        subprocess.run(["cp", "--sparse=always", self._path, self._cut], check=True)
        with open(self._cut, "r+b", buffering=0) as file:
            for offset, data in cut.writes:
                os.pwrite(file.fileno(), data, offset)
        return self._cut


class Witness(Protocol):
    """Is told what happens in rounds on a file system, which is mounted at `directory`."""

    directory: str

    def mark(self, text: str) -> None: ...


class _Marking(list[dict[str, Any]]):
    """The lines of a life; each is noted when it is told."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self._witness = witness

    def append(self, line: dict[str, Any]) -> None:
        super().append(line)
        self._witness.mark(json.dumps(line))


def live(made: judge.Judge, life: int, lines: list[dict[str, Any]], scratch: str, plant: str) -> None:
    """One life, and the end of all workers. The lines are told while it goes on."""
    orphans = processes.Orphans()
    trainers = jobs.Life(made.round, life, made.directory, scratch, plant)
    trainers.lines = lines
    trainers.run()
    made.hear_ends(trainers.problem, orphans.wait(rounds.TIME_ORPHANS_MAX))


def record(round_: dict[str, Any], witness: Witness, scratch: str, plant: str) -> judge.Judge:
    """Runs all lives of a round, each with its recovery, and judges what was told."""
    directory = os.path.join(witness.directory, "run")
    made = judge.Judge(round_, directory)
    witness.mark("begin")
    for life, actions in enumerate(round_["lives"]):
        lines = _Marking(witness)
        live(made, life, lines, scratch, plant)
        made.hear(lines, actions)
        made.recover()
        witness.mark("life")
    return made


def _judge(round_: dict[str, Any], log: Log, cut: Cut, directory: str) -> judge.Judge:
    """The model of what had been told before a cut."""
    made, life = judge.Judge(round_, directory), 0
    lines: list[dict[str, Any]] = []
    for operation in log.operations[: cut.at]:
        if operation == "life":
            made.hear(lines, round_["lives"][life])
            lines, life = [], life + 1
        elif isinstance(operation, str) and operation != "begin":
            lines.append(json.loads(operation))
    if lines:
        made.hear(lines, round_["lives"][life])
    # What the driver hears of a call may reach the record behind the first writes of the save.
    later = (json.loads(o) for o in log.operations[cut.at :] if isinstance(o, str) and o.startswith("{"))
    made.called_late = {line["n"] for line in later if line["event"] == "call"} - made.made.keys()
    made.problems.clear()  # those of the round itself
    return made


def run(round_: dict[str, Any], kind: str, scratch: str, count: int | None, plant: str = "",
        recorded_by: type[Recorder] = Recorder) -> rounds.Result:  # fmt: skip
    """Records a round on a file system, cuts the power, and judges what each cut leaves.

    Args:
        round_: of `quiet`.
        kind: of `SIZES`.
        scratch: a directory in which files of the disk's size fit; memory is fastest.
        count: of cuts that are drawn beside those at each flush; None: as of `cuts`.
        plant: as of `trainer.serve`, for tests of this program.
        recorded_by: the disk.

    Returns:
        The problems, each with the cut; counts of states by kind and by door, and of saves that were durable.
    """
    counts: collections.Counter[str] = collections.Counter()
    problems: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(dir=scratch, prefix="power-cuts-") as base, processes.adopting():
        recorder = recorded_by(kind, SIZES[kind], base)
        with recorder:
            made = record(round_, recorder, base, plant)
        counts[f"durable {kind}"] = made.counts["durable"]
        for problem in made.problems:
            problems.append({"invariant": "v", "what": f"without a cut: ({problem['invariant']}) {problem['what']}"})
        log = recorder.log
        os.unlink(os.path.join(base, "image"))
        begin = log.operations.index("begin")
        disk, directory = Disk(log, base), os.path.join(base, "mounted")
        choose = random.Random(f"{round_['seed']}:{round_['number']}:{kind}")
        for flushed, cut in cuts(log, begin, count, choose):
            counts[f"states {kind} {cut.kind}"] += 1
            counts[f"door {round_['door']}"] += 1
            said = _look(round_, log, cut, disk.make(flushed, cut), directory, kind)
            problems += [{**p, "what": f"{kind}, cut after operation {cut.at} ({cut.kind}): {p['what']}"} for p in said]
        shutil.rmtree(directory, ignore_errors=True)
    return rounds.Result(problems, counts, "", 0.0)


def _look(round_: dict[str, Any], log: Log, cut: Cut, image: str, directory: str, kind: str) -> list[dict[str, str]]:
    with attached(image) as device:
        return look(round_, log, cut, device, directory, kind)


def look(round_: dict[str, Any], log: Log, cut: Cut, device: str, directory: str, kind: str) -> list[dict[str, str]]:
    """Recovers the disk of a cut, mounted at a directory, and returns what is wrong with it."""
    with contextlib.ExitStack() as stack:
        try:
            repaired(device, kind)
            stack.enter_context(mounted(device, directory, kind))
        except subprocess.CalledProcessError as error:
            return [{"invariant": "i", "what": f"the file system cannot be mounted: {error.stderr.strip()}\n{kernel_log()}"}]
        made = _judge(round_, log, cut, os.path.join(directory, "run"))
        made.may_mix_entries = kind == "ext4-nojournal"
        made.recover()
        made.look(thorough=True)
        return made.problems


def scratch_directory() -> str:
    """Memory, where there is room for the disks of each processor; mounting and copying them is most of the work."""
    shared = "/dev/shm"
    with contextlib.suppress(OSError):
        if shutil.disk_usage(shared).free > 3 * max(SIZES.values()) * processes.cpus():
            return shared
    return tempfile.gettempdir()


def drawn(draw: Callable[[int], dict[str, Any]], count: int | None, recorded_by: type[Recorder], plant: str, number: int, kind: str) -> rounds.Result:
    """Runs the round that `draw` gives for a number, made `quiet`, on a file system. The other arguments as of `run`."""
    return run(quiet(draw(number)), kind, scratch_directory(), count, plant, recorded_by)


class Bench:
    """What a lane runs: rounds on disks of their own.

    Args:
        one: called with the number of a round and a file system; importable.
        doors: as of `jobs.start_server`.
    """

    def __init__(self, one: Callable[[int, str], rounds.Result], doors: Collection[str]) -> None:
        self.run = one
        jobs.start_server(doors)

    def close(self) -> None: ...


def campaign(make: Callable[[], Bench], kinds: list[str], numbers: Iterable[int], end: float | None,
             at_once: int) -> Iterator[tuple[int, str, rounds.Result]]:  # fmt: skip
    """Rounds, each on every file system.

    Args:
        make: of what runs them.
        kinds: of `SIZES`.
        numbers: of the rounds.
        end: no other round or file system begins after this monotonic time.
        at_once: rounds beside each other, which take a processor each; 1 starts no process.

    Yields:
        The number of the round, the file system, and what they gave, in the order in which they end.
    """
    all_ = ((number, kind) for number in numbers for kind in kinds)
    each = itertools.takewhile(lambda _: end is None or time.monotonic() < end, all_)
    if at_once == 1:
        bench = make()
        yield from ((number, kind, bench.run(number, kind)) for number, kind in each)
        return
    with lanes.Lanes(at_once, make) as beside:
        yield from ((number, kind, result) for (number, kind), result in beside.run(each, rounds.crashed))
