"""Trainers that save through Megatron-Core with other callers than ours, as the savers of `peers`.

A persistent caller has a process that runs one request after the other. Here it has run one before the first save.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.util
import time
from typing import Any

import torch

from holdfast.integrity import peers, queues, trainer

_STRATEGIES = "megatron.core.dist_checkpointing.strategies."
_MODULES = {"megatron-persistent": _STRATEGIES + "async_utils", "nvrx-persistent": "nvidia_resiliency_ext.checkpointing.async_ckpt.core"}
_DIALECTS = {"megatron-persistent": "mcore", "nvrx-persistent": "nvrx"}


def _on_the_cpu() -> None:
    """What the callers ask of CUDA they get of the CPU, where the states are."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.device_count = lambda: 1
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.set_device = lambda *_: None


def _loop(saver: str, name: str, *arguments: Any) -> None:
    """The body of a caller's process."""
    body = getattr(importlib.import_module(_MODULES[saver]).PersistentAsyncCaller, name)
    _on_the_cpu()
    body(*arguments)


def megatron_loop(*arguments: Any) -> None:
    """That of Megatron-Core's."""
    _loop("megatron-persistent", "async_loop", *arguments)


def nvrx_loop(*arguments: Any) -> None:
    """That of nvidia-resiliency-ext's."""
    _loop("nvrx-persistent", "async_loop_for_daemon_worker", *arguments)


def _end_children() -> None:
    """As the end of the interpreter does; a trainer ends without it."""
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]


def nothing() -> None:
    """The first request."""


class Trainer(queues.Trainer, peers.Trainer):
    """A rank that saves through Megatron-Core and Holdfast."""


class PersistentTrainer(Trainer):
    """A rank that saves through Megatron-Core and a persistent caller."""

    def live(self) -> None:
        try:
            super().live()
        except SystemExit:
            _end_children()
            raise

    def _make(self) -> queues.Requests:
        saver = self.round["saver"]
        found = importlib.import_module(_MODULES[saver])
        strategy = importlib.import_module(_STRATEGIES + "torch").TorchDistSaveShardedStrategy("torch_dist", 1)
        _on_the_cpu()
        found.PersistentAsyncCaller.async_loop = staticmethod(megatron_loop)
        found.PersistentAsyncCaller.async_loop_for_daemon_worker = staticmethod(nvrx_loop)
        options = {"cpu_shm_mode": True} if saver == "nvrx-persistent" else {}  # its process takes a GPU otherwise
        self._queue = found.AsyncCallsQueue(persistent=True, **options)
        self._queue.schedule_async_request(found.AsyncRequest(nothing, (), [], {}))
        end = time.monotonic() + trainer.TIME_OUTCOME_MAX
        while not self._queue.maybe_finalize_async_calls():
            if time.monotonic() > end:
                raise TimeoutError("the caller's process does not start")
            time.sleep(0.01)
        return queues.Requests(self._queue, strategy, _DIALECTS[saver])

    def _state(self, action: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """The callers' copy of GPU memory is their own; of a state on the CPU they have none."""
        number, made, _ = super()._state(action)
        return number, made, super()._state(action)[2]

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self._queue.close(abort=True)
        _end_children()

    def worker(self, older: dict[int, int] | None) -> int | None:
        caller = getattr(self._queue, "persistent_caller", None) or self._queue._persistent_caller
        return caller.process.pid if caller and caller.process else None


def kind_of(saver: str) -> type[trainer.Trainer]:
    """The trainers of a saver."""
    if saver not in peers.OF_MEGATRON:
        return peers.Trainer
    return Trainer if saver == peers.OUR_MEGATRON else PersistentTrainer
