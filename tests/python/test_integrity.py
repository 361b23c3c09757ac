"""integrity-fuzz: a bounded campaign, and the proof that it can fail: each invariant broken on purpose."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import holdfast
import holdfast.dcp
from holdfast import _dcp_directories, integrity
from holdfast.integrity import (
    campaign,
    corruption,
    jobs,
    judge,
    lanes,
    native,
    places,
    processes,
    rounds,
    schedule,
    states,
)

MIB = 1 << 20
LONG = bool(os.environ.get("HOLDFAST_LONG"))
ROUNDS = 300 if LONG else 10
# A fresh seed has found mistakes of the judge, too: only in the long run until many hours were clean.
SEEDS = [20, pytest.param(None, id="fresh")] if LONG else [20]
PLANTED_ROUNDS_MAX = 150  # rounds that a planted bug may survive, in the long run


@pytest.fixture
def adopting() -> Iterator[None]:
    jobs.start_server()
    with processes.adopting():
        yield


def run_program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return programs.run("-m", "holdfast.integrity", *arguments, timeout=900)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_bounded_campaign_lets_nothing_escape(seed: int | None, tmp_path: Path) -> None:
    count = ROUNDS
    seed = seed or random.SystemRandom().randrange(1 << 32)
    report = tmp_path / "report"
    told: list[str] = []
    made = campaign.Campaign(str(tmp_path), seed, integrity._limits(integrity._parser().parse_args([])), str(report), told.append)
    print(f"seed {seed}")
    made.run(count, None, 0, at_once=3)
    print(made.summary())
    assert made.escapes == [], (told, made.escapes)
    assert (made.done, made.next) == (count, count)
    assert made.counts["calls"] >= count and made.counts["reads"] > 0
    assert json.loads(report.read_text()) == made.as_json()
    assert os.listdir(tmp_path) == ["report"]


def test_the_program_goes_on_from_its_report(tmp_path: Path) -> None:
    """As a user runs it; the round before was run by another process."""
    report = tmp_path / "report"
    options = ["--events", "program", "--no-mount", "--ranks", "1"]
    limits = integrity._limits(integrity._parser().parse_args(options))
    campaign.Campaign(str(tmp_path), 8, limits, str(report), lambda _: None, options=" ".join(options)).run(None, 0.0, 0)  # one all the same
    done = run_program("--resume", report, "--rounds", 1, *options, "--jobs", 1, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads(report.read_text())
    assert (told["rounds"], told["next_round"], told["seed"], told["escapes"]) == (2, 2, 8, [])
    assert "seed 8" in done.stderr


def save(number: int, **given: Any) -> dict[str, Any]:
    spec = {"tensors": 6, "bytes": MIB, "wide": False, "objects": False, **given.pop("spec", {})}
    return {"do": "save", "n": number, "step": number, "mutate": True, "rate": 0, "spec": spec, **given}


def event(kind: str, **given: Any) -> dict[str, Any]:
    return {
        "rate": 32 * MIB,
        "spec": {"bytes": 12 * MIB},
        "event": {"kind": kind, "rank": 0, "phase": "writing", "share": 0.1, "seconds": 0.05, **given},
    }


def made(*actions: dict[str, Any], **given: Any) -> dict[str, Any]:
    """A round of one plain trainer, with one life."""
    return {
        "seed": 1,
        "number": 0,
        "ranks": 1,
        "jobs": 1,
        "same_names": False,
        "door": "save_async",
        "launcher": "spawn",
        "engine": "auto",
        "device": "cpu",
        "store": "server",
        "files": 1,
        "forbidden": {},
        "read_back": False,
        "second_look": False,
        "trainer_death": "finish",
        "when_full": "wait",
        "replace": False,
        "one_name": False,
        "keep_last": 0,
        "disk": 0,
        "disk_kind": "small",
        "fuse": {},
        "lives": [list(actions)],
        "kill_recover": None,
        "corruptions": [],
        **given,
    }


WAIT = {"do": "wait"}
FLIP = [{"kind": "flip a bit", "key": key} for key in range(4)]
# The planted bug, a round that shows it, and the invariant that is broken. Those in capitals are of the readers.
PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "captures_late": (made(save(1)), "ii"),
    "captures_one_tensor_late": (made(save(1)), "ii"),
    "durable_too_early": (made(save(1, **event("program"))), "i"),
    "failures_are_swallowed": (made(save(1, **event("cancel"))), "i"),
    "removes_one_too_many": (made(save(1), WAIT, save(2)), "i"),
    "removes_before_the_next_is_durable": (made(save(1), WAIT, save(2, **event("kill-worker")), keep_last=1), "i"),
    "older_save_replaces_newer": (made(save(1), save(2), replace=True, one_name=True), "i"),
    "saves_into_a_moved_directory": (made(save(1), WAIT, {"do": "move"}, save(2)), "i"),
    "leaks_a_descriptor": (made(save(1)), "iv"),
    "leaks_a_process": (made(save(1)), "iv"),
    "leaves_a_file": (made(save(1)), "iv"),
    "never_ends": (made(save(1)), "v"),
    "raises_an_error_of_the_system": (made(save(1)), "v"),
    "fails_without_a_reason": (made(save(1)), "v"),
    "stays_broken_after_a_worker": (
        made(save(1, **event("kill-worker")), WAIT, save(2), WAIT, save(3), launcher="persistent"), "v"),
    "aborts_what_replaces": (made(save(1), WAIT, save(2), replace=True, one_name=True), "v"),
    "skips_with_free_memory": (made(save(1), WAIT, save(2), when_full="skip"), "v"),
    "names_no_object": (made(save(1, **event("kill-worker"))), "v"),
    "ends_in_its_call": (made(save(1)), "v"),
    "kills_its_trainer": (made(save(1)), "v"),
    "terminates_its_trainer": (made(save(1)), "v"),
    "loses_a_copy": (made(save(1), device="stand-in"), "ii"),
    "takes_a_lost_copy": (made(save(1, event=event("lose-copy")["event"]), device="stand-in"), "ii"),
    "copies_after_the_training_goes_on": (made(save(1), device="stand-in"), "ii"),
    "NEWEST_BY_STEP": (made(save(2), WAIT, save(1)), "iii"),
    "VERIFY_IS_BLIND": (made(save(1), corruptions=FLIP), "i"),
    "LOAD_COMPARES_NO_DIGESTS": (made(save(1), corruptions=FLIP), "ii"),
    "RECOVER_LEAVES_DCP_FILES": (made(save(1), WAIT, save(2, **event("kill-both")), door="dcp", trainer_death="stop"), "iv"),
    "LIST_TAKES_UNFINISHED_ONES": (made(save(1), save(2, **event("kill-both"))), "i"),
    "LOAD_INTO_LEAVES_VALUES": (made(save(1, spec={"objects": True})), "ii"),
    "LOAD_INTO_FILLS_ONE_RANK": (made(save(1), ranks=2), "ii"),
    "DCP_LOADS_NO_OBJECTS": (made(save(1, spec={"objects": True}), door="dcp"), "ii"),
    "saves_a_tensor_too_many": (made(save(1), door="dcp"), "ii"),
}


# Those that are shown by single files, too: the others belong to directories.
PLANTED_IN_FILES = ("captures_late", "durable_too_early", "failures_are_swallowed", "older_save_replaces_newer",
                    "leaves_a_file", "names_no_object", "loses_a_copy", "VERIFY_IS_BLIND")  # fmt: skip


def plant_in_readers(bug: str, patch: pytest.MonkeyPatch) -> None:
    every = holdfast.list_checkpoints
    if bug == "NEWEST_BY_STEP":
        patch.setattr(holdfast, "list_checkpoints", lambda *a, **o: sorted(every(*a, **o), key=lambda c: c["step"]))
        patch.setattr(holdfast, "find_newest", lambda *a, **o: holdfast.list_checkpoints(*a, **o)[-1])
    elif bug == "VERIFY_IS_BLIND":
        for module in (holdfast, holdfast.dcp):
            patch.setattr(module, "verify", lambda *_, **__: {"verdict": "sound"})
    elif bug == "LOAD_COMPARES_NO_DIGESTS":
        load = holdfast.load
        patch.setattr(holdfast, "load", lambda path, into=None, **o: load(path, into, verify=False, **o))
    elif bug == "RECOVER_LEAVES_DCP_FILES":
        patch.setattr(_dcp_directories, "settle_unfinished", lambda *_: ([], {}))
    elif bug == "LIST_TAKES_UNFINISHED_ONES":

        def with_partial(directory: Any, **options: Any) -> list[dict[str, Any]]:
            partial = [
                {"name": p.name.split(".")[0], "path": str(p), "step": 0, "saved_at": 0.0}
                for p in Path(directory).glob("*.partial-*")
            ]
            return [*partial, *every(directory, **options)]

        patch.setattr(holdfast, "list_checkpoints", with_partial)
    elif bug == "LOAD_INTO_LEAVES_VALUES":
        load_into = holdfast.load

        def fills_tensors(path: Any, into: Any = None, **options: Any) -> Any:
            before = copy.deepcopy(into)
            loaded = load_into(path, into, **options)
            return loaded if into is None else put_back(into, before)

        patch.setattr(holdfast, "load", fills_tensors)
    elif bug == "LOAD_INTO_FILLS_ONE_RANK":
        of_one = holdfast.load
        patch.setattr(holdfast, "load", lambda path, into=None, rank=0, **o: into if into and rank else of_one(path, into, rank=rank, **o))
    elif bug == "DCP_LOADS_NO_OBJECTS":
        patch.setattr(DefaultLoadPlanner, "load_bytes", lambda *_: None)


def put_back(state: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The state with the values that it had, and its tensors."""
    for key, value in before.items():
        if isinstance(value, dict):
            put_back(state[key], value)
        elif not isinstance(value, torch.Tensor):
            state[key] = value
    return state


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path, adopting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    round_, invariant = PLANTED[bug]
    plant = "" if bug.isupper() else f"integrity_planted:{bug}"
    if not plant:
        plant_in_readers(bug, monkeypatch)
    found = rounds.run(round_, str(tmp_path), plant).problems
    assert invariant in {p["invariant"] for p in found}, found
    assert os.listdir(tmp_path) == []
    if LONG:  # and by rounds that were not made for it
        limits = schedule.Limits(ranks_max=2, doors=native.doors())
        for number in range(PLANTED_ROUNDS_MAX):
            if rounds.run(schedule.draw(3, number, limits), str(tmp_path), plant).problems:
                print(f"{bug}: caught in round {number + 1}")
                return
        raise AssertionError(f"{bug} survived {PLANTED_ROUNDS_MAX} rounds")


