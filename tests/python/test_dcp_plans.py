"""Plans that are known from an earlier save: used where nothing has changed, and only there."""

from __future__ import annotations

import os
import random
from collections import UserDict
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
import holdfast.dcp
from holdfast.dcp import uploads

pytestmark = pytest.mark.filterwarnings("ignore")


class Plannings:
    """Counts the plannings of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.count = 0
        real = dcp.DefaultSavePlanner.create_local_plan

        def counted(planner: Any) -> Any:
            self.count += 1
            return real(planner)

        if monkeypatch is not None:
            monkeypatch.setattr(dcp.DefaultSavePlanner, "create_local_plan", counted)
        else:
            dcp.DefaultSavePlanner.create_local_plan = counted  # type: ignore[method-assign]


def _loaded(path: Any, like: dict[str, Any]) -> dict[str, Any]:
    target = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in like.items()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def _equal(state: dict[str, Any], loaded: dict[str, Any]) -> None:
    for name, value in state.items():
        same = torch.equal(value, loaded[name]) if isinstance(value, torch.Tensor) else value == loaded[name]
        assert same, name


# ---- One rank.


def test_a_state_of_the_same_structure_is_not_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plannings = Plannings(monkeypatch)
    for step in range(4):
        state = {"w": torch.full((10,), float(step)), "step": step, "lr": 0.1 * step, "empty": torch.zeros(0),
                 "odd": torch.arange(12.0).reshape(3, 4).t() + step}  # fmt: skip
        holdfast.dcp.save(state, checkpoint_id=tmp_path / str(step))
        _equal(state, _loaded(tmp_path / str(step), state))
        assert holdfast.dcp.verify(tmp_path / str(step))["verdict"] == "sound"
    assert plannings.count == 1


class _Own(torch.Tensor):
    """Only ``torch.save`` can write it."""


def test_what_lies_otherwise_than_in_the_save_before_is_saved_as_it_is(tmp_path: Path) -> None:
    def state(step: int, *, turned: bool, own_class: bool) -> dict[str, Any]:
        odd = torch.arange(12.0) + step
        return {
            "p": torch.nn.Parameter(torch.full((5,), float(step))),
            "odd": odd.reshape(3, 4).t() if turned else odd.reshape(4, 3),
            "imag": (torch.ones(3) * (2 + step) * 1j).conj().imag,
            "empty": torch.zeros(0, 2),
            **({"own": torch.full((3,), float(step)).as_subclass(_Own)} if own_class else {}),
        }

    looks = [(False, False), (True, False), (False, False), (False, True), (True, True), (False, True)]
    for step, (turned, own_class) in enumerate(looks):
        for again in (0, 10):
            now = state(step + again, turned=turned, own_class=own_class)
            path = tmp_path / str(step + again)
            holdfast.dcp.save(now, checkpoint_id=path)
            whole = {k: v for k, v in now.items() if k != "own"}
            _equal(whole, _loaded(path, whole))
            assert holdfast.dcp.verify(path)["verdict"] == "sound"


def _changes() -> list[tuple[str, Any]]:
    return [
        ("shape", {"a": {"w": torch.ones(5), "x": 1}}),
        ("dtype", {"a": {"w": torch.ones(4, dtype=torch.int32), "x": 1}}),
        ("name", {"a": {"v": torch.ones(4), "x": 1}}),
        ("nesting", {"a.w": torch.ones(4), "a": {"x": 1}}),
        ("order", {"a": {"x": 1, "w": torch.ones(4)}}),
        ("requires_grad", {"a": {"w": torch.nn.Parameter(torch.ones(4)), "x": 1}}),
        ("a tensor for an object", {"a": {"w": torch.ones(4), "x": torch.tensor(1)}}),
        ("more", {"a": {"w": torch.ones(4), "x": 1}, "b": [torch.ones(2)]}),
        ("kinds of keys", {"a": {"w": torch.ones(4), "x": 1, 1: torch.ones(1)}}),
    ]


@pytest.mark.parametrize("what", [name for name, _ in _changes()])
def test_any_change_of_the_structure_is_planned(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": {"w": torch.ones(4), "x": 1}}
    holdfast.dcp.save(state, checkpoint_id=tmp_path / "before")
    plannings = Plannings(monkeypatch)
    holdfast.dcp.save(dict(_changes())[what], checkpoint_id=tmp_path / "after")
    assert plannings.count == 1
    holdfast.dcp.save(state, checkpoint_id=tmp_path / "again")
    assert plannings.count == 1
    names = {
        name: set(dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata)
        for name in ("before", "after", "again")
    }
    stock = tmp_path / "stock"
    dcp.save(dict(_changes())[what], checkpoint_id=stock)
    assert names["after"] == set(dcp.FileSystemReader(stock).read_metadata().state_dict_metadata)
    assert names["again"] == names["before"]


def test_flags_of_the_planner_count(tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(4)}}
    for flat in (True, False, True):
        planner = dcp.DefaultSavePlanner(flatten_state_dict=flat)
        metadata = holdfast.dcp.save(state, checkpoint_id=tmp_path / str(flat), planner=planner)
        assert set(metadata.state_dict_metadata) == ({"a.w"} if flat else {"a"})


def test_other_mappings_and_values_that_are_equal_but_not_the_same(tmp_path: Path) -> None:
    for step, value in enumerate((1, 1.0, True, 0.0, -0.0, (1, 2.0), "1")):
        state = UserDict({"x": value, "w": torch.full((3,), float(step))})
        path = tmp_path / str(step)
        holdfast.dcp.save(dict(inner=state), checkpoint_id=path)
        loaded: dict[str, Any] = {"inner": {"x": None, "w": torch.zeros(3)}}
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
        assert repr(loaded["inner"]["x"]) == repr(value)
        assert loaded["inner"]["w"][0] == step


def test_a_planner_of_another_class_plans_every_save(tmp_path: Path) -> None:
    class Renamed(dcp.DefaultSavePlanner):
        calls = 0

        def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
            Renamed.calls += 1
            super().set_up_planner({f"n{Renamed.calls}": v for v in state_dict.values()}, *args, **kwargs)

    for step in (1, 2):
        metadata = holdfast.dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / str(step), planner=Renamed())
        assert set(metadata.state_dict_metadata) == {f"n{step}"}


# ---- Several.


def _state(rank: int, step: int, more: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"r{rank}": torch.full((100 + more,), float(step + 10 * rank)),
        "both": torch.full((50,), float(step)),
        "shard": distribute_tensor(torch.arange(30.0) + step, mesh, [Shard(0)]),
        "replica": distribute_tensor(torch.arange(7.0) + step, mesh, [Replicate()]),
        "step": step,
    }


def _changing(rank: int, directory: str, changes: str) -> list[int]:
    """Saves of which the second and third have another structure on some ranks."""
    plannings = Plannings()
    counts = []
    for step in range(5):
        changed = step in (1, 2) and (changes == "all" or rank == int(changes))
        state = _state(rank, step, 5 if changed else 0)
        holdfast.dcp.async_save(state, checkpoint_id=os.path.join(directory, str(step))).result(60)
        counts.append(plannings.count)
        dist.barrier()
    return counts


@pytest.mark.parametrize("changes", ["0", "1", "all"])
def test_a_change_on_any_rank_leads_to_a_plan_for_all(changes: str, tmp_path: Path) -> None:
    counts = dcp_ranks.run_ranks(2, tmp_path, _changing, str(tmp_path), changes)
    for step in range(5):
        path = tmp_path / str(step)
        more = [5 if step in (1, 2) and changes in ("all", str(r)) else 0 for r in range(2)]
        expected = {
            "r0": torch.full((100 + more[0],), float(step)),
            "r1": torch.full((100 + more[1],), float(step + 10)),
            "both": torch.full((50,), float(step)), "shard": torch.arange(30.0) + step,
            "replica": torch.arange(7.0) + step, "step": step,
        }  # fmt: skip
        _equal(expected, _loaded(path, expected))
        assert holdfast.dcp.verify(path)["verdict"] == "sound"
    for rank, count in enumerate(counts):
        # The third save follows the plan that was made behind the second, and the fourth the first's.
        changed = changes in ("all", str(rank))
        assert count == ([1, 2, 2, 2, 2] if changed else [1, 1, 1, 1, 1])


def _left_out(rank: int, directory: str) -> list[Any]:
    """The rank that writes a replica lacks it from one save to the next."""
    outcomes = []
    for step, lacks in enumerate((False, True, False)):
        state = {"big": torch.ones(1000), "both": torch.full((50,), float(step))}
        if lacks and rank == 0:
            del state["big"]
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        future = holdfast.dcp.async_save(state, checkpoint_id=os.path.join(directory, str(step)), planner=planner)
        outcomes.append(str(future.exception(60) or ""))
    return outcomes


def _count_equalities(rank: int, path: str, tensors: int) -> list[int]:
    counted = 0
    equal = MetadataIndex.__eq__

    def count(one: Any, other: Any) -> bool:
        nonlocal counted
        counted += 1
        return equal(one, other)

    MetadataIndex.__eq__ = count  # type: ignore[method-assign,assignment]
    counts = []
    for more in range(2):
        state = {f"own{rank}.{i}" if i % 2 else f"shared.{i}": torch.ones(1) for i in range(tensors + more)}
        counted = 0
        holdfast.dcp.save(state, checkpoint_id=f"{path}-{more}")
        counts.append(counted)
    return counts


def test_planning_compares_in_proportion_to_the_number_of_tensors(tmp_path: Path) -> None:
    tensors = 1000
    for counts in dcp_ranks.run_ranks(2, tmp_path, _count_equalities, str(tmp_path / "s"), tensors):
        # Each look into a set or dict is one comparison. A search through a list is hundreds.
        assert max(counts) < 50 * tensors, counts


def test_what_every_rank_left_to_another_fails_the_save(tmp_path: Path) -> None:
    for first, second, third in dcp_ranks.run_ranks(2, tmp_path, _left_out, str(tmp_path)):
        assert not first and not third
        assert "big was left to another rank" in second and "save again" in second
    assert not (tmp_path / "1" / ".metadata").exists()
    assert holdfast.dcp.verify(tmp_path / "2")["verdict"] == "sound"


def _lacks_for_good(rank: int, directory: str, lacking: int) -> list[str]:
    """A rank lacks from the second save on what it has written."""
    outcomes = []
    for step in range(5):
        state = {f"own{rank}": torch.full((10,), float(step))}
        if rank != lacking or step == 0:
            state.update({f"both.{i}": torch.full((10,), float(step)) for i in range(3)})
        future = holdfast.dcp.async_save(state, checkpoint_id=os.path.join(directory, str(step)))
        outcomes.append(str(future.exception(60) or ""))
    dist.barrier()
    return outcomes


@pytest.mark.parametrize("lacking", range(3))
def test_the_save_after_one_that_every_rank_left_to_another_works(lacking: int, tmp_path: Path) -> None:
    for first, second, *later in dcp_ranks.run_ranks(3, tmp_path, _lacks_for_good, str(tmp_path), lacking):
        assert not first and later == ["", "", ""]
        assert "was left to another rank" in second
    for step in (2, 3, 4):
        own = range(3)
        expected = {name: torch.full((10,), float(step)) for name in (*map("own{}".format, own), *map("both.{}".format, own))}
        _equal(expected, _loaded(tmp_path / str(step), expected))
        assert holdfast.dcp.verify(tmp_path / str(step))["verdict"] == "sound"


def _many_structures(rank: int, directory: str) -> list[str]:
    """Rank 0 has so many structures that it no longer knows the plan by which the other rank has saved its own."""
    outcomes = []
    for step in range(14):
        state = {f"own{rank}": torch.ones(10), "rank": torch.ones(1 + (step if rank == 0 else step not in (0, 12, 13)))}
        state = {f"{name}.{rank}": value for name, value in state.items()}
        future = holdfast.dcp.async_save(state, checkpoint_id=os.path.join(directory, str(step)))
        outcomes.append(str(future.exception(60) or ""))
    return outcomes


def test_the_coordinator_keeps_a_plan_that_another_rank_knows(tmp_path: Path) -> None:
    for outcomes in dcp_ranks.run_ranks(2, tmp_path, _many_structures, str(tmp_path)):
        assert not any(outcomes), outcomes


def _alternating(rank: int, directory: str, structures: int, rounds: int, in_flight: int, apart: bool) -> list[str]:
    """Saves of several structures in turn, up to `in_flight` of them at once. `apart`: the ranks begin them at unequal times."""
    uneven = random.Random(rank)
    futures: list[Any] = []
    for step in range(structures * rounds):
        if apart and uneven.random() < 0.3 and futures:
            uneven.choice(futures).exception(60)
        state = {f"r{rank}.{step % structures}": torch.full((5,), float(step)), "both": torch.full((9,), float(step))}
        path = os.path.join(directory, str(step % structures))
        futures.append(holdfast.dcp.async_save(state, checkpoint_id=path))
        if len(futures) >= in_flight:
            futures[-in_flight].exception(60)
    return [str(future.exception(60) or "") for future in futures]


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize(("structures", "in_flight"), [(7, 20), (11, 30)])
def test_saves_in_flight_keep_their_plans(structures: int, in_flight: int, apart: bool, tmp_path: Path) -> None:
    rounds = 6
    answers = dcp_ranks.run_ranks(2, tmp_path, _alternating, str(tmp_path), structures, rounds, in_flight, apart)
    assert answers == [[""] * structures * rounds] * 2
    for number in range(structures):
        step = float(number + structures * (rounds - 1))
        expected = {f"r{r}.{number}": torch.full((5,), step) for r in range(2)} | {"both": torch.full((9,), step)}
        _equal(expected, _loaded(tmp_path / str(number), expected))
        assert holdfast.dcp.verify(tmp_path / str(number))["verdict"] == "sound"


def _in_flight(rank: int, directory: str) -> None:
    """Saves into one directory in turn, all in flight, while the structure changes on one rank."""
    futures = []
    for step in range(8):
        state = _state(rank, step, step // 3 if rank == 1 else 0)
        futures.append(holdfast.dcp.async_save(state, checkpoint_id=os.path.join(directory, str(step % 2))))
    for future in futures:
        future.result(60)


def test_saves_in_flight_survive_changes_of_the_structure(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _in_flight, str(tmp_path))
    for step in (6, 7):
        path = tmp_path / str(step % 2)
        expected = {"r0": torch.full((100,), float(step)), "r1": torch.full((102,), float(step + 10)),
                    "shard": torch.arange(30.0) + step, "step": step}  # fmt: skip
        _equal(expected, _loaded(path, expected))
        assert holdfast.dcp.verify(path)["verdict"] == "sound"
        assert len(list(path.iterdir())) == 6, sorted(p.name for p in path.iterdir())


def _other_forms(rank: int, directory: str, way: str) -> list[dict[str, Any]]:
    """Saves tensors that have another shape or dtype on each rank; returns this rank's of each save."""
    states = []
    for step in range(5):
        changes = way == "all ranks change" or (way == "rank 0 changes" and rank == 0)
        n = step if changes else 0
        shapes = {"a": 10 + rank + n, "b": 7 - rank + n, "c": 40}
        names = sorted(shapes, reverse=way == "the order changes" and rank == 0 and step > 0)
        dtypes = [torch.float32, torch.bfloat16]
        state = {name: torch.full((shapes[name],), 10.0 * step + rank, dtype=dtypes[rank] if name == "c" else None) for name in names}
        states.append({name: (tensor.dtype, tensor.tolist()) for name, tensor in state.items()})
        reduce = uploads.Exchange.reduce
        if step == 4:  # for the recovery

            def lost(*_: Any) -> Any:
                raise RuntimeError("lost")

            uploads.Exchange.reduce = lost  # type: ignore[method-assign]
        try:
            future = holdfast.dcp.async_save(state, checkpoint_id=f"{directory}/{step}")
            assert (future.exception(60) is None) == (step < 4)
        finally:
            uploads.Exchange.reduce = reduce  # type: ignore[method-assign]
        dist.barrier()
    return states


