"""Trainings in processes of their own, of one or several gloo ranks, which tests may kill."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Processes are forked by a server that has imported this, and used nothing of it.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload([
    "lightning.pytorch",
    "holdfast.lightning.checkpoint_io",
    "holdfast.lightning.strategies",
    "torch._dynamo",  # what DTensor imports at its first use
    "torch.distributed.fsdp",
])  # fmt: skip
LIMIT = 180.0


def _run(
    rank: int, environment: dict[str, str], failure: Path, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(environment, LOCAL_RANK=str(rank), HOLDFAST_ARENA_BYTES=str(64 << 20))
    try:
        body(*args)
    except BaseException:
        failure.write_text(traceback.format_exc())
        raise


class Job:
    """A training of some ranks: ``body(*args)`` in each."""

    def __init__(self, scratch: Path, body: Callable[..., Any], *args: Any, ranks: int = 1) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        self._failures = [scratch / f"failure-{rank}" for rank in range(ranks)]
        self._processes = [
            _context.Process(target=_run, args=(rank, environment, failure, body, args))
            for rank, failure in enumerate(self._failures)
        ]
        for process in self._processes:
            process.start()

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def end(self) -> str:
        """Waits for all ranks; returns the tracebacks of those that have failed."""
        deadline = time.monotonic() + LIMIT
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.is_alive() for process in self._processes):
            self.kill()
            raise AssertionError(f"the job did not end within {LIMIT:.0f} s")
        return "\n".join(failure.read_text() for failure in self._failures if failure.exists())

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Waits until something is so, while the job runs."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, "it did not come to pass"
            assert self.is_alive() or condition(), self.end()
            time.sleep(0.002)


def run(scratch: Path, body: Callable[..., Any], *args: Any, ranks: int = 1) -> None:
    """Runs a job that must end well."""
    failed = Job(scratch, body, *args, ranks=ranks).end()
    assert not failed, failed
