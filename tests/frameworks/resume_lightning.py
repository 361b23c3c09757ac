"""The trainer of the kill campaign that is Lightning's, with `holdfast.lightning.CheckpointIO`."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import lightning.pytorch as pl
import resume_trainer
import torch
from lightning_jobs import every, names, number, trainer
from resume_trainer import Hold, digest, gpt, tell

from holdfast.lightning import CheckpointIO, files


class Training(pl.LightningModule):
    """The GPT of the other campaigns, its batches and the random state of its dropout."""

    def __init__(self, size: gpt.Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt.GPT(size)
        self.loader = gpt.Loader(size)
        self._random = torch.get_rng_state()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(100_000, 1), batch_size=1)

    def on_train_batch_start(self, batch: torch.Tensor, index: int) -> None:
        if self._random is not None:  # the data's iterator has drawn since it was set
            torch.set_rng_state(self._random)
            self._random = None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        inputs, targets = self.loader.batch()
        return torch.nn.functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loader"], checkpoint["random"] = self.loader.state_dict(), torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loader.load_state_dict(checkpoint["loader"])
        self._random = checkpoint["random"]


class Phases(pl.Callback):
    """Tells the steps; callbacks come before the one that saves."""

    def on_train_start(self, job: pl.Trainer, model: pl.LightningModule) -> None:
        tell("loaded", job.global_step)

    def on_train_batch_end(self, job: pl.Trainer, *_: Any) -> None:
        tell("train", job.global_step)


class Held(CheckpointIO):
    """The plugin, which stops in the phase that `hold` names."""

    def __init__(self, hold: Hold) -> None:
        super().__init__()
        self._hold = hold

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        step = checkpoint["global_step"]
        tell("save", step)
        with self._hold.staging(step):
            super().save_checkpoint(checkpoint, path, storage_options)
        tell("called", step)
        assert self.order.last is not None
        self.order.last.durable.add_done_callback(lambda f: tell("failed" if f.exception() else "durable", step))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        tell("load", number(Path(path).name))
        self._hold.load()
        return super().load_checkpoint(path, *args, **kwargs)


def train(arguments: argparse.Namespace, hold: Hold) -> None:
    remove = files.remove

    def held_remove(path: str) -> None:
        """The next checkpoint is durable, and both are there."""
        hold.finalize(number(Path(path).name))
        remove(path)

    files.remove = held_remove
    directory = Path(arguments.dir)
    found = names(directory)
    model = Training(gpt.SIZES[arguments.size])
    if arguments.every:
        saves = every(arguments.every, directory, save_last="link")
        job = trainer(directory, arguments.steps, Phases(), saves, plugins=[Held(hold)])
    else:
        job = trainer(directory, arguments.steps)
    resumed = arguments.every and found
    job.fit(model, ckpt_path=str(directory / found[-1]) if resumed else None)
    if resumed and number(found[-1]) == arguments.steps:
        tell("loaded", arguments.steps)  # there was nothing to train
    tell("final", digest({"model": model.state_dict(), "optimizer": job.optimizers[0].state_dict()}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    resume_trainer.run({"lightning": train})