@pytest.mark.parametrize("way", ["all ranks change", "rank 0 changes", "the order changes"])
def test_what_has_another_form_on_each_rank_is_described_as_it_is_written(way: str, tmp_path: Path) -> None:
    by_rank = dcp_ranks.run_ranks(2, tmp_path, _other_forms, str(tmp_path), way)
    assert holdfast.dcp.recover(tmp_path / "4") == [".metadata"]
    for step, states in enumerate(zip(*by_rank, strict=True)):
        metadata = dcp.FileSystemReader(tmp_path / str(step)).read_metadata().state_dict_metadata
        for name, of in metadata.items():
            like = torch.empty(of.size, dtype=of.properties.dtype)  # type: ignore[union-attr]
            for loads in (holdfast.dcp.load, dcp.load):
                target = {name: torch.full_like(like, -1)}
                loads(target, checkpoint_id=tmp_path / str(step), no_dist=True)
                found = target[name].dtype, target[name].tolist()
                assert sum(found == state[name] for state in states) == 1, (step, name, found)


def _out_of_order(rank: int, directory: str) -> list[str]:
    outcomes = []
    for names in (("a", "a"), ("b", "c"), ("d", "d")):
        path = os.path.join(directory, names[rank])
        future = holdfast.dcp.async_save({f"r{rank}": torch.ones(5)}, checkpoint_id=path)
        outcomes.append(str(future.exception(60) or ""))
    return outcomes


