"""`holdfast.Checkpointer`: the checkpoints of a run by step, plain ones and DCP's."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp
from holdfast import _dcp_directories, _native

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
ARENA = 64 * MIB
formats = pytest.mark.parametrize("format", ["holdfast", "dcp"])


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def value_of(checkpointer: holdfast.Checkpointer, step: int | None = None, **where: Any) -> float:
    into = state(-1.0)
    checkpointer.load(step, into=into, **where)
    assert (into["w"] == into["w"][0]).all()
    return float(into["w"][0])


@contextlib.contextmanager
def opened(directory: Path, **options: Any) -> Iterator[holdfast.Checkpointer]:
    with holdfast.Checkpointer(directory, **{"arena_bytes": ARENA, **options}) as checkpointer:
        yield checkpointer


@formats
def test_a_run_that_saves_resumes_and_rolls_back(format: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    with opened(run, format=format, keep_last=2) as checkpointer:
        assert checkpointer.newest() is None and checkpointer.list() == []
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            checkpointer.load(into=state(0.0))
        for step in (8, 9, 10, 11):
            save = checkpointer.save_async(state(float(step)), step)
            assert (save.path, save.step, save.skipped) == (str(run / f"step-{step}"), step, False)
            save.staged.result(60)
            save.wait(60)
    assert sorted(os.listdir(run)) == ["step-10", "step-11"]
    with opened(run, format=format, keep_last=2) as checkpointer:
        assert [c["step"] for c in checkpointer.list()] == [10, 11]
        last = checkpointer.newest()
        assert last is not None and (last["step"], last["name"]) == (11, "step-11")
        assert value_of(checkpointer) == 11.0
        assert value_of(checkpointer, 10) == 10.0
        # Back to 10: what is saved from there is the newest, whatever its step.
        checkpointer.save(state(0.5), 5)
        checkpointer.wait(60)
        newest = checkpointer.newest()
        assert newest is not None and newest["step"] == 5
        assert value_of(checkpointer) == 0.5
        assert sorted(os.listdir(run)) == ["step-11", "step-5"]
        for path in (run / "step-11", run / "step-5"):
            assert holdfast.verify(path)["verdict"] == "sound"


@formats
def test_other_names_are_of_no_concern(format: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with opened(tmp_path, format=format, keep_last=1, keep_every=4) as checkpointer:
        for step in (1, 4, 5, 6):
            checkpointer.save(state(float(step)), step)
        checkpointer.save(state(9.0), 6, name="best")
        checkpointer.wait(60)
        assert sorted(os.listdir(tmp_path)) == ["best", "notes", "step-4", "step-6"]
        newest = checkpointer.newest()
        assert newest is not None and newest["name"] == "step-6"
        assert value_of(checkpointer, name="best") == 9.0
        assert value_of(checkpointer) == 6.0


@formats
def test_a_save_with_a_given_name_removes_nothing_and_stays(format: str, tmp_path: Path) -> None:
    for seed in (1, 2):  # two jobs
        with opened(tmp_path, format=format, name=f"seed-{seed}", keep_last=1) as checkpointer:
            checkpointer.save(state(float(seed)), 5)
    with opened(tmp_path, format=format, keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(float(step)), step)
            checkpointer.save(state(float(step)), step, name=f"milestone-{step}")
    there = {"seed-1", "seed-2", "step-3", "milestone-1", "milestone-2", "milestone-3"}
    assert set(os.listdir(tmp_path)) == there


@formats
def test_a_damaged_checkpoint_counts_for_none_that_retention_keeps(
    format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, format=format) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(float(step)), step)
    data = "__0_0.distcp" if format == "dcp" else "model-00000-of-00001.safetensors"
    (tmp_path / "step-3" / data).unlink()
    with opened(tmp_path, format=format, keep_last=2) as checkpointer:
        assert [c["step"] for c in checkpointer.list()] == [1, 2] and checkpointer.newest()["step"] == 2
        assert value_of(checkpointer) == 2.0
        checkpointer.save(state(4.0), 4)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-3", "step-4"]
    assert format == "dcp" or f"{tmp_path}/step-3: it counts for none of keep_last: model-00000" in caplog.text


def test_retention_leaves_a_checkpoint_without_its_manifest_under_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(float(step)), step)
    (tmp_path / "step-2" / "rank-00000-of-00001.manifest.json").unlink()
    with opened(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(state(4.0), 4)
    assert sorted(os.listdir(tmp_path)) == ["step-2", "step-4"]
    assert f"{tmp_path}: remove step-2: it lacks manifests" in caplog.text


@formats
def test_names_have_the_form_that_was_given(format: str, tmp_path: Path) -> None:
    with opened(tmp_path, format=format, name="llama-8b_{step:08d}") as checkpointer:
        checkpointer.save(state(3.0), 3)
        assert os.listdir(tmp_path) == ["llama-8b_00000003"]
        assert value_of(checkpointer) == 3.0
        assert checkpointer.path(3) == str(tmp_path / "llama-8b_00000003")
    with opened(tmp_path, format=format, name="last", replace=True) as checkpointer:
        assert checkpointer.newest() is None
        for step in (1, 2):
            checkpointer.save(state(float(step)), step)
        last = checkpointer.newest()
        assert last is not None and last["step"] == 2 and value_of(checkpointer) == 2.0


@formats
def test_a_failed_save_is_raised_once(format: str, tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path, format=format, arena_bytes=ARENA)
    checkpointer.save(state(1.0), 1)
    if format == "holdfast":
        with pytest.raises(FileExistsError):
            checkpointer.save_async(state(1.0), 1)
    other = holdfast.Checkpointer(tmp_path, format=format, arena_bytes=ARENA,
                                  bytes_per_second_max=MIB)  # fmt: skip
    big = {"w": torch.ones(4 * MIB)}
    save = other.save_async(big, 2)
    checkpointer.wait(60)  # not for the other's
    assert not save.durable.done()
    with pytest.raises(holdfast.TimeoutError):
        other.wait(0.1)
    with pytest.raises(holdfast.TimeoutError):
        save.wait(0.1)
    kill_worker()
    with pytest.raises(BaseException, match="worker"):  # DCP's is no Exception
        other.wait(60)
    other.wait(60)
    other.close()
    other.close()
    with pytest.raises(holdfast.Error, match="closed"):
        other.save_async(big, 3)
    checkpointer.close()
    assert [c["step"] for c in holdfast.list_checkpoints(tmp_path, format=format)] == [1]


def kill_worker() -> None:
    from holdfast import handle

    (save,) = [s for s in handle.in_flight() if isinstance(s, handle.Save)]
    while save.progress()["phase"] != "writing":
        pass
    os.kill(save._native.worker_pid, 9)


@formats
def test_the_error_of_a_with_block_is_the_one_that_leaves_it(
    format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError):
        with opened(tmp_path, format=format, bytes_per_second_max=MIB) as checkpointer:
            checkpointer.save_async({"w": torch.ones(4 * MIB)}, 1)
            kill_worker()
            raise KeyError("loop")
    assert "close the checkpoints" in caplog.text


# ---- Options and memory.


def test_two_checkpointers_share_no_options(tmp_path: Path) -> None:
    with opened(tmp_path, name="a-{step}", engine="pwrite", launcher="thread") as one, opened(
        tmp_path, name="b-{step}", arena_bytes=2 * ARENA
    ) as two:
        reports = one.save(state(1.0), 1), two.save(state(2.0), 1)
        assert [r["engine"] for r in reports][0] == "pwrite" != reports[1]["engine"]
        assert [r["launcher"] for r in reports] == ["thread", "spawn"]
        assert (one.staging()["arena_bytes"], two.staging()["arena_bytes"]) == (ARENA, 2 * ARENA)
        assert [c["name"] for c in one.list()] == ["a-1"]
    assert one.staging() == {}, "the memory is held by a closed Checkpointer"


def test_staging_memory_is_shared_where_it_is_said(tmp_path: Path) -> None:
    with opened(tmp_path) as owner:
        with holdfast.Checkpointer(tmp_path / "b", share_memory_with=owner, engine="pwrite") as guest:
            assert guest.save(state(1.0), 1)["engine"] == "pwrite"
            assert owner.save(state(2.0), 1)["engine"] != "pwrite"
            assert guest.staging()["arena_bytes"] == owner.staging()["arena_bytes"] == ARENA
            assert guest.staging()["leases"] == owner.staging()["leases"] > 1
        owner.save(state(3.0), 2)  # the guest's end leaves the memory alone
        for options in ({"arena_bytes": ARENA}, {"launcher": "thread"}):
            with pytest.raises(ValueError, match=next(iter(options))):
                holdfast.Checkpointer(tmp_path, share_memory_with=owner, **options)
    with holdfast.Checkpointer(tmp_path / "c", share_memory_with="process") as checkpointer:
        checkpointer.save(state(1.0), 1)
        assert checkpointer.staging() == holdfast.staging() != {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_lsat": 3}, "keep_lsat"),
        ({"format": "zip"}, "zip"),
        ({"name": "{epoch}"}, "step"),
        ({"name": "a/{step}"}, "one name"),
        ({"name": "{step}-{step}"}, "one name"),
        ({"name": "step-{step}-v2"}, "digit"),
        ({"name": ""}, "one name"),
        ({"name": "."}, "one name"),
        ({"engine": "steam"}, "steam"),
        ({"format": "dcp", "objects": "refuse"}, "objects"),
        ({"process_group": object()}, "process_group"),
        ({"share_memory_with": "everyone"}, "share_memory_with"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        holdfast.Checkpointer(tmp_path, **options)
    assert isinstance(error.value, holdfast.Error) and error.value.code == "INVALID_ARGUMENT"


def test_bad_arguments_of_a_save_are_named(tmp_path: Path) -> None:
    with opened(tmp_path) as checkpointer:
        for arguments in ({"name": "a/b"}, {"name": ""}, {"name": "."}, {"name": ".."}, {"kepe": 1}, {"keep_last": 1}):
            with pytest.raises(ValueError, match=next(iter(arguments))):
                checkpointer.save_async(state(1.0), 1, **arguments)
    assert os.listdir(tmp_path) == []


@formats
def test_a_checkpoint_is_no_directory_of_checkpoints(format: str, tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, format=format) as checkpointer:
        checkpointer.save({"w": torch.ones(3)}, 1)
    with pytest.raises(holdfast.Error, match=f"step-1 is a checkpoint; .* {tmp_path} ") as error:
        holdfast.Checkpointer(tmp_path / "step-1", format=format)
    assert error.value.code == "FAILED_PRECONDITION"


def test_options_of_a_save_are_defaults(tmp_path: Path) -> None:
    with opened(tmp_path, objects="refuse") as checkpointer:
        with pytest.raises(ValueError, match="refuse"):
            checkpointer.save_async({"o": object}, 1)
        checkpointer.save({"o": object}, 1, objects="pickle")


_FORKED = """
import os, sys, torch, holdfast
checkpointer = holdfast.Checkpointer(sys.argv[1], arena_bytes=64 << 20, bytes_per_second_max=64 << 10)
save = checkpointer.save_async({"w": torch.ones(8 << 20)}, 1)
pid = os.fork()
if pid == 0:
    checkpointer.wait(10)
    checkpointer.save({"w": torch.ones(10)}, 2)
    os._exit(0 if checkpointer.newest()["step"] == 2 else 1)
