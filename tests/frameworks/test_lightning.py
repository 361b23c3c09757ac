"""`holdfast.lightning.CheckpointIO`: what a Trainer, Fabric and their callbacks get from it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_jobs import LONG, SLOW, Looks, equal, every, look, model, names, trainer, weights_of

import holdfast
from holdfast import files
from holdfast.lightning import CheckpointIO
from holdfast.lightning import files as lightning_files
from holdfast.lightning.ordering import Order

TESTS = Path(__file__).parents[1] / "python"
sys.path.insert(0, str(TESTS))
from faults import file_size_limit  # noqa: E402

STATE = {"state_dict": {"w": torch.arange(4.0)}, "global_step": 3}


def of_trainer(job: pl.Trainer) -> CheckpointIO:
    return job.strategy.checkpoint_io  # type: ignore[return-value]


# ---- Files, removals, links.


@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_a_new_directory_gets_a_proven_checkpoint(tmp_path: Path, save_last: Any) -> None:
    at = tmp_path / "new" / "er"
    job = trainer(tmp_path, 7, every(2, at, save_last=save_last), plugins=[CheckpointIO()])
    job.fit(model())
    assert names(at) == ["step=6.ckpt"]
    assert holdfast.verify(at / "step=6.ckpt")["verdict"] == "sound"
    assert len(files.manifests_of(at / "step=6.ckpt")) == 1
    companions = [n for n in os.listdir(at) if n.startswith(".")]
    assert len(companions) == (2 if save_last is True else 1)  # nothing of the removed ones is left
    if save_last:
        assert os.path.islink(at / "last.ckpt") == (save_last == "link")
        assert equal(weights_of(at / "last.ckpt"), weights_of(at / "step=6.ckpt"))
    loaded = type(job.lightning_module).load_from_checkpoint(at / "step=6.ckpt")
    assert equal(loaded.state_dict(), weights_of(at / "step=6.ckpt"))


def test_a_file_takes_the_place_of_a_link_and_a_link_that_of_a_file(tmp_path: Path) -> None:
    plugin = CheckpointIO()
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        plugin.save_checkpoint({"w": torch.full((2,), value)}, tmp_path / name)
    plugin.link_checkpoint(tmp_path / "a", tmp_path / "last")
    plugin.wait()
    plugin.save_checkpoint({"w": torch.full((2,), 9.0)}, tmp_path / "last")
    plugin.teardown()
    assert not os.path.islink(tmp_path / "last") and torch.load(tmp_path / "last")["w"][0] == 9
    assert torch.load(tmp_path / "a")["w"][0] == 1
    plugin.link_checkpoint(tmp_path / "b", tmp_path / "last")
    plugin.teardown()
    assert os.readlink(tmp_path / "last") == "b"
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["a", "b", "c", "last", *(os.path.basename(m) for n in "abc" for m in files.manifests_of(tmp_path / n))]
    )
    plugin.remove_checkpoint(tmp_path / "last")
    plugin.teardown()
    assert not os.path.lexists(tmp_path / "last") and (tmp_path / "b").exists()


def test_two_checkpoints_of_one_name_in_flight_are_two_as_without_a_plugin(tmp_path: Path) -> None:
    found = []
    for plugins in ([], [CheckpointIO(**SLOW)]):
        at = tmp_path / str(len(plugins))

        class Falling(type(model())):  # type: ignore[misc]
            def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
                self.log("loss", -float(self.global_step))
                return super().training_step(batch, index)

        callback = every(2, at, filename="best", monitor="loss", save_top_k=2, enable_version_counter=True)
        trainer(tmp_path, 8, callback, plugins=plugins).fit(Falling())
        found.append((sorted(p.name for p in at.glob("*.ckpt")), Path(callback.best_model_path).name))
    assert found[0] == found[1] and len(found[0][0]) == 2


@pytest.mark.parametrize("options", [{}, SLOW], ids=["fast", "slow"])
def test_a_resumed_run_moves_the_link_of_the_run_before(tmp_path: Path, options: dict[str, Any]) -> None:
    """The link is in the way until its target is removed, which waits: `last.ckpt` must not stay, and `last-v1.ckpt` come."""
    at = tmp_path / "run"
    for steps, resume in ((2, None), (4, at / "last.ckpt")):
        callback = every(2, at, save_last="link", enable_version_counter=True)
        trainer(tmp_path, steps, callback, plugins=[CheckpointIO(**options)]).fit(model(), ckpt_path=resume)
        assert sorted(p.name for p in at.glob("*.ckpt")) == ["last.ckpt", f"step={steps}.ckpt"]
        assert os.readlink(at / "last.ckpt") == f"step={steps}.ckpt" and Path(callback.last_model_path) == at / "last.ckpt"


def test_a_link_that_will_lead_nowhere_is_no_checkpoint(tmp_path: Path) -> None:
    plugin, last = CheckpointIO(**SLOW), tmp_path / "last"
    plugin.save_checkpoint(STATE, tmp_path / "a")
    plugin.link_checkpoint(tmp_path / "a", last)
    assert plugin.exists(last, on_disk=False)  # the link is on its way
    plugin.save_checkpoint(STATE, tmp_path / "b")
    plugin.remove_checkpoint(tmp_path / "a")
    assert not plugin.exists(last, on_disk=False) and not plugin.exists(last, on_disk=True)
    plugin.save_checkpoint(STATE, last)
    assert plugin.exists(last, on_disk=False)  # a file takes its place
    plugin.teardown()
    assert plugin.exists(last, on_disk=True) and not plugin.exists(tmp_path / "a", on_disk=False)


# ---- A whole checkpoint at every moment.


def slow_run(tmp_path: Path, steps: int, saves_in_flight_max: int = 1) -> Looks:
    """A run that saves at each fourth step, to a disk that is slower than that."""
    at = tmp_path / "run"
    plugin = CheckpointIO(saves_in_flight_max=saves_in_flight_max, **SLOW)
    job = trainer(tmp_path, steps, every(4, at, save_last="link"), plugins=[plugin])
    with Looks(at) as looks:
        job.fit(model(step_seconds=0.002))
    return looks


@pytest.mark.planted("removal_before_durability")
def test_a_removal_before_durability_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Order, "remove", lambda self, path, run, why_held: run())
    looks = slow_run(tmp_path, 20)
    assert "nothing to load" in looks.wrong


@pytest.mark.planted("link_before_rename")
def test_a_link_before_its_rename_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(self: Order, path: str, target: str, run: Any) -> None:
        Path(path).unlink(missing_ok=True)
        os.symlink(os.path.basename(target), path)

    monkeypatch.setattr(Order, "link", link)
    looks = slow_run(tmp_path, 20)
    assert "last.ckpt cannot be loaded" in looks.wrong


@pytest.mark.parametrize("saves_in_flight_max", [1, 3])
def test_a_look_at_any_time_finds_a_checkpoint(saves_in_flight_max: int, tmp_path: Path) -> None:
    steps = 800 if LONG else 60
    looks = slow_run(tmp_path, steps, saves_in_flight_max)
    print(f"{steps // 4} saves, {looks}")
    assert looks.count > 5 and looks.wrong == []
    assert names(tmp_path / "run") == [f"step={steps}.ckpt"] and look(tmp_path / "run") == ""


# ---- Errors.


def fail(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """From now on files whose path has one of `parts` may have no more than 64 kB: EFBIG."""
    stock = files.save_file

    def save_file(state: Any, path: Any, **options: Any) -> Any:
        if not any(part in os.fspath(path) for part in parts):
            return stock(state, path, **options)
        with file_size_limit(1 << 16):
            return stock(state, path, **options)

    monkeypatch.setattr("holdfast.lightning.files.save_file", save_file)


BIG = {"w": torch.ones(1 << 16)}


def warm(plugin: CheckpointIO, directory: Path) -> None:
    """The memory of saves is there; a limit of file sizes is one of new memory, too."""
    plugin.save_checkpoint({**BIG, "more": torch.ones(1 << 21)}, directory / "warm")
    plugin.teardown()


def test_an_error_is_raised_by_the_next_save_which_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = CheckpointIO()
    warm(plugin, tmp_path)
    fail(monkeypatch, "bad")
    plugin.save_checkpoint(BIG, tmp_path / "bad")
    plugin.order.wait_for_saves()
    with pytest.raises(holdfast.Error, match="bad"):
        plugin.save_checkpoint(BIG, tmp_path / "good")
    plugin.teardown()  # once
    assert holdfast.verify(tmp_path / "good")["verdict"] == "sound" and not (tmp_path / "bad").exists()
    plugin.save_checkpoint(BIG, tmp_path / "after")  # usable after a teardown
    plugin.teardown()
    assert (tmp_path / "after").exists()


@pytest.mark.parametrize("which", ["bad", "warm"])
def test_an_error_is_raised_by_a_load(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = CheckpointIO()
    warm(plugin, tmp_path)
    fail(monkeypatch, "bad")
    with pytest.raises(holdfast.Error, match="bad"):
        plugin.save_checkpoint(BIG, tmp_path / "bad")  # on a busy machine it may fail within the call
        plugin.order.wait_for_saves()
        plugin.load_checkpoint(tmp_path / which)
    assert torch.equal(plugin.load_checkpoint(tmp_path / "warm")["w"], BIG["w"])
    plugin.teardown()


def test_what_has_failed_leaves_the_older_checkpoint_and_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    at = tmp_path / "run"
    fail(monkeypatch, "step=4")
    asked: list[str] = []
    remove = CheckpointIO.remove_checkpoint

    def noted(self: CheckpointIO, path: Any) -> None:
        remove(self, path)
        asked.append(os.path.basename(path))

    monkeypatch.setattr(CheckpointIO, "remove_checkpoint", noted)
    job = trainer(tmp_path, 4, every(2, at, save_last="link"), plugins=[CheckpointIO()])
    warm(of_trainer(job), tmp_path)
    with pytest.raises(holdfast.Error, match="step=4"):
        job.fit(model())
    assert names(at) == ["step=2.ckpt"] and os.readlink(at / "last.ckpt") == "step=2.ckpt"
    # A save that fails early raises at the next call, and then nothing is asked for behind it.
    assert ("step=2.ckpt: given up, the save of" in caplog.text) == ("step=2.ckpt" in asked)


def test_a_save_while_an_exception_is_handled_does_not_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, at = CheckpointIO(), tmp_path / "run"
    warm(plugin, tmp_path)
    fail(monkeypatch, "wrong")
    plugin.save_checkpoint(BIG, at / "wrong.ckpt")
    plugin.wait()
    try:
        raise ArithmeticError
    except ArithmeticError:
        plugin.save_checkpoint(BIG, at / "right.ckpt")
    with pytest.raises(holdfast.Error, match="wrong"):
        plugin.teardown()
    assert [path.name for path in at.glob("*.ckpt")] == ["right.ckpt"]


def test_the_last_save_is_awaited_after_an_exception_which_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(pl.Callback):
        def on_train_batch_end(self, job: Any, *_: Any) -> None:
            if job.global_step == 4:
                raise ArithmeticError("the loss is no number")

    for part in ("never", "step=4"):
        at = tmp_path / f"run-{len(part)}"
        plugin = CheckpointIO(**SLOW)
        warm(plugin, tmp_path)
        fail(monkeypatch, part)
        job = trainer(tmp_path, 9, every(2, at, save_on_exception=True, save_top_k=-1), Broken(), plugins=[plugin])
        with pytest.raises(ArithmeticError, match="no number") as caught:
            job.fit(model())
        notes = getattr(caught.value, "__notes__", [])
        if part == "step=4":
            assert names(at) == ["step=2.ckpt"]
            assert any(note.startswith("and a checkpoint was not saved") for note in notes)
        else:
            assert names(at) == ["step=2.ckpt", "step=4.ckpt"] and notes == []
        plugin.teardown()


def test_a_save_that_cannot_begin_takes_no_exceptions_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is faster than the call: its failure shows in the call."""
    plugin = CheckpointIO(**SLOW)
    full = holdfast.Error("RESOURCE_EXHAUSTED", "no room for late.ckpt", 28)
    begin = lightning_files.save

    def refused(checkpoint: Any, path: Any, runtime: Any) -> Any:
        if "late" in str(path):
            raise full
        return begin(checkpoint, path, runtime)

    monkeypatch.setattr(lightning_files, "save", refused)
    try:
        raise ArithmeticError
    except ArithmeticError:
        plugin.save_checkpoint(BIG, tmp_path / "late.ckpt")
    with pytest.raises(holdfast.Error, match="no room for late"):
        plugin.teardown()
    with pytest.raises(holdfast.Error, match="no room for late"):
        plugin.save_checkpoint(BIG, tmp_path / "late.ckpt")
    plugin.teardown()


