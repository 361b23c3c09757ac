"""integrity-fuzz: trainers that run several rounds, the end of memory, forbidden system calls, and the table of events."""

from __future__ import annotations

import collections
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_integrity import FLIP, event, made, save

import holdfast
from holdfast import integrity
from holdfast._tensor_kinds import as_bytes
from holdfast.integrity import (
    campaign,
    injection,
    jobs,
    judge,
    megatron,
    memory_groups,
    native,
    places,
    processes,
    readers,
    rounds,
    schedule,
    sealed_memory,
    states,
    trainer,
)

MIB = 1 << 20


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[rounds.Bench]:
    made = rounds.Bench(str(tmp_path))
    with processes.adopting():
        yield made
        made.close()


def small(n: int, **given: Any) -> dict[str, Any]:
    return save(n, spec={"bytes": 4096, "tensors": 2}, **given)


# ---- Files of dead workers.


def test_foreign_bytes_in_a_held_file_are_counted(tmp_path: Path) -> None:
    """Of three pages one is not written, and one has a byte that only a later save had."""
    told: list[dict[str, Any]] = []
    memory = sealed_memory.SealedMemory(lambda event, **values: told.append(values), keeps=True)
    sealed = bytearray(b"s" * 10_000)
    buffer = (ctypes.c_char * len(sealed)).from_buffer(sealed)
    manifest = f".model.safetensors.holdfast-{7:032x}.json.tmp"  # of a single file: no part of it
    with open(tmp_path / "model.safetensors.tmp", "w+b") as file, open(tmp_path / manifest, "wb", buffering=0) as beside:
        memory.sealed(ctypes.addressof(buffer), len(sealed), "model.safetensors", 0)
        beside.write(b"{}")
        memory.hold(7, os.getpid())
        file.write(sealed[:4096] + bytes(4096) + sealed[8192:].ljust(4096, b"\0"))
        file.flush()
        os.pwrite(file.fileno(), b"x", 5000)
        memory.sealed(ctypes.addressof(buffer), len(sealed), "other.safetensors", 0)
        os.unlink(file.name)
    memory.look()
    memory.look()
    assert told == [{"n": 7, "file": "model.safetensors", "written": 10_000, "foreign": 1}]


# ---- Trainers of several rounds.


def test_a_trainer_runs_several_rounds_and_none_after_its_end(bench: rounds.Bench) -> None:
    first = bench.run(made(small(1)))
    second = bench.run(made(small(1), number=1))
    killed = bench.run(made(save(1, **event("kill-trainer")), number=2))
    after = bench.run(made(small(1), number=3))
    assert [r.problems for r in (first, second, killed, after)] == [[], [], [], []]
    assert [r.before for r in (first, second, killed, after)] == [[[]], [[0]], [[0, 1]], [[]]]


def test_ranks_keep_their_process_group_while_nothing_fails(bench: rounds.Bench) -> None:
    ranks = [bench.run(made(small(1), ranks=2, number=n, door=door)) for n, door in enumerate(("save_async", "dcp"))]
    failed = bench.run(made(save(1, **event("cancel")), ranks=2, number=2))
    after = bench.run(made(small(1), ranks=2, number=3))
    assert [r.problems for r in (*ranks, failed, after)] == [[], [], [], []]
    assert [r.before for r in (*ranks, failed, after)] == [[[]], [[0]], [[0, 1]], [[]]]


def test_a_leak_of_a_trainer_is_found_in_its_round_alone(bench: rounds.Bench, tmp_path: Path) -> None:
    """What a round before has left open is no excuse, and no blame."""
    assert bench.run(made(small(1))).problems == []
    leaking = rounds.run(made(small(1), number=1), str(tmp_path), "integrity_planted:leaks_a_descriptor")
    assert {p["invariant"] for p in leaking.problems} == {"iv"}
    assert "'descriptor of /dev/null': 1}; what was ending then: [" in leaking.problems[0]["what"]
    assert bench.run(made(small(1), number=2)).problems == []


