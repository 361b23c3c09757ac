"""What ends a job with a DCP save in flight, and what is left: complete, to be completed, or nothing."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from programs import Program

import holdfast
import holdfast.dcp
from holdfast import _names, _native
from holdfast.dcp import recovery, uploads

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS = 2
ELEMENTS = 1_500_000  # more than one chunk

# A trainer: a first save, which is complete, then a second one during which something happens.
_TRAINER = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, holdfast, holdfast.dcp
from holdfast.dcp import metadata, uploads
path, store, rank, happens = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)

def state(step):
    return {f"r{rank}": torch.full((1_500_000,), float(step + rank)), "both": torch.full((100,), float(step)),
            "step": step}

def die(signal_number):
    while not all(os.path.exists(f"{store}-begun-{other}") for other in range(2)):
        time.sleep(0.01)  # the launcher ends the other rank soon, and that one's save may not have begun
    os.kill(os.getpid(), signal_number)
    time.sleep(60)

holdfast.dcp.async_save(state(1), checkpoint_id=path + "/step-1").result()
who, what = happens.split(" ", 1)
mine = who == "all" or int(who) == rank
if what == "slow":  # the other rank's data is durable long before this one's
    if mine:
        holdfast.configure(bytes_per_second_max=1 << 18, trainer_death="stop")
elif what.startswith("SIG"):  # before the data of any rank is durable: of two chunks, the second waits
    holdfast.configure(bytes_per_second_max=(2 if what == "SIGTERM early" else 4) << 20)
if what == "before the exchange" and mine:
    uploads.Exchange.reduce = lambda *_: die(signal.SIGKILL)
elif what == "before the exchange":
    uploads.Exchange.reduce = lambda *_: time.sleep(60)
if what == "before the metadata" and mine:
    metadata.commit = lambda *_: die(signal.SIGKILL)
future = holdfast.dcp.async_save(state(2), checkpoint_id=path + "/step-2")
open(f"{store}-begun-{rank}", "w").close()
if what.startswith("SIGTERM"):
    die(signal.SIGTERM)
elif what == "SIGKILL" and mine:
    die(signal.SIGKILL)
elif what == "destroy":
    dist.destroy_process_group()
    sys.exit()
elif what == "slow" and mine:
    die(signal.SIGKILL)
print(repr(future.exception(60)))
dist.destroy_process_group()
"""


