"""The Python of this checkout by the rules of `pyproject.toml`, and the types of the package and of the steps for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
# No test runs them whole: without a GPU, Megatron-Core or Lightning they are skipped.
GPU_STEPS = sorted(step.stem for step in (ROOT / "tools/gpu_check").glob("*.py"))
IMPORTED = os.pathsep.join(str(ROOT / folder) for folder in ("tools/gpu_check", "python/benchmarks"))


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(["ruff", "check", "--no-cache", "python", "tests", "tools"], id="rules"),
        # The package as it is installed: with the stubs that the build made.
        pytest.param(["mypy", "--cache-dir=/dev/null", "--ignore-missing-imports", "-p", "holdfast",
                      *(option for step in GPU_STEPS for option in ("-m", step))], id="types"),
    ],
)
def test_it_is_clean(tool: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT if tool[0] == "ruff" else tmp_path,
                          capture_output=True, text=True, timeout=300, env={**os.environ, "MYPYPATH": IMPORTED})
    assert done.returncode == 0, done.stdout + done.stderr
