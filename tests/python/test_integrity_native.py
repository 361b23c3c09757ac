"""integrity-fuzz: rounds of a trainer that is a C++ program."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_integrity import FLIP, WAIT, event, made, save

from holdfast.integrity import injection, jobs, memory_groups, native, processes, rounds, schedule, trainer

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
WIDE = {"tensors": 40, "wide": True}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[rounds.Bench]:
    with processes.adopting():
        made = rounds.Bench(str(tmp_path))
        yield made
        made.close()


def plan(*actions: dict[str, Any], **given: Any) -> dict[str, Any]:
    return made(*actions, door=schedule.PLAN, **given)


@pytest.mark.parametrize("files", [1, 3])
def test_a_round_without_an_event_has_what_was_saved(files: int, bench: rounds.Bench) -> None:
    actions = save(1, spec=WIDE), WAIT, {"do": "recover"}, save(2, spec=WIDE), {"do": "load", "back": 1}, save(3), WAIT, {"do": "move"}
    result = bench.run(plan(*actions, save(4, spec=WIDE), files=files, corruptions=FLIP))
    assert result.problems == [], result.log
    counted = {key: result.counts[key] for key in ("calls", "durable", "loads by trainers", "reads", "damage flip a bit")}
    assert counted == {"calls": 4, "durable": 4, "loads by trainers": 1, "reads": 12, "damage flip a bit": 8}


def test_a_process_runs_rounds_until_an_event_ends_it(bench: rounds.Bench) -> None:
    kinds = ("cancel", "stop-trainer", "fork", "program", "kill-worker", "change-sealed", "limit-files", "kill-trainer", "fork")
    results = [bench.run(plan(save(1, **event(kind)), number=n)) for n, kind in enumerate(kinds)]
    assert [r.problems for r in results] == [[] for _ in kinds]
    assert [sum(r.counts[f"event {kind}"] for r in results) for kind in set(kinds)] == [
        1 + (kind == "fork") for kind in set(kinds)
    ]
    assert [len(r.before[0]) for r in results] == [0, 1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("kind", ["kill-both", "terminate-trainer", "exit-trainer", "kill-in-call", "hang-worker"])
def test_an_end_of_a_process_leaves_what_was_saved(kind: str, bench: rounds.Bench) -> None:
    round_ = plan(save(1, spec=WIDE), WAIT, save(2, **event(kind)))
    result = bench.run({**round_, "lives": [*round_["lives"], [{"do": "load", "back": 0}, save(3, spec=WIDE)]]})
    assert result.problems == [], result.log
    assert result.counts[f"event {kind}"] == 1


@pytest.mark.parametrize(
    ("kind", "place", "code"),
    [
        ("change-sealed", 0.99, "DATA_LOSS"),
        ("change-and-restore", 0.0, ""),
        ("limit-size", 0.0, "RESOURCE_EXHAUSTED"),
        ("limit-files", 0.0, ""),
        ("limit-memory", 0.0, ""),
    ],
)
@pytest.mark.parametrize("door", ["save_async", schedule.PLAN])
def test_a_limit_or_a_change_comes_while_bytes_are_written(door: str, kind: str, place: float, code: str, bench: rounds.Bench) -> None:
    if (door, kind) == ("save_async", "limit-memory"):
        return  # PyTorch's own threads end a process that gets no memory
    struck = {**event(kind, in_flight=True, place=place, bytes=schedule.MIB, seconds=0.6), "spec": {"bytes": 8 * schedule.MIB - 1}, "rate": 8 * schedule.MIB}
    result = bench.run(made(save(1, spec=WIDE), WAIT, save(2, **struck), save(3), door=door, launcher="persistent"))
    assert result.problems == [], result.log
    counted = {key: result.counts[key] for key in (f"in flight {kind}", "durable", "failed")}
    if kind == "change-and-restore" and counted["failed"]:
        code = "DATA_LOSS"  # on a slow machine the bytes are still to be written
    assert counted == {f"in flight {kind}": 1, "durable": 2 + (not code), "failed": int(bool(code))}
    assert not code or result.counts[f"code {code}"] == 1


@pytest.mark.parametrize("door", ["save_async", "dcp", schedule.PLAN])
def test_a_copy_of_a_device_is_lost(door: str, bench: rounds.Bench) -> None:
    lost = {"spec": WIDE, "event": event("lose-copy")["event"]}
    result = bench.run(made(save(1, spec=WIDE), WAIT, save(2, **lost), save(3), door=door, device="stand-in"))
    assert result.problems == [], result.log
    counted = {key: result.counts[key] for key in ("event lose-copy", "durable", "code INTERNAL")}
    assert counted == {"event lose-copy": 1, "durable": 2, "code INTERNAL": 1}


def test_a_trainer_is_killed_in_a_call_while_the_save_before_is_written(bench: rounds.Bench) -> None:
    slow = {"rate": 8 * schedule.MIB, "spec": {"bytes": 12 * schedule.MIB}}
    result = bench.run(plan(save(1, spec=WIDE), WAIT, save(2, **slow), save(3, **{**event("kill-in-call", seconds=2.0), **slow})))
    assert result.problems == [], result.log
    assert (result.counts["event kill-in-call"], result.counts["in flight kill-in-call"]) == (1, 1)


@pytest.mark.parametrize("door", ["save_async", "checkpointer", "save_file", schedule.PLAN])
def test_a_save_stays_in_a_directory_that_is_renamed(door: str, bench: rounds.Bench) -> None:
    slow = {"rate": 16 * schedule.MIB, "spec": {"bytes": 8 * schedule.MIB}}
    result = bench.run(made(save(1), save(2, **slow), {"do": "move", "beside": True}, save(3), door=door))
    assert result.problems == [], result.log
    assert (result.counts["durable"], result.counts["failed"]) == (3, 0)


@pytest.mark.parametrize("early", [True, False])
def test_a_recovery_is_killed_beside_a_worker_that_still_writes(early: bool, bench: rounds.Bench) -> None:
    slow = {**event("kill-trainer"), "rate": 4 * schedule.MIB}
    for _ in range(5):  # on a busy machine a recovery may end before its kill
        result = bench.run(plan(save(1, spec=WIDE), WAIT, save(2, **slow), kill_recover=0.0, kills_early=early))
        assert result.problems == [], result.log
        if result.counts["event kill-recover"]:
            break
    assert (result.counts["event kill-recover"], result.counts["in flight kill-recover"]) == (1, early)


@pytest.mark.parametrize("door", ["save_async", schedule.PLAN])
def test_a_refused_save_hands_its_change_to_no_other(door: str, bench: rounds.Bench) -> None:
    refused = {**save(2, **event("change-sealed")), "step": 1}
    result = bench.run(made(save(1), WAIT, refused, save(3), door=door))
    assert result.problems == [], result.log
    counted = {key: result.counts[key] for key in ("durable", "refused", "code ALREADY_EXISTS", "event change-sealed")}
    assert counted == {"durable": 2, "refused": 1, "code ALREADY_EXISTS": 1, "event change-sealed": 0}


def test_a_device_copies_late_and_each_save_has_what_it_had_at_its_call(bench: rounds.Bench) -> None:
    """A save with an even number waits for its copies, one with an odd number makes the training's stream wait."""
    large = {"bytes": schedule.ARENA + 3 * schedule.MIB, "tensors": 9}
    actions = save(1, spec=WIDE), save(2, spec=WIDE), save(3, spec=large), WAIT, save(4, **event("kill-worker")), save(5, spec=WIDE)
    result = bench.run(plan(*actions, device="stand-in"))
    assert result.problems == [], result.log
    counted = {key: result.counts[key] for key in ("durable", "failed", "event kill-worker")}
    assert counted == {"durable": 4, "failed": 1, "event kill-worker": 1}


