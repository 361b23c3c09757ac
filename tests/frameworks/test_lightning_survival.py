"""Full disks and killed trainers at random: there is a whole checkpoint, the newest, and a resume is exact."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning_ranks
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_jobs import LONG, SLOW, Looks, equal, every, look, model, names, number, trainer

import holdfast
from holdfast import events
from holdfast.lightning import CheckpointIO

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from small_disk import mounted

EVERY = 4
SEED = random.SystemRandom().randrange(1 << 30)


class Noting:
    """Notes the steps whose checkpoints are durable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = events.Handle(self)

    def __call__(self, subject: Any, report: Any, error: Any) -> None:
        name = Path(subject.path).name
        if report is not None and name.startswith("step="):
            with self._path.open("a") as file:
                file.write(f"{number(name)}\n")

    def close(self) -> None:
        self._handle.close()


def newest_noted(path: Path) -> int:
    """The newest in the notes; the last line may be cut off by a kill."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max(map(int, lines), default=0)


# ---- Killed trainers.


def train(directory: Path, steps: int, resume: str | None) -> None:
    Noting(directory / "durable")
    plugin = CheckpointIO(**SLOW)
    job = trainer(directory, steps, every(EVERY, directory / "run", save_last="link"), plugins=[plugin])
    job.fit(model(step_seconds=0.002), ckpt_path=resume)
    torch.save(job.lightning_module.state_dict(), directory / "final.pt")


def test_what_a_killed_trainer_leaves_is_whole_and_its_resume_exact(tmp_path: Path) -> None:
    chance, kills = random.Random(SEED), 40 if LONG else 3
    print(f"seed {SEED}")
    steps = 5 * EVERY * kills
    straight = trainer(tmp_path, steps)
    straight.fit(model())
    at, resume = tmp_path / "run", None
    with Looks(at) as looks:
        for _ in range(kills):
            before = len(names(at)) and number(names(at)[-1])
            job = lightning_ranks.Job(tmp_path, train, tmp_path, steps, resume)
            job.wait_until(lambda before=before: names(at) and number(names(at)[-1]) > before)
            time.sleep(chance.uniform(0, 0.3))
            job.kill()
            assert look(at) == ""
            newest = names(at)[-1]
            assert number(newest) >= newest_noted(tmp_path / "durable")
            resume = str(at / newest)
            assert holdfast.verify(resume)["verdict"] == "sound"
        lightning_ranks.run(tmp_path, train, tmp_path, steps, resume)
    print(f"{kills} kills, {looks}")
    assert looks.wrong == [] and looks.count > 10
    assert equal(torch.load(tmp_path / "final.pt"), straight.lightning_module.state_dict())
    assert look(at) == "" and names(at)[-1] == f"step={steps}.ckpt"


# ---- Full disks.


class Tolerant(ModelCheckpoint):
    """Goes on training when a checkpoint was not saved."""

    failures = 0

    def _save_checkpoint(self, job: Any, filepath: str) -> None:
        try:
            super()._save_checkpoint(job, filepath)
        except holdfast.Error as error:
            assert error.code == "RESOURCE_EXHAUSTED", error
            self.failures += 1
            self._last_global_step_saved, self._last_checkpoint_saved = job.global_step, filepath


class Full(threading.Thread):
    """Fills a disk, and empties it again, at random, once there is a checkpoint in ``run``."""

    def __init__(self, disk: Path, chance: random.Random) -> None:
        super().__init__(name="full")
        self._disk, self._ballast, self._chance = disk, disk / "ballast", chance
        self._is_over = threading.Event()

    def run(self) -> None:
        while not names(self._disk / "run"):
            self._is_over.wait(0.01)
        while not self._is_over.wait(self._chance.uniform(0, 0.3)):
            with self._ballast.open("wb", buffering=0) as file:
                try:
                    while file.write(bytes(1 << 16)):
                        pass
                except OSError:
                    pass
                self._is_over.wait(self._chance.uniform(0, 0.3))
            self._ballast.unlink()

    def __enter__(self) -> Full:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


def test_a_look_finds_a_checkpoint_while_the_disk_is_full_at_random(tmp_path: Path) -> None:
    saves = 200 if LONG else 20
    print(f"seed {SEED}")
    with mounted(tmp_path / "disk", 40) as disk:
        at = disk / "run"
        noting = Noting(tmp_path / "durable")
        callback = Tolerant(dirpath=at, filename="{step}", every_n_train_steps=EVERY, save_top_k=1, save_last="link")
        job = trainer(tmp_path, saves * EVERY, callback, plugins=[CheckpointIO(**SLOW)])
        with Looks(at) as looks, Full(disk, random.Random(SEED)):
            try:
                job.fit(model(step_seconds=0.002))
            except holdfast.Error as error:  # of the last save
                assert error.code == "RESOURCE_EXHAUSTED"
        noting.close()
        print(f"{saves} saves of which {callback.failures} failed, {looks}")
        assert looks.wrong == [] and looks.count > 10
        assert callback.failures > 0
        newest = names(at)[-1]
        assert number(newest) == newest_noted(tmp_path / "durable")
        assert holdfast.verify(at / newest)["verdict"] == "sound"
        assert torch.load(at / newest, weights_only=True)["global_step"] == number(newest)
