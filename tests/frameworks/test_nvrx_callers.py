"""`holdfast.nvrx.install` for those who call nvidia-resiliency-ext by themselves, without Megatron."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
import torch.distributed as dist
from megatron_jobs import finalize, held_worker, run
from nvidia_resiliency_ext.checkpointing.async_ckpt import core
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from nvrx_jobs import State, name, saved, wait_for_files
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.nvrx

_PACKAGE = "nvidia_resiliency_ext.checkpointing"


def _is_ours(*names: Any) -> list[bool]:
    return [each.__module__.startswith("holdfast.") for each in names]


def _replaced(rank: int, directory: str, is_first: bool) -> None:
    sys.modules["megatron"] = None  # type: ignore[assignment]
    if is_first:
        holdfast.nvrx.install()
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver, torch_ckpt
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager

    def names() -> list[Any]:
        return [core.AsyncCallsQueue, filesystem_async.FileSystemWriterAsync, state_dict_saver.save_state_dict_async_plan,
                state_dict_saver.save_state_dict_async_finalize, torch_ckpt.TorchAsyncCheckpoint, local_manager.LocalCheckpointManager]  # fmt: skip

    assert all(_is_ours(*names())) == is_first
    holdfast.nvrx.install()
    assert all(_is_ours(*names()))
    assert issubclass(local_manager.LocalCheckpointManager, holdfast.nvrx.LocalCheckpointManager.__base__)
    manager = local_manager.LocalCheckpointManager(directory)
    saved(manager, 1)
    assert holdfast.verify(Path(manager.local_ckpt_dir) / name(1, rank))["checked"] == "XXH3-128 digests of the seal"
    holdfast.nvrx.uninstall()
    assert not any(_is_ours(*names()))
    assert local_manager.LocalCheckpointManager(directory).find_latest() == 1


@pytest.mark.parametrize("order", ["installed first", "imported first"])
def test_names_are_replaced_and_put_back(tmp_path: Path, order: str) -> None:
    run(1, tmp_path, _replaced, str(tmp_path / "local"), order == "installed first")


def _writer(rank: int, directory: str) -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_finalize,
        save_state_dict_async_plan,
    )
    from torch.distributed.checkpoint import DefaultSavePlanner, load

    queue = AsyncCallsQueue(persistent=True)
    for number in range(3):
        state = {"rows": torch.full((64, 8), float(number)), f"of rank {rank}": torch.full((9,), float(rank + number))}
        path = f"{directory}/iter_{number}"
        writer = FileSystemWriterAsync(path, thread_count=2)
        planned = save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=True)
        save, preload, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(
            save, arguments, [lambda planned=planned: save_state_dict_async_finalize(*planned), dist.barrier],
            async_fn_kwargs={}, preload_fn=preload,
        )  # fmt: skip
        queue.schedule_async_request(request)
        for tensor in state.values():
            tensor.add_(100)
        finalize(queue)
        found = {"rows": torch.zeros(64, 8), f"of rank {rank}": torch.zeros(9)}
        load(found, checkpoint_id=path)
        assert all(torch.equal(found[key] + 100, state[key]) for key in found)
        assert holdfast.dcp.verify(path)["verdict"] == "sound"
    queue.close()


def _writer_installed(rank: int, directory: str) -> None:
    holdfast.nvrx.install()
    _writer(rank, directory)


def test_the_writer_saves_what_was_there_at_the_call(tmp_path: Path) -> None:
    run(2, tmp_path, _writer_installed, str(tmp_path / "run"))


def _no_group(rank: int, directory: str) -> None:
    from holdfast.megatron.queue import AsyncCallsQueue
    from holdfast.nvrx import LocalCheckpointManager

    dist.destroy_process_group()
    manager, queue = LocalCheckpointManager(directory), AsyncCallsQueue()
    for iteration, no_dist in ((1, True), (2, False)):
        queue.schedule_async_request(manager.save(State(iteration, rank), iteration, is_async=True))
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist) == [iteration - 1]
        wait_for_files(manager, name(iteration, rank))
    worker = held_worker()
    queue.schedule_async_request(manager.save(State(3, rank), 3, is_async=True))
    assert queue.maybe_finalize_async_calls() == [], "a call without blocking has waited"
    assert queue.get_num_unfinalized_calls() == 1
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(CheckpointingException, match="save local checkpoint 3: rank 0: "):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.schedule_async_request(core.AsyncRequest(os._exit, (3,), []))
    with pytest.raises(CheckpointException) as raised:
        queue.maybe_finalize_async_calls(blocking=True)
    assert list(raised.value.failures) == [0]
    assert queue.get_num_unfinalized_calls() == 0


def test_without_any_process_group_requests_are_finalized(tmp_path: Path) -> None:
    run(1, tmp_path, _no_group, str(tmp_path / "local"))


def _torch_save(rank: int, directory: str) -> None:
    from holdfast.nvrx import TorchAsyncCheckpoint

    checkpoint = TorchAsyncCheckpoint()
    state = {"x": torch.full((1 << 16,), float(rank)), "step": 7}
    for number in range(3):
        checkpoint.async_save(state, f"{directory}/{number}-{rank}.pt")
        state["x"].add_(1)
        checkpoint.finalize_async_save()
    checkpoint.finalize_async_save(blocking=True, no_dist=False)
    for number in range(3):
        for other in range(2):
            found = torch.load(f"{directory}/{number}-{other}.pt")
            assert found["step"] == 7 and bool((found["x"] == other + number).all())
    with faults.file_size_limit(8192 if rank == 1 else 1 << 30):
        checkpoint.async_save(state, f"{directory}/small-{rank}.pt")
        with pytest.raises(holdfast.Error, match="small-1.pt") as caught:
            checkpoint.finalize_async_save(blocking=True, no_dist=False)
    assert ("rank 1" in str(caught.value)) == (rank == 0)
    worker = held_worker()
    checkpoint.async_save(state, f"{directory}/cancelled-{rank}.pt")
    os.kill(worker, signal.SIGCONT)
    checkpoint.close(abort=True)
    with pytest.raises(holdfast.Error, match="pickle_module=torch is not used here"):
        checkpoint.async_save(state, f"{directory}/other-{rank}.pt", torch)
    TorchAsyncCheckpoint.save(state, Path(directory) / f"last-{rank}.pt")
    assert torch.load(f"{directory}/last-{rank}.pt")["step"] == 7
    checkpoint.close()


def test_torch_save_in_the_background(tmp_path: Path) -> None:
    run(2, tmp_path, _torch_save, str(tmp_path / "run"))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [each for each in sys.modules if each.startswith(("nvidia_resiliency_ext", "holdfast.nvrx."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    monkeypatch.delitem(vars(holdfast.nvrx), "LocalCheckpointManager", raising=False)
    with pytest.raises(ModuleNotFoundError, match="holdfast.nvrx.LocalCheckpointManager needs nvidia-resiliency-ext"):
        holdfast.nvrx.LocalCheckpointManager  # noqa: B018
