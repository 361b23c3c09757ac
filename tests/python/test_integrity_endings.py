"""integrity-fuzz: what ends a round in the middle is told as what it is, an escape or trouble."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from test_integrity import event, made, save
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast import integrity
from holdfast.integrity import (
    campaign,
    jobs,
    judge,
    lanes,
    native,
    peers,
    power_cuts,
    processes,
    rounds,
    schedule,
    sealed_memory,
    steps,
)


@pytest.fixture
def adopting() -> Iterator[None]:
    jobs.start_server()
    with processes.adopting():
        yield


def raise_it(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EUCLEAN, "Structure needs cleaning", "step-1")


# ---- What is raised where a round is judged.


@pytest.mark.parametrize("broken", ["recover", "find_newest", "list_checkpoints"])
def test_what_a_recovery_or_a_reader_raises_is_an_escape(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save({"x": 1}, tmp_path / "step-1", step=1)
    looking = judge.Judge(made(save(1)), str(tmp_path))
    monkeypatch.setattr(holdfast, broken, raise_it)
    looking.recover()
    looking.look(thorough=False)
    said = [p["what"] for p in looking.problems if "Structure needs cleaning" in p["what"]]
    assert said and str(tmp_path) in said[0], looking.problems


@pytest.mark.parametrize("looks", ["read", "load_damaged"])
def test_an_interrupt_inside_of_a_frameworks_exception_is_no_escape(looks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise CheckpointException("load", {0: (KeyboardInterrupt(), None)})

    holdfast.save({"x": 1}, tmp_path / "step-1", step=1)
    looking = judge.Judge(made(save(1)), str(tmp_path))
    monkeypatch.setattr(looking, "_readers", lambda: {"holdfast.load": interrupted})
    path = str(tmp_path / "step-1")
    with pytest.raises(KeyboardInterrupt):
        looking.read({"path": path, "name": "step-1"}, 0, True) if looks == "read" else looking.load_damaged(path, "done")
    assert not looking.problems


def test_a_round_whose_recovery_raises_has_an_escape(tmp_path: Path, adopting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast, "recover", raise_it)
    found = rounds.run(made(save(1)), str(tmp_path)).problems
    assert [p["invariant"] for p in found] == ["i"] and "the recovery" in found[0]["what"]


def test_a_script_whose_recovery_raises_has_an_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast, "recover", raise_it)
    bench = steps.Bench(str(tmp_path))
    with processes.adopting():
        found = bench.run("file/thread/pwrite").problems
    bench.close()
    assert any("the recovery" in p["what"] for p in found), found


# ---- Trainers that end.


@pytest.mark.parametrize(("bug", "said"), [("fails_before_its_life", "status 1"), ("joins_no_group", "planted")])
def test_a_trainer_that_never_begins_its_life_is_an_escape(bug: str, said: str, tmp_path: Path, adopting: None) -> None:
    done = rounds.run(made(save(1), ranks=2), str(tmp_path), f"integrity_planted:{bug}")
    assert done.problems and {p["invariant"] for p in done.problems} == {"v"}
    assert said in done.problems[0]["what"] and "planted" in done.log


def test_what_the_machine_refuses_is_trouble(tmp_path: Path, adopting: None) -> None:
    forbidding = made(save(1), ranks=2, forbidden={"statx": "ENOSYS"})
    with pytest.raises(OSError, match="round 0: .*planted"):
        rounds.run(forbidding, str(tmp_path), "integrity_planted:may_forbid_nothing")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("door", ["save_async", schedule.PLAN])
def test_a_trainer_that_is_killed_while_it_rests_is_told_by_its_next_round(door: str, tmp_path: Path) -> None:
    if door == schedule.PLAN and native.why_not():
        pytest.skip(native.why_not())
    with processes.adopting():
        bench = rounds.Bench(str(tmp_path))
        assert bench.run(made(save(1), door=door)).problems == []
        (crew,) = bench._pool._resting
        crew.members[0].send(signal.SIGKILL)
        (crew.members[0].process.join if door != schedule.PLAN else crew.members[0].process.wait)()
        found = bench.run(made(save(1), door=door, number=1)).problems
        bench.close()
    assert [(p["invariant"], p["what"][:32]) for p in found] == [("v", "a trainer ended with status -9, ")]


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_a_program_that_nothing_kills_may_not_be_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give = native.Member.give

    def killing(self: native.Member, task: Any) -> None:
        give(self, task)
        self.send(signal.SIGTERM)

    monkeypatch.setattr(native.Member, "give", killing)
    with processes.adopting():
        (problem,) = rounds.run(made(save(1), door=schedule.PLAN), str(tmp_path)).problems
    assert problem["invariant"] == "v" and "status -15" in problem["what"]


@pytest.mark.parametrize(("rank", "kind", "is_fine"), [(0, "kill-in-call", True), (0, "cancel", False), (1, "kill-in-call", False)])
def test_a_rank_may_miss_its_group_where_another_one_was_killed(rank: int, kind: str, is_fine: bool) -> None:
    looking = judge.Judge(made(save(1), ranks=2), "/nowhere")
    errors = [{"rank": "", "type": "RuntimeError", "ours": False, "code": "", "errno": 0, "message": "Connection closed by peer"}]
    of = {"job": 0, "n": 1}
    looking.hear([{**of, "event": "call", "rank": 0, "at": 1}, {**of, "event": "fired", "kind": kind, "phase": "call", "rank": rank, "at": 2},
                  {**of, "event": "not joined", "rank": 1, "at": 3, "errors": errors}], looking.round["lives"][0])  # fmt: skip
    assert (looking.problems == []) == is_fine, looking.problems


# ---- Events that happened, and those that did not.


class Slow:
    """An argument that another process has after a second."""

    def __reduce__(self) -> tuple[Any, ...]:
        return time.sleep, (1.0,)


def make_and_wait(path: str, _: Any) -> None:
    os.mkdir(path)
    time.sleep(60)


def test_what_is_to_be_killed_has_begun(tmp_path: Path, adopting: None) -> None:
    made_ = tmp_path / "made"
    assert jobs.run_and_kill(make_and_wait, (str(made_), Slow()), 0.2) == -signal.SIGKILL
    assert made_.is_dir()
    assert jobs.run_and_kill(os._exit, (7,), 60) == 7
    assert jobs.run_and_kill(os.getpid, (), 60) == 0


def interrupt_and_wait(path: str, driver: int) -> None:
    Path(path).write_text(str(os.getpid()))
    os.kill(driver, signal.SIGUSR1)
    time.sleep(60)


def test_what_is_to_be_killed_ends_with_an_interrupted_campaign(tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    path, before = tmp_path / "pid", signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.run_and_kill(interrupt_and_wait, (str(path), os.getpid()), 60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(path.read_text()), 0)


@pytest.mark.parametrize(("status", "kills", "said"), [(-9, 1, []), (0, 0, []), (-11, 0, ["a recovery ended with status -11"])])
def test_a_recovery_that_ends_by_itself_was_not_killed(
    status: int, kills: int, said: list[str], tmp_path: Path, adopting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "run_and_kill", lambda *_: status)
    done = rounds.run(made(save(1), kill_recover=0.01), str(tmp_path))
    assert (done.counts["event kill-recover"], [p["what"] for p in done.problems]) == (kills, said)


@pytest.mark.parametrize("door", ["save_async", schedule.PLAN])
def test_an_event_behind_a_save_met_no_io(door: str, tmp_path: Path, adopting: None) -> None:
    if door == schedule.PLAN and native.why_not():
        pytest.skip(native.why_not())
    later = made(save(1, **event("program", phase="later", seconds=4.0)), door=door)
    done = rounds.run(later, str(tmp_path))
    assert done.problems == []
    assert (done.counts["event program"], done.counts["in flight program"]) == (1, 0)


@pytest.mark.parametrize(("tells_that_it_missed", "count"), [(True, 1), (False, 2)])
def test_an_event_that_missed_does_not_count(tells_that_it_missed: bool, count: int) -> None:
    looking = judge.Judge(made(save(1)), "/nowhere")
    fired = {"event": "fired", "kind": "oom-worker", "phase": "writing", "rank": 0, "job": 0, "n": 1}
    lines = [{**fired, "at": 1}, {**fired, "at": 3}] + [{**fired, "event": "missed", "at": 2}] * tells_that_it_missed
    looking.hear(lines, [])
    assert (looking.counts["event oom-worker"], looking.counts["in flight oom-worker"]) == (count, count)


def test_a_group_that_cannot_be_made_kills_nothing(tmp_path: Path, adopting: None) -> None:
    done = rounds.run(made(save(1, **event("oom-worker"))), str(tmp_path), "integrity_planted:makes_no_group")
    assert done.problems == []
    assert (done.counts["durable"], done.counts["event oom-worker"]) == (1, 0)


# ---- The status of the program.


class Crash:
    """A lane that a signal of a crash ends."""

    def run(self, number: int) -> None:
        faulthandler.disable()  # it would write the stack into what pytest shows
        os.kill(os.getpid(), number)

    def close(self) -> None: ...


@pytest.mark.parametrize(("number", "is_crash"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
def test_a_crash_of_a_lane_is_of_its_round(number: signal.Signals, is_crash: bool) -> None:
    found = []
    with lanes.Lanes(1, Crash) as beside, pytest.raises(ChildProcessError):
        found += beside.run(iter([(number,)]), rounds.crashed)
    assert [(arguments, result.is_lost) for arguments, result in found] == ([((number,), True)] if is_crash else [])


def server() -> int:
    """The process that forks this one's trainers."""
    jobs.ensure_server()
    found: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    assert os.waitpid(found, os.WNOHANG) == (0, 0)  # it is a child, and runs
    return found


