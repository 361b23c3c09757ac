"""Faults and kills at every step: a script runs again and again, each time with another of its system calls failing, short,
or the last of its process.

A script is first run without a fault. Its steps are the system calls of the trainers on files below the directory and on
shared memory, all calls that start and watch processes, and every call of the workers. Then each step is run with each
error that the call can return, or with a kill. The directory is recovered after each run and held against the model.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch

import holdfast
import holdfast.dcp
from holdfast.integrity import draining, injection, jobs, judge, lanes, processes, readers, rounds, schedule
from holdfast.integrity.injection import Injection, Injector, Step

SPEC = {"tensors": 4, "bytes": 120_000, "wide": False, "objects": True}
_WAIT = {"do": "wait"}
_TURN = 8  # runs of a script before the next has its turn
# Crashed directories, from which recoveries begin: of each way to save, some.
_LEFT = [f"{door}-{i}" for door in ("save_async", "dcp", "save_file") for i in range(4)]
# Scripts of saves: door, ranks, and further entries of their round.
_SAVES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "save": ("save_async", 1, {"read_back": True}),
    "replace": ("save_async", 1, {"replace": True, "one_name": True}),
    "retention": ("checkpointer", 1, {"keep_last": 1}),
    "ranks": ("save_async", 2, {"replace": True}),
    "dcp": ("checkpointer-dcp", 1, {"keep_last": 1}),
    "dcp-ranks": ("dcp", 2, {}),
}
_ENGINES = ("pwrite", "io_uring", "io_uring-fixed")
_OF_TEMPLATES = ("recovery", "reading", "dcp-reading", "drain")
NAMES = (*_SAVES, "first", "file", *_OF_TEMPLATES)
# Between these marks of a script its calls are counted.
_MARKS = {"first": ("begin", "call 2"), "file": ("file 2", "file 3"), **dict.fromkeys(_OF_TEMPLATES, ("begin", "end"))}
_MARKS_OF_SAVES = ("call 2", "call 3")
Problem = dict[str, str]


def scripts(names: tuple[str, ...] = ()) -> list[str]:
    """Every script with a launcher and an engine: ``"replace/spawn/pwrite"``."""
    found = []
    for name in names or NAMES:
        if name in ("recovery", "reading", "dcp-reading"):
            found += [f"{name}/spawn/pwrite"] if name != "recovery" else [f"{name}/{left}/pwrite" for left in _LEFT]
        elif name == "drain":
            found += [f"{name}/{format_}/pwrite" for format_ in draining.FORMATS]
        else:
            found += ["/".join((name, *of)) for of in itertools.product(schedule.LAUNCHERS, _ENGINES)]
    return found


def _round(script: str, kill: bool) -> dict[str, Any]:
    name, launcher, engine = script.split("/")
    door, ranks, given = _SAVES.get(name, ("save_async", 1, {}))
    numbers, step = itertools.count(1), itertools.count(1)

    def save() -> dict[str, Any]:
        made = {"do": "save", "n": next(numbers), "step": next(step), "mutate": True, "rate": 0, "spec": SPEC}
        return {**made, "event": {"kind": "step", "rank": 0}} if kill else made

    lives = [[save(), _WAIT, save(), _WAIT, save(), _WAIT]] + ([[save(), _WAIT]] if kill else [])
    return {
        "seed": 1, "number": 0, "ranks": ranks, "jobs": 1, "same_names": False, "door": door, "launcher": launcher,
        "engine": engine, "device": "cpu", "store": "file", "forbidden": {}, "disk_kind": "small", "fuse": {}, "read_back": False, "second_look": False, "trainer_death": "finish",
        "when_full": "wait", "replace": False, "one_name": False, "keep_last": 0, "disk": 0, "lives": lives,
        "kill_recover": None, "corruptions": [], **given,
    }  # fmt: skip


class Run:
    """The outcome of a script: its steps, the injections that were made, and the problems."""

    def __init__(self, problems: list[Problem], injector: Injector, counts: collections.Counter[str]) -> None:
        self.problems = problems
        self.steps = dict(injector.steps)
        self.fired = list(injector.fired)
        self.counts = counts


class Bench:
    """Runs scripts in a directory.

    Args:
        directory: on the file system that is tried.
        plant: as of `trainer.serve`.
    """

    def __init__(self, directory: str, plant: str = "") -> None:
        self.directory = os.path.join(directory, f"steps-{os.getpid()}")
        self._plant = plant
        self._templates: dict[str, judge.Judge] = {}
        jobs.start_server()

    def close(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, script: str, injections: tuple[Injection, ...] = ()) -> Run:
        """Runs a script; a second time where it has come to no step, as on a busy machine the order of calls differs.

        Args:
            script: of `scripts`.
            injections: each is made once.
        """
        done = self._run(script, injections)
        return done if done.problems or done.fired or not injections else self._run(script, injections)

    def _run(self, script: str, injections: tuple[Injection, ...]) -> Run:
        name, counts = script.split("/")[0], collections.Counter[str]()
        injector = Injector("", injections, *_MARKS.get(name, _MARKS_OF_SAVES))
        body = self._file if name == "file" else self._of_template if name in _OF_TEMPLATES else self._saves
        os.makedirs(self.directory, exist_ok=True)
        try:
            problems = body(script, injector, counts)
        except Exception as error:  # nothing that a run leaves may make a look at it fail
            problems = [_problem("v", f"what is there cannot be judged: {draining.said(error)}")]
        return Run(problems, injector, counts)

    def _saves(self, script: str, injector: Injector, counts: collections.Counter[str]) -> list[Problem]:
        def inject(directory: str) -> Injector:
            injector.directory = directory
            return injector

        round_ = _round(script, any(i.act == "kill" for i in injector.injections))
        done = rounds.run(round_, self.directory, self._plant, inject)
        counts.update(done.counts)
        return done.problems or _look_at_next(round_, done.outcomes, injector)

    # ---- Files.

    def _file(self, script: str, injector: Injector, _counts: collections.Counter[str]) -> list[Problem]:
        _, launcher, engine = script.split("/")
        directory = injector.directory = os.path.join(self.directory, "files")
        shutil.rmtree(directory, ignore_errors=True)
        os.mkdir(directory)
        problems = self._save_files(injector, launcher, engine)
        if injector.has_killed:  # the saves of the next process work
            problems += self._save_files(Injector(directory), launcher, engine)
        return problems

    def _save_files(self, injector: Injector, launcher: str, engine: str) -> list[Problem]:
        orphans = processes.Orphans()
        told, status = jobs.run_injected(save_files, (injector.directory, launcher, engine), injector, "trainer 0")
        problems: list[Problem] = []
        if left := orphans.wait(rounds.TIME_ORPHANS_MAX):
            problems.append(_problem("iv", f"processes that outlive their trainer: {left}"))
        allowed, failed = {1, 2, 3}, 0
        if wrong := injector.wrong_end(told is not None, status):
            problems.append(_problem("v", f"the process of the saves {wrong}"))
        for number, outcome in (told or {}).items():
            failed += bool(outcome)
            if outcome and failed > len(injector.fired):  # a kept worker may be missed by the next save
                problems.append(_problem("v", f"save {number} of a file failed without a fault: {outcome}"))
            elif outcome and not _is_clear(outcome, injector.directory):
                problems.append(_problem("v", f"save {number} of a file failed unclearly: {outcome}"))
            if not outcome:
                allowed = {n for n in allowed if n >= number}
        if said := recover(injector.directory):
            problems.append(_problem("i", f"the recovery of {injector.directory} fails: {said}"))
        return problems + _look_at_file(os.path.join(injector.directory, "state.pt"), allowed)

    # ---- Scripts on a directory that was made before.

    def _of_template(self, script: str, injector: Injector, counts: collections.Counter[str]) -> list[Problem]:
        name = script.split("/")[0]
        directory, template = os.path.join(self.directory, "run"), os.path.join(self.directory, script.replace("/", "-"))
        shutil.rmtree(directory, ignore_errors=True)
        if script not in self._templates:
            leave = self._leave_drain if name == "drain" else self._leave
            self._templates[script] = leave(script, directory)
            shutil.copytree(directory, template, symlinks=True)
        else:
            shutil.copytree(template, directory, symlinks=True)
        made = copy.deepcopy(self._templates[script])
        injector.directory = directory
        if name == "recovery":
            self._recover(made, directory, injector)
        elif name == "drain":
            draining.run(made, directory, injector)
        else:
            told, status = jobs.run_injected(read_everything, (made.round, directory, made.format), injector, "reader")
            if wrong := injector.wrong_end(told is not None, status):
                made.blame("v", f"the process of the readers {wrong}")
            for invariant, what in told or ():
                if invariant != _PASSED_OVER or injector.acts & _OF_PROCESS:
                    made.blame("iii" if invariant == _PASSED_OVER else invariant, what)
            made.look(thorough=False)
        counts.update(made.counts)
        return made.problems

    def _recover(self, made: judge.Judge, directory: str, injector: Injector) -> None:
        said, status = jobs.run_injected(recover, (directory,), injector, "recovery")
        if wrong := injector.wrong_end(said is not None, status):
            made.blame("v", f"the process of the recovery {wrong}")
        if said and not injector.fired:
            made.blame("v", f"a recovery without a fault failed: {said}")
        elif said and not _is_clear(said, directory):
            made.blame("v", f"a recovery failed unclearly: {said}")
        made.look(thorough=False)  # complete checkpoints are right, also in the middle
        made.recover()
        first = _tree(directory)
        made.recover()
        if _tree(directory) != first:
            made.blame("iv", f"a second recovery changed {directory}: {sorted(first ^ _tree(directory))}")
        made.look(thorough=True)

    def _leave_drain(self, script: str, directory: str) -> judge.Judge:
        """Makes the directory that a drain begins with, and a second directory with an earlier state of it."""
        is_dcp = script.split("/")[1] == "dcp"
        round_ = _round("dcp/spawn/pwrite" if is_dcp else "replace/spawn/pwrite", kill=True) | {"one_name": False, "keep_last": 0}
        saves = [a for life in round_["lives"] for a in life if a["do"] == "save"]
        for n, save in enumerate(saves, 1):
            del save["event"]
            save["step"] = n if is_dcp or n <= 2 else n - 1
        round_["lives"] = [[saves[0], _WAIT, saves[1], _WAIT], [saves[2], _WAIT, saves[3], _WAIT]]
        scratch = os.path.join(self.directory, "scratch")
        os.makedirs(scratch, exist_ok=True)
        made = draining.prepare(round_, directory, scratch)
        shutil.rmtree(scratch)
        return made

    def _leave(self, script: str, directory: str) -> judge.Judge:
        """Makes the checkpoints that recoveries and readers begin with, and for a recovery the remains of crashes."""
        name, variant, _ = script.split("/")
        round_ = _round("dcp/spawn/pwrite" if name == "dcp-reading" else "replace/spawn/pwrite", kill=name == "recovery")
        round_ |= {"one_name": False, "keep_last": 0} | ({"door": variant.partition("-")[0]} if name == "recovery" else {})
        crashes = _CRASHES_OF_DCP if round_["door"] == "dcp" else _CRASHES
        saves = [a for life in round_["lives"] for a in life if a["do"] == "save"]
        if name != "recovery":
            round_["lives"] = [[saves[0], _WAIT, saves[1], _WAIT]]
        else:  # step-1 is durable; saves of step-2, of step-1 again and of step-3 die with their workers
            saves[2]["step"] = 1
            saves[3]["step"] = 3
            round_["lives"] = [[saves[0], _WAIT], *([s, _WAIT] for s in saves[1:])]
        scratch = os.path.join(self.directory, "scratch")
        os.makedirs(scratch, exist_ok=True)
        made = judge.Judge(round_, directory)
        choose = random.Random(variant)
        for life, actions in enumerate(round_["lives"]):
            crash = Injection(Step(*choose.choice(crashes)), "kill-all")
            injector = Injector(directory, (crash,) if name == "recovery" and life else (), f"call {life + 1}")
            orphans = processes.Orphans()
            trainers = jobs.Life(round_, life, directory, scratch, injector=injector)
            trainers.run()
            made.hear_ends(trainers.problem, orphans.wait(rounds.TIME_ORPHANS_MAX))
            injector.close()
            made.hear(trainers.lines + [injection.line(f) for f in injector.fired], actions)
        shutil.rmtree(scratch)
        return made


# Where a worker dies together with its trainer, so that a recovery has something to do.
_CRASHES = tuple(("worker", call, n) for call, n in (
    ("pwrite64", 1), ("fsync", 1), ("renameat2", 1), ("renameat2", 2), ("renameat2", 3), ("renameat2", 4), ("fsync", 3),
    ("fsync", 4), ("fsync", 5), ("unlinkat", 1), ("unlinkat", 2),
))  # fmt: skip
_CRASHES_OF_DCP = (*_CRASHES[:2], ("worker", "renameat2", 1), *(("trainer 0", call, n) for call in ("fsync", "rename") for n in (1, 2)))


# Errors for which no checkpoint may look absent; with other errors the log names the checkpoints that are passed over.
_OF_PROCESS = {"EMFILE", "ENFILE", "ENOMEM"}
_PASSED_OVER = "passed over"


def _problem(invariant: str, what: str) -> Problem:
    return {"invariant": invariant, "what": what}


def _look_at_next(round_: dict[str, Any], outcomes: dict[int, dict[int, str]], injector: Injector) -> list[Problem]:
    """A fault, or a worker's end, fails one save at most; after a trainer's end those of the next life work."""
    durable = dict.fromkeys(range(round_["ranks"]), "durable")
    failed = [[a["n"] for a in life if a["do"] == "save" and outcomes.get(a["n"]) != durable] for life in round_["lives"]]
    if not any(failed[1:]) and (injector.has_killed or len(failed[0]) <= len(injector.fired)):
        return []
    return [_problem("v", f"{len(injector.fired)} faults and kills failed the saves {sum(failed, [])}: {outcomes}")]


def _is_clear(said: str, directory: str) -> bool:
    """Whether a message is of the package and names its file, directory or process."""
    return said.startswith("[") and any(name in said for name in (directory, "staging", "worker", "state.pt"))


def _tree(directory: str) -> set[str]:
    return {os.path.join(at, name) for at, _, names in os.walk(directory) for name in names}


# ---- Bodies of processes.


def recover(directory: str) -> str:
    """Recovers a directory; returns the message of its error."""
    try:
        judge.recover(directory)
    except BaseException as error:
        return draining.said(error)
    return ""


def _file_state(number: int) -> dict[str, Any]:
    return {"number": number, "x": torch.full((30_000,), float(number)), "y": torch.arange(number)}


def save_files(directory: str, launcher: str, engine: str) -> dict[int, str]:
    """Saves a file three times; returns the message of each error."""
    holdfast.configure(launcher=launcher, engine=engine, arena_bytes=schedule.ARENA, stale_warning=False)
    told = {}
    for number in (1, 2, 3):
        injection.mark(f"file {number}")
        told[number] = ""
        try:
            holdfast.save_file(_file_state(number), os.path.join(directory, "state.pt"), replace=True).durable.result(60)
        except BaseException as error:
            told[number] = draining.said(error)
    return told


def _look_at_file(path: str, allowed: set[int]) -> list[Problem]:
    problems = []
    try:
        found = torch.load(path, weights_only=True)
        number = int(found["number"])
        if number not in allowed:
            problems.append(_problem("i", f"{path} is that of save {number}, not one of {sorted(allowed)}"))
        expected = _file_state(number)
        if not all(torch.equal(found[key], expected[key]) for key in ("x", "y")):
            problems.append(_problem("ii", f"{path} is not what save {number} had"))
        if (verdict := holdfast.verify(path)["verdict"]) != "sound":
            problems.append(_problem("i", f"{path} is {verdict}"))
    except Exception as error:
        problems.append(_problem("i", f"{path} cannot be read: {draining.said(error)}"))
    left = [name for name in os.listdir(os.path.dirname(path)) if name != os.path.basename(path)]
    if len(left) != 1:
        problems.append(_problem("iv", f"after a recovery beside {path}: {sorted(left)}"))
    return problems


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Warnings that the package logs."""
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("holdfast")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level, logger.manager.disable
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logging.disable(before[1])


