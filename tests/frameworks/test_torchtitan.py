"""torchtitan's checkpoint manager with the saves of Holdfast."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
import tyro
from megatron_jobs import DEADLINE, held_worker, run
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpointer import CheckpointManager as Stock

import holdfast.dcp
from holdfast.torchtitan import CheckpointManager


class Optimizers:
    """As torchtitan's container: a state dict of what its optimizers have."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.optimizers = [torch.optim.Adam(model.parameters())]

    def state_dict(self) -> dict[str, Any]:
        return {f"{n}.{k}": v for n, state in enumerate(self.optimizers[0].state.values()) for k, v in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Training:
    """A model, its optimizer, and a manager of either class."""

    def __init__(self, kind: Any, folder: str, mode: str = "disabled", **options: Any) -> None:
        self.model = torch.nn.Linear(256, 256)
        self.optimizers = Optimizers(self.model)
        config = kind.Config(enable=True, folder=folder, interval=1, async_mode=mode, initial_load_model_only=False,
                             last_save_model_only=False, **options)  # fmt: skip
        self.manager = config.build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=None, states={},
            sd_adapter=None, base_folder="",
        )  # fmt: skip
        assert type(self.manager) is kind
        self.manager.states.pop("dataloader")
        self.manager.states.pop("lr_scheduler")

    def step(self) -> None:
        torch.manual_seed(7)
        self.model(torch.randn(8, 256)).sum().backward()
        self.manager.maybe_wait_for_staging()
        self.optimizers.optimizers[0].step()

    def values(self) -> list[torch.Tensor]:
        return [value.clone() for value in (*self.model.state_dict().values(), *self.optimizers.state_dict().values())]


def _load(folder: str) -> list[torch.Tensor]:
    """The newest checkpoint, by torchtitan's own manager."""
    other = Training(Stock, folder)
    other.step()
    assert other.manager.load()
    loaded = other.optimizers.loaded
    other.manager.close()
    return [*other.model.state_dict().values(), *loaded.values()]


def _saves(rank: int, folder: str, mode: str) -> None:
    holdfast.configure(launcher="persistent")
    training = Training(CheckpointManager, folder, mode, keep_latest_k=2)
    for step in (1, 2, 3):
        training.step()
        values = training.values()
        assert training.manager.save(step)
        assert (training.manager.staging_future is not None) == (mode == "async_with_pinned_mem")
        assert isinstance(training.manager.save_future, Future) == (mode != "disabled")
        training.step()
        training.manager.maybe_wait_for_saving()
        assert all(map(torch.equal, _load(folder), values))
        assert holdfast.dcp.verify(f"{folder}/step-{step}")["verdict"] == "sound"
    training.manager.save(4, last_step=True)
    training.manager.close()
    if rank == 0:
        assert sorted(os.listdir(folder)) == ["step-2", "step-3", "step-4"]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_torchtitan_loads_the_values_of_the_call(tmp_path: Path, mode: str) -> None:
    run(2, tmp_path, _saves, str(tmp_path / "run"), mode)


