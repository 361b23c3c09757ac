"""The Python of this checkout by the rules of `pyproject.toml`, and the package's types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(["ruff", "check", "--no-cache", "python", "tests", "tools"], id="rules"),
        # The package as it is installed: with the stubs that the build made.
        pytest.param(["mypy", "--cache-dir=/dev/null", "-p", "holdfast"], id="types"),
    ],
)
def test_it_is_clean(tool: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *tool], cwd=ROOT if tool[0] == "ruff" else tmp_path,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
