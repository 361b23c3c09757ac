"""What is kept of one state's structure for the next one gives what a walk afresh gives."""

from __future__ import annotations

import collections
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import _native, _state


def start() -> dict[str, Any]:
    base = torch.arange(24.0)
    tied = torch.nn.Parameter(torch.ones(3, 4))
    return {
        "a": tied,
        "b": {"tied": tied.detach(), "own": torch.zeros(3, 4)},
        "low": base[:16],
        "high": base[8:],
        "ints": torch.arange(6).reshape(2, 3),
        "empty": torch.empty(0, 2),
        "complex": torch.ones(2, dtype=torch.complex64),
        "plain": [1, 2.5, None],
        "step": 3,
        1: torch.ones(2),
        "nested": [torch.zeros(2), ({"x": torch.ones(1)}, 5)],
        "module": torch.nn.Linear(2, 2).state_dict(),
    }


def swap(state: dict[str, Any], one: str, other: str) -> None:
    state[one], state[other] = state[other], state[one]


def move_in_place(state: dict[str, Any]) -> None:
    with torch.no_grad():
        state["b"]["own"].set_(torch.full((3, 4), 5.0))


MUTATIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "untie": lambda s: s["b"].update(tied=s["b"]["tied"].clone()),
    "tie": lambda s: s["b"].update(own=s["b"]["tied"]),
    "new memory": lambda s: s["b"].update(own=s["b"]["own"].clone()),
    "new memory of the same object": move_in_place,
    "strides": lambda s: s.update(ints=s["ints"].t()),
    "a thin view": lambda s: s["b"].update(own=torch.zeros(64, 64)[:, 0]),
    "shape": lambda s: s["b"].update(own=torch.zeros(4, 3)),
    "dtype": lambda s: s["b"].update(own=s["b"]["own"].double()),
    "a moved view": lambda s: s.update(high=torch.arange(24.0)[4:20]),
    "views apart": lambda s: s.update(low=s["low"].clone()),
    "views of another base": lambda s: s.update(zip(("low", "high"), torch.ones(40)[4:].split(16), strict=False)),
    "views that overlap otherwise": lambda s: s.update(low=(m := torch.ones(30))[:16], high=m[9:25]),
    "at an odd byte": lambda s: s.update(low=(m := torch.ones(64, dtype=torch.uint8))[1:40], high=m[8:24].view(torch.int64)),
    "grad": lambda s: s["b"].update(own=s["b"]["own"].detach().requires_grad_(s["b"]["own"].is_floating_point())),
    "parameter": lambda s: s["b"].update(own=torch.nn.Parameter(s["b"]["own"].detach(), requires_grad=False)),
    "conjugate": lambda s: s.update(complex=s["complex"].conj()),
    "negative": lambda s: s.update(complex=torch.ones(2, dtype=torch.complex64).conj().imag),
    "values": lambda s: s.update(step=s["step"] + 1 if isinstance(s["step"], int) else 1, plain=[{"x": 2}, "text"]),
    "a list of values": lambda s: s.update(plain=list(range(3000))),
    "kind of a value": lambda s: s.update(step=float("nan")),
    "value for tensor": lambda s: s.update(step=torch.ones(1)),
    "tensor for value": lambda s: s.update(ints=7),
    "key": lambda s: s.update(new=torch.zeros(1)),
    "key away": lambda s: s.pop("empty", None),
    "equal key": lambda s: s.update({True: s.pop(1, 0)}),
    "order": lambda s: s.update(a=s.pop("a")),
    "swapped": lambda s: swap(s, "low", "high"),
    "tuple": lambda s: s.update(nested=tuple(s["nested"])),
    "ordered": lambda s: s.update(b=collections.OrderedDict(s["b"])),
    "version": lambda s: s["module"]._metadata[""].update(version=s["module"]._metadata[""]["version"] + 1),
    "object": lambda s: s.update(step={3 + 4j: object}),
    "another object": lambda s: s.update(step=range(3)),
    "sparse": lambda s: s.update(ints=torch.eye(2).to_sparse()),
    "elements of sparse": lambda s: s.update(ints=torch.ones(2, 2).to_sparse()),
    "maxlen": lambda s: s.update(nested=collections.deque([torch.ones(1)], maxlen=len(s))),
}


