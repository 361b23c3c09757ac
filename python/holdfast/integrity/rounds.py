"""One round: its lives one after the other, and what is judged after each."""

from __future__ import annotations

import collections
import dataclasses
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

import holdfast
from holdfast.integrity import (
    injection,
    jobs,
    judge,
    memory_groups,
    native,
    peers,
    places,
    processes,
    schedule,
    trainer,
)

TIME_ORPHANS_MAX = 180.0  # seconds in which the workers of dead trainers have to end
LOG_BYTES = 4000


@dataclasses.dataclass
class Result:
    """What became of a round.

    Attributes:
        problems: each with ``invariant`` and ``what``; empty for a round that survived.
        counts: of saves, events, reads.
        log: the last of what the trainers printed.
        seconds: that it took.
        before: by life and job, the rounds that its trainers had run before.
        outcomes: by save and rank: durable, failed, refused or skipped.
        is_lost: the process that ran it has crashed, and another one would.
    """

    problems: list[dict[str, str]]
    counts: collections.Counter[str]
    log: str
    seconds: float
    before: list[list[int]] = dataclasses.field(default_factory=list)
    outcomes: dict[int, dict[int, str]] = dataclasses.field(default_factory=dict)
    is_lost: bool = False


def crashed(what: str) -> Result:
    """The result of a round whose judge has crashed."""
    return Result([{"invariant": "v", "what": what}], collections.Counter(), "", 0.0, is_lost=True)


def run(round_: dict[str, Any], directory: str, plant: str = "",
        inject: Callable[[str], injection.Injector] | None = None, pool: jobs.Pool | None = None) -> Result:  # fmt: skip
    """Runs a round in a directory of its own, which is removed afterwards.

    Args:
        round_: of `schedule.draw`.
        directory: on the file system that is tried.
        plant: as of `trainer.serve`.
        inject: makes the injector of the first life, given the directory of the checkpoints.
        pool: of trainers that other rounds have used; default: processes that have run nothing.
    """
    began = time.monotonic()
    base = os.path.join(directory, f"round-{os.getpid()}-{round_['number']}")
    shutil.rmtree(base, ignore_errors=True)
    scratch = os.path.join(base, "scratch")
    run_ = os.path.join(base, "disk", "run")
    with processes.interrupts.held():
        os.makedirs(scratch)
        try:
            with places.made(round_, base) as place, processes.interrupts.let():
                made = (peers if "saver" in round_ else judge).Judge(round_, run_)
                before: list[list[int]] = []
                for life in range(len(round_["lives"])):
                    injector = inject(run_) if inject and life == 0 else None
                    if round_["kill_recover"] is not None:
                        jobs.ensure_server()  # which is no orphan, and forks at once
                    orphans = processes.Orphans()
                    trainers = jobs.Life(round_, life, run_, scratch, plant, injector, pool, place.second)
                    before += trainers.before
                    _live(round_, life, place, trainers, orphans, made, injector)
                    if made.problems:
                        break
            outcomes = {number: save.outcomes for number, save in made.made.items()}
            return Result(made.problems, made.counts, _logs(scratch), time.monotonic() - began, before, outcomes)
        finally:
            if any(event["kind"] in schedule.IN_GROUPS for event in schedule.events_of(round_)):
                memory_groups.clean(run_)
            shutil.rmtree(base, ignore_errors=True)


class Bench:
    """What a lane runs: rounds in a directory.

    Args:
        directory: as of `run`.
        doors: as of `jobs.start_server`.
        plant: as of `trainer.serve`.
    """

    def __init__(self, directory: str, doors: Collection[str] = (), plant: str = "") -> None:
        self._directory, self._plant = directory, plant
        self._pool = jobs.Pool()
        jobs.start_server(doors)

    def run(self, round_: dict[str, Any]) -> Result:
        """Runs a round."""
        # A filter, and a mount of its own, stay for the life of their process.
        is_plain = not self._plant and "saver" not in round_ and not round_["forbidden"] and not places.has_second(round_)
        return run(round_, self._directory, self._plant, pool=self._pool if is_plain else None)

    def close(self) -> None:
        """Ends the trainers that wait for a round."""
        self._pool.close()


