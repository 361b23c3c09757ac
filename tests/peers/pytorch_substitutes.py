"""Holdfast's classes in the place of PyTorch's, and a journal of what they did in a test.

`install` puts them there, in a process that is about to import PyTorch's tests; ranks are forked
from it. What a test process must be able to pickle stands here, so that the processes that PyTorch
starts by itself find it by name. Every save is proved the moment it is committed: the tests delete
their directories.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._fsspec_filesystem
import torch.distributed.checkpoint._storage_utils as storage_utils
import torch.distributed.checkpoint.staging as torch_staging
import torch.distributed.checkpoint.state_dict_saver as state_dict_saver
from journal import JOURNAL, TEST, note
from torch.distributed.checkpoint.filesystem import _FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.futures import Future

import holdfast.dcp
from holdfast.dcp import metadata as holdfast_metadata

SCRATCH = "HOLDFAST_PEERS_SCRATCH"


def adapted(key: str) -> None:
    """Notes that a change of `pytorch_adaptations.CHANGES` took part in the test."""
    note("adapted", key=key)


def scratch(name: str) -> str:
    """A directory of the test's own: one for all ranks, or one for each that knows no others."""
    test = re.sub(r"\W+", "_", os.environ[TEST])
    job = "ranks" if dist.is_initialized() else f"process-{os.getpid()}"
    return os.path.join(os.environ[SCRATCH], test, job, name)


def prove(path: str | os.PathLike[str], ranks: int | None = None) -> dict[str, Any]:
    """What the manifests of a checkpoint say about it."""
    report = holdfast.dcp.verify(path)
    metadata = holdfast_metadata.read(Path(path) / ".metadata")
    save_id = getattr(metadata.storage_meta, "save_id", None)
    manifests = [
        name for name in os.listdir(path)
        if name.startswith("rank-") and name.endswith(f"-{save_id}.manifest.json")
    ]  # fmt: skip
    for name in manifests:
        json.loads((Path(path) / name).read_bytes())
    return {
        "path": os.fspath(path),
        "save_id": save_id,
        "verdict": report["verdict"],
        "manifests": len(manifests),
        "ranks": len(manifests) if ranks is None else ranks,
    }


# ---- Writers and readers.


class Writer(holdfast.dcp.StorageWriter):
    """`StorageWriter`, made as a ``FileSystemWriter`` is made."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        kept = {"overwrite": options.pop("overwrite")} if "overwrite" in options else {}
        for name in options:
            adapted(f"argument {name}")
        super().__init__(path, **kept)


class Reader(holdfast.dcp.StorageReader):
    """`StorageReader`, made as a ``FileSystemReader`` is made."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)


class Stager(holdfast.dcp.Stager):
    """`Stager`, made as a ``DefaultStager`` is made."""

    def __init__(self, options: Any = None) -> None:
        if options is not None:
            adapted("staging options")
        super().__init__()


class _Faulty:
    """Fails where and on which ranks a test says."""

    def __init__(self, fail_conf: dict[str, list[int]]) -> None:
        adapted("faulty storage")
        self.fail_conf = fail_conf

    def _fails(self, name: str) -> bool:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return rank in (self.fail_conf.get(name) or ())

    def _fail_rank(self, name: str) -> None:
        if self._fails(name):
            raise ValueError(f"injected failure of {name}")

    def _failed(self, name: str, future: Future) -> Future:
        if not self._fails(name):
            return future
        future.wait()
        failed: Future = Future()
        failed.set_exception(ValueError(f"injected failure of {name}"))
        return failed

    # What writers and readers both have; the class beside this one does it.

    def prepare_local_plan(self, plan: Any) -> Any:
        self._fail_rank("fail_prepare_local_plan")
        return super().prepare_local_plan(plan)  # type: ignore[misc]

    def prepare_global_plan(self, plans: Any) -> Any:
        self._fail_rank("fail_prepare_global_plan")
        return super().prepare_global_plan(plans)  # type: ignore[misc]