def test_an_error_that_nobody_has_read_shows_at_the_exit(tmp_path: Path) -> None:
    program = """if True:
        import sys
        sys.path.insert(0, sys.argv[2])
        import torch
        import lightning
        from holdfast.lightning import CheckpointIO
        from faults import file_size_limit
        plugin = CheckpointIO()
        plugin.save_checkpoint({"w": torch.ones(1 << 16)}, sys.argv[1] + "/good")
        plugin.teardown()
        with file_size_limit(1 << 16):
            plugin.save_checkpoint({"w": torch.ones(1 << 16)}, sys.argv[1] + "/bad")
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), str(TESTS)], capture_output=True, text=True)
    assert done.returncode != 0 and "bad" in done.stderr, done.stderr


# ---- Loads.


def test_a_load_waits_for_the_save_of_its_path_and_of_its_link(tmp_path: Path) -> None:
    plugin = CheckpointIO(**SLOW)
    plugin.save_checkpoint(STATE, tmp_path / "one")
    plugin.link_checkpoint(tmp_path / "one", tmp_path / "last")
    assert plugin.load_checkpoint(tmp_path / "last", weights_only=True)["global_step"] == 3
    plugin.save_checkpoint({**STATE, "global_step": 5}, tmp_path / "one")
    assert plugin.load_checkpoint(str(tmp_path / "last"))["global_step"] == 5
    with pytest.raises(FileNotFoundError, match="not found: other"):
        plugin.load_checkpoint("other")
    plugin.teardown()


def test_a_load_waits_for_a_save_of_another_plugin_and_through_a_linked_directory(tmp_path: Path) -> None:
    saving, loading = CheckpointIO(**SLOW), CheckpointIO()
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    for step, (save, load) in enumerate([("run", "run"), ("run", "link"), ("link", "run")]):
        saving.save_checkpoint({**STATE, "global_step": step}, tmp_path / save / "one")
        assert loading.load_checkpoint(tmp_path / load / "one")["global_step"] == step
    saving.teardown()


def test_a_load_raises_the_error_of_another_plugins_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving, loading = CheckpointIO(), CheckpointIO()
    warm(saving, tmp_path)
    fail(monkeypatch, "bad")
    with pytest.raises(holdfast.Error, match="bad"):
        saving.save_checkpoint(BIG, tmp_path / "bad")
        saving.order.wait_for_saves()
        assert torch.equal(loading.load_checkpoint(tmp_path / "warm")["w"], BIG["w"])  # another path is none of its
        loading.load_checkpoint(tmp_path / "bad")
    saving.teardown()  # it was raised


class Custom:
    pass


def test_weights_only_is_handed_on(tmp_path: Path) -> None:
    plugin = CheckpointIO()
    plugin.save_checkpoint({"own": Custom()}, tmp_path / "one")
    with pytest.raises(Exception, match="[Ww]eights"):
        plugin.load_checkpoint(tmp_path / "one", weights_only=True)
    assert isinstance(plugin.load_checkpoint(tmp_path / "one", weights_only=False)["own"], Custom)
    at = tmp_path / "run"
    trainer(tmp_path, 2, every(2, at, save_weights_only=True), plugins=[plugin]).fit(model())
    assert "optimizer_states" not in torch.load(at / "step=2.ckpt", weights_only=False)


def test_a_load_passes_no_argument_that_was_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.6 Lightning's own plugin has no `weights_only`."""
    stock = CheckpointIO.__mro__[1]
    monkeypatch.setattr(stock, "load_checkpoint", lambda self, path, map_location=None: torch.load(path, map_location))
    plugin = CheckpointIO()
    plugin.save_checkpoint(STATE, tmp_path / "one")
    assert plugin.load_checkpoint(tmp_path / "one", map_location="cpu")["global_step"] == 3
    plugin.teardown()


