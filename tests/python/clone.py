"""Scripts of the clone around the tests, as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """The script below the clone's root; the test is skipped where there is none."""
    path = ROOT / name
    if not path.exists():
        pytest.skip("there is no clone around the tests")
    spec = importlib.util.spec_from_file_location("script_" + path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