def read_everything(round_: dict[str, Any], directory: str, format_: str) -> list[tuple[str, str]]:
    """Reads a directory with two complete checkpoints in every way; each gives the saved state, or an error of the package."""
    problems: list[tuple[str, str]] = []
    expected = readers.Expected(round_)

    def attempt(what: str, read: Any) -> Any:
        try:
            return read()
        except BaseException as error:  # the framework's own is no Exception
            if not readers.is_own(error):
                problems.append(("v", f"{what} raises {draining.said(error)}"))
            return None

    names = ["step-1", "step-2"]
    for list_ in (holdfast.list_checkpoints, holdfast.find_newest):
        with _warnings() as said:
            found = attempt(list_.__name__, lambda list_=list_: list_(directory, format=format_))
        if found is None:
            continue
        given = [c["name"] for c in found] if isinstance(found, list) else [found["name"]]
        absent = [n for n in names if n not in given] if isinstance(found, list) else names[names.index(given[0]) + 1 :]
        if absent:
            announced = all(any(f"passed over {n}: " in line for line in said) for n in absent)
            problems.append((_PASSED_OVER if announced else "iii", f"{list_.__name__} gives {given}; it said {said}"))
    path = os.path.join(directory, names[-1])
    for name, reader in readers.readers_of(format_).items():
        if "torch" not in name and name != "safetensors":
            for _, different in attempt(name, lambda reader=reader: list(reader(path, expected))) or ():
                if different:
                    problems.append(("ii", f"{name}: {different}"))
    verify = holdfast.dcp.verify if format_ == "dcp" else holdfast.verify
    report = attempt("verify", lambda: verify(path))
    if report is not None and report["verdict"] not in ("sound", "unreadable"):
        problems.append(("i", f"verify says {report['verdict']} of a sound checkpoint: {report}"))
    return problems


