"""A DCP checkpoint appears whole or not at all, also over an older one, and leaves no rubbish."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from faults import file_size_limit
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import holdfast
import holdfast.dcp
from holdfast import events, handle
from holdfast.dcp import metadata as dcp_metadata
from holdfast.dcp import placement, staging
from holdfast.observe.chrome_trace import spans

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"weight": torch.randn(64, 33, generator=generator), "empty": torch.zeros(0, 3)},
        "step": seed,
    }


def load(path: Path, reader: Any = None) -> dict[str, Any]:
    state = {"model": {"weight": torch.zeros(64, 33), "empty": torch.zeros(0, 3)}, "step": -1}
    dcp.load(state, storage_reader=reader or holdfast.dcp.StorageReader(path))
    return state


def seed_of(path: Path) -> int:
    """The seed of the state that a checkpoint holds, all of it."""
    state = load(path)
    expected = state_of(state["step"])
    assert torch.equal(state["model"]["weight"], expected["model"]["weight"])
    report = holdfast.dcp.verify(path)
    assert report["verdict"] == "sound", report
    return state["step"]


def files(path: Path) -> list[str]:
    return sorted(p.name.split("-")[0] for p in path.iterdir())


def test_overwriting_uses_new_files_and_deletes_the_old_ones_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run-10"
    for seed in range(3):
        if seed:
            older = set(os.listdir(path))
            commit = dcp_metadata.commit

            def look(directory: Path, *of: Any, older: Any = older, do: Any = commit) -> None:
                # The older checkpoint is untouched, the newer one's data there in full.
                there = set(os.listdir(directory))
                assert older <= there
                assert any(n.endswith(".distcp") for n in there - older)
                assert not any(n.endswith(".tmp") for n in there)
                do(directory, *of)

            monkeypatch.setattr(dcp_metadata, "commit", look)
        dcp.save(state_of(seed), storage_writer=holdfast.dcp.StorageWriter(path))
        monkeypatch.undo()
        assert seed_of(path) == seed
        assert files(path) == [".metadata", f"__0_{seed}.distcp", "holdfast.commit", "rank"]


def test_overwriting_the_stock_writers_checkpoint_removes_its_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    dcp.save(state_of(1), storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False))
    (path / "mine.txt").write_text("stays")
    dcp.save(state_of(2), storage_writer=holdfast.dcp.StorageWriter(path))
    assert files(path) == [".metadata", "__0_3.distcp", "holdfast.commit", "mine.txt", "rank"]
    assert seed_of(path) == 2


def test_overwriting_can_be_forbidden(tmp_path: Path) -> None:
    path = tmp_path / "run"
    dcp.save(state_of(1), storage_writer=holdfast.dcp.StorageWriter(path))
    with pytest.raises(CheckpointException, match="ALREADY_EXISTS"):
        dcp.save(state_of(2), storage_writer=holdfast.dcp.StorageWriter(path, overwrite=False))
    assert seed_of(path) == 1


def _save_with_holdfast(path: Path) -> None:
    holdfast.dcp.async_save(state_of(2), checkpoint_id=path).result(60)


def _save_with_the_framework(path: Path) -> None:
    dcp.save(state_of(2), storage_writer=holdfast.dcp.StorageWriter(path))


def _save_with_a_checkpointer(path: Path) -> None:
    with holdfast.Checkpointer(path.parent, format="dcp") as checkpointer:
        checkpointer.save(state_of(2), 10)


@pytest.mark.parametrize("save", [_save_with_holdfast, _save_with_the_framework, _save_with_a_checkpointer])
def test_a_plain_checkpoint_is_not_mixed_with_one_of_dcp(save: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "step-10"
    holdfast.save(state_of(1), path)
    before = sorted(p.name for p in path.iterdir())
    with pytest.raises((CheckpointException, FileExistsError), match="a plain Holdfast checkpoint is there"):
        save(path)
    assert sorted(p.name for p in path.iterdir()) == before
    assert holdfast.verify(path)["verdict"] == "sound"


def test_a_checkpoint_of_dcp_is_not_mixed_with_a_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "step-10"
    holdfast.dcp.save(state_of(1), checkpoint_id=path)
    before = sorted(p.name for p in path.iterdir())
    for replace in (False, True):
        with pytest.raises(holdfast.Error, match="ALREADY_EXISTS|no part of a checkpoint"):
            holdfast.save(state_of(2), path, replace=replace)
    assert sorted(p.name for p in path.iterdir()) == before
    assert seed_of(path) == 1


# ---- Crashes.

_STEPS = [
    "before commit", "before record", "before rename", "before sync", "before deletion",
    "within deletion",
]  # fmt: skip


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(path: str, seed: int, step: str) -> None:
    unlink, rename = os.unlink, os.rename
    if step == "before commit":
        dcp_metadata.commit = lambda *a: _die()  # type: ignore[assignment]
    elif step == "before record":
        os.rename = lambda *a, **k: _die()  # type: ignore[assignment]
    elif step == "before rename":
        os.rename = lambda a, b: _die() if str(b).endswith(".metadata") else rename(a, b)
    elif step == "before sync":
        os.rename = lambda a, b: (rename(a, b), _die() if str(b).endswith(".metadata") else None)
    elif step == "before deletion":
        os.unlink = lambda *a, **k: _die()  # type: ignore[assignment]
    elif step == "within deletion":
        os.unlink = lambda p, **k: (unlink(p, **k), _die())  # type: ignore[assignment]
    dcp.save(state_of(seed), storage_writer=holdfast.dcp.StorageWriter(path))


@pytest.mark.parametrize("step", _STEPS)
def test_a_crash_at_any_step_leaves_the_old_or_the_new_checkpoint(
    step: str, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    dcp.save(state_of(1), storage_writer=holdfast.dcp.StorageWriter(path))
    process = dcp_ranks.context.Process(target=_save_and_die, args=(str(path), 2, step))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    found = seed_of(path)
    assert found == (1 if step in _STEPS[:3] else 2)
    assert holdfast.verify(path)["verdict"] == "sound"
    dcp.save(state_of(3), storage_writer=holdfast.dcp.StorageWriter(path))
    assert seed_of(path) == 3
    assert len(files(path)) == 4, files(path)


def test_a_first_save_that_died_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = dcp_ranks.context.Process(target=_save_and_die, args=(str(path), 2, "before commit"))
    process.start()
    process.join(60)
    for check in (load, holdfast.dcp.verify):
        with pytest.raises((holdfast.Error, CheckpointException), match="never completed"):
            check(path)
    dcp.save(state_of(3), storage_writer=holdfast.dcp.StorageWriter(path))
    assert seed_of(path) == 3
    assert len(files(path)) == 4, files(path)


@pytest.mark.planted("same_file_names")
def test_without_sorting_out_names_a_crash_would_lose_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug of the test above: the same file names again."""
    path = tmp_path / "run"
    dcp.save(state_of(1), storage_writer=holdfast.dcp.StorageWriter(path))
    real = placement.choose

    def same(*args: Any) -> list[placement.Placement]:
        places = real(*args)
        for place in places:
            place.generation = 0
        return places

    monkeypatch.setattr(placement, "choose", same)
    # The runtime never renames over a file that is there: the save fails, nothing is lost.
    with pytest.raises(CheckpointException, match="it exists already"):
        dcp.save(state_of(2), storage_writer=holdfast.dcp.StorageWriter(path))
    assert seed_of(path) == 1


