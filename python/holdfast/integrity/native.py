"""A trainer that is a C++ program, seen from the driver: it saves through the C++ interface, without Python or PyTorch.

Rounds of the door "plan" run in it. It starts in some milliseconds, so that rounds are many.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import glob
import json
import os
import random
import signal
import subprocess
from collections.abc import Collection
from typing import Any

from holdfast import _dtypes, _names, _programs
from holdfast.integrity import injection, megatron, processes, schedule, states, trainer

PROGRAM = "holdfast-trainer"


def why_not() -> str:
    """Why there is no such trainer here; "" where there is one."""
    path = _programs.program(PROGRAM)
    return "" if os.access(path, os.X_OK) else f"there is no {path}: wheels have none, a build from the sources does"


def missing() -> dict[str, str]:
    """Why rounds cannot have some of the doors here; "" where they can."""
    return {schedule.PLAN: why_not(), schedule.MEGATRON: megatron.why_not()}


def doors() -> tuple[str, ...]:
    """The doors that rounds can have here."""
    return tuple(door for door in schedule.DOORS if not missing().get(door))


@functools.cache
def _pool() -> str:
    """Path of a file with the words of all states."""
    fd = os.memfd_create("holdfast-integrity-states")
    os.write(fd, states.pool_bytes())
    return f"/proc/{os.getpid()}/fd/{fd}"


def _recipes(seed: int, number: int, rank: int, spec: dict[str, Any]) -> list[list[Any]]:
    """What the program makes the tensors of a save of: `tools/trainer/state.h`."""
    return [[name, _dtypes.file_name(made.dtype), made.shape, made.nbytes, made.at, made.key]
            for name, made in states.flat(states.recipes(seed, number, rank, spec)).items()]  # fmt: skip


def _attempt(round_: dict[str, Any], number: int, job: int) -> list[int]:
    """The id of a save, on which ranks without a process group agree through the driver."""
    choose = random.Random(f"attempt {round_['seed']}:{round_['number']}:{job}:{number}")
    return [choose.getrandbits(64), choose.getrandbits(64)]


def line_of(task: trainer.Task, rank: int) -> bytes:
    """A task as the program reads it: `tools/trainer/task.h`."""
    round_, job = task.round, task.job
    actions = []
    for action in round_["lives"][task.life]:
        given = {k: v for k, v in action.items() if k != "spec"}
        if action["do"] == "save":
            given |= {"n": action["n"] + job * schedule.SAVES_OF_JOB, "name": schedule.name_of(round_, action, job),
                      "attempt": _attempt(round_, action["n"], job), "files": round_["files"]}  # fmt: skip
            if "event" in action and action["event"]["rank"] != rank:
                del given["event"]
        actions.append(given)
    saves = schedule.saves_of(round_)
    if not any(action["do"] == "load" for action in actions):
        saves = {a["n"]: saves[a["n"]] for a in actions if a["do"] == "save"}
    return _line(task, rank, actions, [], saves)


def _line(task: trainer.Task, rank: int, actions: list[dict[str, Any]], dead: list[dict[str, Any]],
          saves: dict[int, dict[str, Any]]) -> bytes:  # fmt: skip
    round_, job = task.round, task.job
    options = trainer.options_of(round_, round_["lives"][task.life])
    return json.dumps({
        "job": job, "replace": round_["replace"], "device": round_["number"] if round_["device"] == "stand-in" else None,
        "actions": actions, "dead": dead, "spoil": False, "pool": _pool(),
        "log": os.path.join(task.scratch, f"trainer-{job}-{rank}.log"),
        "second": task.second, "mount": os.path.dirname(task.directory),
        "options": {**options, "directory": task.directory, "worker_program": _programs.program("holdfast-worker"),
                    "when_full": round_["when_full"], "keep_last": round_["keep_last"],
                    "rank": rank, "world_size": round_["ranks"]},
        "outcome_seconds_max": trainer.TIME_OUTCOME_MAX, "settle_seconds_max": trainer.TIME_SETTLE_MAX,
        "hung_seconds": trainer.TIME_HUNG * 3,
        "states": {n: _recipes(round_["seed"], n, rank, a["spec"]) for n, a in saves.items()},
    }).encode() + b"\n"  # fmt: skip


class Member:
    """The program's process. As `jobs.Member`.

    Args:
        rank: of the job.
        forbidden: as of `injection.forbid`.
    """

    channel = None

    def __init__(self, rank: int, forbidden: dict[str, str]) -> None:
        self._rank = rank
        self.process = subprocess.Popen(
            [_programs.program(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            preexec_fn=functools.partial(injection.forbid, forbidden) if forbidden else None,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.out = self.process.stdout
        processes.own.add(self.process.pid)
        self.out.readline()  # it has begun, and rests
        self.buffer = bytearray()
        self.rests = False
        self._before = processes.held(in_group=False, pid=self.process.pid)

    def give(self, task: trainer.Task) -> None:
        """Begins a life."""
        assert self.process.stdin is not None
        self.process.stdin.write(line_of(task, self._rank))
        self.process.stdin.flush()

    def left(self) -> dict[str, int]:
        """What the process, which rests, holds more than at its start."""
        return processes.left(self._before, trainer.TIME_SETTLE_MAX, in_group=False, pid=self.process.pid)

    def send(self, number: signal.Signals) -> None:
        processes.send(self.process.pid, number)

    def dismiss(self, fine: Collection[int] = (0,)) -> str:
        """As `jobs.Member.dismiss`."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended before its task
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(trainer.TIME_END_MAX)
        problem = processes.wrong_end(self.process.pid, self.process.returncode, fine)
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        self.out.close()
        processes.own.discard(self.process.pid)
        return problem