def _wait_for_names(folder: str, names: set[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while set(os.listdir(folder)) != names:
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.01)


def _purge(rank: int, folder: str) -> None:
    # What a killed job has left: two directories without metadata, newer than the only whole one.
    training = Training(CheckpointManager, folder, "async", keep_latest_k=2)
    training.step()
    training.manager.save(1)
    training.manager.maybe_wait_for_saving()
    for step in (2, 3):
        os.makedirs(f"{folder}/step-{step}")
    worker = held_worker()
    training.manager.save(4)
    time.sleep(0.2)
    assert os.path.exists(f"{folder}/step-1/.metadata")
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(CheckpointException, match="step-4"):
        training.manager.save(5)
    training.manager.save_future = None
    assert os.path.exists(f"{folder}/step-1/.metadata")
    for step in (5, 6):
        training.manager.save(step)
        training.manager.maybe_wait_for_saving()
    _wait_for_names(folder, {"step-5", "step-6"})
    training.manager.close()


def test_only_whole_checkpoints_count_as_kept(tmp_path: Path) -> None:
    run(1, tmp_path, _purge, str(tmp_path / "run"))


def _purge_remote(rank: int, folder: str, mode: str) -> None:
    training = Training(CheckpointManager, f"file://{folder}", mode, keep_latest_k=2)
    training.step()
    for step in (1, 2, 3):
        training.manager.save(step)
        training.manager.maybe_wait_for_saving()
    _wait_for_names(folder, {"step-2", "step-3"})
    failed: Future[None] = Future()
    training.manager.save_future = failed
    os.makedirs(f"{folder}/step-4")
    Path(f"{folder}/step-4/.metadata").touch()
    training.manager._purge_stale_checkpoints()
    failed.set_exception(OSError("no room"))
    assert training.manager.purge_queue.empty() and os.path.exists(f"{folder}/step-2")
    training.manager.save_future = None
    training.manager.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_old_checkpoints_go_in_a_remote_folder_too(tmp_path: Path, mode: str) -> None:
    run(1, tmp_path, _purge_remote, str(tmp_path / "run"), mode)


class NewerStock:
    """The order of torchtitan's main branch: it asks for the removal before the save, and has steps that stay."""

    def __init__(self) -> None:
        self.stock = Stock._save

    def __enter__(self) -> None:
        stock = self.stock

        def save(manager: Any, curr_step: int, last_step: bool = False) -> bool:
            manager.maybe_wait_for_saving()
            manager._purge_stale_checkpoints(saving_step=curr_step, staging_dir_prefix=None)
            manager._purge_stale_checkpoints = lambda: None
            try:
                return stock(manager, curr_step, last_step)
            finally:
                del manager._purge_stale_checkpoints

        Stock._save = save
        CheckpointManager._is_purge_exempt = lambda manager, step: step == 2  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        Stock._save = self.stock
        del CheckpointManager._is_purge_exempt  # type: ignore[attr-defined]


def _purge_newer(rank: int, folder: str) -> None:
    with NewerStock():
        training = Training(CheckpointManager, folder, "async", keep_latest_k=2)
        training.step()
        for step in (1, 2, 3, 4):
            training.manager.save(step)
            training.manager.maybe_wait_for_saving()
        _wait_for_names(folder, {"step-2", "step-3", "step-4"})
        worker = held_worker()
        training.manager.save(5)
        time.sleep(0.2)
        assert os.path.exists(f"{folder}/step-3/.metadata")  # the newer one is not durable yet
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(CheckpointException, match="step-5"):
            training.manager.maybe_wait_for_saving()
        assert os.path.exists(f"{folder}/step-3/.metadata")
        training.manager.save_future = None
        training.manager.save(6, last_step=True)
        _wait_for_names(folder, {"step-2", "step-4", "step-6"})
        training.manager.close()


def test_a_torchtitan_that_purges_before_a_save_keeps_exempt_steps(tmp_path: Path) -> None:
    run(1, tmp_path, _purge_newer, str(tmp_path / "run"))


def _fails(rank: int, folder: str) -> None:
    training = Training(CheckpointManager, folder, "async", keep_latest_k=0)
    training.manager.save(1)
    training.manager.maybe_wait_for_saving()
    with faults.file_size_limit(8192 if rank == 0 else 1 << 30):
        training.manager.save(2)
        with pytest.raises(CheckpointException, match=r"step-2/__0_\d+.distcp"):
            training.manager.maybe_wait_for_saving()
    assert not os.path.exists(f"{folder}/step-2/.metadata")
    dist.barrier()
    training.manager.close()


def test_the_failure_of_a_rank_is_raised_on_all(tmp_path: Path) -> None:
    run(2, tmp_path, _fails, str(tmp_path / "run"))


class Adapter:
    """Names as Hugging Face has them; one file."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}


def _export(rank: int, folder: str) -> None:
    training = Training(CheckpointManager, folder, "async", keep_latest_k=0)
    training.manager.sd_adapter = Adapter()
    training.manager.last_save_in_hf = training.manager.last_save_model_only = True
    training.manager.save(1, last_step=True)
    assert any(name.endswith(".safetensors") for name in os.listdir(f"{folder}/step-1"))
    training.manager.close()


def test_an_export_is_torchtitans_own(tmp_path: Path) -> None:
    run(1, tmp_path, _export, str(tmp_path / "run"))


def test_a_manager_that_is_off_does_nothing() -> None:
    manager = CheckpointManager.Config(enable=False).build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.save(1) and not manager.load()
    manager.close()
    with pytest.raises(ValueError, match="async_mode"):
        CheckpointManager.Config(async_mode="unknown")


def test_the_help_says_what_the_modes_do_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(CheckpointManager.Config, args=["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "returns when it is durable (disabled), or when the state is captured (async)" in shown
    assert "{disabled,async,async_with_pinned_mem}" in shown and "DCP save mode" not in shown
    parsed = tyro.cli(CheckpointManager.Config, args=["--interval", "7", "--async-mode", "async"])
    assert (parsed.interval, parsed.async_mode, parsed._owner) == (7, "async", CheckpointManager)


def test_the_page_configures_this_manager() -> None:
    text = (Path(__file__).parents[2] / "docs/torchtitan.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    assert names["checkpoint"]._owner is CheckpointManager
