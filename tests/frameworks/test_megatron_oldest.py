"""The oldest Megatron-Core that is served: tests marked `every_version`, in a process that imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# `tools/venv.sh --frameworks` puts it there.
OLDEST = Path(sys.prefix) / "megatron-oldest"
FILES = ("test_megatron_saves.py", "test_megatron_dirty_data.py", "test_megatron_integrity.py")


@pytest.mark.skipif(not OLDEST.is_dir(), reason="there is no second Megatron-Core; see tools/venv.sh --frameworks")
def test_the_oldest_megatron_core() -> None:
    environment = {**os.environ, "PYTHONPATH": str(OLDEST)}
    asked = "import megatron.core; print(megatron.core.__file__, megatron.core.__version__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(OLDEST)), done.stdout
    tests = [str(HERE / name) for name in FILES]
    # It has one dialect, mcore.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "every_version", "-k", "not nvrx", *tests]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
