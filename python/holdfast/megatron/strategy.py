"""A save strategy for whoever calls ``dist_checkpointing.save`` by himself: nothing is replaced."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (  # type: ignore[import-not-found,import-untyped]
    TorchDistSaveShardedStrategy,
)

from holdfast.megatron import dialects, stock
from holdfast.megatron.writer import FileSystemWriterAsync, LateNames, checked


class SaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy for the format ``torch_dist``, with the writer of Holdfast.

    ``dist_checkpointing.save(state, path, sharded_strategy=SaveStrategy())``; also inside of a
    ``FullyParallelSaveStrategyWrapper``. The request of an asynchronous save runs under any queue.
    """

    def __init__(self, *args: Any, late: LateNames = (), **kwargs: Any) -> None:
        """A strategy, for one save after the other.

        Args:
            *args, **kwargs: as of Megatron's.
            late: optimizers or tensors that the training leaves alone until its next step, as of
                `holdfast.megatron.install`.

        Raises:
            Error: INVALID_ARGUMENT, `late` is none of these.
        """
        super().__init__(*args, **kwargs)
        own = {"late": checked(late)}
        self._writer_class = type("FileSystemWriterAsync", (FileSystemWriterAsync,), own)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Saves; the data streams through a small part of the staging memory."""
        with stock.synchronously():
            return super().save(sharded_state_dict, checkpoint_dir)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx",
                   **kwargs: Any) -> Any:  # fmt: skip
        """Captures the state and starts to write; returns the request.

        Args:
            sharded_state_dict, checkpoint_dir: as of Megatron's.
            async_strategy: the dialect: whose class the request has.

        Raises:
            TypeError: there is no such dialect.
        """
        stock_save = TorchDistSaveShardedStrategy.async_save
        if "async_strategy" in inspect.signature(stock_save).parameters:
            kwargs["async_strategy"] = async_strategy
        else:  # Megatron-Core 0.16 has one dialect only
            async_strategy = "mcore"
        return self._with_ours(stock_save, async_strategy)(self, sharded_state_dict, checkpoint_dir, **kwargs)

    def _get_save_and_finalize_callbacks(self, *args: Any, **kwargs: Any) -> Any:
        method = TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks
        return self._with_ours(method, "mcore")(self, *args, **kwargs)

    def _with_ours(self, method: Callable[..., Any], dialect: str) -> Callable[..., Any]:
        """Megatron's method with our functions where it looks for its own, in this call alone."""

        def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> tuple[str, Any]:
            names = dialects.names_of(async_strategy, self._writer_class)
            return async_strategy, names if module is None else names[module]

        ours = dialects.names_of(dialect, self._writer_class)
        found = vars(sys.modules[method.__module__])
        names = {name: ours[name] for name in ours.keys() & found.keys()}
        seen = {**found, **names, "get_async_strategy": get_async_strategy}
        function = types.FunctionType(method.__code__, seen, method.__name__, method.__defaults__, method.__closure__)
        function.__kwdefaults__ = method.__kwdefaults__
        return function
