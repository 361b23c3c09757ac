"""Strategies whose sharded checkpoints are saved asynchronously.

The framework's own write each shard in the call, into the directory that stands there; no plugin is
asked. Here the ranks save through `holdfast.dcp.async_save` into a directory of another name, and rank
0 saves ``meta.pt`` there, as a file with a manifest of its own. When all of it is durable, rank 0
renames the directory. Loading is the framework's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

import holdfast.dcp
from holdfast._durable import make_directory_of
from holdfast.dcp.failures import error_of
from holdfast.errors import Error
from holdfast.files import save_file
from holdfast.handle import Save
from holdfast.lightning import agreement, directories, flavor, hooks
from holdfast.lightning.checkpoint_io import CheckpointIO, location
from holdfast.lightning.following import Following

_strategies: Any = flavor.pytorch("strategies")


@dataclasses.dataclass
class _Begin:
    """What the ranks agree on.

    Attributes:
        path: of the checkpoint.
        new: its directory until it is whole.
        step: of the training.
        failed_before: the error of an earlier save on rank 0.
        refusal: why rank 0 cannot save.
    """

    path: str = ""
    new: str = ""
    step: int = 0
    failed_before: str = ""
    refusal: str = ""


class _Sharded:
    """What both strategies have in common. One sharded save is in flight: the next one waits for it."""

    _holdfast_io: CheckpointIO | None = None
    _model_key = ""

    def _saves_shards(self) -> bool:
        raise NotImplementedError

    # ---- The plugin: of whole checkpoints, and for the order of all.

    @property
    def checkpoint_io(self) -> Any:
        if self._checkpoint_io is None:
            self.checkpoint_io = CheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        own = hooks.unwrapped(plugin, CheckpointIO)
        if own is None:
            raise TypeError(
                f"{type(self).__name__} saves with holdfast.lightning.CheckpointIO, not with "
                f"{type(plugin).__name__}; pass that plugin, or none"
            )
        self._checkpoint_io: Any = plugin
        self._holdfast_io = own

    def _plugin(self) -> CheckpointIO:
        assert self.checkpoint_io is not None and self._holdfast_io is not None
        return self._holdfast_io

    # ---- Saving and loading.

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Begins a save on all ranks, after the one before has ended.

        Raises:
            TypeError: `storage_options`, which a sharded checkpoint has none of.
            Error: of an earlier save that has failed on some rank, after this one was begun.
        """
        if not self._saves_shards():
            self._plugin().order.wait()  # it clears a directory that is in the way
            super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
            return
        if storage_options is not None:
            raise TypeError(f"save {filepath}: a sharded checkpoint is a local directory and has no storage_options")
        plugin = self._plugin()
        plugin.order.wait_for_saves()
        error = plugin.order.take_error()
        state = {self._model_key: checkpoint.pop("state_dict")}
        optimizers = checkpoint.pop("optimizer_states", [])
        state.update({f"optimizer_{i}": optimizer for i, optimizer in enumerate(optimizers)})
        begin, rest = self._agreed(checkpoint, filepath, error)
        plugin.order.save(begin.path, lambda: self._begin(begin, rest, state))
        if any(fnmatch.fnmatch(os.path.basename(begin.path), name) for name in plugin.durable_names):
            self._settle(begin.path)
        plugin.deliver()
        _raise(error or (agreement.of(begin.failed_before) if begin.failed_before else None))

    def _agreed(
        self: Any, checkpoint: dict[str, Any], filepath: Any, error: BaseException | None
    ) -> tuple[_Begin, Save | None]:
        """What all ranks know of a save, from rank 0, and there the save of what is not sharded.

        Raises:
            Error: rank 0 cannot save that.
        """
        begin, rest, refusal = _Begin(), None, None
        if self.is_global_zero:
            try:
                path = location(filepath, "save")
                make_directory_of(path)
                step = int(checkpoint.get("global_step") or 0)
                begin = _Begin(path, directories.unfinished(path), step, str(error or ""))
                meta = os.path.join(begin.new, directories.META)
                rest = save_file(checkpoint, meta, step=step, runtime=self._plugin().runtime)
            except Exception as refused:
                refusal, begin = refused, _Begin(refusal=repr(refused))
        begin = self.broadcast(begin)
        if refusal is not None:
            raise refusal
        if begin.refusal:
            raise Error("ABORTED", f"save {filepath}: rank 0 cannot save it: {begin.refusal}")
        return begin, rest

    def _begin(self: Any, begin: _Begin, rest: Save | None, state: dict[str, Any]) -> Following:
        writer = holdfast.dcp.StorageWriter(begin.new, step=begin.step)
        writer.runtime = self._plugin().runtime
        saved: Any = holdfast.dcp.async_save(state, storage_writer=writer)

        def complete() -> None:
            if self.is_global_zero:
                directories.commit(begin.new, begin.path)

        def wait() -> None:
            try:
                saved.result()
            except CheckpointException as failed:  # of several ranks
                raise error_of(failed, begin.path) from None
            finally:
                if rest is not None:
                    rest.wait()

        return Following(begin.path, saved, wait, complete, lambda: None, writer.runtime)

    def load_checkpoint(self: Any, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads as the framework does, on all ranks, after all saves have ended.

        Raises:
            Error: of a save that has failed on some rank.
        """
        self._settle(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]

    def _settle(self: Any, path: Any) -> None:
        """Waits on all ranks for their saves; raises on all what has failed on some.

        What a crash has left of a commit of `path` is ended.
        """
        order = self._plugin().order
        order.wait_for_saves()
        error = order.take_error()
        if self.is_global_zero and error is None:
            try:
                directories.complete(os.path.realpath(location(path, "load")))
            except Error as failed:
                error = failed
        _raise(agreement.error_of_ranks(self, error))


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


class ModelParallelStrategy(_Sharded, _strategies.ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallel) with asynchronous checkpoints.

    ``Trainer(strategy=ModelParallelStrategy(...))``, with Lightning's arguments. `CheckpointIO` is its
    plugin, with the options of your own if you pass one.
    """

    _model_key = "state_dict"

    def _saves_shards(self) -> bool:
        return self._save_distributed_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model's state; sharded, it stays on its device, and the save copies it from there."""
        if not self._saves_shards():
            return super().lightning_module_state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=False, cpu_offload=False))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, likewise."""
        if not self._saves_shards():
            return super().optimizer_state(optimizer)
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=False, cpu_offload=False)
        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer), options=options)


class FSDPStrategy(_Sharded, _strategies.FSDPStrategy):
    """Lightning's ``FSDPStrategy`` with asynchronous checkpoints, otherwise as it is."""

    _model_key = "model"

    def _saves_shards(self) -> bool:
        return self._state_dict_type == "sharded"
