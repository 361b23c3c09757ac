"""`holdfast drain`: what arrives in the second place, after kills and failures, and what retention leaves in either."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
from command_line import holdfast as command

import holdfast
from holdfast.drain import Drain, contents, copying, tiers
from holdfast.drain.following import Following
from holdfast.drain.places import Info, Place, open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
ELEMENTS = 3 * MIB  # of each checkpoint's large tensor: several chunks of 4 MiB
PLAIN = Drain()
LONG = os.environ.get("HOLDFAST_LONG") == "1"


def save(run: Path, *steps: int, elements: int = ELEMENTS, **options: Any) -> None:
    """Saves checkpoints of random values with their step."""
    with holdfast.Checkpointer(run, arena_bytes=64 * MIB, **options) as checkpointer:
        for step in steps:
            state = {"w": torch.randn(elements), "step": torch.tensor(step)}
            checkpointer.save(state, step)


def swept(source: Place, target: Place, options: Drain = PLAIN, **further: Any) -> list[dict[str, Any]]:
    """One sweep; returns its events."""
    events: list[dict[str, Any]] = []
    Following(source, target, options, events.append, **further).sweep()
    return [e for e in events if e["event"] != "progress"]


def names(place: Place) -> list[str]:
    return [c.name for c in place.complete()[0]]


def verdicts(path: Path) -> list[str]:
    return [holdfast.verify(path / n)["verdict"] for n in sorted(os.listdir(path)) if "." not in n]


@pytest.fixture(scope="module")
def server() -> Iterator[s3_server.Server]:
    with s3_server.serving() as running:
        yield running


@pytest.fixture
def bucket(server: s3_server.Server, request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    """A prefix of its own, and the options of its store."""
    yield f"s3://{s3_server.BUCKET}/{request.node.name}", server.storage()
    server.faults.__init__()  # type: ignore[misc]  # of the next test


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("kind", ["directory", "store"])
def test_there_and_back(kind: str, format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    # Large enough for an upload in parts, where there are any.
    save(tmp_path / "run", 1, 2, elements=5 * MIB if (kind, format) == ("store", "holdfast") else MIB, format=format)
    far = open_place(*bucket) if kind == "store" else open_place(str(tmp_path / "far"))
    source = open_place(str(tmp_path / "run"))
    arrived = swept(source, far)
    assert [(e["event"], e["name"], e["verified"]) for e in arrived] == [
        ("arrived", name, "store" if kind == "store" else "read") for name in ("step-1", "step-2")
    ]
    assert [i._replace(slot="") for i in far.complete()[0]] == [i._replace(slot="") for i in source.complete()[0]]
    assert swept(source, far) == []  # nothing is sent twice
    back = tmp_path / "back"
    swept(far, open_place(str(back)))
    assert verdicts(back) == ["sound", "sound"]
    for name in ("step-1", "step-2"):
        files = {p.name for p in (tmp_path / "run" / name).iterdir()}
        assert {p.name for p in (back / name).iterdir()} == files
        assert all((back / name / f).read_bytes() == (tmp_path / "run" / name / f).read_bytes() for f in files)


def test_a_part_of_a_file_that_is_there_is_not_sent_again(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    (info,) = source.complete()[0]
    data = max(contents.contents_of(source, info).data, key=lambda file: file.bytes)
    partial = tmp_path / "far" / far.begin(info)
    stored = (tmp_path / "run/step-1" / data.name).read_bytes()
    changed = 5 * MIB  # in the second chunk
    (partial / data.name).write_bytes(stored[:changed] + b"?" + stored[changed + 1 : 9 * MIB])
    assert names(far) == []
    (arrived,) = swept(source, far)
    assert arrived["bytes_sent"] < data.bytes - 3 * MIB  # the first chunk was there; the last one was cut off
    assert verdicts(tmp_path / "far") == ["sound"]


def test_a_replaced_checkpoint_is_replaced_there(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    source = open_place(str(tmp_path / "run"))
    for far in (open_place(str(tmp_path / "far")), open_place(*bucket)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        for _ in range(3):  # the third one goes where the first was
            save(tmp_path / "run", 7, elements=10, replace=True)
            (arrived,) = swept(source, far)
            (there,) = far.complete()[0]
            assert there.attempt == arrived["attempt"] == source.complete()[0][0].attempt
            assert far.sizes(there.slot).keys() == contents.contents_of(far, there).names()
    assert verdicts(tmp_path / "far") == ["sound"]


def test_a_replacement_that_is_interrupted_leaves_the_older_one(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 7)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    before = far.complete()
    save(tmp_path / "run", 7, replace=True)
    following = Following(source, far, Drain(), lambda event: following.stop.set())
    with pytest.raises(Error, match="asked to end"):
        following.sweep()
    assert far.complete() == before and contents.contents_of(far, before[0][0])


def test_of_two_complete_attempts_the_older_one_goes(tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    monkeypatch.setattr(far, "_remove_other_attempts", lambda slot, info: None)  # as after a kill
    save(tmp_path / "run", 7, elements=10)
    swept(source, far)
    save(tmp_path / "run", 7, elements=10, replace=True)
    arrived, removed = swept(source, far)
    assert (arrived["event"], removed["event"]) == ("arrived", "removed")
    assert [c.attempt for c in far.complete()[0]] == [arrived["attempt"]] and len(far._objects()) == 1


def make_older(checkpoint: Path) -> None:
    """Gives a checkpoint of one rank the form of an earlier version, which made no commit record."""
    (checkpoint / "holdfast.commit.json").unlink()
    manifest = checkpoint / "rank-00000-of-00001.manifest.json"
    text = re.sub(rb'"parent":"[0-9a-f]{32}",\n', b"", manifest.read_bytes()).replace(b'"version":4', b'"version":3', 1)
    text = text[:-35]
    manifest.write_bytes(text + contents.digest(text).encode() + b'"}\n')


def test_an_older_checkpoint_gets_a_commit_record(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1)
    make_older(tmp_path / "run/step-1")
    assert verdicts(tmp_path / "run") == ["sound"]
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    swept(far, open_place(str(tmp_path / "back")))
    assert verdicts(tmp_path / "back") == ["sound"]
    assert (tmp_path / "back/step-1/holdfast.commit.json").exists()
    assert holdfast.find_newest(tmp_path / "back")["step"] == 1


def test_damage_is_not_copied_and_holds_nothing_up(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=2 * MIB)
    save(tmp_path / "run", 2, 3, 4, elements=10)
    data = "model-00000-of-00001.safetensors"
    with open(tmp_path / "run/step-1" / data, "r+b") as file:
        file.seek(5 * MIB)
        file.write(b"damage")
    (tmp_path / "run/step-2" / data).unlink()
    (tmp_path / "run/step-3" / data).unlink()
    (tmp_path / "run/step-3" / data).symlink_to(tmp_path / "run/step-4" / data)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    events: list[dict[str, Any]] = []
    following = Following(source, far, PLAIN, events.append, keep_local=1)
    following.sweep()
    *failed, arrived = [e for e in events if e["event"] != "progress"]
    assert [(e["event"], e["code"], e["name"]) for e in failed] == [("failed", "DATA_LOSS", f"step-{n}") for n in (1, 2, 3)]
    assert f"{data}: bytes 4194304 to 8388608" in failed[0]["message"] and "No such file" in failed[1]["message"]
    assert arrived["name"] == "step-4" and names(far) == ["step-4"]
    assert names(source) == ["step-1", "step-2", "step-3", "step-4"]  # they have not arrived, so they stay
    shutil.rmtree(tmp_path / "run/step-1")
    following.sweep()
    assert sorted(e.message.split("/")[-2] for e in following.failed.values()) == ["step-2", "step-3"]  # what is gone is forgotten


@pytest.mark.parametrize("verify", ["read", "store"])
def test_a_byte_that_changes_on_the_way_is_found(verify: str, server: s3_server.Server, tmp_path: Path,
                                                 bucket: tuple[str, dict[str, str]]) -> None:  # fmt: skip
    save(tmp_path / "run", 1, elements=10)
    server.faults.compares = verify == "store"
    server.faults.corrupt = "model-"
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far, Drain(verify=verify))
    assert not server.faults.corrupt and server.faults.refused == (verify == "store")
    assert server.faults.unproven == 0
    swept(far, open_place(str(tmp_path / "back")))
    assert verdicts(tmp_path / "back") == ["sound"]


# ---- Which checkpoints stay.


def info(name: str, saved_at: float, parent: str = "") -> Info:
    step = int(name.partition("-")[2])
    attempt = f"{int(saved_at):032x}"
    return Info(name, name, "holdfast", step, saved_at, attempt, parent and f"{int(parent):032x}", 1, 1, "r")


def test_what_has_not_arrived_stays_unless_told_otherwise() -> None:
    local = [info(f"step-{n}", n) for n in range(1, 7)]
    for options, remote, gone in (
        (Drain(), [], []),
        (Drain(), local[:3], ["step-1", "step-2", "step-3"]),
        (Drain(), local[4:], []),
        (Drain(keep_last=2), local[4:], ["step-1", "step-2", "step-3", "step-4"]),  # it would be let go there at once
        (Drain(behind="skip"), [], ["step-1", "step-2", "step-3", "step-4"]),
    ):
        assert [c.name for c in tiers.to_remove_locally(local, remote, options, 2, 0)] == gone
    of_another_node = [c._replace(saved_at=c.saved_at + 0.5, attempt="f" + c.attempt[1:]) for c in local]
    assert tiers.to_remove_locally(local, of_another_node, Drain(), 2, 0) == []
    assert [c.name for c in tiers.to_send(local, local[:2], Drain(), 2, 0)] == ["step-3", "step-4", "step-5", "step-6"]
    assert [c.name for c in tiers.to_send(local, local[:2], Drain(behind="skip"), 2, 0)] == ["step-5", "step-6"]
    assert [c.name for c in tiers.to_send(local, [], Drain(keep_last=3), 2, 0)] == ["step-4", "step-5", "step-6"]


def test_an_older_save_of_a_name_does_not_replace_a_newer_one() -> None:
    newer = info("step-5", 9)
    assert tiers.to_send([info("step-5", 3)], [newer], Drain(), 0, 0) == []
    assert [c.saved_at for c in tiers.to_send([newer], [info("step-5", 3)], Drain(), 0, 0)] == [9]


def test_a_rollback_is_mirrored(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=64 * MIB) as checkpointer:
        state = {"w": torch.zeros(10)}
        for step in (10, 20, 30):
            checkpointer.save(state, step)
        swept(source, far)
        checkpointer.load(10, into=state)
        checkpointer.save(state, 15)
    swept(source, far, Drain(keep_last=2), keep_local=2)
    assert names(far) == names(source) == ["step-10", "step-15"]  # the abandoned branch has gone first


def test_retention_of_both_places(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", *range(1, 7), elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    events = swept(source, far, Drain(keep_last=4, keep_every=2), keep_local=2)
    assert names(far) == ["step-2", "step-3", "step-4", "step-5", "step-6"] and names(source) == ["step-5", "step-6"]
    (tmp_path / "run/step-5/mine").write_text("a note")  # and a directory with a foreign file stays
    save(tmp_path / "run", 7, elements=10)
    swept(source, far, Drain(keep_last=4), keep_local=1)
    assert names(source) == ["step-5", "step-7"]
    assert {e["event"] for e in events} == {"arrived", "removed"}


def test_leftovers_go_when_they_are_old(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    (first, _), _ = far.complete()
    far._delete([f"{first.slot}/{first.record}"])
    far._library.put(far._store, "notes/mine.txt", b"text")
    assert names(far) == ["step-2"] and far.clean(set()) == []
    monkeypatch.setattr("holdfast.drain.object_store._AGE_OF_LEFTOVERS", -60.0)
    assert far.clean({first.attempt}) == [] and far.clean(set()) == [first.slot]
    assert far.sizes(first.slot) == {} and far.sizes("notes") and names(far) == ["step-2"]


# ---- What others may have put there.


def forge(far: Place, checkpoint: str, **changes: Any) -> None:
    """Changes a commit record's fields, and gives it the self-digest of its new text."""
    (one,) = [c for c in far.complete()[0] if c.name == checkpoint]
    text = far.read(one.slot, one.record, 1 << 20)
    record = {**json.loads(text), **changes}
    record.pop("self_digest")
    text = json.dumps(record).encode()[:-1] + b',"self_digest":"'
    far._library.put(far._store, f"{one.slot}/{one.record}", text + contents.digest(text).encode() + b'"}\n')