assert os.waitpid(pid, 0)[1] == 0
save.cancel()
checkpointer.wait(60)  # neither this nor the exit counts it as a failure
print(save.durable.done(), save.report)
"""


def test_a_forked_child_saves_and_does_not_wait_for_the_parent(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _FORKED, str(tmp_path)], capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True None\n"), done.stderr


# ---- DCP directories.


def dcp_names(directory: Path) -> list[str]:
    return [c["name"] for c in holdfast.list_checkpoints(directory, format="dcp")]


def test_stock_checkpoints_are_listed_and_loaded(tmp_path: Path) -> None:
    dcp.save(state(1.0), checkpoint_id=tmp_path / "step-1")
    with opened(tmp_path, format="dcp", keep_last=1) as checkpointer:
        assert value_of(checkpointer) == 1.0
        checkpointer.save(state(2.0), 2)
        # A stock save over ours leaves our record behind.
        dcp.save(state(3.0), checkpoint_id=tmp_path / "step-2")
        last = checkpointer.newest()
        assert last is not None and (last["step"], last["attempt"]) == (2, "")
        assert value_of(checkpointer) == 3.0
        checkpointer.save(state(4.0), 3)
        checkpointer.wait(60)
    assert os.listdir(tmp_path) == ["step-3"]


def test_what_is_incomplete_or_damaged_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, format="dcp") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(float(step)), step)
        (tmp_path / "step-3" / ".metadata").unlink()
        damaged = tmp_path / "step-2" / ".metadata"
        damaged.write_bytes(damaged.read_bytes().replace(b"torch.float32", b"torch.float64", 1)[:-1])
        with caplog.at_level(logging.WARNING):
            assert dcp_names(tmp_path) == ["step-1"]
        assert "step-2" in caplog.text and "step-3" not in caplog.text
        assert value_of(checkpointer) == 1.0
    with pytest.raises(FileNotFoundError):
        holdfast.find_newest(tmp_path / "step-1", format="dcp")
    assert holdfast.newest(tmp_path / "none", format="dcp") is None


def test_retention_takes_no_directory_into_which_a_save_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was rolled back saves its steps again, while the retention of the save before goes on."""
    begin = holdfast.dcp.StorageWriter.begin
    with opened(tmp_path, format="dcp", keep_last=2, replace=True) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(state(float(step)), step)
        checkpointer.wait(60)
        before = checkpointer.save_async(state(4.0), 4)

        def after_the_retention(self: Any, *arguments: Any, **options: Any) -> Any:
            before.wait(60)
            checkpointer.wait(60)
            return begin(self, *arguments, **options)

        monkeypatch.setattr(holdfast.dcp.StorageWriter, "begin", after_the_retention)
        checkpointer.save(state(5.0), 2)
        assert value_of(checkpointer, 2) == 5.0


