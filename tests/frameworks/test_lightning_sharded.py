"""Sharded checkpoints of FSDP2 over gloo, two ranks: asynchronous, whole, and exact after a resume."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning_ranks
import pytest
import torch
import torch.multiprocessing as mp
from lightning_jobs import SLOW, WIDTH, Model, every, trainer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
import holdfast.dcp
from holdfast.cli import recovering
from holdfast.lightning import CheckpointIO, FSDPStrategy, ModelParallelStrategy, directories, files
from holdfast.lightning.following import Following
from holdfast.lightning.moving import Move


class Sharded(Model):
    def __init__(self, hold_after: int = -1) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.hold_after = hold_after

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.global_step == self.hold_after:
            Path(self.trainer.default_root_dir, f"holds-{self.global_rank}").touch()
            time.sleep(600)


def train(directory: Path, steps: int, save_last: Any, hold_after: int = -1, resume: str | None = None) -> None:
    torch.manual_seed(1)
    job = trainer(directory, steps, every(2, directory / "run", save_last=save_last), devices=2,
                  strategy=ModelParallelStrategy(2, 1))  # fmt: skip
    model = Sharded(hold_after)
    job.fit(model, ckpt_path=resume)
    full = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if job.is_global_zero:
        torch.save(full, directory / "final.pt")


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this has no pickle")


def train_with_what_has_no_pickle(directory: Path) -> None:
    class Adding(pl.Callback):
        def on_save_checkpoint(self, job: Any, model: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = Unpicklable()

    job = trainer(directory, 2, every(2, directory / "run"), Adding(), devices=2, strategy=ModelParallelStrategy(2, 1))
    job.fit(Sharded())


def move(directory: Path) -> None:
    class Moving(pl.Callback):
        def on_train_end(self, job: Any, model: Any) -> None:
            state = {"state_dict": model.state_dict(), "optimizer": job.optimizers[0].state_dict()}
            mover = Move(stays=("meta",))
            moved = mover.moved(state, "state")
            for name, old in state["state_dict"].items():
                new = moved["state_dict"][name]
                assert isinstance(new, DTensor) and new.placements == old.placements and new.shape == old.shape
                assert torch.equal(new.to_local(), old.to_local())
                assert new.to_local().data_ptr() != old.to_local().data_ptr() or not new.to_local().numel()
            assert not mover.skipped and mover.tensors == 3 * 4 + 4  # with the moments and Adam's own steps

    trainer(directory, 1, Moving(), devices=2, strategy=ModelParallelStrategy(2, 1)).fit(Sharded())


def train_with_a_fault(directory: Path, failing: int) -> None:
    """The last step of one commit fails, which rank 0 does alone."""
    stock = directories.commit

    def commit(new: str, path: str) -> None:
        if f"step={failing}.ckpt" in path:
            raise OSError(28, "No space left on device", path)
        stock(new, path)

    directories.commit = commit
    train(directory, 10, "link")


def final(directory: Path, steps: int, save_last: Any = "link", **options: Any) -> dict[str, torch.Tensor]:
    args = [directory, steps, save_last, -1, options.get("resume")]
    lightning_ranks.run(directory, train, *args, ranks=2)
    return torch.load(directory / "final.pt")


def entries(directory: Path) -> list[str]:
    run = directory / "run"
    return sorted(name for name in os.listdir(run) if not name.startswith(".")) if run.exists() else []


def test_a_sharded_run_goes_on_exactly_after_a_kill(tmp_path: Path) -> None:
    whole = final(tmp_path / "straight", 10)
    assert entries(tmp_path / "straight") == ["last.ckpt", "step=10.ckpt"]
    assert os.readlink(tmp_path / "straight" / "run" / "last.ckpt") == "step=10.ckpt"
    newest = tmp_path / "straight" / "run" / "step=10.ckpt"
    assert holdfast.verify(newest)["verdict"] == "sound" and (newest / "meta.pt").is_file()
    meta = bytearray((newest / "meta.pt").read_bytes())
    meta[len(meta) // 2] ^= 1
    (newest / "meta.pt").write_bytes(meta)
    assert [fault["file"] for fault in holdfast.verify(newest)["faults"]] == ["meta.pt"]

    killed = tmp_path / "killed"
    job = lightning_ranks.Job(killed, train, killed, 10, "link", 6, ranks=2)
    job.wait_until(lambda: all((killed / f"holds-{rank}").exists() for rank in range(2)))
    job.kill()
    at = killed / "run"
    (last,) = [p for p in at.glob("step=*.ckpt") if (p / "meta.pt").is_file()]
    assert last.name in ("step=4.ckpt", "step=6.ckpt") and (at / "last.ckpt").resolve() == last
    assert holdfast.verify(last)["verdict"] == "sound"
    resumed = final(killed, 10, resume=str(at / "last.ckpt"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert entries(killed) == ["last.ckpt", "step=10.ckpt"]


def test_an_error_of_one_rank_ends_all_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    failed = lightning_ranks.Job(tmp_path, train_with_a_fault, tmp_path, 6, ranks=2).end()
    assert "a save has failed on rank 0" in failed and "No space left on device" in failed
    assert "step=4.ckpt" in entries(tmp_path) and "step=6.ckpt" not in entries(tmp_path)
    assert os.readlink(tmp_path / "run" / "last.ckpt") == "step=4.ckpt"


def test_a_last_save_that_rank_0_cannot_complete_ends_all(tmp_path: Path) -> None:
    lightning_ranks.Job(tmp_path, train_with_a_fault, tmp_path, 10, ranks=2).end()
    assert "No space left on device" in (tmp_path / "failure-0").read_text()
    assert "a save has failed on rank 0" in (tmp_path / "failure-1").read_text()
    assert entries(tmp_path) == ["last.ckpt", "step=8.ckpt"]


def test_what_rank_0_cannot_save_ends_all_ranks(tmp_path: Path) -> None:
    failed = lightning_ranks.Job(tmp_path, train_with_what_has_no_pickle, tmp_path, ranks=2).end()
    assert "TypeError: this has no pickle" in failed and "rank 0 cannot save it" in failed
    assert entries(tmp_path) == []


def test_sharded_tensors_are_moved_by_their_parts(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, move, tmp_path, ranks=2)


def test_a_checkpoint_of_one_name_is_exchanged(tmp_path: Path) -> None:
    final(tmp_path, 5, True)
    assert entries(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert (tmp_path / "run" / "last.ckpt" / "meta.pt").is_file()
    assert holdfast.verify(tmp_path / "run" / "last.ckpt")["verdict"] == "sound"


# ---- Ranks whose first one saves for all.


def train_with_ddp(directory: Path) -> None:
    torch.manual_seed(1)
    saves = every(2, directory / "run", save_last="link", enable_version_counter=True)
    job = trainer(directory, 6, saves, devices=2, strategy="ddp", plugins=[CheckpointIO(**SLOW)])
    job.fit(Model())
    (directory / f"names-{job.global_rank}").write_text(saves.best_model_path)


def test_with_ddp_the_ranks_agree_on_names(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, train_with_ddp, tmp_path, ranks=2)
    assert entries(tmp_path) == ["last.ckpt", "step=6.ckpt"]
    named = {(tmp_path / f"names-{rank}").read_text() for rank in range(2)}
    assert named == {str(tmp_path / "run" / "step=6.ckpt")}


def train_in_forks(directory: Path) -> None:
    del os.environ["LOCAL_RANK"]  # Lightning makes the ranks itself
    torch.manual_seed(1)
    job = trainer(directory, 4, every(2, directory / "run"), devices=2, strategy="ddp_fork", plugins=[CheckpointIO()])
    own = Model()
    job.fit(own)
    saved = torch.load(directory / "run" / "step=4.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in own.state_dict().items())


def test_ranks_that_are_forked_hand_their_weights_back(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, train_in_forks, tmp_path)


# ---- The directory's last step.


def fill(path: Path, text: str) -> Path:
    """What has a checkpoint's names."""
    path.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        (path / name).write_text(text)
    return path


