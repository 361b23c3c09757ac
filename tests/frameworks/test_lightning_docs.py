"""docs/lightning.md: its examples run as they are; and both packages of Lightning are served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
from test_documentation import program_of  # noqa: E402

pytestmark = pytest.mark.long


def run(program: str, directory: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_run_as_they_are(tmp_path: Path) -> None:
    program = program_of(ROOT / "docs" / "lightning.md")
    assert "CheckpointIO" in program and "OffloadCallback" in program
    run(program, tmp_path)
    assert (tmp_path / "run" / "last.ckpt").resolve().name == "epoch=0-step=32.ckpt"


OTHER = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
import torch
import pytorch_lightning as pl
from holdfast.lightning import CheckpointIO, ModelParallelStrategy, OffloadCallback
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def training_step(self, batch, index):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
saves = pl.callbacks.ModelCheckpoint(dirpath="run", every_n_train_steps=2, save_last="link")
job = pl.Trainer(max_steps=4, accelerator="cpu", devices=1, logger=False, plugins=[CheckpointIO()],
                 callbacks=[saves, OffloadCallback()])
job.fit(Model(), torch.utils.data.DataLoader(torch.ones(16, 4)))
assert isinstance(job.strategy.checkpoint_io, CheckpointIO)
assert isinstance(CheckpointIO(), pl.plugins.CheckpointIO)
assert issubclass(ModelParallelStrategy, pl.strategies.ModelParallelStrategy)
assert torch.load("run/last.ckpt", weights_only=False)["global_step"] == 4
"""


def test_the_older_package_is_served_too(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    run(OTHER, tmp_path)


ONLY_FABRIC = """
import sys
sys.modules["lightning"] = sys.modules["pytorch_lightning"] = None
import torch
from lightning_fabric import Fabric
from holdfast.lightning import CheckpointIO
fabric = Fabric(accelerator="cpu", devices=1, plugins=[CheckpointIO()])
fabric.save("one.ckpt", {"w": torch.ones(2)})
assert fabric.load("one.ckpt")["w"].sum() == 2
fabric.strategy.checkpoint_io.teardown()
try:
    import holdfast.lightning
    holdfast.lightning.OffloadCallback
except ModuleNotFoundError as error:
    assert "needs the Trainer" in str(error)
else:
    raise AssertionError
"""


def test_fabric_alone_is_enough_for_the_plugin(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    run(ONLY_FABRIC, tmp_path)