def test_a_directory_that_another_process_removes_in_the_call_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = holdfast.dcp.StorageWriter.begin

    def removed(self: Any, *arguments: Any, **options: Any) -> Any:
        shutil.rmtree(self.path)
        return begin(self, *arguments, **options)

    with opened(tmp_path, format="dcp", replace=True) as checkpointer:
        checkpointer.save(state(1.0), 1)
        monkeypatch.setattr(holdfast.dcp.StorageWriter, "begin", removed)
        checkpointer.save(state(2.0), 1)
        assert value_of(checkpointer, 1) == 2.0


def test_foreign_files_keep_a_dcp_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, format="dcp", keep_last=1) as checkpointer:
        checkpointer.save(state(1.0), 1)
        (tmp_path / "step-1" / "config.json").write_text("precious")
        with caplog.at_level(logging.WARNING):
            checkpointer.save(state(2.0), 2)
            checkpointer.wait(60)
        assert "config.json" in caplog.text
        assert value_of(checkpointer, 1) == 1.0
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]


def test_a_removal_that_a_crash_ended_is_finished(tmp_path: Path) -> None:
    attempt = _native.new_attempt()
    with opened(tmp_path, format="dcp", keep_last=1) as checkpointer:
        checkpointer.save(state(1.0), 1)
        checkpointer.wait(60)  # the first save's removals would end this one too
        left = tmp_path / f".step-1.retired-{attempt}"
        os.rename(tmp_path / "step-1", left)
        (left / ".metadata").unlink()
        other = tmp_path / f".other-1.retired-{attempt}"
        shutil.copytree(left, other)
        plain = tmp_path / f".step-0.retired-{attempt}"
        plain.mkdir()
        (plain / "model-00000-of-00001.safetensors").write_bytes(b"x")
        assert dcp_names(tmp_path) == []
        checkpointer.save(state(2.0), 2)
        checkpointer.wait(60)
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, plain.name, "step-2"])
    # A recovery ends those of all series, and completes none.
    assert holdfast.recover(tmp_path, promote=True, clean_up=False)["promoted"] == []
    report = holdfast.recover(tmp_path)
    assert report["removed"] == [other.name] and report["promoted"] == []
    assert [kept.partition(": ")[0] for kept in report["kept_incomplete"]] == [plain.name]


