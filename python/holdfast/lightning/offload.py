"""`OffloadCallback`: a checkpoint's tensors on the CPU, before the plugin that saves it sees them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from holdfast import _arguments
from holdfast._log import size
from holdfast.errors import counted
from holdfast.lightning import flavor
from holdfast.lightning.moving import Move, Skipped

logger = logging.getLogger("holdfast.lightning")

_Callback: Any = flavor.pytorch("callbacks").Callback
# What a Lightning checkpoint has tensors in.
KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks")
_SHOWN = 10
# Strategies of which every rank saves a part.
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")


class OffloadCallback(_Callback):
    """Replaces device tensors of a checkpoint by copies in host memory, when it is put together.

    ::

        trainer = Trainer(callbacks=[OffloadCallback()], plugins=[AsyncCheckpointIO()])

    A plugin that clones a checkpoint, to save it behind the training, would clone it on the GPU; with
    this callback the clone is one in host memory. `holdfast.lightning.CheckpointIO` takes no GPU
    memory by itself and needs no such callback.

    Dicts, lists and tuples are walked and made anew; the state that trains is not touched. Each
    storage is copied once, straight to the host, without a copy on the device: tied weights stay tied.
    A DTensor or ShardedTensor is copied by its part on this rank. A custom object stays as it is and
    is reported, with what it holds. If a key fails, that is logged, and the key stays as it is.

    With a strategy whose rank 0 saves, the other ranks do nothing; where every rank saves a part, each
    moves its own.

    Attributes:
        counters: ``saves``, ``failures``, ``tensors``, ``bytes_freed``, ``seconds`` in all saves, also
            those before a resume; part of the callback's state in the checkpoint.

    Args:
        offload_keys: of the checkpoint, at its top level.
        report_all: log all custom objects of a save, not only the first and the last ten.

    Raises:
        Error: INVALID_ARGUMENT naming the argument.
    """

    @_arguments.checked
    def __init__(self, offload_keys: Sequence[str] = KEYS, report_all: bool = False) -> None:
        super().__init__()
        self.offload_keys = tuple(offload_keys)
        self.report_all = report_all
        self.counters: dict[str, float] = {
            "saves": 0, "failures": 0, "tensors": 0, "bytes_freed": 0, "seconds": 0.0,
        }  # fmt: skip
        self._reported: list[Skipped] | None = None

    @property
    def averages(self) -> dict[str, float]:
        """``bytes_freed`` and ``seconds`` of a save, on average."""
        saves = self.counters["saves"] or 1
        return {name: self.counters[name] / saves for name in ("bytes_freed", "seconds")}

    # ---- What Lightning calls.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Moves the tensors of `checkpoint`."""
        saves_a_part = any(kind.__name__ in _SHARDED for kind in type(trainer.strategy).__mro__)
        if not trainer.is_global_zero and not saves_a_part:
            return
        started = time.monotonic()
        move = Move()
        for key in self.offload_keys:
            if key not in checkpoint:
                continue
            try:
                with move.counted():
                    checkpoint[key] = move.moved(checkpoint[key], key)
            except Exception as error:
                self.counters["failures"] += 1
                logger.exception("offload %r: %s; it stays where it is", key, error)
        move.finish()
        self.counters["saves"] += 1
        self.counters["tensors"] += move.tensors
        self.counters["bytes_freed"] += move.bytes_freed
        self.counters["seconds"] += time.monotonic() - started
        self._report(move.skipped)
        states = checkpoint.get("callbacks")
        if isinstance(states, dict):  # it was asked for before this save was counted
            states[self.state_key] = self.state_dict()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs a summary."""
        self._summarize()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Logs a summary."""
        self._summarize()

    def state_dict(self) -> dict[str, Any]:
        """The counters."""
        return {"counters": dict(self.counters)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the counters of a checkpoint."""
        self.counters.update(state_dict["counters"])

    # ---- What is logged.

    def _report(self, skipped: list[Skipped]) -> None:
        """Logs the custom objects of a save, unless they are those of the save before."""
        if skipped == self._reported or not skipped:
            return
        self._reported = skipped
        shown = skipped
        if not self.report_all and len(skipped) > 2 * _SHOWN:
            shown = [*skipped[:_SHOWN], *skipped[-_SHOWN:]]
        left_out = len(skipped) - len(shown)
        lines = [f"{one.path}: {one.kind}" for one in shown]
        if left_out:
            lines.insert(_SHOWN, f"... {left_out} more ...")
        logger.warning(
            "offload: %d custom objects stay as they are, with the tensors that they hold:\n  %s",
            len(skipped), "\n  ".join(lines),
        )  # fmt: skip

    def _summarize(self) -> None:
        mean = self.averages
        logger.info(
            "offload: %s, %s freed in all, %s and %.3f s a save, %s failed",
            counted(int(self.counters["saves"]), "save"), size(self.counters["bytes_freed"]), size(mean["bytes_freed"]),
            mean["seconds"], counted(int(self.counters["failures"]), "key"),
        )  # fmt: skip
