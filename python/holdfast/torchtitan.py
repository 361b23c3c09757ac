"""torchtitan through Holdfast: ``checkpoint=holdfast.torchtitan.CheckpointManager.Config(...)``."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch

import holdfast.dcp
from holdfast import _names
from holdfast.dcp.staging import Stager

try:
    from torchtitan.components.checkpointer import AsyncMode  # type: ignore[import-not-found,import-untyped]
    from torchtitan.components.checkpointer import CheckpointManager as _Stock
    from torchtitan.tools import filesystem  # type: ignore[import-not-found,import-untyped]
    from torchtitan.tools.utils import GarbageCollection  # type: ignore[import-not-found,import-untyped]
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("torchtitan"):
        raise
    raise ModuleNotFoundError("holdfast.torchtitan needs torchtitan 0.3 or newer: install torchtitan",
                              name=error.name) from error  # fmt: skip

_Base: Any = _Stock
_STEP = re.compile(r"step-(\d+)")
_WHOLE = (_names.METADATA, "model.safetensors.index.json")


class CheckpointManager(_Base):  # type: ignore[misc]
    """torchtitan's manager of DCP checkpoints, whose saves are those of `holdfast.dcp`.

    Configuration, methods, files and loading are torchtitan's. The modes of ``async_mode``:

    - ``disabled``: a save streams through the staging memory, and the call returns when it is durable.
    - ``async``: the state is captured in the call; GPU tensors are ordered into the current stream.
    - ``async_with_pinned_mem``: what the optimizers own is copied behind forward and backward, until
      ``maybe_wait_for_staging``; all else as with ``async``. No process and no further memory is used.

    Old checkpoints are removed when the newer one is durable, and only whole ones count as kept.
    Hugging Face exports and remote folders are torchtitan's own saves.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):  # type: ignore[misc]
        """The options of torchtitan's class; naming this one in the configuration selects the manager."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """A save returns when it is durable (disabled), or when the state is captured (async); async_with_pinned_mem
        copies what the optimizers own behind forward and backward, without a process and without further memory."""

    def __init__(self, config: Any, *, optimizers: Any, **parts: Any) -> None:
        """A manager.

        Args:
            config: of this class.
            optimizers, **parts: as of torchtitan's.
        """
        super().__init__(config, optimizers=optimizers, **parts)
        if self.enable and self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            self.stager = Stager(late=getattr(optimizers, "optimizers", ()))

    @torch.no_grad()
    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any,
                 enable_garbage_collection: bool = False, to_hf: bool = False) -> Any:  # fmt: skip
        """Saves a state; all ranks call it.

        Args:
            state_dict, checkpoint_id: as of `holdfast.dcp.async_save`.
            async_mode: which of the answers.
            enable_garbage_collection: collect afterwards.
            to_hf: export for Hugging Face, by torchtitan.

        Returns:
            None, a future, or both futures.

        Raises:
            CheckpointException: as `holdfast.dcp.async_save`.
        """
        if to_hf or filesystem.is_remote(checkpoint_id):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        answer: Any = None
        if async_mode == AsyncMode.DISABLED:
            holdfast.dcp.save(state_dict, checkpoint_id=checkpoint_id)
        else:
            answer = holdfast.dcp.async_save(
                state_dict, checkpoint_id=checkpoint_id, process_group=self.pg,
                async_stager=self.stager if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM else None,
            )  # fmt: skip
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return answer

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self._purges_behind = False
        saved: bool = super()._save(curr_step, last_step)
        if self._purges_behind:
            self._purge_stale_checkpoints()
        return saved

    def _purge_stale_checkpoints(self, *, saving_step: int | None = None, staging_dir_prefix: str | None = None) -> None:
        """Removes what is older than those that are kept, once the save that was begun last is durable.

        Args:
            saving_step: of a torchtitan that calls this before the save: it is called behind it, too.
            staging_dir_prefix: of names that no save here has.
        """
        self._purges_behind = saving_step is not None
        if not self._should_purge():
            return
        if self.save_future is None:
            self._purge()
        else:
            self.save_future.add_done_callback(lambda save: self._purge() if _ended_well(save) else None)

    def _purge(self) -> None:
        """Removes what is older than the newest whole checkpoints that are kept, unless a step is exempt."""
        storage = getattr(self, "_storage", filesystem)
        is_exempt = getattr(self, "_is_purge_exempt", lambda step: False)
        steps: dict[int, str] = {}
        for name in storage.listdir(self.folder):
            named = _STEP.search(name)
            if named is not None:
                steps[int(named[1])] = filesystem.join(self.folder, name)
        whole = [s for s in sorted(steps) if any(storage.isfile(filesystem.join(steps[s], f)) for f in _WHOLE)]
        kept = whole[-self.keep_latest_k :]
        for step in sorted(steps):
            if kept and step < kept[0] and not is_exempt(step):
                self.purge_queue.put(steps[step])


def _ended_well(save: Future[Any]) -> bool:
    """Whether a future that is done has a result. This is no look at the outcome of one of ours."""
    return not save.cancelled() and Future.exception(save) is None