# ---- Asynchronous saves.


def test_cpu_tensors_are_captured_when_async_save_returns(tmp_path: Path) -> None:
    path = tmp_path / "run-5"
    state = state_of(4)
    future = holdfast.dcp.async_save(state, checkpoint_id=path)
    state["model"]["weight"].zero_()
    metadata = future.result()
    assert set(metadata.state_dict_metadata) == {"model.weight", "model.empty", "step"}
    assert seed_of(path) == 4


def test_a_stager_gets_both_futures_and_others_one(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    both = [holdfast.dcp.Stager(), DefaultStager(StagingOptions(False, False, True, False))]
    for i, stager in enumerate(both):
        path = tmp_path / f"both-{i}"
        response = holdfast.dcp.async_save(state_of(i), checkpoint_id=path, async_stager=stager)
        assert isinstance(response, AsyncSaveResponse)
        response.staging_completion.result()
        response.upload_completion.result()
        assert seed_of(path) == i
        stager.close()
    one = DefaultStager(StagingOptions(False, False, False, False))
    future = holdfast.dcp.async_save(state_of(7), checkpoint_id=tmp_path / "one", async_stager=one)
    future.result()
    assert seed_of(tmp_path / "one") == 7


def test_saves_of_one_writer_may_overlap_and_finish_in_order(tmp_path: Path) -> None:
    writer = holdfast.dcp.StorageWriter(tmp_path / "0")
    order = []
    futures = []
    for i in range(4):
        future = holdfast.dcp.async_save(
            state_of(i), checkpoint_id=tmp_path / str(i), storage_writer=writer
        )
        future.add_done_callback(lambda _, i=i: order.append(i))
        futures.append(future)
    for future in futures:
        future.result()
    assert order == [0, 1, 2, 3]
    assert [seed_of(tmp_path / str(i)) for i in range(4)] == [0, 1, 2, 3]


def test_overlapping_saves_into_one_directory_end_with_the_last(tmp_path: Path) -> None:
    path = tmp_path / "same"
    futures = [holdfast.dcp.async_save(state_of(i), checkpoint_id=path) for i in range(5)]
    for future in futures:
        future.result()
    assert seed_of(path) == 4
    assert len(files(path)) == 4, files(path)


def test_a_save_that_was_overtaken_does_not_replace_the_younger_one(tmp_path: Path) -> None:
    path = tmp_path / "same"
    gate, reached = threading.Event(), threading.Event()

    class Slow(holdfast.dcp.StorageWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            reached.set()
            assert gate.wait(60)
            return super().write_data(plan, planner)

    slow = dcp.async_save(state_of(1), storage_writer=Slow(path))
    assert reached.wait(60)
    dcp.save(state_of(2), storage_writer=holdfast.dcp.StorageWriter(path))
    gate.set()
    with pytest.raises(CheckpointException, match="ABORTED"):
        slow.result()
    assert seed_of(path) == 2
    dcp.save(state_of(3), storage_writer=holdfast.dcp.StorageWriter(path))
    assert seed_of(path) == 3
    assert len(files(path)) == 4, files(path)


def test_keeping_the_newest_checkpoints_as_torchtitan_does(tmp_path: Path) -> None:
    keep, pending = 2, None
    for step in range(1, 8):
        if pending is not None:
            pending.result()
        pending = holdfast.dcp.async_save(state_of(step), checkpoint_id=tmp_path / f"step-{step}")
        found = sorted(tmp_path.glob("step-*"), key=lambda p: int(p.name[5:]))
        complete = [p for p in found if (p / ".metadata").exists()]
        for old in complete[: -keep + 1]:
            shutil.rmtree(old)
    assert pending is not None
    pending.result()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step-6", "step-7"]
    assert [seed_of(tmp_path / name) for name in names] == [6, 7]


def test_flush_waits_for_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holdfast.dcp.async_save(state_of(1), checkpoint_id=path)
    holdfast.flush(60)
    assert seed_of(path) == 1


def test_the_metadata_never_comes_before_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    seen = []
    commit = dcp_metadata.commit

    def look(directory: Path, name: str, data: Any, *of: Any) -> None:
        assert not (directory / name).exists()
        for info in data.storage_data.values():
            assert (directory / info.relative_path).stat().st_size >= info.offset + info.length
        seen.append([f["file"] for f in holdfast.verify(directory)["faults"]])
        commit(directory, name, data, *of)

    monkeypatch.setattr(dcp_metadata, "commit", look)
    holdfast.dcp.async_save(state_of(1), checkpoint_id=path).result()
    assert seen == [[".metadata"]]  # all but that is there


def test_a_url_goes_to_the_framework_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="holdfast"):
        with pytest.raises(BaseException) as caught:
            result = holdfast.dcp.async_save({"a": 1}, checkpoint_id="nosuch://bucket/x")
            result.result()
    assert not isinstance(caught.value, holdfast.Error)
    lines = [r for r in caplog.records if r.name.startswith("holdfast")]
    assert len(lines) == 1 and "URL" in lines[0].getMessage()


@contextlib.contextmanager
def observed() -> Any:
    """What observers are told meanwhile."""
    told: list[tuple[Any, Any, Any]] = []
    with events.Handle(lambda *what: told.append(what)):
        yield told
    assert events.in_flight() == 0


def test_the_report_of_a_save_reaches_observers(tmp_path: Path) -> None:
    path = tmp_path / "step-42"
    with observed() as told:
        future = holdfast.dcp.async_save(state_of(1), checkpoint_id=path)
        future.result()
    ((save, report, error),) = told
    assert error is None
    assert future.report == report  # what the user has, without an observer
    assert report["step"] == 42
    assert report["files"] == 1
    assert save.path == str(path)
    assert save.extra["kind"] == "dcp"
    assert report["at_complete"] >= report["time_to_durable"]
    (metadata,) = [s for s in spans(report) if s.name == "metadata"]
    assert metadata.end > metadata.begin


def test_the_handle_of_a_checkpointer_has_the_report(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, format="dcp") as checkpointer:
        save = checkpointer.save_async(state_of(1), 7)
        save.wait()
        assert save.report["path"] == str(tmp_path / "step-7") and save.report["bytes"] > 0
        assert save.report["at_complete"] > 0


def test_a_save_whose_metadata_fails_is_told_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, name: str, *_: Any) -> None:
        raise holdfast.Error("RESOURCE_EXHAUSTED", f"write {path / name}: no space", 28)

    monkeypatch.setattr(dcp_metadata, "commit", full)
    with observed() as told:
        future = holdfast.dcp.async_save(state_of(1), checkpoint_id=tmp_path / "step-1")
        assert future.exception(60) is not None
    ((save, report, error),) = told
    assert report is None
    assert events.outcome(save, error) == "failed"
    assert error.errno == 28


