"""Pipes, directories and endless files in the place of a checkpoint's files: every reader ends, and the rest is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import holdfast as command
from draining import save
from torch.distributed.checkpoint import CheckpointException

import holdfast
import holdfast.dcp

_KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "endless": lambda path: (path.touch(), os.truncate(path, 1 << 40))[0],
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", [".metadata", "commit", "manifest", "data"])
def test_what_is_no_file_stops_nothing(name: str, kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if name in (".metadata", "commit"):
        for step in (1, 2):
            holdfast.dcp.async_save({"w": torch.ones(10)}, checkpoint_id=run / f"step-{step}").result()
    else:
        save(run, 1, 2, elements=10)
    patterns = {".metadata": ".metadata", "commit": "holdfast.commit-*", "manifest": "rank-*", "data": "*.safetensors"}
    [file] = (run / "step-1").glob(patterns[name])
    file.unlink()
    _KINDS[kind](file)

    done = command("drain", run, tmp_path / "far", torch=False, timeout=30)
    assert "Traceback" not in done.error and [n for n in os.listdir(tmp_path / "far") if "." not in n] == ["step-2"], done
    assert done.status == 0 or all(part in done.error for part in (str(run), "step-1", file.name)), done
    done = command("ls", "--json", run, torch=False, timeout=30)
    assert done.status == 0 and done.json["checkpoints"][0]["name"] == "step-2", done
    assert command("recover", "--wait", 0, run, timeout=30).status == 0
    if name in (".metadata", "commit"):
        with pytest.raises((holdfast.Error, CheckpointException)):
            holdfast.dcp.load({"w": torch.zeros(10)}, checkpoint_id=run / "step-1")
    else:
        assert str(holdfast.find_newest(run)["path"]).endswith("step-2")
