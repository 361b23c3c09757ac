"""What a user has put into a second place is his: no drain removes it, writes over it, or takes its checkpoint for damaged."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from command_line import holdfast as command
from draining import bound, in_child, names, save, swept

import holdfast
from holdfast.drain import Drain
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
FORMATS = pytest.mark.parametrize("format", ["holdfast", "dcp"])
SHARD = "model-00001-of-00005.safetensors"  # of Hugging Face; our own have such names


def runs(tmp_path: Path, *steps: int, format: str = "holdfast", beside: bool = False) -> tuple[Path, Path]:
    """A run whose checkpoints have arrived."""
    run, far = tmp_path / "run", tmp_path / "far"
    for step in steps:
        save(run, step, elements=8, format=format)
        if beside:
            (run / f"step-{step}/common.pt").write_bytes(b"of Megatron")
    swept(open_place(str(run)), open_place(str(far)))
    return run, far


@FORMATS
def test_weights_in_a_damaged_checkpoint_are_not_replaced(format: str, tmp_path: Path) -> None:
    run, far = runs(tmp_path, 1, format=format)
    (far / "step-1" / SHARD).write_bytes(b"mine")
    record = next((far / "step-1").glob("holdfast.commit*"))
    record.write_bytes(record.read_bytes()[:-5])
    save(run, 1, elements=8, format=format, replace=True)
    (failed,) = swept(open_place(str(run)), open_place(str(far)))
    assert failed["event"] == "failed" and f"{SHARD} is no file of a complete checkpoint" in failed["message"]
    assert (far / "step-1" / SHARD).read_bytes() == b"mine"


@FORMATS
@pytest.mark.parametrize("why", ["weights", "a mount"])
def test_what_retention_cannot_remove_keeps_the_files_beside_it(why: str, format: str, tmp_path: Path) -> None:
    run, far = runs(tmp_path, 1, 2, format=format, beside=True)
    if why == "weights":
        (far / "step-1" / SHARD).write_bytes(b"mine")
    before = set(os.listdir(far / "step-1"))
    said = []
    with bound(far / "step-1", far / "step-1") if why == "a mount" else contextlib.nullcontext():  # a name of a mount stays
        try:
            said = [e.get("message", "") for e in swept(open_place(str(run)), open_place(str(far)), Drain(keep_last=1))]
        except Error as error:
            said = [error.message]
    assert any(f"remove {far}/step-1" in message for message in said), said
    assert set(os.listdir(far / "step-1")) == before and (far / "step-1/common.pt").exists()


@FORMATS
def test_weights_in_the_first_place_are_sent(format: str, tmp_path: Path) -> None:
    run, far = runs(tmp_path, 1, format=format)
    for name in (SHARD, "opt__0_0.distcp"):
        (run / "step-1" / name).write_bytes(b"mine")
    swept(open_place(str(run)), open_place(str(far)))
    assert [(far / "step-1" / name).read_bytes() for name in (SHARD, "opt__0_0.distcp")] == [b"mine"] * 2
    assert swept(open_place(str(run)), open_place(str(far))) == []


def test_a_late_file_is_not_written_over_a_users_own(tmp_path: Path) -> None:
    run, far = runs(tmp_path, 1)
    (far / "step-1/notes.txt").write_bytes(b"mine")
    (run / "step-1/notes.txt").write_bytes(b"of the run")
    before = set(os.listdir(far / "step-1"))
    done = command("drain", run, far, torch=False)
    assert done.status == 1 and f"write {far}/step-1/notes.txt: a file that no drain has put there has the name" in done.error
    assert (far / "step-1/notes.txt").read_bytes() == b"mine" and set(os.listdir(far / "step-1")) == before
    (far / "step-1/notes.txt").unlink()
    assert command("drain", run, far, torch=False).status == 0
    assert (far / "step-1/notes.txt").read_bytes() == b"of the run"


    # A file that cannot come renews no record: what is there by then would be proven by it.
    (far / "step-1/more.txt").write_bytes(b"mine")
    (run / "step-1/more.txt").write_bytes(b"of the run")
    before = os.stat(far / "step-1/holdfast.beside.json")
    assert command("drain", run, far, torch=False).status == 1
    assert os.stat(far / "step-1/holdfast.beside.json").st_mtime_ns == before.st_mtime_ns


@FORMATS
def test_a_users_file_of_the_name_of_a_new_one_keeps_a_damaged_copy(format: str, tmp_path: Path) -> None:
    run, far = runs(tmp_path, 1, format=format)
    (far / "step-1/notes.txt").write_bytes(b"mine")
    record = next((far / "step-1").glob("holdfast.commit*"))
    record.write_bytes(record.read_bytes()[:-5])
    save(run, 1, elements=8, format=format, replace=True)
    (run / "step-1/notes.txt").write_bytes(b"of the run")
    target = open_place(str(far))
    following = Following(open_place(str(run)), target, Drain(), lambda event: None)
    following.sweep()
    assert "notes.txt is no file of a complete checkpoint" in str(following.first_error())
    assert (far / "step-1/notes.txt").read_bytes() == b"mine"
    (far / "step-1").rename(tmp_path / "away")  # as the message says
    following.sweep()
    assert names(target) == ["step-1"] and following.first_error() is None


@FORMATS
@pytest.mark.parametrize("name, data", [("eval.json", b"mine"), ("_SUCCESS", b""), ("eval/results.json", b"mine")])
def test_an_object_of_a_user_damages_no_checkpoint(name: str, data: bytes, format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    obstore = pytest.importorskip("obstore")
    save(tmp_path / "run", 1, 2, elements=8, format=format)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    url, storage = bucket
    store = obstore.store.from_url(url, **storage, client_options={"allow_http": True})
    old, new = far.complete()[0]
    for info in (old, new):
        obstore.put(store, f"{info.slot}/{name}", data)
    assert names(far) == ["step-1", "step-2"] and far.complete()[1] == [] and swept(source, far) == []
    save(tmp_path / "run", 3, elements=8, format=format)
    events = [e for e in swept(source, far, Drain(keep_last=1)) if e["event"] != "arrived"]
    (trouble,) = events
    assert trouble["event"] == "trouble" and f"{name} is no file of the checkpoint" in trouble["message"]
    assert "likewise 1 other checkpoint" in trouble["message"]
    assert names(far) == ["step-1", "step-2", "step-3"] and name in far.sizes(old.slot)
    # What is missing is damage all the same.
    gone = next(name for name in far.sizes(new.slot) if name.endswith((".safetensors", ".distcp")))
    obstore.delete(store, f"{new.slot}/{gone}")
    assert names(far) == ["step-1", "step-3"] and gone in far.complete()[1][0]


@FORMATS
@pytest.mark.parametrize("how", ["other bytes", "gone"])
def test_a_file_beside_a_checkpoint_comes_back_as_it_was_sent_or_not(how: str, format: str, tmp_path: Path) -> None:
    run, far = runs(tmp_path, 1, format=format, beside=True)
    file = far / "step-1/common.pt"
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(b"oF Megatron")
        os.utime(far / "step-1/holdfast.beside.json")  # as where the disk has done it, which changes no time
    done = command("drain", far, tmp_path / "back", "--newest", torch=False)
    assert done.status == 1 and "common.pt" in done.error
    assert not (tmp_path / "back/step-1/common.pt").exists() and holdfast.verify(tmp_path / "back/step-1")["verdict"] == "sound"
    file.write_bytes(b"anew")  # somebody has written it, or copied it with its times
    os.utime(file, (1, 1))
    assert command("drain", far, tmp_path / "back", "--newest", torch=False).status == 0
    assert (tmp_path / "back/step-1/common.pt").read_bytes() == b"anew"


@FORMATS
def test_damage_beside_a_checkpoint_of_a_store_does_not_come_back(format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    obstore = pytest.importorskip("obstore")
    save(tmp_path / "run", 1, elements=8, format=format)
    (tmp_path / "run/step-1/common.pt").write_bytes(b"of Megatron")
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    url, storage = bucket
    store = obstore.store.from_url(url, **storage, client_options={"allow_http": True})
    obstore.put(store, f"{far.complete()[0][0].slot}/beside/common.pt", b"oF Megatron")
    trouble, arrived = swept(far, open_place(str(tmp_path / "back")))
    assert (trouble["event"], arrived["event"]) == ("trouble", "arrived")
    assert "beside/common.pt: bytes 0 to 11 have another digest" in trouble["message"] and "sent without this file" in trouble["message"]
    left = set(os.listdir(tmp_path / "back/step-1"))
    assert left == set(os.listdir(tmp_path / "run/step-1")) - {"common.pt"}


@pytest.mark.parametrize("how", ["file", "link", "directory"])
def test_what_stands_in_the_way_is_missed_once_it_is_moved_away(how: str, tmp_path: Path) -> None:
    run, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    save(tmp_path / "run", 1, elements=8)
    (tmp_path / "far").mkdir()
    obstacle = tmp_path / "far/step-1"
    if how == "link":
        obstacle.symlink_to("nowhere")
    else:
        obstacle.write_bytes(b"mine") if how == "file" else (obstacle / "mine").mkdir(parents=True)
    failed: list[str] = []
    following = Following(run, far, Drain(), lambda event: failed.append(event["message"]) if event["event"] == "failed" else None)
    for _ in range(3):
        following.sweep()
    assert "move" in str(following.first_error()) and len(failed) == 1  # it is tried once
    obstacle.rename(tmp_path / "away")
    following.sweep()
    assert names(far) == ["step-1"] and following.first_error() is None


@pytest.mark.skipif(os.getuid() != 0, reason="another user's process needs root")
@pytest.mark.parametrize("what", ["copy", "copy/holdfast.commit.json.tmp"])
def test_what_stands_in_the_way_is_missed_once_it_is_accessible(what: str) -> None:
    """As left by a drain of another user."""
    with tempfile.TemporaryDirectory() as top:  # a directory that another user may enter
        os.chmod(top, 0o777)
        save(Path(top, "run"), 1, elements=8)
        run, far = open_place(f"{top}/run"), open_place(f"{top}/far")
        (info,) = run.complete()[0]
        slot, _, name = what.replace("copy", f"step-1.partial-{info.attempt}").partition("/")

        def drain() -> None:
            obstacle = Path(far.path(slot), name)
            Path(far.path(slot)).mkdir(parents=True)
            if name:
                obstacle.write_bytes(b"")
            obstacle.chmod(0)
            following = Following(run, far, Drain(), lambda event: None)
            for _ in range(2):
                following.sweep()
            assert "accessible" in str(following.first_error()), following.first_error()
            obstacle.chmod(0o700)
            following.sweep()
            assert names(far) == ["step-1"] and following.first_error() is None, following.first_error()

        assert in_child(drain, uid=65534) == 0