def _run(tmp_path: Path, happens: str) -> list[Program]:
    """Runs the trainers to their end, and shows what one says that ends otherwise than well or by a signal."""
    directory = tmp_path / "run"
    directory.mkdir()
    trainers = [
        Program(
            ["-c", _TRAINER, str(directory), str(tmp_path / "store"), str(rank), happens], new_session=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    begin = time.monotonic()
    while None in [t.poll() for t in trainers] and all(t.returncode in (None, 0, -signal.SIGTERM) for t in trainers):
        if time.monotonic() > begin + 240:
            break
        time.sleep(0.05)
    time.sleep(0.5)  # the launcher ends the others
    for trainer in trainers:
        trainer.kill()
    said = [trainer.communicate() for trainer in trainers]
    codes = [trainer.returncode for trainer in trainers]
    assert set(codes) <= {0, -signal.SIGTERM, -signal.SIGKILL}, (codes, said)
    assert time.monotonic() < begin + 240, said
    return trainers


def _check(path: Path, step: int) -> None:
    """That the stock reader loads the values of a step, and that the digests prove them."""
    loaded = {
        "r0": torch.zeros(ELEMENTS), "r1": torch.zeros(ELEMENTS), "both": torch.zeros(100), "step": 0,
    }  # fmt: skip
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    for name, value in (("r0", step), ("r1", step + 1), ("both", step)):
        assert (loaded[name] == value).all(), name
    assert loaded["step"] == step
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    assert holdfast.verify(path)["verdict"] == "sound"


def test_the_last_save_is_completed_behind_destroy_process_group(tmp_path: Path) -> None:
    assert [trainer.returncode for trainer in _run(tmp_path, "all destroy")] == [0, 0]
    _check(tmp_path / "run" / "step-2", 2)


@pytest.mark.parametrize(
    "happens",
    ["all SIGTERM", "all SIGTERM early", "0 SIGKILL", "1 SIGKILL", "0 before the exchange", "1 before the exchange",
     "0 before the metadata"],
)  # fmt: skip
def test_what_is_durable_on_all_ranks_is_completed_by_recover(happens: str, tmp_path: Path) -> None:
    trainers = _run(tmp_path, happens)
    assert any(t.returncode in (-signal.SIGTERM, -signal.SIGKILL) for t in trainers)
    path = tmp_path / "run" / "step-2"
    if happens == "all SIGTERM early":
        assert not list(path.glob("*.manifest.json"))
    completed = "SIG" in happens and (path / ".metadata").exists()  # a save may be faster than the signal
    report = holdfast.recover(tmp_path / "run")
    assert report["promoted"] == ([] if completed else ["step-2"]), report
    _check(path, 2)
    _check(tmp_path / "run" / "step-1", 1)
    assert holdfast.recover(tmp_path / "run")["promoted"] == []  # harmless to repeat


def _dies_before_the_answer(rank: int, path: str) -> str:
    """Of two ranks the second one dies when the first one has its message."""
    if rank == 1:
        uploads.Exchange._broadcast = lambda self, data: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    future = holdfast.dcp.async_save({f"r{rank}": torch.full((100,), float(rank))}, checkpoint_id=path)
    return repr(future.exception(60))


def test_a_checkpoint_that_was_committed_is_no_failure_though_a_rank_died_then(tmp_path: Path) -> None:
    answers = dcp_ranks.run_ranks(2, tmp_path, _dies_before_the_answer, str(tmp_path / "run" / "step-1"), dying=1)
    assert answers[0] == "None"
    assert [c["step"] for c in holdfast.list_checkpoints(tmp_path / "run", format="dcp")] == [1]


def test_a_save_that_lacks_a_rank_is_called_complete_by_nothing(tmp_path: Path) -> None:
    _run(tmp_path, "0 slow")
    path = tmp_path / "run" / "step-2"
    assert list(path.glob("rank-00001-*.manifest.json")) and not list(path.glob("rank-00000-*.manifest.json"))
    assert holdfast.verify(path)["verdict"] == "incomplete"
    with pytest.raises(dcp.api.CheckpointException, match="metadata"):
        _check(path, 2)
    assert holdfast.recover(tmp_path / "run", wait_for_orphans=0)["promoted"] == []
    assert not (path / ".metadata").exists()


def test_a_recovery_waits_no_longer_than_told_for_a_process_that_commits(tmp_path: Path) -> None:
    """As a trainer that was stopped, or whose disk hangs, between its lock and the metadata."""
    path = tmp_path / "run" / "step-1"
    holdfast.dcp.save({"w": torch.ones(10)}, checkpoint_id=path, no_dist=True)
    (path / ".metadata").unlink()
    for record in path.glob("holdfast.commit-*"):
        record.unlink()
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    code = f"""if True:
        import json, time, holdfast
        began = time.monotonic()
        kept = holdfast.recover({str(path.parent)!r}, wait_for_orphans=0.1)["kept_incomplete"]
        print(json.dumps([kept, time.monotonic() - began]))"""
    try:
        kept, seconds = json.loads(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    finally:
        os.close(fd)
    assert kept == ["step-1: a save is running there"]
    assert seconds < 15  # without the limit: half a minute
    assert holdfast.recover(path.parent)["promoted"] == ["step-1"]


@pytest.mark.parametrize(("ends_after", "progress_ends_after", "waits"), [(20, 20, 20), (100, 5, 8), (100, 100, 30)])
def test_a_worker_without_its_trainer_has_more_time_while_it_makes_progress(
    ends_after: int, progress_ends_after: int, waits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds pass at every look, of thirty without progress and three hundred in all."""
    data = tmp_path / f"__0_0.distcp{_names.UNFINISHED}"
    data.touch()
    slept = 0

    def sleep(_: float) -> None:
        nonlocal slept
        slept += 1
        if slept <= progress_ends_after:
            os.utime(data, (slept, slept))

    monkeypatch.setattr(recovery, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 10.0 * slept))
    monkeypatch.setattr(_native, "saves_at_work", lambda _: "none" if slept == ends_after else "orphan")
    recovery._wait_for_workers(tmp_path, 30.0)
    assert slept == waits


class _Worker:
    """A worker without its trainer, which ends when somebody has looked at the directory so often; until then ranks have no manifest."""

    def __init__(self, path: Path, ranks: str, looks: int, patches: pytest.MonkeyPatch) -> None:
        self._path, self._looks, self.has_ended = path, looks, False
        self._later = {}
        for manifest in path.glob(f"rank-0000{ranks}-*.manifest.json"):
            data = path / json.loads(manifest.read_text())["files"][0]["name"]
            self._later |= {data: data.with_name(data.name + _names.UNFINISHED), manifest: path.parents[1] / manifest.name}
        for name, earlier in self._later.items():
            name.rename(earlier)
        patches.setattr(os, "listdir", self._looked(os.listdir, None))
        patches.setattr(_native, "saves_at_work", self._looked(_native.saves_at_work, "orphan"))

    def _looked(self, look: Callable[..., Any], until_then: Any) -> Callable[..., Any]:
        def looked(where: Any = ".") -> Any:
            found = look(where)
            if self.has_ended or not os.path.samestat(os.stat(where), os.stat(self._path)):
                return found
            self._looks -= 1
            if self._looks == 0:
                self.end()
            return until_then or found

        return looked

    def end(self) -> None:
        for name, earlier in self._later.items():
            earlier.rename(name)
        self.has_ended = True


@pytest.mark.parametrize("seconds", [0.0, 30.0])
@pytest.mark.parametrize("ranks", ["[01]", "1"])
def test_a_worker_that_ends_beside_a_recovery_has_its_save_completed(ranks: str, seconds: float, tmp_path: Path) -> None:
    _run(tmp_path, "0 before the metadata")
    run, path = tmp_path / "run", tmp_path / "run/step-2"
    for looks in range(1, 12):
        with pytest.MonkeyPatch.context() as patches:
            worker = _Worker(path, ranks, looks, patches)
            report = holdfast.recover(run, wait_for_orphans=seconds)
        assert report["removed"] == []
        if not worker.has_ended:
            worker.end()
        if not report["promoted"]:
            assert not seconds and holdfast.recover(run)["promoted"] == ["step-2"]
        _check(path, 2)
        for name in (".metadata", *(record.name for record in path.glob("holdfast.commit-*"))):
            (path / name).unlink()