# ---- Other places.


def test_a_url_is_written_through_the_spool(tmp_path: Path) -> None:
    plugin = CheckpointIO(spool=tmp_path / "spool")
    url = "memory://holdfast-test/run/one.ckpt"
    plugin.save_checkpoint(STATE, url, storage_options={})
    assert plugin.load_checkpoint(url)["global_step"] == 3
    assert os.listdir(tmp_path / "spool") == []
    plugin.save_checkpoint(STATE, "memory://holdfast-test/run/two.ckpt")
    plugin.remove_checkpoint(url)
    plugin.teardown()
    there = fsspec.filesystem("memory")
    assert [p.rpartition("/")[2] for p in there.ls("/holdfast-test/run", detail=False)] == ["two.ckpt"]


def test_a_url_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    plugin = CheckpointIO(spool=tmp_path)
    (tmp_path / "file").write_text("in the way")
    plugin.save_checkpoint(STATE, f"simplecache::file://{tmp_path}/file/one.ckpt")
    with pytest.raises(holdfast.Error, match=r"one\.ckpt"):
        plugin.teardown()
    assert os.listdir(tmp_path) == ["file"]


def test_a_local_url_is_a_path_and_storage_options_need_another(tmp_path: Path) -> None:
    plugin = CheckpointIO()
    plugin.save_checkpoint(STATE, f"file://{tmp_path}/one.ckpt")
    plugin.teardown()
    assert holdfast.verify(tmp_path / "one.ckpt")["verdict"] == "sound"
    with pytest.raises(TypeError, match="storage_options are for URLs"):
        plugin.save_checkpoint(STATE, tmp_path / "two.ckpt", storage_options={"key": 1})


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValueError, match="CheckpointIO: there is no option bytes_a_minute"):
        CheckpointIO(bytes_a_minute=3)


