"""Which Lightning: the package `lightning`, or `pytorch_lightning` with `lightning_fabric`.

The two have classes of their own. One of them is used in a process: the one that was imported first
when this is, else `lightning`, else the one that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

# By the top-level package of the trainer: where the trainer is, and where Fabric is.
_PACKAGES = {
    "lightning": ("lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
    "lightning_fabric": ("", "lightning_fabric"),
}


def _choose() -> str:
    for is_there in (
        lambda name: sys.modules.get(name) is not None,
        lambda name: importlib.util.find_spec(name) is not None,
    ):
        for name in _PACKAGES:
            if is_there(name):
                return name
    raise ModuleNotFoundError("holdfast.lightning needs Lightning: install lightning", name="lightning")


_trainer, _fabric = _PACKAGES[_choose()]


def pytorch(module: str) -> Any:
    """A module of the trainer's package.

    Raises:
        ModuleNotFoundError: only Fabric is installed.
    """
    if not _trainer:
        raise ModuleNotFoundError("this needs the Trainer: install lightning", name="lightning")
    return importlib.import_module(f"{_trainer}.{module}")


def fabric(module: str) -> Any:
    """A module of Fabric's package."""
    return importlib.import_module(f"{_fabric}.{module}")


def imported(module: str) -> list[Any]:
    """A module of the trainer's package, of every flavor that was imported in this process."""
    return _imported([f"{trainer}.{module}" for trainer, _ in _PACKAGES.values() if trainer])


def imported_fabric(module: str) -> list[Any]:
    """Likewise of Fabric's package."""
    return _imported(sorted({f"{fabric}.{module}" for _, fabric in _PACKAGES.values()}))


def _imported(names: list[str]) -> list[Any]:
    return [sys.modules[name] for name in names if name in sys.modules]
