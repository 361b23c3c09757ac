"""The trainer of the kill campaign: trains, saves every few steps, and tells its phases on stdout.

A line is "PHASE STEP": load, loaded, train, save (in the call), called, durable or failed; "saved" and "restored" with
a digest of the whole state; "worker PID". The last line is "final DIGEST" of parameters and optimizer state.

With --hold PHASE:SKIP:SHARE it stops inside of that phase, once it has passed SKIP of them, when about SHARE of the
phase is over: "held PHASE" is told only when it is proven that the phase goes on, and then nothing more happens until
somebody kills. Where the worker does the phase, the worker is what stops.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "python" / "examples"))

import gpt
import torch

import holdfast
from holdfast import handle

KEEP = 2
_lock = threading.Lock()


def tell(phase: str, step: int | str) -> None:
    with _lock:
        os.write(1, f"{phase} {step}\n".encode())


WORKERS = {"writing": ("writing",), "commit": ("syncing", "manifest", "waiting for ranks", "committing")}


class Hold:
    """Stops at a place that `--hold` names."""

    def __init__(self, argument: str) -> None:
        self.phase, skip, share = (argument or "none:0:0").split(":")
        self._skip = int(skip)
        self._share = float(share)
        self._passed: set[int] = set()
        self._calling = False
        self._into_call = 0.02  # seconds
        if self.phase in WORKERS:
            threading.Thread(target=self._watch, daemon=True).start()

    def _mine(self, number: int) -> bool:
        """Whether this save's (or load's) turn has come."""
        self._passed.add(number)
        return len(self._passed) > self._skip

    def _stop(self) -> None:
        tell("held", self.phase)
        # To this very thread: it must not tell another line while others are being stopped.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def load(self) -> None:
        if self.phase == "load":
            threading.Timer(0.15 * self._share, self._stop).start()

    @contextlib.contextmanager
    def staging(self, number: int) -> Iterator[None]:
        """Around the call that saves: what it copies is not all staged before it returns."""
        if self.phase != "staging" or not self._mine(number):
            yield
            return
        self._calling = True
        timer = threading.Timer(self._into_call * self._share, self._stop_in_call)
        timer.start()
        yield
        self._calling = False
        timer.cancel()
        self._into_call /= 2  # it was over before: sooner in the next one

    def _stop_in_call(self) -> None:
        if self._calling:
            self._stop()

    def finalize(self, number: int) -> None:
        """Called when all data is durable and the checkpoint is not complete, or its end not told."""
        if self.phase == "finalize" and self._mine(number):
            self._stop()

    def _watch(self) -> None:
        told = set()
        while True:
            saves = [s for s in handle.in_flight() if isinstance(s, handle.Save) and s._native]
            for save in saves:
                with contextlib.suppress(holdfast.Error):
                    pid = save._native.worker_pid
                    if pid and pid not in told:
                        told.add(pid)
                        tell("worker", pid)
                    self._look(save, pid)
            time.sleep(0.0005)

    def _look(self, save: handle.Save, pid: int) -> None:
        now = save.progress()
        total = max(now["bytes_total"], 1)
        if not pid or now["phase"] not in WORKERS[self.phase]:
            return
        if self.phase == "writing" and now["bytes_written"] / total < self._share:
            return
        if not self._mine(save._native.epoch):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.002)
            if save.progress()["phase"] in WORKERS[self.phase]:
                tell("held", self.phase)
                time.sleep(600)
            os.kill(pid, signal.SIGCONT)  # it was over already: the next one


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


def train_plain(arguments: argparse.Namespace, hold: Hold) -> None:
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
            hold.load()
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
            now = state(step)
            with hold.staging(step):
                save = holdfast.save_async(now, os.path.join(arguments.dir, f"step-{step}"),
                                           step=step, keep_last=KEEP)
            tell("called", step)

            def ended(future: Any, step: int = step) -> None:
                hold.finalize(step)
                tell("failed" if future.exception() else "durable", step)

            save.durable.add_done_callback(ended)
    holdfast.flush()
    tell("final", digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))


class Sharded:
    """A GPT that all ranks have a part of, by FSDP2, its optimizer and its batches."""

    def __init__(self, size: gpt.Size) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.model = gpt.GPT(size)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = gpt.Loader(size, rank=self.rank)
        torch.manual_seed(1 + self.rank)

    def state(self, **options: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        weights, moments = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return {"model": weights, "optimizer": moments}

    def set_state(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])  # fmt: skip

    def whole_digest(self) -> str:
        """On rank 0, and the same for any number of ranks."""
        return digest(self.state(full_state_dict=True, cpu_offload=True))

    def train_step(self) -> None:
        gpt.train_step(self.model, self.optimizer, self.loader)

    def end(self) -> None:
        import torch.distributed as dist

        tell("final", digest(self.state()))
        dist.destroy_process_group()


def hold_commits(hold: Hold) -> None:
    """Stops, when its turn has come, between the data of a DCP checkpoint and its `.metadata`."""
    from holdfast.dcp import metadata

    commit = metadata.commit

    def held_commit(directory: Path, *rest: Any) -> None:
        hold.finalize(int(directory.name.removeprefix("step-")))
        commit(directory, *rest)

    metadata.commit = held_commit


def complete(directory: str, last: str) -> list[Path]:
    """The steps' directories that hold `last`, the newest at the end."""
    found = [p.parent for p in Path(directory).glob(f"step-*/{last}")]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def train_dcp(arguments: argparse.Namespace, hold: Hold) -> None:
    import torch.distributed.checkpoint as dcp

    import holdfast.dcp

    hold_commits(hold)
    job = Sharded(gpt.SIZES[arguments.size])
    rank = job.rank

    def state(step: int) -> dict[str, Any]:
        return {**job.state(), "step": torch.tensor(step), f"rng.{rank}": torch.get_rng_state()}

    first = 0
    if arguments.every and (found := complete(arguments.dir, ".metadata")):
        tell("load", int(found[-1].name.removeprefix("step-")))
        hold.load()
        loaded = state(0)
        saved = pickle.loads((found[-1] / ".metadata").read_bytes()).state_dict_metadata
        if f"rng.{rank}" not in saved:  # there were fewer ranks
            del loaded[f"rng.{rank}"]
        dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(found[-1]))
        job.set_state(loaded)
        if f"rng.{rank}" in loaded:
            torch.set_rng_state(loaded[f"rng.{rank}"])
        if arguments.digests:
            tell("restored", job.whole_digest())
        first = job.loader.step = int(loaded["step"])
    tell("loaded", first)
    future = None
    for step in range(first + 1, arguments.steps + 1):
        job.train_step()
        tell("train", step)
        if arguments.every and step % arguments.every == 0:
            if future is not None:
                future.result()
            if arguments.digests:
                tell("saved", f"{step} {job.whole_digest()}")
            tell("save", step)
            now = state(step)
            with hold.staging(step):
                future = holdfast.dcp.async_save(
                    now, checkpoint_id=os.path.join(arguments.dir, f"step-{step}"))
            tell("called", step)
            future.add_done_callback(
                lambda f, step=step: tell("failed" if f.exception() else "durable", step))
    if future is not None:
        future.result()
    job.end()


def run(ways: dict[str, Callable[[argparse.Namespace, Hold], None]]) -> None:
    """Trains in one of the ways, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=ways, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True, help="0: straight through, no saves")
    parser.add_argument("--size", choices=gpt.SIZES, required=True)
    parser.add_argument("--hold", default="", metavar="PHASE:SKIP:SHARE")
    parser.add_argument("--digests", action="store_true", help="tell the whole state's digests")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    ways[arguments.way](arguments, Hold(arguments.hold))


if __name__ == "__main__":
    run({"plain": train_plain, "dcp": train_dcp})
