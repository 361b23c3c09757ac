"""`OffloadCallback`: the walk, the reports, the counters; what needs a GPU is skipped without one."""

from __future__ import annotations

import collections
import io
import logging
import operator
import re
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import lightning_ranks
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from lightning_jobs import LONG
from test_save_file import Marked
from test_save_file_random import Same, objects

import holdfast
from holdfast.lightning import OffloadCallback
from holdfast.lightning.moving import Move

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Pair(NamedTuple):
    weight: torch.Tensor
    step: int


class Custom:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Model(pl.LightningModule):
    def __init__(self, custom: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.layer.weight
        self.custom = custom

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.tied(self.layer(batch)).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)


def trainer(directory: Path, *callbacks: Any, **options: Any) -> Any:
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 2, **options}
    return pl.Trainer(default_root_dir=directory, callbacks=list(callbacks), logger=False, enable_progress_bar=False,
                      enable_model_summary=False, enable_checkpointing=False, **options)  # fmt: skip


def everything(device: str) -> Any:
    """A state with each kind of container, and a shared storage under several names."""
    weight = torch.arange(12.0, device=device).reshape(3, 4)
    ordered = collections.OrderedDict(weight=weight, tied=weight, view=weight[1], turned=weight.t())
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    shared = [weight[0], 7]
    looped: dict[str, Any] = {"again": shared}
    looped["itself"] = looped
    return {
        "ordered": ordered,
        "pair": Pair(weight, 3),
        "list": shared,
        "looped": looped,
        "default": collections.defaultdict(list, a=[torch.ones(2, device=device)]),
        "plain": (1, 2.5, None, "text", b"bytes", torch.float16, {1, 2}),
        "parameter": torch.nn.Parameter(torch.ones(3, device=device)),
        "empty": torch.empty(0, device=device),
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_the_walk_keeps_the_form_and_the_shared_storages(device: str) -> None:
    state = everything(device)
    move = Move(stays=("meta",))
    moved = move.moved(state, "state")
    move.finish()
    assert not move.skipped
    weight, new = state["ordered"]["weight"], moved["ordered"]
    assert type(new) is collections.OrderedDict and new._metadata == state["ordered"]._metadata
    assert new["weight"] is new["tied"] and new["weight"].device.type == "cpu"
    storages = [new["weight"], new["view"], new["turned"], moved["pair"].weight, moved["list"][0]]
    assert len({t.untyped_storage().data_ptr() for t in storages}) == 1
    assert new["weight"].data_ptr() != weight.data_ptr()
    for name in ("weight", "view", "turned"):
        assert torch.equal(new[name], state["ordered"][name].cpu())
        assert new[name].stride() == state["ordered"][name].stride()
    assert type(moved["pair"]) is Pair and moved["pair"].step == 3
    assert moved["looped"]["again"] is moved["list"] and moved["looped"]["itself"] is moved["looped"]
    assert moved["default"].default_factory is list and torch.equal(moved["default"]["a"][0], torch.ones(2))
    assert moved["plain"] == state["plain"]
    assert move.bytes_freed == 12 * 4 + 2 * 4 + 3 * 4
    assert all(map(operator.is_, state["ordered"].values(), [weight, weight, *list(state["ordered"].values())[2:]]))


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(holdfast.Error, match=r"save state\.a: its storage has 0 of the 12 bytes"):
        Move(stays=("meta",)).moved({"a": freed}, "state")


def test_a_custom_object_stays_and_is_reported() -> None:
    custom = Custom(torch.ones(2))
    move = Move(stays=("meta",))
    moved = move.moved({"a": [custom], "b": torch.ones(1)}, "state")
    assert moved["a"][0] is custom
    (one,) = move.skipped
    assert one.path == "state.a.0" and one.kind == f"{__name__}.Custom"


@pytest.mark.parametrize("report_all", [False, True])
def test_the_first_and_the_last_ten_of_many_custom_objects_are_logged(
    report_all: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = OffloadCallback(["state_dict"], report_all)
    job = trainer(tmp_path)
    for _ in range(2):  # the same objects are reported once
        checkpoint = {"state_dict": {f"c{i:02}": Custom(torch.ones(1)) for i in range(25)}}
        callback.on_save_checkpoint(job, None, checkpoint)
    (record,) = [r for r in caplog.records if "custom objects" in r.message]
    named = [i for i in range(25) if f"state_dict.c{i:02}: " in record.message]
    assert named == (list(range(25)) if report_all else [*range(10), *range(15, 25)])
    assert ("... 5 more ..." in record.message) == (not report_all)


class Failing(dict):
    def items(self) -> Any:
        raise RuntimeError("this one cannot be walked")


def test_a_key_that_fails_is_logged_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = OffloadCallback()
    failing = Failing(a=1)
    checkpoint = {"state_dict": failing, "optimizer_states": [{"state": {0: torch.ones(1)}}]}
    callback.on_save_checkpoint(trainer(tmp_path), None, checkpoint)
    assert checkpoint["state_dict"] is failing
    assert "offload 'state_dict': this one cannot be walked" in caplog.text
    assert callback.counters["failures"] == 1 and callback.counters["saves"] == 1


def test_a_key_that_fails_counts_as_nothing_but_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.lightning.offload.Move", lambda: Move(stays=("meta",)))
    callback = OffloadCallback(["state_dict", "callbacks"])
    weight = torch.ones(5)
    checkpoint = {"state_dict": [weight, Custom(weight), Failing(a=1)], "callbacks": {"own": torch.ones(2)}}
    callback.on_save_checkpoint(trainer(tmp_path), None, checkpoint)
    assert callback.counters["failures"] == 1
    assert callback.counters["tensors"] == 1 and callback.counters["bytes_freed"] == 8


def test_a_class_with_its_attributes_and_a_quantizer_stay() -> None:
    base = torch.arange(4.0)
    marked = torch.nn.Parameter(base.as_subclass(Marked))
    marked.note = "kept"  # type: ignore[attr-defined]
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    state = [base, marked, torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)]
    move = Move(stays=("meta",))
    moved = move.moved(state, "state")
    move.finish()
    Same().check(state, moved)
    assert moved[1].untyped_storage().data_ptr() == moved[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()


@settings(max_examples=1000 if LONG else 60, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=objects())
@pytest.mark.filterwarnings("ignore")
def test_random_states_stay_what_they_are(state: Any) -> None:
    move = Move(stays=("meta",))
    moved = move.moved(state, "state")
    move.finish()
    assume(not move.skipped)  # a custom object keeps its tensors: no longer those beside it
    Same().check(state, moved)


@pytest.mark.parametrize("keys", ["state_dict", 3, [3], None])
def test_keys_that_are_no_names_are_refused(keys: Any) -> None:
    with pytest.raises(ValueError, match=f"OffloadCallback: offload_keys {re.escape(repr(keys))}: a list or a tuple of str is expected"):
        OffloadCallback(keys)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_tensor_keeps_what_torch_saves_beside_its_values(device: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device=device), requires_grad=False)
    parameter.role = "gate"  # type: ignore[attr-defined]
    numbers = torch.arange(4.0, device=device).to(torch.complex64) + 1j
    state = {
        "parameter": parameter,
        "learns": torch.ones(2, device=device, requires_grad=True),
        "conjugated": numbers.conj(),
        "negated": numbers.conj().imag,
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided, device=device),
    }
    move = Move(stays=("meta",))
    moved = move.moved(state, "state")
    move.finish()
    loaded = {}
    for name, tensor in moved.items():  # one by one: the views of one storage have two types
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        loaded[name] = torch.load(file, weights_only=False)
    assert type(loaded["parameter"]) is torch.nn.Parameter and not loaded["parameter"].requires_grad
    assert loaded["parameter"].role == "gate" and loaded["learns"].requires_grad
    assert moved["conjugated"].is_conj() and moved["negated"].is_neg()
    for name, tensor in state.items():
        assert moved[name].device.type == "cpu"
        pairs = zip(loaded[name].unbind(), tensor.unbind(), strict=True)
        assert all(torch.equal(new, old.cpu()) for new, old in pairs), name


