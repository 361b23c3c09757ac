"""What the readers of integrity-fuzz compare: names, dtypes and shapes as well as bytes and values."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from test_integrity import made, save

import holdfast
import holdfast.dcp
from holdfast.integrity import readers, schedule, states


def changed(state: dict[str, Any], how: str) -> dict[str, Any]:
    """The state with another tensor of the same bytes, or with other names."""
    own = dict(state["own"])
    name, tensor = max(own.items(), key=lambda item: item[1].numel())
    if how == "one less":
        del own[name]
    if how == "one more":
        own["more"] = tensor.clone()
    if how == "another name":
        own["another"] = own.pop(name)
    if how == "another dtype":
        own[name] = tensor.view(torch.int32)
    if how == "another shape":
        own[name] = tensor.reshape(1, -1)
    return {**state, "own": own}


@pytest.mark.parametrize("how", ["nothing", "one less", "one more", "another name", "another dtype", "another shape"])
@pytest.mark.parametrize("door", ["save_async", "dcp", "save_file"])
def test_every_reader_finds_what_has_the_same_bytes_and_is_another(door: str, how: str, tmp_path: Path) -> None:
    spec = {"objects": True, "tensors": 40, "wide": how == "nothing"}
    expected = readers.Expected(made(save(1, spec=spec), door=door))
    state = changed(states.make(1, 1, 0, expected.spec(1)), how)
    path = str(tmp_path / "step-1")
    if door == "dcp":
        holdfast.dcp.async_save(states.as_dcp(state, 0), checkpoint_id=path).result(60)
    elif door == "save_file":
        holdfast.save_file(state, path).wait(60)
    else:
        holdfast.save(state, path, step=1)
    every = readers.readers_of(schedule.format_of(expected.round), door)
    assert len(every) >= 2
    for name, read in every.items():
        try:
            found = [different for _, different in read(path, expected)]
        except BaseException as error:  # a strict load refuses it
            found = [repr(error)]
        assert any(found) is (how != "nothing"), (name, found)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_safetensors_of_every_rank_are_compared(rank: int, tmp_path: Path) -> None:
    """Those that the ranks hold alike lie in a file of their own."""
    expected = readers.Expected(made(save(1, spec={"bytes": 6 * schedule.MIB}), ranks=2))
    of_ranks = [states.make(1, 1, r, expected.spec(1)) for r in range(2)]
    attempt = uuid.uuid4().hex
    for how in ("nothing", "one more"):
        path = tmp_path / how.replace(" ", "-")
        saves = [holdfast.save_async(changed(of_ranks[r], how) if r == rank else of_ranks[r], path, step=1, rank=r, world_size=2,
                                     attempt=attempt) for r in range(2)]  # fmt: skip
        for one in saves:
            one.wait(60)
        read = readers.readers_of("holdfast")["safetensors"]
        assert [bool(different) for _, different in read(str(path), expected)] == [how == "one more" and r == rank for r in range(2)]


def test_what_is_loaded_into_has_no_byte_and_no_value_of_the_state() -> None:
    state = states.make(1, 7, 0, {"tensors": 12, "bytes": 100_000, "wide": True, "objects": True})
    other = states.unlike(state)
    assert [name for name, _ in states.leaves(other)] == [name for name, _ in states.leaves(state)]
    for (name, mine), (_, theirs) in zip(states.leaves(state), states.leaves(other), strict=True):
        if isinstance(mine, torch.Tensor):
            a, b = (t.view(torch.uint8) for t in (mine, theirs))
            assert not torch.any(a == b), name
        else:
            assert states.difference(theirs, mine), name
    assert all(a != b for a, b in zip(state["values"]["list"], other["values"]["list"], strict=True))


@pytest.mark.parametrize(("found", "expected"), [(1, 1.0), (True, 1), ([1, None], [True, None]), ([1], [1, 2]), ((1,), [1])])
def test_a_value_of_another_type_differs(found: Any, expected: Any) -> None:
    assert states.difference(found, expected, "x").startswith("x")
    assert states.difference(expected, expected, "x") == ""
