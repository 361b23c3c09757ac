"""Named tuples, dataclasses and tensor subclasses come back with all that pickle keeps of them."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import pickle
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import pytest
import torch

import holdfast

Item = TypeVar("Item")


@dataclasses.dataclass
class Derived:
    size: int
    scale: dataclasses.InitVar[int]
    total: int = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.total = self.size * scale
        self.ema = torch.full((3,), 2.0)


@dataclasses.dataclass
class Warmed:
    warmup: int
    total: int

    def __post_init__(self) -> None:
        self.total += self.warmup


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: torch.Tensor
    unset: int = dataclasses.field(init=False)


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: torch.Tensor
    unset: int = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    weight: torch.Tensor
    number: int


class Base:
    __slots__ = ("more",)


@dataclasses.dataclass
class Below(Base):
    weight: torch.Tensor


@dataclasses.dataclass
class Typed(Generic[Item]):
    item: Item


@dataclasses.dataclass
class Output(collections.OrderedDict):
    """Its values are in the dict, too."""

    loss: Any = None


@dataclasses.dataclass
class Own:
    weight: torch.Tensor

    def __reduce__(self) -> Any:
        return _own, (self.weight + 1,)


def _own(weight: torch.Tensor) -> Own:
    return Own(weight)


class Halved(collections.namedtuple("Halved", "whole half")):
    """A named tuple that computes a field, and has attributes."""

    def __new__(cls, whole: Any) -> Any:
        return super().__new__(cls, whole, whole / 2)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class _Mixin:
    number: int


class Numbered(_Mixin, enum.Enum):
    ONE = 1
    TWO = 2


class Paired(Point, enum.Enum):
    ONE = (1, 2)


class Noted(torch.Tensor):
    """A tensor with attributes."""


NAMES = [f"test_records:{n}" for n in (
    "Derived Warmed Frozen Slotted FrozenSlotted Below Typed Output _own Halved Point _Mixin Numbered Paired Noted".split()
)]  # fmt: skip


def _values() -> dict[str, Any]:
    one = torch.ones(2)
    derived, below, halved = Derived(3, 4), Below(one), Halved(torch.ones(2))
    derived.later, below.more, below.note, halved.note = {"k": one}, 7, "text", torch.zeros(3)
    output = Output(one)
    output["loss"] = one
    noted = one.clone().as_subclass(Noted)
    noted.scale, noted.history = 0.5, [torch.zeros(1)]
    return {
        "derived": derived, "warmed": Warmed(10, 100), "frozen": Frozen(one), "slotted": Slotted(one),
        "frozen_slotted": FrozenSlotted(one, 5), "below": below, "typed": Typed[int](5), "output": output, "own": Own(one),
        "halved": halved, "point": Point(one, 1), "enum": Numbered.TWO, "pair": Paired.ONE, "noted": noted,
    }  # fmt: skip


def _form(value: Any) -> Any:
    """All that a value is, as text."""
    if isinstance(value, enum.Enum):
        return repr(value)
    kept = {**getattr(value, "__dict__", {})}
    kept |= {n: getattr(value, n) for c in type(value).__mro__ for n in getattr(c, "__slots__", ()) if hasattr(value, n)}
    own = {n: _form(v) for n, v in kept.items() if not n.startswith("__")}
    if isinstance(value, torch.Tensor):
        return type(value), value.as_subclass(torch.Tensor).tolist(), own
    if isinstance(value, dict):
        return type(value), {k: _form(v) for k, v in value.items()}, own
    if isinstance(value, (tuple, list)):
        return type(value), [_form(v) for v in value], own
    return type(value), own or repr(value)


@pytest.mark.parametrize("name", _values())
def test_they_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    state = {name: _values()[name]}
    holdfast.save(state, tmp_path / "s")
    loaded = holdfast.load(tmp_path / "s", allow=NAMES)
    expected = state if name != "own" else pickle.loads(pickle.dumps(state))
    assert _form(loaded) == _form(expected)


@pytest.mark.parametrize("name", _values())
def test_they_are_filled_as_they_were(name: str, tmp_path: Path) -> None:
    state, target = {name: _values()[name]}, {name: _values()[name]}
    there = target[name]
    if name == "derived":
        there.total, there.later["k"][:] = 1, 0
        del there.ema
        expected_tensor = there.later["k"]
    if name in ("noted", "halved"):
        del vars(there)["scale" if name == "noted" else "note"]
    holdfast.save(state, tmp_path / "s")
    filled = holdfast.load(tmp_path / "s", into=target, allow=NAMES)
    expected = state if name != "own" else pickle.loads(pickle.dumps(state))
    assert _form(filled) == _form(expected)
    if name == "derived":
        assert filled[name] is there and there.later["k"] is expected_tensor


def test_only_what_is_no_field_is_noted_apart(tmp_path: Path) -> None:
    holdfast.save({"plain": Warmed(1, 2), "more": _values()["below"]}, tmp_path / "s")
    text = (tmp_path / "s" / "state-00000-of-00001.json").read_text()
    (_, plain), (_, more) = json.loads(text)["root"]["items"]
    assert "attributes" not in plain and plain["fields"] == ["warmup", "total"]
    assert more["fields"] == ["weight"] and more["attributes"] == ["note", "more"]


def test_a_class_that_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import test_records

    holdfast.save({"a": Slotted(torch.ones(1)), "p": Point(1, 2), "w": Warmed(1, 2)}, tmp_path / "s")
    newer = dataclasses.make_dataclass("Warmed", [("warmup", int), ("rate", float, dataclasses.field(default=0.5))])
    monkeypatch.setattr(test_records, "Warmed", newer)
    loaded = holdfast.load(tmp_path / "s", allow=NAMES)["w"]
    assert (loaded.warmup, loaded.rate, loaded.total) == (1, 0.5, 3)
    for name, other in (("Slotted", dataclasses.make_dataclass("Slotted", ["x"], slots=True)),
                        ("Point", collections.namedtuple("Point", "x y z")), ("Point", dict)):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(test_records, name, other)
            with pytest.raises(holdfast.Error, match="cannot hold what was saved: .* that was saved") as error:
                holdfast.load(tmp_path / "s", allow=NAMES)
            assert error.value.code == "FAILED_PRECONDITION"
