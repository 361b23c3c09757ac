"""What saves through DCP that have failed or were killed leave: nothing, at the latest after a recovery."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from command_line import holdfast as command

import holdfast
import holdfast.dcp
from holdfast import _completion, _native, events, handle, recovery
from holdfast.dcp import uploads
from holdfast.errors import of_system

pytestmark = pytest.mark.filterwarnings("ignore")

MANIFEST = f"rank-00000-of-00002-{'0a' * 16}.manifest.json"
FAILURES = (dcp.api.CheckpointException, holdfast.Error)


def _state(rank: int, step: int) -> dict[str, Any]:
    return {f"w.{rank}": torch.full((1000,), float(step)), "both": torch.full((4,), float(step))}


def _names(directory: str | Path) -> list[str]:
    return sorted(os.listdir(directory))


def _fail_now_and_then(rank: int, directory: str) -> None:
    with holdfast.Checkpointer(directory, format="dcp", keep_last=1) as checkpointer:
        for step in range(1, 9):
            state = _state(rank, step)
            if step in (2, 4) and rank == 1:
                state["lock"] = threading.Lock()  # cannot be pickled
            if step == 5:
                state["both"] += rank
            with pytest.raises(FAILURES) if step in (2, 4, 5) else contextlib.nullcontext():
                checkpointer.save(state, step, replicas="refuse")
        checkpointer.flush()
        dist.barrier()
        assert _names(directory) == ["step-8"]
        dist.barrier()
        missed = checkpointer.save_async(_state(rank, 9), 9) if rank == 0 else None  # the other rank leaves this call out
        checkpointer.save_async(_state(rank, 10), 10).wait()
        if missed is not None:
            with pytest.raises(FAILURES):
                missed.wait()
        checkpointer.flush()
        dist.barrier()
        assert _names(directory) == ["step-10"]


def test_a_save_that_fails_on_all_ranks_leaves_nothing(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _fail_now_and_then, str(tmp_path / "run"))


def _fail_first(rank: int, directory: str) -> None:
    """The first save is planned together, and the coordinator has taken names by then."""
    for failing in range(2):
        state = {**_state(rank, 1), f"own.{rank}": threading.Lock() if rank == failing else 1}
        for step, options in enumerate(({}, {"use_collectives": False}, {"no_dist": True})):
            with pytest.raises(FAILURES) if rank == failing or not options else contextlib.nullcontext():
                # Without the other ranks each has metadata of its own.
                name = f"{failing}.{step}" + f".{rank}" * bool(options)
                holdfast.dcp.save(state, checkpoint_id=Path(directory, name), **options)
        with pytest.raises(FAILURES) if rank == failing else contextlib.nullcontext():
            writer = holdfast.dcp.StorageWriter(Path(directory, f"{failing}.stock.{rank}"))
            dcp.save(state, storage_writer=writer, no_dist=True)
    dist.barrier()
    assert _names(directory) == sorted(f"{f}.{step}.{1 - f}" for f in range(2) for step in (1, 2, "stock"))


def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _fail_first, str(tmp_path / "run"))


def _rename_what_is_saved(rank: int, directory: str) -> None:
    """Between this rank's data and the commit: the other rank calls later."""
    path = Path(directory, "step-2")
    holdfast.dcp.save(_state(rank, 1), checkpoint_id=path.with_name("step-1"))
    if rank == 0:
        future = holdfast.dcp.async_save(_state(rank, 2), checkpoint_id=path)
        while not list(path.glob("rank-00000-*.manifest.json")):
            time.sleep(0.01)
    dist.barrier()
    if rank == 1:
        reduce = uploads.Exchange.reduce

        def late(*of: Any) -> Any:
            path.rename(path.with_name("moved"))
            return reduce(*of)

        uploads.Exchange.reduce = late  # type: ignore[method-assign, assignment]
        future = holdfast.dcp.async_save(_state(rank, 2), checkpoint_id=path)
    assert "lock it: the directory was renamed or removed during the save; save again" in str(future.exception(60))
    dist.barrier()
    if rank == 0:
        assert holdfast.recover(directory)["promoted"] == ["moved"]


def test_a_save_whose_directory_is_renamed_says_so(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _rename_what_is_saved, str(tmp_path / "run"))


