"""Trains a GPT and saves it with ``holdfast.save_async``; started again, it goes on where it was.

    python train_plain.py --dir run [--steps 40] [--every 10] [--size tiny]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gpt
import torch

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--size", choices=gpt.SIZES, default="tiny")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = gpt.GPT(gpt.SIZES[arguments.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = gpt.Average(model)
    loader = gpt.Loader(gpt.SIZES[arguments.size])

    def state(step: int) -> dict[str, Any]:
        """All that a run needs to go on. EMA weights and the loader are ordinary entries."""
        return {
            "model": model,
            "optimizer": optimizer,
            "ema": average,
            "loader": loader,
            "rng": torch.get_rng_state(),
            "step": step,
        }

    checkpointer = holdfast.Checkpointer(arguments.dir, keep_last=2, replace=True)
    # After a crash: what was complete gets its name, what was not goes. Harmless otherwise.
    checkpointer.recover()
    first = 0
    if last := checkpointer.newest():
        loaded = checkpointer.load(into=state(0))
        torch.set_rng_state(loaded["rng"])
        first = loaded["step"]
        print(f"resumed from {last['path']}")

    for step in range(first + 1, arguments.steps + 1):
        loss = gpt.train_step(model, optimizer, loader)
        average.update(model)
        if step % arguments.every == 0:
            begin = time.perf_counter()
            checkpointer.save_async(state(step), step)
            print(f"step {step}: loss {loss:.3f}, {1e3 * (time.perf_counter() - begin):.1f} ms in the save")
    checkpointer.close()  # raises what went wrong with any save
    print(f"done: {[c['name'] for c in checkpointer.list()]}")


if __name__ == "__main__":
    main()
