"""integrity-fuzz --faults and --kills: system calls that fail, return short, or are the last of their process."""

from __future__ import annotations

import collections
import errno
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest

from holdfast import integrity
from holdfast.integrity import injection, jobs, places, processes, steps
from holdfast.integrity.injection import Injection, Injector, Step

LONG = bool(os.environ.get("HOLDFAST_LONG"))


@pytest.fixture(autouse=True)
def adopting() -> Iterator[None]:
    if reason := injection.why_not():
        pytest.skip(reason)
    jobs.start_server()
    with processes.adopting():
        yield


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[steps.Bench]:
    made = steps.Bench(str(tmp_path))
    yield made
    made.close()


# ---- The injector.


def write_and_read(path: str) -> list[Any]:
    """What a process sees of its own calls."""
    seen: list[Any] = []
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    for use in (lambda: os.write(fd, b"x" * 20_000), lambda: os.fsync(fd), lambda: len(os.pread(fd, 30_000, 0))):
        try:
            seen.append(use())
        except OSError as error:
            seen.append(errno.errorcode[error.errno or 0])
    os.close(fd)
    return seen


def run(path: Path, *injections: Injection) -> tuple[Any, int, Injector]:
    injector = Injector(str(path.parent), injections)
    result, status = jobs.run_injected(write_and_read, (str(path),), injector, "trainer 0")
    return result, status, injector


def test_calls_are_counted_and_answered(tmp_path: Path) -> None:
    path = tmp_path / "file"
    result, status, injector = run(path)
    assert (result, status) == ([20_000, None, 20_000], 0)
    own = [str(step) for step, of in injector.steps.items() if of == str(path)]
    assert own == [f"{call} 1 of the trainer 0" for call in ("openat", "write", "fsync", "pread64", "close")]
    path.unlink()
    result, _, injector = run(path, Injection(Step("trainer 0", "fsync", 1), "EIO"))
    assert result == [20_000, "EIO", 20_000]
    assert [f["act"] for f in injector.fired] == ["EIO"]
    path.unlink()
    for act, part in (("short", 8192), ("odd", 9999), ("none", 0)):
        short = [Injection(Step("trainer 0", call, 1), act) for call in ("write", "pread64")]
        result, _, _ = run(path, *short)
        # Half of the bytes that are asked for.
        assert result == [part, None, part], act
        assert path.read_bytes() == b"x" * part
        path.unlink()
    result, status, _ = run(path, Injection(Step("trainer 0", "fsync", 1), "kill"))
    assert (result, status) == (None, -9)
    assert path.read_bytes() == b"x" * 20_000


def test_every_number_is_that_of_its_call() -> None:
    """Against the system's own table, where its header is installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no headers of the kernel")
    numbers = dict(line.split()[1:3] for line in header.read_text().splitlines() if line.startswith("#define __NR_"))
    assert {name: int(numbers[f"__NR_{name}"]) for name in injection.CALLS} == {
        name: number for name, (number, _) in injection.CALLS.items()
    }


# ---- Campaigns.


def test_a_bounded_campaign_lets_nothing_escape(tmp_path: Path) -> None:
    for seed in range(5, 15):  # on a busy machine a run may not come to the call of a number that another has had
        told: list[str] = []
        made = steps.Campaign(str(tmp_path), seed)
        made.run(None, None, told.append, *((40, None) if LONG else (2, 3)), at_once=3)
        print(made.summary())
        assert made.escapes == [], told
        assert os.listdir(tmp_path) == []
        if made.counts["fired"] >= 5:
            break
    assert made.counts["fired"] >= 5


def test_the_program_runs_one_step_again(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    word = "file/fork/pwrite,worker:fsync:1:EIO"
    assert integrity.main(["--dir", str(tmp_path), "--replay", word, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["counts"]["errors"], told["counts"]["call fsync"], told["escapes"]) == (1, 1, [])
    assert steps.as_text(*steps.of_text(word)) == word
    assert integrity.main(["--replay", "nothing/fork/pwrite"]) == 2
    assert integrity.main(["--faults", "--scripts", "nothing"]) == 2


def test_a_step_is_a_kill_on_a_slow_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    assert integrity.main(["--kills", "--places", "small", "--dir", str(tmp_path)]) == 2
    assert "--places small: --faults and --kills run in the directory, or on slow-disk" in capsys.readouterr().err
    if reason := places.why_not("slow-disk"):
        pytest.skip(reason)
    word = "save/fork/pwrite,worker:pwrite64:1:kill"
    assert integrity.main(["--dir", str(tmp_path), "--places", "slow-disk", "--replay", word, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["counts"]["kills"], told["escapes"]) == (1, [])
    assert os.listdir(tmp_path) == []


def crashes(*_: Any) -> None:
    """In place of the body of a script's process."""
    os._exit(3)


