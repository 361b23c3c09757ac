"""Saves by default in a process whose control group leaves less memory than the state takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20
LIMIT = 900 * MIB  # PyTorch itself takes 200 to 300 MiB of it

SAVE = """
import sys, torch, holdfast
state = {"w": torch.arange(300 << 18, dtype=torch.float32)}
report = holdfast.save_async(state, sys.argv[1] + "/step-1", step=1).wait(120)
back = holdfast.load(sys.argv[1] + "/step-1", into={"w": state["w"].neg_()})
assert torch.equal(back["w"][:1000], torch.arange(1000.0))
print(report["streamed"], holdfast.staging()["arena_bytes"])
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group with a memory limit."""
    version1 = Path("/sys/fs/cgroup/memory")
    root = version1 if version1.is_dir() else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if version1.is_dir() else "memory.max"
    group = root / f"holdfast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / limit).write_text(str(LIMIT))
        yield group
    except OSError as error:
        pytest.skip(f"no memory limit can be set here: {error}")
    finally:
        group.rmdir()


def test_a_state_larger_than_what_is_left_streams_by_default(
    limited_group: Path, tmp_path: Path
) -> None:
    procs = limited_group / "cgroup.procs"
    command = f'echo $$ > {procs} && exec "$0" -c "$1" "$2"'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable, SAVE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    streamed, arena = ended.stdout.split()
    assert streamed == "True"
    assert int(arena) < 300 * MIB
