"""What a newcomer meets first: wrong arguments, other formats, a load that is refused, names to complete."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Unknown:
    """A class that no load makes without leave."""


@pytest.mark.parametrize("partial", [True, False])
def test_an_object_that_is_not_allowed_leaves_the_target_as_it_is(partial: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    holdfast.save({"model": model, "object": Unknown()}, tmp_path / "a")
    target = torch.nn.Linear(4, 4)
    before = target.weight.detach().clone()
    with pytest.raises(PermissionError, match="Unknown"):
        holdfast.load(tmp_path / "a", into={"model": target, "object": None}, partial=partial)
    assert torch.equal(target.weight, before)
    state = holdfast.load(tmp_path / "a", into={"model": target, "object": None}, allow=[Unknown])
    assert torch.equal(target.weight, model.weight)
    assert isinstance(state["object"], Unknown)


@pytest.mark.parametrize("step", [-1, 1 << 64, 1.5, "7", None])
def test_a_step_that_cannot_be_is_refused_by_value(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a whole number from 0"):
        holdfast.save({"t": torch.ones(2)}, tmp_path / "a", step=step)
    if step is not None:
        with pytest.raises(ValueError, match="a whole number from 0"):
            holdfast.dcp.StorageWriter(tmp_path / "a", step=step)


def test_a_step_may_be_any_integer(tmp_path: Path) -> None:
    for n, step in enumerate([torch.tensor(5), 2**64 - 1]):
        assert holdfast.save({"t": torch.ones(2)}, tmp_path / str(n), step=step)["step"] == int(step)
        save = holdfast.save_file({"t": torch.ones(2)}, tmp_path / f"{n}.pt", step=step, wait=True)
        assert type(save.step) is int and save.step == int(step)


def test_checkpoints_of_other_formats_are_named_with_what_loads_them(tmp_path: Path) -> None:
    state = {"t": torch.ones(2)}
    torch.save(state, tmp_path / "zip.pt")
    dcp.save(state, checkpoint_id=tmp_path / "stock")
    holdfast.dcp.save(state, checkpoint_id=tmp_path / "ours")
    with pytest.raises(holdfast.Error, match=r"torch\.load"):
        holdfast.load(tmp_path / "zip.pt")
    for name in ("stock", "ours"):
        with pytest.raises(holdfast.Error, match=r"holdfast\.dcp\.load"):
            holdfast.load(tmp_path / name)
        with pytest.raises(holdfast.Error, match=r"holdfast\.dcp\.load"):
            holdfast.open(tmp_path / name)


def test_a_plain_checkpoint_is_named_with_what_loads_it(tmp_path: Path) -> None:
    state = {"t": torch.ones(2)}
    holdfast.save(state, tmp_path / "step-1")
    with pytest.raises(CheckpointException, match=r"plain Holdfast checkpoint; use holdfast\.load"):
        holdfast.dcp.load(state, checkpoint_id=tmp_path / "step-1")
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        with pytest.raises(holdfast.Error, match=r"plain Holdfast checkpoint; use holdfast\.load"):
            checkpointer.load(1, into=state)


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [({"format": "dcp"}, {}, "step-1 is of another format (format='dcp')"), ({}, {"format": "dcp"}, "step-1 is of another format (format='holdfast')"),
     ({"name": "epoch-{step}"}, {}, "epoch-1 is of another name (name=)")],
)  # fmt: skip
def test_a_resume_that_looks_for_others_says_what_is_there(
    saved: dict[str, str], resumed: dict[str, str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"t": torch.ones(2)}
    with holdfast.Checkpointer(tmp_path / "none", **resumed) as checkpointer:
        assert checkpointer.newest() is None
    assert not caplog.records
    with holdfast.Checkpointer(tmp_path, **saved) as checkpointer:
        checkpointer.save(state, 1)
    with holdfast.Checkpointer(tmp_path, **resumed) as checkpointer:
        assert checkpointer.newest() is None is checkpointer.newest()
        with pytest.raises(FileNotFoundError) as refused:
            checkpointer.load(into=state)
    assert said in str(refused.value)
    assert [said in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [True]


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-12", 12), ("iter_0001000", 1000), ("epoch=3-step=100.ckpt", 100), ("7-ema", 7), ("llama-8b", 0), ("step-4k", 0), ("last", 0)],
)
def test_the_step_of_a_dcp_checkpoint_is_that_of_its_name(name: str, step: int, tmp_path: Path) -> None:
    future = holdfast.dcp.async_save({"t": torch.ones(2)}, checkpoint_id=tmp_path / name)
    future.result()
    assert future.report["step"] == step
    dcp.save({"t": torch.ones(2)}, checkpoint_id=tmp_path / f"stock-{name}")
    assert {c["step"] for c in holdfast.list_checkpoints(tmp_path, format="dcp")} == {step}


def test_the_dcp_module_lists_the_frameworks_names_too() -> None:
    assert {"async_save", "StorageReader", "FileSystemReader", "DefaultLoadPlanner"} <= set(dir(holdfast.dcp))


def test_last_and_best_of_one_moment_are_no_stale_snapshots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"t": torch.rand(8)}
    with caplog.at_level(logging.WARNING, "holdfast"):
        for name in ("last", "best"):
            holdfast.save(state, tmp_path / name)
        assert not caplog.records
        holdfast.save(state, tmp_path / "last", replace=True)
        holdfast.save(state, tmp_path / "last", replace=True)
    assert "identical to the previous save" in caplog.text


@dataclasses.dataclass
class Config:
    """As training scripts have one."""

    width: int = 4


class Holder:
    """An object with another one in it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def test_a_save_names_the_classes_in_objects(tmp_path: Path) -> None:
    holder = Holder([Unknown(), Config(), {"a": torch.float16}])
    names = [f"{__name__}:{c}" for c in ("Config", "Holder", "Unknown")]
    for n in range(2):  # the second save has the structure of the first
        assert holdfast.save({"o": holder}, tmp_path / str(n), step=n)["needs_allow"] == names
    loaded = holdfast.load(tmp_path / "1", allow=names)["o"]
    assert loaded.inner[1:] == [Config(), {"a": torch.float16}]
    large = Holder([Unknown(), "x" * (1 << 20)])
    assert holdfast.save({"o": large, "t": torch.ones(1)}, tmp_path / "large")["needs_allow"] == [names[1]]


