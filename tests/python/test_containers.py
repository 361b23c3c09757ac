"""Containers, keys and plain values of every kind come back as what they were."""

from __future__ import annotations

import collections
import enum
import json
import math
import struct
import types
from pathlib import Path
from typing import Any

import dcp_ranks
import numpy as np
import pytest
import torch

import holdfast


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Colors:
    class Inner(enum.IntEnum):
        ONE = 1


def through_disk(state: Any, path: Path, **options: Any) -> Any:
    save = holdfast.save_async(state, path, objects="refuse")
    assert save.wait(60)["objects"] == []
    return holdfast.load(path, **options)


def mappings(value: Any) -> dict[str, Any]:
    return {
        "dict": {"k": value},
        "ordered": collections.OrderedDict(k=value),
        "default": collections.defaultdict(list, k=value),
        "without": collections.defaultdict(None, k=value),
        "counter": collections.Counter({"k": value}),
        "user": collections.UserDict({"k": value}),
        "proxy": types.MappingProxyType({"k": value}),
        "namespace": types.SimpleNamespace(k=value),
    }


def entry(mapping: Any) -> Any:
    return mapping.k if isinstance(mapping, types.SimpleNamespace) else mapping["k"]


def test_mappings_stay_what_they_are_and_share_their_tensors(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    state = mappings(weight)
    loaded = through_disk(state, tmp_path / "s")
    assert {k: type(v) for k, v in loaded.items()} == {k: type(v) for k, v in state.items()}
    assert all(torch.equal(entry(v), weight) for v in loaded.values())
    assert len({entry(v).data_ptr() for v in loaded.values()}) == 1
    assert loaded["default"].default_factory is list and loaded["without"].default_factory is None
    checkpoint = holdfast.open(tmp_path / "s")
    assert list(checkpoint) == [f"{name}.k" for name in state]


def test_mappings_are_filled_in_place(tmp_path: Path) -> None:
    holdfast.save_async(mappings(torch.arange(4.0)), tmp_path / "s").wait(60)
    there = mappings(torch.zeros(4))
    memory = {entry(v).data_ptr() for v in there.values()}
    holdfast.load(tmp_path / "s", into=there)
    assert {entry(v).data_ptr() for v in there.values()} == memory
    assert torch.equal(entry(there["namespace"]), torch.arange(4.0))


def test_deques_keep_their_length(tmp_path: Path) -> None:
    state = {"d": collections.deque([torch.ones(2), 3], maxlen=5), "e": collections.deque([1, 2])}
    loaded = through_disk(state, tmp_path / "s")
    assert loaded["d"].maxlen == 5 and loaded["d"][1] == 3 and torch.equal(loaded["d"][0], torch.ones(2))
    assert loaded["e"] == state["e"] and loaded["e"].maxlen is None
    target = {"d": collections.deque([torch.zeros(2), 0]), "e": collections.deque([0, 0])}
    tensor = target["d"][0]
    holdfast.load(tmp_path / "s", into=target)
    assert target["d"][0] is tensor and torch.equal(tensor, torch.ones(2)) and target["d"][1] == 3


def test_keys_of_any_plain_kind(tmp_path: Path) -> None:
    state = {
        None: 1, True: 2, 5: 3, 2.5: 4, "s": 5, (1, ("a", None)): 6, np.int64(7): 7, 2**70: 8,
        b"bytes": torch.ones(1), torch.float16: 9,
    }
    loaded = through_disk(state, tmp_path / "s")
    assert [type(k) for k in loaded] == [type(k) for k in state]
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded[b"bytes"], torch.ones(1))
    target = dict.fromkeys(state, 0)
    assert holdfast.load(tmp_path / "s", into=target)[2**70] == 8


def test_keys_that_are_equal_and_not_the_same_are_not_taken_for_each_other(tmp_path: Path) -> None:
    for i, key in enumerate((1, True, 1.0, np.int64(1))):
        loaded = through_disk({key: torch.ones(1)}, tmp_path / f"s{i}")
        assert type(next(iter(loaded))) is type(key)


def test_members_of_enums_as_keys_need_their_class(tmp_path: Path) -> None:
    state = {Color.RED: torch.ones(2), Color.BLUE: {Colors.Inner.ONE: torch.zeros(1)}}
    save = holdfast.save_async(state, tmp_path / "s", objects="refuse")
    save.wait(60)
    with pytest.raises(holdfast.Error, match="allow=") as error:
        holdfast.load(tmp_path / "s")
    assert error.value.code == "PERMISSION_DENIED"
    assert "Color" in error.value.message and "Colors.Inner" in error.value.message
    loaded = holdfast.load(tmp_path / "s", allow=[Color, Colors.Inner])
    assert torch.equal(loaded[Color.RED], torch.ones(2))
    target = {Color.RED: torch.zeros(2), Color.BLUE: {Colors.Inner.ONE: torch.ones(1)}}
    holdfast.load(tmp_path / "s", into=target)  # the keys are there already
    assert torch.equal(target[Color.RED], torch.ones(2)) and not target[Color.BLUE][Colors.Inner.ONE].any()


class Own(dict):
    """A factory of the user's."""


