"""`Checkpointer(drain_to=...)`: the process beside the trainer, both places in one listing, and loads from the second one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import s3_server
import torch
from command_line import each
from command_line import holdfast as command

import holdfast
from holdfast import _lineage, observe
from holdfast.cli import storage_options
from holdfast.drain import Drain, contents, copying, file_system, remote, trainer
from holdfast.drain.following import alone
from holdfast.drain.places import open_place
from holdfast.drain.remote import fetch
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
formats = pytest.mark.parametrize("format", ["holdfast", "dcp"])


@contextlib.contextmanager
def opened(run: Path, url: str, storage: dict[str, str], keep_last: int = 1, format: str = "holdfast", **of_drain: Any):
    options = Drain(storage=storage, **{"give_up": 60.0, **of_drain})
    with holdfast.Checkpointer(run, arena_bytes=16 * MIB, keep_last=keep_last, format=format, drain_to=url, drain=options) as c:
        yield c


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((3 * MIB,), float(value)), "b": torch.arange(7) + float(value)}


@formats
def test_a_node_is_lost_and_the_run_goes_on(format: str, tmp_path: Path, server: s3_server.Server, url: str) -> None:
    with opened(tmp_path / "run", url, server.storage(), format=format) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(step), step)
        checkpointer.flush(drain=True)
        report = checkpointer.drain_report
        assert (report["arrived"], report["pending"], report["last_arrived"]) == (3, 0, 3)
        assert [c["name"] for c in checkpointer.list()] == ["step-1", "step-2", "step-3"]
        assert checkpointer.newest()["path"] == str(tmp_path / "run/step-3")  # the one at hand
    assert [n for n in os.listdir(tmp_path / "run") if not n.startswith(".")] == ["step-3"]
    shutil.rmtree(tmp_path / "run")

    with opened(tmp_path / "new", url, server.storage(), format=format) as checkpointer:
        last = checkpointer.newest()
        assert last is not None and (last["step"], last["path"]) == (3, f"{url}/step-3.attempt-{last['attempt']}")
        into = state(-1.0)
        checkpointer.load(into=into)
        assert all(torch.equal(into[k], state(3)[k]) for k in into)
        checkpointer.load(2, into=into)
        assert into["w"][0] == 2.0
        checkpointer.load(3, into=into)
        checkpointer.save(into, 4)
        assert checkpointer.newest()["parent"] == last["attempt"]  # the line of the run goes on


@formats
def test_a_name_that_begins_with_a_point_holds_nothing_up(format: str, tmp_path: Path, server: s3_server.Server, url: str) -> None:
    with opened(tmp_path / "run", url, server.storage(), format=format, give_up=10.0) as checkpointer:
        checkpointer.save(state(1), 1, name=".best")
        for step in (2, 3):
            checkpointer.save(state(step), step)
        checkpointer.wait_drained(60)
        assert checkpointer.drain_report["arrived"] == 3
        checkpointer.save(state(4), 4, name=".best", replace=True)
    shutil.rmtree(tmp_path / "run")
    assert [c.name for c in open_place(url, server.storage()).complete()[0]] == ["step-2", "step-3", ".best"]
    with opened(tmp_path / "run", url, server.storage(), format=format) as checkpointer:
        into = state(0)
        checkpointer.load(name=".best", into=into)
        assert into["w"][0] == 4


@formats
def test_a_node_whose_clock_is_late_goes_on_where_the_other_ended(format: str, tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, format=format) as checkpointer:
        _lineage.seen(checkpointer.directory, time.time() + 3600)  # as a clock that is an hour ahead
        checkpointer.save(state(1), 1)
    with holdfast.Checkpointer(tmp_path / "new", arena_bytes=16 * MIB, format=format, drain_to=tmp_path / "run",
                               drain=Drain(keep_last=1)) as checkpointer:  # fmt: skip
        into = state(0)
        checkpointer.load(into=into)
        checkpointer.save(into, 2)
        checkpointer.wait_drained(60)
        assert [c["step"] for c in checkpointer.list()] == ([1, 2] if format == "dcp" else [2])  # a DCP checkpoint was fetched
    assert open_place(str(tmp_path / "run")).complete()[0][0].step == 2


def test_a_run_that_begins_with_a_late_clock_arrives(tmp_path: Path) -> None:
    """Nothing has looked at the second place before the first save: its checkpoints are of a clock that was an hour ahead."""
    with holdfast.Checkpointer(tmp_path / "far", arena_bytes=16 * MIB) as checkpointer:
        _lineage.seen(checkpointer.directory, time.time() + 3600)
        for step in (1, 2, 3):
            checkpointer.save(state(step), step)
    with holdfast.Checkpointer(tmp_path / "new", arena_bytes=16 * MIB, keep_last=1, drain_to=tmp_path / "far",
                               drain=Drain(keep_last=3)) as checkpointer:  # fmt: skip
        for step in (11, 12, 13):
            checkpointer.save(state(step), step)
        checkpointer.wait_drained(60)
        assert {f"step-{step}" for step in (11, 12, 13)} <= set(os.listdir(tmp_path / "far"))
        assert checkpointer.drain_report["arrived"] == 3 and checkpointer.drain_report["troubles"] == 1
        checkpointer.save(state(14), 14)
        checkpointer.wait_drained(60)
    assert open_place(str(tmp_path / "far")).complete()[0][-1].step == 14  # what the drain has seen, a later save has heard of


@formats
def test_a_load_lists_each_place_once(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, format=format) as checkpointer:
        checkpointer.save(state(1), 1)
    listed: list[str] = []
    complete = file_system.Directory.complete

    def counted(self: file_system.Directory, *of: str) -> Any:
        listed.append(self.url)
        return complete(self, *of)

    monkeypatch.setattr(file_system.Directory, "complete", counted)
    with holdfast.Checkpointer(tmp_path / "new", arena_bytes=16 * MIB, format=format, drain_to=tmp_path / "run") as checkpointer:
        into = state(0)
        checkpointer.load(into=into)
        assert listed.count(str(tmp_path / "run")) == 1 and into["w"][0] == 1


def test_a_load_reads_ranges_and_proves_them(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    with opened(tmp_path / "run", url, server.storage()) as checkpointer:
        checkpointer.save(state(1), 1)
    path = f"{url}/step-1"
    server.faults.seen.clear()
    one = holdfast.open(path, storage=server.storage())
    assert torch.equal(one["b"], state(1)["b"]) and set(one) == {"w", "b"}
    assert one.report["bytes_read"] < 5 * MIB and "s3://" in one.report["engine_reason"]
    whole = holdfast.load(path, storage=server.storage())
    assert torch.equal(whole["w"], state(1)["w"])
    server.faults.seen.clear()
    holdfast.load(path, whole, storage=server.storage())  # in place: proven before the first tensor changes
    ranges = [at for method, at in server.faults.seen if method == "GET" and at.endswith("model-00000-of-00001.safetensors")]
    assert len(ranges) == 4  # each chunk of 12 MiB and a header once
    far = open_place(url, server.storage())
    (info,) = far.complete()[0]
    data = max(contents.contents_of(far, info).data, key=lambda f: f.bytes)
    stored = bytearray(far.read(info.slot, data.name, data.bytes))
    stored[6 * MIB] ^= 1
    far._library.put(far._store, f"{info.slot}/{data.name}", bytes(stored))
    into = state(5)
    with pytest.raises(Error, match="another digest") as refused:
        holdfast.load(path, into, storage=server.storage())
    assert refused.value.code == "DATA_LOSS" and into["w"][0] == 5  # as it was
    assert len(copying.verify(far, info)[0]) == 1


def test_failures_of_the_store_fail_no_save(tmp_path: Path, server: s3_server.Server, url: str,
                                            caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    server.faults.refuse = 403
    with opened(tmp_path / "run", url, server.storage(), give_up=1.0) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(step), step)
        with pytest.raises(Error, match="HTTP status 403") as refused:
            checkpointer.wait_drained(60)
        assert refused.value.code == "PERMISSION_DENIED"
        assert "HTTP status 403" in caplog.text and checkpointer.drain_report["troubles"] >= 1
        assert len([n for n in os.listdir(tmp_path / "run") if n.startswith("step")]) == 3  # keep_last=1 waits
        with pytest.raises(Error, match="HTTP status 403"):
            checkpointer.newest()  # a run must not begin anew because of that
        server.faults.refuse = 0
        checkpointer.wait_drained(60)
        assert [n for n in os.listdir(tmp_path / "run") if n.startswith("step")] == ["step-3"]


def test_the_process_is_killed_and_comes_back(tmp_path: Path, server: s3_server.Server, url: str,
                                              caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    server.faults.bytes_per_second = 20 * MIB
    with opened(tmp_path / "run", url, server.storage()) as checkpointer:
        checkpointer.save(state(1), 1)
        first = checkpointer._draining._process
        os.kill(first.pid, signal.SIGKILL)
        checkpointer.save(state(2), 2)
        checkpointer.wait_drained(60)
        second = checkpointer._draining._process
        assert second.pid != first.pid and "it is started again" in caplog.text
        # As a scheduler does with all processes at once, and again with those that live. It is started again, so that it may be another
        # one before anybody sees that there is none.
        os.kill(second.pid, signal.SIGTERM)
        checkpointer.save(state(3), 3)
        checkpointer.wait_drained(60)
        assert checkpointer._draining._process is second
        os.kill(second.pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while checkpointer._draining._process is second:
            assert time.monotonic() < deadline, "it has not ended"
            time.sleep(0.02)
        checkpointer.wait_drained(60)
        far = open_place(url, server.storage())
        assert [c.name for c in far.complete()[0]] == ["step-1", "step-2", "step-3"]
        with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as other:
            other.save({"w": torch.zeros(10)}, 4)
        checkpointer._draining.ring()
    assert [c.name for c in far.complete()[0]] == ["step-1", "step-2", "step-3", "step-4"]


@formats
def test_what_a_trainer_before_has_left_arrives_without_a_save(format: str, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def arrived() -> list[int]:
        return [c.step for c in open_place(str(tmp_path / "far")).complete()[0]]

    with opened(run, str(tmp_path / "far"), {}, format=format) as checkpointer:
        checkpointer.flush(drain=True)  # there is nothing yet, not even the directory
        process = checkpointer._draining._process
    process.wait(60)  # until then it sends the next checkpoint
    for step in (1, 2):
        with holdfast.Checkpointer(run, arena_bytes=16 * MIB, format=format) as checkpointer:
            checkpointer.save(state(step), step)
        with opened(run, str(tmp_path / "far"), {}, keep_last=5, format=format) as checkpointer:
            if step == 1:
                checkpointer.wait_drained(60)
                assert arrived() == [1] and checkpointer.drain_report["arrived"] == 1
                process = checkpointer._draining._process
        process.wait(60)
        assert arrived() == list(range(1, step + 1))


def test_the_end_of_a_reader_waits_for_no_other_process(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
        checkpointer.save(state(1), 1)
    with alone(str(tmp_path / "run"), str(tmp_path / "far"), lambda: False):  # as the drain of a training
        with opened(tmp_path / "run", str(tmp_path / "far"), {}) as checkpointer:
            assert checkpointer.newest()["step"] == 1
        assert checkpointer._draining._process is None
    with opened(tmp_path / "run", str(tmp_path / "far"), {}) as checkpointer:
        checkpointer.close(drain=False)
    assert checkpointer._draining._process is None and not (tmp_path / "far").exists()


def test_another_rank_waits_for_no_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
        checkpointer.save(state(1), 1)
    monkeypatch.setenv("RANK", "1")
    with opened(tmp_path / "run", str(tmp_path / "far"), {}) as checkpointer:
        checkpointer.wait_drained()
        assert checkpointer.drain_report == {}  # nothing that would read as an arrival
    assert checkpointer._draining._process is None and not (tmp_path / "far").exists()
    assert "both are on one file system" not in caplog.text  # rank 0 says it for all


def _closes_behind_its_group(rank: int, run: str, far: str) -> int | None:
    group = torch.distributed.new_group()
    checkpointer = holdfast.Checkpointer(run, format="dcp", drain_to=far, process_group=group)
    checkpointer.save({f"r{rank}": torch.ones(10)}, 1)
    torch.distributed.destroy_process_group(group)
    checkpointer.close()
    return checkpointer.drain_report.get("arrived")


def test_a_job_may_end_its_group_before_the_checkpointer(tmp_path: Path) -> None:
    arrived = dcp_ranks.run_ranks(2, tmp_path, _closes_behind_its_group, str(tmp_path / "run"), str(tmp_path / "far"))
    assert arrived == [1, None]


def test_a_place_that_lets_nothing_be_deleted_holds_up_no_wait(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    server.faults.refuse, server.faults.refused_methods = 403, ("POST", "DELETE")
    with opened(tmp_path / "run", url, server.storage(), keep_last=1, give_up=120.0) as checkpointer:
        checkpointer._draining._given["options"]["keep_last"] = 1
        for step in (1, 2):
            checkpointer.save({"w": torch.ones(10)}, step)
            checkpointer.wait_drained(60)
        report, since = checkpointer.drain_report, time.monotonic()
        assert (report["arrived"], report["pending"]) == (2, 0)
        while not checkpointer.drain_report["troubles"]:  # told behind the answer
            assert time.monotonic() - since < 30
            time.sleep(0.02)
        assert "403" in checkpointer.drain_report["last_error"]
    assert time.monotonic() - since < 30
    while checkpointer._draining._process is not None:  # it ends, and does not try again for ever
        assert time.monotonic() - since < 60
        time.sleep(0.05)
    assert len(open_place(url, server.storage()).complete()[0]) == 2


def test_of_two_saves_of_a_name_the_later_one_is_loaded(tmp_path: Path) -> None:
    far = str(tmp_path / "far")
    with opened(tmp_path / "a", far, {}, keep_last=0) as checkpointer:
        for step in (30, 40, 50):
            checkpointer.save(state(step), step)
    with opened(tmp_path / "b", far, {}, keep_last=0) as checkpointer:  # another node goes back
        checkpointer.load(30, into=state(0))
        for step in (40, 50, 60):
            checkpointer.save(state(step + 0.5), step)
    with opened(tmp_path / "a", far, {}, keep_last=0) as checkpointer:
        assert [c["step"] for c in checkpointer.list()] == [30, 40, 50, 60] and checkpointer.newest()["step"] == 60
        into = state(0)
        for step, value in ((50, 50.5), (30, 30.0)):
            checkpointer.load(step, into=into)
            assert into["w"][0] == value
        checkpointer.load(50, into=into)
        checkpointer.save(into, 70)
        listed = {c["step"]: c for c in checkpointer.list()}
        assert listed[70]["parent"] == listed[50]["attempt"]


def test_a_fetch_replaces_no_save_that_has_not_arrived(tmp_path: Path) -> None:
    far = str(tmp_path / "far")
    with holdfast.Checkpointer(tmp_path / "a", arena_bytes=16 * MIB, format="dcp") as checkpointer:
        checkpointer.save(state(1), 5)
    (before,) = holdfast.list_checkpoints(tmp_path / "a", format="dcp")
    with opened(tmp_path / "b", far, {}, format="dcp") as checkpointer:
        checkpointer.save(state(2), 5)
    with opened(tmp_path / "a", far, {}, format="dcp") as checkpointer:
        into = state(0)
        for _ in range(2):
            checkpointer.load(5, into=into)
            assert into["w"][0] == 2
            assert holdfast.list_checkpoints(tmp_path / "a", format="dcp") == [before]
        assert [name for name in os.listdir(tmp_path / "a") if "lock" not in name] == ["step-5"]
        there = open_place(far)
        copy = fetch(there, there.complete()[0][0], str(tmp_path / "a"), Drain())
        assert os.path.isdir(copy)
        remote._asides.clear()  # as of a load that was killed
        holdfast.recover(tmp_path / "a")
        assert not os.path.exists(copy) and holdfast.list_checkpoints(tmp_path / "a", format="dcp") == [before]
        checkpointer.save(into, 6)
        checkpointer.load(name="step-5", into=into)
        listed = {c["step"]: c for c in checkpointer.list()}
    assert listed[6]["parent"] == listed[5]["attempt"] != before["attempt"]


def test_a_fetch_leaves_what_a_killed_save_has_left(tmp_path: Path) -> None:
    far = str(tmp_path / "far")
    with opened(tmp_path / "a", far, {}, keep_last=0, format="dcp") as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step)
    with holdfast.Checkpointer(tmp_path / "a", arena_bytes=16 * MIB, format="dcp") as checkpointer:
        checkpointer.load(1, into=state(0))
        checkpointer.save(state(9), 2, replace=True)
    for name in (".metadata", *(n for n in os.listdir(tmp_path / "a/step-2") if "commit" in n)):
        (tmp_path / "a/step-2" / name).unlink()
    left = sorted(os.listdir(tmp_path / "a/step-2"))
    with opened(tmp_path / "a", far, {}, format="dcp") as checkpointer:
        into = state(0)
        checkpointer.load(into=into)
        assert into["w"][0] == 2
        checkpointer.close(drain=False)
    assert sorted(os.listdir(tmp_path / "a/step-2")) == left


def test_a_drain_that_gets_no_thread_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "holdfast-drain":
            raise RuntimeError("can't start new thread")
        start(thread)

    with opened(tmp_path / "run", str(tmp_path / "far"), {}) as checkpointer:
        monkeypatch.setattr(threading.Thread, "start", refused)
        checkpointer.save(state(1), 1)
        assert "start its process: can't start new thread" in checkpointer.drain_report["last_error"]
        with pytest.raises(Error, match="can't start new thread"):
            checkpointer.wait_drained(60)
        monkeypatch.undo()
        checkpointer.save(state(2), 2)
        checkpointer.wait_drained(60)
    assert [c.name for c in open_place(str(tmp_path / "far")).complete()[0]] == ["step-1", "step-2"]


_TRAINER = """
import os, signal, sys, torch, holdfast
run, url, endpoint = sys.argv[1:]
storage = {"endpoint": endpoint, "access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
c = holdfast.Checkpointer(run, arena_bytes=16 << 20, drain_to=url, drain=holdfast.Drain(storage=storage))
for step in (1, 2):
    c.save({"w": torch.full((1 << 20,), float(step))}, step)
print(c._draining._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_committed_arrives_after_the_trainers_death(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    server.faults.bytes_per_second = 8 * MIB
    done = subprocess.run([sys.executable, "-c", _TRAINER, str(tmp_path / "run"), url, server.endpoint],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{int(done.stdout)}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{int(done.stdout)}")
    far = open_place(url, server.storage())
    assert [c.name for c in far.complete()[0]] == ["step-1", "step-2"]
    assert all(copying.verify(far, c)[0] == [] for c in far.complete()[0])


def test_one_waits_for_the_drain_of_a_trainer_that_has_died(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    server.faults.bytes_per_second = 2 * MIB  # the two checkpoints of 4 MiB take as long as the patience below, and half as much again
    done = subprocess.run([sys.executable, "-c", _TRAINER, str(tmp_path / "run"), url, server.endpoint],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    with opened(tmp_path / "run", url, server.storage(), keep_last=5, give_up=3.0) as checkpointer:
        checkpointer.save({"w": torch.ones(10)}, 3)
        checkpointer.wait_drained(100)
        assert checkpointer.drain_report["pending"] == 0
        assert [c.step for c in open_place(url, server.storage()).complete()[0]] == [1, 2, 3]


def test_a_fork_of_the_trainer_leaves_the_process_alone(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    with opened(tmp_path / "run", url, server.storage()) as checkpointer:
        checkpointer.save(state(1), 1)
        child = os.fork()
        if child == 0:
            os._exit(0 if checkpointer._draining._process is None and checkpointer.drain_report["arrived"] == 0 else 1)
        assert os.waitpid(child, 0)[1] == 0
        checkpointer.wait_drained(60)


def test_a_directory_as_the_second_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, keep_last=1, drain_to=tmp_path / "far") as checkpointer:
        assert "both are on one file system" in caplog.text  # as where a mount is missing
        for step in (1, 2):
            checkpointer.save(state(step), step)
        end = time.monotonic() + 30
        while time.monotonic() < end and (checkpointer.drain_report["arrived"], checkpointer.drain_report["pending"]) != (2, 0):
            time.sleep(0.02)  # nobody asks whether all has arrived
        assert (checkpointer.drain_report["arrived"], checkpointer.drain_report["pending"]) == (2, 0)
    shutil.rmtree(tmp_path / "run")
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far") as checkpointer:
        into = state(0)
        checkpointer.load(into=into)
        assert into["w"][0] == 2 and [c["step"] for c in checkpointer.list()] == [1, 2]
        (tmp_path / "run/step-1").mkdir(parents=True)  # a part that a crash left is no reason to miss the other place
        checkpointer.load(1, into=into)
        assert into["w"][0] == 1


def test_what_is_given_up_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "drains", weakref.WeakSet())  # those of earlier tests count until they are collected
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
        checkpointer.save(state(1), 1)
    (data,) = (tmp_path / "run/step-1").glob("model-*")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far") as checkpointer, observe.prometheus(registry):
        checkpointer.save(state(2), 2)
        with pytest.raises(Error, match="another digest"):
            checkpointer.wait_drained(60)
        counts = {f"holdfast_drain_{what}_checkpoints": count for what, count in (("failed", 1), ("arrived", 1), ("pending", 0))}
        assert {name: registry.get_sample_value(name) for name in counts} == counts
        shutil.rmtree(tmp_path / "run/step-1")  # so that the end waits for nothing


def test_the_commands_take_urls(tmp_path: Path, server: s3_server.Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in server.storage().items():
        monkeypatch.setenv("AWS_" + key.upper(), value)
    with opened(tmp_path / "run", url, {}) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step)
    listed = command("ls", url, "--json", torch=False).json["checkpoints"]
    far = open_place(url)
    first, second = far.complete()[0]
    assert [(c["name"], c["state"], c["path"]) for c in listed] == [
        ("step-2", "newest", far.path(second.slot)), ("step-1", "complete", far.path(first.slot)),
    ]  # fmt: skip
    done = command("verify", url, torch=False)
    assert done.status == 0 and done.out.count(": sound: ") == 2
    far._delete(first.slot, ["model-00000-of-00001.safetensors"])
    done = command("verify", url, torch=False)
    assert done.status == 2 and "step-1" in done.out and done.out.count(": sound: ") == 1
    assert command("ls", url, "--json", torch=False).json["checkpoints"][-1]["state"] == "damaged"
    done = command("verify", "--json", url, f"{url}/none", torch=False)
    told = {path["path"]: path for path in done.json["paths"]}
    assert (done.status, done.error, done.json["verdict"], done.json["exit_status"]) == (3, "", "unreadable", 3)
    assert (told[far.path(second.slot)]["verdict"], told[far.path(second.slot)]["faults"]) == ("sound", [])
    assert "is missing, or has another length" in next(p for p in told.values() if p["verdict"] == "incomplete")["faults"][0]["reason"]
    assert told[f"{url}/none"]["faults_total"] == 1 and "no complete checkpoint" in told[f"{url}/none"]["faults"][0]["reason"]


def test_a_bucket_alone_is_no_checkpoint() -> None:
    for url in ("s3://bucket", "s3://bucket/", "https://host"):
        with pytest.raises(Error, match=f"open {url}: there is no complete checkpoint") as refused:
            holdfast.load(url)
        assert refused.value.code == "NOT_FOUND"
    with pytest.raises(Error, match="has credentials") as refused:
        holdfast.load("https://host/run/step-1?sig=secret")
    assert "secret" not in str(refused.value)


def test_a_dcp_checkpoint_of_a_url_is_named_with_what_loads_it(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    with opened(tmp_path / "run", url, server.storage(), format="dcp") as checkpointer:
        checkpointer.save(state(1), 1)
    with pytest.raises(Error, match=r"Distributed Checkpoint; copy it with holdfast drain and use holdfast\.dcp\.load"):
        holdfast.load(f"{url}/step-1", storage=server.storage())


def test_places_that_differ_behind_a_hash_stay_apart(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    for number in (1, 2):
        with opened(tmp_path / f"{number}", f"{url}/exp%23{number}", server.storage()) as checkpointer:
            checkpointer.save({"w": torch.full((3,), float(number))}, 1)
    for number in (1, 2):
        assert holdfast.load(f"{url}/exp%23{number}/step-1", storage=server.storage())["w"][0] == number
        with pytest.raises(Error, match="write %23 for a #"):
            holdfast.load(f"{url}/exp#{number}/step-1", storage=server.storage())


def test_secrets_come_from_a_file(tmp_path: Path, server: s3_server.Server, url: str) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
        checkpointer.save({"w": torch.zeros(10)}, 1)
    given = tmp_path / "storage"
    given.write_text("# of the bucket\n\n" + "".join(f"{key} = {value}\n" for key, value in server.storage().items()))
    done = command("drain", tmp_path / "run", url, "--storage-file", given, torch=False)
    assert (done.status, done.error) == (0, "") and "arrived: step-1" in done.out
    words = [word for key, value in server.storage().items() for word in ("--storage", f"{key}={value}")]
    done = command("drain", tmp_path / "run", url, *words, torch=False)
    assert done.status == 0 and done.error.count("--storage secret_access_key=...: every user") == 1 and "=secret" not in done.error
    for words in (["ls", url, "--json"], ["verify", url], ["verify", f"{url}/step-1"]):
        done = command(*words, "--storage-file", given, torch=False)
        assert (done.status, done.error) == (0, "") and "step-1" in done.out, done
        refused = command(*words, "--storage", "my secret", torch=False)
        assert refused.status != 0 and "KEY=VALUE is expected" in refused.error and "my secret" not in refused.error
    done = command("verify", url, "--unknown", torch=False)
    assert done.status == 64 and "--unknown" in done.error
    given.write_text("endpoint=x\nmy secret\n")
    for words in (["--storage-file", given], ["--storage", "my secret"]):
        done = command("drain", tmp_path / "run", url, *words, torch=False)
        assert done.status == 2 and "KEY=VALUE is expected" in done.error and "my secret" not in done.error


def test_a_checkpoint_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save({"w": torch.ones(3)}, tmp_path / "run" / f"step-{step}", step=step)
    run, one = tmp_path / "run", tmp_path / "run" / "step-1"
    before = sorted(path.name for path in one.iterdir())
    (tmp_path / "none").mkdir()
    assert "no complete checkpoint" in command("drain", tmp_path / "none", tmp_path / "far", torch=False).out
    for done in each(["drain", one, tmp_path / "far"], ["drain", run, one]):
        assert done.status == 2 and f"{one} is a checkpoint; name the directory" in done.error
    with pytest.raises(holdfast.Error, match="is a checkpoint; name the directory"):
        holdfast.Checkpointer(run, drain_to=one)
    assert sorted(path.name for path in one.iterdir()) == before
    assert not (tmp_path / "far").exists()


def test_options_are_checked(tmp_path: Path) -> None:
    for options in ({"keep_last": -1}, {"verify": "maybe"}, {"bytes_per_second": 0}, {"behind": "x"}, {"nice": 20}):
        with pytest.raises(ValueError, match=f"Drain: {next(iter(options))}"):
            Drain(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="drain_to="):
        holdfast.Checkpointer(tmp_path, drain=Drain())
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    for same in ("run/", "link", "x/../run"):
        for start in ("", "file://"):
            with pytest.raises(ValueError, match="they are one place"):
                holdfast.Checkpointer(tmp_path / "run", drain_to=f"{start}{tmp_path}/{same}")
    for url in ("https://user:secret@host/x", "s3://key:secret@bucket/run", "https://host/x?sig=secret", "https://us/er:secret@host/x",
                "https://user:p/secret@host/run", "s3://key:p/secret@bucket/run", "ftp://u:p/secret@host", "https:/user:secret@host/x",
                "https:user:secret@host", "s3:/key:secret@bucket"):  # fmt: skip
        with pytest.raises(ValueError, match="has credentials|no URL") as refused:
            holdfast.Checkpointer(tmp_path, drain_to=url)
        assert "secret" not in str(refused.value)
    for place in ("ftp://host/run", "s4://bucket/run", "memory:///run", "s3:/bucket/run", "s3:bucket", "gs://", "s3:///run", r"C:\run", "c:/run"):
        with pytest.raises(ValueError, match=r"open .*; known are a path, .*s3://BUCKET/PREFIX") as refused:
            holdfast.Checkpointer(tmp_path, drain_to=place)
        assert f"open {place}: " in str(refused.value)
        done = command("drain", tmp_path, place, torch=False)
        assert done.status == 2 and f"open {place}: " in done.error
    for done in each(*(["drain", place, tmp_path / "far"] for place in ("s3:/bucket/run", r"C:\run", "ftp://host/run"))):
        assert done.status == 2 and "known are a path, " in done.error
    for url in ("s3://bucket/exp#1", "https://host/#/run", "s3://bucket/run ", "s3://bucket/run /", " s3://bucket/run", " file:///run",
                "az://bucket/r\tun", "gs://bucket/run\n"):  # fmt: skip
        with pytest.raises(ValueError, match=r"open '.*': .* would be dropped.*; write %23 for a #"):
            holdfast.Checkpointer(tmp_path, drain_to=url)
    with pytest.raises(ValueError, match="Drain: storage: "):
        holdfast.Checkpointer(tmp_path, drain_to="s3://bucket/run", drain=Drain(storage={"timeout": object()}))
    keys = ("access_key", "azure_storage_access_key", "aws_sse_customer_key_base64", "account_key", "client_options", "access_key_id", "region")
    assert [bool(storage_options._SECRET.search(key)) for key in keys] == [True] * 5 + [False] * 2
    assert "secret" not in repr(Drain(storage={"secret_access_key": "secret"}))
