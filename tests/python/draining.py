"""Runs and sweeps for the tests of drains."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.drain import Drain
from holdfast.drain.following import Following
from holdfast.drain.places import Place

MIB = 1 << 20
ELEMENTS = 3 * MIB  # of each checkpoint's large tensor: several chunks of 4 MiB
PLAIN = Drain()


def save(run: Path, *steps: int, elements: int = ELEMENTS, **options: Any) -> None:
    """Saves checkpoints of random values with their step."""
    with holdfast.Checkpointer(run, arena_bytes=16 * MIB, **options) as checkpointer:
        for step in steps:
            state = {"w": torch.randn(elements), "step": torch.tensor(step)}
            checkpointer.save(state, step)


def swept(source: Place, target: Place, options: Drain = PLAIN, **further: Any) -> list[dict[str, Any]]:
    """One sweep; returns its events, or raises what it could not send or remove."""
    events: list[dict[str, Any]] = []
    if (refused := Following(source, target, options, events.append, **further).sweep()) is not None:
        raise refused
    return [e for e in events if e["event"] != "progress"]


def names(place: Place) -> list[str]:
    return [c.name for c in place.complete()[0]]


def verdicts(path: Path) -> list[str]:
    return [holdfast.verify(path / n)["verdict"] for n in sorted(os.listdir(path)) if "." not in n]


def in_child(work: Callable[[], None], uid: int | None = None) -> int:
    """Runs `work` in a forked child, as another user where one is given; returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            if uid is not None:
                os.setgid(uid)
                os.setuid(uid)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def bound(disk: Path, at: Path) -> Iterator[None]:
    """Mounts a file system a second time, so that it outlives the end of this mount."""
    subprocess.run(["mount", "--bind", disk, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits until a condition holds; whether it does."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()
