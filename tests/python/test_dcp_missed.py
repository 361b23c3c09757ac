"""A rank that leaves out a call of `holdfast.dcp.async_save`: that save fails, and no later one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast.dcp import uploads

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = range(1, 8)


def _outcome(future: Any) -> str:
    failure = future.exception(80)
    if isinstance(failure, CheckpointException):
        failure = next(iter(failure.failures.values()))[0]
    return "" if failure is None else str(failure)


def _saves(rank: int, directory: str, name: str, missing: dict[int, list[int]], in_flight: bool) -> dict[int, str]:
    outcomes, futures = {}, {}
    for step in STEPS:
        if step in missing.get(rank, []):
            continue
        state = {f"r{rank}": torch.full((5,), float(step)), "all": torch.full((3,), float(step))}
        writer = holdfast.dcp.StorageWriter(os.path.join(directory, name.format(step=step)), step=step)
        futures[step] = holdfast.dcp.async_save(state, storage_writer=writer)
        if not in_flight:
            outcomes[step] = _outcome(futures[step])
    outcomes |= {step: _outcome(future) for step, future in futures.items()}
    dist.barrier()
    return outcomes


def _steps_in(path: Path, ranks: int) -> set[float]:
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    target = {f"r{rank}": torch.zeros(5) for rank in range(ranks)} | {"all": torch.zeros(3)}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return {value for tensor in target.values() for value in tensor.tolist()}


@pytest.mark.parametrize("in_flight", [False, True], ids=["one by one", "in flight"])
@pytest.mark.parametrize(
    "missing",
    [{1: [3]}, {0: [3]}, {1: [3, 4]}, {0: [2], 1: [4]}],
    ids=["a rank", "the first rank", "two saves", "each rank one"],
)
def test_only_the_save_fails_that_a_rank_has_missed(
    missing: dict[int, list[int]], in_flight: bool, tmp_path: Path
) -> None:
    answers = dcp_ranks.run_ranks(2, tmp_path, _saves, str(tmp_path), "step-{step}", missing, in_flight)
    missed = {step for steps in missing.values() for step in steps}
    for rank, outcomes in enumerate(answers):
        for step in STEPS:
            if step in missing.get(rank, []):
                continue
            assert bool(outcomes[step]) == (step in missed), (rank, step, outcomes)
            if step in missed:
                assert "all ranks must call" in outcomes[step]
    for step in set(STEPS) - missed:
        assert _steps_in(tmp_path / f"step-{step}", 2) == {float(step)}
    assert all(not (tmp_path / f"step-{step}" / ".metadata").exists() for step in missed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_first_call_that_a_rank_has_missed_costs_the_next_save_at_most(rank: int, tmp_path: Path) -> None:
    """The first saves are planned together: the ranks meet with plans of different saves."""
    answers = dcp_ranks.run_ranks(2, tmp_path, _saves, str(tmp_path), "step-{step}", {rank: [1]}, False)
    for outcomes in answers:
        assert all("all ranks must call" in outcomes[step] for step in (1, 2) if outcomes.get(step))
        assert not any(outcomes[step] for step in range(3, 8))
    assert answers[1 - rank][1]
    assert not (tmp_path / "step-1" / ".metadata").exists()
    for step in range(3, 8):
        assert _steps_in(tmp_path / f"step-{step}", 2) == {float(step)}


def test_of_three_ranks_the_others_wait_for_the_one_that_is_behind(tmp_path: Path) -> None:
    missing = {1: [3], 2: [3, 4]}
    answers = dcp_ranks.run_ranks(3, tmp_path, _saves, str(tmp_path), "step-{step}", missing, False)
    assert [step for step, outcome in answers[0].items() if outcome] == [3, 4]
    for step in (1, 2, 5, 6, 7):
        assert _steps_in(tmp_path / f"step-{step}", 3) == {float(step)}


def test_no_checkpoint_of_one_path_has_parts_of_two_steps(tmp_path: Path) -> None:
    missing = {1: [3]}
    answers = dcp_ranks.run_ranks(2, tmp_path, _saves, str(tmp_path), "last", missing, False)
    for rank, outcomes in enumerate(answers):
        assert [step for step, outcome in outcomes.items() if outcome] == [3] * (rank == 0), outcomes
    assert _steps_in(tmp_path / "last", 2) == {7.0}


def _one_rank_last(rank: int, directory: str) -> list[str]:
    """Rank 0 has begun fewer saves than rank 1, which from then on has nothing of its own to write."""
    futures = []
    for step in STEPS:
        if rank == 0 and step in (2, 3):
            continue
        state = {"all": torch.full((3,), float(step)), **({f"r{rank}": torch.full((5,), float(step))} if step < 6 else {})}
        writer = holdfast.dcp.StorageWriter(os.path.join(directory, "last"), step=step)
        futures.append(holdfast.dcp.async_save(state, storage_writer=writer))
    outcomes = [_outcome(future) for future in futures]
    dist.barrier()
    return outcomes


def test_a_rank_with_fewer_calls_completes_the_later_saves_alone(tmp_path: Path) -> None:
    answers = dcp_ranks.run_ranks(2, tmp_path, _one_rank_last, str(tmp_path))
    assert not any(answers[0]) and [bool(outcome) for outcome in answers[1]] == [False, True, True, *[False] * 4], answers
    target = {"all": torch.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "last", no_dist=True)
    assert target["all"].tolist() == [7.0] * 3 and holdfast.dcp.verify(tmp_path / "last")["verdict"] == "sound"


@pytest.mark.parametrize("is_first", [True, False], ids=["planned together", "known plan"])
def test_a_recovery_completes_no_save_of_two_steps(is_first: bool, tmp_path: Path) -> None:
    """As if the ranks were killed, or stopped for a moment, when all their data was durable."""
    dcp_ranks.run_ranks(2, tmp_path, _of_two_steps, str(tmp_path / "run"), is_first)


def _of_two_steps(rank: int, directory: str, is_first: bool) -> None:
    path, exchange, may_go_on = Path(directory, "best"), uploads.Exchange.reduce, threading.Event()

    def begin(step: int) -> Any:
        state = {f"r{rank}": torch.full((5,), float(step)), "all": torch.full((3,), float(step))}
        return holdfast.dcp.async_save(state, storage_writer=holdfast.dcp.StorageWriter(path, step=step))

    if not is_first:
        begin(1).result()
    dist.barrier()
    uploads.Exchange.reduce = lambda *of: may_go_on.wait(60) and exchange(*of)  # type: ignore[method-assign, assignment]
    begun = begin(2 + rank)
    end = time.monotonic() + 60
    while len(list(path.glob("rank-*.manifest.json"))) < (2 if is_first else 4) and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()
    if rank == 0:
        report = holdfast.recover(directory, wait_for_orphans=0)
        assert report["promoted"] == report["removed"] == []
        assert is_first or _steps_in(path, 2) == {1.0}
    dist.barrier()
    may_go_on.set()
    uploads.Exchange.reduce = exchange  # type: ignore[method-assign]
    later = begin(3) if rank == 0 else begun  # rank 1 has it already
    outcome = _outcome(begun)
    assert "all ranks must call" in outcome or rank == 1, outcome
    _outcome(later)


def _in_turn(rank: int, directory: str, missing: tuple[int, int], waiting: int) -> list[dict[int, str]]:
    """Saves into three directories in turn: one rank leaves out a call, and one waits for each save of its own."""
    outcomes = []
    for begin, end in ((1, 13), (13, 19)):
        futures = {}
        for number in range(begin, end):
            if (rank, number) == missing:
                continue
            state = {f"r{rank}": torch.full((5,), float(number)), "all": torch.full((3,), float(number))}
            path = os.path.join(directory, f"kind-{number % 3}")
            futures[number] = holdfast.dcp.async_save(state, checkpoint_id=path)
            if rank == waiting:
                futures[number].exception(80)
        outcomes.append({number: _outcome(future) for number, future in futures.items()})
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("missing", [(0, 5), (1, 5), (0, 6), (1, 6)])
def test_a_missed_call_of_a_path_that_is_used_in_turn(missing: tuple[int, int], waiting: int, tmp_path: Path) -> None:
    """The saves of one rank are in flight all the time, begun before it could know."""
    answers = dcp_ranks.run_ranks(2, tmp_path, _in_turn, str(tmp_path), missing, waiting)
    missed = missing[1]
    # The ranks meet again one or two calls later. Of the saves of the path itself the next one fails, and those which
    # the rank that has missed the call had begun by then: it counts them otherwise than the other one does.
    counted_apart = set(range(missed + 3, missed + 4 if missing[0] == waiting else 13, 3))
    may_fail = {missed, missed + 1, missed + 2} | counted_apart
    for first, later in answers:
        failed = {number for number, outcome in first.items() if outcome}
        assert counted_apart <= failed <= may_fail, first
        assert all("all ranks must call" in first[number] for number in failed)
        assert not any(later.values()), later
    assert answers[1 - missing[0]][0][missed]
    for number in range(16, 19):
        assert _steps_in(tmp_path / f"kind-{number % 3}", 2) == {float(number)}


def _two_slots(rank: int, directory: str, missing: int) -> dict[int, str]:
    outcomes = {}
    for number in range(10 + rank):
        if (rank, number) != (1, missing):
            writer = holdfast.dcp.StorageWriter(os.path.join(directory, f"slot-{number % 2}"))
            state = {f"r{rank}": torch.full((5,), float(number)), "all": torch.full((3,), float(number))}
            future = holdfast.dcp.async_save(state, storage_writer=writer)
            outcomes[number] = _outcome(future)
    return outcomes


@pytest.mark.parametrize("missing", [4, 5])
def test_two_names_in_turn_never_have_parts_of_two_saves(missing: int, tmp_path: Path) -> None:
    """Nothing says which rank has left out a call, so the saves fail from then on, and say that they need their steps."""
    answers = dcp_ranks.run_ranks(2, tmp_path, _two_slots, str(tmp_path), missing)
    for outcomes in answers:
        assert {number for number, outcome in outcomes.items() if outcome} == {n for n in outcomes if n >= missing}
        assert "StorageWriter(path, step=...)" in outcomes[8]
    for number in (missing - 2, missing - 1):
        assert _steps_in(tmp_path / f"slot-{number % 2}", 2) == {float(number)}


KINDS = ("model", "optimizer", "averages", "loader", "random")


def _of_kinds(rank: int, directory: str, missing: dict[int, list[int]], in_flight: bool) -> dict[int, str]:
    """Saves of several kinds of state, each into a directory of its own, which says nothing of the order."""
    outcomes, futures = {}, {}
    for number in range(25):
        if number in missing.get(rank, []):
            continue
        state = {f"r{rank}": torch.full((5,), float(number)), "all": torch.full((3,), float(number))}
        path = os.path.join(directory, f"step-{number // 5}", KINDS[number % 5])
        futures[number] = holdfast.dcp.async_save(state, checkpoint_id=path)
        if not in_flight:
            outcomes[number] = _outcome(futures[number])
    outcomes |= {number: _outcome(future) for number, future in futures.items()}
    dist.barrier()
    return outcomes


@pytest.mark.parametrize("in_flight", [False, True], ids=["one by one", "in flight"])
@pytest.mark.parametrize("missing", [{1: [7]}, {0: [7]}, {0: [6, 7]}, {1: [4], 0: [13]}])
def test_saves_of_several_kinds_meet_again_after_a_missed_call(
    missing: dict[int, list[int]], in_flight: bool, tmp_path: Path
) -> None:
    missed = {number for numbers in missing.values() for number in numbers}
    # Two ranks at different saves, neither of which the other rank has begun: both fail.
    may_fail = missed | {number + 1 for number in missed} | {number + 2 for number in missed if number - 1 in missed}
    for outcomes in dcp_ranks.run_ranks(2, tmp_path, _of_kinds, str(tmp_path), missing, in_flight):
        failed = {number for number, outcome in outcomes.items() if outcome}
        assert missed & set(outcomes) <= failed <= may_fail, failed
        assert all("all ranks must call" in outcomes[number] for number in failed)
    for number in set(range(25)) - may_fail:
        assert _steps_in(tmp_path / f"step-{number // 5}" / KINDS[number % 5], 2) == {float(number)}


def _long_ago(rank: int, directory: str) -> None:
    """A name is used again after more saves than a rank counts."""
    uploads._CALLS_MAX = 4
    for number in range(16):
        state = {f"r{rank}": torch.full((5,), float(number)), "all": torch.full((3,), float(number))}
        name, step = ("best", 0) if number % 7 == 1 else ("last", number)
        holdfast.dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(os.path.join(directory, name), step=step))


def test_a_name_that_was_used_long_ago_is_saved_again(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _long_ago, str(tmp_path))
    assert _steps_in(tmp_path / "best", 2) == {15.0} and _steps_in(tmp_path / "last", 2) == {14.0}


def _repeated(rank: int, directory: str) -> list[str]:
    """A job that gives its steps; one rank calls twice for one of them."""
    futures = []
    with holdfast.Checkpointer(directory, format="dcp") as checkpointer:
        for step in (1, 2, 2, 3, 4) if rank == 0 else (1, 2, 3, 4):
            futures.append(checkpointer.save_async({"all": torch.full((3,), float(step))}, step).durable)
        outcomes = [_outcome(future) for future in futures]
        dist.barrier()
    return outcomes


def test_who_has_given_steps_is_not_told_to_give_them(tmp_path: Path) -> None:
    answers = dcp_ranks.run_ranks(2, tmp_path, _repeated, str(tmp_path / "run"))
    assert "all ranks must call" in answers[0][2], answers
    assert not any("step=..." in outcome for outcomes in answers for outcome in outcomes), answers


def _beside_steps(rank: int, directory: str) -> dict[str, str]:
    """Saves of names with steps, and of one name that is used again beside them; each in flight alone."""
    outcomes = {}
    for step in range(1, 10):
        for name in (f"step-{step}", "latest"):
            if (rank, step, name) == (1, 4, "latest"):
                continue
            state = {f"r{rank}": torch.full((5,), float(step)), "all": torch.full((3,), float(step))}
            future = holdfast.dcp.async_save(state, checkpoint_id=os.path.join(directory, name))
            outcomes[f"{name} {step}"] = _outcome(future)
    dist.barrier()
    return outcomes


def test_a_missed_call_of_one_name_leaves_the_steps_beside_it_as_they_are(tmp_path: Path) -> None:
    for outcomes in dcp_ranks.run_ranks(2, tmp_path, _beside_steps, str(tmp_path)):
        assert {name for name, outcome in outcomes.items() if outcome} <= {"latest 4", "step-5 5", "latest 5"}, outcomes
    for name, step in {"step-4": 4.0, "step-6": 6.0, "step-9": 9.0, "latest": 9.0}.items():
        assert _steps_in(tmp_path / name, 2) == {step}


def test_without_a_way_to_tell_who_is_behind_all_ranks_fail(tmp_path: Path) -> None:
    """Of paths and steps that never meet, a rank does not wait for ever."""
    answers = dcp_ranks.run_ranks(2, tmp_path, _apart, str(tmp_path))
    assert all("all ranks must call" in outcome for outcomes in answers for outcome in outcomes)


def _apart(rank: int, directory: str) -> list[str]:
    holdfast.dcp.save({"x": torch.ones(2)}, checkpoint_id=os.path.join(directory, "first"))
    futures = [
        holdfast.dcp.async_save({"x": torch.ones(2)}, checkpoint_id=os.path.join(directory, f"rank-{rank}", f"step-{n + rank}"))
        for n in range(8)
    ]
    return [_outcome(future) for future in futures]


class _FailsInTheEnd(dcp.DefaultSavePlanner):
    rank = 0

    def finish_plan(self, plan: Any) -> Any:
        if dist.get_rank() == self.rank:
            raise ValueError("no plan today")
        return super().finish_plan(plan)


class _NoState:
    rank = 0

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            raise ValueError("no state today")
        return {"x": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _save(rank: int, path: str, planner: Any = None, module: Any = None, alone: bool = False) -> str:
    state = {f"r{rank}": torch.ones(5), **({"module": module} if module is not None else {})}
    try:
        holdfast.dcp.save(state, checkpoint_id=path, planner=planner, use_collectives=not alone)
    except (CheckpointException, holdfast.Error, ValueError) as error:
        failures = getattr(error, "failures", {0: [error]})
        return "; ".join(str(failure[0]) for failure in failures.values())
    return ""


def _fail_in_the_end_of_planning(rank: int, directory: str) -> None:
    for failing in range(2):
        planner = _FailsInTheEnd()
        planner.rank = failing
        outcome = _save(rank, f"{directory}/failed-{failing}", planner)
        assert outcome == "no plan today", outcome
        for step in range(2):
            outcome = _save(rank, f"{directory}/{failing}-{step}")
            assert not outcome, outcome


def test_a_failure_in_the_end_of_the_planning_reaches_all_ranks(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _fail_in_the_end_of_planning, str(tmp_path), timeout=20)


def _save_alone(rank: int, directory: str, first: bool) -> None:
    """Without collectives a failure is of one rank, and the saves before and behind are not concerned."""
    if not first:
        assert not _save(rank, f"{directory}/first")
    for step, module in enumerate((None, _NoState(), None)):
        outcome = _save(rank, f"{directory}/alone-{step}", module=module, alone=True)
        assert outcome == ("no state today" if module is not None and rank == 0 else ""), outcome
        for number in range(2):
            outcome = _save(rank, f"{directory}/{step}-{number}")
            assert not outcome, outcome
    dist.barrier()


@pytest.mark.parametrize("first", [True, False])
def test_saves_without_collectives_leave_the_others_as_they_are(first: bool, tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _save_alone, str(tmp_path), first, timeout=20)