@pytest.mark.parametrize("is_ending", [True, False])
def test_what_the_kernel_still_takes_down_has_longer_to_go(is_ending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ending", lambda: ["kworker/u8:1+iou_exit S io_ring_exit_work"] if is_ending else [])
    before = processes.held(in_group=False)
    file, now = os.open("/dev/null", os.O_RDONLY), 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        if now < 1.0 <= now + 40 * seconds:
            os.close(file)
        now += 40 * seconds

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert bool(processes.left(before, 0.5, in_group=False)) is not is_ending
    if not is_ending:
        os.close(file)


def test_crews_end_with_their_pool_and_after_so_many_rounds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs.Pool, "ROUNDS_MAX", 2)
    bench = rounds.Bench(str(tmp_path))
    with processes.adopting():
        done = [bench.run(made(small(1), number=n)).before for n in range(3)]
        bench.close()
    assert done == [[[]], [[0]], [[]]]
    assert os.listdir(tmp_path) == []


def test_states_differ_at_every_word() -> None:
    spec = {"tensors": 4, "bytes": 3 * MIB, "wide": False, "objects": False}
    one, other = (dict(states.tensors(states.make(1, n, 0, spec))) for n in (1, 2))
    for name in one.keys() & other.keys() - {"id"}:
        a, b = (as_bytes(each[name]) for each in (one, other))
        size = min(len(a), len(b)) // 8 * 8
        assert not torch.any(a[:size].view(torch.int64) == b[:size].view(torch.int64)), name
        assert len(a[:size].view(torch.int64).unique()) == size // 8, name


def test_a_save_of_an_earlier_step_abandons_the_later_ones() -> None:
    """Retention then removes them first, whichever checkpoint was loaded."""
    steps = {1: 1, 2: 3, 3: 2}
    looking = judge.Judge(made(*({**save(n), "step": step} for n, step in steps.items()), keep_last=2), "/nowhere")
    for n, step in steps.items():
        looking.made[n] = judge.Made(n, f"step-{step}", 0, 0, n, n + 0.5, {0: "durable"})
    looking.look_for_durable("/nowhere", 0, {"step-1": 1, "step-2": 3})
    assert looking.problems == []
    looking.look_for_durable("/nowhere", 0, {"step-1": 1, "step-3": 2})
    assert [p["invariant"] for p in looking.problems] == ["i"]