def test_a_class_in_a_state_is_its_name(tmp_path: Path) -> None:
    """What a load needs is the class itself, and not `type`; also where saves follow that differ in it alone."""
    for n, value in enumerate((int, Config, Unknown, logging.getLogger)):
        needed = holdfast.save({"value": value}, tmp_path / str(n))["needs_allow"]
        assert needed == ([] if value is int else [f"{value.__module__}:{value.__qualname__}"])
        assert holdfast.load(tmp_path / str(n), allow=needed)["value"] is value


def test_a_save_says_what_no_load_makes_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"config": Config(), "object": Unknown(), "plain": {"a": [1, (2.0, "b")]}, "t": torch.ones(2)}
    names = [f"{__name__}:Config", f"{__name__}:Unknown"]
    with caplog.at_level(logging.WARNING, "holdfast"):
        for n in range(2):
            assert holdfast.save(state, tmp_path / str(n), step=n)["needs_allow"] == names
        (said,) = [r.getMessage() for r in caplog.records if "allow=" in r.getMessage()]
        assert all(said.count(name) == 1 for name in names)
        caplog.clear()
        assert holdfast.save({"plain": state["plain"], "t": torch.ones(3)}, tmp_path / "b")["needs_allow"] == []
        assert not caplog.records
    with pytest.raises(PermissionError):
        holdfast.load(tmp_path / "0")
    assert holdfast.load(tmp_path / "0", allow=names)["config"] == Config()
