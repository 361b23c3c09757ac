"""Ways to make saving and loading fail for real, by name; each returns what was said.

docs/troubleshooting.md shows these messages, and `test_troubleshooting.py` compares.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import pickle
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_disk import mounted
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast import _native
from holdfast.dcp import staging

MIB = 1 << 20
PROVOCATIONS: dict[str, Callable[[Path], str]] = {}


def provocation(function: Callable[[Path], str]) -> Callable[[Path], str]:
    PROVOCATIONS[function.__name__.replace("_", "-")] = function
    return function


def said(act: Callable[[], Any]) -> str:
    """The error that `act` raises, as a person sees it."""
    with pytest.raises((holdfast.Error, KeyError)) as raised:
        act()
    return str(raised.value)


def save(path: Path | str, state: Any = None, **options: Any) -> dict[str, Any]:
    state = {"w": torch.ones(1000)} if state is None else state
    return holdfast.save_async(state, path, **options).wait(60)


@contextlib.contextmanager
def slow_save(directory: Path, arena: int = 16 * MIB) -> Iterator[holdfast.Save]:
    """One that holds half of the staging memory until the block ends."""
    holdfast.configure(arena_bytes=arena, bytes_per_second_max=64 << 10)
    try:
        handle = holdfast.save_async({"w": torch.ones(arena // 8)}, directory / "slow")
        yield handle
        with contextlib.suppress(holdfast.Error):
            handle.cancel()
            handle.wait(60)
    finally:
        holdfast.flush(60)
        holdfast.configure(arena_bytes=0, bytes_per_second_max=0)


# ---- Saving.


@provocation
def path_exists(directory: Path) -> str:
    save(directory / "step-1")
    return said(lambda: save(directory / "step-1"))


@provocation
def not_a_checkpoint(directory: Path) -> str:
    (directory / "step-1").mkdir()
    (directory / "step-1/notes.txt").write_text("mine")
    return said(lambda: save(directory / "step-1", replace=True))


@provocation
def url(directory: Path) -> str:
    return said(lambda: save("s3://bucket/step-1"))


@provocation
def disk_full(directory: Path) -> str:
    """On a file system of 8 MiB, in this test's own mount."""
    with mounted(directory / "small", 8) as small:
        return said(lambda: save(small / "step-1", {"w": torch.ones(4 * MIB)}))


