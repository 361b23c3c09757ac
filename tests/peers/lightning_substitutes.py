"""A plugin of pytest (``-p lightning_substitutes``): Holdfast's `CheckpointIO` is Lightning's default.

With HOLDFAST_PEERS_DURABLE=1 its saves return when they are durable and have left no thread at a test's end, listings of
directories show the checkpoints alone, and a mock of `torch.save` is called for each: many tests look at their directories
right after a save, count the files there, or count those calls. A mock of the stock plugin's `save_checkpoint` is called in
the place of ours.
"""

from __future__ import annotations

import functools
import os
from typing import Any
from unittest.mock import Mock

import lightning.fabric.plugins.io.torch_io as stock_io
import lightning.pytorch.strategies.strategy as strategies
import pytest
import torch
from journal import note

import holdfast
from holdfast.lightning import CheckpointIO, files

DURABLE = os.environ.get("HOLDFAST_PEERS_DURABLE") == "1"


class _Durable(CheckpointIO):
    def __init__(self) -> None:
        super().__init__(durable_names=("*",))

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        mocked = stock_io.TorchCheckpointIO.save_checkpoint
        save = mocked if isinstance(mocked, Mock) else super().save_checkpoint
        save(checkpoint, path, storage_options=storage_options)


def _plugin() -> CheckpointIO:
    return _Durable() if DURABLE else CheckpointIO()


def _prove(path: str, ended: Any) -> None:
    """In front of everything that waits for the save: the file is there. One for a URL is copied meanwhile, and gone."""
    if os.path.basename(os.path.dirname(path)).startswith("holdfast-"):
        return
    verdict = f"failed: {ended.exception()}" if ended.exception() else holdfast.verify(path)["verdict"]
    note("save", path=path, verdict=verdict)


def _install() -> None:
    kept = strategies.Strategy.checkpoint_io
    save, stock_save = files.save, stock_io.TorchCheckpointIO.save_checkpoint

    def ours(self: Any) -> Any:
        if self._checkpoint_io is None:
            self._checkpoint_io = _plugin()
        return kept.fget(self)

    @functools.wraps(save)
    def proved(checkpoint: Any, path: str, runtime: Any) -> Any:
        if DURABLE and isinstance(torch.save, Mock) and torch.save._mock_wraps is None:
            torch.save(checkpoint, path)
        begun = save(checkpoint, path, runtime)
        begun.durable.add_done_callback(functools.partial(_prove, path))
        return begun

    @functools.wraps(stock_save)
    def noted(self: Any, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        note("stock save", path=os.fspath(path))
        stock_save(self, checkpoint, path, *args, **kwargs)

    strategies.Strategy.checkpoint_io = property(ours, kept.fset)
    files.save = proved
    stock_io.TorchCheckpointIO.save_checkpoint = noted


def _show_checkpoints_alone() -> None:
    """Without manifests, and without the directory of a requeue's checkpoints, to which links lead."""
    listdir = os.listdir

    @functools.wraps(listdir)
    def alone(path: Any = ".") -> list[Any]:
        return [n for n in listdir(path) if ".holdfast-" not in str(n) and n != "holdfast-requeue"]

    os.listdir = alone


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    if DURABLE:
        holdfast.flush(60)


_install()
if DURABLE:
    _show_checkpoints_alone()
