"""Under the framework's own async_save: staged copies are shared, capped, and not reused early."""

from __future__ import annotations

import collections
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

import holdfast
import holdfast.dcp
from holdfast.dcp import staging

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20


def settle() -> int:
    """What is held once the framework's thread has let go, right after the result."""
    deadline = time.monotonic() + 30
    while staging.held_bytes() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return staging.held_bytes()


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HOLDFAST_ARENA_BYTES", str(64 * MIB))  # several states
    yield
    assert settle() == 0
    staging.trim()


def state_of(value: float, nbytes: int = 8 * MIB) -> dict[str, Any]:
    value = float(value)
    tied = torch.full((nbytes // 8,), value)
    return {
        "model": {"a": tied, "b": tied, "t": torch.arange(12.0).reshape(3, 4).t() + value},
        "rest": torch.full((nbytes // 8,), -value),
        "list": [torch.tensor(value), {"x": 1}],
        "empty": torch.zeros(0),
        "step": int(value),
    }


def check(path: Path, value: float, nbytes: int = 8 * MIB) -> None:
    state = state_of(0, nbytes)
    dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path))
    expected = state_of(value, nbytes)
    assert state["step"] == expected["step"]
    assert torch.equal(state["model"]["a"], expected["model"]["a"])
    assert torch.equal(state["model"]["t"], expected["model"]["t"])
    assert torch.equal(state["rest"], expected["rest"])
    assert torch.equal(state["list"][0], expected["list"][0])


class GatedWriter(holdfast.dcp.StorageWriter):
    """Waits before it writes: an upload that is slow."""

    def __init__(self, path: Any, gate: threading.Event, **options: Any) -> None:
        super().__init__(path, **options)
        self.gate = gate

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.gate.wait(60)
        return super().write_data(plan, planner)


def test_writer_and_stager_are_what_the_framework_takes_for_stagers() -> None:
    assert isinstance(holdfast.dcp.StorageWriter("/tmp/x"), AsyncStager)
    assert isinstance(holdfast.dcp.Stager(), AsyncStager)


def test_a_staged_state_is_a_copy_in_shared_memory_with_ties_kept() -> None:
    state = state_of(3)
    staged = staging.stage(state)
    state["model"]["a"].zero_()
    state["list"][1]["x"] = 2
    assert staged["model"]["a"][0] == 3
    assert staged["list"][1]["x"] == 1
    assert staged["model"]["a"].data_ptr() == staged["model"]["b"].data_ptr()
    assert staged["rest"].is_shared()
    assert staging.held_bytes() < 9 * MIB  # the tied ones count once
    del staged
    assert staging.held_bytes() == 0
    kept = staging.kept_bytes()
    again = staging.stage(state)
    assert staging.kept_bytes() == kept
    del again


def test_lazily_conjugated_views_are_staged_as_what_they_show() -> None:
    c = torch.tensor([1 + 2j, 3 - 4j])
    state = {"a": c, "conj": c.conj(), "imag": c.imag, "neg": c.conj().imag}
    staged = staging.stage(state)
    for name, tensor in state.items():
        assert torch.equal(staged[name], tensor.resolve_conj().resolve_neg()), name
        assert not staged[name].is_conj() and not staged[name].is_neg()


def _two_overlapping_uploads(directory: Path) -> None:
    gate = threading.Event()
    state = state_of(1)
    first = dcp.async_save(state, storage_writer=GatedWriter(directory / "1", gate))
    for tensor in (state["model"]["a"], state["rest"], state["list"][0], state["model"]["t"]):
        tensor.fill_(99)  # the training goes on
    second = dcp.async_save(state_of(2), storage_writer=holdfast.dcp.StorageWriter(directory / "2"))
    second.result()
    gate.set()
    first.result()
    del first, second
    check(directory / "2", 2)
    check(directory / "1", 1)


def test_staged_memory_is_not_reused_before_the_upload_has_ended(tmp_path: Path) -> None:
    _two_overlapping_uploads(tmp_path)


@pytest.mark.planted("free_at_stage")
def test_memory_that_is_released_at_stage_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug of the test above."""
    monkeypatch.setattr(staging._Block, "is_free", property(lambda self: True))
    with pytest.raises(AssertionError):
        _two_overlapping_uploads(tmp_path)


def test_memory_is_kept_for_the_next_save_and_given_back_on_close(tmp_path: Path) -> None:
    for step in range(3):
        writer = holdfast.dcp.StorageWriter(tmp_path / str(step))
        dcp.async_save(state_of(step), storage_writer=writer).result()
        assert settle() == 0
        kept = staging.kept_bytes()
        assert 9 * MIB > kept > 8 * MIB
    writer.close()
    assert staging.kept_bytes() == 0
    for step in range(3):
        check(tmp_path / str(step), step)


def test_a_state_over_the_cap_is_refused_at_once_naming_the_cap(tmp_path: Path) -> None:
    writer = holdfast.dcp.StorageWriter(tmp_path / "x", staging_bytes_max=2 * MIB)
    with pytest.raises(holdfast.Error, match="staging_bytes_max to (\\d+)") as caught:
        dcp.async_save(state_of(1), storage_writer=writer)
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    needed = int(str(caught.value).split("staging_bytes_max to ")[1].split()[0])
    writer = holdfast.dcp.StorageWriter(tmp_path / "x", staging_bytes_max=needed)
    dcp.async_save(state_of(1), storage_writer=writer).result()
    check(tmp_path / "x", 1)


def test_what_slow_uploads_hold_counts_against_the_cap(tmp_path: Path) -> None:
    gate = threading.Event()
    cap = 12 * MIB
    first = dcp.async_save(
        state_of(1), storage_writer=GatedWriter(tmp_path / "1", gate, staging_bytes_max=cap)
    )
    other = holdfast.dcp.StorageWriter(tmp_path / "2", staging_bytes_max=cap)
    with pytest.raises(holdfast.Error, match="held by uploads"):
        dcp.async_save(state_of(2), storage_writer=other)
    gate.set()
    first.result()
    del first
    dcp.async_save(state_of(2), storage_writer=other).result()
    check(tmp_path / "2", 2)


def test_the_stager_answers_the_framework_with_both_futures(tmp_path: Path) -> None:
    stager = holdfast.dcp.Stager()
    response = dcp.async_save(
        state_of(5), storage_writer=holdfast.dcp.StorageWriter(tmp_path / "x"), async_stager=stager
    )
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result()
    response.upload_completion.result()
    stager.close()
    del response
    check(tmp_path / "x", 5)


def _process_mode(rank: int, directory: str) -> dict[str, Any]:
    """Two saves through the framework's checkpoint process, and what crossed to it."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    sent = []
    real = executor._AsyncCheckpointProcess._send

    def count(self: Any, data: Any) -> None:
        from multiprocessing.reduction import ForkingPickler

        if hasattr(data, "staged_state_dict"):
            sent.append(len(bytes(ForkingPickler.dumps(data))))
        real(self, data)

    executor._AsyncCheckpointProcess._send = count  # type: ignore[method-assign]
    kept = []
    for step in (1, 2, 3):
        state = state_of(step)
        future = dcp.async_save(
            state,
            storage_writer=holdfast.dcp.StorageWriter(os.path.join(directory, str(step))),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        state["rest"].zero_()
        state["model"]["a"].zero_()
        future.result()
        del future
        held = settle()
        kept.append((staging.kept_bytes(), held))
    process = executor._CHECKPOINT_PROCESS
    executor._CHECKPOINT_PROCESS = None
    del process
    return {"sent": sent, "kept": kept}


def test_in_process_mode_tensors_cross_by_reference(tmp_path: Path) -> None:
    (result,) = dcp_ranks.run_ranks(1, tmp_path, _process_mode, str(tmp_path))
    for step in (1, 2, 3):
        check(tmp_path / str(step), step)
    # Descriptions cross, not the megabytes; one block of memory serves save after save.
    assert all(nbytes < 64 << 10 for nbytes in result["sent"])
    assert len({kept for kept, _ in result["kept"]}) == 1
    assert all(held == 0 for _, held in result["kept"])


class Tagged(dict[str, Any]):
    """With an attribute, and a way of its own to set items."""

    tag = ""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, "set")


def test_copies_of_mappings_have_the_same_items() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 80, 80])
    tagged = Tagged(a=1)
    tagged.tag = "x"
    state = {
        "scheduler": scheduler.state_dict(),
        "counts": collections.Counter(a=torch.tensor(3)),
        "default": collections.defaultdict(list, a=[1]),
        "ordered": collections.OrderedDict(b=1, a=2),
        "tagged": tagged,
    }
    copied = staging.stage(state)
    assert copied["scheduler"]["milestones"] == collections.Counter({30: 1, 80: 2})
    assert copied["counts"]["a"].item() == 3 and type(copied["counts"]) is collections.Counter
    assert copied["default"] == {"a": [1]} and copied["default"]["b"] == []
    assert list(copied["ordered"].items()) == [("b", 1), ("a", 2)]
    assert copied["tagged"] == {"a": 1} and copied["tagged"].tag == "x"


def test_a_dtensor_without_dimensions_is_staged() -> None:
    with dcp_ranks.one_rank():
        mesh = DeviceMesh("cpu", [0])
        for value in (torch.tensor(1.5), torch.zeros(0, 3)):
            given = distribute_tensor(value, mesh, [Replicate()])
            copied = staging.stage({"d": given})["d"]
            assert copied.shape == value.shape and torch.equal(copied.to_local(), value)


def test_a_tensor_whose_memory_was_freed_is_refused_by_name() -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(holdfast.Error, match=r"stage model\.1: its storage has 0 of the 4000 bytes") as refused:
        staging.stage({"model": [torch.ones(1), freed]})
    assert refused.value.code == "INVALID_ARGUMENT"
