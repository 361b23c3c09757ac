"""A plugin of pytest (``-p torchtitan_substitutes``): torchtitan's `CheckpointManager` is that of `holdfast.torchtitan`.

The tests put mocks in the place of PyTorch's `save`, `async_save` and `load`: they count the calls, and their own file is what
a later load reads. Here a save is made and proved by Holdfast, and the mock is called behind it with the same state; a test gets
the mock's answer. A mocked load has the saved checkpoint loaded first, by PyTorch's reader.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any
from unittest.mock import Mock

import torch.distributed.checkpoint as stock
import torchtitan.components.checkpointer as package
import torchtitan.components.checkpointer.dcp as manager
from journal import note

import holdfast
import holdfast.dcp
import holdfast.torchtitan

_load = stock.load
_saved = set()


def _proved(path: str) -> None:
    _saved.add(path)
    note("save", path=path, verdict=holdfast.verify(path)["verdict"])


def _save(state: dict[str, Any], *, checkpoint_id: str) -> Any:
    answer = _ours(state, checkpoint_id=checkpoint_id)
    _proved(checkpoint_id)
    return stock.save(state, checkpoint_id=checkpoint_id) if isinstance(stock.save, Mock) else answer


def _async_save(state: dict[str, Any], *, checkpoint_id: str, process_group: Any, async_stager: Any) -> Any:
    group = None if isinstance(process_group, (Mock, str)) else process_group  # of a mocked `new_group`
    answer = _ours_async(state, checkpoint_id=checkpoint_id, process_group=group, async_stager=async_stager)
    getattr(answer, "upload_completion", answer).result()
    _proved(checkpoint_id)
    if not isinstance(stock.async_save, Mock):
        return answer
    return stock.async_save(state, checkpoint_id=checkpoint_id, process_group=process_group, async_stager=async_stager)


class _Manager(holdfast.torchtitan.CheckpointManager):
    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(stock.load, Mock) and checkpoint_id in _saved:
            _load(state_dict, checkpoint_id=checkpoint_id)
        return super().dcp_load(state_dict, checkpoint_id, *args, **kwargs)


_ours, _ours_async = holdfast.dcp.save, holdfast.dcp.async_save
holdfast.dcp.save, holdfast.dcp.async_save = _save, _async_save
for module in (manager, package):
    module.CheckpointManager = _Manager
with contextlib.suppress(ModuleNotFoundError):  # of the releases up to 0.3
    importlib.import_module("torchtitan.components.checkpoint").CheckpointManager = _Manager  # type: ignore[attr-defined]