class DeadFiles:
    """Files of saves whose trainers have died, held open while orphans and recoveries remove their directories.

    Args:
        task: the life that has ended; its `job` does not matter.
    """

    def __init__(self, task: trainer.Task) -> None:
        round_ = task.round
        self._task = task
        self._held: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._fds: list[int] = []
        saves = {}
        for number in schedule.saves_of(round_):
            job, of_job = divmod(number, schedule.SAVES_OF_JOB)
            attempt = _attempt(round_, of_job, job)
            saves["{:016x}{:016x}".format(*attempt)] = job, {"n": number, "files": round_["files"], "attempt": attempt}
        for path in glob.iglob(os.path.join(f"{glob.escape(task.directory)}*", _names.partial("*", "*"))):
            attempt_text = os.path.basename(path).rpartition("-")[2]
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # an orphan has removed or named it
                self._hold(path, attempt_text, *saves[attempt_text])

    def _hold(self, path: str, attempt_text: str, job: int, file: dict[str, Any]) -> None:
        """Opens a save's files. The directory first: an orphan may exchange it for the one that it replaces."""
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._fds.append(directory)
        names = os.listdir(directory)
        for name in fnmatch.filter(names, f"*{_names.MANIFEST_END}"):
            with open(f"/proc/self/fd/{directory}/{name}", encoding="utf-8") as manifest:
                if attempt_text not in manifest.read():  # it was exchanged
                    return
        for name in fnmatch.filter(names, "model-*"):
            with contextlib.suppress(FileNotFoundError):
                self._fds.append(os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=directory))
                final = _names.finished(name)
                held = self._held.setdefault((job, int(final.split("-")[1])), [])
                held.append({**file, "name": final, "path": f"/proc/{os.getpid()}/fd/{self._fds[-1]}"})

    def look(self) -> list[dict[str, Any]]:
        """What the program tells of them, once their transfers have ended. Closes them."""
        told: list[dict[str, Any]] = []
        actions = schedule.saves_of(self._task.round)
        for (job, rank), files in self._held.items():
            member = Member(rank, {})
            assert member.process.stdin is not None
            task = self._task._replace(job=job)
            member.process.stdin.write(_line(task, rank, [], files, {f["n"]: actions[f["n"]] for f in files}))
            member.process.stdin.close()
            told += [json.loads(line) for line in member.out]
            if problem := member.dismiss():
                told.append({"event": "wrong", "rank": rank, "job": job, "what": f"files of dead workers: {problem}"})
        self.close()
        return [line for line in told if line["event"] != "rest"]

    def close(self) -> None:
        """Closes them."""
        while self._fds:
            os.close(self._fds.pop())
