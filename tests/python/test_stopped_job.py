"""A job that is stopped as a whole, as by ``docker pause`` or a scheduler, and goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from dcp_ranks import run_ranks
from draining import until

import holdfast

LIVENESS = 6.0  # seconds
STOP = 12.0


def _children(pid: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
        except OSError:  # it has ended
            continue
    return found


def _save(rank: int, directory: str) -> str:
    state = {"w": torch.full((8 << 20,), float(rank))}
    with holdfast.Checkpointer(f"{directory}/run", time_liveness_max=LIVENESS, bytes_per_second_max=4 << 20) as checkpointer:
        save = checkpointer.save_async(state, 1)
        (Path(directory) / f"pid-{rank}").write_text(str(os.getpid()))
        report: dict[str, Any] = save.durable.result(60)
    return str(report["engine"])


def test_the_saves_of_a_job_that_was_stopped_go_on(tmp_path: Path) -> None:
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    stopped: list[str] = []

    def stop() -> None:
        assert until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        time.sleep(0.5)
        trainers = [int(pid.read_text()) for pid in pids]
        workers = [child for trainer in trainers for child in _children(trainer)]
        for pid in [*trainers, *workers]:
            os.kill(pid, signal.SIGSTOP)
        stopped.extend(name for name in os.listdir(tmp_path / "run") if ".partial-" in name and len(workers) == 2)
        time.sleep(STOP)
        for pid in workers:  # first: each looks for the other rank before a trainer can give a sign of life
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
        for pid in trainers:
            os.kill(pid, signal.SIGCONT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        run_ranks(2, tmp_path, _save, str(tmp_path))
    finally:
        stopping.join()
    assert stopped  # during the save
    assert holdfast.verify(tmp_path / "run/step-1")["verdict"] == "sound"
