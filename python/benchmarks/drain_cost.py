"""What a drain costs the trainer, and its rate beside the library's own bare copy.

    python drain_cost.py --dir DIR [--target URL_OR_DIR] [--bytes 1GiB] [--saves 4] [--rounds 3] [--window SECONDS]
                         [--rate BYTES] [--verify HOW] [--json FILE]

Without `--target` a server that speaks S3 runs beside it (moto, in Python: it takes a core of its own and its rate is no store's).

lost    Windows of equal steps with `--saves` saves each: without a drain and with one, in turn. Every window begins when the drain
        has nothing to do, and the drain works while it lasts. What a window is longer than the one beside it, for each save, is the
        trainer's lost time. On a machine whose speed changes, many short windows show it best; a drain must end within one.
rate    A checkpoint's files copied by `obstore.put`, one call each, from a path; then the same checkpoint drained anew. The drain
        reads, compares every digest, sends, proves and commits. In a directory the library syncs nothing, and the drain does:
        there the copy is also timed until its files are synced. Medians of the rounds, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from raw_disk import sync_tree
from trainer_cost import Trainer, parse_bytes

import holdfast
from holdfast.drain import Drain
from holdfast.drain.following import Following
from holdfast.drain.places import open_place, scheme_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/python"))


_STEPS_SECONDS = 1.0  # of steps that are counted, for the length of a window
_WINDOW_SECONDS_MIN = 5.0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--target", default="")
    parser.add_argument("--bytes", type=parse_bytes, default=parse_bytes("1GiB"))
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=0.0, help="seconds of a window (default: what the saves take to drain)")
    parser.add_argument("--rate", type=float, default=None)
    parser.add_argument("--verify", default="auto")
    parser.add_argument("--json", default="")
    return parser.parse_args()


@contextlib.contextmanager
def target_of(arguments: argparse.Namespace) -> Any:
    """URL and options of the second place."""
    if arguments.target:
        yield arguments.target, {}
        return
    import s3_server

    with s3_server.serving() as server:
        yield f"s3://{s3_server.BUCKET}/run", server.storage(server.direct)


def window(trainer: Trainer, steps: int, checkpointer: Any, saves: int, first: int) -> float:
    """Seconds of so many steps, with the saves evenly among them."""
    begin = time.perf_counter()
    for step in range(steps):
        if step * saves // steps != (step - 1) * saves // steps or step == 0:
            checkpointer.save_async(trainer.state(), first + step)
        trainer.step()
    took = time.perf_counter() - begin
    checkpointer.wait()
    return took


def lost(arguments: argparse.Namespace, url: str, storage: dict[str, Any]) -> dict[str, Any]:
    trainer = Trainer(arguments.bytes)
    options = Drain(keep_last=1, bytes_per_second=arguments.rate, verify=arguments.verify, storage=storage)
    run = os.path.join(arguments.dir, "run")
    ways = {
        "without": holdfast.Checkpointer(os.path.join(arguments.dir, "alone"), keep_last=1),
        "with": holdfast.Checkpointer(run, keep_last=1, drain_to=f"{url}/lost", drain=options),
    }
    begin = time.perf_counter()
    ways["with"].save(trainer.state(), 0)
    ways["with"].wait_drained()
    drained = time.perf_counter() - begin
    ways["without"].save(trainer.state(), 0)
    trainer.step()
    begin, count = time.perf_counter(), 0
    while count < 3 or time.perf_counter() - begin < _STEPS_SECONDS:
        trainer.step()
        count += 1
    seconds = arguments.window or max(drained * arguments.saves, _WINDOW_SECONDS_MIN)
    steps = max(arguments.saves, int(seconds * count / (time.perf_counter() - begin)))
    took: dict[str, list[float]] = {"without": [], "with": []}
    longer = 0  # drains than their windows
    for number in range(arguments.rounds):
        for name in sorted(took, reverse=bool(number % 2)):
            took[name].append(window(trainer, steps, ways[name], arguments.saves, 1 + number * steps))
            longer += name == "with" and ways[name].drain_report["pending"] > 0
            ways[name].wait_drained()
    report = ways["with"].drain_report
    for checkpointer in ways.values():
        checkpointer.close()
    window_seconds = statistics.median(took["without"])
    each = sorted((drained - alone) / arguments.saves for alone, drained in zip(took["without"], took["with"], strict=True))
    of_save = statistics.median(each)
    return {
        "steps": steps, "seconds": took, "window": window_seconds, "lost_each": each, "lost_of_save": of_save,
        "longer": longer, "lost": of_save * arguments.saves / window_seconds, "drain": report,
    }  # fmt: skip


def rate(arguments: argparse.Namespace, url: str, storage: dict[str, Any]) -> dict[str, Any]:
    import obstore

    run = Path(arguments.dir) / "one"
    with holdfast.Checkpointer(run) as checkpointer:
        checkpointer.save(Trainer(arguments.bytes).state(), 1)
    place = open_place(str(run))
    (info,) = place.complete()[0]
    bare: list[float] = []
    synced: list[float] = []
    drained: list[float] = []
    for number in range(arguments.rounds):
        for name in ("bare", "drained") if number % 2 else ("drained", "bare"):
            os.sync()  # what the one before has left to write
            begin = time.perf_counter()
            if name == "drained":
                target = open_place(f"{url}/rate-{number}", storage)
                Following(place, target, Drain(bytes_per_second=arguments.rate, verify=arguments.verify), lambda event: None).sweep()
                drained.append(time.perf_counter() - begin)
                continue
            if scheme_of(url):
                there: Any = obstore.store.from_url(f"{url}/bare-{number}", **storage, client_options={"allow_http": True})
            else:
                there = obstore.store.LocalStore(f"{url}/bare-{number}", mkdir=True)
            for file in sorted((run / info.slot).iterdir()):
                obstore.put(there, file.name, file)
            bare.append(time.perf_counter() - begin)
            if not scheme_of(url):
                sync_tree(f"{url}/bare-{number}")
            synced.append(time.perf_counter() - begin)
    took = statistics.median(drained)
    return {
        "bytes": info.bytes, "bare_seconds": bare, "synced_seconds": synced, "drained_seconds": drained,
        "ratio": statistics.median(bare) / took, "ratio_synced": statistics.median(synced) / took,
    }  # fmt: skip


def main() -> None:
    arguments = parsed()
    for name in ("one", "run", "alone"):  # of an earlier run
        shutil.rmtree(os.path.join(arguments.dir, name), ignore_errors=True)
    with target_of(arguments) as (url, storage):
        result = {"rate": rate(arguments, url, storage), "lost": lost(arguments, url, storage)}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=2))
    of_rate, of_lost = result["rate"], result["lost"]
    rates = {k: of_rate["bytes"] / statistics.median(of_rate[f"{k}_seconds"]) / 2**20 for k in ("bare", "synced", "drained")}
    print(f"rate: drain {rates['drained']:.0f} MiB/s; bare copy {rates['bare']:.0f} MiB/s: {of_rate['ratio']:.2f}; "
          f"the same synced {rates['synced']:.0f} MiB/s: {of_rate['ratio_synced']:.2f}")  # fmt: skip
    each = of_lost["lost_each"]
    print(f"lost: {of_lost['lost_of_save']:.2f} s for each save, median of {len(each)}; half of them between "
          f"{each[len(each) // 4]:.2f} and {each[-1 - len(each) // 4]:.2f} s; "
          f"{100 * of_lost['lost']:.1f} % of windows of {of_lost['window']:.1f} s with {arguments.saves} saves each; "
          f"drains longer than their window: {of_lost['longer']}")  # fmt: skip


if __name__ == "__main__":
    main()
