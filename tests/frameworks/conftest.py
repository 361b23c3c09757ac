"""Megatron-Core on the Python that it is not made for, and without a GPU."""

from __future__ import annotations

import importlib.util
import sys
import typing
import warnings
from pathlib import Path

import pytest
import typing_extensions

# Python 3.12 has it, and `megatron.training` imports it.
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))  # its helpers
warnings.simplefilter("ignore")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_version: also runs with the oldest Megatron-Core")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    needs = {"test_megatron": "megatron", "test_nvrx": "nvidia_resiliency_ext", "test_torchtitan": "torchtitan"}
    for beginning, package in needs.items():
        if collection_path.name.startswith(beginning) and importlib.util.find_spec(package) is None:
            warnings.warn(
                f"{collection_path.name} is left out: there is no {package}; see tools/venv.sh --frameworks",
                stacklevel=1,
            )
            return True
    return None


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