@pytest.mark.parametrize(
    "changes",
    [
        {"commit_file": {"name": "../../outside", "bytes": 8, "digest": "0" * 32}},
        {"attempt": "/../../../outside/" + "0" * 14},
        {"manifests": []},
        {"manifests": [{"bytes": -1, "digest": "0" * 32}]},
        {"manifests": [7]},
        {"step": "1"},
        {"bytes": None},
    ],
)
def test_a_record_that_lies_is_damage(changes: dict[str, Any], tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10, format="dcp")
    save(tmp_path / "run", 2, elements=10)
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far)
    forge(far, "step-1", **changes)
    found, damaged = far.complete()
    assert [c.name for c in found] == ["step-2"] and len(damaged) == 1 and damaged[0].startswith("step-1.")
    swept(far, open_place(str(tmp_path / "back")))
    assert os.listdir(tmp_path / "back") == ["step-2"] and sorted(os.listdir(tmp_path)) == ["back", "run"]


@pytest.mark.parametrize(
    "change", [{"name": "../outside"}, {"name": ".metadata"}, {"name": "holdfast.commit.json"}, {"bytes": 1 << 62}, {"chunk_bytes": 0}, {"digests": []}]
)
def test_a_manifest_that_lies_is_damage(change: dict[str, Any]) -> None:
    entry = {"name": "model", "bytes": 5, "chunk_bytes": 4 * MIB, "digests": ["0" * 32]}
    assert contents.files_of({"files": [entry]}, "m")[0].bytes == 5
    with pytest.raises(Error, match="read m: ") as refused:
        contents.files_of({"files": [{**entry, **change}]}, "m")
    assert refused.value.code == "DATA_LOSS"