def test_a_crash_in_a_removal_leaves_no_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of the removal fails once: what is listed afterwards loads."""
    calls = ("rename", "unlink", "rmdir", "stat")
    for name in calls:
        for count in range(1, 4):
            run = tmp_path / f"{name}-{count}"
            with opened(run, format="dcp") as checkpointer:
                for step in (1, 2):
                    checkpointer.save(state(float(step)), step)
                with monkeypatch.context() as patched:
                    fail_from(patched, name, count)
                    with contextlib.suppress(OSError):
                        _dcp_directories.remove_old(str(run), "step-2", 1, 0, ())
                listed = checkpointer.list()
                assert "step-2" in [c["name"] for c in listed]
                for found in listed:
                    assert holdfast.dcp.verify(found["path"])["verdict"] == "sound"
                    assert value_of(checkpointer, found["step"]) == found["step"]
                _dcp_directories.remove_old(str(run), "step-2", 1, 0, ())
            assert os.listdir(run) == ["step-2"]


def test_retention_goes_on_where_another_removal_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that behind the save before, whose thread is still at it."""
    with opened(tmp_path, format="dcp") as checkpointer:
        for step in range(1, 5):
            checkpointer.save(state(float(step)), step)
    real, gone = os.rename, ["step-2", "step-1"]

    def late(source: Any, *of: Any) -> None:
        while gone:
            shutil.rmtree(tmp_path / gone.pop())
        real(source, *of)

    monkeypatch.setattr(os, "rename", late)
    _dcp_directories.remove_old(str(tmp_path), "step-4", 1, 0, ())
    assert os.listdir(tmp_path) == ["step-4"]


