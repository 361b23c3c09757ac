"""The page on nvidia-resiliency-ext: its programs run as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs/nvrx.md").read_text()
LOCAL, TORCH_SAVE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_local_checkpoints_as_written(tmp_path: Path) -> None:
    said = re.search(r"It prints `(.*?)`", TEXT)
    assert said is not None
    # The program asks for a GPU; the state class asserts one.
    (tmp_path / "local.py").write_text("import cpu_for_gpu\ncpu_for_gpu.replace_gpu()\n" + LOCAL)
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "frameworks/no_gpu"), "PYTHONOPTIMIZE": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "local.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False, env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said[1] in done.stdout
    for rank in range(2):
        found = os.listdir(tmp_path / f"local-disk/{rank}")
        assert f"iter_0000030_{rank}_local.pt" in found and any("holdfast" in name for name in found)


def test_torch_save_as_written(tmp_path: Path) -> None:
    program = "import torch\nmodel = torch.nn.Linear(4, 4)\n" + TORCH_SAVE + "assert torch.load('last.pt')['model']\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
