"""`holdfast drain` to a mounted file system that cannot be read, or is no longer mounted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import small_disk
import torch
from draining import MIB, bound, in_child, names, save, swept, until
from small_disk import mounted

import holdfast
from holdfast import _native
from holdfast.drain import Drain
from holdfast.drain.file_system import Directory
from holdfast.drain.following import Following
from holdfast.drain.listing import Listing
from holdfast.drain.places import Info, Seen, open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


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
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=far) as checkpointer:
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
def draining(run: Path, far: Path, keep_last: int = 1) -> Iterator[holdfast.Checkpointer]:
    with holdfast.Checkpointer(run, arena_bytes=16 * MIB, keep_last=keep_last, drain_to=far, drain=Drain(give_up=1.0)) as checkpointer:
        yield checkpointer


def saved(checkpointer: holdfast.Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save({"w": torch.randn(10)}, step)


@pytest.mark.parametrize("same", [False, True])
def test_a_mount_that_vanishes_is_waited_for(same: bool, tmp_path: Path) -> None:
    """Also one that shows a directory of the disk that it is mounted on, as in containers."""
    (tmp_path / "mnt").mkdir()
    (tmp_path / "here").mkdir()
    run, far = tmp_path / "run", tmp_path / "mnt/me/far"
    with contextlib.nullcontext(tmp_path / "here") if same else mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
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


@pytest.mark.parametrize("below", [False, True], ids=["the mount itself", "below the mount"])
def test_a_listing_is_not_of_what_lies_under_the_mount(below: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    far = mnt / "far" if below else mnt
    with mounted(tmp_path / "disk", 64) as disk, contextlib.ExitStack() as mount:
        mount.enter_context(bound(disk, mnt))
        save(far, 1, elements=10)
        place = Directory(str(far), Seen(str(mnt)))
        assert names(place) == ["step-1"]
        listed = Listing.complete

        def unmounted_before(self: Listing, format: str = "") -> tuple[list[Info], list[str]]:
            mount.close()
            return listed(self, format)

        monkeypatch.setattr(Listing, "complete", unmounted_before)
        with pytest.raises(Error, match="no longer mounted") as refused:
            place.complete()
        assert refused.value.code == "UNAVAILABLE"


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
        # A directory that was removed or renamed is not waited for.
        options = Drain(give_up=1.0 if what == "unmounted" else 600.0, bytes_per_second=8 * MIB)
        with holdfast.Checkpointer(run, arena_bytes=16 * MIB, drain_to=far, drain=options) as checkpointer:
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


def test_a_first_place_that_was_removed_ends_no_job_late(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far")
    checkpointer.save({"w": torch.zeros(10)}, 1)
    checkpointer.wait_drained(60)
    process = checkpointer._draining._process
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(Error, match="run: the directory is gone"):
        checkpointer.close()
    assert process.wait(60) == 2


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


# ---- Damage in the second place.


# ---- What else may stand in the second place.


# ---- Retention that one directory refuses.


# ---- Kills while a file beside a checkpoint arrives.


# ---- A list of a directory that is of before.


def test_a_removed_checkpoint_may_be_listed_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system."""
    save(tmp_path, 1, 2, elements=10)
    listed = _native.list_recorded(str(tmp_path))
    monkeypatch.setattr(_native, "list_recorded", lambda path: listed)
    place = open_place(str(tmp_path))
    assert names(place) == ["step-1", "step-2"]
    shutil.rmtree(tmp_path / "step-1")
    assert place.complete()[1] == [] and names(place) == ["step-2"]


def test_a_removed_checkpoint_may_have_made_room_for_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, elements=10)
    save(tmp_path / "later", 2, elements=10)
    list_recorded = _native.list_recorded

    def meanwhile(path: str) -> object:
        listed = list_recorded(path)
        if (tmp_path / "step-1").exists():  # as retention of another process, once the list was made
            shutil.rmtree(tmp_path / "step-1")
            (tmp_path / "later/step-2").rename(tmp_path / "step-2")
        return listed

    monkeypatch.setattr(_native, "list_recorded", meanwhile)
    assert names(open_place(str(tmp_path))) == ["step-2"]


# ---- Btrfs, on which an open directory keeps to the names that it had when it was opened.


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_a_copy_on_btrfs_has_the_files_of_its_checkpoint_alone_and_is_removed(format: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with small_disk.btrfs(tmp_path / "disk") as disk:
        near, far = open_place(str(run)), open_place(str(disk / "far"))
        save(run, 1, 2, format=format)
        swept(near, far)
        for name in ("step-1", "step-2"):
            assert sorted(os.listdir(disk / "far" / name)) == sorted(os.listdir(run / name))
        save(run, 3, format=format)
        swept(near, far, Drain(keep_last=1))
        assert os.listdir(disk / "far") == ["step-3"]


# ---- Direct I/O.


@pytest.mark.parametrize("way", ["refused", "unknown", "short"])
def test_a_file_system_with_direct_io_of_another_kind_has_the_same_bytes(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens files so. Then it refuses the reads and writes, for their alignment, or does a part of each."""
    run, far = tmp_path / "run", tmp_path / "far"
    save(run, 1, elements=MIB + 5)
    real: dict[str, Any] = {"preadv": os.preadv, "pwrite": os.pwrite}
    direct: list[str] = []

    def through(name: str) -> Callable[..., int]:
        def call(fd: int, data: Any, at: int) -> int:
            if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                return int(real[name](fd, data, at))
            direct.append(name)
            if way != "short":
                raise OSError(errno.EINVAL if way == "refused" else errno.EOPNOTSUPP, way)
            view = memoryview(data[0] if name == "preadv" else data)[:4096]
            return int(real[name](fd, [view] if name == "preadv" else view, at))

        return call

    for name in real:
        monkeypatch.setattr(os, name, through(name))
    swept(open_place(str(run)), open_place(str(far)))
    assert set(direct) == set(real)
    monkeypatch.undo()
    for path in (run / "step-1").iterdir():
        assert (far / "step-1" / path.name).read_bytes() == path.read_bytes()
    assert holdfast.verify(far / "step-1")["verdict"] == "sound"