@pytest.mark.parametrize("behind", ["mkdir", "fstat"])
def test_a_save_that_is_interrupted_behind_a_system_call_leaves_nothing(behind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "step-1", getattr(os, behind)

    def interrupted(of: Any, *more: Any) -> Any:
        result = real(of, *more)
        if str(path) in (os.readlink(f"/proc/self/fd/{of}") if behind == "fstat" else os.fspath(of)):
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(os, behind, interrupted)
        codes: list[str] = []
        with events.Handle(lambda subject, report, error: codes.append(error.code)):
            with pytest.raises(KeyboardInterrupt):
                holdfast.dcp.save(_state(0, 1), checkpoint_id=path, no_dist=True)
            holdfast.flush()
    assert codes == ["CANCELLED"]
    assert _names(tmp_path) == []
    holdfast.dcp.save(_state(0, 1), checkpoint_id=path, no_dist=True)


def _interrupted_calls(rank: int, directory: str) -> list[str]:
    """Ctrl-C of rank 1 around each step by which an upload gets under way; what became of the saves, and of each next one."""
    steps: list[tuple[Any, str]] = [
        (uploads.Line, "joined"), (events, "begin"), (handle, "begun"), (_completion.Completion, "start"),
        (_completion._Thread, "start"), (uploads.Upload, "__init__"),
    ]  # fmt: skip
    holdfast.dcp.save(_state(rank, 0), checkpoint_id=f"{directory}/0")
    outcomes = []
    for number, (of, name) in enumerate([step for step in steps for _ in "ab"]):
        real, is_before = getattr(of, name), number % 2 == 0

        def interrupted(*what: Any, of: Any = of, name: str = name, real: Any = real, is_before: bool = is_before, **named: Any) -> Any:
            is_own = of is not _completion._Thread or what[0].name == "holdfast-dcp-finish"
            is_own = is_own and (of is not _completion.Completion or what[0]._thread.name == "holdfast-dcp-finish")
            is_own = is_own and (of not in (events, handle) or isinstance(what[0], uploads.Upload))
            if is_own:
                setattr(of, name, real)
            if is_own and is_before:
                raise KeyboardInterrupt
            result = real(*what, **named)
            if is_own:
                raise KeyboardInterrupt
            return result

        outcome = ""
        if rank == 1:
            setattr(of, name, interrupted)
        try:
            future = holdfast.dcp.async_save(_state(rank, number), checkpoint_id=f"{directory}/{name}-{number}")
            outcome = str(future.exception(30) or "")
        except KeyboardInterrupt:
            outcome = "interrupted"
        after = holdfast.dcp.async_save(_state(rank, number), checkpoint_id=f"{directory}/after-{number}")
        outcomes += [outcome, str(after.exception(30) or "")]
        holdfast.flush(30)
    assert not events.in_flight() and not handle.in_flight()
    return outcomes


def test_an_interrupt_while_an_upload_starts_blocks_no_later_save(tmp_path: Path) -> None:
    one, two = dcp_ranks.run_ranks(2, tmp_path, _interrupted_calls, str(tmp_path / "run"))
    assert two == ["interrupted", ""] * 12 and one == [""] * 24  # the save goes on
    for number in range(12):
        assert holdfast.dcp.verify(tmp_path / "run" / f"after-{number}")["verdict"] == "sound"


def _fail_beside_files(rank: int, directory: str) -> None:
    path = Path(directory)
    holdfast.dcp.save(_state(rank, 1), checkpoint_id=path / "older")
    before = _names(path / "older")
    dist.barrier()  # behind it the other rank writes again
    for name in ("older", "own", "empty"):
        state = {**_state(rank, 2), "lock": threading.Lock() if rank == 0 else 1}
        with pytest.raises(FAILURES):
            holdfast.dcp.save(state, checkpoint_id=path / name)
        dist.barrier()
    found = [_names(path / name) for name in ("older", "own", "empty")]
    assert found == [before, ["notes.txt"], []], (found, before)  # without pytest's own explanation in this process
    verdict = holdfast.dcp.verify(path / "older")
    assert verdict["verdict"] == "sound", verdict
    # The failing rank may be back before the others have learnt of the failure.
    for _ in range(5):
        with pytest.raises(FAILURES):
            holdfast.dcp.save(state, checkpoint_id=path / "new")
        holdfast.dcp.save(_state(rank, 3), checkpoint_id=path / "new")
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path / "new")
        dist.barrier()


