"""Ways of saving through Megatron-Core and through Lightning: the frameworks' own and Holdfast's."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from raw_disk import sync_tree
from trainer_cost import Trainer, Way, load_torch

import holdfast
from holdfast import _runtime
from holdfast._packages import is_installed

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.005  # seconds between two looks at a queue
LATE_MAX = 60.0  # seconds that a request's function waits to be let go


def prepare_process() -> None:
    """Lets Megatron's own callers run where there is no GPU."""
    if not torch.cuda.is_available():
        sys.path.append(str(ROOT / "tests/frameworks"))
        importlib.import_module("no_gpu.cpu_for_gpu").without_gpu()


# ---- Megatron-Core.


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The tensors as Megatron's ranks describe theirs; here one rank has all."""
    from megatron.core.dist_checkpointing import ShardedTensor

    return {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}


def load_megatron(tensors: dict[str, Any], path: str) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import load

    found = load(sharded({k: torch.empty_like(t) for k, t in tensors.items()}), path)
    return {name: found[name] for name in tensors}


def late(flag: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Runs a request's function when a file is there."""
    deadline = time.monotonic() + LATE_MAX
    while not os.path.exists(flag) and time.monotonic() < deadline:
        time.sleep(POLL)
    fn(*args, **kwargs)


def made_late(request: Any, flag: str) -> Any:
    """A request whose function waits for a file."""
    return request._replace(async_fn=functools.partial(late, flag, request.async_fn))


def held_worker() -> int:
    """Starts a worker of Holdfast that is kept, and stops it. Its pid."""
    import psutil

    holdfast.configure(launcher="persistent")
    holdfast.warm_up()
    (worker,) = psutil.Process().children()
    os.kill(worker.pid, signal.SIGSTOP)
    return worker.pid


class Caller:
    """An asynchronous caller: its queue, and what it saves with.

    Args:
        make_queue: called when the way's turn begins.
        make_strategy: likewise; Megatron keeps one for a training.
        dialect: name of the asynchronous strategy.
    """

    def __init__(self, make_queue: Callable[[], Any], make_strategy: Callable[[], Any], dialect: str) -> None:
        self._make = make_queue, make_strategy
        self.dialect = dialect

    def begin(self) -> None:
        self.queue, self.strategy = (make() for make in self._make)

    def save(self, tensors: dict[str, torch.Tensor], path: str,
             change: Callable[[Any], Any] = lambda request: request) -> Callable[[], None]:  # fmt: skip
        """Saves and schedules, as a training does.

        Args:
            tensors: of the state.
            path: of the checkpoint.
            change: gives the request that is scheduled.

        Returns:
            What waits until the checkpoint is durable.
        """
        from megatron.core.dist_checkpointing import save

        os.makedirs(path, exist_ok=True)  # another rank may have made it
        request = save(sharded(tensors), path, self.strategy, async_sharded_save=True, async_strategy=self.dialect)
        self.queue.schedule_async_request(change(request))
        return lambda: self._wait(path)

    def save_at_once(self, tensors: dict[str, torch.Tensor], path: str) -> None:
        """Saves with the same strategy, without a queue."""
        from megatron.core.dist_checkpointing import save

        os.makedirs(path, exist_ok=True)
        save(sharded(tensors), path, self.strategy)

    def _wait(self, path: str) -> None:
        while self.queue.get_num_unfinalized_calls():
            self.queue.maybe_finalize_async_calls()
            time.sleep(POLL)
        sync_tree(path)

    def end(self) -> None:
        self.queue.close()


def _stock_strategy() -> Any:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    return TorchDistSaveShardedStrategy()


def _our_strategy() -> Any:
    from holdfast.megatron import SaveStrategy

    return SaveStrategy()


def _our_queue() -> Any:
    from holdfast.megatron.queue import AsyncCallsQueue

    return AsyncCallsQueue()


def _stock_queue(dialect: str, persistent: bool) -> Callable[[], Any]:
    def make() -> Any:
        # The worker of nvidia-resiliency-ext takes a GPU otherwise.
        options = {} if dialect == "mcore" or torch.cuda.is_available() else {"cpu_shm_mode": True}
        return importlib.import_module(_QUEUES[dialect]).AsyncCallsQueue(persistent=persistent, **options)

    return make


OUR_CALLER = "holdfast.megatron"
_QUEUES = {
    "mcore": "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
}


def megatron_callers() -> dict[str, Caller]:
    """The callers that are installed, by name; ours is the last."""
    found = {}
    for dialect, module in _QUEUES.items():
        if is_installed(module):
            for kind in ("temporal", "persistent"):
                queue = _stock_queue(dialect, kind == "persistent")
                found[f"{dialect} {kind}"] = Caller(queue, _stock_strategy, dialect)
    found[OUR_CALLER] = Caller(_our_queue, _our_strategy, "mcore")
    return found


def _let_go() -> None:
    holdfast.flush()
    holdfast.trim()


def _caller_way(caller: Caller, trainer: Trainer, arena_bytes: int, warms_up: bool = False) -> Way:
    def prepare() -> None:
        holdfast.configure(arena_bytes=arena_bytes)
        caller.begin()
        if warms_up:  # as Megatron's start does with --use-persistent-ckpt-worker
            caller.queue.warmup_persistent_caller(0)

    options = dict(_runtime.default.options)

    def finish() -> None:
        caller.end()
        _let_go()
        # Without those of a warm-up.
        _runtime.default.options.clear()
        _runtime.default.options.update(options)
        # A tensor that was pickled for another process lies in shared memory from then on.
        trainer.make_private()

    return Way(caller.save, load_megatron, prepare=prepare, finish=finish)


def _synchronous_way(make_strategy: Callable[[], Any]) -> Way:
    def start(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
        from megatron.core.dist_checkpointing import save

        os.makedirs(path)
        save(sharded(tensors), path, make_strategy())
        sync_tree(path)
        return lambda: None

    # The default: another way's staging memory, sized for a whole state, would be used whole.
    return Way(start, load_megatron, prepare=lambda: holdfast.configure(arena_bytes=0), finish=_let_go)


def import_all() -> None:
    """Imports what the callers import in their first call: that is no part of a call."""
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    _our_queue(), _our_strategy()
    for dialect, module in _QUEUES.items():
        if is_installed(module):
            get_async_strategy(dialect)


def megatron_ways(trainer: Trainer, arena_bytes: int) -> dict[str, Way]:
    import_all()
    return {
        "mcore synchronous": _synchronous_way(_stock_strategy),
        "holdfast.megatron synchronous": _synchronous_way(_our_strategy),
        **{name: _caller_way(caller, trainer, arena_bytes) for name, caller in megatron_callers().items()},
        f"{OUR_CALLER} warmed up": _caller_way(megatron_callers()[OUR_CALLER], trainer, arena_bytes, True),
    }


# ---- Lightning.


def _lightning_way(make_plugin: Callable[[], Any], waits: bool, arena_bytes: int) -> Way:
    kept: dict[str, Any] = {}

    def prepare() -> None:
        holdfast.configure(arena_bytes=arena_bytes)
        kept["plugin"] = make_plugin()

    def start(tensors: dict[str, Any], path: str) -> Callable[[], Any]:
        plugin = kept["plugin"]
        os.makedirs(path)
        plugin.save_checkpoint(dict(tensors), os.path.join(path, "state.pt"))

        def wait() -> None:
            plugin.teardown()  # which waits, and after which a plugin is used again
            sync_tree(path)

        if not waits:
            wait()
        return wait if waits else lambda: None

    return Way(start, load_torch, prepare=prepare, finish=_let_go)


def lightning_plugins() -> dict[str, Callable[[], Any]]:
    from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

    import holdfast.lightning

    return {
        "TorchCheckpointIO": TorchCheckpointIO,
        "AsyncCheckpointIO": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
        "holdfast.lightning": holdfast.lightning.CheckpointIO,
    }


def lightning_ways(arena_bytes: int) -> dict[str, Way]:
    return {
        name: _lightning_way(plugin, name != "TorchCheckpointIO", arena_bytes)
        for name, plugin in lightning_plugins().items()
    }
