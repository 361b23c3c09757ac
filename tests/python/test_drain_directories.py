"""`holdfast drain` to a mounted file system: one that cannot be read or is no longer mounted, and kills at each rename."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from draining import MIB, names, save, swept, verdicts
from small_disk import mounted

import holdfast
from holdfast import _durable
from holdfast.drain import Drain, contents
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


def in_child(work: Callable[[], None], uid: int | None = None) -> int:
    """Runs `work` in a forked child, as another user where one is given; returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            if uid is not None:
                os.setgid(uid)
                os.setuid(uid)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- A second place that cannot be read.


def unreadable_loop(at: Path) -> str:
    at.symlink_to(at.name)
    return "Too many levels"


def unreadable_link(at: Path) -> str:
    at.symlink_to(at.with_name("unmounted"))
    return "is a link to .*unmounted, which is not there; mount or make it"


def unreadable_file(at: Path) -> str:
    at.touch()
    return "Not a directory"


@pytest.mark.parametrize("how", [unreadable_loop, unreadable_link, unreadable_file])
def test_a_place_that_cannot_be_looked_at_is_not_empty(how: Callable[[Path], str], tmp_path: Path) -> None:
    said = how(tmp_path / "mnt")
    far = tmp_path / "mnt" / "far"
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=64 * MIB, drain_to=far) as checkpointer:
        for asked in (checkpointer.newest, checkpointer.list, lambda: checkpointer.load(1, into={})):
            with pytest.raises(Error, match=said):  # a run must not begin anew
                asked()
    with pytest.raises(Error, match=said):  # nor has everything of such a source arrived
        swept(open_place(str(far)), open_place(str(tmp_path / "other")))


