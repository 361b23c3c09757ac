"""GPU memory before, in and after a save of Lightning: 2 GB of parameters and their optimizer, each plugin in its own process."""

from __future__ import annotations

import logging
from typing import Any

import torch
from report import GIB, Report, memory_on_gpu, run, synchronize, timed

LAYERS = 8


def one(report: Report, name: str, width: int) -> dict[str, Any]:
    import framework_ways

    logging.disable(logging.WARNING)
    import lightning.pytorch as pl

    callbacks: list[Any] = []
    if name == "OffloadCallback":
        from holdfast.lightning import OffloadCallback

        callbacks.append(OffloadCallback())
    plugin = framework_ways.lightning_plugins()["AsyncCheckpointIO" if callbacks else name]()
    found: dict[str, Any] = {}
    path = str(report.scratch / "state.ckpt")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self) -> Any:
            rows: Any = torch.randn(8, width)
            return torch.utils.data.DataLoader(rows, batch_size=1)

    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step != 3:
                return
            trainer.optimizers[0].zero_grad()
            synchronize()
            before = memory_on_gpu()
            if report.cuda:
                torch.cuda.reset_peak_memory_stats()
            blocked, _ = timed(lambda: trainer.save_checkpoint(path))
            during = memory_on_gpu()
            trainer.strategy.checkpoint_io.teardown()  # waits until it is saved
            peak = torch.cuda.max_memory_allocated() if report.cuda else 0
            found.update(before=before, during=during, peak=peak, after=memory_on_gpu(), blocked=blocked)

    trainer = pl.Trainer(max_steps=4, accelerator="gpu" if report.cuda else "cpu", devices=1, logger=False, plugins=[plugin],
                         callbacks=[Saves(), *callbacks], enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False, default_root_dir=report.scratch)  # fmt: skip
    model = Model()
    trainer.fit(model)
    loaded = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    found["entries"] = len(loaded["state_dict"]) + len(loaded["optimizer_states"][0]["state"])
    return found


def body(report: Report) -> None:
    import framework_ways

    report.need_packages("lightning")
    framework_ways.lightning_plugins()  # imports it
    for name in ("holdfast.lightning", "AsyncCheckpointIO", "OffloadCallback"):
        with report.part(name):
            is_ours = name == "holdfast.lightning"
            found = report.apart(one, name, report.size(8192, 64), timeout=75)
            what = f"{name}: of the entries of state dict and optimizer in the file"
            report.check(what, found["entries"], found["entries"] == 2 * LAYERS, aim=str(2 * LAYERS))
            report.row(f"{name}: GPU memory before the save", found["before"] / GIB, "GiB")
            for when, key in (("behind the call", "during"), ("at its peak", "peak"), ("afterwards", "after")):
                more = found[key] - found["before"]
                report.row(f"{name}: GPU memory {when}, above that before", more / GIB, "GiB",
                           aim="0" if is_ours else "", ok=more == 0 if is_ours else None)  # fmt: skip
            report.row(f"{name}: time in the call", found["blocked"], "s")


if __name__ == "__main__":
    run("lightning", body)
