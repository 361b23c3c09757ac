"""Drains beside other processes: what retention leaves in either place, locks, and what others may have put there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
from command_line import holdfast as command
from draining import MIB, PLAIN, names, save, swept, until

import holdfast
from holdfast.drain import Drain, contents, copying, tiers
from holdfast.drain.beside import recorded
from holdfast.drain.following import Following
from holdfast.drain.places import Info, Place, open_place
from holdfast.drain.tiers import Rules
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


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
        assert [c.name for c in tiers.to_remove_locally(local, remote, Rules(options, 2))] == gone
    of_another_node = [c._replace(saved_at=c.saved_at + 0.5, attempt="f" + c.attempt[1:]) for c in local]
    assert tiers.to_remove_locally(local, of_another_node, Rules(Drain(), 2)) == []
    assert [c.name for c in tiers.to_send(local, local[:2], Rules(Drain(), 2))] == ["step-3", "step-4", "step-5", "step-6"]
    assert [c.name for c in tiers.to_send(local, local[:2], Rules(Drain(behind="skip"), 2))] == ["step-5", "step-6"]
    assert [c.name for c in tiers.to_send(local, [], Rules(Drain(keep_last=3), 2))] == ["step-4", "step-5", "step-6"]


def test_times_of_another_run_keep_nothing_from_the_second_place() -> None:
    """A clock that is behind, or one that was ahead."""
    ahead = [info(f"step-{n}", 100 + n) for n in range(1, 4)]
    local = [info(f"step-{n}", n) for n in range(11, 15)]
    rules = Rules(Drain(keep_last=3), 1)
    assert tiers.to_send(local, ahead, rules) == local[1:]  # of its own run it is let go at once
    assert tiers.to_remove_locally(local, ahead, rules) == []
    assert tiers.to_remove_remotely(local, [*local[1:], *ahead], rules) == []
    assert tiers.to_remove_locally(local, [*local[1:], *ahead], rules) == local[:3]
    # What has gone from the first place since is of its run by the parents.
    line = [info(f"step-{n}", n, parent=str(n - 1)) for n in range(11, 17)]
    assert tiers.to_remove_remotely(line[-1:], [*line, *ahead], rules) == line[:3]
    assert tiers.strangers(line[-1], line[-1:], [*line, *ahead], rules) == ahead and not tiers.strangers(line[2], line[2:], line, rules)


def test_an_older_save_of_a_name_does_not_replace_a_newer_one() -> None:
    newer = info("step-5", 9)
    assert tiers.to_send([info("step-5", 3)], [newer], Rules(Drain())) == []
    assert [c.saved_at for c in tiers.to_send([newer], [info("step-5", 3)], Rules(Drain()))] == [9]


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
@pytest.mark.parametrize("kind", ["directory", "store"])
def test_a_copy_under_another_name_is_a_checkpoint_of_its_own(kind: str, format: str, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    """As of `cp -r step-3 best`: both have one attempt."""
    save(tmp_path / "run", 1, 2, 3, elements=10, format=format)
    shutil.copytree(tmp_path / "run/step-3", tmp_path / "run/best")
    (tmp_path / "run/best/why").write_bytes(b"good")
    url, storage = bucket if kind == "store" else (str(tmp_path / "far"), {})
    source, far = open_place(str(tmp_path / "run")), open_place(url, storage)
    assert len(swept(source, far)) == 4 and swept(source, far) == []
    assert sorted(names(far)) == ["best", "step-1", "step-2", "step-3"]
    swept(source, far, Drain(keep_last=1), keep_local=1)  # each is the newest of its series, and has what it has beside it
    assert sorted(names(far)) == sorted(names(source)) == ["best", "step-3"]
    assert {c.name: len(recorded(far, c)) for c in far.complete()[0]} == {"best": 1, "step-3": 0}
    shutil.copytree(tmp_path / "run/best", tmp_path / "new/best")
    with holdfast.Checkpointer(tmp_path / "new", format=format, drain_to=url, drain=Drain(storage=storage)) as checkpointer:
        assert checkpointer.newest()["name"] == "step-3"


def test_a_rollback_is_mirrored(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
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
    assert len(far._known) == 5  # a record of a thousand ranks is not kept for ever
    (tmp_path / "run/step-5/mine").write_text("a note")  # and a directory with a foreign file stays
    save(tmp_path / "run", 7, elements=10)
    swept(source, far, Drain(keep_last=4), keep_local=1)
    assert names(source) == ["step-5", "step-7"]
    assert {e["event"] for e in events} == {"arrived", "removed"}


def test_retention_leaves_the_checkpoints_of_another_job(tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    """Two jobs with names of their own drain into one prefix."""
    save(tmp_path / "one", 1, 2, 3, elements=10)
    save(tmp_path / "two", 1, 2, 3, elements=10, name="other-{step}")
    one, two = open_place(str(tmp_path / "one")), open_place(str(tmp_path / "two"))
    for far in (open_place(*bucket), open_place(str(tmp_path / "far"))):
        swept(one, far, Drain(keep_last=0))
        swept(two, far, Drain(keep_last=1))
        assert sorted(names(far)) == ["other-3", "step-1", "step-2", "step-3"]
        swept(one, far, Drain(keep_last=2))
        assert sorted(names(far)) == ["other-3", "step-2", "step-3"]


@pytest.mark.parametrize("names_of", [("seed-1", "seed-2"), ("llama-7b", "llama-13b"), ("a1-{step}", "a2-{step}"), ("{step}-of-a", "{step}-of-b")])
def test_retention_leaves_jobs_whose_names_differ_in_a_number(names_of: tuple[str, str], tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    far = open_place(*bucket)
    for steps in ((1, 2), (3,), (4,)):
        for job, form in enumerate(names_of):
            save(tmp_path / str(job), *steps, elements=10, name=form, replace=True)
            swept(open_place(str(tmp_path / str(job))), far, Drain(keep_last=1), keep_local=1, form=form)
            newest = form.format(step=steps[-1])
            assert newest in names(far) and names(open_place(str(tmp_path / str(job)))) == [newest]
    assert sorted(names(far)) == sorted(form.format(step=4) for form in names_of)


def test_of_a_known_form_names_that_are_given_stay_in_both_places(tmp_path: Path) -> None:
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    for step in (1, 2, 3):
        save(tmp_path / "run", step, elements=10)
        save(tmp_path / "run", step, elements=10, name=f"milestone-{step}")
    swept(source, far, Drain(keep_last=1), keep_local=1, form="step-{step}")
    assert sorted(names(source)) == sorted(names(far)) == ["milestone-1", "milestone-2", "milestone-3", "step-3"]


def test_without_the_form_of_names_a_number_counts_where_it_is_a_step(tmp_path: Path) -> None:
    """As with the command."""
    far = open_place(str(tmp_path / "far"))
    for job, name in enumerate(("seed-1", "seed-2", "iter_0000007", "iter_0000008")):
        save(tmp_path / str(job), 8 if job == 3 else 7, elements=10, name=name)
        swept(open_place(str(tmp_path / str(job))), far, Drain(keep_last=1))
    assert sorted(names(far)) == ["iter_0000008", "seed-1", "seed-2"]
    for epoch in (1, 2, 3):  # one directory with several is of one series
        save(tmp_path / "run", 100 * epoch, elements=10, name=f"epoch-{epoch}")
        swept(open_place(str(tmp_path / "run")), far, Drain(keep_last=1), keep_local=1)
    assert sorted(names(far)) == ["epoch-3", "iter_0000008", "seed-1", "seed-2"] and names(open_place(str(tmp_path / "run"))) == ["epoch-3"]


def test_a_full_place_gets_room_by_its_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart with a smaller `keep_last`, because the place was full."""
    save(tmp_path / "run", 1, 2, 3, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    swept(source, far)
    save(tmp_path / "run", 4, elements=10)
    write = far.write

    def full(*arguments: Any) -> None:
        if len(os.listdir(tmp_path / "far")) > 3:  # with the one that arrives
            raise Error("RESOURCE_EXHAUSTED", "write: No space left on device")
        write(*arguments)

    monkeypatch.setattr(far, "write", full)
    monkeypatch.setattr(copying, "_TRIES", 1)
    following = Following(source, far, Drain(keep_last=2), lambda event: None)
    with pytest.raises(Error, match="No space left"):
        following.sweep()
    following.sweep()
    assert names(far) == ["step-3", "step-4"]


def test_what_a_directory_has_got_of_a_checkpoint_that_is_gone_goes(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    first, second = source.complete()[0]
    begun = [far.begin(first), far.begin(second)]
    assert far.clean({second.attempt}) == begun[:1] and os.listdir(tmp_path / "far") == begun[1:]


def test_an_interrupted_clean_up_of_a_directory_leaves_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a recovery takes the rest for a user's own."""
    save(tmp_path / "run", 1, elements=10)
    far = open_place(str(tmp_path / "far"))
    begun = far.begin(open_place(str(tmp_path / "run")).complete()[0][0])
    for name in "az":
        (tmp_path / "far" / begun / name).touch()
    unlink = os.unlink

    def failing(path: str, **options: Any) -> None:
        if os.path.basename(path) == "z":
            raise OSError(5, "Input/output error")
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", failing)
    assert far.clean(set()) == []  # only what is gone is told
    assert {"holdfast.commit.json.tmp", "z"} <= set(os.listdir(tmp_path / "far" / begun))


def test_clean_leaves_what_another_process_is_sending(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=10)
    far, of_another = open_place(str(tmp_path / "far")), open_place(str(tmp_path / "far"))
    swept(open_place(str(tmp_path / "run")), far)
    (one,) = far.complete()[0]
    begun = of_another.begin(one)  # by a listing from before the commit
    assert far.clean(set()) == [] and far.sizes(begun)
    of_another._end(begun)
    fd = os.open(tmp_path / "far" / begun, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(Error, match="another process removes it") as refused:
        of_another.begin(one)
    assert refused.value.code == "UNAVAILABLE"
    os.close(fd)
    assert far.clean(set()) == [begun] and os.listdir(tmp_path / "far") == ["step-1"]


def test_a_later_save_that_has_arrived_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in ("one", "two"):
        save(tmp_path / run, 7, elements=10)
    first, second = (open_place(str(tmp_path / run)) for run in ("one", "two"))
    far = open_place(str(tmp_path / "far"))
    commit = far.commit
    monkeypatch.setattr(far, "commit", lambda *given: (swept(second, open_place(str(tmp_path / "far"))), commit(*given)))
    with pytest.raises(Error, match="a later save has arrived"):
        swept(first, far)
    assert [c.attempt for c in far.complete()[0]] == [second.complete()[0][0].attempt]


def test_a_clock_that_is_ahead_makes_no_leftovers(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node sends a checkpoint while this one looks for what was left days ago."""
    save(tmp_path / "run", 1, elements=10)
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far)
    (one,) = far.complete()[0]
    far._delete(one.slot, [one.record])  # it would come last
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3 * 86400)
    assert far.clean(set()) == [] and far.sizes(one.slot)


def test_a_place_that_lets_nothing_be_deleted_fills_no_local_disk(tmp_path: Path, server: s3_server.Server,
                                                                bucket: tuple[str, dict[str, str]]) -> None:  # fmt: skip
    save(tmp_path / "run", 1, 2, 3, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    server.faults.refuse, server.faults.refused_methods = 403, ("POST", "DELETE")
    with pytest.raises(Error, match="HTTP status 403"):
        swept(source, far, Drain(keep_last=2), keep_local=1)
    assert names(far) == ["step-1", "step-2", "step-3"] and names(source) == ["step-3"]

    save(tmp_path / "run", 4, 5, elements=10)
    with pytest.raises(Error, match="HTTP status 403"):
        swept(source, far, Drain(keep_last=2), keep_local=1)
    assert names(far)[-2:] == ["step-4", "step-5"] and names(source) == ["step-5"]  # no copy waited for it

    save(tmp_path / "run", 5, elements=10, replace=True)
    save(tmp_path / "run", 6, elements=10)
    following = Following(source, far, Drain(), lambda event: None)
    refused = following.sweep()
    assert refused is not None and "403" in refused.message
    assert {c.key for c in source.complete()[0]} <= {c.key for c in far.complete()[0]} and len(far._objects()) == 7
    server.faults.refuse = 0
    assert following.sweep() is None and len(far._objects()) == 6  # the removal is tried again


def test_a_sweep_lists_the_source_once_for_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, 2, 3, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    listed: list[str] = []
    complete = source.complete
    monkeypatch.setattr(source, "complete", lambda: listed.append("") or complete())
    swept(source, far)
    assert len(listed) == 1 + 3  # and one before the first


def test_leftovers_go_when_they_are_old(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, 2, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(*bucket)
    swept(source, far)
    (first, _), _ = far.complete()
    far._delete(first.slot, [first.record])
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


def meanwhile(far: Place, other: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets another process do something behind the next listing."""
    objects = far._objects

    def listed(prefix: str = "") -> Any:
        found = objects(prefix)
        monkeypatch.setattr(far, "_objects", objects)
        other()
        return found

    monkeypatch.setattr(far, "_objects", listed)


def test_clean_leaves_what_another_process_commits_meanwhile(tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    save(tmp_path / "one", 1, elements=10)
    save(tmp_path / "two", 2, elements=10)
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "one")), far)
    meanwhile(far, lambda: swept(open_place(str(tmp_path / "two")), open_place(*bucket)), monkeypatch)
    assert far.clean(set()) == [] and names(far) == ["step-1", "step-2"]


def test_an_old_copy_that_goes_on_is_no_leftover(tmp_path: Path, bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a drain whose network was down for a day."""
    save(tmp_path / "run", 1, elements=10)
    far = open_place(*bucket)
    swept(open_place(str(tmp_path / "run")), far)
    (one,) = far.complete()[0]
    far._delete(one.slot, [one.record])
    monkeypatch.setattr("holdfast.drain.object_store._AGE_OF_LEFTOVERS", -60.0)
    meanwhile(far, lambda: swept(open_place(str(tmp_path / "run")), open_place(*bucket)), monkeypatch)
    assert far.clean(set()) == [] and copying.verify(far, one)[0] == []


def test_of_two_attempts_of_one_time_the_same_one_stays_for_all(tmp_path: Path, bucket: tuple[str, dict[str, str]],
                                                                monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Two nodes that go on from one checkpoint with late clocks save at the same time."""
    far = open_place(*bucket)
    monkeypatch.setattr(far, "remove_replaced", lambda info: None)
    monkeypatch.setattr(far, "clean", lambda keep: [])
    sent = []
    for run in ("one", "two"):
        save(tmp_path / run, 7, elements=10)
        swept(open_place(str(tmp_path / run)), far)
        sent += far.complete()[0]
        forge(far, "step-7", saved_at_ns=10**18)
    monkeypatch.undo()
    (stays,) = far.complete()[0]
    assert len(far._objects()) == 2
    for one in sorted(sent, key=lambda c: c.attempt == stays.attempt):  # the other one first
        far.remove_replaced(one._replace(saved_at=stays.saved_at))
    assert [c.attempt for c in far.complete()[0]] == [stays.attempt] and len(far._objects()) == 1


def test_one_is_told_when_another_job_saves_under_the_same_names(tmp_path: Path) -> None:
    """Its local retention would wait for ever, unseen, for what never arrives."""
    place = [open_place(str(tmp_path / name)) for name in ("a", "b", "far")]
    save(tmp_path / "a", 1, 2, elements=10)
    save(tmp_path / "b", 1, elements=10)
    swept(place[1], place[2])
    events: list[dict[str, Any]] = []
    following = Following(place[0], place[2], Drain(), events.append)
    following.sweep()
    following.sweep()
    told = [e for e in events if e["event"] == "trouble"]
    assert len(told) == 1 and told[0]["message"].startswith("drain step-1: it is not sent") and "name=" in told[0]["message"]
    assert names(place[2]) == ["step-2", "step-1"] and following.failed == {}


# ---- Locks.


def test_one_drain_of_a_pair_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.drain.running.POLL_SECONDS", 0.1)
    monkeypatch.setattr("holdfast.drain.running._LOOK_SECONDS", 0.1)
    save(tmp_path / "run", 1, elements=10)
    from holdfast.drain.following import alone
    from holdfast.drain.running import Running

    run, far = str(tmp_path / "run"), str(tmp_path / "far")
    events: list[dict[str, Any]] = []
    following = Following(open_place(run), open_place(far), Drain(give_up=0.5), events.append)
    running = Running(following, events.append, watch=True)

    def answers() -> list[dict[str, Any]]:
        return [e for e in events if e["event"] == "synced"]

    with alone(run, f"file://{tmp_path}/x/../far/", lambda: False):  # however it is written
        done = command("drain", run, far, torch=False)
        running.ring(7)
        thread = threading.Thread(target=running.run, args=(run, far), daemon=True)
        thread.start()
        used = time.process_time()
        assert until(lambda: bool(answers()), 20.0)
        assert time.process_time() - used < 0.3  # it waits, and does not ask all the time
        assert (answers()[0]["ticket"], answers()[0]["error"][0], following.pending) == (7, "UNAVAILABLE", 1)
        swept(open_place(run), open_place(far))  # the other process sends it
        running.ring(8)
        assert until(lambda: len(answers()) == 2, 20.0) and (answers()[1]["ticket"], answers()[1]["error"]) == (8, None)
    assert done.status == 2 and "another process does it" in done.error
    running.finish()
    thread.join(20)
    assert names(open_place(far)) == ["step-1"]


def test_what_has_arrived_is_let_go_while_another_process_has_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a second Checkpointer with names of its own, which the drain of the first one does not let go."""
    monkeypatch.setattr("holdfast.drain.running._LOOK_SECONDS", 0.1)
    monkeypatch.setattr("holdfast.drain.following._SWEEP_SECONDS", 0.1)
    from holdfast.drain.following import alone
    from holdfast.drain.running import Running

    save(tmp_path / "run", 1, 2, elements=10, name="ema-{step}")
    first, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    looks: list[dict[str, Any]] = []
    following = Following(first, far, PLAIN, looks.append, keep_local=1, form="ema-{step}")
    running = Running(following, looks.append, watch=True)
    with alone(first.url, far.url, lambda: False):
        thread = threading.Thread(target=running.run, args=(first.url, far.url), daemon=True)
        thread.start()
        swept(first, far, keep_local=1, form="model-{step}")
        assert until(lambda: names(first) == ["ema-2"], 20.0)
        save(tmp_path / "run", 3, elements=10, name="ema-{step}")
        save(tmp_path / "run", 4, elements=10, name="ema-{step}")
        looks.clear()
        assert until(lambda: len(looks) > 2, 20.0) and names(first)[-2:] == ["ema-3", "ema-4"]  # they have not arrived
        swept(first, far, keep_local=1, form="model-{step}")
        assert until(lambda: names(first) == ["ema-4"], 20.0)
    running.finish()
    thread.join(20)
    assert not thread.is_alive() and names(far) == ["ema-1", "ema-2", "ema-3", "ema-4"]


def test_the_lock_is_taken_once_the_directory_is_there(tmp_path: Path) -> None:
    from holdfast.drain.following import alone

    run, far = str(tmp_path / "run"), str(tmp_path / "far")
    with alone(run, far, lambda: not os.makedirs(run)), pytest.raises(Error, match="another process"), alone(run, far, lambda: False):
        pass


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_retention_leaves_a_checkpoint_that_is_loaded_or_was_replaced(format: str, tmp_path: Path) -> None:
    from holdfast.drain.slots import in_use

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
