"""How much memory a load takes beside the tensors, and how fast it is: `python load_memory.py --dir DIR`.

Loads a state into existing tensors in a fresh process and compares its peak resident memory with that before the load;
the rate is compared with a raw O_DIRECT read of the same file, side by side. With `--bench PROGRAM` (holdfast-bench, from the
C++ build) the raw rate is the better one of that and of the program's own raw read of as many bytes in the same round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import raw_disk
import resident_memory
from trainer_cost import parse_bytes

TENSORS = 64


def child(path: str, nbytes: int) -> None:
    """One load, in a process of its own."""
    import torch

    import holdfast
    import holdfast.loading

    state = {
        f"t{i}": torch.zeros(nbytes // TENSORS // 4) for i in range(TENSORS)
    }
    for tensor in state.values():
        tensor.fill_(1)  # resident before the baseline
    gc.collect()
    memory = resident_memory.Since()
    begin = time.perf_counter()
    holdfast.load(path, into=state)
    seconds = time.perf_counter() - begin
    peak = memory.peak()
    gc.collect()
    print(json.dumps({"seconds": seconds, "peak": peak, "retained": memory.now()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--bytes", type=parse_bytes, default=2 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bench", metavar="PROGRAM", help="holdfast-bench, for its raw read")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.bytes)
        return

    import torch

    import holdfast

    path = os.path.join(arguments.dir, f"load-{os.getpid()}")
    state = {f"t{i}": torch.randn(arguments.bytes // TENSORS // 4) for i in range(TENSORS)}
    holdfast.save_async(state, path).wait()
    del state
    file = next(Path(path).glob("*.safetensors"))
    rows = []
    for _ in range(arguments.rounds):
        raw = raw_disk.read(str(file))
        if arguments.bench:
            raw = min(raw, raw_disk.by_program(arguments.bench, "read", arguments.dir, arguments.bytes))
        answer = subprocess.run(
            [sys.executable, __file__, "--dir", arguments.dir, "--bytes", str(arguments.bytes),
             "--child", path],
            check=True, capture_output=True, text=True,
        )
        rows.append({**json.loads(answer.stdout), "raw": raw})
    shutil.rmtree(path)
    print(json.dumps({
        "bytes": arguments.bytes,
        "load.ratio_to_raw": statistics.median(r["raw"] / r["seconds"] for r in rows),
        "load.peak_bytes": max(r["peak"] for r in rows),
        "load.retained_bytes": max(r["retained"] for r in rows),
        "load.seconds": statistics.median(r["seconds"] for r in rows),
        "raw.seconds": statistics.median(r["raw"] for r in rows),
    }, indent=1))


if __name__ == "__main__":
    main()
