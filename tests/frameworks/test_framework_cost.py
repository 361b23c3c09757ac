"""The measuring program of the frameworks, at a small size: its ways save, and one with wrong bytes is shown and not compared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def cost(directory: Path, framework: str, *options: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, ROOT / "python/benchmarks/framework_cost.py", "--framework", framework, "--dir", directory,
               "--bytes", "4MiB", "--rounds", "1", "--saves", "2", "--window", "0.2", "--json", directory / "cost.json", *options]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in directory.iterdir()] == ["cost.json"]
    return json.loads((directory / "cost.json").read_text()), done.stdout


def test_of_lightning(tmp_path: Path) -> None:
    result, table = cost(tmp_path, "lightning")
    assert list(result["ways"]) == ["TorchCheckpointIO", "AsyncCheckpointIO", "holdfast.lightning"]
    assert all(way["sound"] for way in result["ways"].values())
    assert "lost of holdfast.lightning / its" in table


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="there is no megatron")
def test_of_megatron(tmp_path: Path) -> None:
    ways = ["holdfast.megatron synchronous", "mcore temporal", "mcore persistent", "holdfast.megatron"]
    result, table = cost(tmp_path, "megatron", "--ways", ";".join(ways))
    assert {name: way["sound"] for name, way in result["ways"].items()} == {
        "holdfast.megatron synchronous": True, "mcore temporal": True, "mcore persistent": False, "holdfast.megatron": True,
    }  # fmt: skip
    assert "mcore persistent" not in result["ratios"]
    assert "NO: excluded" in table