@pytest.mark.parametrize("ends", [True, False])
def test_retention_waits_for_the_lock_of_an_ended_worker(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dcp_directories, "_ENDING_SECONDS", 20.0 if ends else 0.2)
    with opened(tmp_path, format="dcp") as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(float(step)), step)
    # The byte of the lock "in use", as the ring of a worker that has ended still holds it.
    fd = os.open(tmp_path / "step-1", os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 1, 1, 0))
    closing = threading.Timer(0.3, os.close, [fd])
    if ends:
        closing.start()
    _dcp_directories.remove_old(str(tmp_path), "step-2", 1, 0, ())
    assert sorted(os.listdir(tmp_path)) == (["step-2"] if ends else ["step-1", "step-2"])
    if ends:
        closing.join()
    else:
        os.close(fd)


def fail_from(patched: pytest.MonkeyPatch, name: str, count: int) -> None:
    """From its call `count` on a function of `os` fails."""
    real, calls = getattr(os, name), 0

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= count:
            raise OSError(5, "Input/output error")
        return real(*arguments, **options)

    patched.setattr(_dcp_directories.os, name, failing)


def _ranks_save_and_resume(rank: int, directory: str, format: str) -> list[Any]:
    run = Path(directory) / "run"
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(value: float) -> dict[str, Any]:
        return {"w": distribute_tensor(torch.full((10, 3), value), mesh, [Shard(0)])}

    with holdfast.Checkpointer(run, format=format, keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            save = checkpointer.save_async(sharded(float(step)), step)
            if format == "holdfast":  # otherwise step-1 may be the last to be committed, and stays
                save.wait(60)
        checkpointer.wait(60)
        dist.barrier()
        names = sorted(os.listdir(run))
        loaded = checkpointer.load(into=sharded(0.0))
        value = float(loaded["w"].full_tensor().mean())
        missing = False
        try:
            checkpointer.load(77, into=sharded(0.0))
        except FileNotFoundError as error:
            missing = "step-77" in str(error)
        shutil.rmtree(run, ignore_errors=True)
        dist.barrier()
        try:
            checkpointer.load(into=sharded(0.0))
        except FileNotFoundError:
            return [names, value, missing]
    return []


@formats
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_save_resume_and_remove(format: str, world_size: int, tmp_path: Path) -> None:
    answers = dcp_ranks.run_ranks(world_size, tmp_path, _ranks_save_and_resume, str(tmp_path), format)
    assert answers == [[["step-2", "step-3"], 3.0, True]] * world_size


@formats
def test_a_load_that_finds_nothing_names_what_was_passed_over(tmp_path: Path, format: str) -> None:
    with opened(tmp_path / "run", format=format) as checkpointer:
        with pytest.raises(holdfast.Error, match=r"there is no complete checkpoint \["):
            checkpointer.load(into=state(0.0))
        checkpointer.save(state(1.0), 1)
        data = next(file for file in (tmp_path / "run" / "step-1").iterdir() if file.suffix in (".safetensors", ".distcp"))
        os.truncate(data, 100)
        with pytest.raises(holdfast.Error, match=r"there is no complete checkpoint; passed over step-1: .*100 (of|bytes)"):
            checkpointer.load(into=state(0.0))


@formats
def test_retention_follows_no_link(tmp_path: Path, format: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "shared", format=format) as checkpointer:
        checkpointer.save(state(1.0), 0)
    base, run = tmp_path / "shared" / "step-0", tmp_path / "run"
    held = sorted(os.listdir(base))
    run.mkdir()
    (run / "step-0").symlink_to(base)
    holdfast.load(run / "step-0", into=state(0.0)) if format == "holdfast" else holdfast.dcp.load(state(0.0), checkpoint_id=run / "step-0")
    with opened(run, format=format, keep_last=1) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(state(float(step)), step)
        checkpointer.flush()
        assert [c["name"] for c in checkpointer.list()] == ["step-30"]
    assert f"passed over step-0, a link to a checkpoint at {base}" in caplog.text
    (run / "latest").symlink_to("step-30")
    assert holdfast.find_newest(run, format=format)["name"] == "step-30" and "passed over latest" not in caplog.text
    holdfast.recover(run)
    assert sorted(os.listdir(run)) == ["latest", "step-0", "step-30"]
    assert sorted(os.listdir(base)) == held


def test_a_removal_refuses_a_link_that_has_taken_a_checkpoints_place(tmp_path: Path) -> None:
    with opened(tmp_path, format="dcp") as checkpointer:
        checkpointer.save(state(1.0), 1)
        (old,) = checkpointer.list()
    moved = tmp_path / "elsewhere"
    os.rename(old["path"], moved)
    os.symlink(moved, old["path"])
    with pytest.raises(holdfast.Error, match="step-1 is no file of a DCP checkpoint"):
        _dcp_directories._retire(str(tmp_path), old)
    with pytest.raises(holdfast.Error, match="remove"):
        _dcp_directories._remove(old["path"])
    assert holdfast.dcp.verify(moved)["verdict"] == "sound"


@pytest.mark.parametrize("form", ["step-{step:,}", "step-{step:_}", "{step:x}", "{step:o}", "{step:>8}", "{step:+}", "{step:e}"])
def test_a_name_without_the_decimal_step_is_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="would not be found again") as refused:
        holdfast.Checkpointer(tmp_path, name=form)
    assert refused.value.code == "INVALID_ARGUMENT"