# ---- The campaign.


def acts(step: Step, faults: bool, kills: bool) -> list[str]:
    """The faults and kills of a step."""
    found = [injection.name_of(number) for number in injection.CALLS[step.call][1]] if faults else []
    if faults and step.call in injection.SHORTENED:
        found += injection.SHORT
    return found + (["kill"] if kills else [])


def as_text(script: str, injections: tuple[Injection, ...]) -> str:
    """One run as a word: ``replace/spawn/pwrite,worker:fsync:3:EIO``."""
    return ",".join([script, *(f"{i.step.role.replace(' ', '-')}:{i.step.call}:{i.step.n}:{i.act}" for i in injections)])


def of_text(text: str) -> tuple[str, tuple[Injection, ...]]:
    """The arguments of `as_text`.

    Raises:
        ValueError: it is no such word.
    """
    script, *given = text.split(",")
    made = []
    for each in given:
        role, call, n, act = each.split(":")
        made.append(Injection(Step(role.replace("-", " "), call, int(n)), act))
    if script.split("/")[0] not in NAMES or script.count("/") != 2:
        raise ValueError(f"there is no script {script}")
    return script, tuple(made)


def _in_turns(chosen: list[str], left: dict[str, list[tuple[Injection, ...]]]) -> Iterator[tuple[str, tuple[Injection, ...]]]:
    """Some runs of each script, then some more of each, so that a campaign of any length has all."""
    for turn in itertools.count():
        runs = [(script, injections) for script in chosen for injections in left[script][turn * _TURN : (turn + 1) * _TURN]]
        if not runs:
            return
        yield from runs