@pytest.mark.parametrize(
    ("kind", "files"),
    [("kill-worker", 1), ("terminate-worker", 3), ("hang-worker", 1), ("kill-both", 3), ("kill-both", 1), ("kill-trainer", 3)],
)
def test_files_of_dead_workers_have_bytes_of_their_save_alone(files: int, kind: str, bench: rounds.Bench) -> None:
    """The trainer holds what its worker has made, and the driver what both have left."""
    slow = {**event(kind, share=0.5), "rate": 8 * schedule.MIB}
    result = bench.run(plan(save(1, spec=WIDE), save(2, **slow), save(3, spec={"bytes": 12 * schedule.MIB}), files=files))
    assert result.problems == [], result.log
    assert result.counts["bytes in files of dead workers"] > schedule.MIB
    assert files <= result.counts["files of dead workers"] <= 2 * files


@pytest.mark.planted("foreign_byte")
@pytest.mark.parametrize("kind", ["kill-worker", "kill-both"])
def test_a_byte_of_another_save_in_a_dead_file_is_found(kind: str, bench: rounds.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the program writes into the file of the worker that it kills."""
    line_of = native.line_of

    def planted(*arguments: Any) -> bytes:
        return json.dumps({**json.loads(line_of(*arguments)), "spoil": True}).encode() + b"\n"

    monkeypatch.setattr(native, "line_of", planted)
    (problem,) = bench.run(plan(save(1, **event(kind)))).problems
    assert problem["invariant"] == "iv" and "never had" in problem["what"]


@pytest.mark.skipif(bool(memory_groups.why_not()), reason=memory_groups.why_not())
@pytest.mark.parametrize("kind", schedule.IN_GROUPS)
def test_the_kernel_ends_a_program_or_its_worker_for_lack_of_memory(kind: str, bench: rounds.Bench) -> None:
    done = bench.run(plan(save(1, spec=WIDE), WAIT, save(2, **event(kind))))
    assert done.problems == [], done.log
    assert (done.counts[f"in flight {kind}"], done.counts["failed"]) == (1, kind == "oom-worker")


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not())
def test_rounds_survive_what_containers_forbid_a_program(bench: rounds.Bench) -> None:
    container = {"io_uring_setup": "EPERM", "clone3": "ENOSYS", "statx": "ENOSYS"}
    assert bench.run(plan(save(1), save(2), forbidden=container, ranks=2)).problems == []
    assert bench.run(plan(save(1), number=1)).before == [[]]  # the filter stays with its processes
    (problem, *_) = bench.run(plan(save(1), forbidden={"pidfd_open": "ENOSYS"})).problems
    assert problem["invariant"] == "v" and "UNIMPLEMENTED" in problem["what"]  # it does hold them up


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_commit_together_or_fail_together(ranks: int, bench: rounds.Bench) -> None:
    """They have no process group: the driver gives them the id of each save."""
    whole = bench.run(plan(save(1, spec=WIDE), WAIT, save(2, spec=WIDE), ranks=ranks, files=2, corruptions=FLIP))
    assert whole.problems == [], whole.log
    assert (whole.counts["durable"], whole.counts["failed"], whole.counts["verifications"]) == (2 * ranks, 0, 2)
    failed = bench.run(plan(save(1), WAIT, save(2, **event("kill-worker", rank=1)), save(3), ranks=ranks, number=1))
    assert failed.problems == [], failed.log
    # A rank that calls later is refused at once.
    assert (failed.counts["durable"], failed.counts["failed"] + failed.counts["refused"]) == (2 * ranks, ranks)
    assert failed.before == [[0]]


def test_a_call_without_descriptors_holds_no_other_rank_up(bench: rounds.Bench) -> None:
    """It cannot tell the other ranks, which would wait for time_liveness_max; the program does, once it can."""
    began = time.monotonic()
    result = bench.run(plan(save(1), WAIT, save(2, **event("limit-files", rank=1)), save(3), ranks=2))
    assert result.problems == [], result.log
    assert (result.counts["durable"], result.counts["code RESOURCE_EXHAUSTED"], result.counts["code ABORTED"]) == (4, 1, 1)
    assert time.monotonic() - began < trainer.TIME_LIVENESS_MAX


def test_ranks_go_on_where_one_has_been_killed(bench: rounds.Bench) -> None:
    lives = [[save(1), WAIT, save(2, **event("kill-trainer", rank=1))], [{"do": "load", "back": 0}, save(3)]]
    result = bench.run({**plan(ranks=2), "lives": lives})
    assert result.problems == [], result.log
    assert (result.counts["event kill-trainer"], result.counts["loads by trainers"], result.counts["reads"] > 0) == (1, 2, True)


def test_a_call_without_memory_fails_the_save_of_all_ranks(bench: rounds.Bench) -> None:
    """It may throw in the middle of the call: then the program itself withdraws its rank."""
    limited = {"kind": "limit-memory", "rank": 1, "phase": "writing", "share": 0.0, "seconds": 0.0, "bytes": schedule.MIB}
    began = time.monotonic()
    result = bench.run(plan(save(1), WAIT, save(2, event=limited, spec={"bytes": 12 * schedule.MIB, "tensors": 400}), save(3), ranks=2))
    assert result.problems == [], result.log
    assert result.counts["durable"] in (4, 6) and time.monotonic() - began < trainer.TIME_LIVENESS_MAX


def test_ranks_of_a_program_are_drawn_last() -> None:
    limits = schedule.Limits(doors=(schedule.PLAN,))
    drawn = [schedule.draw(3, n, limits) for n in range(600)]
    assert {r["ranks"] for r in drawn} == set(range(1, 9))
    for round_ in drawn:
        of_one = round_["ranks"] == 1
        assert of_one or (round_["when_full"], round_["jobs"]) == ("wait", 1)
        assert of_one or not {a["do"] for life in round_["lives"] for a in life} & {"move", "recover"}
        assert all(e["rank"] < round_["ranks"] for e in schedule.events_of(round_))
    assert {e["rank"] for r in drawn for e in schedule.events_of(r)} >= {0, 1, 2, 3}


OTHERS = {
    "name": (0, lambda name: name + "?"), "dtype": (1, lambda _: "I32"), "shape": (2, lambda shape: [*shape, 1]),
    "at": (4, lambda at: at ^ 1), "key": (5, lambda key: key ^ 1),
}  # fmt: skip


def other_recipes(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the program takes the largest tensor of a save for another one of the same size."""
    recipes = native._recipes

    def planted(*arguments: Any) -> list[list[Any]]:
        made = recipes(*arguments)
        at, change = OTHERS[changed]
        largest = max(made, key=lambda recipe: recipe[3])
        largest[at] = change(largest[at])
        return made

    monkeypatch.setattr(native, "_recipes", planted)


@pytest.mark.planted("another_tensor")
@pytest.mark.parametrize("changed", OTHERS)
def test_a_tensor_that_is_another_is_found(changed: str, bench: rounds.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    other_recipes(changed, monkeypatch)
    problems = bench.run(plan(save(1))).problems
    assert {p["invariant"] for p in problems} == {"i", "ii"}, problems
    for reader in ("holdfast::CheckpointReader", "safetensors"):
        assert any(p["what"].startswith(f"{reader} of") for p in problems), problems


@pytest.mark.planted("another_tensor_loaded")
@pytest.mark.parametrize("changed", OTHERS)
def test_a_tensor_that_is_another_is_found_by_the_program(changed: str, bench: rounds.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads what its life before has saved."""
    live = jobs.Life.run

    def run(self: jobs.Life) -> None:
        live(self)
        other_recipes(changed, monkeypatch)

    monkeypatch.setattr(jobs.Life, "run", run)
    given = plan()
    problems = bench.run({**given, "lives": [[save(1)], [{"do": "load", "back": 0}]]}).problems
    assert [p["invariant"] for p in problems] == ["ii"] and "a trainer loaded" in problems[0]["what"], problems


def test_what_the_program_keeps_is_told(bench: rounds.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.run(plan(save(1))).problems == []
    monkeypatch.setattr(trainer, "TIME_SETTLE_MAX", 0.2)
    (crew,) = bench._pool._resting
    kept = next(iter(crew.members[0]._before))
    crew.members[0]._before[kept] -= 1
    (problem,) = bench.run(plan(save(1), number=1)).problems
    assert problem["invariant"] == "iv" and kept in problem["what"]


def test_a_task_has_the_states_that_its_process_needs() -> None:
    round_ = plan(save(1), save(2, **event("cancel")), jobs=2)
    task = json.loads(native.line_of(trainer.Task(round_, 0, 1, "/nowhere", "/tmp"), 0))
    first = schedule.SAVES_OF_JOB + 1
    assert list(task["states"]) == [str(first), str(first + 1)]
    assert [action["n"] for action in task["actions"]] == [first, first + 1]
    assert task["actions"][1]["event"]["kind"] == "cancel" and "event" not in task["actions"][0]