@pytest.mark.parametrize("bug", PLANTED_IN_FILES)
def test_a_planted_bug_is_caught_in_files(bug: str, tmp_path: Path, adopting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of_directories, invariant = PLANTED[bug]
    round_ = {**of_directories, "door": "save_file"}
    assert rounds.run(round_, str(tmp_path)).problems == []
    if bug.isupper():
        plant_in_readers(bug, monkeypatch)
    found = rounds.run(round_, str(tmp_path), "" if bug.isupper() else f"integrity_planted:{bug}").problems
    assert invariant in {p["invariant"] for p in found}, found


def test_the_same_rounds_without_a_planted_bug_break_nothing(tmp_path: Path, adopting: None) -> None:
    """The device's ones and those with the most events stand for all; the campaign runs many more."""
    for bug in ("failures_are_swallowed", "saves_into_a_moved_directory", "names_no_object", "loses_a_copy",
                "NEWEST_BY_STEP", "LIST_TAKES_UNFINISHED_ONES"):  # fmt: skip
        done = rounds.run(PLANTED[bug][0], str(tmp_path))
        assert done.problems == [], (bug, done)


@pytest.mark.skipif(bool(places.why_not()), reason=places.why_not())
def test_damage_that_a_full_disk_refuses_is_none(tmp_path: Path) -> None:
    with places.made(made(disk=1), str(tmp_path)) as place:
        disk = place.directory
        file = Path(disk, "run.pt")
        file.write_bytes(b"x" * (MIB - 4096))
        free = os.statvfs(disk)
        Path(disk, "other").write_bytes(b"y" * (free.f_bavail * free.f_bsize))
        with corruption.damaged(str(file), "", [], {"kind": "extend", "key": 3}) as done:
            assert done == ""
        assert file.read_bytes() == b"x" * (MIB - 4096)


def test_a_round_is_the_same_each_time_and_states_are_too() -> None:
    limits = schedule.Limits()
    first = [schedule.draw(5, number, limits) for number in range(60)]
    assert first == [schedule.draw(5, number, limits) for number in range(60)]
    assert len({json.dumps(r["lives"]) for r in first}) == len(first)
    engines = ("io_uring", "pwrite")
    assert {schedule.draw(5, n, schedule.Limits(engines=engines))["engine"] for n in range(30)} == set(engines)
    kinds = {e["kind"] for n in range(300) for e in schedule.events_of(schedule.draw(5, n, limits))}
    assert kinds == {*schedule.HARMLESS, *schedule.HARMFUL, *schedule.DEADLY}
    spec = {"tensors": 12, "bytes": 100_000, "wide": True, "objects": True}
    one, other = states.make(1, 2, 0, spec), states.make(1, 2, 0, spec)
    assert states.difference(one, other) == ""
    states.mutate(other)
    assert "differs in" in states.difference(other, one)
    assert states.difference(states.make(1, 3, 0, spec), one) != ""


def test_an_orphan_that_commits_while_the_judge_looks_is_no_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    looking = judge.Judge(made(save(1)), str(run))
    holdfast.save({"x": 1}, run / "step-1", step=1)
    find = holdfast.find_newest

    def commits_first(*arguments: Any, **named: Any) -> Any:
        if not (run / "step-2").exists():
            holdfast.save({"x": 2}, run / "step-2", step=2)
        return find(*arguments, **named)

    def removes_first(path: str, *_: Any) -> Iterator[tuple[int, str]]:
        shutil.rmtree(path)
        yield from ()
        raise holdfast.Error("NOT_FOUND", f"load {path}: no such checkpoint")

    monkeypatch.setattr(holdfast, "find_newest", commits_first)
    monkeypatch.setattr(looking, "_readers", lambda: {"removes": removes_first})
    looking.look(thorough=False)
    assert looking.problems == []


def test_an_orphan_that_replaces_what_was_read_is_no_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    looking = judge.Judge(made(save(1), save(2), jobs=2, replace=True, one_name=True), str(run))
    find = holdfast.find_newest

    def saves(number: int, name: str, job: int) -> None:
        looking.made[number] = judge.Made(number, name, job, 0, time.time_ns(), outcomes={0: "durable"})
        holdfast.save(states.make(1, number, 0, looking.expected.spec(number)), run / name, step=number, replace=True)
        looking.made[number].returned = time.time_ns()

    def replaces_first(*arguments: Any, **named: Any) -> Any:
        if 2 not in looking.made:
            saves(2, "step-latest", 0)
        return find(*arguments, **named)

    saves(1, "step-latest", 0)
    saves(1001, "other-latest", 1)
    monkeypatch.setattr(holdfast, "find_newest", replaces_first)
    looking.look(thorough=False)
    assert looking.problems == []


@pytest.mark.parametrize("rolled_back", [True, False])
def test_retention_may_remove_an_abandoned_checkpoint_first(rolled_back: bool) -> None:
    looking = judge.Judge(made(save(1), save(2), save(3), keep_last=2), "/nowhere")
    for n in (1, 2, 3):
        if n == 3 and rolled_back:
            loaded = {"event": "loaded", "rank": 0, "job": 0, "at": 3, "n": 1, "path": "", "different": ""}
            looking.hear([loaded], [])
        looking.made[n] = judge.Made(n, f"step-{n}", 0, 0, n, n + 0.5, {0: "durable"})
    looking.look_for_durable("/nowhere", 0, {"step-1": 1, "step-3": 3})
    assert bool(looking.problems) is not rolled_back


def test_a_trainer_may_tell_of_its_workers_kill_just_before_its_own() -> None:
    errors = [{"rank": "", "ours": True, "code": "ABORTED", "message": "save step-1: its worker was killed by signal 9 (KILL)"}]
    for kind, problems in (("kill-both", 0), ("cancel", 1)):
        looking = judge.Judge(made(save(1, **event(kind))), "/nowhere")
        call = {"event": "call", "n": 1, "rank": 0, "job": 0, "at": 1}
        fired = {**call, "event": "fired", "at": 2, "kind": kind, "phase": "writing"}
        looking.hear([call, fired, {**call, "event": "failed", "at": 3, "errors": errors}], looking.round["lives"][0])
        assert len(looking.problems) == problems


def test_a_load_of_the_other_trainers_checkpoint_abandons_nothing_for_certain() -> None:
    """The numbers of the other trainer's saves say nothing of the order."""
    steps = {1: 1, 2: 3, 3: 2}
    round_ = made(*({**save(n), "step": step} for n, step in steps.items()), keep_last=2, jobs=2)
    looking = judge.Judge(round_, "/nowhere")
    for n, step in steps.items():
        if n == 3:
            loaded = {"event": "loaded", "rank": 0, "job": 1, "at": 3, "n": 2, "path": "", "different": ""}
            looking.hear([loaded], [])
        looking.made[1000 + n] = judge.Made(1000 + n, f"other-{step}", 1, 0, n, n + 0.5, {0: "durable"})
    looking.look_for_durable("/nowhere", 0, {"other-1": 1001, "other-2": 1003})
    assert looking.problems == []
    looking.look_for_durable("/nowhere", 0, {"other-1": 1001, "step-1": 1})
    assert sorted(p["what"].split()[1] for p in looking.problems) == ["1002", "1003"]


@pytest.mark.parametrize("place", [0.5, 0.0])
@pytest.mark.parametrize("kind", ["change-and-restore", "cancel"])
def test_a_change_that_was_undone_is_found_by_all_who_read(kind: str, place: float, tmp_path: Path) -> None:
    round_ = made(save(1, **event(kind)), corruptions=FLIP)
    run = tmp_path / "run"
    holdfast.save(states.make(1, 1, 0, round_["lives"][0][0]["spec"]), run / "step-1", step=1)
    (file,) = (run / "step-1").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[8 + int(len(data) * place)] ^= 0x10  # what was changed when it was written: a tensor, or the header
    file.write_bytes(data)
    looking = judge.Judge(round_, str(run))
    call = {"event": "call", "n": 1, "rank": 0, "job": 0, "at": 1}
    fired = {**call, "event": "fired", "at": 2, "kind": kind, "phase": "sealed"}
    looking.hear([call, fired, {**call, "event": "durable", "at": 3, "path": str(run / "step-1")}], [])
    if place:
        with pytest.raises(holdfast.Error) as raised:
            holdfast.load(run / "step-1")
        error = {"rank": "", "ours": True, "code": "DATA_LOSS", "message": str(raised.value)}
        looking.hear([{"event": "unreadable", "n": 0, "path": f"{run}/step-1", "rank": 0, "job": 0, "errors": [error]}], [])
    looking.look(thorough=True)
    assert bool(looking.problems) is (kind == "cancel")


def test_a_worker_that_was_stopped_by_a_dead_trainer_goes_on(adopting: None) -> None:
    orphans = processes.Orphans()
    subprocess.run(["sh", "-c", "sh -c 'kill -STOP $$' & sleep 0.2"], check=True)
    assert not orphans.wait(30)


def test_a_failing_round_becomes_small_and_its_command_reproduces_it(
    tmp_path: Path, adopting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = made(save(1, spec={"tensors": 2, "bytes": 4096}), WAIT, corruptions=FLIP[:1], read_back=True)
    monkeypatch.setattr(holdfast, "verify", lambda *_, **__: {"verdict": "sound"})
    assert rounds.run(large, str(tmp_path)).problems
    small, runs = rounds.shrink(large, str(tmp_path), {"i"}, seconds=600, tries=1)
    assert len(small["lives"][0]) == 1 and small["corruptions"] and not small["read_back"] and runs > 2
    again = campaign.Campaign(str(tmp_path), 1, schedule.Limits(), tell=lambda _: None)
    again.replay(small, 2)
    assert [e["problems"][0]["invariant"] for e in again.escapes] == ["i", "i"]
    assert f"--dir {tmp_path} --replay '{{" in again.escapes[0]["command"]


def test_smaller_rounds_are_smaller_and_end() -> None:
    round_ = schedule.draw(9, 4, schedule.Limits())
    for action in schedule.saves_of(round_).values():
        action["rate"] = schedule.MIB
    for _ in itertools.count():
        candidate = next(schedule.smaller(round_), None)
        if candidate is None:
            break
        assert candidate != round_ and candidate.keys() == round_.keys()
        saves = schedule.saves_of(candidate).values()
        assert all({"n", "step", "mutate", "rate", "spec"} <= action.keys() for action in saves)  # without one the C++ program ends
        round_ = copy.deepcopy(candidate)
    assert len(round_["lives"]) == len(round_["lives"][0]) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--events", "kill-everything"),
        ("--engines", "io_uring,aio"),
        ("--bad-disks", ","),
        ("--power-cuts", "ext4,"),
        ("--ranks", "0"),
        ("--jobs", "0"),
        ("--replay", "@/nowhere"),
        ("--replay", "{"),
    ],
)
def test_what_a_user_gets_wrong_is_said_in_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    assert integrity.main(arguments) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("integrity-fuzz: ")