def _live(round_: dict[str, Any], life: int, place: places.Place, trainers: jobs.Life, orphans: processes.Orphans,
          made: judge.Judge, injector: injection.Injector | None) -> None:  # fmt: skip
    try:
        with place.hostile():
            trainers.run()
    except BaseException:  # the program ends: nothing may write into what is removed now
        trainers.abandon()
        orphans.wait(0)
        raise
    dead = None
    if round_["door"] == schedule.PLAN:
        with made.blaming("the files of dead workers cannot be opened"):
            dead = native.DeadFiles(trainer.Task(round_, life, 0, made.directory, trainers.scratch))
    if injector:
        trainers.lines += [injection.line(fired) for fired in injector.fired]
    with made.blaming("what the trainers told cannot be judged"):
        made.hear(trainers.lines, round_["lives"][life], place.errors)
    if trainers.problem:
        made.blame("v", trainers.problem)
    early = bool(round_.get("kills_early"))
    if early:
        _kill_recovery(round_, made, orphans, recover_beside)
    made.look(thorough=False)  # beside orphans that still write: readers see complete checkpoints alone
    left = orphans.wait(TIME_ORPHANS_MAX)
    if left:
        made.blame("iv", f"processes that outlive their trainers by {TIME_ORPHANS_MAX:g} s: {left}")
    if injector:
        injector.close()
    place.cut()
    if not early:
        _kill_recovery(round_, made, orphans, judge.recover)
    last = life == len(round_["lives"]) - 1
    made.recover()
    if dead:
        with made.blaming("the files of dead workers cannot be read"):
            made.hear(dead.look(), [])
    made.look(thorough=True, damages=last)


def recover_beside(directory: str) -> None:
    """Recovers a directory in which workers of dead trainers may still write."""
    holdfast.recover(directory, wait_for_orphans=judge.TIME_ORPHANS_MAX)


def _kill_recovery(round_: dict[str, Any], made: judge.Judge, orphans: processes.Orphans, recover: Callable[[str], object]) -> None:
    if round_["kill_recover"] is None or not os.path.isdir(made.directory):
        return
    status = jobs.run_and_kill(recover, (made.directory,), round_["kill_recover"])
    if status == -signal.SIGKILL:
        made.count_event(schedule.KILL_RECOVER, in_flight=bool(orphans.alive()))
    elif status != 0:
        made.blame("v", f"a recovery ended with status {status}")


def _logs(scratch: str) -> str:
    text = ""
    for name in sorted(os.listdir(scratch)):
        if name.endswith(".log"):
            with open(os.path.join(scratch, name), "rb") as file:
                text += file.read().decode(errors="replace")
    return text[-LOG_BYTES:]


def shrink(round_: dict[str, Any], directory: str, invariants: set[str], seconds: float,
           tries: int = 3, plant: str = "") -> tuple[dict[str, Any], int]:  # fmt: skip
    """Simplifies a failing round while it fails by one of the same invariants.

    Args:
        round_: fails.
        directory: as of `run`.
        invariants: that it breaks.
        seconds: after which the simplest so far is returned.
        tries: runs of each candidate; a race does not fail every time.
        plant: as of `run`.

    Returns:
        The round, and the number of runs.
    """
    end, runs = time.monotonic() + seconds, 0
    smaller = schedule.smaller(round_)
    while time.monotonic() < end:
        candidate = next(smaller, None)
        if candidate is None:
            break
        for _ in range(tries):
            runs += 1
            found = {p["invariant"] for p in run(candidate, directory, plant).problems}
            if found & invariants:
                round_, smaller = candidate, schedule.smaller(candidate)
                break
            if time.monotonic() > end:
                break
    return round_, runs