class FaultyWriter(_Faulty, holdfast.dcp.StorageWriter):
    """Holdfast's writer with the failures of the tests' ``FaultyStorageWriter``."""

    def __init__(self, fail_conf: dict[str, list[int]]) -> None:
        _Faulty.__init__(self, fail_conf)
        holdfast.dcp.StorageWriter.__init__(self, scratch("faulty"))

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        self._fail_rank("fail_set_up_storage_writer")
        super().set_up_storage_writer(*args, **kwargs)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._fail_rank("fail_write_data")
        return self._failed("fail_write_data_async", super().write_data(plan, planner))

    def finish(self, metadata: Any, results: Any) -> None:
        self._fail_rank("fail_finish")
        super().finish(metadata, results)


class FaultyReader(_Faulty, holdfast.dcp.StorageReader):
    """Holdfast's reader with the failures of the tests' ``FaultyStorageReader``."""

    def __init__(self, metadata: Any, fail_conf: dict[str, list[int]]) -> None:
        _Faulty.__init__(self, fail_conf)
        holdfast.dcp.StorageReader.__init__(self, scratch("faulty"))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self._fail_rank("fail_read_metadata")
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        self._fail_rank("fail_set_up_storage_reader")
        super().set_up_storage_reader(*args, **kwargs)

    def read_data(self, plan: Any, planner: Any) -> Any:
        self._fail_rank("fail_read_data")
        return self._failed("fail_read_data_async", super().read_data(plan, planner))


class FailingOnceWriter(holdfast.dcp.StorageWriter):
    """Holdfast's writer with the failure of the tests' ``TestStorageWriter``."""

    def __init__(self, behavior: str = "success") -> None:
        adapted("failing writer")
        self.behavior = behavior
        super().__init__(scratch("process"))

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.behavior == "fail_once":
            self.behavior = "success"
            raise RuntimeError("fail_once policy triggered failure")
        return super().write_data(plan, planner)


# ---- The journal's eyes. They are there wherever this file is imported.


def _observe() -> None:
    ours, stock = holdfast.dcp.StorageWriter.complete, _FileSystemWriter.finish

    # Not finish: the framework calls it, and holdfast.dcp.async_save does not.
    @functools.wraps(ours)
    def complete(self: Any, metadata: Any, world_size: int, *args: Any, **kwargs: Any) -> None:
        ours(self, metadata, world_size, *args, **kwargs)
        try:
            proof = prove(self.path, world_size)
        except Exception as error:
            proof = {"path": str(self.path), "verdict": f"{type(error).__name__}: {error}"}
        note("save", **proof)

    @functools.wraps(stock)
    def stock_finish(self: Any, metadata: Any, results: Any) -> None:
        stock(self, metadata, results)
        note("stock save", path=str(self.path), writer=type(self).__name__)

    holdfast.dcp.StorageWriter.complete = complete
    _FileSystemWriter.finish = stock_finish


if os.environ.get(JOURNAL):
    _observe()


# ---- Places.