class Bench:
    """Runs `os` functions in a lane."""

    def run(self, name: str, *arguments: int) -> object:
        return getattr(os, name)(*arguments)

    def close(self) -> None:
        pass


def test_what_happens_in_a_lane_is_told() -> None:
    with lanes.Lanes(2, Bench) as beside:
        pids = {pid for _, pid in beside.run(("getpid",) for _ in range(20))}
        assert len(pids) <= 2 and os.getpid() not in pids
        with pytest.raises(FileNotFoundError):
            list(beside.run(iter([("stat", "/nowhere")])))
    with lanes.Lanes(1, Bench) as beside, pytest.raises(ChildProcessError, match=r"\('_exit', 7\) has ended with status 7"):
        list(beside.run(iter([("_exit", 7)])))


def test_a_signal_waits_while_a_round_is_made_and_removed() -> None:
    told: list[str] = []
    for part in ("held", "let", "after"):
        interrupts, before = processes.Interrupts(), signal.getsignal(signal.SIGUSR1)
        interrupts.take(signal.SIGUSR1)
        try:
            with pytest.raises(KeyboardInterrupt), interrupts.held():
                if part == "held":
                    signal.raise_signal(signal.SIGUSR1)
                    told.append("made")
                try:
                    with interrupts.let():
                        if part == "let":
                            signal.raise_signal(signal.SIGUSR1)
                        told.append("run")
                finally:
                    if part == "after":
                        signal.raise_signal(signal.SIGUSR1)
                    signal.raise_signal(signal.SIGUSR1)  # a second one is ignored, or waits
                    told.append("removed")
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert told == ["made", "removed", "removed", "run", "removed"]


def test_an_interrupted_campaign_has_its_report_and_leaves_nothing(tmp_path: Path) -> None:
    report, scratch = tmp_path / "report", tmp_path / "scratch"
    place = ["--no-mount"] if places.why_not("fuse") else ["--places", "fuse-slow"]
    command = [sys.executable, "-m", "holdfast.integrity", "--seed", 8, "--dir", scratch, "--jobs", 2, *place,
               "--events", "program", "--ranks", 1, "--report", report, "--rounds", 1000]  # fmt: skip
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True) as program:
        while not report.exists() and program.poll() is None:
            time.sleep(0.1)
        program.send_signal(signal.SIGINT)
        told, _ = program.communicate(timeout=400)
    done = json.loads(report.read_text())
    assert program.returncode == 130, told
    assert 0 < done["rounds"] < 1000 and f"{done['rounds']} rounds in" in told
    assert done["next_round"] <= done["rounds"] + 2
    assert list(scratch.iterdir()) == [] and str(scratch) not in Path("/proc/mounts").read_text()