@provocation
def file_size_limit(directory: Path) -> str:
    save(directory / "before")  # the staging memory is a file, too: it is there from now on
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        return said(lambda: save(directory / "step-1", {"w": torch.ones(MIB)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@provocation
def memory_full_fail(directory: Path) -> str:
    with slow_save(directory):
        state = {"w": torch.ones(3 * MIB)}
        return said(lambda: save(directory / "next", state, when_full="fail"))


@provocation
def memory_full_skip(directory: Path) -> str:
    with slow_save(directory):
        state = {"w": torch.ones(3 * MIB)}
        return said(lambda: save(directory / "next", state, when_full="skip"))


@provocation
def not_durable_yet(directory: Path) -> str:
    with slow_save(directory) as handle:
        return said(lambda: handle.wait(0.05))


@provocation
def cancelled(directory: Path) -> str:
    with slow_save(directory) as handle:
        handle.cancel()
        return said(lambda: handle.wait(60))


@provocation
def worker_killed(directory: Path) -> str:
    with slow_save(directory) as handle:
        while handle._native.worker_pid is None:
            pass
        os.kill(handle._native.worker_pid, signal.SIGKILL)
        return said(lambda: handle.wait(60))


@provocation
def rank_failed(directory: Path) -> str:
    attempt = _native.new_attempt()
    of_rank_1 = _native.announce_save(str(directory), "step-1", attempt, 1, 2, None)
    of_rank_1.abandon("a disk that is full")
    return said(lambda: save(directory / "step-1", {}, rank=0, world_size=2, attempt=attempt))


@provocation
def rank_never_calls(directory: Path) -> str:
    holdfast.configure(time_liveness_max=1.0)
    attempt = _native.new_attempt()
    try:
        return said(lambda: save(directory / "step-1", {}, rank=0, world_size=2, attempt=attempt))
    finally:
        holdfast.configure(time_liveness_max=30.0)


@provocation
def configured_in_flight(directory: Path) -> str:
    with slow_save(directory):
        return said(lambda: holdfast.configure(engine="pwrite"))


@provocation
def unknown_option(directory: Path) -> str:
    return said(lambda: holdfast.configure(compression="zstd")).split("; there is")[0]


@provocation
def unpicklable(directory: Path) -> str:
    return said(lambda: save(directory / "step-1", {"loader": {"lock": threading.Lock()}}))


@provocation
def objects_refused(directory: Path) -> str:
    state = {"w": torch.ones(2), "ratio": Fraction(1, 3)}
    return said(lambda: save(directory / "step-1", state, objects="refuse"))


@provocation
def quantized(directory: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    return said(lambda: save(directory / "step-1", {"model": {"w": tensor}}))


@provocation
def meta_tensor(directory: Path) -> str:
    state = {"model": torch.nn.Linear(2, 2, device="meta")}
    return said(lambda: save(directory / "step-1", state))


@provocation
def freed_storage(directory: Path) -> str:
    model = torch.nn.Linear(4, 2)
    model.weight.untyped_storage().resize_(0)
    return said(lambda: save(directory / "step-1", {"model": model}))


@provocation
def no_driver(directory: Path) -> str:
    """As for a tensor on a GPU, which need not be there for it."""
    from holdfast import _devices

    message = said(lambda: _devices.device_of(torch.device("cuda", 0)) and None)
    if "load the driver" not in message:
        pytest.skip("there is a driver here")
    return message


@provocation
def cycle(directory: Path) -> str:
    state: dict[str, Any] = {"a": {}}
    state["a"]["b"] = state
    return said(lambda: save(directory / "step-1", state))


@provocation
def worker_program(directory: Path) -> str:
    from holdfast._programs import program

    holdfast.configure(worker_program=str(directory / "holdfast-worker"))
    try:
        return said(lambda: save(directory / "step-1"))
    finally:
        holdfast.configure(worker_program=program("holdfast-worker"))


@provocation
def stale(directory: Path) -> str:
    """No error, but a warning."""
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("holdfast")
    logger.addHandler(handler)
    try:
        for step in (1, 2):
            save(directory / f"step-{step}", {"w": torch.ones(1000)}, step=step)
    finally:
        logger.removeHandler(handler)
    return records[-1]


def in_child(program: str, *arguments: Any, allowed: bool = True) -> str:
    """What a program prints in a process of its own, in which io_uring may be forbidden."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=None if allowed else forbid_io_uring,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_FILTER = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "rehearse" / "no_io_uring.py"))


def forbid_io_uring() -> None:
    """Calls of io_uring give EPERM from now on, as container engines have it."""

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.c_char_p)]

    one = Program(len(_FILTER["FILTER"]) // _FILTER["INSTRUCTION_BYTES"], _FILTER["FILTER"])
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(
        set_seccomp, mode_filter, ctypes.byref(one), 0, 0
    ):
        os._exit(99)


_ENGINE = """
import sys, torch, holdfast
holdfast.configure(engine=sys.argv[2])
try:
    report = holdfast.save_async({"w": torch.ones(9)}, sys.argv[1]).wait(60)
    print(report["engine"], "because:", report["engine_reason"])
except holdfast.Error as error:
    print(error)
"""


@provocation
def io_uring_forbidden(directory: Path) -> str:
    return in_child(_ENGINE, directory / "step-1", "auto", allowed=False)


@provocation
def io_uring_demanded(directory: Path) -> str:
    return in_child(_ENGINE, directory / "step-1", "io_uring", allowed=False)


@provocation
def other_process(directory: Path) -> str:
    handle = holdfast.save_async({"w": torch.ones(9)}, directory / "step-1")
    handle.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            handle.wait()
        except holdfast.Error as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, "rb") as pipe:
        return pipe.read().decode()


# ---- Loading.


@provocation
def nothing_there(directory: Path) -> str:
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def no_manifest(directory: Path) -> str:
    save(directory / "step-1")
    (directory / "step-1" / "rank-00000-of-00001.manifest.json").unlink()
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def no_checkpoint(directory: Path) -> str:
    return said(lambda: holdfast.find_newest(directory))


@provocation
def corrupt(directory: Path) -> str:
    save(directory / "step-1")
    file = directory / "step-1" / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def truncated(directory: Path) -> str:
    save(directory / "step-1")
    os.truncate(directory / "step-1" / "model-00000-of-00001.safetensors", 5000)
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def other_world_size(directory: Path) -> str:
    both = [
        holdfast.save_async(
            {"w": torch.full((9,), r)}, directory / "step-1", rank=r, world_size=2, attempt="1" * 32
        )
        for r in (0, 1)
    ]
    for handle in both:
        handle.wait(60)
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def other_layout(directory: Path) -> str:
    """As the first of two ranks, without the other."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        rows, all_rows = (DTensor.from_local(torch.ones(4, 8), mesh, [p]) for p in (Shard(0), Replicate()))
        save(directory / "step-1", {"model": {"w": rows}}, rank=0, world_size=1)
        into = {"model": {"w": all_rows}}
        return said(lambda: holdfast.load(directory / "step-1", into, rank=0))
    finally:
        dist.destroy_process_group()


@provocation
def no_cuda(directory: Path) -> str:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    save(directory / "step-1")
    # As a checkpoint that was saved from a GPU describes its tensors.
    return said(lambda: holdfast.load(directory / "step-1", map_location="cuda:0"))


@provocation
def other_shape(directory: Path) -> str:
    save(directory / "step-1", {"model": torch.nn.Linear(4, 4)})
    return said(lambda: holdfast.load(directory / "step-1", {"model": torch.nn.Linear(4, 8)}))


@provocation
def other_dtype(directory: Path) -> str:
    save(directory / "step-1")
    into = {"w": torch.ones(1000, dtype=torch.bfloat16)}
    return said(lambda: holdfast.load(directory / "step-1", into))


@provocation
def meta_target(directory: Path) -> str:
    save(directory / "step-1", {"model": torch.nn.Linear(2, 2)})
    into = {"model": torch.nn.Linear(2, 2, device="meta")}
    return said(lambda: holdfast.load(directory / "step-1", into=into))


@provocation
def other_keys(directory: Path) -> str:
    save(directory / "step-1", {"a": torch.ones(1), "b": torch.ones(1)})
    into = {"a": torch.ones(1), "c": torch.ones(1)}
    return said(lambda: holdfast.load(directory / "step-1", into))


@provocation
def object_not_allowed(directory: Path) -> str:
    save(directory / "step-1", {"args": argparse.Namespace(lr=0.1)})
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def not_from_python(directory: Path) -> str:
    """Only the tensors: as a C++ program would have saved them."""
    save(directory / "step-1")
    manifest = directory / "step-1" / "rank-00000-of-00001.manifest.json"
    assert "holdfast:structure" in json.dumps(json.loads(manifest.read_text()))
    native = holdfast._native
    plan = native.ModelPlan("model.safetensors", ["w"], ["F32"], [[4]], [16], [])
    memory = torch.ones(4)
    plan.renew(native.new_attempt(), [memory.data_ptr()], [], [])
    options = {"directory": str(directory), "worker_program": holdfast._programs.program("holdfast-worker")}
    door = native.Checkpointer(options).create_beside(options)
    door.save("other", plan, 1, False, "", False).wait_durable(60)
    return said(lambda: holdfast.load(directory / "other"))


# ---- With PyTorch's Distributed Checkpoint.


def the_error_in(failure: BaseException) -> str:
    """An exception of the framework has tracebacks of all ranks around it."""
    found = re.search(r"(load|open|reserve) .*?\[[A-Z_]+\]", str(failure))
    assert found, failure
    return found.group()


@provocation
def dcp_failed(directory: Path) -> str:
    """A rank whose data does not fit: what the framework's exception says of it."""
    with mounted(directory / "small", 8) as small:
        future = holdfast.dcp.async_save({"w": torch.ones(4 * MIB)}, checkpoint_id=small / "step-1")
        failure = future.exception(60)
        del future
    assert isinstance(failure, CheckpointException)
    return the_error_in(failure)


@provocation
def dcp_over_plain(directory: Path) -> str:
    save(directory / "step-1")
    with pytest.raises(CheckpointException) as raised:
        holdfast.dcp.async_save({"w": torch.ones(4)}, checkpoint_id=directory / "step-1").result(60)
    return str(raised.value.failures[0][0])


@provocation
def dcp_staging_cap(directory: Path) -> str:
    staging.trim()
    writer = holdfast.dcp.StorageWriter(directory / "step-1", staging_bytes_max=MIB)
    return said(lambda: dcp.async_save({"w": torch.ones(MIB)}, storage_writer=writer))


def load_dcp(path: Path, state: dict[str, Any]) -> str:
    with pytest.raises(BaseException) as raised:
        dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path))
    return the_error_in(raised.value)


@provocation
def commit_record_missing(directory: Path) -> str:
    save(directory / "step-1")
    (directory / "step-1" / "holdfast.commit.json").unlink()
    return said(lambda: holdfast.load(directory / "step-1"))


@provocation
def dcp_never_completed(directory: Path) -> str:
    path = directory / "step-1"
    holdfast.dcp.async_save({"w": torch.ones(4)}, checkpoint_id=path).result(60)
    (path / ".metadata").unlink()
    return load_dcp(path, {"w": torch.ones(4)})


@provocation
def dcp_metadata_changed(directory: Path) -> str:
    path = directory / "step-1"
    holdfast.dcp.async_save({"w": torch.ones(4)}, checkpoint_id=path).result(60)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = None
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return load_dcp(path, {"w": torch.ones(4)})


@provocation
def dcp_object_not_allowed(directory: Path) -> str:
    path = directory / "step-1"
    state = {"args": argparse.Namespace(lr=0.1)}
    holdfast.dcp.async_save(state, checkpoint_id=path).result(60)
    return load_dcp(path, state)
