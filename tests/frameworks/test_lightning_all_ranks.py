"""What rank 0 saves, and every rank loads or ends with: two gloo ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import lightning_ranks
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning_jobs import Model, every, trainer

import holdfast
from holdfast.lightning import CheckpointIO, files
from holdfast.lightning.following import Following

SLOW = {"bytes_per_second_max": 1_000_000}  # 1.6 MB by Fabric, 4.9 MB by a trainer


def _fabric(**options: Any) -> tuple[L.Fabric, Any, Any]:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[CheckpointIO(**options)])
    fabric.launch()
    return fabric, fabric.setup_module(torch.nn.Linear(640, 640)), fabric.strategy.checkpoint_io


def _fill(net: Any, value: float) -> None:
    with torch.no_grad():
        net.weight.fill_(value)


def _full_disk(checkpoint: Any, path: str, runtime: Any) -> Following:
    """A save that fails after its call."""

    def first() -> None:
        time.sleep(1)
        raise OSError(28, "No space left on device", path)

    return Following(path, None, first, lambda: None, lambda: None, runtime)


def _loads_by_fabric(directory: Path) -> None:
    fabric, net, plugin = _fabric(**SLOW)
    for value in (1.0, 2.0):
        _fill(net, value)
        fabric.save(directory / "one.ckpt", {"net": net})
    _fill(net, 3.0)
    fabric.load(directory / "one.ckpt", {"net": net})
    assert net.weight[0, 0] == 2
    fabric.save(directory / "two.ckpt", {"net": net})
    fabric.load(directory / "two.ckpt", {"net": net})
    # One rank alone, without the others.
    fabric.save(directory / "raw.ckpt", net.state_dict())
    if fabric.global_rank == 0:
        assert plugin.load_checkpoint(directory / "two.ckpt")["net"]["weight"][0, 0] == 2
        fabric.load_raw(directory / "raw.ckpt", net)
    fabric.barrier()


def test_fabrics_load_waits_on_all_ranks_for_the_save_of_rank_0(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, _loads_by_fabric, tmp_path, ranks=2)


def _fails_by_fabric(directory: Path) -> None:
    fabric, net, plugin = _fabric()
    fabric.save(directory / "one.ckpt", {"net": net})
    plugin.wait()
    files.save = _full_disk  # type: ignore[assignment]
    fabric.save(directory / "one.ckpt", {"net": net})
    with pytest.raises(holdfast.Error, match="one.ckpt") as raised:
        fabric.load(directory / "one.ckpt", {"net": net})
    assert ("failed on rank 0" in str(raised.value)) == (fabric.global_rank == 1)
    fabric.load(directory / "one.ckpt", {"net": net})  # the older one, once it was raised


def test_fabrics_load_fails_on_all_ranks_when_the_save_has_failed(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, _fails_by_fabric, tmp_path, ranks=2)


class Evaluated(Model):
    def test_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(2, 1), batch_size=1)

    def test_step(self, batch: Any, index: int) -> None:
        pass

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # DDP sends the weights of rank 0 to all, and nothing else.
        self.loaded = checkpoint["state_dict"]["net.weight"][0, 0]


def _loads_by_a_trainer(directory: Path) -> None:
    job = trainer(directory, 1, devices=2, strategy="ddp", plugins=[CheckpointIO(**SLOW)])
    model = Evaluated()
    job.fit(model)
    for value in (1.0, 2.0):
        _fill(model.net, value)
        job.save_checkpoint(directory / "x.ckpt")
    _fill(model.net, 3.0)
    job.test(model, ckpt_path=directory / "x.ckpt", verbose=False)
    assert model.loaded == 2


def test_a_trainers_load_waits_on_all_ranks_for_the_save_of_rank_0(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, _loads_by_a_trainer, tmp_path, ranks=2)


class Unreachable(CSVLogger):
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        raise OSError("the logger's server cannot be reached")


def _is_logged_in_vain(directory: Path) -> None:
    plugin, saved = CheckpointIO(**SLOW), every(4, directory / "run")
    job = trainer(directory, 4, saved, devices=2, strategy="ddp", plugins=[plugin], logger=Unreachable(directory))
    with pytest.raises(Exception, match="cannot be reached"):
        job.fit(Model())


def test_a_logger_that_fails_behind_the_last_save_ends_all_ranks(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, _is_logged_in_vain, tmp_path, ranks=2)


def _fails_at_the_end(directory: Path) -> None:
    files.save = _full_disk  # type: ignore[assignment]
    trainer(directory, 4, every(4, directory / "run"), devices=2, strategy="ddp", plugins=[CheckpointIO()]).fit(Model())


def test_a_training_whose_last_save_has_failed_ends_so_on_all_ranks(tmp_path: Path) -> None:
    lightning_ranks.Job(tmp_path, _fails_at_the_end, tmp_path, ranks=2).end()
    assert "step=4.ckpt" in (tmp_path / "failure-0").read_text()
    assert "a save has failed on rank 0" in (tmp_path / "failure-1").read_text()
