"""Kills a training job again and again, and proves that what it resumes from is exact.

    python resume_campaign.py --way plain|dcp --dir DIR [--kills 20] [--seed 1] [--steps 36] [--size 272MiB]

A run straight through is the reference. The same run with asynchronous saves is SIGKILLed as a whole, in a phase whose
turn it is and at a point of it that the seed chooses: in the call (staging), while the worker writes or commits, between
that and the end that the trainer tells (finalize; in DCP: all data durable, `.metadata` not written), while loading, or
between saves. The job stops there until it is killed, so that a kill is where it says. In half of the kills the
workers, which survive their trainer by design, are killed with it; else they go on when it is dead.
Printed for each kill: phase, newest complete step, step resumed, steps lost. The parameters and the optimizer state at
the end must be bitwise those of the reference.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import select
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from programs import Program

import holdfast

LONG = bool(os.environ.get("HOLDFAST_LONG"))
STEPS = 160 if LONG else 16
SIZE = "272MiB" if LONG else "64MiB"
EVERY = 4
# Phases of the kills, in turn.
IN_SAVES = ("staging", "writing", "commit", "finalize")
ORDER = ("commit", "writing", "finalize", "load", "staging", "commit", "writing", "training", "staging", "finalize")
LIMIT = 180.0  # seconds in which nothing is told
MISSED_MAX = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """How the jobs of a campaign train and save.

    Attributes:
        name: of the trainer's function.
        newest: the newest complete step in a directory, 0 if there is none.
        ranks: processes of a job.
        first: phase of the first kill, as an index of ORDER. A few kills of all ways have most phases.
        trainer: the program.
    """

    name: str
    newest: Callable[[str], int]
    ranks: int = 1
    first: int = 0
    trainer: Path = Path(__file__).with_name("resume_trainer.py")


def newest_with(name: str) -> Callable[[str], int]:
    """Finds the newest step whose directory holds `name`, which is written last."""

    def newest(directory: str) -> int:
        found = Path(directory).glob(f"step-*/{name}")
        return max((int(p.parent.name.removeprefix("step-")) for p in found), default=0)

    return newest


def _newest_plain(directory: str) -> int:
    return max((c["step"] for c in holdfast.list_checkpoints(directory)), default=0)


PLAIN = Way("plain", _newest_plain)
DCP = Way("dcp", newest_with(".metadata"), ranks=2, first=4)
WAYS = {way.name: way for way in (PLAIN, DCP)}


class Job:
    """One run of the trainer: one process for each rank, in a session of its own.

    Rank 0 stops inside of the phase that `hold` names: PHASE:SKIP:SHARE.
    """

    def __init__(self, way: Way, directory: str, steps: int, every: int, size: str, hold: str = "",
                 ranks: int = 0, digests: bool = False) -> None:
        ranks = ranks or way.ranks
        self._buffers: dict[int, bytes] = {}
        self.workers: set[int] = set()
        self.lines: list[tuple[int, str, str]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = [
            Program(
                [str(way.trainer), "--way", way.name, "--dir", directory, "--steps",
                 str(steps), "--every", str(every), "--size", size,
                 "--hold", hold if rank == 0 else "", *(["--digests"] if digests else [])],
                new_session=True,
                stderr=False,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]

    def next_lines(self, timeout: float) -> list[tuple[int, str, str]]:
        """(rank, phase, value) of what was told since; empty after `timeout`, or at the end."""
        pipes = {p.stdout.fileno(): r for r, p in enumerate(self.processes)}
        for closed in [fd for fd in pipes if self._buffers.get(fd) is None and fd in self._buffers]:
            del pipes[closed]
        if not pipes:
            return []
        found = []
        for fd in select.select(list(pipes), [], [], timeout)[0]:
            data = os.read(fd, 65536)
            if not data:
                self._buffers[fd] = None  # type: ignore[assignment]
                continue
            *lines, rest = (self._buffers.get(fd, b"") + data).split(b"\n")
            self._buffers[fd] = rest
            for line in lines:
                phase, _, value = line.decode().partition(" ")
                if phase == "worker":
                    self.workers.add(int(value))
                found.append((pipes[fd], phase, value))
        self.lines += found
        return found

    def ended(self) -> bool:
        return all(p.poll() is not None for p in self.processes)

    def run_until(self, phase: str, skip: int = 0) -> bool:
        """Whether rank 0 told `phase`, for the `skip`-th time after the first, before it ended."""
        deadline = time.monotonic() + LIMIT
        while True:
            told = [p for r, p, _ in self.lines if r == 0]
            assert "failed" not in told, f"a save failed: {self.lines[-5:]}"
            if told.count(phase) > skip:
                return True
            if "final" in told:
                return False
            assert time.monotonic() < deadline, f"nothing is told any more; last {self.lines[-5:]}"
            if self.next_lines(1.0):
                deadline = time.monotonic() + LIMIT
            else:
                assert not self.ended(), f"the job ended; it told {self.lines[-5:]}"

    def kill(self, with_workers: bool) -> None:
        pids = [p.pid for p in self.processes]
        # The trainers first: one whose worker dies would still tell that its save has failed.
        for pid in pids + (list(self.workers) if with_workers else []):
            self._signal(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        for pid in self.workers:  # one that was stopped
            self._signal(pid, signal.SIGCONT)
        # What was told before the end and not read yet says where it really ended.
        while self.next_lines(0):
            pass
        for process in self.processes:
            process.stdout.close()

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            # A worker's number may belong to somebody else by now.
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[0]
            if pid not in self.workers or command == "holdfast-worker":
                os.kill(pid, number)

    def inside(self) -> str:
        """Whether the end came inside of a "save" or a "load", by what rank 0 told, or of neither: ""."""
        told = [(p, v) for r, p, v in self.lines if r == 0]
        # A save may begin before the one before it is durable.
        if {v for p, v in told if p == "save"} - {v for p, v in told if p in ("durable", "failed")}:
            return "save"
        loads = [p for p, _ in told if p in ("load", "loaded")]
        return "load" if "load" in loads[-1:] else ""

    def run_to_end(self) -> list[str]:
        """Digests of all ranks at the end."""
        deadline = time.monotonic() + LIMIT
        while len(digests := {r: v for r, p, v in self.lines if p == "final"}) < len(self.processes):
            lines = self.next_lines(1.0)
            if lines:
                deadline = time.monotonic() + LIMIT
            elif time.monotonic() > deadline or self.ended():
                self.kill(True)
                raise AssertionError(f"the job did not reach its end; it told {self.lines[-5:]}")
        for process in self.processes:
            assert process.wait(LIMIT) == 0, f"the trainer ended with {process.returncode}"
            process.stdout.close()
        return [digests[r] for r in sorted(digests)]


def campaign(way: Way, directory: str, kills: int, seed: int, steps: int, size: str) -> list[dict[str, Any]]:
    """Runs it; returns one row for each kill.

    Raises:
        AssertionError: what was resumed is not exact.
    """
    choose = random.Random(seed)
    reference = Job(way, directory, steps, 0, size).run_to_end()
    rows: list[dict[str, Any]] = []
    committed = 0  # the newest step that was told durable, or seen complete
    missed = 0
    while len(rows) < kills:
        phase = ORDER[(way.first + len(rows)) % len(ORDER)]
        # The first job commits once before it is killed: the others must find something to resume from.
        skip = choose.randrange(2) if committed else 1
        job = Job(way, directory, steps, EVERY, size, f"{phase}:{skip}:{choose.random():.2f}")
        with_workers = choose.random() < 0.5
        job.run_until("loaded" if phase != "load" else "load")
        resumed = next(int(v) for _, p, v in job.lines if p in ("loaded", "load"))
        if rows and "resumed" not in rows[-1]:
            rows[-1] |= {"resumed": resumed, "lost": max(0, rows[-1]["trained"] - resumed)}
            report(way, len(rows), rows[-1])
        assert resumed >= committed, f"step {committed} was durable, the job resumed from {resumed}"
        assert resumed % EVERY == 0
        if job.run_until("held" if phase != "training" else "train", skip if phase == "training" else 0):
            trained = max((int(v) for _, p, v in job.lines if p in ("train", "load")), default=0)
            job.kill(with_workers)
            committed = max(committed, way.newest(directory),
                            *(int(v) for _, p, v in job.lines if p == "durable"), resumed)
            rows.append({"phase": phase, "inside": job.inside(), "workers_too": with_workers,
                         "trained": trained, "committed": committed})
            missed = 0
        else:  # it reached its end first: begin anew
            missed += 1
            assert missed < MISSED_MAX, f"{missed} jobs in a row ended before they were held in {phase}"
            assert job.run_to_end() == reference, "the run that was not killed ended differently"
            shutil.rmtree(directory)
            os.mkdir(directory)
            committed = 0
    job = Job(way, directory, steps, EVERY, size)
    job.run_until("loaded")
    resumed = next(int(v) for _, p, v in job.lines if p == "loaded")
    assert resumed >= committed, f"step {committed} was durable, the job resumed from {resumed}"
    rows[-1] |= {"resumed": resumed, "lost": max(0, rows[-1]["trained"] - resumed)}
    report(way, kills, rows[-1])
    final = job.run_to_end()
    assert final == reference, "parameters or optimizer state differ from the run straight through"
    inside = [row["inside"] for row in rows]
    print(f"{way.name}: {kills} kills, {inside.count('save')} of them inside of a save, {inside.count('load')} of a load; "
          f"final state bitwise equal to the run straight through", flush=True)
    return rows


def check(rows: list[dict[str, Any]]) -> None:
    """What every campaign's rows must show.

    Raises:
        AssertionError: the kills were not where they should have been.
    """
    # Every kill in a phase of a save was inside of one, and the order of phases has enough of these.
    of_saves = [row["inside"] for row in rows if row["phase"] in IN_SAVES]
    assert of_saves == ["save"] * len(of_saves)
    assert len(of_saves) >= 0.6 * len(rows)
    assert all(row["inside"] == "load" for row in rows if row["phase"] == "load")
    # The first job commits before it is killed: no job begins anew.
    assert all(row["resumed"] for row in rows)


def report(way: Way, number: int, row: dict[str, Any]) -> None:
    print(f"{way.name} kill {number}: in {row['phase']}{', workers too' if row['workers_too'] else ''}, "
          f"trained to step {row['trained']}, newest complete step {row['committed']}, "
          f"resumed from step {row['resumed']}, {row['lost']} steps lost", flush=True)


def chain(way: Way, directory: str, ranks: tuple[int, ...], size: str) -> None:
    """The job is killed inside of a save and goes on with another number of ranks, again and again.

    Raises:
        AssertionError: a state that was loaded differs from the state that was saved, in any bit.
    """
    saved: dict[int, str] = {}
    for count in ranks:
        job = Job(way, directory, 100, 2, size, "finalize:1:0", count, digests=True)
        assert job.run_until("held")
        job.kill(True)
        restored = {value for r, phase, value in job.lines if (r, phase) == (0, "restored")}
        if saved:
            step = next(int(v) for _, p, v in job.lines if p == "loaded")
            assert restored == {saved[step]}, f"{count} ranks loaded step {step}, and not as it was saved"
            print(f"{way.name}: {count} ranks loaded step {step}, bitwise as it was saved", flush=True)
        saved |= {int(v.split()[0]): v.split()[1] for r, p, v in job.lines if (r, p) == (0, "saved")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--size", default="272MiB")
    arguments = parser.parse_args()
    os.makedirs(arguments.dir, exist_ok=True)
    campaign(WAYS[arguments.way], arguments.dir, arguments.kills, arguments.seed, arguments.steps, arguments.size)


if __name__ == "__main__":
    main()
