"""The trainer of the kill campaign: trains, saves every few steps, and tells its phases on stdout.

A line is "PHASE STEP": load, loaded, train, save (in the call), called, the save's own phases as the
worker goes through them, durable. The last line is "final DIGEST" of parameters and optimizer state.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "examples"))

import gpt  # noqa: E402
import torch  # noqa: E402

import holdfast  # noqa: E402
from holdfast import saving  # noqa: E402

KEEP = 2
_lock = threading.Lock()


def tell(phase: str, step: int | str) -> None:
    with _lock:
        os.write(1, f"{phase} {step}\n".encode())


def watch_phases() -> None:
    """Tells every new phase of the save in flight, and its worker."""
    last = None
    while True:
        with saving._lock:
            saves = [s for s in saving._in_flight if isinstance(s, saving.Save)]
        for save in saves:
            try:
                now = (save.progress()["phase"], save._native.epoch)
            except holdfast.Error:
                continue
            if now != last:
                last = now
                tell("worker", save._native.worker_pid)
                tell(now[0].replace(" ", "-"), save._native.epoch)
        time.sleep(0.0005)


def digest(tensors: dict[str, Any]) -> str:
    """Of every bit of parameters and optimizer state."""
    found = hashlib.sha256()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value).detach().contiguous()
            found.update(str((local.dtype, tuple(local.shape))).encode())
            found.update(memoryview(local.reshape(-1).view(torch.uint8).numpy()))
        elif isinstance(value, dict):
            for key, item in value.items():
                found.update(str(key).encode())
                visit(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        else:
            found.update(repr(value).encode())

    visit(tensors)
    return found.hexdigest()


def train_plain(arguments: argparse.Namespace) -> None:
    size = gpt.SIZES[arguments.size]
    torch.manual_seed(0)
    model = gpt.GPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = gpt.Loader(size)

    def state(step: int) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizer, "loader": loader,
                "rng": torch.get_rng_state(), "step": step}

    first = 0
    if arguments.every:
        holdfast.recover(arguments.dir)
        if complete := holdfast.list_checkpoints(arguments.dir):
            tell("load", complete[-1]["step"])
            loaded = holdfast.load(complete[-1]["path"], into=state(0))
            if not os.environ.get("HOLDFAST_TEST_FORGET_RNG"):  # a planted bug
                torch.set_rng_state(loaded["rng"])
            first = loaded["step"]
    tell("loaded", first)
    for step in range(first + 1, arguments.steps + 1):
        gpt.train_step(model, optimizer, loader)
        tell("train", step)
        if arguments.every and step % arguments.every == 0:
            tell("save", step)
            save = holdfast.save_async(state(step), os.path.join(arguments.dir, f"step-{step}"),
                                       step=step, keep_last=KEEP)
            tell("called", step)
            save.durable.add_done_callback(
                lambda f, step=step: tell("failed" if f.exception() else "durable", step)
            )
    holdfast.flush()
    tell("final", digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))


def train_dcp(arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import holdfast.dcp

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    size = gpt.SIZES[arguments.size]
    torch.manual_seed(0)
    model = gpt.GPT(size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = gpt.Loader(size, rank=rank)
    torch.manual_seed(1 + rank)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": torch.tensor(step),
                f"rng.{rank}": torch.get_rng_state()}

    def complete() -> list[Path]:
        found = [p.parent for p in Path(arguments.dir).glob("step-*/.metadata")]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))

    first = 0
    if arguments.every and (found := complete()):
        tell("load", int(found[-1].name.removeprefix("step-")))
        loaded = state(0)
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(found[-1]))
        set_state_dict(model, optimizer, model_state_dict=loaded["model"],
                       optim_state_dict=loaded["optimizer"])
        torch.set_rng_state(loaded[f"rng.{rank}"])
        first = loader.step = int(loaded["step"])
    tell("loaded", first)
    future = None
    for step in range(first + 1, arguments.steps + 1):
        gpt.train_step(model, optimizer, loader)
        tell("train", step)
        if arguments.every and step % arguments.every == 0:
            if future is not None:
                future.result()
            tell("save", step)
            future = holdfast.dcp.async_save(
                state(step), checkpoint_id=os.path.join(arguments.dir, f"step-{step}"))
            tell("called", step)
            future.add_done_callback(
                lambda f, step=step: tell("failed" if f.exception() else "durable", step))
    if future is not None:
        future.result()
    weights, moments = get_state_dict(model, optimizer)
    tell("final", digest({"model": weights, "optimizer": moments}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("plain", "dcp"), required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="0: straight through, no saves")
    parser.add_argument("--size", choices=gpt.SIZES, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    threading.Thread(target=watch_phases, daemon=True).start()
    (train_plain if arguments.way == "plain" else train_dcp)(arguments)


if __name__ == "__main__":
    main()
