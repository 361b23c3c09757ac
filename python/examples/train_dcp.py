"""Trains a sharded GPT with PyTorch Distributed Checkpoint, saved through ``holdfast.dcp``.

    torchrun --nproc-per-node 2 train_dcp.py --dir run-dcp [--steps 40] [--every 10] [--size tiny]

Started again, also with another number of ranks, it goes on where it was. The files are DCP's own.
"""

from __future__ import annotations

import argparse
from typing import Any

import gpt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
import holdfast.dcp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--size", choices=gpt.SIZES, default="tiny")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = gpt.GPT(gpt.SIZES[arguments.size])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = gpt.Average(model)  # sharded as the model is
    loader = gpt.Loader(gpt.SIZES[arguments.size], rank=rank)
    torch.manual_seed(1 + rank)  # dropout differs by rank

    def state(step: int) -> dict[str, Any]:
        """All that a run needs to go on. EMA weights and the loader are ordinary entries."""
        weights, moments = get_state_dict(model, optimizer)
        return {
            "model": weights,
            "optimizer": moments,
            "ema": average,
            "step": torch.tensor(step),
            # Of this rank alone.
            f"loader.{rank}": loader,
            f"rng.{rank}": torch.get_rng_state(),
        }

    checkpointer = holdfast.Checkpointer(arguments.dir, format="dcp", keep_last=2)
    first = 0
    if last := checkpointer.newest():
        loaded = state(0)
        saved = holdfast.dcp.StorageReader(last["path"]).read_metadata().state_dict_metadata
        if f"rng.{rank}" not in saved:  # more ranks than saved it
            del loaded[f"rng.{rank}"], loaded[f"loader.{rank}"]
        checkpointer.load(last["step"], into=loaded)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"],
                       optim_state_dict=loaded["optimizer"])
        if f"rng.{rank}" in loaded:
            torch.set_rng_state(loaded[f"rng.{rank}"])
        first = loader.step = int(loaded["step"])  # every rank's loader, new ones too
        if rank == 0:
            print(f"resumed from {last['path']}")

    save = None
    for step in range(first + 1, arguments.steps + 1):
        loss = gpt.train_step(model, optimizer, loader)
        average.update(model)
        if step % arguments.every == 0:
            if save is not None:
                save.wait()  # raises on every rank what went wrong on any
            save = checkpointer.save_async(state(step), step)
            if rank == 0:
                print(f"step {step}: loss {loss:.3f}")
    checkpointer.close()
    if rank == 0:
        print(f"done: {[c['name'] for c in checkpointer.list()]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