def test_a_checkpoint_that_was_replaced_while_it_was_read_is_no_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other trainer has replaced it; the package says so (ABORTED)."""

    def read(*_: Any) -> Any:
        raise holdfast.Error("ABORTED", "it was replaced since it was opened")

    one, two = ({"name": "step-latest", "path": str(tmp_path), "attempt": attempt} for attempt in ("1", "2"))
    monkeypatch.setattr(readers, "readers_of", lambda *_: {"reader": read})
    out, told = os.pipe()
    for after, expected in ((two, False), (one, True)):
        listed = iter(([one], [after]))
        monkeypatch.setattr(readers, "complete", lambda *_, listed=listed: next(listed))
        trainer.Trainer(0, made(small(1)), 0, 0, str(tmp_path), told)._load({"back": 0})
        os.write(told, b".")
        assert (b"unreadable" in os.read(out, 10_000)) == expected
    os.close(out)
    os.close(told)


@pytest.mark.parametrize(
    ("kind", "ranks", "door", "code", "fine"),
    [
        ("limit-files", 1, "save_async", "RESOURCE_EXHAUSTED", True),
        ("limit-files", 1, "save_async", "ABORTED", False),
        ("limit-files", 1, "save_async", "UNAVAILABLE", False),
        ("limit-files", 2, "save_async", "UNAVAILABLE", True),
        ("limit-files", 2, "plan", "UNAVAILABLE", False),
        ("limit-files", 2, "plan", "ABORTED", True),  # what another rank has told
        ("limit-memory", 1, "plan", "UNAVAILABLE", True),
        ("limit-memory", 1, "plan", "ABORTED", False),
        ("limit-memory", 1, "plan", "INTERNAL", False),
    ],
)
def test_a_limit_has_the_codes_that_the_package_gives(kind: str, ranks: int, door: str, code: str, fine: bool) -> None:
    looking = judge.Judge(made(save(1), ranks=ranks, door=door), "/nowhere")

    def hear(code: str, message: str) -> list[dict[str, str]]:
        error = {"ours": True, "type": "Error", "code": code, "errno": 0, "message": message}
        lines = [{"event": "call", "n": 1}, {"event": "fired", "n": 1, "kind": kind, "phase": "call"},
                 {"event": "refused", "n": 1, "errors": [error]}]  # fmt: skip
        looking.hear([{"rank": 0, "job": 0, "at": n, **line} for n, line in enumerate(lines)], [])
        return looking.problems

    assert hear("ABORTED", "save step-1: its worker exited: it could not take its descriptors, or map its memory") == []
    assert (hear(code, "save step-1: it failed") == []) == fine


def test_a_name_is_taken_by_a_save_that_was_read_later() -> None:
    """Two trainers, whose lines are not read in the order of their times."""
    looking = judge.Judge(made(save(1), jobs=2, same_names=True), "/nowhere")
    error = {"ours": True, "type": "Error", "code": "ALREADY_EXISTS", "errno": 0, "message": "save step-1: it exists already"}
    told = (0, 2, "call", 1), (0, 4, "refused", 1), (1, 1, "call", 1001), (1, 3, "called", 1001)
    lines = [{"event": e, "rank": 0, "job": job, "at": at, "n": n, "skipped": False, "errors": [error]} for job, at, e, n in told]
    looking.hear(lines, [])
    assert looking.problems == []


@pytest.mark.parametrize(("place", "damages"), [("small", 1), ("quota", 0)])
def test_nothing_is_damaged_where_a_quota_may_refuse_the_repair(place: str, damages: int, tmp_path: Path) -> None:
    looking = judge.Judge(made(save(1), corruptions=FLIP[:1], disk=24, disk_kind=place), str(tmp_path))
    holdfast.save(states.make(1, 1, 0, looking.expected.spec(1)), tmp_path / "step-1", step=1)
    looking.made[1] = judge.Made(1, "step-1", 0, 0, 1, 2, {0: "durable"})
    looking.look(thorough=True)
    assert looking.problems == []
    assert looking.counts["damage flip a bit"] == damages


@pytest.mark.parametrize("why", ["", "damaged", "incomplete", "failed", "replacing"])
def test_a_save_that_lost_its_name_to_another_may_stay(why: str, tmp_path: Path) -> None:
    """Two trainers, one killed between its manifest and its name: a recovery keeps both."""
    run = tmp_path / "run"
    looking = judge.Judge(made(save(1), jobs=2, same_names=True, replace=why == "replacing"), str(run))
    second = 1 + schedule.SAVES_OF_JOB
    for number, job in (1, 0), (second, 1):
        at = run / "step-1"
        holdfast.save(states.make(1, number, 0, looking.expected.spec(number)), at, step=1)
        told = {0: "durable"} if number == second else {0: "failed"} if why == "failed" else {}
        looking.made[number] = judge.Made(number, "step-1", job, 0, number, number + 0.5, told)
        if number == 1:
            left = at.rename(f"{at}.partial-{holdfast.list_checkpoints(run)[0]['attempt']}")
    if why in ("damaged", "incomplete"):
        (data,) = left.glob("*.safetensors")
        data.write_bytes(data.read_bytes()[:-1] + b"?") if why == "damaged" else data.unlink()
    looking.look(thorough=True)
    assert bool(looking.problems) == bool(why), looking.problems
    assert left.exists()


@pytest.mark.parametrize("keep", [2, 3])
def test_retention_of_another_trainer_takes_what_it_has_not_loaded(keep: int) -> None:
    """Two trainers that save one series: step-3 of one, then step-2 of the other."""
    looking = judge.Judge(made(save(1), save(2), save(3), jobs=2, same_names=True, keep_last=keep), "/nowhere")
    second = 2 + schedule.SAVES_OF_JOB
    lines = [{"event": e, "rank": 0, "job": of, "at": 10 * at + late, "n": n, "skipped": False, "path": f"/nowhere/step-{step}"}
             for at, (of, n, step) in enumerate([(0, 1, 1), (0, 3, 3), (1, second, 2)])
             for late, e in enumerate(("call", "called", "durable"))]  # fmt: skip
    looking.hear(lines, [])
    looking.look_for_durable("/nowhere", 0, {"step-1": 1, "step-2": second})
    assert (looking.problems == []) == (keep == 2), looking.problems


@pytest.mark.parametrize("outcome", [{0: "durable"}, {0: "failed"}, {}])
def test_retention_leaves_as_many_as_it_keeps(outcome: dict[int, str]) -> None:
    """A later save that is not there is no reason to remove an earlier one."""
    for found, fine in ({}, False), ({"step-1": 1}, not outcome.get(0) == "durable"), ({"step-2": 2}, True):
        looking = judge.Judge(made(save(1), save(2), keep_last=1), "/nowhere")
        looking.made = {n: judge.Made(n, f"step-{n}", 0, 0, n, n + 0.5, outcome if n == 2 else {0: "durable"}) for n in (1, 2)}
        looking.look_for_durable("/nowhere", 0, found)
        assert (looking.problems == []) == fine, (found, looking.problems)


@pytest.mark.parametrize("keep", [0, 1])
def test_an_earlier_save_may_take_a_name_that_retention_has_freed(keep: int) -> None:
    """Two trainers: step-1 of one is removed by its own retention before that of the other, called earlier, commits."""
    looking = judge.Judge(made(save(1), save(2), jobs=2, same_names=True, keep_last=keep), "/nowhere")
    other = schedule.SAVES_OF_JOB
    lines = [{"event": e, "rank": 0, "job": of, "at": 10 * at + late, "n": n, "skipped": False, "path": f"/nowhere/step-{step}"}
             for at, (of, n, step) in enumerate([(0, 1, 1), (1, 1 + other, 1), (1, 2 + other, 2)])
             for late, e in enumerate(("call", "called", "durable"))]  # fmt: skip
    looking.hear(lines, [])
    looking.look_for_durable("/nowhere", 0, {"step-1": 1, "step-2": 2 + other})
    assert (looking.problems == []) == (keep == 1), looking.problems


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_trainer_may_be_killed_before_or_behind_its_move_of_the_directory(has_moved: bool, tmp_path: Path) -> None:
    to = tmp_path / "run.moved-0"
    if has_moved:
        to.mkdir()
    looking = judge.Judge(made(save(1)), str(tmp_path / "run"))
    lines = [{"event": event, "n": 1, "skipped": False, "path": str(tmp_path / "run/step-1"), "to": str(to)}
             for event in ("call", "called", "durable", "moving")]  # fmt: skip
    looking.hear([{"rank": 0, "job": 0, "at": at, **line} for at, line in enumerate(lines)], [])
    assert looking._directories() == [str(to)] * has_moved + [str(tmp_path / "run")]


# ---- What surrounds a round.


@pytest.mark.skipif(bool(memory_groups.why_not()), reason=memory_groups.why_not())
def test_the_kernel_ends_a_small_process_before_what_fills_its_group() -> None:
    for _ in range(8):
        with subprocess.Popen(["sleep", "60"]) as process:
            assert memory_groups.kill(process.pid, "small")
            try:
                assert process.wait(10) == -signal.SIGKILL
            finally:
                process.kill()


@pytest.mark.skipif(bool(memory_groups.why_not()), reason=memory_groups.why_not())
def test_threads_may_ask_at_once_where_groups_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_groups._root.cache_clear()
    access = os.access
    monkeypatch.setattr(os, "access", lambda *of: time.sleep(0.1) or access(*of))
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: memory_groups._root(), range(4)))
    assert len(found) == 1 and found.pop()[0]


@pytest.mark.skipif(bool(memory_groups.why_not()), reason=memory_groups.why_not())
@pytest.mark.parametrize("kind", schedule.IN_GROUPS)
def test_the_kernel_ends_who_is_over_the_limit(kind: str, bench: rounds.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []  # of this round: other tests and programs have groups beside
    clean = memory_groups.clean
    monkeypatch.setattr(memory_groups, "clean", lambda key: keys.append(key) or clean(key))
    done = bench.run(made(save(1, **event(kind))))
    assert done.problems == []
    assert done.counts[f"in flight {kind}"] == 1
    assert done.counts["failed"] == (kind == "oom-worker")
    [key] = keys
    assert [name for name in os.listdir(memory_groups._root()[0]) if name.startswith(memory_groups._prefix(key))] == []


def test_without_a_group_no_such_event_is_drawn() -> None:
    limits = schedule.Limits(groups=False, filters=False)
    drawn = [schedule.draw(1, n, limits) for n in range(200)]
    assert not {e["kind"] for r in drawn for e in schedule.events_of(r)} & set(schedule.IN_GROUPS)
    assert not any(r["forbidden"] for r in drawn)


def test_a_quota_that_is_used_up_fails_a_save(bench: rounds.Bench) -> None:
    if reason := places.why_not("quota"):
        pytest.skip(reason)
    saves = [save(n, spec={"bytes": 12 * MIB}) for n in (1, 2, 3)]
    done = bench.run(made(saves[0], {"do": "wait"}, saves[1], {"do": "wait"}, saves[2], disk=30, disk_kind="quota"))
    assert done.problems == []
    assert (done.counts["durable"], done.counts["code RESOURCE_EXHAUSTED"]) == (2, 1)


def test_a_seed_has_the_same_rounds_of_other_doors_where_megatron_is_not_installed() -> None:
    doors = [schedule.Limits(doors=doors) for doors in (schedule.DOORS, schedule.DOORS[:-1])]
    drawn = [[schedule.draw(4, n, limits) for limits in doors] for n in range(100)]
    megatrons = [one for one, _ in drawn if one["door"] == schedule.MEGATRON]
    assert [one for one, other in drawn if one != other] == megatrons
    assert 5 < len(megatrons) < 30
    assert {one["ranks"] for one in megatrons} > {1}
    # PyTorch's gloo groups end a process without memory, also for one rank.
    alone = schedule.Limits(doors=(schedule.MEGATRON,))
    every = [schedule.draw(4, n, alone) for n in range(200)]
    assert {one["door"] for one in every} == {schedule.MEGATRON}
    assert {e["kind"] for one in every for e in schedule.events_of(one)}.isdisjoint({"limit-memory", "limit-files"})


def test_a_door_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(megatron, "why_not", lambda: "there is none")
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    assert schedule.MEGATRON not in native.doors()
    assert integrity.main(["--doors", "megatron", "--rounds", "1"]) == integrity.TROUBLE
    assert "--doors megatron: there is none" in capsys.readouterr().err


def save_without(call: str, error: str, path: str) -> str:
    program = (
        "import os, sys, torch, holdfast\n"
        "from holdfast.integrity import injection\n"
        f"holdfast.configure(arena_bytes={schedule.ARENA}, stale_warning=False)\n"
        f"injection.forbid({{{call!r}: {error!r}}})\n"
        "try:\n"
        f"    holdfast.save_async({{'x': torch.arange(1000)}}, {path!r}).wait(60)\n"
        f"    print(holdfast.verify({path!r})['verdict'])\n"
        "except holdfast.Error as error:\n"
        "    print(error.code, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or done.stderr


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not())
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        ("io_uring_setup", "EPERM", "sound"),
        ("statx", "ENOSYS", "sound"),
        ("renameat2", "ENOSYS", "sound"),
        ("memfd_create", "EPERM", "PERMISSION_DENIED"),
        ("pidfd_open", "ENOSYS", "UNIMPLEMENTED"),
        ("flock", "EPERM", "PERMISSION_DENIED"),
    ],
)
def test_a_forbidden_call_has_another_way_or_a_clear_error(call: str, error: str, said: str, tmp_path: Path) -> None:
    told = save_without(call, error, str(tmp_path / "step-1"))
    assert told.split()[0] == said and (said == "sound" or str(tmp_path) in told), told


@pytest.mark.skipif(bool(injection.why_not()), reason=injection.why_not())
def test_rounds_survive_what_containers_forbid(bench: rounds.Bench) -> None:
    container = made(small(1), small(2), forbidden={"io_uring_setup": "EPERM", "fsopen": "EPERM", "clone3": "ENOSYS"})
    assert bench.run(container).problems == []
    assert bench.run(made(small(1), number=1)).before == [[]]  # the filter stays with its trainers


# ---- The report.


def test_the_table_has_every_cell_that_was_met() -> None:
    counts = collections.Counter({"in flight kill-worker": 3, "in flight kill-worker x spawn x pwrite": 2,
                                  "in flight kill-worker x fork x io_uring": 1, "in flight fork x thread x pwrite": 4})  # fmt: skip
    lines = campaign.table_of_events(counts)
    assert lines[0] == "in flight, by launcher: io_uring, pwrite"
    assert [line.split() for line in lines[2:]] == [
        ["fork", "0", "0", "0", "0", "0", "0", "0", "4"],
        ["kill-worker", "0", "2", "0", "0", "1", "0", "-", "-"],
    ]
    assert campaign.table_of_events(collections.Counter()) == []


@pytest.mark.parametrize(("kind", "is_fine"), [("limit-memory", True), ("limit-size", False)])
def test_a_trainer_may_end_without_memory_where_memory_was_limited(kind: str, is_fine: bool, tmp_path: Path) -> None:
    limited = {"kind": kind, "rank": 0, "phase": "writing", "share": 0.0, "seconds": 0.0, "bytes": 80 * MIB}
    jobs.start_server()
    with processes.adopting():
        found = rounds.run(made(save(1, event=limited)), str(tmp_path), "integrity_planted:ends_without_thread_data").problems
    assert (found == []) == is_fine, found