# ---- Under a wrapper, with Fabric, in the background of another plugin.


class Wrapper(_WrappingCheckpointIO):
    """A plugin around another one, as in Lightning's documentation: without a `teardown`."""


def test_under_a_wrapper_the_order_holds_and_fit_waits(tmp_path: Path) -> None:
    at = tmp_path / "run"
    plugin = Wrapper(CheckpointIO(**SLOW))
    with Looks(at) as looks:
        trainer(tmp_path, 6, every(2, at, save_last="link"), plugins=[plugin]).fit(model())
        assert names(at) == ["step=6.ckpt"]
    assert looks.wrong == []


def test_a_wrapper_that_saves_in_a_thread_is_refused(tmp_path: Path) -> None:
    job = trainer(tmp_path, 4, every(2, tmp_path / "run"), plugins=[AsyncCheckpointIO(CheckpointIO())])
    with pytest.raises(TypeError, match="without AsyncCheckpointIO"):
        job.fit(model())


def test_an_error_under_a_wrapper_ends_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = CheckpointIO()
    warm(inner, tmp_path)
    fail(monkeypatch, "step=4")
    job = trainer(tmp_path, 4, every(2, tmp_path / "run"), plugins=[Wrapper(inner)])
    with pytest.raises(holdfast.Error, match="step=4"):
        job.fit(model())