def contents(described: _state.Description) -> Any:
    """All that a save has of a description."""
    outline = described.outline
    columns = {k: v for k, v in vars(outline).items() if not k.startswith("_") and k != "kept"}
    data = [bytes(described.memory(i).tolist()) for i in range(len(outline.names)) if outline.nbytes[i]]
    return columns, described.addresses, described.text({"x": 1}), sorted(described.objects), data


def without_copies(found: Any, state: Any) -> Any:
    """But for the addresses of copies, of which each walk makes its own."""
    columns, addresses, *rest = found
    copied = set(columns["contiguous_copies"])
    return columns, [a for a, p in zip(addresses, columns["paths"], strict=True) if p not in copied], *rest


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=st.lists(st.sampled_from(sorted(MUTATIONS)), min_size=1, max_size=6))
def test_a_kept_outline_gives_what_a_walk_afresh_gives(names: list[str]) -> None:
    _state._recent.clear()
    state = start()
    _state.describe(state)
    for name in names:
        try:
            MUTATIONS[name](state)
        except (AttributeError, RuntimeError, TypeError, KeyError):  # of what an earlier one has changed
            continue
        kept = _state.describe(state)
        before = list(_state._recent)
        _state._recent.clear()
        afresh = _state.describe(state)
        assert without_copies(contents(kept), state) == without_copies(contents(afresh), state)
        _state._recent.clear()
        _state._recent.extend(before)


