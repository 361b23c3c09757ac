"""A load into what is there changes it when nothing can fail any more: damage and refusals leave it as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import _runtime

MIB = 1 << 20


def _damage(path: Path) -> None:
    """The last tensor's last bytes change."""
    with open(path / "model-00000-of-00001.safetensors", "r+b") as file:
        file.seek(-5, 2)
        old = file.read(1)
        file.seek(-5, 2)
        file.write(bytes([old[0] ^ 0x55]))


class Keeper:
    """Holds tensors, and may refuse its state."""

    def __init__(self, value: float, refuses: bool = False) -> None:
        self.average = torch.full((2000,), value)
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise ValueError("not this state")
        self.average = state["average"]


class Hooked(torch.nn.Linear):
    """Refuses its state in the middle of the loading."""

    refuses = False

    def _load_from_state_dict(self, *of: Any, **options: Any) -> None:
        super()._load_from_state_dict(*of, **options)
        if self.refuses:
            raise ValueError("not this state")


def _state(value: float, *, refusing: str = "") -> dict[str, Any]:
    torch.manual_seed(int(value))
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((2, 30), value)).sum().backward()
    optimizer.step()
    hooked = Hooked(20, 20)
    hooked.refuses = refusing == "module"
    return {
        "model": model, "hooked": hooked, "optimizer": optimizer, "keeper": Keeper(value, refusing == "keeper"),
        "tensors": {f"t{i}": torch.full((1000,), value) for i in range(5)},
    }  # fmt: skip


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = [t for own in state["optimizer"].state.values() for t in own.values()]
    return [
        t.detach().clone()
        for t in (*state["model"].parameters(), *state["hooked"].parameters(), *moments, state["keeper"].average,
                  *state["tensors"].values())
    ]  # fmt: skip


def _equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    holdfast.save(_state(1.0), tmp_path / "s")
    _damage(tmp_path / "s")
    target = _state(2.0)
    before = _tensors(target)
    for load in (
        lambda: holdfast.load(tmp_path / "s", into=target),
        lambda: holdfast.open(tmp_path / "s").into(target),
        lambda: holdfast.Checkpointer(tmp_path, name="{step}").load(name="s", into=target),
    ):
        with pytest.raises(holdfast.Error) as error:
            load()
        assert error.value.code == "DATA_LOSS"
        assert _equal(_tensors(target), before)


@pytest.mark.parametrize("refusing", ["keeper", "module"])
def test_a_state_that_is_refused_changes_nothing(refusing: str, tmp_path: Path) -> None:
    holdfast.save(_state(1.0), tmp_path / "s")
    target = _state(2.0, refusing=refusing)
    before = _tensors(target)
    with pytest.raises(ValueError, match="not this state"):
        holdfast.load(tmp_path / "s", into=target)
    assert _equal(_tensors(target), before)


@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_of_other_groups_changes_nothing(steps: int, tmp_path: Path) -> None:
    def state(groups: int, value: float) -> dict[str, Any]:
        model = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(model.weight, value)
        parameters = list(model.parameters())
        split = [{"params": [p]} for p in parameters] if groups == 2 else [{"params": parameters}]
        optimizer = torch.optim.Adam(split)
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    holdfast.save(state(1, 1.0), tmp_path / "s")
    target = state(2, 2.0)
    before = target["model"].weight.detach().clone()
    with pytest.raises(ValueError, match="optimizer.*groups of so many parameters.*2.*1, 1"):
        holdfast.load(tmp_path / "s", into=target)
    assert torch.equal(target["model"].weight, before)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("fits", [False, True])
def test_a_sound_checkpoint_is_loaded_as_a_whole(
    partial: bool, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runtime, "fits_in_page_cache", lambda nbytes: fits)
    saved = _state(1.0)
    saved["turned"], saved["part"] = torch.arange(12000.0).view(100, 120), torch.ones(50)[::2]
    saved["deep"] = value = []
    for _ in range(120):
        value.append([])
        value = value[0]
    value.append(torch.full((7,), 1.0))
    holdfast.save(saved, tmp_path / "s")
    target = _state(2.0)
    target["turned"], target["part"] = torch.zeros(120, 100).t(), torch.zeros(25)
    target["deep"] = inner = []
    for _ in range(120):
        inner.append([])
        inner = inner[0]
    inner.append(torch.zeros(7))
    assert holdfast.load(tmp_path / "s", into=target, partial=partial) is target
    assert _equal(_tensors(target), _tensors(saved))
    assert torch.equal(target["turned"], saved["turned"]) and torch.equal(target["part"], saved["part"])
    assert torch.equal(inner[0], torch.ones(7))


_READ = """
import sys, torch, holdfast
target = {"w": torch.zeros(4 << 20), "v": torch.zeros(4 << 20)}
def read_from_disk():
    return next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))
checkpoint = holdfast.open(sys.argv[1])
before = read_from_disk()
checkpoint.into(target)
assert target["w"].all() and target["v"].all()
print(read_from_disk() - before)
"""


def test_with_memory_at_hand_the_disk_is_read_once(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(4 << 20), "v": torch.ones(4 << 20)}, tmp_path / "s")
    done = subprocess.run([sys.executable, "-c", _READ, str(tmp_path / "s")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 40 * MIB


def test_the_comparison_takes_no_more_than_the_buffer(tmp_path: Path) -> None:
    state = {"w": torch.ones(64 << 20, dtype=torch.uint8)}
    holdfast.save(state, tmp_path / "s")
    code = (
        "import resource, sys, torch, holdfast\n"
        "target = {'w': torch.zeros(64 << 20, dtype=torch.uint8)}\n"
        "holdfast.load(sys.argv[1], into={'w': torch.zeros(64 << 20, dtype=torch.uint8)}, buffer_bytes=8 << 20)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "holdfast.load(sys.argv[1], into=target, buffer_bytes=8 << 20)\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) << 10 <= 24 * MIB




@pytest.mark.parametrize("saved", [torch.nn.Linear(2, 2), {"a": torch.ones(2)}, [torch.ones(2)]], ids=["module", "dict", "list"])
def test_a_target_of_another_kind_is_refused(saved: Any, tmp_path: Path) -> None:
    """It would stay as it is; None asks for a new value."""
    holdfast.save({"model": saved, "step": 3}, tmp_path / "s")
    for other in (object(), 5, "text", torch.ones(2), torch.nn.Linear, lambda: None):
        with pytest.raises(holdfast.Error, match="load model: it is a .*, the target a ") as error:
            holdfast.load(tmp_path / "s", into={"model": other, "step": 0})
        assert error.value.code == "INVALID_ARGUMENT"
    for other in (5, [], torch.ones(2)):
        with pytest.raises(holdfast.Error, match="load state: it is a dict, the target a "):
            holdfast.load(tmp_path / "s", into=other)
    made = holdfast.load(tmp_path / "s", into={"model": None, "step": 0})
    assert made["step"] == 3 and made["model"] is not None


def test_a_class_is_a_value_and_has_no_state(tmp_path: Path) -> None:
    holdfast.save({"of": torch.nn.Linear}, tmp_path / "s")
    assert holdfast.load(tmp_path / "s", allow=[torch.nn.Linear])["of"] is torch.nn.Linear
