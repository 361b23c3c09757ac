"""`holdfast drain`: what arrives in the second place, after kills and failures."""

from __future__ import annotations

import http.server
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
from command_line import holdfast as command
from draining import MIB, PLAIN, names, save, swept, verdicts

import holdfast
from holdfast.drain import Drain, contents, copying
from holdfast.drain.following import Following
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
LONG = os.environ.get("HOLDFAST_LONG") == "1"


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


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_a_copy_without_its_commit_record_is_completed(kind: str, tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Of DCP its metadata is there already."""
    save(tmp_path / "run", 1, elements=10, format="dcp")
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket) if kind == "store" else open_place(str(tmp_path / "far"))
    (info,) = source.complete()[0]
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(far, "commit", lambda *_: 1 / 0)
        swept(source, far)
    slot = far.begin(info)
    assert names(far) == [] and ".metadata" in far.sizes(slot) and info.record not in far.sizes(slot)
    again = open_place(*bucket) if kind == "store" else open_place(str(tmp_path / "far"))
    assert [(e["event"], e["bytes_sent"]) for e in swept(source, again)] == [("arrived", 0)]
    assert copying.verify(again, again.complete()[0][0])[0] == []


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


@pytest.mark.parametrize("lost", ["manifest.json", "holdfast.commit.json"])
def test_a_replacement_that_the_store_confirms_and_loses_leaves_the_older_one(lost: str, tmp_path: Path, server: s3_server.Server,
                                                                            bucket: tuple[str, dict[str, str]]) -> None:  # fmt: skip
    save(tmp_path / "run", 7, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    following = Following(source, far, Drain(), lambda event: None)
    following.sweep()
    before = far.complete()[0]
    save(tmp_path / "run", 7, elements=10, replace=True)
    server.faults.breaks = [("PUT", lost, "lost")]
    with pytest.raises(Error, match="does not list it after its commit"):
        following.sweep()
    assert far.complete()[0] == before and server.faults.breaks == []
    following.sweep()
    assert [c.attempt for c in far.complete()[0]] == [c.attempt for c in source.complete()[0]] and len(far._objects()) == 1


def test_of_two_complete_attempts_the_older_one_goes(tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    monkeypatch.setattr(far, "remove_replaced", lambda info: None)  # as after a kill
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


def test_the_record_that_a_drain_makes_is_that_of_a_save(tmp_path: Path) -> None:
    save(tmp_path / "run", 7, elements=10)
    of_save = json.loads((tmp_path / "run/step-7/holdfast.commit.json").read_bytes())
    make_older(tmp_path / "run/step-7")
    manifest = (tmp_path / "run/step-7/rank-00000-of-00001.manifest.json").read_bytes()
    swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")))
    made = json.loads((tmp_path / "far/step-7/holdfast.commit.json").read_bytes())
    own = {
        "manifests": [{"bytes": len(manifest), "digest": contents.digest(manifest)}], "parent": "0" * 32,
        "committed_at_ns": made["saved_at_ns"], "self_digest": made["self_digest"],
    }  # fmt: skip
    assert list(made) == list(of_save) and made == {**of_save, **own}


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
    *said, failed, arrived = [e for e in events if e["event"] != "progress"]
    assert [(e["event"], e["code"]) for e in (*said, failed)] == [("trouble", "DATA_LOSS")] * 2 + [("failed", "DATA_LOSS")]
    assert [f"passed over step-{n}: {data}: " in e["message"] for n, e in enumerate(said, 2)] == [True, True]
    assert failed["name"] == "step-1" and f"{data}: bytes 4194304 to 8388608" in failed["message"]
    assert arrived["name"] == "step-4" and names(far) == ["step-4"]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-1", "step-2", "step-3", "step-4"]  # they have not arrived, so they stay
    shutil.rmtree(tmp_path / "run/step-1")
    following.sweep()
    assert not following.failed and [text[:6] for text in following.passed_over] == ["step-2", "step-3"]  # what is gone is forgotten


@pytest.mark.parametrize(("format", "file"), [("holdfast", "/model-"), ("dcp", ".distcp"), ("dcp", "/.metadata")],
                         ids=["plain", "of-dcp", "last-of-dcp"])  # fmt: skip  # without the text that is looked for in paths
@pytest.mark.parametrize("verify", ["read", "store"])
def test_a_byte_that_changes_on_the_way_is_found(verify: str, format: str, file: str, server: s3_server.Server, tmp_path: Path,
                                                 bucket: tuple[str, dict[str, str]]) -> None:  # fmt: skip
    save(tmp_path / "run", 1, elements=10, format=format)
    server.faults.compares = verify == "store"
    server.faults.corrupt = file
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far, Drain(verify=verify))
    assert not server.faults.corrupt and server.faults.refused == (verify == "store")
    assert server.faults.unproven == 0
    assert [copying.verify(far, one)[0] for one in far.complete()[0]] == [[]]
    swept(far, open_place(str(tmp_path / "back")))
    assert verdicts(tmp_path / "back") == ["sound"]


# ---- Kills, failures, slow places.


def drained_with_kills(run: Path, target: str, options: list[str], kills: int, seed: int, longest: float,
                       storage: dict[str, str] | None = None) -> int:  # fmt: skip
    """Runs the command and kills it at random points; then to its end. Returns how many kills found it at work.

    Args:
        storage: options of the store for the comparisons.
    """
    choice = random.Random(seed)
    program = [sys.executable, "-m", "holdfast", "drain", str(run), target, *options]
    found, checked = 0, set()
    for _ in range(kills):
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(choice.uniform(0.1, longest))
        found += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        check(target, storage, checked)
    done = subprocess.run(program, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return found


def check(target: str, storage: dict[str, str] | None, checked: set[str] | None = None) -> None:
    """Everything that is named complete is there, whole and right; what was `checked` before is passed over."""
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

    rename = os.rename

    def killed(path: str, to: str, **of_a_file: int) -> None:
        if not of_a_file:
            raise OSError(5, "killed")
        rename(path, to, **of_a_file)

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
        patched.setattr("holdfast.drain.slots.remove_unnamed", lambda path: 1 / 0)
        swept(source, far)
    assert len(os.listdir(tmp_path / "far")) == 2
    (removed,) = swept(source, far)
    assert removed["event"] == "removed" and os.listdir(tmp_path / "far") == ["step-1"] and names(far) == ["step-1"]


def test_kills_with_a_server_that_fails(tmp_path: Path, server: s3_server.Server, bucket: tuple[str, dict[str, str]]) -> None:
    """With HOLDFAST_LONG 10 GiB in 20 checkpoints: half an hour, 21 GiB of disk for the directory of pytest and that of temporary files,
    where moto keeps objects, and 2 GiB of memory.

    A kill costs a file that is on its way. With this rate one of 512 MiB takes at least 15 s, so that of three kills about one finds a
    further checkpoint, on machines of any speed.
    """
    count, kills, elements, longest, rate = (20, 50, 128 * MIB, 25.0, 36) if LONG else (4, 3, 2 * MIB, 0.9, 40)
    save(tmp_path / "run", *range(1, count + 1), elements=elements)
    server.faults.failing, server.faults.bytes_per_second = 0.1, rate * MIB
    url, storage = bucket
    options = [word for item in storage.items() for word in ("--storage", "=".join(item))]
    found = drained_with_kills(tmp_path / "run", url, options, kills, count, longest, server.storage(server.direct))
    assert found >= kills // 2
    far = open_place(url, storage)
    assert names(far) == [f"step-{n}" for n in range(1, count + 1)]
    server.faults.failing, server.faults.bytes_per_second = 0.0, 0.0
    check(url, storage)
    assert sum(1 for method, _ in server.faults.seen if method == "PUT") >= count * 3


@pytest.mark.parametrize(
    "breaks",
    [
        [("GET", "model-", "truncated"), ("GET", "manifest.json", "truncated"), ("GET", "list-type", "truncated")],
        [("PUT", "partNumber=2", "dropped"), ("POST", "uploadId=", "dropped"), ("PUT", "commit.json", "dropped")],
        [("PUT", "partNumber=1&", "busy"), ("GET", "list-type", "busy"), ("POST", "uploads", "busy")],
        [("GET", "list-type", "stale")] * 4,
    ],
    ids=lambda breaks: breaks[0][2],
)
def test_answers_that_break_off(breaks: list[tuple[str, str, str]], server: s3_server.Server, tmp_path: Path,
                                bucket: tuple[str, dict[str, str]]) -> None:  # fmt: skip
    save(tmp_path / "run", 1, elements=9 * MIB)  # three parts
    save(tmp_path / "run", 2, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    server.faults.breaks = list(breaks)
    events: list[dict[str, Any]] = []
    following = Following(source, far, Drain(verify="read"), events.append)
    for _ in range(5):
        try:
            following.sweep()
            break
        except Error as error:
            assert error.code == "UNAVAILABLE"
            following.trouble(error)
    assert not server.faults.breaks and names(far) == ["step-1", "step-2"]
    assert [e["name"] for e in events if e["event"] == "arrived"] == ["step-1", "step-2"]
    assert all(copying.verify(far, one)[0] == [] for one in far.complete()[0])


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
    for run, last, before in (("run", "holdfast.commit.json", ".manifest.json"), ("run2", "holdfast.commit-", ".metadata")):
        server.faults.seen.clear()
        swept(open_place(str(tmp_path / run)), open_place(f"{bucket[0]}/{run}", bucket[1]))
        written = [path for method, path in server.faults.seen if method in ("PUT", "POST")]
        assert last in written[-1] and before in written[-2] and all(sum(name in path for path in written) == 1 for name in (last, before))


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


@pytest.mark.planted("record_first", "named_too_early")
def test_planted_mistakes_are_found(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    monkeypatch.setattr(copying, "_FILES_AT_ONCE", 1)
    stopped_behind_the_first_file(tmp_path / "run", f"{url}/right", storage)
    check(f"{url}/right", storage)  # without a mistake: nothing is complete, and nothing is damaged
    assert names(open_place(f"{url}/right", storage)) == []

    def record_first(*arguments: Any) -> contents.Contents:
        found = contents.contents_of(*arguments)
        (record,) = found.proofs
        return contents.Contents([record, *found.data[1:]], found.manifests, found.data[:1])

    monkeypatch.setattr(copying, "contents_of", record_first)
    stopped_behind_the_first_file(tmp_path / "run", f"{url}/wrong", storage)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check(f"{url}/wrong", storage)

    def named_too_early(self: Any, slot: str, objects: Any) -> Any:
        name = "holdfast.commit.json"
        return contents.info_of(self._record(slot, name, objects[name]), "step-1", slot, name) if name in objects else None

    monkeypatch.setattr("holdfast.drain.object_store.Store._look", named_too_early)
    with pytest.raises(AssertionError):
        check(f"{url}/wrong", storage)


def test_errors_say_what_to_do(tmp_path: Path, server: s3_server.Server, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    words = [word for item in storage.items() for word in ("--storage", "=".join(item))]
    for arguments, status, said in (
        (("drain", tmp_path / "run", "s3://no-such-bucket/run"), 0, "; make the bucket, or choose another place"),
        (("ls", url), 400, "; look at the endpoint, and at its server"),
        (("drain", tmp_path / "run", url), 403, "; credentials come from the environment, from storage=, or from --storage-file"),
        (("drain", tmp_path / "run", "nowhere://bucket/run"), 0, "nowhere"),
        (("drain", tmp_path / "none", url), 0, "No such file"),
    ):
        server.faults.refuse = status
        begin = time.monotonic()
        done = command(*arguments, *words, torch=False, timeout=60)
        assert (done.status, done.out) == (2, "") and said in done.error, done
        assert "Traceback" not in done.error and time.monotonic() - begin < 20
    done = command("drain", tmp_path / "run", url, *words, "--json", torch=False)
    assert done.status == 0 and [a["name"] for a in done.json["arrived"]] == ["step-1"]


def test_a_name_that_a_place_cannot_have_holds_nothing_up(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    for name in ("step\n1", "x\x7f", "step-2"):
        holdfast.save_async({"w": torch.ones(3)}, tmp_path / "run" / name, step=1).durable.result()
    there = swept(open_place(str(tmp_path / "run")), open_place(*bucket))
    assert [(e["event"], e["name"]) for e in there] == [("failed", "step\n1"), ("failed", "x\x7f"), ("arrived", "step-2")]
    assert {e["code"] for e in there[:2]} == {"FAILED_PRECONDITION"} and "save under another name" in there[0]["message"]


def test_a_drain_that_ends_in_an_error_prints_its_document(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    done = command("drain", tmp_path / "run", tmp_path / "far", "--name", "step-9", "--json", torch=False)
    assert done.status == 2 and "no complete checkpoint step-9" in done.error
    assert done.json["arrived"] == [] and done.json["error"]["code"] == "NOT_FOUND" and "step-9" in done.json["error"]["message"]
    done = command("drain", tmp_path / "run", tmp_path / "far", "--json", torch=False)
    assert done.status == 0 and done.json["error"] is None and [c["name"] for c in done.json["arrived"]] == ["step-1"]


def test_a_file_in_the_place_of_the_target_is_no_fault_of_the_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    (tmp_path / "file").touch()
    source = open_place(str(tmp_path / "run"))
    following = Following(source, open_place(str(tmp_path / "file")), Drain(), lambda _: None)
    with pytest.raises(Error, match="Not a directory"):
        following.sweep()
    done = command("drain", tmp_path / "run", tmp_path / "file", torch=False)
    assert (done.status, done.out) == (2, "") and done.error.count("\n") == 1, done
    (tmp_path / "file").unlink()
    following.sweep()  # none was given up
    assert sorted(os.listdir(tmp_path / "file")) == ["step-1", "step-2"]


@pytest.mark.parametrize("options", [[], ["--watch"]], ids=["once", "watch"])
def test_a_server_that_hangs_holds_no_signal_up(options: list[str], tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        storage = {"endpoint": f"http://127.0.0.1:{server.getsockname()[1]}", "access_key_id": "a", "secret_access_key": "b", "region": "x"}
        words = [word for item in storage.items() for word in ("--storage", "=".join(item))]
        drain = subprocess.Popen([sys.executable, "-m", "holdfast", "drain", tmp_path / "run", "s3://b/run", *words, *options],
                                 stderr=subprocess.DEVNULL)  # fmt: skip
        try:
            server.settimeout(60)
            server.accept()  # it waits for an answer now
            if options:
                drain.send_signal(signal.SIGTERM)
                with pytest.raises(subprocess.TimeoutExpired):
                    drain.wait(1)  # it is to finish
            drain.send_signal(signal.SIGTERM)
            assert drain.wait(20) == 128 + signal.SIGTERM
        finally:
            drain.kill()
            drain.wait()


class _Page(http.server.BaseHTTPRequestHandler):
    """A console, or a proxy: a page for every request."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "13")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(b"<html></html>" if self.command == "GET" else b"")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_a_page_is_no_empty_store(tmp_path: Path) -> None:
    """A run would begin anew."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        storage = {"endpoint": f"http://127.0.0.1:{server.server_address[1]}", "access_key_id": "a", "secret_access_key": "b", "region": "x"}
        with holdfast.Checkpointer(tmp_path / "run", drain_to="s3://b/run", drain=Drain(storage=storage)) as checkpointer, \
                pytest.raises(Error, match="console"):  # fmt: skip
            checkpointer.newest()
        server.shutdown()


@pytest.mark.parametrize("option, said", [
    (["--keep-source", "-1"], "a whole number"), (["--keep-last", "x"], "a whole number"), (["--rate", "200MB"], "200M, 1G"),
    (["--rate", "0"], "--rate: 200M, 1G, or a number of bytes above 0, not '0'"), (["--rate", "nan"], "--rate"),
    (["--give-up", "-1"], "--give-up: a number of seconds, 0 or more, not '-1'"), (["--give-up", "nan"], "--give-up"),
])  # fmt: skip
def test_wrong_options_of_the_command_are_explained(option: list[str], said: str, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    done = command("drain", tmp_path / "run", tmp_path / "far", *option, torch=False)
    assert done.status == 2 and said in done.error and "Traceback" not in done.error and not (tmp_path / "far").exists()


def test_an_empty_path_is_not_the_current_directory(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    done = command("drain", tmp_path / "run", "", torch=False)
    assert done.status == 2 and "an empty path" in done.error


def test_without_obstore_the_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Error, match=r"pip install 'obstore>=0.8'"):
        open_place("s3://bucket/run")
    with pytest.raises(Error, match="obstore is not installed"):
        holdfast.Checkpointer(tmp_path, drain_to="s3://bucket/run")


@pytest.mark.parametrize("what", ["down", "read-only", "stale"])
def test_a_store_that_takes_nothing_is_tried_again_until_the_time_is_over(
    what: str, server: s3_server.Server, tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read again for each try is no progress, nor is a commit that no listing shows."""
    from holdfast.drain.running import Running

    monkeypatch.setattr("holdfast.drain.following._BACKOFF_MAX", 0.2)
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    if what == "down":
        storage = {**storage, "endpoint": "http://127.0.0.1:9", "retry_config": {"max_retries": 0}}  # type: ignore[dict-item]
    elif what == "read-only":
        server.faults.refuse, server.faults.refused_methods = 403, ("PUT", "POST")
    else:
        server.faults.breaks = [("GET", "list-type", "stale")] * 10000
    events: list[dict[str, Any]] = []
    following = Following(open_place(str(tmp_path / "run")), open_place(url, storage), Drain(give_up=0.5), events.append)
    running = Running(following, events.append, watch=True)
    running.finish()
    thread = threading.Thread(target=running.run, args=(str(tmp_path / "run"), url), daemon=True)
    thread.start()
    thread.join(20)
    codes = [e["code"] for e in events if e["event"] == "trouble"]
    assert not thread.is_alive() and len(codes) >= 2
    assert set(codes) == {"PERMISSION_DENIED" if what == "read-only" else "UNAVAILABLE"}
    assert not [e for e in events if e["event"] == "arrived"]
    assert [e["pending"] for e in events if e["event"] == "progress"][-1] == 1


def test_the_rate_is_kept(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=4 * MIB)
    begin = time.monotonic()
    swept(open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far")), Drain(bytes_per_second=16 * MIB))
    assert 0.7 < time.monotonic() - begin < 10


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
