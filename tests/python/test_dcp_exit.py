"""Interpreters and checkpoint processes that end with a DCP save in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp
from holdfast.dcp import staging

pytestmark = pytest.mark.filterwarnings("ignore")

_SCRIPT = """
import resource, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, holdfast.dcp
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
if sys.argv[2] == "fails":
    holdfast.dcp.async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1] + "-before").result()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
future = holdfast.dcp.async_save({"w": torch.arange(2_000_000.0)}, checkpoint_id=sys.argv[1])
"""


def _run(path: Path, way: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(path), way],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_last_save_is_awaited_at_exit(tmp_path: Path) -> None:
    done = _run(tmp_path / "run", "works")
    assert done.returncode == 0, done.stderr
    loaded = {"w": torch.zeros(2_000_000)}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(tmp_path / "run"))
    assert torch.equal(loaded["w"], torch.arange(2_000_000.0))


_IN_A_DAEMON = """
import sys, threading, warnings
warnings.simplefilter("ignore")
import torch, holdfast, holdfast.dcp
state = {"w": torch.arange(2_000_000.0)}
def train():
    holdfast.dcp.async_save(state, checkpoint_id=sys.argv[1])
    holdfast.save_async(state, sys.argv[1] + "-plain")
thread = threading.Thread(target=train, daemon=True)
thread.start()
thread.join()
"""


def test_saves_that_a_daemon_thread_called_are_awaited_at_exit(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _IN_A_DAEMON, str(tmp_path / "run")], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(tmp_path)) == ["run", "run-plain"]
    assert holdfast.dcp.verify(tmp_path / "run")["verdict"] == holdfast.verify(tmp_path / "run-plain")["verdict"] == "sound"


def test_a_failure_that_nobody_saw_shows_in_the_exit_status(tmp_path: Path) -> None:
    done = _run(tmp_path / "run", "fails")
    assert done.returncode == 1
    assert "__0_0.distcp" in done.stderr
    assert not (tmp_path / "run" / ".metadata").exists()


class DyingWriter(holdfast.dcp.StorageWriter):
    """Takes its process with it when its data is durable, before anybody hears of it."""

    def begin(self, *args: Any, **kwargs: Any) -> Any:
        written = super().begin(*args, **kwargs)
        if self.path.name == "second":
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def _checkpoint_process_dies(rank: int, directory: str) -> tuple[str, int]:
    from torch.distributed.checkpoint import _async_process_executor as executor
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    def save(name: str) -> Any:
        return dcp.async_save(
            {"w": torch.full((1_000_000,), 1.0)},
            storage_writer=DyingWriter(os.path.join(directory, name)),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    save("first").result()
    try:
        save("second").result()
        message = ""
    except RuntimeError as error:
        message = str(error)
        del error
    executor._CHECKPOINT_PROCESS = None
    # What the dead process could have read from is free again, because it is dead.
    import gc
    import time

    deadline = time.monotonic() + 30
    while staging.held_bytes() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return message, staging.held_bytes()


def test_a_checkpoint_process_that_is_killed_leaves_no_memory_and_no_checkpoint(
    tmp_path: Path,
) -> None:
    ((message, held),) = dcp_ranks.run_ranks(1, tmp_path, _checkpoint_process_dies, str(tmp_path))
    assert "is dead" in message
    assert held == 0
    assert not (tmp_path / "second" / ".metadata").exists()
    loaded = {"w": torch.zeros(1_000_000)}
    dcp.load(loaded, storage_reader=holdfast.dcp.StorageReader(tmp_path / "first"))
    assert (loaded["w"] == 1).all()


_INTERRUPTED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp, holdfast.dcp
signal.signal(signal.SIGINT, signal.default_int_handler)

class Planner(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        if sys.argv[2] == "planning":
            os.kill(os.getpid(), signal.SIGINT)
        return super().create_local_plan()

    def resolve_data(self, item):
        if sys.argv[2] == "staging":
            os.kill(os.getpid(), signal.SIGINT)
        return super().resolve_data(item)

state = {"w": torch.arange(2_000_000.0)}
try:
    holdfast.dcp.async_save(state, checkpoint_id=sys.argv[1], planner=Planner())
except KeyboardInterrupt:
    print("interrupted")
holdfast.flush(60)
print(os.path.exists(sys.argv[1] + "/.metadata"))
holdfast.dcp.async_save(state, checkpoint_id=sys.argv[1]).result(60)
print(holdfast.dcp.verify(sys.argv[1])["verdict"])
"""


@pytest.mark.parametrize("when", ["planning", "staging"])
def test_an_interrupt_in_the_call_is_raised_and_leaves_nothing_behind(when: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(tmp_path / "run"), when],
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.stdout.split() == ["interrupted", "False", "sound"], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