def test_ranks_that_save_different_checkpoints_in_one_call_are_told(tmp_path: Path) -> None:
    for first, second, third in dcp_ranks.run_ranks(2, tmp_path, _out_of_order, str(tmp_path)):
        assert not first and not third
        assert "same order" in second


def _fails_before_the_capture(rank: int, directory: str) -> list[str]:
    class Broken:
        def state_dict(self) -> Any:
            if rank == 1 and len(outcomes) == 1:
                raise ValueError("no state today")
            return {"x": torch.ones(3)}

        def load_state_dict(self, _: Any) -> None:
            pass

    outcomes: list[str] = []
    for step in range(3):
        path = os.path.join(directory, str(step))
        try:
            future = holdfast.dcp.async_save({f"r{rank}": torch.ones(5), "b": Broken()}, checkpoint_id=path)
            outcomes.append(str(future.exception(60) or ""))
        except (ValueError, CheckpointException) as error:
            outcomes.append(str(error))
    return outcomes


def test_a_rank_that_fails_in_the_call_tells_the_others(tmp_path: Path) -> None:
    for first, second, third in dcp_ranks.run_ranks(2, tmp_path, _fails_before_the_capture, str(tmp_path)):
        assert not first and not third
        assert "no state today" in second


def test_lines_and_plans_go_with_their_process_groups(tmp_path: Path) -> None:
    for _ in range(2):
        with dcp_ranks.one_rank():
            holdfast.dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "x")
        assert not dist.is_initialized()
    assert len([ranks for ranks in uploads._lines.of if ranks]) == 1  # not the first group's