def texts(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): p.read_text() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("there", ["nothing", "a directory", "a file", "a link"])
def test_a_directory_takes_its_name_from_what_stands_there(there: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    if there == "a directory":
        fill(path, "old")
    elif there == "a file":
        path.write_text("old")
    elif there == "a link":
        path.symlink_to(fill(tmp_path / "other", "old"))
    new = fill(Path(directories.unfinished(str(path))), "new")
    directories.commit(str(new), str(path))
    assert (path / "meta.pt").read_text() == "new"
    assert sorted(os.listdir(tmp_path)) == (["one.ckpt", "other"] if there == "a link" else ["one.ckpt"])
    assert there != "a link" or (tmp_path / "other" / "meta.pt").read_text() == "old"


def test_what_a_crash_has_left_goes_with_the_next_save_of_the_name(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one.ckpt"), str(tmp_path / "other.ckpt")
    fill(Path(directories.unfinished(one)), "of a crash")
    left = fill(Path(directories.unfinished(other)), "of another name")
    new = directories.unfinished(one)
    assert os.listdir(tmp_path) == [left.name] and not os.path.exists(new)


def test_a_crash_before_the_rename_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(tmp_path / "one.ckpt", "old")
    new = fill(Path(directories.unfinished(str(path))), "new")

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directories, "replace_directory", crash)
    with pytest.raises(KeyboardInterrupt):
        directories.commit(str(new), str(path))
    assert (path / "meta.pt").read_text() == "old"


def save_into_a_directory_in_use(directory: Path) -> None:
    run = fill(directory / "run", "old")  # a checkpoint, and what is beside it
    (run / "config.yaml").write_text("own")
    job = trainer(directory, 2, every(2, run), strategy=ModelParallelStrategy(1, 1))
    job.fit(Sharded())
    (run / "logs").mkdir()
    (run / "logs" / "one").write_text("own")
    for _ in range(2):
        job.save_checkpoint(run)
    job.strategy.checkpoint_io.teardown()


def test_a_save_into_a_directory_in_use_keeps_what_is_not_the_checkpoints(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, save_into_a_directory_in_use, tmp_path)
    run = tmp_path / "run"
    assert (run / "config.yaml").read_text() == (run / "logs" / "one").read_text() == "own"
    for one in (run, run / "step=2.ckpt"):
        assert holdfast.verify(one)["verdict"] == "sound" and (one / "meta.pt").is_file()
    assert not list(run.glob(".holdfast-*")) and not list(tmp_path.glob(".holdfast-*"))
    assert not [name for name in os.listdir(run) if name == "__0_0.distcp" and (run / name).read_bytes() == b"old"]


OWN = {"config.yaml": "own", "logs/one": "own"}


def in_use(path: Path, with_checkpoint: bool) -> Path:
    if with_checkpoint:
        fill(path, "old")
        (path / "__1_0.distcp").write_text("old")  # of a save by more ranks
    for name, text in OWN.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


NEW = dict.fromkeys((".metadata", "__0_0.distcp", "meta.pt"), "new")


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("step", ["unlink", "rename", "rmdir"])
def test_a_crash_in_a_commit_into_a_directory_in_use_loses_nothing(
    step: str, with_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_use(tmp_path / "run", with_checkpoint)
    inode = path.stat().st_ino
    stock, crashes, calls, at = getattr(os, step), 0, 0, 0

    def crash(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        stock(*args)

    for number in range(1, 8):
        calls, at = 0, number
        new = fill(Path(directories.unfinished(str(path))), "new")
        before = texts(path)
        monkeypatch.setattr(os, step, crash)
        try:
            directories.commit(str(new), str(path))
        except KeyboardInterrupt:
            crashes += 1
            found = texts(path)
            assert OWN.items() <= found.items()
            assert found.get(".metadata") != "new" or NEW.items() <= found.items()
            assert found.get(".metadata") is None or found["meta.pt"] == found[".metadata"]
        monkeypatch.setattr(os, step, stock)
        if new.exists():  # it was not begun
            assert before == texts(path)
            directories.commit(str(new), str(path))
        directories.complete(str(path))
        assert texts(path) == {**OWN, **NEW} and os.listdir(tmp_path) == ["run"] and path.stat().st_ino == inode
    assert crashes >= (0 if step == "unlink" and not with_checkpoint else 1)


def test_what_is_put_beside_a_checkpoint_during_a_save_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(tmp_path / "one.ckpt", "old")
    stock = directories.replace_directory

    def late(*args: str) -> str:
        (path / "config.yaml").write_text("own")
        return stock(*args)

    monkeypatch.setattr(directories, "replace_directory", late)
    directories.commit(str(fill(Path(directories.unfinished(str(path))), "new")), str(path))
    assert texts(path) == {"config.yaml": "own", **NEW} and os.listdir(tmp_path) == ["one.ckpt"]


def _killed_in_a_removal(at: str, step: str) -> None:
    def kill(*_: Any, **__: Any) -> None:
        os.unlink(next(Path(at).glob(".holdfast-*/.metadata")))
        os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = kill
    path = f"{at}/hpc_ckpt_1.ckpt"
    if step == "a removal":
        files.remove(path)
    elif step == "a link":
        files.link(path, f"{at}/other.ckpt")
    else:
        directories.commit(str(fill(Path(directories.unfinished(path)), "new")), path)


@pytest.mark.parametrize("step", ["a removal", "a link", "a commit"])
def test_a_recovery_ends_a_removal_that_was_killed(step: str, tmp_path: Path) -> None:
    holdfast.dcp.save({"x": torch.zeros(8)}, checkpoint_id=tmp_path / "other.ckpt")
    holdfast.save_file({"y": 1}, tmp_path / "other.ckpt" / directories.META, wait=True)
    shutil.copytree(tmp_path / "other.ckpt", tmp_path / "hpc_ckpt_1.ckpt")
    process = mp.get_context("spawn").Process(target=_killed_in_a_removal, args=(str(tmp_path), step))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    stays = {"other.ckpt"} if step == "a removal" else {"hpc_ckpt_1.ckpt", "other.ckpt"}
    (left,) = set(os.listdir(tmp_path)) - stays
    assert "hpc" not in left and holdfast.verify(tmp_path / "other.ckpt")["verdict"] == "sound"
    assert recovering.outlook(str(tmp_path))["remove"] == [left]
    assert holdfast.recover(tmp_path)["removed"] == [left]
    assert set(os.listdir(tmp_path)) == stays
    assert holdfast.recover(tmp_path)["kept_incomplete"] == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP refuses a CPU: no GPU")
def test_fsdp_saves_its_shards(tmp_path: Path) -> None:
    job = trainer(tmp_path, 4, every(2, tmp_path / "run", save_last="link"), accelerator="gpu",
                  strategy=FSDPStrategy(state_dict_type="sharded"))  # fmt: skip
    job.fit(Sharded())
    assert entries(tmp_path) == ["last.ckpt", "step=4.ckpt"]
    assert holdfast.verify(tmp_path / "run" / "step=4.ckpt")["verdict"] == "sound"


def test_a_wait_for_a_save_of_two_parts_ends_with_the_packages_error() -> None:
    goes_on = threading.Event()
    save = Following("/run/x", None, goes_on.wait, lambda: None, lambda: None, None)
    try:
        with pytest.raises(holdfast.TimeoutError, match=r"wait for /run/x: not durable yet"):
            save.wait(0.01)
        with pytest.raises(holdfast.TimeoutError):
            holdfast.flush(0.01)
    finally:
        goes_on.set()
    save.wait(60)
