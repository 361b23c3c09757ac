"""What `holdfast.save_file` costs beside `torch.save`: `python save_file_cost.py --dir DIR`.

Each round saves one state with each, over the file of the round before, and writes as many bytes raw (O_DIRECT and fsync).
`call`: seconds per GiB until the call returns. `durable`: until the file survives power loss (for `torch.save` with an fsync
behind it), and its ratio to the raw write of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import raw_disk
import torch
from raw_disk import sync_file
from trainer_cost import parse_bytes

import holdfast

GIB = 1 << 30


def of_torch(state: dict[str, Any], path: str) -> tuple[float, float]:
    begin = time.perf_counter()
    torch.save(state, path)
    call = time.perf_counter() - begin
    sync_file(path)
    return call, time.perf_counter() - begin


def of_holdfast(state: dict[str, Any], path: str) -> tuple[float, float]:
    begin = time.perf_counter()
    save = holdfast.save_file(state, path)
    call = time.perf_counter() - begin
    save.wait()
    return call, time.perf_counter() - begin


WAYS: dict[str, Callable[[dict[str, Any], str], tuple[float, float]]] = {
    "torch.save": of_torch,
    "holdfast.save_file": of_holdfast,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    directory = os.path.join(arguments.dir, f"files-{os.getpid()}")
    os.makedirs(directory)
    each = arguments.bytes // arguments.tensors // 4
    state = {f"layer.{i}.weight": torch.randn(each) for i in range(arguments.tensors)}
    gib = arguments.tensors * each * 4 / GIB
    rows: list[dict[str, Any]] = []
    try:
        for round_ in range(arguments.rounds + 1):
            raw = raw_disk.write(directory, arguments.bytes)
            for name, way in WAYS.items():
                call, durable = way(state, os.path.join(directory, name + ".pt"))
                if round_:  # the first one warms up
                    rows.append({"way": name, "call": call / gib, "durable": durable / gib, "of_raw": durable / raw})
        path = os.path.join(directory, "holdfast.save_file.pt")
        loaded = torch.load(path, mmap=True, weights_only=True)
        sound = all(torch.equal(loaded[key], value) for key, value in state.items())
        if not sound or holdfast.verify(path)["verdict"] != "sound":
            sys.exit("the file is not what was saved")
    finally:
        shutil.rmtree(directory)
    print(f"{gib:.2f} GiB in {arguments.tensors} tensors, {arguments.rounds} rounds: median (least to most)")
    for name in WAYS:
        cells = []
        for key, unit in (("call", "s/GiB"), ("durable", "s/GiB"), ("of_raw", "of raw")):
            values = sorted(row[key] for row in rows if row["way"] == name)
            cells.append(f"{key} {statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f}) {unit}")
        print(f"{name}: " + "; ".join(cells))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