@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_a_changed_state_comes_back_as_it_is(name: str, tmp_path: Path) -> None:
    state = start()
    holdfast.save_async(state, tmp_path / "before").wait(60)
    MUTATIONS[name](state)
    expected = {k: v.to_dense().clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    holdfast.save_async(state, tmp_path / "after").wait(60)
    loaded = holdfast.load(tmp_path / "after", allow=["builtins:object"])
    for key, value in expected.items():
        assert torch.equal(loaded[key].to_dense(), value), key
    assert loaded.keys() == state.keys()


def test_the_same_structure_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _state._recent.clear()
    first = _state.describe(start())
    again = _state.describe({**start(), "step": 4})
    assert again.outline is first.outline
    assert json.loads(again.text({}).replace(b"{,", b"{"))["root"]["items"][8] == ["step", 4]


def test_two_states_in_turn_keep_their_outlines() -> None:
    _state._recent.clear()
    one, other = _state.describe(start()).outline, _state.describe({"x": torch.ones(1)}).outline
    assert _state.describe(start()).outline is one
    assert _state.describe({"x": torch.zeros(1)}).outline is other


def test_an_outline_keeps_no_tensor_alive(tmp_path: Path) -> None:
    state: Any = {"t": torch.ones(3), "module": torch.nn.Linear(2, 2), "o": range(3)}
    kept = [weakref.ref(state["t"]), weakref.ref(state["module"]), weakref.ref(state["module"].weight)]
    holdfast.save_async(state, tmp_path / "s").wait(60)
    holdfast.flush()
    del state
    gc.collect()
    assert [r() for r in kept] == [None] * 3


def test_a_plan_that_is_in_use_is_not_taken(tmp_path: Path) -> None:
    """Two calls at a time: each has a plan of its own."""
    outline = _state.describe({"x": torch.ones(1)}).outline
    import threading

    states = [{"x": torch.full((1000,), float(i))} for i in range(8)]
    saves: list[Any] = [None] * 8

    def call(i: int) -> None:
        saves[i] = holdfast.save_async(states[i], tmp_path / f"s{i}")

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, save in enumerate(saves):
        save.wait(60)
        assert bool((holdfast.load(tmp_path / f"s{i}")["x"] == i).all())
    assert len(outline.kept) <= 1


# ---- Descriptions of the first version of the format.

OLD = """{"holdfast_state":1,"rank":0,"world_size":1,"per_rank":[],"objects":{},"root":{"kind":"dict","items":[
["w",{"kind":"tensor","parameter":true,"requires_grad":true,"dtype":"float32","shape":[2,3],"device":"cpu","stored":"w"}],
["tied",{"kind":"tensor","dtype":"float32","shape":[3,2],"device":"cpu","stored":"w","stride":[1,3]}],
["low",{"kind":"tensor","dtype":"int64","shape":[3],"device":"cpu","stored":"low#storage"}],
["high",{"kind":"tensor","dtype":"int64","shape":[3],"device":"cpu","stored":"low#storage","offset":8}],
["module",{"kind":"stateful","class":"torch.nn.modules.linear:Linear","state":{"kind":"ordered_dict","items":[["weight",
{"kind":"tensor","dtype":"float32","shape":[2,3],"device":"cpu","stored":"w"}]],
"metadata":{"":{"version":{"kind":"value","value":1}}}}}],
["lr",{"kind":"float","value":"0x1.0624dd2f1a9fcp-10"}],["nan",{"kind":"float","value":"nan:7ff8000000000001"}],
["inf",{"kind":"float","value":"-inf"}],["big",{"kind":"int","value":"1208925819614629174706176"}],
["list",{"kind":"list","items":[{"kind":"value","value":1},{"kind":"tuple","items":[{"kind":"float",
"value":"0x1.4000000000000p+1"},{"kind":"value","value":null}]},{"kind":"value","value":true}]}],
[{"kind":"value","value":5},{"kind":"dict","items":[[{"kind":"tuple","items":[{"kind":"value","value":1},"a"]},
{"kind":"bytes","value":"AP8="}]]}],
["complex",{"kind":"complex","value":["0x1.0000000000000p+0","-0x1.0000000000000p+1"]}],
["dtype",{"kind":"dtype","value":"bfloat16"}],["size",{"kind":"size","items":[2,3]}],
["slice",{"kind":"slice","items":[{"kind":"value","value":1},{"kind":"value","value":null},{"kind":"value","value":2}]}],
["set",{"kind":"set","items":[{"kind":"value","value":1}]}],
["array",{"kind":"ndarray","tensor":{"kind":"tensor","dtype":"float32","shape":[6],"device":"cpu","stored":"w"}}]]}}"""


def test_a_description_of_the_first_version_is_read(tmp_path: Path) -> None:
    w, ints = torch.arange(6.0).reshape(2, 3), torch.arange(4)
    text = torch.frombuffer(bytearray(OLD.encode()), dtype=torch.uint8)
    plan = _native.ModelPlan("model.safetensors", ["w", "low#storage"], ["F32", "I64"], [[2, 3], [4]], [24, 32], [])
    plan.renew(_native.new_attempt(), [w.data_ptr(), ints.data_ptr()], [], [])
    plan.add_file("state.json")
    plan.add_tensor("holdfast:structure", "U8", [len(text)], text.data_ptr(), len(text), None, 0)
    program = holdfast._programs.program("holdfast-worker")
    options = {"directory": str(tmp_path), "worker_program": program}
    door = _native.Checkpointer(options).create_beside(options)
    door.save("s", plan, 1, False, "", False).wait_durable(60)
    loaded = holdfast.load(tmp_path / "s")
    assert isinstance(loaded["w"], torch.nn.Parameter) and torch.equal(loaded["w"], w)
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr() and torch.equal(loaded["tied"], w.t())
    assert loaded["low"].tolist() == [0, 1, 2] and loaded["high"].tolist() == [1, 2, 3]
    assert torch.equal(loaded["module"]["weight"], w) and loaded["module"]._metadata[""]["version"] == 1
    assert loaded["lr"] == 0.001 and loaded["nan"] != loaded["nan"] and loaded["inf"] == float("-inf")
    assert loaded["big"] == 2**80 and loaded["list"] == [1, (2.5, None), True]
    assert loaded[5] == {(1, "a"): b"\0\xff"} and loaded["complex"] == 1 - 2j
    assert loaded["dtype"] == torch.bfloat16 and loaded["size"] == torch.Size([2, 3])
    assert loaded["slice"] == slice(1, None, 2) and loaded["set"] == {1}
    assert loaded["array"].tolist() == [0, 1, 2, 3, 4, 5]
    into = {**loaded, "w": torch.zeros(2, 3), "list": [0, (0.0, 0), 0]}
    holdfast.load(tmp_path / "s", into=into)
    assert torch.equal(into["w"], w) and into["list"] == [1, (2.5, None), True]
