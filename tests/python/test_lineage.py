"""Each save names the checkpoint that its state descends from; branches that a rollback leaves go first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import holdfast as command

import holdfast
import holdfast.dcp

_EARLIER = """
import sys, torch, holdfast, holdfast.dcp
directory = sys.argv[1]
for step in (100, 200, 300):
    holdfast.save({"w": torch.full((1000,), float(step))}, f"{directory}/plain/step-{step}", step=step)
    holdfast.dcp.save({"w": torch.full((1000,), float(step))}, checkpoint_id=f"{directory}/dcp/step-{step}")
"""


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 100, 200 and 300 that another process has saved."""
    path = tmp_path_factory.mktemp("earlier")
    subprocess.run([sys.executable, "-c", _EARLIER, path], check=True, timeout=200)
    return path


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def listed(directory: Path, format: str = "holdfast") -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in holdfast.list_checkpoints(directory, format=format)}


def parents(directory: Path, format: str = "holdfast") -> dict[str, str]:
    """Names by names: of each checkpoint the one that it descends from."""
    found = listed(directory, format)
    names = {c["attempt"]: name for name, c in found.items()}
    return {name: names.get(c["parent"], "") for name, c in found.items()}


def states(directory: Path) -> dict[str, str]:
    return {c["name"]: c["state"] for c in command("ls", "--json", directory, torch=False).json["checkpoints"]}


def test_a_new_process_continues_what_it_has_loaded(earlier: Path) -> None:
    directory = earlier / "plain"
    loaded = holdfast.load(directory / "step-100")
    # The step is higher than that of the branch which is left: the parent alone tells.
    holdfast.save(loaded, directory / "step-400", step=400)
    holdfast.save(loaded, directory / "step-500", step=500)
    assert parents(directory) == {
        "step-100": "", "step-200": "step-100", "step-300": "step-200",
        "step-400": "step-100", "step-500": "step-400",
    }  # fmt: skip
    assert states(directory) == {
        "step-100": "complete", "step-200": "abandoned", "step-300": "abandoned",
        "step-400": "complete", "step-500": "newest",
    }  # fmt: skip
    assert holdfast.find_newest(directory)["name"] == "step-500"
    holdfast.save(loaded, directory / "step-600", step=600, keep_last=4)
    holdfast.flush(60)
    assert list(listed(directory)) == ["step-100", "step-400", "step-500", "step-600"]


def test_the_same_through_dcp(earlier: Path) -> None:
    directory = earlier / "dcp"
    with holdfast.Checkpointer(directory, format="dcp", keep_last=4) as checkpointer:
        checkpointer.load(100, into=state())
        checkpointer.save(state(4), 400)
        checkpointer.wait(60)
        assert list(listed(directory, "dcp")) == ["step-100", "step-200", "step-300", "step-400"]
        assert parents(directory, "dcp") == {
            "step-100": "", "step-200": "step-100", "step-300": "step-200", "step-400": "step-100",
        }  # fmt: skip
        assert states(directory)["step-200"] == "abandoned"
        checkpointer.save(state(5), 500)
        checkpointer.wait(60)
        assert list(listed(directory, "dcp")) == ["step-100", "step-300", "step-400", "step-500"]
    assert parents(directory, "dcp")["step-500"] == "step-400"


def test_the_frameworks_own_save_and_load_do_the_same(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save(state(), storage_writer=holdfast.dcp.StorageWriter(tmp_path / f"step-{step}"), no_dist=True)
    dcp.load(state(), storage_reader=holdfast.dcp.StorageReader(tmp_path / "step-1"), no_dist=True)
    dcp.save(state(), storage_writer=holdfast.dcp.StorageWriter(tmp_path / "s-2"), no_dist=True)
    assert parents(tmp_path, "dcp") == {"step-1": "", "step-2": "step-1", "s-2": "step-1"}


def test_a_rollback_within_a_process(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, replace=True) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(state(), step)
        checkpointer.load(100)
        checkpointer.save(state(), 250)
        checkpointer.save(state(), 300)
        assert parents(tmp_path)["step-250"] == "step-100"
        assert parents(tmp_path)["step-300"] == "step-250"
    assert states(tmp_path)["step-200"] == "abandoned"


def test_a_load_beside_the_training_is_no_rollback(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        holdfast.save(state(), tmp_path / f"step-{step}", step=step)
    holdfast.load(tmp_path / "step-100")  # to compare with
    holdfast.open(tmp_path / "step-200")["w"]
    holdfast.save(state(), tmp_path / "step-400", step=400)
    assert parents(tmp_path)["step-400"] == "step-300"
    assert "abandoned" not in states(tmp_path).values()


def test_saves_without_steps_descend_from_the_last_load(tmp_path: Path) -> None:
    for name in ("a", "b"):
        holdfast.save(state(), tmp_path / name)
    holdfast.load(tmp_path / "a")
    holdfast.save(state(), tmp_path / "c")
    assert parents(tmp_path) == {"a": "", "b": "a", "c": "a"}


def test_a_failed_save_is_no_parent(tmp_path: Path) -> None:
    holdfast.save(state(), tmp_path / "step-1", step=1)
    holdfast.load(tmp_path / "step-1")
    with pytest.raises(holdfast.Error, match="ALREADY_EXISTS"):
        holdfast.save(state(), tmp_path / "step-1", step=2)
    cancelled = holdfast.save_async({"w": torch.zeros(32 << 20)}, tmp_path / "step-3", step=3)
    cancelled.cancel()
    if cancelled.durable.exception(60) is None:
        pytest.skip("it was committed before it could be cancelled")
    holdfast.save(state(), tmp_path / "step-4", step=4)
    assert parents(tmp_path) == {"step-1": "", "step-4": "step-1"}


def test_directories_have_lines_of_their_own(tmp_path: Path) -> None:
    holdfast.save(state(), tmp_path / "a" / "step-1", step=1)
    holdfast.save(state(), tmp_path / "b" / "step-1", step=1)
    holdfast.load(tmp_path / "a" / "step-1")
    holdfast.save(state(), tmp_path / "b" / "step-2", step=2)
    assert parents(tmp_path / "b") == {"step-1": "", "step-2": "step-1"}