def test_a_record_of_any_length_is_not_read_into_memory(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    far = open_place(*bucket)
    far._library.put(far._store, "step-1/holdfast.commit.json", bytes(17 * MIB), use_multipart=False)
    assert far.complete()[0] == [] and "16777216 are the most" in far.complete()[1][0]


def test_two_processes_that_send_attempts_of_one_name_do_not_meet(tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """As a drain that a dead trainer has left behind, and that of the node where the run goes on."""
    for run in ("one", "two"):
        save(tmp_path / run, 7, elements=10)
    first, second = (open_place(str(tmp_path / run)) for run in ("one", "two"))
    far = open_place(*bucket)
    commit = far.commit
    between: list[Any] = []

    def committed_between(*arguments: Any) -> None:
        if not between:
            between.append(swept(second, open_place(*bucket)))
        commit(*arguments)

    monkeypatch.setattr(far, "commit", committed_between)
    with contextlib.suppress(Error):
        swept(first, far)
    (found,), damaged = far.complete()
    assert found.attempt == second.complete()[0][0].attempt and not damaged
    assert copying.verify(far, found)[0] == []


def test_a_save_that_replaces_one_on_its_way_gets_nothing_of_it(tmp_path: Path, server: s3_server.Server,
                                                               bucket: tuple[str, dict[str, str]]) -> None:  # fmt: skip
    save(tmp_path / "run", 7, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    following = Following(source, far, PLAIN, lambda event: None)
    commit, far.commit = far.commit, lambda *_: (_ for _ in ()).throw(Error("UNAVAILABLE", "down"))  # type: ignore[method-assign]
    with pytest.raises(Error, match="down"):
        following.sweep()
    far.commit = commit  # type: ignore[method-assign]
    save(tmp_path / "run", 7, elements=10, replace=True)
    following.sweep()
    (found,) = far.complete()[0]
    assert copying.verify(far, found)[0] == []


def test_clean_leaves_what_no_drain_has_put(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    far = open_place(*bucket)
    far._library.put(far._store, "export/model-00001-of-00002.safetensors", b"a user's own")
    monkeypatch.setattr("holdfast.drain.object_store._AGE_OF_LEFTOVERS", -60.0)
    assert far.clean(set()) == [] and far.sizes("export")


# ---- Kills, failures, slow places.


def drained_with_kills(run: Path, target: str, options: list[str], kills: int, seed: int, longest: float) -> int:
    """Runs the command and kills it at random points; then to its end. Returns how many kills found it at work."""
    choice = random.Random(seed)
    program = [sys.executable, "-m", "holdfast", "drain", str(run), target, *options]
    found, checked = 0, set()
    for _ in range(kills):
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(choice.uniform(0.1, longest))
        found += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        check(target, options, checked)
    done = subprocess.run(program, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return found


def check(target: str, options: list[str], checked: set[str] | None = None) -> None:
    """Everything that is named complete is there, whole and right; what was `checked` before is passed over."""
    storage = dict(o.split("=", 1) for o in options if "=" in o)
    place = open_place(target, storage)
    complete, damaged = place.complete()
    assert not damaged
    checked = set() if checked is None else checked
    for one in complete:
        if one.attempt not in checked:
            assert copying.verify(place, one)[0] == []
            checked.add(one.attempt)


def test_a_kill_before_the_name_is_given_leaves_nothing_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10, format="dcp")  # its last file stands before the name
    source = open_place(str(tmp_path / "run"))

    def killed(*_: object) -> None:
        raise OSError(5, "killed")

    with monkeypatch.context() as patched, pytest.raises(Error, match="killed"):
        patched.setattr(os, "rename", killed)
        swept(source, open_place(str(tmp_path / "far")))
    assert names(open_place(str(tmp_path / "far"))) == []
    swept(source, open_place(str(tmp_path / "far")))
    assert os.listdir(tmp_path / "far") == ["step-1"]


def test_what_was_replaced_goes_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10, format="dcp")
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(source, far)
    save(tmp_path / "run", 1, elements=10, format="dcp", replace=True)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(shutil, "rmtree", lambda path: 1 / 0)
        swept(source, far)
    assert len(os.listdir(tmp_path / "far")) == 2
    (removed,) = swept(source, far)
    assert removed["event"] == "removed" and os.listdir(tmp_path / "far") == ["step-1"] and names(far) == ["step-1"]


def test_kills_with_a_server_that_fails(tmp_path: Path, server: s3_server.Server, bucket: tuple[str, dict[str, str]]) -> None:
    count, kills, elements = (20, 50, 128 * MIB) if LONG else (4, 3, 2 * MIB)
    save(tmp_path / "run", *range(1, count + 1), elements=elements)
    server.faults.failing, server.faults.bytes_per_second = 0.1, 0 if LONG else 40 * MIB
    url, storage = bucket
    options = [word for item in storage.items() for word in ("--storage", "=".join(item))]
    found = drained_with_kills(tmp_path / "run", url, options, kills, seed=count, longest=20.0 if LONG else 0.9)
    assert found >= kills // 2
    far = open_place(url, storage)
    assert names(far) == [f"step-{n}" for n in range(1, count + 1)]
    check(url, options)
    assert sum(1 for method, _ in server.faults.seen if method == "PUT") >= count * 3


def test_kills_with_a_slow_file_system(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, 3, elements=2 * MIB)
    below, mounted = tmp_path / "below", tmp_path / "far"
    below.mkdir(), mounted.mkdir()
    if not shutil.which("bindfs") or subprocess.run(["bindfs", "--write-rate=30M", below, mounted]).returncode:
        pytest.skip("bindfs cannot mount here")
    try:
        drained_with_kills(tmp_path / "run", str(mounted), [], 3, seed=1, longest=0.6)
        assert verdicts(mounted) == ["sound"] * 3 and sorted(os.listdir(mounted)) == ["step-1", "step-2", "step-3"]
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_the_commit_record_comes_last(tmp_path: Path, server: s3_server.Server, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10)
    save(tmp_path / "run2", 1, elements=10, format="dcp")
    for run, last in (("run", "holdfast.commit.json"), ("run2", ".metadata")):
        server.faults.seen.clear()
        swept(open_place(str(tmp_path / run)), open_place(f"{bucket[0]}/{run}", bucket[1]))
        written = [path for method, path in server.faults.seen if method in ("PUT", "POST")]
        assert written[-1].partition("?")[0].endswith(last) and sum(last in path for path in written) == 1
        assert ".manifest.json" in written[-2] or "holdfast.commit-" in written[-2]


def stopped_behind_the_first_file(run: Path, url: str, storage: dict[str, str]) -> None:
    """A drain that is ended between two files, as a kill may end it."""
    source, far = open_place(str(run)), open_place(url, storage)
    following = Following(source, far, PLAIN, lambda event: None)
    following._copy._write = _writing_once(following._copy._write, following)  # type: ignore[method-assign]
    with pytest.raises(Error, match="asked to end"):
        following.sweep()


def _writing_once(write: Any, following: Following) -> Any:
    def once(*arguments: Any, **options: Any) -> None:
        write(*arguments, **options)
        following.stop.set()

    return once


def test_planted_mistakes_are_found(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    options = [word for item in storage.items() for word in ("--storage", "=".join(item))]
    monkeypatch.setattr(copying, "_FILES_AT_ONCE", 1)
    stopped_behind_the_first_file(tmp_path / "run", f"{url}/right", storage)
    check(f"{url}/right", options)  # without a mistake: nothing is complete, and nothing is damaged
    assert names(open_place(f"{url}/right", storage)) == []

    def record_first(*arguments: Any) -> contents.Contents:
        found = contents.contents_of(*arguments)
        (record,) = found.proofs
        return contents.Contents([record, *found.data[1:]], found.manifests, found.data[:1])

    monkeypatch.setattr(copying, "contents_of", record_first)
    stopped_behind_the_first_file(tmp_path / "run", f"{url}/wrong", storage)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check(f"{url}/wrong", options)

    def named_too_early(self: Any, slot: str, objects: Any) -> Any:
        name = "holdfast.commit.json"
        return contents.info_of(self._record(slot, name, objects[name]), "step-1", slot, name) if name in objects else None

    monkeypatch.setattr("holdfast.drain.object_store.Store._look", named_too_early)
    with pytest.raises(AssertionError):
        check(f"{url}/wrong", options)


def test_errors_say_what_to_do(tmp_path: Path, server: s3_server.Server, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    words = [word for item in storage.items() for word in ("--storage", "=".join(item))]
    for target, status, said in (
        ("s3://no-such-bucket/run", 0, "no-such-bucket"),
        (url, 403, "403"),
        ("nowhere://bucket/run", 0, "nowhere"),
    ):
        server.faults.refuse = status
        begin = time.monotonic()
        done = command("drain", tmp_path / "run", target, *words, torch=False, timeout=60)
        assert (done.status, done.out) == (2, "") and said in done.error, done
        assert "Traceback" not in done.error and time.monotonic() - begin < 20
    server.faults.refuse = 0
    done = command("drain", tmp_path / "none", url, *words, torch=False, timeout=60)
    assert done.status == 2 and "No such file" in done.error
    done = command("drain", tmp_path / "run", url, *words, "--json", torch=False)
    assert done.status == 0 and [a["name"] for a in done.json["arrived"]] == ["step-1"]


def test_without_obstore_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Error, match=r"pip install 'holdfast\[drain\]'"):
        open_place("s3://bucket/run")
    with pytest.raises(Error, match="obstore is not installed"):
        holdfast.Checkpointer(tmp_path, drain_to="s3://bucket/run")


@pytest.mark.parametrize("what", ["down", "read-only"])
def test_a_store_that_takes_nothing_is_tried_again_until_the_time_is_over(
    what: str, server: s3_server.Server, tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read again for each try is no progress."""
    from holdfast.drain.running import Running

    monkeypatch.setattr("holdfast.drain.following._BACKOFF_MAX", 0.2)
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    if what == "down":
        storage = {**storage, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}  # type: ignore[dict-item]
    else:
        server.faults.refuse, server.faults.refused_methods = 403, ("PUT", "POST")
    events: list[dict[str, Any]] = []
    following = Following(open_place(str(tmp_path / "run")), open_place(url, storage), Drain(give_up=0.5), events.append)
    running = Running(following, events.append, watch=True)
    running.finish()
    thread = threading.Thread(target=running.run, args=(str(tmp_path / "run"), url), daemon=True)
    thread.start()
    thread.join(20)
    codes = [e["code"] for e in events if e["event"] == "trouble"]
    assert not thread.is_alive() and len(codes) >= 2
    assert set(codes) == {"UNAVAILABLE" if what == "down" else "PERMISSION_DENIED"}


def test_the_rate_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=4 * MIB)
    begin = time.monotonic()
    swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")), Drain(bytes_per_second=16 * MIB))
    assert 0.7 < time.monotonic() - begin < 10


def test_one_drain_of_a_pair_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.drain.running.POLL_SECONDS", 0.1)
    save(tmp_path / "run", 1, elements=10)
    from holdfast.drain.following import alone
    from holdfast.drain.running import Running

    run, far = str(tmp_path / "run"), str(tmp_path / "far")
    events: list[dict[str, Any]] = []
    following = Following(open_place(run), open_place(far), Drain(give_up=0.5), events.append)
    running = Running(following, events.append, watch=True)
    with alone(run, f"file://{tmp_path}/x/../far/", lambda: False):  # however it is written
        done = command("drain", run, far, torch=False)
        running.ring(7)
        thread = threading.Thread(target=running.run, args=(run, far), daemon=True)
        thread.start()
        used = time.process_time()
        assert until(lambda: bool(events))
        assert time.process_time() - used < 0.3  # it waits, and does not ask all the time
    assert done.status == 2 and "another process does it" in done.error
    assert (events[0]["event"], events[0]["ticket"], events[0]["error"][0]) == ("synced", 7, "UNAVAILABLE")
    running.finish()
    thread.join(20)
    assert names(open_place(far)) == ["step-1"]


def test_the_lock_is_taken_once_the_directory_is_there(tmp_path: Path) -> None:
    from holdfast.drain.following import alone

    run, far = str(tmp_path / "run"), str(tmp_path / "far")
    with alone(run, far, lambda: not os.makedirs(run)), pytest.raises(Error, match="another process"), alone(run, far, lambda: False):
        pass


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Waits until a condition holds; whether it does."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_retention_leaves_a_checkpoint_that_is_loaded_or_was_replaced(format: str, tmp_path: Path) -> None:
    from holdfast.drain.file_system import in_use

    save(tmp_path / "run", 1, elements=10, format=format)
    source = open_place(str(tmp_path / "run"))
    (old,) = source.complete()[0]
    with in_use(source.path("step-1")), pytest.raises(Error, match="it is being loaded"):
        source.remove(old)
    save(tmp_path / "run", 1, elements=10, format=format, replace=True)
    with pytest.raises(Error) as refused:
        source.remove(old)
    assert refused.value.code == "ABORTED"
    (new,) = source.complete()[0]
    if format == "dcp":  # a save into the directory: what one holds while it is on its way
        fd = os.open(source.path("step-1"), os.O_RDONLY)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        with pytest.raises(Error, match="a save is on its way"):
            source.remove(new)
        os.close(fd)
    source.remove(new)
    assert names(source) == []


def test_the_chosen_one_may_go_from_the_source(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    done = command("drain", tmp_path / "run", tmp_path / "far", "--name", "step-1", "--keep-source", "1", torch=False)
    assert done.status == 0, done
    assert os.listdir(tmp_path / "far") == ["step-1"] and names(open_place(str(tmp_path / "run"))) == ["step-2"]


def test_checkpoints_of_several_ranks(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    saves = [
        holdfast.save_async({"own": torch.full((MIB,), float(rank))}, tmp_path / "run/step-1", step=1, rank=rank,
                            world_size=2, attempt="ab" * 16)
        for rank in (0, 1)
    ]  # fmt: skip
    for one in saves:
        one.wait(60)
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far)
    swept(far, open_place(str(tmp_path / "back")))
    assert verdicts(tmp_path / "back") == ["sound"]
    assert holdfast.load(tmp_path / "back/step-1", rank=1)["own"][0] == 1.0


def test_a_look_without_a_change_lists_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    following = Following(source, far, PLAIN, lambda event: None)
    following.sweep(asked=False)
    listed: list[str] = []
    complete = source.complete
    monkeypatch.setattr(source, "complete", lambda: listed.append("") or complete())
    following.sweep(asked=False)
    assert not listed and names(far) == ["step-1"]
    save(tmp_path / "run", 2, elements=10, format="dcp")
    following.sweep(asked=False)
    assert listed and names(far) == ["step-1", "step-2"]