def test_the_counters_go_on_after_a_resume_and_the_summary_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "holdfast.lightning")
    first = OffloadCallback()
    job = trainer(tmp_path, first)
    job.fit(Model())
    job.save_checkpoint(tmp_path / "one.ckpt")
    assert "offload: 0 saves" in caplog.text
    second = OffloadCallback()
    job = trainer(tmp_path, second, max_steps=4)
    job.fit(Model(), ckpt_path=tmp_path / "one.ckpt")
    assert second.counters["saves"] == 1 and second.counters["seconds"] > 0
    assert "offload: 1 save," in caplog.text
    job.save_checkpoint(tmp_path / "two.ckpt")
    states = torch.load(tmp_path / "two.ckpt", weights_only=False)["callbacks"]
    assert states["OffloadCallback"]["counters"]["saves"] == 2
    assert second.averages["seconds"] == second.counters["seconds"] / 2


def test_there_is_a_summary_after_an_exception(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast.lightning")

    class Broken(Model):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        trainer(tmp_path, OffloadCallback()).fit(Broken())
    assert "offload: 0 saves" in caplog.text


def save_with_ddp(directory: Path) -> None:
    callback = OffloadCallback()
    job = trainer(directory, callback, devices=2, strategy="ddp")
    job.fit(Model())
    job.save_checkpoint(directory / "one.ckpt")
    assert callback.counters["saves"] == (job.global_rank == 0), callback.counters


def test_with_ddp_only_the_rank_that_saves_moves_anything(tmp_path: Path) -> None:
    lightning_ranks.run(tmp_path, save_with_ddp, tmp_path, ranks=2)
    assert "state_dict" in torch.load(tmp_path / "one.ckpt", weights_only=False)


@needs_gpu
def test_no_memory_of_the_gpu_is_taken(tmp_path: Path) -> None:
    state = {"state_dict": {f"w{i}": torch.ones(1 << 20, device="cuda") for i in range(8)}}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    callback = OffloadCallback()
    job = trainer(tmp_path, accelerator="gpu")
    callback.on_save_checkpoint(job, None, state)
    assert torch.cuda.max_memory_allocated() == before
    assert callback.counters["bytes_freed"] == 8 << 22
    assert all(t.device.type == "cpu" and t.is_pinned() for t in state["state_dict"].values())
