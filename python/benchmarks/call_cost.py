"""What a save costs in the call by the number of tensors: `python call_cost.py --dir DIR`.

Of each state three ways take turns in one process: `holdfast.save_async`, `torch.save`, and
`dcp.async_save`. A figure is the median of the rounds, its least in brackets. Of Holdfast it is the time of the call
without the copies (`time_blocked` - `time_copying`), and of that the CPU time of the calling thread; of the others the time
of the call. The structure stays, values change.

    --tensors 300,2000,10000,50000   numbers of tensors, of 4 KiB each
    --numbers 1000000                length of a list of ints and of one of floats, in the call and at load; 0: none
    --load 20000                     number of tensors that are loaded; 0: none
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import holdfast

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)


def state_of(tensors: int) -> dict[str, Any]:
    model = {f"layers.{i // 10}.block{i % 10}.weight": torch.ones(1024) for i in range(tensors)}
    return {"model": model, "step": 0}


def timed(call: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    begin = time.perf_counter()
    result = call(*arguments, **named)
    return time.perf_counter() - begin, result


def text_of(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:9.2f} ({min(seconds) * 1e3:.2f})"


def save_calls(directory: Path, tensors: int, rounds: int) -> None:
    state = state_of(tensors)
    figures: dict[str, list[float]] = {"holdfast": [], "CPU": [], "runtime": [], "torch.save": [], "dcp.async_save": []}
    for number in range(rounds + 1):
        state["step"] = number
        state["model"]["layers.0.block0.weight"] += 1
        path = directory / f"s-{number}"
        gc.collect()
        begin = time.thread_time()
        save = holdfast.save_async(state, path, step=number)
        thread = time.thread_time() - begin
        report = save.wait(300)
        holdfast.flush()
        shutil.rmtree(path)
        gc.collect()
        file, _ = timed(torch.save, state, directory / "t.pt")
        os.remove(directory / "t.pt")
        gc.collect()
        stock, response = timed(dcp.async_save, state, checkpoint_id=directory / "d")
        response.result()
        shutil.rmtree(directory / "d")
        if number == 0:  # takes memory, walks the structure
            continue
        figures["holdfast"].append(report["time_blocked"] - report["time_copying"])
        figures["CPU"].append(thread)
        figures["runtime"].append(report["time_in_call"] - report["time_copying"])
        figures["torch.save"].append(file)
        figures["dcp.async_save"].append(stock)
    print(f"{tensors:8} tensors: " + ", ".join(f"{k} {text_of(v)}" for k, v in figures.items()) + " ms", flush=True)


def both(state: Any, directory: Path, rounds: int, what: str) -> None:
    """A call and a load of a state, beside torch's."""
    figures: dict[str, list[float]] = {"call": [], "torch.save": [], "load": [], "torch.load": []}
    for number in range(rounds):
        path = directory / f"n-{number}"
        gc.collect()
        call, save = timed(holdfast.save_async, state, path, step=number)
        save.wait(300)
        figures["call"].append(call)
        figures["torch.save"].append(timed(torch.save, state, directory / "t.pt")[0])
        gc.collect()
        figures["load"].append(timed(holdfast.load, path)[0])
        gc.collect()
        figures["torch.load"].append(timed(torch.load, directory / "t.pt")[0])
        shutil.rmtree(path)
    print(f"{what}: " + ", ".join(f"{k} {text_of(v)}" for k, v in figures.items()) + " ms", flush=True)


def load_calls(directory: Path, tensors: int, rounds: int) -> None:
    """Loads into new tensors and into those that are there. Opening alone reads the description."""
    state = state_of(tensors)
    holdfast.save_async(state, directory / "l", step=1).wait(300)
    figures: dict[str, list[float]] = {"new": [], "new, CPU": [], "in place": [], "in place, CPU": [], "reading": []}
    for _ in range(rounds):
        for name, into in (("new", None), ("in place", state)):
            gc.collect()
            begin = time.thread_time()
            seconds, _ = timed(holdfast.load, directory / "l", into=into)
            figures[f"{name}, CPU"].append(time.thread_time() - begin)
            figures[name].append(seconds)
        checkpoint = holdfast.open(directory / "l")
        checkpoint.into(state)
        figures["reading"].append(checkpoint.report["seconds"])
    print(f"{tensors} tensors loaded: " + ", ".join(f"{k} {text_of(v)}" for k, v in figures.items()) + " ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--tensors", default="300,2000,10000,50000")
    parser.add_argument("--numbers", type=int, default=1_000_000)
    parser.add_argument("--load", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    holdfast.configure(arena_bytes=512 << 20, stale_warning=False)
    for tensors in map(int, filter(None, given.tensors.split(","))):
        save_calls(given.dir, tensors, given.rounds)
    if given.numbers:
        both({"order": list(range(given.numbers))}, given.dir, given.rounds, f"{given.numbers} ints")
        floats = [0.1 * i for i in range(given.numbers)]
        both({"losses": floats}, given.dir, given.rounds, f"{given.numbers} floats")
    if given.load:
        load_calls(given.dir, given.load, given.rounds)


if __name__ == "__main__":
    main()