@pytest.mark.parametrize("script", ["file/fork/pwrite", "recovery/save_async-0/pwrite", "reading/spawn/pwrite", "drain/holdfast/pwrite"])
def test_a_kill_that_was_not_made_excuses_nothing(script: str, bench: steps.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Injection(Step("worker", "fsync", 999), "kill")
    done = bench.run(script, (never,))
    assert (done.fired, done.problems) == ([], [])
    run_injected = jobs.run_injected
    monkeypatch.setattr(jobs, "run_injected", lambda _, arguments, *rest: run_injected(crashes, arguments, *rest))
    found = bench.run(script, (never,)).problems
    assert "v" in {p["invariant"] for p in found} and any("with status 3 without its result" in p["what"] for p in found)


def test_a_run_that_did_not_come_to_its_step_counts_as_none(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    assert integrity.main(["--dir", str(tmp_path), "--replay", "file/fork/pwrite,worker:fsync:999:EIO", "--json"]) == 2
    told = capsys.readouterr()
    counts = json.loads(told.out)["counts"]
    assert (counts.get("runs", 0), counts["not reached"], counts["to run"]) == (0, 1, 1)
    assert "integrity-fuzz: no run has come to its step" in told.err


def test_what_the_order_of_calls_changes_is_tried_again(bench: steps.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = iter([steps.Run([], Injector("", ()), collections.Counter()) for _ in range(2)])
    monkeypatch.setattr(bench, "_run", lambda *_: next(ended))
    bench.run("save/fork/pwrite", (Injection(Step("worker", "fsync", 1), "EIO"),))
    assert list(ended) == []


def test_of_two_kills_none_stands_behind_the_end_of_its_process() -> None:
    calls = [Injection(Step(role, "fsync", n), act) for role in ("worker", "trainer 0") for n in (1, 2) for act in ("kill", "EIO")]
    for first, second in itertools.product(calls, calls):
        same = first.step.role == second.step.role
        wanted = first.step != second.step and not (first.act == "kill" and same)
        assert steps._can_both_be(first, second, several=False) is wanted
        assert steps._can_both_be(first, second, several=True) is (wanted or same and first.step != second.step and second.step.role == "worker")


@pytest.mark.parametrize("bug", ["stays_broken_after_a_worker", "stays_broken_after_a_trainer"])
def test_a_kill_after_which_no_save_works_is_found(bug: str, tmp_path: Path) -> None:
    role = "worker" if "worker" in bug else "trainer-0"
    word = f"replace/spawn/pwrite,{role}:openat:1:kill"
    for plant, found in (("", set()), (f"integrity_planted:{bug}", {"v"})):
        made = steps.Campaign(str(tmp_path), 1, plant=plant)
        made.replay(word, 1, lambda _: None)
        assert made.counts["kills"] == 1
        assert {e["invariant"] for e in made.escapes} == found, made.escapes


@pytest.mark.parametrize("refused", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_where_no_call_can_be_answered_nothing_succeeds(refused: int, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A filter of the container refuses seccomp."""
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    monkeypatch.setattr(injection, "_seccomp", lambda *_: -refused)
    assert integrity.main(["--faults", "--scripts", "save", "--dir", str(tmp_path)]) == 2
    assert f"seccomp: {os.strerror(refused)}" in capsys.readouterr().err


def test_a_script_without_a_step_is_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    run = steps.Run([], Injector("", ()), collections.Counter())

    class Lanes:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Any:
            return self
        def __exit__(self, *_: Any) -> None: ...
        def run(self, each: Iterator[Any], *_: Any) -> Iterator[Any]:
            return ((arguments, run) for arguments in each)

    monkeypatch.setattr(steps.lanes, "Lanes", Lanes)
    assert integrity.main(["--kills", "--scripts", "save", "--dir", str(tmp_path)]) == 2
    assert re.search(r"/(pwrite|io_uring|io_uring-fixed) has no step: ", capsys.readouterr().err)


# ---- What they found.


def test_a_checkpoint_does_not_look_absent_for_lack_of_memory(bench: steps.Bench) -> None:
    """Of DCP's directories; training would go on from an older one."""
    run_ = bench.run("dcp-reading/spawn/pwrite")
    opened = [s for s, of in run_.steps.items() if s.call == "openat" and of.endswith("step-2/.metadata")]
    done = bench.run("dcp-reading/spawn/pwrite", (Injection(opened[0], "ENOMEM"),))
    assert done.fired and done.problems == []


@pytest.mark.parametrize("act", ["kill", "ENFILE"])
@pytest.mark.parametrize(("format_", "call"), [("holdfast", "renameat2"), ("dcp", "unlinkat")])
def test_a_broken_drain_costs_time_only(format_: str, call: str, act: str, bench: steps.Bench) -> None:
    """At the exchange of names or at its last removal; and where it opens what retention removes."""
    script = f"drain/{format_}/pwrite"
    run_ = bench.run(script)
    assert run_.problems == [] and len(run_.steps) > 300
    step = [s for s in run_.steps if s.call == (call if act == "kill" else "openat")][-1 if act == "kill" else -5]
    done = bench.run(script, (Injection(step, act),))
    assert done.fired and done.problems == []


def test_a_drain_without_a_thread_says_so(bench: steps.Bench) -> None:
    """It raised Python's own RuntimeError, and its process ended in place of another try."""
    for script in steps.scripts(("drain",)):
        run_ = bench.run(script)
        threads = [s for s in run_.steps if s.call == "clone3"]
        if not threads:
            pytest.skip("threads are made by clone here")
        done = bench.run(script, (Injection(threads[-1], "EAGAIN"),))
        assert done.fired and done.problems == []


def test_the_injector_leaves_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        run(tmp_path / "file")
        (tmp_path / "file").unlink()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("replay", [
    "first/thread/pwrite,trainer-0:clone3:3:EAGAIN",  # no thread for the worker
    "first/thread/io_uring,trainer-0:io_uring_register:1:EFAULT",
])  # fmt: skip
def test_what_the_system_refuses_while_a_worker_is_set_up_has_a_code_and_an_object(replay: str, tmp_path: Path) -> None:
    done = programs.run("-m", "holdfast.integrity", "--dir", tmp_path, "--replay", replay, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
