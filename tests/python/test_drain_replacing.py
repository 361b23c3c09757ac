"""What a drain finds in the place of its copy in a mounted file system, and kills at each change of names."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from draining import bound, in_child, names, save, swept, verdicts
from small_disk import mounted

import holdfast
from holdfast import _durable
from holdfast.drain import Drain, contents
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


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


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_a_later_save_that_a_kill_has_left_without_its_name_stays(format: str, tmp_path: Path) -> None:
    """At the exchange of names, where it had come meanwhile."""
    for run in ("one", "two"):
        save(tmp_path / run, 7, elements=10, format=format)
    one, two, far = (open_place(str(tmp_path / name)) for name in ("one", "two", "far"))
    swept(one, far)
    (older,) = far.complete()[0]
    shutil.copytree(tmp_path / "two/step-7", tmp_path / "far" / f"step-7.partial-{older.attempt}")
    assert swept(one, far) == [] and len(os.listdir(tmp_path / "far")) == 2
    holdfast.recover(tmp_path / "far", wait_for_orphans=0)
    assert len(os.listdir(tmp_path / "far")) == 2
    swept(two, far)
    assert os.listdir(tmp_path / "far") == ["step-7"] and [c.attempt for c in far.complete()[0]] == [two.complete()[0][0].attempt]


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_what_a_kill_in_a_removal_has_left_goes(format: str, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "run", step, elements=10, format=format)
        (tmp_path / f"run/step-{step}/common.pt").write_text("1")
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(source, far)
    shutil.rmtree(tmp_path / "run/step-1")
    (tmp_path / "far/step-1").rename(tmp_path / f"far/.step-1.retired-{far.complete()[0][0].attempt}")
    swept(source, far)
    assert os.listdir(tmp_path / "far") == ["step-2"]


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_a_folder_in_a_copy_fails_its_checkpoint_alone(format: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10, format=format)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    folder = tmp_path / f"far/step-1.partial-{source.complete()[0][0].attempt}/mine"
    folder.mkdir(parents=True)
    failed, arrived = swept(source, far)
    assert (failed["event"], arrived["event"], names(far)) == ("failed", "arrived", ["step-2"]) and str(folder.parent) in failed["message"]


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


def test_of_two_copies_without_the_name_recover_takes_the_later_one(tmp_path: Path) -> None:
    """As of two drains that were killed at the last step."""
    save(tmp_path / "run", 7, elements=10, format="dcp")
    (older,) = open_place(str(tmp_path / "run")).complete()[0]
    shutil.copytree(tmp_path / "run/step-7", tmp_path / f"far/step-7.partial-{older.attempt}")
    later = older
    while later.attempt <= older.attempt:  # attempts are random: the older one is the first of a sorted list
        shutil.rmtree(tmp_path / "run")
        save(tmp_path / "run", 7, elements=10, format="dcp")
        (later,) = open_place(str(tmp_path / "run")).complete()[0]
    shutil.copytree(tmp_path / "run/step-7", tmp_path / f"far/step-7.partial-{later.attempt}")
    assert holdfast.recover(tmp_path / "far", wait_for_orphans=0)["promoted"] == ["step-7"]
    assert os.listdir(tmp_path / "far") == ["step-7"] and open_place(str(tmp_path / "far")).complete()[0][0].attempt == later.attempt


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_recover_leaves_a_copy_on_its_way(format: str, tmp_path: Path) -> None:
    """At the last step, where the file system hangs."""
    save(tmp_path / "run", 1, elements=10, format=format)
    far = tmp_path / "far"
    (reached, says), (waits, release) = os.pipe(), os.pipe()

    def drain() -> None:
        rename = os.rename

        def late(path: str, to: str, **of: int) -> None:
            if to == str(far / "step-1"):
                os.write(says, b".")
                os.read(waits, 1)
            rename(path, to, **of)

        os.rename = late  # type: ignore[assignment]
        swept(open_place(str(tmp_path / "run")), open_place(str(far)))

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(in_child, drain)
        os.read(reached, 1)
        report = holdfast.recover(far, wait_for_orphans=0)
        os.write(release, b".")
        assert ended.result() == 0
    assert report["fenced"] == report["removed"] == report["promoted"] == []
    assert [why.partition(": ")[2] for why in report["kept_incomplete"]] == ["a save is running there"]
    assert os.listdir(far) == ["step-1"] and verdicts(far) == ["sound"]


def test_a_recovery_between_the_begin_of_a_copy_and_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    mkdir = os.mkdir

    def recovered(path: str, *further: int) -> None:
        mkdir(path, *further)
        if ".partial-" in path:
            monkeypatch.setattr(os, "mkdir", mkdir)
            assert holdfast.recover(tmp_path / "far")["removed"] == [os.path.basename(path)]

    monkeypatch.setattr(os, "mkdir", recovered)
    with pytest.raises(Error, match="another process has removed or completed the copy") as refused:
        swept(source, far)
    assert refused.value.code == "ABORTED"  # so that the command tries again
    assert [e["event"] for e in swept(source, far)] == ["arrived"]


@pytest.mark.parametrize("kind", ["{}.partial-{}", ".{}.fenced-{}", ".{}.retired-{}"])
def test_a_directory_without_its_name_is_no_checkpoint_of_dcp(kind: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10, format="dcp")
    first, _ = open_place(str(tmp_path / "run")).complete()[0]
    (tmp_path / "run/step-1").rename(tmp_path / "run" / kind.format("step-1", first.attempt))
    assert [c["name"] for c in holdfast.list_checkpoints(tmp_path / "run", format="dcp")] == ["step-2"]


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("what", ["rank-00000", "holdfast.commit"])
def test_a_copy_of_a_replaced_save_goes_wherever_its_drain_was_killed(what: str, format: str, tmp_path: Path) -> None:
    """With a list of which no byte is written yet."""
    run, far = tmp_path / "run", tmp_path / "far"
    save(run, 1, elements=10, format=format)

    def drain() -> None:
        pwrite = os.pwrite

        def killed(fd: int, data: memoryview, at: int) -> int:
            if os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith(what):
                os.kill(os.getpid(), signal.SIGKILL)
            return pwrite(fd, data, at)

        os.pwrite = killed
        swept(open_place(str(run)), open_place(str(far)))

    assert in_child(drain) == -signal.SIGKILL and len(os.listdir(far)) == 1
    shutil.rmtree(run)
    save(run, 1, elements=10, format=format)
    swept(open_place(str(run)), open_place(str(far)))
    assert holdfast.recover(far, wait_for_orphans=0)["kept_incomplete"] == []
    assert os.listdir(far) == ["step-1"] and verdicts(far) == ["sound"]