def _lifted(*_: Any, **__: Any) -> Any:
    """In the place of decorators that demand GPUs."""

    def decorator(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            adapted("no GPU")
            return function(*args, **kwargs)

        return wrapper

    return decorator


def _stays(self: Any, *_: Any, **__: Any) -> Any:
    """In the place of ``Module.cuda``."""
    adapted("cuda()")
    return self


def install(own_async_save: bool) -> None:
    """Puts Holdfast, and what lets tests run without GPUs, where tests look for PyTorch's.

    Args:
        own_async_save: `holdfast.dcp.async_save` in the place of the framework's, too.
    """
    for module in (dcp, storage_utils):
        module.FileSystemWriter = Writer
        module.FileSystemReader = Reader
    torch_staging.DefaultStager = Stager
    if own_async_save:
        for module in (dcp, state_dict_saver):
            module.async_save = holdfast.dcp.async_save

    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.distributed._shard.sharded_tensor as sharded
    import torch.testing._internal.distributed._tensor.common_dtensor as dtensor

    if not hasattr(dtensor, "_get_device_type"):  # newer tests ask for it
        dtensor._get_device_type = lambda world_size: "cpu"
    for module in (common, dtensor):
        module.skip_if_lt_x_gpu = _lifted
    common.requires_accelerator_dist_backend = _lifted
    torch.nn.Module.cuda = _stays

    with_comms = sharded.with_comms

    def with_gloo(func: Any = None, init_rpc: bool = True, backend: str = "nccl") -> Any:
        if func is None:
            return functools.partial(with_gloo, init_rpc=init_rpc, backend=backend)
        if backend != "nccl":
            return with_comms(func, init_rpc=init_rpc, backend=backend)

        @functools.wraps(func)
        def noted(*args: Any, **kwargs: Any) -> Any:
            adapted("gloo")
            return func(*args, **kwargs)

        return with_comms(noted, init_rpc=init_rpc, backend="gloo")

    sharded.with_comms = with_gloo

    # Ranks are forked: they inherit all of this, and need not import PyTorch again.
    torch.multiprocessing.set_start_method("fork")
    fork = torch.multiprocessing.get_context("fork").Process
    common.MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    run_test = common.MultiProcContinuousTest._run_test_given_id.__func__

    @classmethod
    def run_noted(cls: Any, test_id: str, **kwargs: Any) -> None:
        # These ranks live longer than a test.
        os.environ[TEST] = ".".join(test_id.split(".")[-2:])
        run_test(cls, test_id, **kwargs)

    common.MultiProcContinuousTest._run_test_given_id = run_noted


# ---- Changes in single test files, after their import.


def _in_checkpoint(module: Any) -> None:
    module.FaultyStorageWriter = FaultyWriter
    module.FaultyStorageReader = FaultyReader
    tests = module.TestDistributedFailure
    test_save = tests._test_save
    describe = module._create_default_local_metadata

    def save_twice(self: Any, state_dict: Any, coordinator: int = 0, **kwargs: Any) -> None:
        """A save that works, then the test's one: the first must stay as it is."""
        no_dist = not dist.is_initialized()
        module.save_state_dict(state_dict, FaultyWriter({}), no_dist=no_dist)
        path = scratch("faulty")
        before = prove(path)
        if not no_dist:
            dist.barrier()
        test_save(self, state_dict, coordinator, **kwargs)
        after = prove(path)
        note("kept", verdict=after["verdict"], same=before["save_id"] == after["save_id"])
        if not no_dist:
            dist.barrier()

    def save_and_describe(state_dict: Any) -> Any:
        """Saves what the test is about to load."""
        module.save_state_dict(state_dict, FaultyWriter({}), no_dist=not dist.is_initialized())
        return describe(state_dict)

    def get_spec(self: Any) -> Any:
        adapted("placement")
        ranks = range(dist.get_world_size())
        return module.ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in ranks])

    tests.get_spec = get_spec
    tests._test_save = save_twice
    module._create_default_local_metadata = save_and_describe


def _in_process_executor(module: Any) -> None:
    module.TestStorageWriter = FailingOnceWriter


def _fully_sharded(module: Any, device_mesh: Any = None, **_: Any) -> Any:
    """In the place of ``FullyShardedDataParallel``, which refuses to run without a GPU."""
    adapted("fully_shard")
    if isinstance(module, FSDPModule):
        return module
    if device_mesh is not None and device_mesh.ndim == 2:
        names = ("replicate", "shard")
        device_mesh = init_device_mesh("cpu", tuple(device_mesh.shape), mesh_dim_names=names)
    return fully_shard(module, mesh=device_mesh)


def _in_save_load(module: Any) -> None:
    module.FSDP = _fully_sharded


def _in_end_to_end(module: Any) -> None:
    module.FSDP = _fully_sharded

    def backend(self: Any) -> str:
        adapted("gloo")
        return "gloo"

    module.TestE2ESaveAndLoad.backend = property(backend)


AFTER_IMPORT = {
    "test_checkpoint.py": _in_checkpoint,
    "test_async_process_executor.py": _in_process_executor,
    "test_e2e_save_and_load.py": _in_end_to_end,
    "test_save_load_api.py": _in_save_load,
}


def settle() -> None:
    """Waits for saves that a test left in flight."""
    flush = getattr(sys.modules.get("holdfast"), "flush", None)
    if flush is not None:
        flush(30)