def test_fabric_saves_through_it(tmp_path: Path) -> None:
    plugin = CheckpointIO(**SLOW)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    one = torch.nn.Linear(4, 4)
    wrapped, optimizer = fabric.setup(one, torch.optim.SGD(one.parameters(), lr=1.0))
    before = {k: v.clone() for k, v in one.state_dict().items()}
    fabric.save(tmp_path / "one.ckpt", {"model": wrapped, "optimizer": optimizer, "step": 1})
    with torch.no_grad():
        one.weight.zero_()
    state: dict[str, Any] = {"model": wrapped, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "one.ckpt", state)
    assert equal(one.state_dict(), before) and state["step"] == 1
    plugin.teardown()
    assert holdfast.verify(tmp_path / "one.ckpt")["verdict"] == "sound"


# ---- Loggers.


class Uploader(CSVLogger):
    """Notes of each checkpoint that it is told of whether it can be loaded, as an upload would."""

    told: list[tuple[str, bool]]

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = Path(checkpoint_callback.best_model_path)
        assert isinstance(checkpoint_callback, pl.callbacks.ModelCheckpoint)
        self.told.append((path.name, holdfast.verify(path)["verdict"] == "sound"))


def test_a_logger_is_told_of_every_checkpoint_while_it_is_there(tmp_path: Path) -> None:
    logger = Uploader(tmp_path)
    logger.told = []
    at = tmp_path / "run"
    trainer(tmp_path, 10, every(2, at), plugins=[CheckpointIO(**SLOW)], logger=logger).fit(model())
    assert logger.told == [(f"step={step}.ckpt", True) for step in (2, 4, 6, 8, 10)]
    assert names(at) == ["step=10.ckpt"]


