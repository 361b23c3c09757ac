"""Two jobs that save into one DCP directory by mistake: what is listed is whole, and of one of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast.dcp import metadata as dcp_metadata
from holdfast.dcp import writer as dcp_writer

pytestmark = pytest.mark.filterwarnings("ignore")

ROUNDS = 12


def _state(job: int, number: int) -> dict[str, Any]:
    return {"w": torch.full((5000 * (job + 1),), float(100 * job + number)), "job": job, "number": number}


def _outcome(path: Path, job: int, number: int) -> str:
    """The code of a save's error; empty for one that was durable."""
    try:
        holdfast.dcp.async_save(_state(job, number), checkpoint_id=path).result(60)
    except CheckpointException as error:
        causes = [failure[0] for failure in error.failures.values()]
        assert all(isinstance(cause, holdfast.Error) for cause in causes), causes
        return causes[0].code
    except holdfast.Error as error:
        return error.code
    return ""


def _saved_by(path: Path) -> tuple[int, int]:
    """Job and number of the checkpoint, which is complete, listed and sound."""
    assert path.name in [c["name"] for c in holdfast.list_checkpoints(path.parent, format="dcp")]
    report = holdfast.dcp.verify(path)
    assert report["verdict"] == "sound", report["faults"]
    found: dict[str, Any] = {"job": -1, "number": -1}
    holdfast.dcp.load(found, checkpoint_id=path, no_dist=True)
    expected = _state(found["job"], found["number"])
    target = {"w": torch.zeros_like(expected["w"])}
    holdfast.dcp.load(target, checkpoint_id=path, no_dist=True)
    assert torch.equal(target["w"], expected["w"])
    return found["job"], found["number"]


def _job(job: int, directory: str, together: Any, outcomes: Any) -> None:
    for number in range(ROUNDS):
        together.wait(60)
        outcomes.put((job, number, _outcome(Path(directory) / f"step-{number % 2}", job, number)))
    holdfast.flush(60)


def test_of_two_jobs_that_save_at_once_one_wins_whole(tmp_path: Path) -> None:
    context = dcp_ranks.context
    together, outcomes = context.Barrier(3), context.Queue()
    jobs = [context.Process(target=_job, args=(job, str(tmp_path), together, outcomes)) for job in range(2)]
    for job in jobs:
        job.start()
    try:
        for number in range(ROUNDS):
            together.wait(60)
            ended = {job: code for job, at, code in (outcomes.get(timeout=60) for _ in jobs) if at == number}
            assert len(ended) == 2 and set(ended.values()) <= {"", "ABORTED", "ALREADY_EXISTS"}, ended
            path = tmp_path / f"step-{number % 2}"
            if "" in ended.values():
                job, found = _saved_by(path)
                assert found == number and ended[job] == "", (ended, job, found)
            elif (path / ".metadata").exists():
                _saved_by(path)
    finally:
        together.abort()  # of jobs that wait for a next round
        for job in jobs:
            job.join(60)
            job.kill()


def _save_and_say(path: str, done: Any) -> None:
    done.put(_outcome(Path(path), 1, 1))
    holdfast.flush(60)


@pytest.mark.parametrize("way", ["async_save", "save"])
def test_a_save_of_another_job_is_not_deleted_as_older(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-1"
    done = dcp_ranks.context.Queue()
    other = dcp_ranks.context.Process(target=_save_and_say, args=(str(path), done))
    delete = dcp_writer.StorageWriter._delete_older

    def late(self: Any, *of: Any) -> None:
        # The other job begins when this one has committed, and its data is durable now.
        other.start()
        end = time.monotonic() + 60
        while sum(name.startswith("rank-") for name in os.listdir(path)) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2)
        delete(self, *of)

    monkeypatch.setattr(dcp_writer.StorageWriter, "_delete_older", late)
    try:
        if way == "save":
            import torch.distributed.checkpoint as dcp

            dcp.save(_state(0, 0), storage_writer=holdfast.dcp.StorageWriter(path))
        else:
            assert _outcome(path, 0, 0) == ""
        assert done.get(timeout=60) == ""
    finally:
        other.join(60)
        other.kill()
    assert _saved_by(path) == (1, 1)


@pytest.mark.parametrize("gone", ["rank-*.manifest.json", "*.distcp"])
def test_a_save_whose_files_another_job_has_removed_is_not_committed(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-1"
    assert _outcome(path, 0, 0) == ""
    older = set(os.listdir(path))
    locked = dcp_metadata.locked

    def after_removal(directory: Path, *end: float) -> Any:
        for file in directory.glob(gone):
            if file.name not in older:
                file.unlink()
        return locked(directory, *end)

    monkeypatch.setattr(dcp_metadata, "locked", after_removal)
    assert _outcome(path, 0, 1) == "ABORTED"
    monkeypatch.undo()
    assert _saved_by(path) == (0, 0)
    assert _outcome(path, 0, 2) == ""
    assert _saved_by(path) == (0, 2)