def test_what_is_not_of_the_save_that_fails_stays(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    dcp_ranks.run_ranks(2, tmp_path, _fail_beside_files, str(tmp_path))


class _TwoArguments(Exception):
    """Pickled, and copied, it cannot be made anew."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class _WithLock(Exception):
    """It cannot be pickled."""

    def __init__(self, *of: str) -> None:
        super().__init__(*of)
        self.lock = threading.Lock()


class _Failing:
    failure: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        return {"x": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _fail_by_what_cannot_be_sent(rank: int, directory: str) -> None:
    module = _Failing()
    state = {"module": module, **_state(rank, 1)}
    is_first = True  # this one is planned together
    for failure, failing in ((f, r) for f in (_TwoArguments("no", "quota"), _WithLock("no quota")) for r in range(2)):
        module.failure = failure if rank == failing else None
        with pytest.raises((*FAILURES, type(failure))) as failed:
            holdfast.dcp.save(state, checkpoint_id=f"{directory}/failed")
        raised: Any = failed.value
        assert isinstance(raised, type(failure)) == (rank == failing and not is_first), repr(raised)
        if isinstance(raised, dcp.api.CheckpointException):
            assert "no quota" in str(raised.failures[failing][0])
        module.failure, is_first = None, False
        holdfast.dcp.save(state, checkpoint_id=f"{directory}/step-1")


def test_a_failure_that_cannot_be_pickled_reaches_the_other_ranks(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _fail_by_what_cannot_be_sent, str(tmp_path), timeout=10)


def _save_by_the_framework(rank: int, directory: str) -> None:
    path, writers = Path(directory), []
    for name, what in (("step-1", 1), ("step-2", 1), ("failed", threading.Lock() if rank == 1 else 1)):
        writers.append(holdfast.dcp.StorageWriter(path / name))
        with pytest.raises(FAILURES) if name == "failed" else contextlib.nullcontext():
            dcp.save({**_state(rank, 1), f"object.{rank}": what}, storage_writer=writers[-1])
        if name == "failed":
            gc.collect()  # the framework's exception has its own frame
        dist.barrier()
        end = time.monotonic() + 10  # a worker's lock may live for a moment
        while rank == 0 and (at_work := _native.saves_at_work(str(path / name))) != "none":
            assert time.monotonic() < end, (name, at_work)
            time.sleep(0.01)
        assert not any(name in link for link in map(os.path.realpath, Path("/proc/self/fd").iterdir()))
        dist.barrier()
    if rank == 0:
        assert holdfast.recover(path)["removed"] == ["failed"]


def test_a_writer_of_the_frameworks_save_does_not_outlive_it_as_a_save(tmp_path: Path) -> None:
    """The writer itself may be kept by its caller."""
    dcp_ranks.run_ranks(2, tmp_path, _save_by_the_framework, str(tmp_path / "run"))


def _on_disks_of_its_node(rank: int, directory: str) -> str:
    """One path that leads each rank to another directory."""
    node = Path(directory, f"node-{rank}")
    node.mkdir()
    os.chdir(node)
    with pytest.raises(FAILURES) as failed:
        holdfast.dcp.save(_state(rank, 1), checkpoint_id="/proc/self/cwd/step-1")
    return str(failed.value)


def test_ranks_that_do_not_see_one_directory_are_told(tmp_path: Path) -> None:
    for error in dcp_ranks.run_ranks(2, tmp_path, _on_disks_of_its_node, str(tmp_path)):
        assert "is gone: " in error and "on a file system that all of its ranks share" in error
    assert not any((tmp_path / f"node-{rank}" / "step-1" / ".metadata").exists() for rank in range(2))


_KILLED = """
import sys, torch, torch.distributed as dist, holdfast, holdfast.dcp
directory, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{directory}-store", rank=rank, world_size=2)
for step in (1, 2):
    if (step, rank) == (2, 1):
        holdfast.configure(bytes_per_second_max=1 << 18, trainer_death="stop")
    state = {f"w.{rank}": torch.full((4_000_000,), float(step))}
    future = holdfast.dcp.async_save(state, checkpoint_id=f"{directory}/step-{step}")
    if step == 1:
        future.result()
print("begun", flush=True)
future.result()
"""


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A directory whose trainers were killed when rank 0 was durable, and rank 1 was not."""
    directory = tmp_path / "run"
    ranks = [
        subprocess.Popen([sys.executable, "-B", "-W", "ignore", "-c", _KILLED, str(directory), str(rank)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == b"begun\n"
    end = time.monotonic() + 60
    while not list((directory / "step-2").glob("rank-00000-*.manifest.json")) and time.monotonic() < end:
        time.sleep(0.01)
    # Its trainers live, and no worker of rank 0 does.
    assert holdfast.recover(directory, wait_for_orphans=0)["kept_incomplete"] == ["step-2: a save is running there"]
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
        rank.communicate()
    return directory


def test_a_recovery_removes_what_killed_ranks_have_left(killed: Path) -> None:
    (left,) = (killed / "step-2").glob("__0_*.distcp")
    left.unlink()  # as by a recovery that was killed
    report = _recovered(killed)
    assert report["removed"] == ["step-2"] and report["kept_incomplete"] == []
    assert [c["name"] for c in report["complete"]] == _names(killed) == ["step-1"]
    assert holdfast.recover(killed)["removed"] == []
    assert command("verify", killed).status == 0


def test_a_recovery_keeps_a_data_file_that_another_program_has_written_anew(killed: Path) -> None:
    """The framework's own writer takes the same name."""
    (left,) = (killed / "step-2").glob("__0_*.distcp")
    data = left.read_bytes()
    for other in (bytes([data[0] ^ 1]) + data[1:], data[:-1] + bytes([data[-1] ^ 1]), data[:-1], b""):
        left.write_bytes(other)
        (why,) = _recovered(killed)["kept_incomplete"]
        assert why.startswith(f"step-2: nothing proves that {left.name} is of the save") and left.read_bytes() == other
    left.write_bytes(data)  # a copy, as of a backup: it is newer than its manifest
    assert _recovered(killed)["removed"] == ["step-2"]


def _recovered(directory: Path) -> dict[str, Any]:
    """The report of a recovery; the lock of a worker that was stopped may live for a moment."""
    end = time.monotonic() + 60
    while (report := holdfast.recover(directory))["kept_incomplete"] == ["step-2: a save is running there"] and time.monotonic() < end:
        time.sleep(0.1)
    return report


@pytest.fixture
def left_over(tmp_path: Path) -> Path:
    """The directory of a killed save."""
    path = tmp_path / "run" / "step-2"
    path.mkdir(parents=True)
    for name in (MANIFEST, "__0_0.distcp.tmp"):
        (path / name).touch()
    return path


def test_a_recovery_says_what_it_cannot_remove(left_over: Path) -> None:
    (left_over / MANIFEST).write_text('{"files": [{"name": "__0_0.distcp"}]}')
    (left_over / "__0_0.distcp").symlink_to("/etc/hostname")
    report = holdfast.recover(left_over.parent)
    (why,) = report["kept_incomplete"]
    assert why.startswith("step-2: it cannot be removed: ") and "__0_0.distcp" in why and report["removed"] == []
    assert len(_names(left_over)) == 3


def test_a_save_that_begins_while_a_recovery_looks_keeps_its_files(left_over: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves, real = [], os.listdir
    state = {"w": torch.ones(2_000_000)}

    def slow(path: Any = ".") -> list[str]:
        if isinstance(path, int) and not saves:
            saves.append(checkpointer.save_async(state, 2))
        return real(path)

    with holdfast.Checkpointer(left_over.parent, format="dcp", bytes_per_second_max=1 << 22) as checkpointer:
        monkeypatch.setattr(os, "listdir", slow)
        report = holdfast.recover(left_over.parent)
        assert (report["removed"], report["kept_incomplete"]) == ([], ["step-2: a save is running there"])
        saves[0].wait(60)
    assert holdfast.dcp.verify(left_over)["verdict"] == "sound"


def test_a_save_whose_directory_a_recovery_removes_makes_it_anew(left_over: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed, real = [], os.open

    def late(path: Any, *of: Any, **by: Any) -> int:
        if str(path) == str(left_over) and not removed:
            removed.append(None)  # the recovery opens it, too
            removed[:] = holdfast.recover(left_over.parent)["removed"]
        return real(path, *of, **by)

    monkeypatch.setattr(os, "open", late)
    holdfast.dcp.save({"w": torch.ones(10)}, checkpoint_id=left_over)
    assert removed == ["step-2"] and holdfast.dcp.verify(left_over)["verdict"] == "sound"


def _late_rank(rank: int, directory: str) -> None:
    """One rank has written all that it has, and the other one has not called yet."""
    holdfast.dcp.save(_state(rank, 1), checkpoint_id=f"{directory}/step-1")
    if rank == 0:
        future = holdfast.dcp.async_save(_state(rank, 2), checkpoint_id=f"{directory}/step-2")
        while not list(Path(directory, "step-2").glob("rank-00000-*.manifest.json")):
            time.sleep(0.01)
        time.sleep(0.2)  # beyond the end of the worker's part
        recovered = command("recover", "--json", directory).json
        assert recovered["removed"] == [] and recovered["kept"] == ["step-2: a save is running there"]
    dist.barrier()
    if rank == 1:
        future = holdfast.dcp.async_save(_state(rank, 2), checkpoint_id=f"{directory}/step-2")
    future.result(60)


def test_a_save_whose_other_rank_is_late_is_no_failed_one(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _late_rank, str(tmp_path / "run"))
    assert [c["name"] for c in holdfast.recover(tmp_path / "run")["complete"]] == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["__0_0.distcp.tmp"], ""),
        ([MANIFEST], ""),
        ([MANIFEST + ".tmp", "__0_0.distcp.tmp"], ""),
        (["__0_0.distcp"], None),  # the framework's own writer may be at work
        ([], None),
        (["notes.txt"], None),
        ([".metadata.tmp"], None),
        (["notes.txt", MANIFEST], "notes.txt"),
        (["__0_0.distcp", MANIFEST], "__0_0.distcp"),
        ([MANIFEST, MANIFEST.replace("00002", "00001")], "all manifests are there, and rank-00000"),
        ([MANIFEST, "__0.metadata"], None),
    ],
)
def test_a_recovery_removes_only_what_is_proven(files: list[str], reason: str | None, tmp_path: Path) -> None:
    path = tmp_path / "run" / "step-1"
    path.mkdir(parents=True)
    for name in files:
        (path / name).touch()
    dry = holdfast.recover(path.parent, promote=False, clean_up=False)
    assert dry["removed"] == [] and _names(path) == sorted(files)
    if reason == "":
        assert dry["kept_incomplete"] == ["step-1: incomplete"]
    report = holdfast.recover(path.parent)
    assert report["removed"] == (["step-1"] if reason == "" else [])
    assert path.exists() == (reason != "") and (reason == "" or _names(path) == sorted(files))
    assert [entry.startswith("step-1: ") and (reason or "-") in entry for entry in report["kept_incomplete"]] == [True] * bool(reason)


def test_a_directory_that_is_removed_again_and_again_is_made_anew(tmp_path: Path) -> None:
    """As one that a file system of a network shows for some time after another rank has removed it."""
    path, removed = tmp_path / "run/step-1", 0
    writer = holdfast.dcp.StorageWriter(path)
    writer.make_directory()

    def act() -> str:
        nonlocal removed
        if removed < 4:
            removed += 1
            shutil.rmtree(path)
        with of_system("take a name"), open(path / "name", "xb"):
            return "taken"

    assert writer.in_directory(act) == "taken" and removed == 4
    writer.leave()


def test_a_recovery_goes_on_where_a_directory_goes_or_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for name in ("a-1", "b-1", "c-1"):  # as of a job that was killed before its last step
        holdfast.dcp.save(_state(0, 1), checkpoint_id=run / name, no_dist=True)
        (run / name / ".metadata").unlink()
    (manifest,) = (run / "b-1").glob("*.manifest.json")
    manifest.write_text("{")
    listed = recovery._uncommitted_dcp

    def removed_then(path: str) -> list[str]:
        names = listed(path)
        shutil.rmtree(run / "a-1")  # by the retention of a running job
        return names

    monkeypatch.setattr(recovery, "_uncommitted_dcp", removed_then)
    report = holdfast.recover(run)
    assert report["promoted"] == ["c-1"]
    assert [why.partition(":")[0] for why in report["kept_incomplete"]] == ["b-1"]
    assert sorted(os.listdir(run)) == ["b-1", "c-1"]
