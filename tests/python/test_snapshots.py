"""The stale-snapshot alarm: comparing a save's digests with those of the one before it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast import _native, snapshots

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    """No test sees what another has saved."""
    snapshots._previous.of.clear()
    yield
    holdfast.configure(stale_warning=True)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "holdfast" and r.levelno == logging.WARNING
    ]


def state_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def random(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator)

    # Over chunk borders, within one, and small ones beside each other.
    return {
        "model": {"large": random(3 * MIB), "small": random(100), "bias": random(3)},
        "optimizer": {"moment": random(2 * MIB)},
    }


def save(state: Any, path: Path, step: int, **options: Any) -> dict[str, Any]:
    return holdfast.save_async(state, path, step=step, **options).wait(60)


def test_the_first_save_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    assert "previous" not in save(state_of(1), tmp_path / "a", 1)


def test_an_identical_save_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(1)
    save(state, tmp_path / "a", 1)
    report = save(state, tmp_path / "b", 2)
    assert report["tensors_identical"] == report["tensors_compared"] == 4
    assert report["tensors_changed"] == 0
    assert report["previous"] == str(tmp_path / "a") and report["previous_step"] == 1
    assert sorted(report["identical_groups"]) == ["model", "optimizer"]
    assert report["stale"]
    (message,) = warnings(caplog)
    assert "all 4 tensors are identical to the previous save" in message
    assert message.startswith("[rank 0]")


@pytest.mark.parametrize("name", ["large", "small", "bias"])
@pytest.mark.parametrize("where", [0, -1])
def test_one_changed_element_is_seen_in_its_tensor_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, where: int
) -> None:
    state = state_of(1)
    save(state, tmp_path / "a", 1)
    state["model"][name][where] += 1
    report = save(state, tmp_path / "b", 2)
    assert report["tensors_changed"] == 1
    assert report["changed"] == [f"model.{name}"]
    assert report["tensors_identical"] == 3
    assert f"model.{name}" not in report["identical"] and len(report["identical"]) == 3
    assert report["identical_groups"] == ["optimizer"]
    assert not warnings(caplog)


def test_a_change_inside_a_tensor_of_many_chunks_is_seen(tmp_path: Path) -> None:
    state = state_of(1)
    save(state, tmp_path / "a", 1)
    state["model"]["large"][3 * MIB // 2] += 1
    assert save(state, tmp_path / "b", 2)["tensors_changed"] == 1


def test_a_changed_structure_is_told_and_no_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(1)
    save(state, tmp_path / "a", 1)
    del state["model"]["small"]
    state["model"]["new"] = torch.ones(5)
    state["model"]["bias"] = torch.ones(4)
    report = save(state, tmp_path / "b", 2)
    assert report["tensors_added"] == 1 and report["tensors_removed"] == 1
    assert report["tensors_changed"] >= 1
    # The rest moved within its file: what spans chunks has other borders there.
    compared = report["tensors_compared"] + report["tensors_not_comparable"]
    assert compared + report["tensors_added"] == 4
    assert not warnings(caplog)


def test_a_moved_tensor_is_compared_by_its_own_digest(tmp_path: Path) -> None:
    small = torch.randn(1000)
    save({"z": small}, tmp_path / "a", 1)
    report = save({"a": torch.randn(77), "z": small}, tmp_path / "b", 2)
    assert report["identical"] == ["z"]


def test_a_moved_tensor_of_many_chunks_is_not_comparable(tmp_path: Path) -> None:
    large = torch.randn(3 * MIB)
    save({"z": large}, tmp_path / "a", 1)
    report = save({"a": torch.randn(77), "z": large}, tmp_path / "b", 2)
    assert report["tensors_not_comparable"] == 1 and report["tensors_compared"] == 0


class CachingTrainer:
    """A trainer that gathers its state once and hands out the same copies ever after."""

    def __init__(self, planted_bug: bool) -> None:
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self._planted_bug = planted_bug
        self._cache: dict[str, torch.Tensor] | None = None

    def step(self) -> None:
        self.model(torch.randn(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, n: int) -> dict[str, Any]:
        if self._cache is None or not self._planted_bug:
            self._cache = {k: v.clone() for k, v in self.model.state_dict().items()}
        # Counters and random state are alive in such a trainer.
        return {
            "model": self._cache,
            "rng": torch.get_rng_state(),
            "batches": torch.tensor(n),
        }


@pytest.mark.planted("saves_a_cached_copy")
@pytest.mark.parametrize("planted_bug", [True, False])
def test_a_trainer_that_saves_a_cached_copy_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, planted_bug: bool
) -> None:
    trainer = CachingTrainer(planted_bug)
    for n in range(3):
        trainer.step()
        report = save(trainer.state(n), tmp_path / f"step-{n}", n)
    assert report["stale"] == planted_bug
    assert len(warnings(caplog)) == (2 if planted_bug else 0)
    if planted_bug:
        assert "2 of 4 tensors, all but counters and random state" in warnings(caplog)[-1]


def test_one_stale_part_of_a_state_is_named(tmp_path: Path) -> None:
    state = state_of(1)
    save(state, tmp_path / "a", 1)
    state["model"] = state_of(2)["model"]
    report = save(state, tmp_path / "b", 2)
    assert report["identical_groups"] == ["optimizer"] and not report["stale"]


def test_the_same_step_again_is_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(1)
    save(state, tmp_path / "step-7", 7)
    assert save(state, tmp_path / "last", 7)["stale"]
    assert not warnings(caplog)


def test_random_state_alone_is_never_stale(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"rng": torch.get_rng_state(), "steps": torch.tensor(3)}
    save(state, tmp_path / "a", 1)
    assert not save(state, tmp_path / "b", 2)["stale"]
    assert not warnings(caplog)


@pytest.mark.parametrize("name", ["generator", "upsamplers", "resampler"])
def test_layers_are_not_taken_for_random_state(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):  # the weights are a cached copy, random state goes on
        state = {name: {"w": torch.ones(100)}, "torch_rng": torch.full((16,), step)}
        report = save(state, tmp_path / str(step), step)
    assert report["stale"]
    assert warnings(caplog)


def test_the_warning_can_be_turned_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.configure(stale_warning=False)
    state = state_of(1)
    save(state, tmp_path / "a", 1)
    assert save(state, tmp_path / "b", 2)["stale"]
    assert not warnings(caplog)


def test_turning_it_off_is_possible_while_a_save_is_in_flight(tmp_path: Path) -> None:
    handle = holdfast.save_async(state_of(1), tmp_path / "a", step=1)
    holdfast.configure(stale_warning=False)
    handle.wait(60)


def test_names_in_the_report_are_bounded(tmp_path: Path) -> None:
    state = {f"t{i}": torch.ones(4) for i in range(100)}
    save(state, tmp_path / "a", 1)
    report = save(state, tmp_path / "b", 2)
    assert report["tensors_identical"] == 100
    assert len(report["identical"]) == snapshots.NAMES_MAX
    report = save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "c", 3)
    assert report["tensors_changed"] == 100
    assert len(report["changed"]) == snapshots.NAMES_MAX


_ONE_SAVE = """
import sys, torch, holdfast
torch.manual_seed(1)
state = {"w": torch.randn(1000)}
print(holdfast.save_async(state, sys.argv[1], step=int(sys.argv[2])).wait(60).get("previous"))
"""


def test_a_new_process_compares_with_the_newest_checkpoint_on_disk(tmp_path: Path) -> None:
    said = []
    for n in (1, 2, 3):
        done = subprocess.run(
            [sys.executable, "-c", _ONE_SAVE, str(tmp_path / f"step-{n}"), str(n)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        said.append(done.stdout.strip())
        # Nothing has set up logging there: a warning must show nevertheless.
        assert ("identical to the previous save" in done.stderr) == (n > 1)
    assert said == ["None", str(tmp_path / "step-1"), str(tmp_path / "step-2")]


def test_a_damaged_previous_manifest_fails_nothing(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "a", 1)
    (manifest,) = (tmp_path / "a").glob("rank-*.manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:200])
    snapshots._previous.of.clear()
    assert "previous" not in save(state_of(1), tmp_path / "b", 2)


def test_the_previous_save_may_have_been_removed(tmp_path: Path) -> None:
    state = state_of(1)
    save(state, tmp_path / "step-1", 1, keep_last=1)
    report = save(state, tmp_path / "step-2", 2, keep_last=1)
    assert report["stale"]


def test_manifests_with_the_attempt_in_their_names_are_found(tmp_path: Path) -> None:
    """As in DCP directories, also while those of two saves are there."""
    reports = []
    for name in ("a", "b", "c"):
        reports.append(save(state_of(1 if name != "c" else 2), tmp_path / name, 1))
        (manifest,) = (tmp_path / name).glob("rank-*.manifest.json")
        own = f"rank-00000-of-00001-{reports[-1]['attempt']}.manifest.json"
        manifest.rename(tmp_path / "b" / own if name == "c" else manifest.with_name(own))
    snapshots._previous.of.clear()
    for name, first in zip(("a", "b"), reports, strict=False):
        subject = holdfast.events.Published(
            str(tmp_path / name), 1, {"kind": "dcp", "rank": 0, "world_size": 1}
        )
        report: dict[str, Any] = {"attempt": first["attempt"]}
        snapshots.compare_with_previous(subject, report, None)
    assert report["tensors_identical"] == 4


def test_saves_of_dcp_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast_dcp = pytest.importorskip("holdfast.dcp")
    import torch.distributed.checkpoint as dcp

    model = {"w": torch.randn(1000), "large": torch.randn(2 * MIB)}
    for step in (1, 2, 3):
        if step == 3:
            model["w"] += 1
        writer = holdfast_dcp.StorageWriter(tmp_path / f"step-{step}", step=step)
        dcp.save(dict(model), storage_writer=writer)
        holdfast.flush(60)
        if step == 2:
            snapshots._previous.of.clear()  # step 3: as a new process would find it
    (message,) = warnings(caplog)
    assert "step 2): all 2 tensors are identical" in message


def test_a_save_that_was_called_later_and_ended_first_is_no_previous_one(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "a", 1)
    time.sleep(0.02)  # the clock of files has steps
    called = time.monotonic_ns()
    time.sleep(0.02)
    save(state_of(2), tmp_path / "c", 3)
    report = save(state_of(3), tmp_path / "b", 2)
    snapshots._previous.of.clear()  # as in a new process
    again: dict[str, Any] = {"attempt": report["attempt"], "entered_ns": called}
    subject = types.SimpleNamespace(path=tmp_path / "b", extra={"rank": 0, "world_size": 1})
    snapshots.compare_with_previous(subject, again, None)
    assert again["previous"] == str(tmp_path / "a")


def test_saves_of_two_formats_are_not_compared(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(100)}}
    save(state, tmp_path / "step-1", 1)
    holdfast.dcp.save(state, checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert save(state, tmp_path / "step-3", 3)["previous"] == str(tmp_path / "step-1")
    snapshots._previous.of.clear()  # as in a new process
    assert save(state, tmp_path / "step-4", 4)["previous"] == str(tmp_path / "step-3")
    for entry in ("step-1", "step-3", "step-4"):
        shutil.rmtree(tmp_path / entry)
    snapshots._previous.of.clear()
    assert "previous" not in save(state, tmp_path / "step-5", 5)


def test_a_log_line_says_nothing_where_no_tensor_was_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        save({"a": torch.ones(3)}, tmp_path / "step-1", 1)
        assert save({"b": torch.ones(3)}, tmp_path / "step-2", 2)["tensors_compared"] == 0
    assert any("step-2" in line for line in caplog.messages)
    assert not any("tensors changed" in line for line in caplog.messages)


def test_a_manifest_of_a_hundred_gigabytes_is_compared_in_a_moment(tmp_path: Path) -> None:
    chunks = 25_000
    step = chunks * _native.CHUNK_BYTES // 5_000
    manifest = {
        "step": 1,
        "attempt": "0" * 32,
        "files": [{"digests": [hashlib.md5(b"%d" % i).hexdigest() for i in range(chunks)]}],
        "tensors": [
            {
                "name": f"model.layers.{i}.weight",
                "dtype": "F32",
                "shape": [step // 4],
                "file": 0,
                "begin": i * step,
                "end": (i + 1) * step,
                "head": f"{i:032x}",
                "tail": f"{i + 1:032x}",
            }
            for i in range(5_000)
        ],
    }
    path = tmp_path / "rank-00000-of-00001.manifest.json"
    path.write_text(json.dumps(manifest))
    times = []
    for _ in range(3):
        begin = time.process_time()
        one = snapshots._read(str(path))
        snapshots.describe(one, one)
        times.append(time.process_time() - begin)
    print(f"{os.path.getsize(path)} bytes of manifest: {min(times) * 1e3:.1f} ms of CPU")
    assert len(one.tensors) == 5_000
    assert min(times) < 1.0  # 20 times what it takes


def test_whole_words_and_integers_name_random_state() -> None:
    own = ("rng", "rng.cuda.0", "torch_rng_state", "state.cudaRNGState", "train_loader.position",
           "dataloader.0", "trainLoader", "sampler.perm", "DistributedSampler", "generators.1", "generator")
    for name in own:
        assert snapshots.is_random_state(name, "U8"), name
    assert snapshots.is_random_state("loader.prefetched", "F32")
    for name in ("upsamplers.0.w", "model.resampler.w", "wrong", "regenerator", "uploaded"):
        assert not snapshots.is_random_state(name, "U8") and not snapshots.is_random_state(name, "F32"), name
    for name in ("generator.w", "model.sampler.w"):  # layers
        for dtype in ("F32", "BF16", "F8_E4M3", "C64"):
            assert not snapshots.is_random_state(name, dtype), name
