"""Replacing names in Megatron's modules: in those that are imported, and in those that will be."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.megatron import dialects, stock
from holdfast.megatron.planning import finalize, plan_mcore, plan_nvrx
from holdfast.megatron.queue import AsyncCallsQueue, NvrxAsyncCallsQueue
from holdfast.megatron.writer import FileSystemWriterAsync

_S = stock.STRATEGIES
_NVRX = "nvidia_resiliency_ext.checkpointing."

# By module that defines it, and name: ours, or the module that has it, which is imported when that one is. Modules
# that import such a name by itself get ours, too.
_REPLACED: dict[str, dict[str, Any]] = {
    _S + "torch": {"get_async_strategy": dialects.get_async_strategy},
    _S + "async_utils": {"AsyncCallsQueue": AsyncCallsQueue},
    _NVRX + "async_ckpt.core": {"AsyncCallsQueue": NvrxAsyncCallsQueue},
    _NVRX + "async_ckpt.filesystem_async": {"FileSystemWriterAsync": dialects.NvrxFileSystemWriterAsync},
    _NVRX + "async_ckpt.state_dict_saver": {
        "save_state_dict_async_plan": plan_nvrx,
        "save_state_dict_async_finalize": dialects.finalize_nvrx,
    },
    _NVRX + "async_ckpt.torch_ckpt": {"TorchAsyncCheckpoint": "holdfast.nvrx.torch_checkpoint"},
    _NVRX + "local.ckpt_managers.local_manager": {"LocalCheckpointManager": "holdfast.nvrx.local_manager"},
}
# Of Megatron-Core 0.16, which has no get_async_strategy: its strategy names the classes.
_OLD: dict[str, dict[str, Any]] = {
    _S + "filesystem_async": {"FileSystemWriterAsync": FileSystemWriterAsync},
    _S + "state_dict_saver": {
        "save_state_dict_async_plan": plan_mcore,
        "save_state_dict_async_finalize": finalize,
    },
}
_STRATEGY = "TorchDistSaveShardedStrategy"


class Patch:
    """All replacements of one `install`, and their way back."""

    def __init__(self) -> None:
        self._done: list[tuple[str, Any, Any]] = []  # name, what was there, ours
        self._classes: list[tuple[type, str, Any, Any]] = []  # class, name, what it had itself, ours
        self._finder = _Finder(self._apply)

    def start(self) -> None:
        """Replaces what is imported, and waits for what will be."""
        for name in self._finder.names:
            module = sys.modules.get(name)
            if module is not None and not self._finder.is_loading(module):
                self._apply(module)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Puts back what was there, unless somebody else has replaced it since."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for name, before, ours in self._done:
            _replace_everywhere(name, ours, before)
        for owner, name, before, ours in self._classes:
            if vars(owner).get(name) is not ours:
                continue
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def _apply(self, module: ModuleType) -> None:
        name = module.__name__
        if name == _S + "torch":
            self._wait_in_save(module)
            if not hasattr(module, "get_async_strategy"):
                for old, replaced in _OLD.items():
                    self._replace(sys.modules[old], replaced)
                return
        self._replace(module, _REPLACED[name])

    def _replace(self, module: ModuleType, names: dict[str, Any]) -> None:
        for name, ours in names.items():
            before = vars(module).get(name)
            if isinstance(ours, str):
                ours = getattr(importlib.import_module(ours), name)
            if before is None or before is ours:
                continue
            stock.remember(module.__name__, name, before)
            self._done.append((name, before, ours))
            _replace_everywhere(name, before, ours)

    def _wait_in_save(self, module: ModuleType) -> None:
        """Makes the strategy's synchronous save known to the writer."""
        # In Megatron-Core 0.16 the strategy inherits it.
        strategy: Any = getattr(module, _STRATEGY, None)
        stock_save = getattr(strategy, "save", None)
        if stock_save is None:
            return

        @functools.wraps(stock_save)
        def save(*args: Any, **kwargs: Any) -> Any:
            with stock.synchronously():
                return stock_save(*args, **kwargs)

        self._classes.append((strategy, "save", vars(strategy).get("save"), save))
        strategy.save = save


def _replace_everywhere(name: str, before: Any, after: Any) -> None:
    """Replaces a name in the module that defines it, and wherever it was imported by itself."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(name) is before:
            if not module.__name__.startswith("holdfast."):
                setattr(module, name, after)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as the other finders do, and calls `apply` once they are loaded."""

    names = frozenset(_REPLACED)

    def __init__(self, apply: Callable[[ModuleType], None]) -> None:
        self._apply = apply

    def is_loading(self, module: ModuleType) -> bool:
        return bool(getattr(module.__spec__, "_initializing", False))

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname not in self.names:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)  # Python, too, passes over a finder without it
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._apply)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that calls `apply` when the module is loaded, and is then gone."""

    def __init__(self, loader: Any, apply: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._apply = apply

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._apply(module)
