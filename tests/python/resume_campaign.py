"""Kills a training job again and again, and proves that what it resumes from is exact.

    python resume_campaign.py --way plain|dcp --dir DIR [--kills 20] [--seed 1] [--steps 36] [--size 272MiB]

A run straight through is the reference. The same run with asynchronous saves is SIGKILLed as a whole, at a phase
that the seed chooses: in the call (staging), while the worker writes, syncs or commits, right after the commit, while
loading, or between saves. In half of the kills the workers, which survive their trainer by design, are killed with it.
Printed for each kill: phase, newest complete step, step resumed, steps lost. The parameters and the optimizer state at
the end must be bitwise those of the reference.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import holdfast

TRAINER = Path(__file__).with_name("resume_trainer.py")
EVERY = 4
RANKS = {"plain": 1, "dcp": 2}
# Phase of a kill: the line of the trainer that it waits for, and the longest delay after it in seconds.
PHASES: dict[str, tuple[tuple[str, ...], float]] = {
    "staging": (("save",), 0.06),
    "writing": (("writing", "called"), 0.1),
    "commit": (("syncing", "manifest", "waiting-for-ranks", "committing"), 0.004),
    "finalize": (("manifest", "waiting-for-ranks", "done"), 0.03),
    "load": (("load",), 0.15),
    "training": (("train",), 0.05),
}
# Eight of nine kills are inside of a save or a load.
ORDER = ("commit", "writing", "load", "staging", "finalize", "commit", "training", "writing", "staging")
LIMIT = 180.0


class Job:
    """One run of the trainer: one process for each rank, in a session of its own."""

    def __init__(self, way: str, directory: str, steps: int, every: int, size: str) -> None:
        ranks = RANKS[way]
        self._buffers: dict[int, bytes] = {}
        self.workers: set[int] = set()
        self.lines: list[tuple[int, str, str]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(TRAINER), "--way", way, "--dir", directory, "--steps",
                 str(steps), "--every", str(every), "--size", size],
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]

    def next_lines(self, timeout: float) -> list[tuple[int, str, str]]:
        """(rank, phase, value) of what was told since; empty after `timeout`, or at the end."""
        pipes = {p.stdout.fileno(): r for r, p in enumerate(self.processes) if p.stdout}
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

    def kill(self, with_workers: bool) -> None:
        if with_workers:
            for pid in self.workers - {0}:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    # A number may belong to somebody else by now.
                    if "holdfast" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                        os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        # What was told before the end and not read yet says where it really ended.
        while self.next_lines(0):
            pass
        for process in self.processes:
            if process.stdout:
                process.stdout.close()

    def inside(self) -> bool:
        """Whether the end came inside of a save or a load, by the last that every rank told."""
        for rank in range(len(self.processes)):
            called = [p for r, p, _ in self.lines if r == rank and p in ("save", "durable", "failed")]
            loading = [p for r, p, _ in self.lines if r == rank and p in ("load", "loaded")]
            if (called and called[-1] == "save") or (loading and loading[-1] == "load"):
                return True
        return False

    def run_to_end(self) -> list[str]:
        """Digests of all ranks at the end."""
        deadline = time.monotonic() + LIMIT
        digests: dict[int, str] = {}
        while len(digests) < len(self.processes):
            lines = self.next_lines(1.0)
            digests.update({rank: value for rank, phase, value in lines if phase == "final"})
            if time.monotonic() > deadline or (self.ended() and not lines):
                self.kill(True)
                raise AssertionError(f"the job did not reach its end; it told {self.lines[-5:]}")
        for process in self.processes:
            assert process.wait(LIMIT) == 0, f"the trainer ended with {process.returncode}"
            if process.stdout:
                process.stdout.close()
        return [digests[r] for r in sorted(digests)]


def newest(way: str, directory: str) -> int:
    """The newest complete step, 0 if there is none."""
    if way == "dcp":
        return max((int(p.parent.name.removeprefix("step-"))
                    for p in Path(directory).glob("step-*/.metadata")), default=0)
    return max((c["step"] for c in holdfast.list_checkpoints(directory)), default=0)


def resumed_step(job: Job) -> int | None:
    """The first step that the job began from, once all its ranks told it."""
    told = {int(value) for _, phase, value in job.lines if phase == "loaded"}
    assert len(told) <= 1, f"ranks resumed from different steps: {told}"
    return told.pop() if told else None


def campaign(way: str, directory: str, kills: int, seed: int, steps: int, size: str) -> list[dict[str, Any]]:
    """Runs it; returns one row for each kill.

    Raises:
        AssertionError: what was resumed is not exact.
    """
    choose = random.Random(seed)
    reference = Job(way, directory, steps, 0, size).run_to_end()
    rows: list[dict[str, Any]] = []
    committed = 0  # the newest step that was told durable, or seen complete
    job = Job(way, directory, steps, EVERY, size)
    seen = 0
    while len(rows) < kills:
        phase = ORDER[len(rows) % len(ORDER)]
        waits_for, longest = PHASES[phase]
        delay = choose.uniform(0, longest)
        skip = choose.randrange(3) if phase != "load" else 0
        with_workers = choose.random() < 0.5
        killed = None
        deadline = time.monotonic() + LIMIT
        while killed is None and not job.ended():
            assert time.monotonic() < deadline, f"nothing is told any more; last {job.lines[-5:]}"
            job.next_lines(1.0)
            for _, told, value in job.lines[seen:]:
                seen += 1
                if told == "durable":
                    committed = max(committed, int(value))
                if told == "loaded" and int(value) > 0:
                    committed = max(committed, int(value))
                assert told != "failed", f"a save failed: {job.lines[-5:]}"
                # Only the first kill may come before anything was committed: the others must find
                # something to resume from.
                if told in waits_for and killed is None and (committed or not rows):
                    skip -= 1
                    if skip < 0:
                        killed = told
        if killed is None:  # it reached its end first: begin anew, with what is there
            assert job.run_to_end() == reference, "the run that was not killed ended differently"
            shutil.rmtree(directory)
            os.mkdir(directory)
            job, seen, committed = Job(way, directory, steps, EVERY, size), 0, 0
            continue
        time.sleep(delay)
        trained = max((int(v) for _, p, v in job.lines if p in ("train", "load")), default=0)
        job.kill(with_workers)
        inside = job.inside()
        for _, told, value in job.lines:
            if told == "durable":
                committed = max(committed, int(value))
        committed = max(committed, newest(way, directory))
        job = Job(way, directory, steps, EVERY, size)
        seen = 0
        while (step := resumed_step(job)) is None:
            assert not job.ended(), "the resumed job ended before it had loaded"
            job.next_lines(1.0)
            # A kill inside of a load is the next row's, if that is its phase.
            if ORDER[(len(rows) + 1) % len(ORDER)] == "load" and committed and len(rows) + 1 < kills:
                if any(p == "load" for _, p, _ in job.lines):
                    step = int(next(v for _, p, v in job.lines if p == "load"))
                    break
        row = {"phase": phase, "inside": inside, "at": killed, "workers_too": with_workers, "trained": trained,
               "resumed": step, "lost": max(0, trained - step)}
        rows.append(row)
        print(f"{way} kill {len(rows)}: in {phase} ({killed}{', workers too' if with_workers else ''}), "
              f"trained to step {trained}, newest complete step {committed}, "
              f"resumed from step {step}, {row['lost']} steps lost", flush=True)
        assert step >= committed, f"step {committed} was durable, the job resumed from {step}"
        assert step % EVERY == 0
        committed = max(committed, step)
    final = job.run_to_end()
    assert final == reference, "parameters or optimizer state differ from the run straight through"
    print(f"{way}: {kills} kills, {sum(r['inside'] for r in rows)} of them inside of a save or a load; "
          f"final state bitwise equal to the run straight through", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=RANKS, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--size", default="272MiB")
    arguments = parser.parse_args()
    os.makedirs(arguments.dir, exist_ok=True)
    campaign(arguments.way, arguments.dir, arguments.kills, arguments.seed, arguments.steps, arguments.size)


if __name__ == "__main__":
    main()
