"""States and jobs of gloo ranks for nvidia-resiliency-ext's local checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_jobs import DEADLINE
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

BUFFER = 1 << 20  # elements that a shard is a small part of
SHARD = 1 << 14


class State(TensorAwareStateDict):
    """What a rank has at an iteration: a shard of a larger buffer, a matrix with holes, a counter in a column."""

    def __init__(self, iteration: int, rank: int, shard: int = SHARD) -> None:
        value = 1000.0 * iteration + rank
        self.iteration = iteration
        self._tensors = [
            torch.full((max(BUFFER, 2 * shard),), value)[shard : 2 * shard].view(4, -1),
            torch.full((64, 64), value, dtype=torch.bfloat16)[:, ::2],
            torch.full((3, 5), iteration)[:1, 2],
        ]
        self._count = 0

    def values_of(self) -> tuple[int, set[float], set[float], int]:
        """Everything in it."""
        shard, holes, counter = self._tensors
        return self.iteration, set(shard.flatten().tolist()), set(holes.flatten().tolist()), int(counter)

    def train(self) -> None:
        """Changes everything, as the next step does."""
        for tensor in self._tensors:
            tensor.add_(1)

    def pop_tensors(self) -> list[torch.Tensor]:
        tensors, self._tensors = self._tensors, []
        self._count = len(tensors)
        self._like = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        return tensors

    @property
    def tensors(self) -> Iterable[torch.Tensor]:
        return iter(self._tensors)

    @property
    def is_hollow(self) -> bool:
        return not self._tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensor_data)

    def init_tensors(self) -> None:
        self._tensors = [torch.empty_like(like, device="cpu") for like in self._like]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._tensors = [tensor.clone() for tensor in self._tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def expected(iteration: int, rank: int) -> tuple[int, set[float], set[float], int]:
    return State(iteration, rank).values_of()


def replicated() -> CliqueReplicationStrategy:
    """Two ranks that hold each other's files."""
    return CliqueReplicationStrategy.from_replication_params(1, 2)


def files(manager: Any) -> list[str]:
    """The checkpoints in a rank's directory."""
    return sorted(path.name for path in Path(manager.local_ckpt_dir).iterdir() if not path.name.startswith("."))


def name(iteration: int, rank: int) -> str:
    return f"iter_{iteration:07d}_{rank}_local.pt"


def wait_for_files(manager: Any, *wanted: str) -> None:
    """Older files go in the background."""
    deadline = time.monotonic() + DEADLINE
    while files(manager) != sorted(wanted):
        assert time.monotonic() < deadline, files(manager)
        time.sleep(0.01)


def flip(path: Path) -> None:
    """Changes one byte in the middle of a file."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def saved(manager: Any, iteration: int) -> None:
    manager.save(State(iteration, dist.get_rank()), iteration)
