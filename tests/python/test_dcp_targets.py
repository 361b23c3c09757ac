"""A DCP load fills objects as the user has given them: new optimizers, schedulers, modules at any depth."""

from __future__ import annotations

import copy
import logging
import os
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import dcp_ranks
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
import holdfast.dcp

pytestmark = pytest.mark.filterwarnings("ignore")


def _made(make: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model[1].weight.requires_grad_(False)
    return model, make(model.parameters(), **options)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(_local(one), _local(other))
    if isinstance(one, dict):
        return isinstance(other, dict) and set(one) == set(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return one == other


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "tensor_lr": (torch.optim.AdamW, {"lr": torch.tensor(0.1)}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "nadam": (torch.optim.NAdam, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "lbfgs": (torch.optim.LBFGS, {"history_size": 3, "max_iter": 2}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_new_optimizer_gets_its_state(name: str, tmp_path: Path) -> None:
    make, options = OPTIMIZERS[name]
    model, optimizer = _made(make, **copy.deepcopy(options))
    _train(model, optimizer, 3)
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        checkpointer.save({"model": model, "optimizer": optimizer}, 1)
        for way in ("Checkpointer", "dcp"):
            into, fresh = _made(make, **copy.deepcopy(options))
            gradients = [p.grad for p in into.parameters()]
            fresh.register_step_post_hook(lambda *_: pytest.fail("a load makes no step"))
            if way == "Checkpointer":
                checkpointer.load(into={"model": into, "optimizer": fresh})
            else:
                holdfast.dcp.load({"model": into, "optimizer": fresh}, checkpoint_id=tmp_path / "step-1")
            assert _same(optimizer.state_dict(), fresh.state_dict())
            assert _same(model.state_dict(), into.state_dict())
            assert [p.grad for p in into.parameters()] == gradients


def test_an_optimizer_in_training_gets_its_state_and_keeps_its_gradients(tmp_path: Path) -> None:
    make, options = OPTIMIZERS["lbfgs"]
    model, optimizer = _made(make, **options)
    _train(model, optimizer, 3)
    holdfast.dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    saved = copy.deepcopy(optimizer.state_dict())
    _train(model, optimizer, 1)  # it has more of a history than the checkpoint
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert not _same(saved, optimizer.state_dict())
    holdfast.dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    assert _same(saved, optimizer.state_dict())
    assert _same(gradients, [p.grad for p in model.parameters()])


def test_what_a_new_optimizer_and_scheduler_lack_is_loaded(tmp_path: Path) -> None:
    model, optimizer = _made(torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 9])  # it gives the group an initial_lr
    scheduler.further = {"a": [torch.ones(2), 3]}  # type: ignore[attr-defined]
    _train(model, optimizer, 1)
    scheduler.step()
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        checkpointer.save({"optimizer": optimizer, "scheduler": scheduler}, 1)
        _, fresh = _made(torch.optim.Adam)
        after = torch.optim.lr_scheduler.MultiStepLR(_made(torch.optim.Adam)[1], [2, 9])
        checkpointer.load(into={"optimizer": fresh, "scheduler": after})
    assert _same(optimizer.state_dict(), fresh.state_dict()) and "initial_lr" in fresh.param_groups[0]
    assert _same(scheduler.state_dict(), after.state_dict())


def test_a_rollback_to_the_start_empties_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = _made(torch.optim.Adam)
    holdfast.dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    _train(model, optimizer, 1)
    holdfast.dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    assert not optimizer.state


def test_the_tensors_of_an_optimizer_in_training_are_filled_in_place(tmp_path: Path) -> None:
    model, optimizer = _made(torch.optim.Adam)
    _train(model, optimizer, 1)
    holdfast.dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    before = optimizer.state[model[0].weight]["exp_avg"]
    saved = before.clone()
    _train(model, optimizer, 1)
    holdfast.dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    assert optimizer.state[model[0].weight]["exp_avg"] is before and torch.equal(before, saved)


def test_a_failed_load_leaves_a_new_optimizer_new(tmp_path: Path) -> None:
    model, optimizer = _made(torch.optim.Adam)
    _train(model, optimizer, 1)
    holdfast.dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "s")
    into, fresh = _made(torch.optim.Adam)
    with pytest.raises(CheckpointException, match="Missing key.*other"):
        holdfast.dcp.load({"optimizer": fresh, "other": 1}, checkpoint_id=tmp_path / "s")
    assert not fresh.state


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_what_the_target_lacks_is_named(format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = {"d": {"a": torch.ones(2), "k": 1}, "l": [torch.ones(1), torch.ones(2)], "other": 2}

    def target() -> dict[str, Any]:
        return {"d": {"a": torch.zeros(2)}, "l": [torch.zeros(1), torch.zeros(2)], "other": 0}

    with holdfast.Checkpointer(tmp_path, format=format) as checkpointer:
        checkpointer.save(saved, 1)
        into = target()
        with pytest.raises((holdfast.Error, CheckpointException), match="not in the target: (d[.])?k.*strict=False"):
            checkpointer.load(into=into)
        assert not into["d"]["a"].any()
        checkpointer.load(into=into, strict=False)
        assert into["d"]["a"].all() and into["other"] == 2
        if format == "dcp":
            shorter = {"l": [torch.zeros(1)]}
            with pytest.raises(CheckpointException, match="not in the target: l[.]1 "):
                checkpointer.load(into=shorter)
            only = {"other": 0}  # an entry of its own is a choice
            checkpointer.load(into=only)
            assert only == {"other": 2}
            more = {"other": 0, "new": 5}
            checkpointer.load(into=more, strict=False)
            assert more == {"other": 2, "new": 5}
            into = target()
            with caplog.at_level(logging.WARNING, "holdfast.dcp"):
                holdfast.dcp.load(into, checkpoint_id=checkpointer.path(1))
            assert into["d"]["a"].all()
            assert [r.getMessage() for r in caplog.records if r.name == "holdfast.dcp"] == [
                f"load {checkpointer.path(1)}: not in the target, and not loaded: d.k"
            ]


@pytest.mark.parametrize("wrap", [lambda m, o: {"app": {"model": m, "optimizer": o}}, lambda m, o: {"all": [m, {"o": o}]}])
def test_objects_below_the_top_are_filled(wrap: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    model, optimizer = _made(torch.optim.Adam)
    _train(model, optimizer, 2)
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        checkpointer.save(wrap(model, optimizer), 1)
        into, fresh = _made(torch.optim.Adam)
        with torch.no_grad():
            into[0].weight.zero_()
        state = wrap(into, fresh)
        inner = state.get("app") or state["all"]
        loaded = checkpointer.load(into=state)
    assert loaded is state and (loaded.get("app") or loaded["all"]) is inner
    assert into in (inner.values() if isinstance(inner, dict) else inner)
    assert _same(model.state_dict(), into.state_dict())
    assert _same(optimizer.state_dict(), fresh.state_dict())


def test_an_object_that_was_saved_whole_fills_the_targets(tmp_path: Path) -> None:
    model, _ = _made(torch.optim.Adam)
    torch.distributed.checkpoint.save({"app": {"model": model}}, checkpoint_id=tmp_path / "s")
    into, _ = _made(torch.optim.Adam)
    with torch.no_grad():
        into[0].weight.zero_()
    state = {"app": {"model": into}}
    holdfast.dcp.load(state, storage_reader=holdfast.dcp.StorageReader(tmp_path / "s", trust=True))
    assert state["app"]["model"] is into and _same(model.state_dict(), into.state_dict())


def test_an_object_in_a_tuple_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="save app.all: .*tuple.*Linear.*list or a dict") as error:
        holdfast.dcp.save({"app": {"all": (torch.nn.Linear(1, 1), 2)}}, checkpoint_id=tmp_path / "s")
    assert error.value.code == "INVALID_ARGUMENT"


def test_keys_that_are_no_text_keep_their_kind(tmp_path: Path) -> None:
    holdfast.dcp.save({"d": {1: 2.5, (2, 3): torch.ones(2), "x": 4}}, checkpoint_id=tmp_path / "s")
    inner = {1: 0.0, (2, 3): torch.zeros(2), "x": 0}
    state = {"d": inner}
    holdfast.dcp.load(state, checkpoint_id=tmp_path / "s")
    assert state["d"] is inner and _same(inner, {1: 2.5, (2, 3): torch.ones(2), "x": 4})


class _Pair(NamedTuple):
    a: Any
    b: Any


def _of_all_kinds(first: Any) -> dict[str, Any]:
    """Objects that the framework's planner replaces by None, or copies."""
    return {
        "set": {first}, "array": np.full(2, first), "number": np.float32(first), "complex": first * 1j, "dtype": torch.int8,
        "pair": _Pair(first, {first}), "list": [{first}, [{first}]], "tuple": ({first}, {"k": {first}}),
        "dict": {"set": {first}, 5: {first}}, "user": UserDict(set={first}), "mixed": [{"set": {first}}, torch.zeros(1)],
    }  # fmt: skip


@pytest.mark.parametrize("why", ["missing", "damaged", "lacking", "not in the target"])
def test_a_failed_load_leaves_objects_as_they_are(why: str, tmp_path: Path) -> None:
    saved = {"m": {"w": torch.ones(2)}, "at": 1}
    into: dict[str, Any] = {"m": {"w": torch.zeros(2)}, "at": 0}
    if why in ("missing", "lacking"):  # what the checkpoint lacks, below an entry of it, and as one
        into["m"].update(_of_all_kinds(1))
        into.update(_of_all_kinds(1))
    else:
        saved["m"].update(_of_all_kinds(2))  # type: ignore[attr-defined]
        into["m"].update(_of_all_kinds(1))
        if why == "not in the target":
            saved["m"]["further"] = 3  # type: ignore[index]
    allow = [_Pair, np.dtype, type(np.dtype("int64")), type(np.dtype("float32"))]
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        checkpointer.save(saved, 1)
        path = Path(checkpointer.path(1))
        if why == "missing":
            (path / ".metadata").unlink()
        elif why == "damaged":
            (data,) = path.glob("*.distcp")
            os.truncate(data, 10)
        inner, parts = into["m"], {key: (value, repr(value)) for key, value in into["m"].items()}
        with pytest.raises((holdfast.Error, CheckpointException)):
            if why in ("missing", "damaged"):
                holdfast.dcp.load(into, checkpoint_id=path)
            else:
                checkpointer.load(into=into, allow=allow)
        assert into["m"] is inner
        for place in (inner, into) if why in ("missing", "lacking") else (inner,):
            for key, (_, text) in parts.items():
                assert key == "w" or repr(place[key]) == text, key
        assert all(inner[key] is value for key, (value, _) in parts.items())


def test_objects_that_a_checkpoint_lacks_stay(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        checkpointer.save({"m": {"w": torch.ones(2), "s": {3}, "l": [1, 2]}, "s": {3}}, 1)
        state = {"m": {"w": torch.zeros(2), "s": {1}, "l": [0], **_of_all_kinds(1)}, "s": {1}, **_of_all_kinds(1)}
        inner, before = state["m"], {**state["m"]}
        checkpointer.load(into=state, strict=False)
    assert state["m"] is inner and inner["w"].all() and inner["s"] == state["s"] == {3} and inner["l"] == [1, 2]
    for key, value in _of_all_kinds(1).items():
        assert inner[key] is before[key] and repr(inner[key]) == repr(state[key]) == repr(value), key


@pytest.mark.parametrize("other", ["aa", "zz"])
def test_an_object_under_two_names_is_loaded_by_the_one_that_a_checkpoint_has(other: str, tmp_path: Path) -> None:
    model, optimizer = _made(torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    values: dict[str, Any] = {"x": 0, "l": [0, {"y": 0}]}
    state = {"opt": optimizer, "sch": scheduler, "values": values}
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        for _ in range(3):
            optimizer.step()
            scheduler.step()
        values.update(x=1, l=[1, {"y": 1}])
        checkpointer.save(state, 1)
        saved = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
        _, fresh = _made(torch.optim.SGD, lr=0.1)
        anew = torch.optim.lr_scheduler.StepLR(fresh, 1, 0.5)
        blank: dict[str, Any] = {"x": 0, "l": [0, {"y": 0}]}
        checkpointer.load(into={"opt": fresh, "sch": anew, "values": blank, other: {"opt": fresh, "sch": anew, "values": blank}}, strict=False)
    assert (anew.state_dict(), fresh.param_groups[0]["lr"]) == saved and blank == values


def _shards(rank: int, path: str) -> list[bool]:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 5)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    checkpointer = holdfast.Checkpointer(path, format="dcp")
    # Each rank has names of its own, as the stages of a pipeline have.
    checkpointer.save({"app": {"model": model, "optimizer": optimizer}, "own": {f"rank{rank}": rank}}, 1)
    into, fresh = made()
    own = {f"rank{rank}": -1}
    checkpointer.load(into={"app": {"model": into, "optimizer": fresh}, "own": own})
    loaded = [
        _same(optimizer.state_dict(), fresh.state_dict()), _same(model.state_dict(), into.state_dict()),
        own == {f"rank{rank}": rank}, isinstance(fresh.state[into.weight]["exp_avg"], DTensor),
        list(fresh.state[into.weight]) == list(optimizer.state[model.weight]),
    ]  # fmt: skip
    try:
        checkpointer.load(into={"own": {"rank0": -1}})
    except CheckpointException as error:
        loaded.append("not in the target: own.rank1 " in str(error))
    checkpointer.close()
    return loaded


def test_shards_of_a_new_optimizer_get_their_state(tmp_path: Path) -> None:
    assert dcp_ranks.run_ranks(2, tmp_path, _shards, str(tmp_path / "run")) == [[True] * 6] * 2


def _save_and_load_as_plain(rank: int, path: str) -> tuple[str, str]:
    holdfast.dcp.save({f"t{rank}": torch.ones(3)}, checkpoint_id=path)
    with pytest.raises(holdfast.Error) as refused:
        holdfast.load(path)
    return refused.value.code, refused.value.message


def test_a_plain_load_names_what_loads_it_on_every_rank(tmp_path: Path) -> None:
    for code, message in dcp_ranks.run_ranks(2, tmp_path, _save_and_load_as_plain, str(tmp_path / "step-1")):
        assert code == "FAILED_PRECONDITION" and "use holdfast.dcp.load" in message