def test_a_directory_of_another_user_is_not_empty(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("another user's process needs root")
    save(tmp_path / "mnt/far", 1, elements=10)
    (tmp_path / "mnt").chmod(0o700)

    def refused() -> None:
        with pytest.raises(Error, match="Permission denied") as refusal:
            open_place(str(tmp_path / "mnt/far")).complete()
        assert refusal.value.code == "PERMISSION_DENIED"

    assert in_child(refused, uid=65534) == 0


def test_a_directory_that_was_never_there_is_empty(tmp_path: Path) -> None:
    assert names(open_place(str(tmp_path / "a/b"))) == []
    (tmp_path / "link").symlink_to(tmp_path)
    assert names(open_place(str(tmp_path / "link/b"))) == []


# ---- A second place that goes away.


@contextlib.contextmanager
def bound(disk: Path, at: Path) -> Iterator[None]:
    """Mounts a file system a second time, so that it outlives the end of this mount."""
    subprocess.run(["mount", "--bind", disk, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


@contextlib.contextmanager
def draining(run: Path, far: Path, keep_last: int = 1) -> Iterator[holdfast.Checkpointer]:
    with holdfast.Checkpointer(run, arena_bytes=64 * MIB, keep_last=keep_last, drain_to=far, drain=Drain(give_up=1.0)) as checkpointer:
        yield checkpointer


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Waits until a condition holds; whether it does."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def saved(checkpointer: holdfast.Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save({"w": torch.randn(10)}, step)


def test_a_mount_that_vanishes_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    run, far = tmp_path / "run", tmp_path / "mnt/me/far"
    with mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
        mount.enter_context(bound(disk, tmp_path / "mnt"))
        with draining(run, far) as checkpointer:
            saved(checkpointer, 1, 2)
            checkpointer.wait_drained(60)
            assert [c["step"] for c in checkpointer.list()] == [1, 2]
            mount.close()
            saved(checkpointer, 3, 4)
            said = f"{far}: the file system that was mounted at {tmp_path}/mnt is no longer mounted; mount it again"
            with pytest.raises(Error, match=said):
                checkpointer.wait_drained(60)
            # Nor does a process that has never seen the mount take the local disk for it.
            os.kill(checkpointer._draining._process.pid, signal.SIGKILL)
            for last in ("it is started again", said):
                assert until(lambda last=last: last in checkpointer.drain_report["last_error"])
            with pytest.raises(Error, match="no longer mounted"):
                checkpointer.newest()
            assert names(open_place(str(run))) == ["step-2", "step-3", "step-4"] and os.listdir(tmp_path / "mnt") == []
            with bound(disk, tmp_path / "mnt"):
                checkpointer.wait_drained(60)
                assert names(open_place(str(far))) == ["step-1", "step-2", "step-3", "step-4"]
                assert names(open_place(str(run))) == ["step-4"]
                checkpointer.close()


def test_a_place_that_was_never_there_is_made_on_its_mount_alone(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
        mount.enter_context(bound(disk, tmp_path / "mnt"))
        with draining(tmp_path / "run", tmp_path / "mnt/me/far") as checkpointer:
            mount.close()
            saved(checkpointer, 1, 2)
            with pytest.raises(Error, match="no longer mounted"):
                checkpointer.wait_drained(60)
            assert os.listdir(tmp_path / "mnt") == [] and names(open_place(str(tmp_path / "run"))) == ["step-1", "step-2"]
            with bound(disk, tmp_path / "mnt"):
                checkpointer.wait_drained(60)
                assert names(open_place(str(disk / "me/far"))) == ["step-1", "step-2"]
                checkpointer.close()


def test_a_mount_that_was_missing_at_first_is_taken(tmp_path: Path) -> None:
    """The log has asked for it."""
    (tmp_path / "mnt").mkdir()
    with draining(tmp_path / "run", tmp_path / "mnt/far", keep_last=2) as checkpointer:
        saved(checkpointer, 1)
        checkpointer.wait_drained(60)
        with mounted(tmp_path / "disk", 64) as disk, bound(disk, tmp_path / "mnt"):
            saved(checkpointer, 2)
            checkpointer.wait_drained(60)
            assert names(open_place(str(disk / "far"))) == ["step-1", "step-2"]
            saved(checkpointer, 3)
            checkpointer.close()


@pytest.mark.parametrize("what", ["brought back", "made anew"])
def test_a_directory_that_goes_away_is_not_made_by_a_drain(what: str, tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "me/far"
    with draining(run, far) as checkpointer:
        saved(checkpointer, 1, 2)
        checkpointer.wait_drained(60)
        (tmp_path / "me").rename(tmp_path / "away")
        saved(checkpointer, 3, 4)
        with pytest.raises(Error, match=f"{far}: the directory is gone; bring it back, or make an empty one") as refused:
            checkpointer.wait_drained(60)
        assert refused.value.code == "UNAVAILABLE" and checkpointer.drain_report["troubles"] >= 1
        assert names(open_place(str(run))) == ["step-2", "step-3", "step-4"] and not (tmp_path / "me").exists()
        if what == "made anew":
            far.mkdir(parents=True)
        else:
            (tmp_path / "away").rename(tmp_path / "me")
        checkpointer.wait_drained(60)
        there = (2, 3, 4) if what == "made anew" else (1, 2, 3, 4)
        assert names(open_place(str(far))) == [f"step-{n}" for n in there]
        assert names(open_place(str(run))) == ["step-4"]


def test_a_process_that_is_started_again_knows_the_mount_that_came_later(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with draining(tmp_path / "run", tmp_path / "mnt/far") as checkpointer, mounted(tmp_path / "disk", 64) as disk:
        with bound(disk, tmp_path / "mnt"):  # it was missing at first
            saved(checkpointer, 1)
            checkpointer.wait_drained(60)
            os.kill(checkpointer._draining._process.pid, signal.SIGKILL)
        saved(checkpointer, 2)
        assert until(lambda: "no longer mounted" in (checkpointer.drain_report["last_error"] or ""))
        with pytest.raises(Error, match="no longer mounted"):
            checkpointer.newest()
        assert os.listdir(tmp_path / "mnt") == []
        with bound(disk, tmp_path / "mnt"):
            checkpointer.wait_drained(60)
            assert names(open_place(str(disk / "far"))) == ["step-1", "step-2"]
            (disk / "far").rename(disk / "away")
            os.kill(checkpointer._draining._process.pid, signal.SIGKILL)
            assert until(lambda: "the directory is gone" in (checkpointer.drain_report["last_error"] or ""))
            (disk / "away").rename(disk / "far")
            checkpointer.close()


def test_the_first_look_knows_the_mount_of_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with mounted(tmp_path / "disk", 64) as disk:
        with bound(disk, tmp_path / "mnt"):
            checkpointer = holdfast.Checkpointer(tmp_path / "run", drain_to=tmp_path / "mnt/far")
        with pytest.raises(Error, match="no longer mounted"):
            checkpointer.newest()


def test_a_wait_looks_whether_what_has_arrived_is_there(tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    with draining(run, far, keep_last=2) as checkpointer:
        saved(checkpointer, 1, 2)
        checkpointer.wait_drained(60)
        far.rename(tmp_path / "away")
        with pytest.raises(Error, match=f"{far}: the directory is gone"):
            checkpointer.wait_drained(60)
        far.mkdir()
        checkpointer.wait_drained(60)
        assert names(open_place(str(far))) == ["step-1", "step-2"]
        shutil.rmtree(far / "step-1")
    assert names(open_place(str(far))) == ["step-1", "step-2"]  # so does the end


def test_what_is_gone_is_sent_again_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    far = tmp_path / "far"
    following = Following(open_place(str(tmp_path / "run")), open_place(str(far)), Drain(), lambda event: None)
    following.sweep(asked=False)
    shutil.rmtree(far / "step-1")
    monkeypatch.setattr("holdfast.drain.following._SWEEP_SECONDS", 0.0)  # they are over
    following.sweep(asked=False)
    assert names(open_place(str(far))) == ["step-1"]


def test_the_command_keeps_to_the_mount(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    save(tmp_path / "run", 1, elements=10)
    with mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
        mount.enter_context(bound(disk, tmp_path / "mnt"))
        words = [sys.executable, "-m", "holdfast", "drain", tmp_path / "run", tmp_path / "mnt/far", "--watch", "--json", "--give-up", "1"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            events = (e for e in map(json.loads, process.stdout) if e["event"] in ("arrived", "trouble"))
            try:
                assert next(events)["name"] == "step-1"
                mount.close()
                save(tmp_path / "run", 2, elements=10)
                assert "no longer mounted" in next(events)["message"]
            finally:
                process.terminate()
        assert os.listdir(tmp_path / "mnt") == []


# ---- A first place that goes away.


@pytest.mark.parametrize("what", ["unmounted", "renamed"])
def test_a_first_place_that_goes_away_has_not_arrived(what: str, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    run, far = tmp_path / "mnt/run", tmp_path / "far"
    with mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
        mount.enter_context(bound(disk, tmp_path / "mnt"))
        options = Drain(give_up=1.0, bytes_per_second=8 * MIB)
        with holdfast.Checkpointer(run, arena_bytes=64 * MIB, drain_to=far, drain=options) as checkpointer:
            for step in (1, 2):
                checkpointer.save({"w": torch.randn(2 * MIB)}, step)
            said = "the file system that was mounted at .*mnt is no longer mounted"
            if what == "unmounted":
                mount.close()
            else:
                assert until(lambda: far.exists())
                run.rename(tmp_path / "mnt/away")
                said = f"{run}: the directory is gone; bring it back"
            with pytest.raises(Error, match=said) as refused:
                checkpointer.wait_drained(60)
            assert refused.value.code == "UNAVAILABLE" and checkpointer.drain_report["failed"] == {}
            if what == "unmounted":
                mount.enter_context(bound(disk, tmp_path / "mnt"))
            else:
                (tmp_path / "mnt/away").rename(run)
            checkpointer.wait_drained(60)
            assert names(open_place(str(far))) == ["step-1", "step-2"]


def test_a_reader_whose_first_place_goes_away_is_told(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
        save(disk / "run", 1, elements=10)
        mount.enter_context(bound(disk, tmp_path / "mnt"))
        checkpointer = holdfast.Checkpointer(tmp_path / "mnt/run", drain_to=tmp_path / "far")
        mount.close()
        with pytest.raises(Error, match="no longer mounted"):
            checkpointer.close()


# ---- Kills while a checkpoint takes the place of another one.


def killed_at(call: int, source: Path, far: Path, exchanges: bool) -> bool:
    """Drains in a process that is killed before so many changes of names, once a checkpoint has all its files; whether it was."""
    counted = 0

    def steps(change: Callable[..., Any]) -> Callable[..., Any]:
        def step(path: str, *further: str, **of: int) -> Any:
            nonlocal counted
            if ".tmp" not in str(path):
                if counted == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                counted += 1
            return change(path, *further, **of)

        return step

    def drain() -> None:
        _durable._exchange = steps(_durable._exchange if exchanges else lambda new, path: False)  # as NFS
        os.rename, os.unlink, os.rmdir = steps(os.rename), steps(os.unlink), steps(os.rmdir)  # type: ignore[assignment]
        swept(open_place(str(source)), open_place(str(far)))

    status = in_child(drain)
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("then", ["drain", "later save", "recover"])
def test_a_kill_in_a_replacement(then: str, format: str, exchanges: bool, tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    save(run, 1, elements=10, format=format)
    if then != "recover":  # it removes no directory with such a file
        (run / "step-1/notes").write_text("mine")
    swept(open_place(str(run)), open_place(str(far)))
    before = open_place(str(far)).complete()[0][0].attempt
    shutil.copytree(far, tmp_path / "first")
    shutil.rmtree(run)
    save(run, 1, elements=10, format=format)
    after = open_place(str(run)).complete()[0][0].attempt
    shutil.copytree(run, tmp_path / "second")
    call, met = 0, set()
    while killed_at(call, run, far, exchanges):
        call += 1
        complete = open_place(str(far)).complete()[0]
        assert [c.name for c in complete] in ([], ["step-1"]) and (complete or not exchanges)
        met |= {c.attempt for c in complete} or {""}
        if then == "recover":
            holdfast.recover(far, wait_for_orphans=0)
        else:
            if then == "later save":
                shutil.rmtree(run)
                save(run, 1, elements=10, format=format)
            swept(open_place(str(run)), open_place(str(far)))
        assert verdicts(far) == ["sound"]
        (there,) = open_place(str(far)).complete()[0]
        if then == "recover":
            assert there.attempt in (before, after)
            assert os.listdir(far) == ["step-1"] or there.attempt == before, (call, os.listdir(far))
        else:
            assert there.attempt == open_place(str(run)).complete()[0][0].attempt
            assert os.listdir(far) == ["step-1"], call
        for path, kept in ((far, "first"), (run, "second")):
            shutil.rmtree(path)
            shutil.copytree(tmp_path / kept, path)
    assert call > 5 and met == {before, after} | (set() if exchanges else {""})


# ---- Damage in the second place.


def damage(path: Path, what: str, how: str) -> None:
    (file,) = path.glob(what)
    file.unlink() if how == "gone" else file.write_bytes(b"x" + file.read_bytes()[1:])


@pytest.mark.parametrize("format, what, how", [
    *((f, w, h) for f in ("holdfast", "dcp") for w in ("rank-*.manifest.json", "holdfast.commit*.json") for h in ("gone", "damaged")),
    ("dcp", ".metadata", "gone"), ("dcp", ".metadata", "damaged"),
    # Without this record nobody can tell a drain's files from a user's own.
    ("holdfast", "holdfast.beside.json", "damaged"), ("dcp", "holdfast.beside.json", "damaged"),
])  # fmt: skip
def test_a_damaged_checkpoint_there_is_replaced(format: str, what: str, how: str, tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    for step in (1, 2):
        save(run, step, elements=10, format=format, replace=True)
        (run / f"step-{step}/common.pt").write_text("1")
    swept(open_place(str(run)), open_place(str(far)))
    shutil.rmtree(run)
    for step in (1, 2, 3):
        save(run, step, elements=10, format=format)
        (run / f"step-{step}/common.pt").write_text("2")
    damage(far / "step-1", what, how)
    damage(far / "step-2", what, how)
    (far / "step-2/mine").write_text("a user's own")
    *events, last = swept(open_place(str(run)), open_place(str(far)))
    assert [(e["event"], e["name"]) for e in (*events, last)] == [("arrived", "step-1"), ("failed", "step-2"), ("arrived", "step-3")]
    assert "mine is no file of a complete checkpoint; move the directory away" in events[1]["message"]
    assert [holdfast.verify(far / n)["verdict"] for n in ("step-1", "step-3")] == ["sound"] * 2
    assert sorted(n for n in os.listdir(far) if ".partial-" not in n) == ["step-1", "step-2", "step-3"]
    assert (far / "step-1/common.pt").read_text() == "2" and (far / "step-2/mine").exists()


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_a_checkpoint_that_retention_cannot_remove_holds_nothing_up(format: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10, format=format)
    (tmp_path / "run/step-1/common.pt").write_text("1")
    swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")))
    damage(tmp_path / "far/step-1", "holdfast.beside.json", "damaged")
    save(tmp_path / "run", 2, elements=10, format=format)
    events = swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")), Drain(keep_last=1))
    assert {"arrived": "step-2"}.items() <= {e["event"]: e.get("name") for e in events}.items()
    assert [e["code"] for e in events if "its self-digest does not match" in e.get("message", "")][-1] == "FAILED_PRECONDITION"
    assert (tmp_path / "far/step-1/common.pt").exists()


@pytest.mark.parametrize("over", [False, True])
def test_a_checkpoint_of_another_program_is_not_replaced(over: bool, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10, format="dcp")
    if over:  # where a drain's own was
        swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")))
        shutil.rmtree(tmp_path / "run")
        save(tmp_path / "run", 1, elements=10, format="dcp")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "far/step-1", no_dist=True)
    before = (tmp_path / "far/step-1/.metadata").read_bytes()
    event = swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")))[-1]
    assert event["event"] == "failed" and "move the directory away" in event["message"]
    assert (tmp_path / "far/step-1/.metadata").read_bytes() == before


# ---- What else may stand in the second place.


def link_to_a_later_save(at: Path, attempt: str) -> None:
    save(at.parent.parent / "archive", 1, elements=10)
    at.symlink_to(at.parent.parent / "archive/step-1")


def link_to_nowhere(at: Path, attempt: str) -> None:
    at.symlink_to(at.with_name("unmounted"))


def file(at: Path, attempt: str) -> None:
    at.touch()


def link_where_the_copy_goes(at: Path, attempt: str) -> None:
    (at.parent.parent / "archive").mkdir()
    at.with_name(f"{at.name}.partial-{attempt}").symlink_to(at.parent.parent / "archive")


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("what", [link_to_a_later_save, link_to_nowhere, file, link_where_the_copy_goes])
def test_what_is_no_directory_there_fails_its_checkpoint_alone(what: Callable[[Path, str], None], format: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10, format=format)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    (tmp_path / "far").mkdir()
    what(tmp_path / "far/step-1", source.complete()[0][0].attempt)
    before = {path: path.read_bytes() for path in (tmp_path / "archive").rglob("*") if path.is_file()}
    events = swept(source, far)
    assert [(e["event"], e["name"]) for e in events] == [("failed", "step-1"), ("arrived", "step-2")]
    assert str(tmp_path / "far/step-1") in events[0]["message"] and "move it away" in events[0]["message"]
    assert {path: path.read_bytes() for path in (tmp_path / "archive").rglob("*") if path.is_file()} == before
    if what is link_where_the_copy_goes:  # nor is anything put there
        assert not before and os.listdir(tmp_path / "archive") == []


def later_version(record: Path) -> str:
    document = json.loads(record.read_bytes())
    del document["self_digest"]
    record.write_bytes(contents.sealed({**document, "version": 2, "saved_at_ns": "in other words"}))
    return "version 2 is not known; update holdfast, or move the directory away"


def unreadable(record: Path) -> str:
    record.chmod(0)
    return "Permission denied; make .*step-1 accessible to the drain, or move it away"


def damaged(record: Path) -> str:
    record.write_bytes(b"x" + record.read_bytes()[1:])
    return "it is of a later save, which is damaged; move the directory away"


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("how", [later_version, unreadable, damaged])
def test_a_later_save_there_is_not_replaced_unread(how: Callable[[Path], str], format: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10, format=format)
    save(tmp_path / "far", 1, 3, elements=10, format=format)
    (record,) = (tmp_path / "far/step-1").glob("holdfast.commit*.json")
    said = how(record)
    before = {path.name: path.stat() for path in (tmp_path / "far/step-1").iterdir()}
    may_not = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    done = subprocess.run([*may_not, sys.executable, "-m", "holdfast", "drain", tmp_path / "run", tmp_path / "far"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 1 and re.search(said, done.stderr), done
    after = {path.name: path.stat() for path in (tmp_path / "far/step-1").iterdir()}
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in after.items()} == {n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()}
    assert "step-2" in names(open_place(str(tmp_path / "far")))


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
@pytest.mark.parametrize("what", ["a later save", "a user's own file"])
def test_what_comes_at_the_exchange_of_names_stays(what: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("before", "one", "two"):
        save(tmp_path / run, 7, elements=10)
    before, one, two = (open_place(str(tmp_path / run)) for run in ("before", "one", "two"))
    far = open_place(str(tmp_path / "far"))
    swept(before, far)
    exchange = _durable._exchange
    came: list[str] = []

    def delayed(*paths: str) -> bool:
        if not came:
            came.append(what)
            if what == "a later save":
                swept(two, open_place(str(tmp_path / "far")))
            else:
                (tmp_path / "far/step-7/mine").write_text("mine")
        return exchanges and exchange(*paths)

    monkeypatch.setattr(_durable, "_exchange", delayed)
    with pytest.raises(Error, match="another process has replaced or changed it meanwhile") as refused:
        swept(one, far)
    assert refused.value.code == "ABORTED" and came
    stays = two if what == "a later save" else before
    assert [c.attempt for c in far.complete()[0]] == [stays.complete()[0][0].attempt] and verdicts(tmp_path / "far") == ["sound"]
    told = [e["event"] for e in swept(one, far)]
    if what == "a later save":
        assert told == ["trouble", "removed"] and os.listdir(tmp_path / "far") == ["step-7"]
    else:
        assert told == ["failed"] and (tmp_path / "far/step-7/mine").read_text() == "mine"


def test_a_later_save_that_a_kill_has_left_without_its_name_stays(tmp_path: Path) -> None:
    """At the exchange of names, where it had come meanwhile."""
    for run in ("one", "two"):
        save(tmp_path / run, 7, elements=10)
    one, two, far = (open_place(str(tmp_path / name)) for name in ("one", "two", "far"))
    swept(one, far)
    (older,) = far.complete()[0]
    shutil.copytree(tmp_path / "two/step-7", tmp_path / "far" / f"step-7.partial-{older.attempt}")
    assert swept(one, far) == [] and len(os.listdir(tmp_path / "far")) == 2
    swept(two, far)
    assert os.listdir(tmp_path / "far") == ["step-7"] and [c.attempt for c in far.complete()[0]] == [two.complete()[0][0].attempt]


# ---- Retention that one directory refuses.


def test_a_directory_that_cannot_be_removed_ends_no_retention(tmp_path: Path) -> None:
    with mounted(tmp_path / "far", 64) as at:
        save(tmp_path / "run", 1, 2, 3, elements=10)
        source, far = open_place(str(tmp_path / "run")), open_place(str(at))
        swept(source, far)
        last = far.complete()[0][-1]
        left = shutil.copytree(at / last.name, at / f"{last.name}.partial-{last.attempt}")
        with bound(at / "step-1", at / "step-1"), pytest.raises(Error, match="step-1: .*busy"):  # a name of a mount stays
            swept(source, far, Drain(keep_last=1))
        assert names(far) == ["step-1", "step-3"] and not left.exists()


# ---- Kills while a file beside a checkpoint arrives.


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("then", ["the file comes", "retention", "replacement"])
@pytest.mark.parametrize("late", ["late.pt", "holdfast.beside.json"])
def test_a_kill_in_a_file_beside_a_checkpoint(late: str, then: str, format: str, tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    save(run, 1, elements=10, format=format)
    swept(open_place(str(run)), open_place(str(far)))
    before = set(os.listdir(far / "step-1"))
    (run / "step-1/late.pt").write_text("late")

    def drain() -> None:
        rename = os.rename

        def killed(path: str, to: str, **of: int) -> None:
            if os.path.basename(to) == late:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(path, to, **of)

        os.rename = killed  # type: ignore[assignment]
        swept(open_place(str(run)), open_place(str(far)))

    assert in_child(drain) == -signal.SIGKILL
    left = set(os.listdir(far / "step-1")) - before
    # Half a file; or a file, what marks it as a drain's, and half a record.
    assert len(left) == (2 if late == "late.pt" else 3) and holdfast.verify(far / "step-1")["verdict"] == "sound"
    if then == "the file comes":
        swept(open_place(str(run)), open_place(str(far)))
        assert set(os.listdir(far / "step-1")) == before | {"late.pt", "holdfast.beside.json"}
    # The node is lost: the file comes no more.
    save(tmp_path / "run2", *((1,) if then == "replacement" else (2, 3)), elements=10, format=format)
    events = swept(open_place(str(tmp_path / "run2")), open_place(str(far)), Drain(keep_last=2))
    assert {e["event"] for e in events} <= {"arrived", "removed"}
    assert sorted(os.listdir(far)) == (["step-1"] if then == "replacement" else ["step-2", "step-3"])
    assert set(verdicts(far)) == {"sound"} and (then != "replacement" or len(os.listdir(far / "step-1")) == len(before))


@pytest.mark.parametrize("name", ["mine.tmp", "late.pt.tmp"])
def test_an_unfinished_file_of_others_keeps_its_checkpoint(name: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")))
    (tmp_path / "far/step-1" / name).touch()
    save(tmp_path / "run", 2, elements=10)
    events = swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")), Drain(keep_last=1))
    assert [e["event"] for e in events] == ["arrived", "trouble"] and (tmp_path / "far/step-1" / name).exists()