def test_failures_before_there_is_a_save_reach_observers(tmp_path: Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise ValueError("no plan today")

    class Resolver(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            raise ValueError("no data today")

    with observed() as told:
        with pytest.raises(CheckpointException):
            holdfast.dcp.async_save(state_of(1), checkpoint_id=tmp_path / "a", planner=Planner())
        future = holdfast.dcp.async_save(
            state_of(1), checkpoint_id=tmp_path / "b", planner=Resolver()
        )
        assert future.exception(60) is not None
        end = time.monotonic() + 30
        while staging.held_bytes() and time.monotonic() < end:  # by a thread of an earlier save
            gc.collect()
            time.sleep(0.01)
        staging.trim()  # what is there already is not asked for
        with pytest.raises(holdfast.Error):
            dcp.async_save(
                state_of(1),
                storage_writer=holdfast.dcp.StorageWriter(tmp_path / "c", staging_bytes_max=1),
            )
    assert [(Path(save.path).name, events.outcome(save, error)) for save, _, error in told] == [
        ("a", "failed"),
        ("b", "failed"),
        ("c", "refused"),
    ]
    assert "no plan today" in str(told[0][2]) and "no data today" in str(told[1][2])


def test_writers_are_pickled_without_what_they_hold(tmp_path: Path) -> None:
    writer = holdfast.dcp.StorageWriter(tmp_path / "x", overwrite=False, step=3)
    writer.stage({"a": torch.ones(10)})
    copy = pickle.loads(pickle.dumps(writer))
    assert (copy.path, copy.overwrite, copy.step) == (writer.path, False, 3)


# ---- Failures.


def test_a_failed_save_leaves_the_previous_checkpoint_and_the_next_cleans_up(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run"
    dcp.save(state_of(1), storage_writer=holdfast.dcp.StorageWriter(path))
    with file_size_limit(8192):
        with pytest.raises(CheckpointException, match=r"rank 0.*__0_1\.distcp") as caught:
            holdfast.dcp.async_save(state_of(2), checkpoint_id=path).result()
    (error,) = [e for e, _ in caught.value.failures.values()]
    assert isinstance(error, holdfast.Error)
    assert error.errno == 27  # EFBIG
    assert seed_of(path) == 1
    assert len(files(path)) == 4, files(path)
    holdfast.flush()  # the failure was seen
    dcp.save(state_of(3), storage_writer=holdfast.dcp.StorageWriter(path))
    assert seed_of(path) == 3


def test_flush_tells_a_failure_that_nobody_has_seen(tmp_path: Path) -> None:
    with file_size_limit(8192):
        future = holdfast.dcp.async_save(state_of(2), checkpoint_id=tmp_path / "run")
        with pytest.raises((CheckpointException, holdfast.Error), match="__0_0"):
            holdfast.flush(60)
    assert future.done()
    holdfast.flush()


def test_a_failed_save_does_not_keep_the_state(tmp_path: Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            try:
                raise KeyError("nothing here")
            except KeyError as error:
                raise ValueError("no data today") from error

    kept = []
    for seed in range(3):
        state = state_of(seed)
        kept.append(weakref.ref(state["model"]["weight"]))
        future = holdfast.dcp.async_save(state, checkpoint_id=tmp_path / "x", planner=Planner())
        assert "resolve_data" in str(future.exception(60))  # the lines are told all the same
        del future, state
        gc.collect()
    assert [r() for r in kept] == [None] * 3
    assert len(handle._unread()) <= 1  # this loop has looked at all of them
    holdfast.flush()


def test_a_planner_that_fails_fails_the_call(tmp_path: Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            raise ValueError("no plan today")

    with pytest.raises(CheckpointException, match="no plan today"):
        holdfast.dcp.async_save(state_of(1), checkpoint_id=tmp_path / "x", planner=Planner())
    assert threading.active_count() < 20