class Server:
    """A lane that starts its server."""

    def __init__(self) -> None:
        self._pipe = os.pipe()
        jobs.start_server()

    def run(self) -> tuple[int, bool, bool]:
        """The server, whether it is a fork of this process, and whether it holds what this process has opened."""
        found = server()
        programs = {Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (found, os.getpid())}
        return found, len(programs) == 1, os.readlink(f"/proc/self/fd/{self._pipe[0]}") in _opened(found)

    def close(self) -> None: ...


def _opened(pid: int) -> set[str]:
    return {os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")}


@pytest.mark.parametrize("is_program", [True, False])
def test_each_lane_has_a_server_of_its_own(is_program: bool, adopting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this process has one: orphans of its trainers would not come to the lane. As a fork it imports nothing again."""
    monkeypatch.setattr(processes, "is_program", is_program)
    own = server()
    jobs.preload()
    with lanes.Lanes(2, Server) as beside:
        found = {found for _, found in beside.run(() for _ in range(20))}
    assert 1 <= len({pid for pid, _, _ in found} - {own}) == len(found) <= 2
    assert {each[1:] for each in found} == {(is_program, False)}


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    return integrity.main([*arguments, "--rounds", "2", "--seed", "1", "--jobs", "1", "--no-mount"])


ENDINGS = [(KeyboardInterrupt, 130), (OSError, 2), (RuntimeError, 2)]


@pytest.mark.parametrize(("ending", "status"), ENDINGS)
@pytest.mark.parametrize("has_escaped", [True, False])
def test_an_escape_counts_more_than_what_ends_the_campaign(
    ending: type[BaseException], status: int, has_escaped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: Any, *_: Any) -> None:
        if has_escaped:
            self._count(schedule.draw(1, 0, schedule.Limits(mounts=())), rounds.crashed("lost"), 0)
        raise ending("it ends")

    monkeypatch.setattr(campaign.Campaign, "run", run)
    assert run_main(monkeypatch) == (1 if has_escaped else status)
    assert capsys.readouterr().out.splitlines()[-1] == f"escapes: {int(has_escaped)}"


@pytest.mark.parametrize(("ending", "status"), ENDINGS)
@pytest.mark.parametrize("has_escaped", [True, False])
def test_a_comparison_that_ends_has_its_table(
    ending: type[BaseException], status: int, has_escaped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: Any, *_: Any) -> None:
        if has_escaped and self.saver == "holdfast.dcp":
            drawn = peers.reduce(schedule.draw(1, 0, schedule.Limits(mounts=())), self.saver)
            self._count(drawn, rounds.crashed("lost"), 0)
            return
        raise ending("it ends")

    monkeypatch.setattr(campaign.Campaign, "run", run)
    assert run_main(monkeypatch, "--savers", "holdfast.dcp,dcp-thread", "--json") == (1 if has_escaped else status)
    told = capsys.readouterr().out
    assert [row["saver"] for row in json.loads(told[told.index("[") :])] == ["holdfast.dcp", "dcp-thread"][: 1 + has_escaped]


@pytest.mark.skipif(os.geteuid() != 0, reason="disks need root")
@pytest.mark.parametrize(("ending", "status"), ENDINGS)
@pytest.mark.parametrize("has_escaped", [True, False])
def test_an_escape_counts_more_than_what_ends_the_power_cuts(
    ending: type[BaseException], status: int, has_escaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: Any) -> Iterator[tuple[int, str, rounds.Result]]:
        if has_escaped:
            yield 0, "ext4", rounds.crashed("lost")
        raise ending("it ends")

    monkeypatch.setattr(power_cuts, "campaign", cut)
    assert run_main(monkeypatch, "--power-cuts", "ext4") == (1 if has_escaped else status)


@pytest.mark.parametrize(("phase", "count"), [("writing", 1), ("reading back", 1), ("manifest", 0), ("done", 0)])
def test_memory_that_a_save_no_longer_holds_is_not_changed(phase: str, count: int) -> None:
    told: list[str] = []
    memory = sealed_memory.SealedMemory(lambda event, **_: told.append(event), keeps=False)
    sealed = bytearray(64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(sealed))
    memory.watch(may_change=True)
    memory.sealed(address, len(sealed), "file", 0)
    memory.change(1, "change-sealed", 0.0, 0.0, phase)
    assert (told, sum(map(bool, sealed))) == (["fired"] * count, count)