def test_factories_of_the_users_own_need_leave(tmp_path: Path) -> None:
    holdfast.save_async({"d": collections.defaultdict(Own, a=torch.ones(1))}, tmp_path / "s").wait(60)
    with pytest.raises(holdfast.Error, match="Own.*allow=") as error:
        holdfast.load(tmp_path / "s")
    assert error.value.code == "PERMISSION_DENIED"
    assert holdfast.load(tmp_path / "s", allow=[Own])["d"].default_factory is Own


def test_numpy_scalars_are_plain_values(tmp_path: Path) -> None:
    state = {
        name: np.dtype(name).type(value)
        for name, value in {
            "bool": True, "int8": -3, "uint64": 2**64 - 1, "float16": 0.1, "float32": 0.1,
            "float64": -0.0, "complex64": 1 - 2j, "complex128": complex(0.1, math.inf),
        }.items()
    }
    state["payload"] = np.frombuffer(struct.pack("<I", 0x7FC00123), np.float32)[0]
    loaded = through_disk(state, tmp_path / "s")
    for name, value in state.items():
        assert type(loaded[name]) is type(value) and loaded[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    "values",
    [
        list(range(5000)),
        [0.1 * i for i in range(5000)],
        [math.nan, -0.0, math.inf] * 1000,
        [2**63, *range(3000)],
        [True, False] * 2000,
        [1, 1.0] * 2000,
        ["text", None] * 2000,
        [b"x", 2**60, math.inf, 1j] * 500,
        [[i, str(i)] for i in range(500)],
    ],
    ids=["ints", "floats", "odd floats", "long ints", "bools", "mixed", "texts", "others", "lists"],
)
@pytest.mark.parametrize("make", [list, tuple])
def test_long_lists_come_back_item_by_item(make: Any, values: list[Any], tmp_path: Path) -> None:
    loaded = through_disk({"v": make(values)}, tmp_path / "s")["v"]
    assert type(loaded) is make and list(map(type, loaded)) == list(map(type, values))
    assert list(map(repr, loaded)) == list(map(repr, values))
    target = {"v": make(values)}
    assert list(map(repr, holdfast.load(tmp_path / "s", into=target)["v"])) == list(map(repr, values))


def test_floats_and_numbers_are_written_as_people_write_them(tmp_path: Path) -> None:
    holdfast.save_async({"lr": 0.001, "steps": [1, 2], "big": 2**80}, tmp_path / "s").wait(60)
    text = (tmp_path / "s" / "state-00000-of-00001.json").read_text()
    assert '["lr",0.001]' in text and '["steps",[1,2]]' in text and str(2**80) in text
    assert json.loads(text)["holdfast_state"] == 2


def test_an_int_of_more_digits_than_python_reads(tmp_path: Path) -> None:
    assert through_disk({"n": -(2**20000)}, tmp_path / "s")["n"] == -(2**20000)


def nested(depth: int, make: Any) -> Any:
    value: Any = torch.full((1,), 7.0)
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {"k": (v, [v])}],
                         ids=["list", "tuple", "dict", "shared"])  # fmt: skip
def test_what_is_nested_deeply_comes_back(make: Any, tmp_path: Path) -> None:
    depth = 12 if isinstance(make(0), dict) and isinstance(make(0)["k"], tuple) else 10_000
    state = nested(depth, make)
    loaded = through_disk(state, tmp_path / "s")
    target = nested(depth, make)
    leaf = target
    while not isinstance(leaf, torch.Tensor):
        leaf = leaf["k"] if isinstance(leaf, dict) else leaf[0]
    leaf.zero_()
    filled = holdfast.load(tmp_path / "s", into=target)
    assert float(leaf) == 7
    for value in (loaded, filled):
        steps = 0
        while not isinstance(value, torch.Tensor):
            value, steps = value["k"] if isinstance(value, dict) else value[0], steps + 1
        assert float(value) == 7 and steps >= depth
    assert len(holdfast.open(tmp_path / "s")) == (2**depth if depth == 12 else 1)


def test_a_cycle_far_down_is_found(tmp_path: Path) -> None:
    top: list[Any] = [torch.ones(1)]
    inner: Any = top
    for _ in range(200):
        inner = [inner, torch.ones(1)]
    top.append(inner)
    with pytest.raises(holdfast.Error, match="contains itself"):
        holdfast.save_async({"top": top}, tmp_path / "s")


def test_a_sharded_tensor_is_named_with_what_to_do(tmp_path: Path) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    with dcp_ranks.one_rank():
        sharded = sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 2)
        with pytest.raises(holdfast.Error, match=r"save a\.b: a ShardedTensor.*holdfast\.dcp") as error:
            holdfast.save_async({"a": {"b": sharded}}, tmp_path / "s")
        assert error.value.code == "INVALID_ARGUMENT"
        holdfast.save_file({"b": sharded}, tmp_path / "f").wait()
        (shard,) = torch.load(tmp_path / "f", weights_only=False)["b"].local_shards()
        assert torch.equal(shard.tensor, torch.zeros(4, 2))


@pytest.mark.parametrize("where", [lambda storage, location: storage, lambda name: object(), {"cpu": 3.5}, "nowhere"])
def test_a_map_location_that_gives_no_device(where: Any, tmp_path: Path) -> None:
    holdfast.save_async({"t": torch.ones(1)}, tmp_path / "s").wait(60)
    with pytest.raises(holdfast.Error, match="map_location gives no device for 'cpu'.*function") as error:
        holdfast.load(tmp_path / "s", map_location=where)
    assert error.value.code == "INVALID_ARGUMENT"
