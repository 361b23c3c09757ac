"""`holdfast drain`: files in a checkpoint's directory that no manifest names, as a framework and a user put there."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import s3_server
from draining import PLAIN, names, save, swept, verdicts

import holdfast
from holdfast.drain import Drain, beside, copying
from holdfast.drain.following import Following
from holdfast.drain.places import Place, open_place
from holdfast.drain.remote import fetch
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
RECORD = "holdfast.beside.json"
FORMATS = pytest.mark.parametrize("format", ["holdfast", "dcp"])
KINDS = pytest.mark.parametrize("kind", ["directory", "store"])


def opened(kind: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> Place:
    return open_place(*bucket) if kind == "store" else open_place(str(tmp_path / "far"))


def brought_back(far: Place, back: Path, name: str = "step-1") -> Path:
    swept(far, open_place(str(back)))
    return back / name


@FORMATS
@KINDS
def test_such_files_travel_with_the_checkpoint(kind: str, format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10, format=format)
    made = {"common.pt": os.urandom(5 << 20), "metadata.json": b"{}", "empty": b"", "beside": b"1", "a name": b"2"}
    for name, data in made.items():
        (tmp_path / "run/step-1" / name).write_bytes(data)
    far = opened(kind, tmp_path, bucket)
    source = open_place(str(tmp_path / "run"))
    assert [e["event"] for e in swept(source, far)] == ["arrived"]
    assert swept(source, far) == []
    (info,) = far.complete()[0]
    faults, files, _ = copying.verify(far, info)
    own = len(list((tmp_path / "run/step-1").iterdir())) - len(made)
    assert (faults, files) == ([], own + len(made))
    there = brought_back(far, tmp_path / "back")
    assert {n: (there / n).read_bytes() for n in made} == made
    assert holdfast.verify(there)["verdict"] == "sound"
    # And on to a third place, whose record is as good.
    swept(open_place(str(tmp_path / "back")), open_place(str(tmp_path / "third")))
    assert {n: (tmp_path / "third/step-1" / n).read_bytes() for n in made} == made


@FORMATS
@KINDS
def test_a_file_that_comes_after_the_commit_follows(kind: str, format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10, format=format)
    (tmp_path / "run/step-1/common.pt").write_bytes(b"first")
    far, source = opened(kind, tmp_path, bucket), open_place(str(tmp_path / "run"))
    following = Following(source, far, PLAIN, lambda event: None)
    following.sweep()
    (tmp_path / "run/step-1/metadata.json").write_bytes(b"{}")
    (tmp_path / "run/step-1/common.pt").write_bytes(b"other")
    following.sweep(asked=False)
    there = brought_back(far, tmp_path / "back")
    assert [(there / n).read_bytes() for n in ("common.pt", "metadata.json")] == [b"other", b"{}"]
    # Another process finds what is missing by the record alone.
    (tmp_path / "run/step-1/late").write_bytes(b"late")
    swept(source, far)
    assert (brought_back(far, tmp_path / "again") / "late").read_bytes() == b"late"
    assert not copying.verify(far, far.complete()[0][0])[0]


def test_a_file_follows_before_retention_removes_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(source, far)
    (tmp_path / "run/step-1/notes").write_bytes(b"mine")
    swept(source, far, keep_local=1)
    assert (tmp_path / "far/step-1/notes").read_bytes() == b"mine"
    assert (tmp_path / "run/step-1/notes").exists()  # here it is a user's, and keeps its directory


@FORMATS
@KINDS
def test_retention_of_the_second_place_takes_them_along(kind: str, format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10, format=format)
    (tmp_path / "run/step-1/common.pt").write_bytes(b"1")
    far, source = opened(kind, tmp_path, bucket), open_place(str(tmp_path / "run"))
    swept(source, far)
    save(tmp_path / "run", 2, elements=10, format=format)
    swept(source, far, Drain(keep_last=1))
    assert names(far) == ["step-2"]
    if kind == "directory":
        assert os.listdir(tmp_path / "far") == ["step-2"]
    else:
        assert not far.sizes(next(iter(source.complete()[0])).slot)


@FORMATS
def test_what_keeps_a_checkpoint_from_retention_keeps_them_too(format: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10, format=format)
    (tmp_path / "run/step-1/common.pt").write_bytes(b"1")
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(source, far)
    (tmp_path / "far/step-1/mine").write_bytes(b"2")
    before = set(os.listdir(tmp_path / "far/step-1"))
    save(tmp_path / "run", 2, elements=10, format=format)
    arrived, kept = swept(source, far, Drain(keep_last=1))
    assert (arrived["event"], kept["event"]) == ("arrived", "trouble") and "mine is no file of the checkpoint" in kept["message"]
    assert set(os.listdir(tmp_path / "far/step-1")) == before


@FORMATS
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_late_file_goes_into_no_checkpoint_of_another_node(when: str, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("one", "two"):
        save(tmp_path / run, 1, elements=10, format=format)
        (tmp_path / run / "step-1/common.pt").write_text(f"of {run}")
    one, two, far = (open_place(str(tmp_path / name)) for name in ("one", "two", "far"))
    events: list[dict[str, Any]] = []
    following = Following(one, far, PLAIN, events.append, keep_local=1)
    following.sweep()
    (tmp_path / "one/step-1/common.pt").write_text("of one, late")
    (tmp_path / "one/step-1/late.pt").write_text("of one")
    write = far.write

    def replaced(*arguments: Any) -> None:
        monkeypatch.undo()
        swept(two, open_place(str(tmp_path / "far")))
        write(*arguments)

    if when == "before":
        swept(two, open_place(str(tmp_path / "far")))
    else:
        monkeypatch.setattr(far, "write", replaced)
    following.sweep()
    following.sweep()
    (info,) = far.complete()[0]
    assert info.attempt == two.complete()[0][0].attempt and copying.verify(far, info)[0] == []
    assert [f.name for f in beside.recorded(far, info)] == ["beside/common.pt"]
    assert (tmp_path / "far/step-1/common.pt").read_text() == "of two" and not (tmp_path / "far/step-1/late.pt").exists()
    assert names(one) == ["step-1"] and any("has a later save of this name" in e.get("message", "") for e in events)


def test_a_late_file_whose_name_is_taken_holds_nothing_up(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(source, far)
    (tmp_path / "far/step-1/late.pt").mkdir()
    for name in ("late.pt", "more.pt"):
        (tmp_path / "run/step-1" / name).write_bytes(b"1")
    save(tmp_path / "run", 2, elements=10)
    events = swept(source, far)
    assert {e["event"] for e in events} == {"arrived", "trouble"} and any("late.pt" in e.get("message", "") for e in events)
    assert names(far) == ["step-1", "step-2"] and (tmp_path / "far/step-1/more.pt").exists()


@KINDS
@pytest.mark.parametrize("more", [False, True])
def test_a_file_that_goes_before_the_commit_leaves_no_record(more: bool, kind: str, tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    save(tmp_path / "run", 1, elements=10)
    for name in ("notes", "more")[: 1 + more]:
        (tmp_path / "run/step-1" / name).write_bytes(b"1")
    source, far = open_place(str(tmp_path / "run")), opened(kind, tmp_path, bucket)
    with monkeypatch.context() as patched, pytest.raises(Error, match="killed"):
        patched.setattr(far, "commit", lambda *_: (_ for _ in ()).throw(Error("UNAVAILABLE", "killed")))
        swept(source, far)
    (tmp_path / "run/step-1/notes").unlink()
    far = opened(kind, tmp_path, bucket)
    swept(source, far)
    (info,) = far.complete()[0]
    assert copying.verify(far, info)[0] == []
    if kind == "directory":  # in a store it lies there, and no record names it: a store may let nothing be deleted
        assert sorted(n for n in far.sizes(info.slot) if n in ("more", "notes", RECORD)) == ([RECORD, "more"] if more else [])


@KINDS
def test_they_are_replaced_with_their_checkpoint(kind: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10)
    (tmp_path / "run/step-1/notes").write_bytes(b"1")
    far, source = opened(kind, tmp_path, bucket), open_place(str(tmp_path / "run"))
    swept(source, far)
    shutil.rmtree(tmp_path / "run/step-1")
    save(tmp_path / "run", 1, elements=20)
    (tmp_path / "run/step-1/notes").write_bytes(b"2")
    assert [e["event"] for e in swept(source, far)] == ["arrived"]
    assert (brought_back(far, tmp_path / "back") / "notes").read_bytes() == b"2"
    if kind == "directory":  # a file that a user has put there is no drain's, and keeps its checkpoint
        shutil.rmtree(tmp_path / "run/step-1")
        save(tmp_path / "run", 1, elements=30)
        (tmp_path / "far/step-1/mine").write_bytes(b"3")
        (event,) = swept(source, far)
        assert event["event"] == "failed" and "mine is no file of a complete checkpoint" in event["message"]


@pytest.mark.parametrize(("kind", "refused"), [("directory", False), ("store", False), ("store", True)])
@pytest.mark.parametrize("left", [[], ["stays"]])
def test_a_file_that_goes_before_the_commit_is_no_part_of_it(kind: str, left: list[str], refused: bool, tmp_path: Path,
                                                            server: s3_server.Server, bucket: tuple[str, dict[str, str]],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """An interrupted copy has sent it; a place that lets nothing be deleted keeps it, and holds no checkpoint up."""
    save(tmp_path / "run", 1, elements=10)
    for name in ("gone", *left):
        (tmp_path / "run/step-1" / name).write_bytes(b"1")
    far, source = opened(kind, tmp_path, bucket), open_place(str(tmp_path / "run"))
    with monkeypatch.context() as patch:
        patch.setattr(type(far), "commit", lambda *_: (_ for _ in ()).throw(Error("UNAVAILABLE", "a kill")))
        with pytest.raises(Error, match="a kill"):
            swept(source, far)
    (tmp_path / "run/step-1/gone").unlink()
    server.faults.refuse, server.faults.refused_methods = 403 if refused else 0, ("POST", "DELETE")
    assert [e["event"] for e in swept(source, far)] == ["arrived"]
    server.faults.refuse = 0
    (info,) = far.complete()[0]
    assert copying.verify(far, info)[0] == [] and [f.name for f in beside.recorded(far, info)] == [f"beside/{name}" for name in left]
    assert sorted(n.name for n in brought_back(far, tmp_path / "back").iterdir() if "." not in n.name) == left
    far.remove(info)
    assert not far.sizes(info.slot)


def test_what_is_no_file_is_reported_and_holds_nothing_up(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    path = tmp_path / "run/step-1"
    (path / "tokenizer").mkdir()
    (path / "link").symlink_to("/etc/passwd")
    (path / "two\nlines").touch()
    (path / "good").touch()
    (path / "b.json.tmp").touch()  # being written
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    trouble, arrived = swept(source, far)
    assert (trouble["event"], arrived["event"]) == ("trouble", "arrived")
    assert "link, tokenizer, two\nlines of" in trouble["message"]
    own = {p.name for p in path.iterdir() if p.is_file() and not p.is_symlink()} - {"two\nlines", "b.json.tmp"}
    assert set(os.listdir(tmp_path / "far/step-1")) == own | {RECORD}


def test_a_file_that_changes_all_the_time_holds_no_checkpoint_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    log = tmp_path / "run/step-1/log"
    log.write_bytes(b"a line")
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    digested = source._digested  # type: ignore[attr-defined]

    def changes(*args: Any) -> Any:
        file = digested(*args)
        log.write_bytes(os.urandom(6))
        return file

    monkeypatch.setattr(source, "_digested", changes)
    events = swept(source, far)
    assert [e["event"] for e in events] == ["trouble", "arrived", "arrived"] and "does not change" in events[0]["message"]
    assert names(far) == ["step-1", "step-2"] and not (tmp_path / "far/step-1/log").exists()
    monkeypatch.undo()
    swept(source, far)
    assert (tmp_path / "far/step-1/log").read_bytes() == log.read_bytes()


@pytest.mark.parametrize("planted", ["../out", "", ".", "a/b", "holdfast.commit.json", ".metadata", RECORD, "x.tmp", "a\nb"])
def test_a_record_of_a_stranger_names_no_other_place(planted: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10)
    (tmp_path / "run/step-1/notes").write_bytes(b"1")
    far, source = open_place(*bucket), open_place(str(tmp_path / "run"))
    swept(source, far)
    (info,) = far.complete()[0]
    (file,) = beside.recorded(far, info)
    forged = beside.record_of(info, [file._replace(name="beside/" + planted)])
    far.write(info.slot, forged, lambda begin, end: forged.content[begin:end], False)  # type: ignore[index]
    with pytest.raises(Error, match="no name of a file"):
        beside.recorded(far, info)
    trouble, arrived = swept(far, open_place(str(tmp_path / "back")))
    assert (trouble["event"], arrived["event"]) == ("trouble", "arrived") and RECORD in trouble["message"]
    assert not (tmp_path / "out").exists() and verdicts(tmp_path / "back") == ["sound"]
    assert set(os.listdir(tmp_path / "back/step-1")) == set(os.listdir(tmp_path / "run/step-1")) - {"notes"}


def test_damage_beside_a_checkpoint_is_found(tmp_path: Path, bucket: tuple[str, dict[str, str]], caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "run", 1, elements=10)
    (tmp_path / "run/step-1/notes").write_bytes(b"12345")
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far)
    (info,) = far.complete()[0]
    (file,) = beside.recorded(far, info)
    far.write(info.slot, file, lambda begin, end: b"12845"[begin:end], False)
    (fault,) = copying.verify(far, info)[0]
    assert "beside/notes" in fault
    trouble, arrived = swept(far, open_place(str(tmp_path / "back")))
    assert (trouble["event"], arrived["event"]) == ("trouble", "arrived") and "beside/notes" in trouble["message"]
    with caplog.at_level("WARNING", "holdfast"):
        path = Path(fetch(far, info, str(tmp_path / "fetched"), PLAIN))
    assert "beside/notes" in caplog.text and not (path / "notes").exists() and holdfast.verify(path)["verdict"] == "sound"


def test_a_drain_that_is_asked_to_end_reads_no_more(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    (tmp_path / "run/step-1/large").touch()
    os.truncate(tmp_path / "run/step-1/large", 512 << 20)
    following = Following(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")), Drain(bytes_per_second=8e6), print)
    threading.Timer(0.5, following.stop.set).start()
    begin = time.monotonic()
    with pytest.raises(Error, match="asked to end"):
        following.sweep()
    assert time.monotonic() - begin < 30  # at this rate the file alone takes 67 s


def came_back(tmp_path: Path, format: str) -> tuple[Place, Place, Path]:
    """A first place whose checkpoint has come back with the record of a file beside it, the second place, and the file."""
    save(tmp_path / "lost", 1, elements=10, format=format)
    (tmp_path / "lost/step-1/common.pt").write_bytes(b"first")
    far, run = open_place(str(tmp_path / "far")), open_place(str(tmp_path / "run"))
    swept(open_place(str(tmp_path / "lost")), far)
    swept(far, run)
    return run, far, tmp_path / "run/step-1/common.pt"


@FORMATS
@pytest.mark.parametrize("how", ["taken", "link"])
def test_retention_leaves_a_changed_file_that_does_not_arrive(how: str, format: str, tmp_path: Path) -> None:
    run, far, file = came_back(tmp_path, format)
    if how == "taken":  # a user's own has the name there
        (tmp_path / "far/step-1").rename(tmp_path / "away")
        shutil.copytree(tmp_path / "away", tmp_path / "far/step-1")
        (tmp_path / "far/step-1" / RECORD).unlink()
        file.write_bytes(b"second")
    else:
        file.unlink()
        file.symlink_to("elsewhere")
    save(tmp_path / "run", 2, 3, elements=10, format=format)
    for _ in range(2):
        events = swept(run, far, keep_local=1)
    assert names(run) == ["step-1", "step-3"] and names(far) == ["step-1", "step-2", "step-3"]
    assert file.is_symlink() if how == "link" else file.read_bytes() == b"second"
    assert any("common.pt" in e["message"] for e in events if e["event"] == "trouble")
    file.unlink()  # as the log says
    swept(run, far, keep_local=1)
    assert names(run) == ["step-3"]


@FORMATS
def test_a_file_that_changes_at_the_last_moment_keeps_its_checkpoint(format: str, tmp_path: Path) -> None:
    run, _, file = came_back(tmp_path, format)
    (info,) = run.complete()[0]
    for data in (b"first, and more", b"other"):
        file.write_bytes(data)
        with pytest.raises(Error, match=r"common\.pt has been written anew") as refused:
            run.remove(info)
        assert refused.value.code == "FAILED_PRECONDITION" and file.read_bytes() == data
    file.write_bytes(b"first")
    file.chmod(0o600)  # which is no change of what it has
    run.remove(info)
    assert names(run) == []


def test_what_no_copy_takes_is_named_also_when_it_comes_late(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    run, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(run, far)
    (tmp_path / "run/step-1/link").symlink_to("elsewhere")
    (event,) = swept(run, far)
    assert event["event"] == "trouble" and "link of" in event["message"]