def _can_both_be(first: Injection, second: Injection, several: bool) -> bool:
    """Whether a run can come to both: a killed process makes no more calls. `several`: there are workers of several ranks."""
    is_other = second.step.role != first.step.role or several and second.step.role == "worker"
    return first.step != second.step and (first.act != "kill" or is_other)


class Campaign:
    """Runs of scripts, in an order of a seed.

    Args:
        directory: on the file system that is tried.
        seed: of the order and of pairs.
        names: of scripts; empty: all.
        faults, kills: whether steps fail, and whether they kill.
        pairs: whether two things happen in each run.
        options: of the commands that it prints.
        plant: as of `trainer.serve`.
    """

    def __init__(self, directory: str, seed: int, names: tuple[str, ...] = (), faults: bool = True, kills: bool = True,
                 pairs: bool = False, options: str = "", plant: str = "") -> None:  # fmt: skip
        self.seed = seed
        self.counts: collections.Counter[str] = collections.Counter()
        self.escapes: list[dict[str, Any]] = []
        self._choose = random.Random(f"steps {seed}")
        self._bench = functools.partial(Bench, directory, plant)
        self._names, self._options = names, options
        self._faults, self._kills, self._pairs = faults, kills, pairs

    def run(self, runs_max: int | None, seconds_max: float | None, tell: Any = print, per_script: int = 0,
            scripts_max: int | None = None, at_once: int = 1) -> None:  # fmt: skip
        """Runs until all is done, or a count or a time is over.

        Args:
            runs_max, seconds_max: end after so many runs or seconds.
            tell: prints a line.
            per_script: runs of each script; 0: all.
            scripts_max: so many scripts, which the seed chooses.
            at_once: runs beside each other.

        Raises:
            OSError: the calls of a script cannot be answered here.
        """
        began, told = time.monotonic(), 0
        chosen = scripts(self._names)
        self._choose.shuffle(chosen)
        chosen = chosen[:scripts_max]
        left: dict[str, list[tuple[Injection, ...]]] = {}

        def undisturbed() -> Iterator[tuple[str, tuple[Injection, ...]]]:
            return ((script, ()) for script in chosen)

        def disturbed() -> Iterator[tuple[str, tuple[Injection, ...]]]:
            for i, (script, injections) in enumerate(itertools.islice(_in_turns(chosen, left), runs_max)):
                if i and seconds_max is not None and time.monotonic() - began > seconds_max:
                    return
                yield script, injections

        jobs.preload()
        with lanes.Lanes(at_once, self._bench) as beside:
            for (script, _), run in beside.run(undisturbed()):
                left[script] = self._runs_of(script, run, tell)[: per_script or None]
                self.counts["to run"] += len(left[script])
            for (script, injections), run in beside.run(disturbed()):
                self._count(script, injections, run, tell)
                seconds = time.monotonic() - began
                if int(seconds // 60) != told:
                    told = int(seconds // 60)
                    tell(f"{self.counts['runs']} runs of {self.counts['to run']} in {seconds:.0f} s, "
                         f"{len(self.escapes)} escapes")  # fmt: skip

    def _runs_of(self, script: str, run: Run, tell: Any) -> list[tuple[Injection, ...]]:
        """The runs of a script that ran undisturbed, in an order of the seed."""
        self._blame(script, (), run, tell)
        if not run.steps:
            raise OSError(f"{script} has no step: no call of its processes was seen")
        self.counts["scripts"] += 1
        self.counts["steps"] += len(run.steps)
        of = [Injection(step, act) for step in run.steps for act in acts(step, self._faults, self._kills)]
        random.Random(f"steps {self.seed} {script}").shuffle(of)
        if not self._pairs:
            return [(i,) for i in of]
        order = list(run.steps)
        several = _SAVES.get(script.split("/")[0], ("", 1))[1] > 1
        return [
            (a, b) for a, b in itertools.pairwise(of)
            if (_can_both_be(a, b, several) if order.index(a.step) <= order.index(b.step) else _can_both_be(b, a, several))
        ]  # fmt: skip

    def replay(self, text: str, repeat: int, tell: Any = print) -> None:
        """Runs one run again.

        Args:
            text: of `as_text`.
            repeat: how often.
            tell: prints a line.
        """
        script, injections = of_text(text)
        self.counts["to run"] = repeat
        bench = self._bench()
        try:
            with processes.adopting():
                for _ in range(repeat):
                    self._count(script, injections, bench.run(script, injections), tell)
        finally:
            bench.close()

    def _count(self, script: str, injections: tuple[Injection, ...], run: Run, tell: Any) -> None:
        self.counts["runs" if len(run.fired) == len(injections) else "not reached"] += 1
        self.counts["fired"] += len(run.fired)
        self.counts[f"runs {script.split('/')[0]}"] += 1
        for fired in run.fired:
            step, act = fired["step"], fired["act"]
            self.counts["kills" if act == "kill" else "short results" if act in injection.SHORT else "errors"] += 1
            self.counts[f"call {step.call}"] += 1
            if (launcher := script.split("/")[1]) in schedule.LAUNCHERS:
                self.counts[f"launcher {launcher}"] += 1
        for key, count in run.counts.items():
            if key.startswith("code ") or key in ("durable", "failed", "refused", "reads", "verifications"):
                self.counts[key] += count
        self._blame(script, injections, run, tell)

    def _blame(self, script: str, injections: tuple[Injection, ...], run: Run, tell: Any) -> None:
        for problem in run.problems:
            of = "; ".join(f"{f['act']} at {f['step']} ({f['of']})" for f in run.fired) or "no fault"
            command = f"integrity-fuzz{self._options} --replay {as_text(script, injections)}"
            self.escapes.append({**problem, "script": script, "fault": of, "command": command})
            tell(f"ESCAPE in {script}, {of}: ({problem['invariant']}) {problem['what']}\nreproduce: {command}")

    def as_json(self) -> dict[str, Any]:
        """Everything that the report says."""
        return {"program": "integrity-fuzz", "seed": self.seed, "counts": dict(sorted(self.counts.items())),
                "escapes": self.escapes}  # fmt: skip

    def summary(self) -> str:
        """The report as text."""
        counts = self.counts
        lines = [
            f"{counts['runs']} runs of {counts['to run']}, and {counts['not reached']} that did not come to each step; "
            f"{counts['scripts']} scripts with {counts['steps']} steps",
            f"made: {counts['errors']} errors, {counts['short results']} short results, {counts['kills']} kills",
            f"saves: {counts['durable']} durable, {counts['failed'] + counts['refused']} failed; "
            f"{counts['reads']} reads compared, {counts['verifications']} verifications",
        ]
        for prefix in ("runs", "launcher", "call", "code"):
            of = [f"{k.removeprefix(prefix + ' ')} {n}" for k, n in sorted(counts.items()) if k.startswith(prefix + " ")]
            lines.append(f"{prefix}: " + ", ".join(of))
        return "\n".join([*lines, f"escapes: {len(self.escapes)}"])
