"""A small Lightning module whose training is exact, trainers for it, and looks at their checkpoints."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import holdfast

LONG = bool(os.environ.get("HOLDFAST_LONG"))
WIDTH = 640  # a checkpoint has 4.9 MB: two chunks, so that a limit of the rate is felt
torch.set_num_threads(1)  # the order of a sum depends on their number: the same in all processes
# A checkpoint takes 0.2 s: ten times as long as the four short steps between two of them.
SLOW = {"bytes_per_second_max": 25_000_000}


class Model(pl.LightningModule):
    """The batch of a step depends on nothing but its number: a resumed run can be compared bitwise."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        super().__init__()
        self.net = torch.nn.Linear(WIDTH, WIDTH)
        self.step_seconds = step_seconds

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        time.sleep(self.step_seconds)
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.global_step))
        return self.net(batch.to(self.device)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(100_000, 1), batch_size=1)


def model(step_seconds: float = 0.0) -> Model:
    torch.manual_seed(1)
    return Model(step_seconds)


def trainer(directory: Path, steps: int, *callbacks: Any, logger: Any = False, **options: Any) -> pl.Trainer:
    options = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": bool(callbacks), **options}
    return pl.Trainer(max_steps=steps, default_root_dir=directory, callbacks=list(callbacks), logger=logger,
                      enable_progress_bar=False, enable_model_summary=False, **options)  # fmt: skip


def every(steps: int, directory: Path, **options: Any) -> ModelCheckpoint:
    options = {"save_top_k": 1, "filename": "{step}", "enable_version_counter": False, **options}
    return ModelCheckpoint(dirpath=directory, every_n_train_steps=steps, **options)


def number(name: str) -> int:
    """The step in a checkpoint's name."""
    return int(name[5:-5])


def names(directory: Path) -> list[str]:
    """The checkpoints by their names, the newest last, and no link."""
    found = [p.name for p in directory.glob("step=*.ckpt")] if directory.is_dir() else []
    return sorted(found, key=number)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def look(directory: Path) -> str:
    """Loads a checkpoint, and the link if there is one, and proves both. Returns what is wrong, or "".

    Between a listing and an open the newest may appear and the other one go: then it looks again.
    """
    wrong = ""
    for _ in range(4):
        wrong = "" if any(_is_whole(directory / name) for name in reversed(names(directory))) else "nothing to load"
        link = directory / "last.ckpt"
        if not wrong and (not os.path.lexists(link) or _is_whole(link)):
            return ""
        wrong = wrong or "last.ckpt cannot be loaded"
    return wrong


def _is_whole(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True, mmap=True)
    except Exception:
        return False
    return holdfast.verify(path)["verdict"] == "sound"


class Looks(threading.Thread):
    """Looks every 10 ms, from the first checkpoint on, and notes what is wrong."""

    def __init__(self, directory: Path) -> None:
        super().__init__(name="looks")
        self.directory = directory
        self.wrong: list[str] = []
        self.count = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.01):
            if self.count or names(self.directory):
                self.count += 1
                found = look(self.directory)
                if found:
                    self.wrong.append(found)

    def __str__(self) -> str:
        return f"{self.count} looks, {len(self.wrong)} of them without a checkpoint"

    def __enter__(self) -> Looks:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()