def test_a_logger_is_not_told_of_what_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = Uploader(tmp_path)
    logger.told = []
    plugin = CheckpointIO()
    warm(plugin, tmp_path)
    fail(monkeypatch, "step=4")
    job = trainer(tmp_path, 4, every(2, tmp_path / "run"), plugins=[plugin], logger=logger)
    with pytest.raises(holdfast.Error, match="step=4"):
        job.fit(model())
    assert logger.told == [("step=2.ckpt", True)]


# ---- Requeue.


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=lambda n: n.name)
def test_a_job_is_requeued_when_its_checkpoint_is_there(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = tmp_path / "bin" / "scontrol"
    control.parent.mkdir()
    control.write_text(
        f"#!/bin/sh\ncat {tmp_path}/hpc_ckpt_1.ckpt > {tmp_path}/at-requeue; echo $@ > {tmp_path}/asked\n"
    )
    control.chmod(0o755)
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "77", "SLURM_PROCID": "0",
                        "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "1",
                        "PATH": f"{control.parent}:{os.environ['PATH']}"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    class Signal(pl.Callback):
        def on_train_batch_start(self, job: Any, *_: Any) -> None:
            if job.global_step == 5:
                os.kill(os.getpid(), number)

    at = tmp_path / "run"
    plugins = [CheckpointIO(**SLOW), SLURMEnvironment(auto_requeue=True, requeue_signal=number)]
    job = trainer(tmp_path, 6, every(2, at), Signal(), plugins=plugins)
    # Lightning itself ends a run on SIGTERM.
    with pytest.raises(SIGTERMException) if number == signal.SIGTERM else contextlib.nullcontext():
        job.fit(model())
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    saved = torch.load(tmp_path / "at-requeue", weights_only=False)
    assert saved["global_step"] == 5
    assert holdfast.verify(tmp_path / "hpc_ckpt_1.ckpt")["verdict"] == "sound"
    again = trainer(tmp_path, 6, every(2, at), plugins=[CheckpointIO(), SLURMEnvironment(auto_requeue=True)])
    again.fit(model())  # SLURM: the newest hpc_ckpt_N is loaded by itself
    assert again.ckpt_path == str(tmp_path / "hpc_ckpt_1.ckpt")
    assert equal(again.lightning_module.state_dict(), job.lightning_module.state_dict())


def test_signals_at_any_point_of_the_saves(tmp_path: Path) -> None:
    """The requeue's save begins in a signal handler, maybe in the middle of another save's call."""
    plugin = CheckpointIO()
    requeued = []
    is_handled, is_over = threading.Event(), threading.Event()

    def handler(*_: Any) -> None:
        path = tmp_path / f"hpc_ckpt_{len(requeued)}.ckpt"
        plugin.save_checkpoint(STATE, path)
        requeued.append(path.exists())
        is_handled.set()

    before = signal.signal(signal.SIGUSR1, handler)

    def send() -> None:
        wait = random.Random(1)
        while not is_over.wait(wait.uniform(0, 0.02)):
            is_handled.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            is_handled.wait(60)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for step in range(25):
            plugin.save_checkpoint(BIG, tmp_path / f"step={step}.ckpt")
            plugin.remove_checkpoint(tmp_path / f"step={step - 1}.ckpt")
    finally:
        is_over.set()
        while sender.is_alive():
            sender.join(0.05)  # a signal just before an endless wait would be handled after it
        signal.signal(signal.SIGUSR1, before)
    plugin.teardown()
    assert requeued and all(requeued) and names(tmp_path) == ["step=24.ckpt"]


def test_a_mocked_trainer_is_no_trainer_of_ours(tmp_path: Path) -> None:
    CheckpointIO()  # from now on its functions stand in front of the callback's
    (tmp_path / "file").touch()
    pl.callbacks.ModelCheckpoint._link_checkpoint(Mock(), str(tmp_path / "file"), str(tmp_path / "link"))
    assert os.readlink(tmp_path / "link") == "file"
