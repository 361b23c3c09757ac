"""The page on Megatron: its first save runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/megatron.md"


def test_the_first_save_runs_as_written(tmp_path: Path) -> None:
    text = PAGE.read_text()
    program = re.search(r"## A first save\n.*?```python\n(.*?)```", text, re.DOTALL)
    said = re.search(r"It prints `(.*?)`", text)
    assert program is not None and said is not None
    (tmp_path / "first.py").write_text(program[1])
    done = subprocess.run([sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "first.py"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert said[1] in done.stdout
