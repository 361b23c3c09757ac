"""Bad input to Megatron's saves: a clear error, the older checkpoint stays, and the next save works."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_jobs import State, fresh, run
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.megatron

ways = pytest.mark.parametrize("way", ["synchronous", "mcore", "nvrx"])


def _save(state: Any, path: Any, way: str, **options: Any) -> None:
    from megatron.core.dist_checkpointing import save

    from holdfast.megatron.queue import AsyncCallsQueue

    strategy = holdfast.megatron.SaveStrategy(**options)
    if way == "synchronous":
        save(state, path, strategy)
        return
    queue = AsyncCallsQueue()
    queue.schedule_async_request(save(state, path, strategy, async_sharded_save=True, async_strategy=way))
    queue.maybe_finalize_async_calls(blocking=True)


def _with(value: Any) -> dict[str, Any]:
    """A state with one more entry, on rank 0 alone."""
    state = State(2).sharded()
    return {**state, "more": value} if dist.get_rank() == 0 else state


def _meta() -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return _with(ShardedTensor.from_rank_offsets("of.no.data", torch.empty(3, device="meta")))


def _unpicklable() -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedObject

    return _with(ShardedObject("a.lock", threading.Lock(), (1,), (0,)))


def _said(do: Callable[[], Any]) -> str:
    """Class and text of what is raised, by the failures of all ranks where they are told together."""
    with pytest.raises(BaseException) as raised:  # a CheckpointException is no Exception
        do()
    error = raised.value
    if isinstance(error, CheckpointException):
        return " ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
    return f"{type(error).__name__}: {error}"


def _bad_saves(rank: int, directory: str, way: str) -> None:
    path = fresh(f"{directory}/run")
    if rank == 0:
        Path(directory, "file").write_text("precious")
    dist.barrier()
    _save(State(1).sharded(), path, way)
    cases: list[tuple[Callable[[], Any], Any, dict[str, Any], str]] = [
        (_meta, path, {}, "rank 0: Error: save of.no.data: a tensor on the meta device has no data; give it values"),
        (State(2).sharded, "/sys", {}, "save /sys: take a name: "),
        (State(2).sharded, path, {"late": [3]}, "Error: late=int: nothing says when it changes; name the optimizer"),
    ]
    if dist.get_world_size() == 1:  # Megatron's own checks; on several ranks the other ones wait
        cases += [
            (_unpicklable, path, {}, "TypeError: cannot pickle '_thread.lock' object"),
            (State(2).sharded, f"{directory}/none", {}, "FileNotFoundError: [Errno 2] No such file or directory"),
            (State(2).sharded, f"{directory}/file", {}, "NotADirectoryError: [Errno 20] Not a directory"),
            (State(2).sharded, f"{directory}/file/below", {}, "NotADirectoryError: [Errno 20] Not a directory"),
            (State(2).sharded, "", {}, "Error: open '': the path is empty"),
            (State(2).sharded, path, {"late": 3}, "Error: late=int: optimizers or tensors are expected, in a list"),
            (State(2).sharded, path, {"bytes_a_minute": 3}, "unexpected keyword argument 'bytes_a_minute'"),
        ]
    for make, where, options, said in cases:
        found = _said(lambda make=make, where=where, options=options: _save(make(), where, way, **options))
        assert said in found, (said, found)
        assert State(1).wrong_elements_in(path) == 0
        assert not [name for name in os.listdir(path) if name.endswith(".tmp")], os.listdir(path)
    if way != "synchronous":
        found = _said(lambda: _save(State(2).sharded(), path, "other"))
        assert found == "TypeError: there is no async_strategy other; there are nvrx and mcore"
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    assert Path(directory, "file").read_text() == "precious"
    _save(State(3).sharded(), path, way)
    assert State(3).wrong_elements_in(path) == 0
    assert holdfast.dcp.verify(path)["verdict"] == "sound"


@ways
def test_a_bad_save_is_refused_with_reason(way: str, tmp_path: Path) -> None:
    run(1, tmp_path, _bad_saves, str(tmp_path / "run"), way)


def test_a_bad_save_of_one_rank_is_told_to_both(tmp_path: Path) -> None:
    run(2, tmp_path, _bad_saves, str(tmp_path / "run"), "mcore")


def _bad_loads(rank: int, directory: str) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor, load

    good = fresh(f"{directory}/good")
    _save(State(1).sharded(), good, "mcore")
    (data,) = (name for name in os.listdir(good) if name.endswith(".distcp"))

    def partial(change: Callable[[Path], Any]) -> str:
        path = Path(directory, "partial")
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(good, path)
        change(path)
        return str(path)

    # By Megatron's loader, and by ours, which says what is missing.
    for change, said, verified in [
        (lambda p: (p / ".metadata").unlink(), "metadata is None", "load {}/.metadata: there is no such file"),
        (lambda p: (p / "metadata.json").unlink(), "is not a distributed checkpoint", ""),
        (lambda p: (p / data).unlink(), "No such file or directory", "incomplete"),
        (lambda p: os.truncate(p / data, 1000), "EOFError", "corrupt"),
        (lambda p: [entry.unlink() for entry in p.iterdir()], "is not a distributed checkpoint",
         "load {}/.metadata: there is no such file"),
    ]:  # fmt: skip
        path = partial(change)
        assert said in (found := _said(lambda path=path: load(State(0).sharded(), path))), (said, found)
        if verified in ("incomplete", "corrupt"):
            report = holdfast.dcp.verify(path)
            assert report["verdict"] == verified and data in {fault["file"] for fault in report["faults"]}, report
        elif verified:
            with pytest.raises(holdfast.Error) as raised:
                holdfast.dcp.verify(path)
            assert verified.format(path) in str(raised.value)
    more = {**State(0).sharded(), "more": ShardedTensor.from_rank_offsets("more", torch.zeros(3))}
    for state, said in [
        (State(0, columns=512).sharded(), "Global shape mismatch for loaded (torch.Size([64, 256])) and expected ((64, 512))"),
        (more, "more from model not in state dict"),
    ]:
        assert said in (found := _said(lambda state=state: load(state, good))), (said, found)
    assert "none does not exist" in _said(lambda: load(State(0).sharded(), f"{directory}/none"))
    assert State(1).wrong_elements_in(good) == 0


def test_a_partial_checkpoint_is_never_loaded(tmp_path: Path) -> None:
    run(1, tmp_path, _bad_loads, str(tmp_path / "run"))


def test_what_cannot_be_late_is_refused_before_anything_is_replaced() -> None:
    from megatron.core.dist_checkpointing.strategies import async_utils

    before = async_utils.AsyncCallsQueue
    with pytest.raises(holdfast.Error, match="late=int: optimizers or tensors are expected, in a list, or a function"):
        holdfast.megatron.install(late=3)  # type: ignore[arg-type]
    assert async_utils.AsyncCallsQueue is before
