"""Modules that hand out their state, or take it, in ways of their own: loaded as `load_state_dict` does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import holdfast


class Weight(torch.nn.Module):
    """One parameter of equal values."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), value))


class OnTheHost(Weight):
    """Hands out copies, as a module does that moves its state to the CPU."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.detach().clone() for name, value in super().state_dict(*args, **kwargs).items()}


class OfItsOwn(Weight):
    """Overrides both methods without the arguments of the base class."""

    def state_dict(self) -> Any:  # type: ignore[override]
        return {"w": self.weight.detach()}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        with torch.no_grad():
            self.weight.copy_(state["w"])


class Halved(Weight):
    """A hook changes what is handed out."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self._register_state_dict_hook(self._halve)

    @staticmethod
    def _halve(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].half()


class Inner(torch.nn.Module):
    """Such a module inside of another."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = Halved(value)

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight


@pytest.mark.parametrize("kind", [OnTheHost, OfItsOwn, Halved, Inner])
@pytest.mark.parametrize("hand_out", [lambda m: m, lambda m: m.state_dict()], ids=["module", "state_dict"])
def test_a_module_that_hands_out_copies_gets_what_was_saved(
    kind: Callable[[float], Any], hand_out: Callable[[Any], Any], tmp_path: Path
) -> None:
    holdfast.save({"model": hand_out(kind(1.0))}, tmp_path / "a")
    model = kind(2.0)
    holdfast.load(tmp_path / "a", into={"model": model})
    assert torch.equal(model.weight, torch.ones(4))


class Summed(Weight):
    """Keeps what follows from its weights, and makes it anew in a hook after a load."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.sum = self.weight.sum().item()
        self.register_load_state_dict_post_hook(self._sum_up)

    @staticmethod
    def _sum_up(module: Any, keys: Any) -> None:
        module.sum = module.weight.sum().item()


class SummedBefore(Weight):
    """The same, by a method of its own."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.sum = self.weight.sum().item()

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.sum = self.weight.sum().item()


@pytest.mark.parametrize("kind", [Summed, SummedBefore])
@pytest.mark.parametrize("wrap", [lambda m: m, torch.nn.Sequential], ids=["outer", "inner"])
def test_what_a_module_does_at_a_load_is_done(
    kind: Callable[[float], Any], wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    holdfast.save({"model": wrap(kind(1.0))}, tmp_path / "a")
    model = kind(2.0)
    holdfast.load(tmp_path / "a", into={"model": wrap(model)})
    assert torch.equal(model.weight, torch.ones(4))
    assert model.sum == 4.0


def test_a_plain_module_is_filled_without_a_second_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))  # noqa: E731
    saved, model = make(), make()
    holdfast.save({"model": saved}, tmp_path / "a")
    calls = []
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *a, **k: calls.append(a))
    holdfast.load(tmp_path / "a", into={"model": model})
    assert torch.equal(model[0].weight, saved[0].weight)
    assert not calls


FORMATS = pytest.mark.parametrize("format", ["holdfast", "dcp"])


def _lazy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d())


@FORMATS
def test_a_lazy_module_gets_the_shapes_of_what_was_saved(format: str, tmp_path: Path) -> None:
    saved, model = _lazy(), _lazy()
    saved(torch.ones(2, 4))
    with holdfast.Checkpointer(tmp_path, format=format) as checkpointer:
        checkpointer.save({"model": saved}, 1)
        checkpointer.load(into={"model": model})
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in saved.state_dict().items())
    x = torch.randn(2, 4)
    assert torch.equal(saved(x), model(x))


@FORMATS
@pytest.mark.parametrize("make", [_lazy, lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2, device="meta")])])
def test_a_module_without_data_is_refused_by_its_name(make: Callable[[], Any], format: str, tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, format=format) as checkpointer:
        with pytest.raises((holdfast.Error, CheckpointException), match=r"save model\.0\.weight: .*(lazy|meta).*INVALID"):
            checkpointer.save({"model": make()}, 1)


@FORMATS
def test_a_module_without_memory_is_no_target(format: str, tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, format=format) as checkpointer:
        checkpointer.save({"model": torch.nn.Linear(2, 2)}, 1)
        with pytest.raises((holdfast.Error, CheckpointException), match=r"load model\.\w+: the target is on the meta .*to_empty"):
            checkpointer.load(into={"model": torch.nn.Linear(2, 2, device="meta")})
