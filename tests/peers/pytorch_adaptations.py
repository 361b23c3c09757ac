"""What is changed in PyTorch's tests, and which of them cannot be run with Holdfast, and why."""

from __future__ import annotations

# The files of a checkout, and whether the asynchronous tests in them run a second time, with
# holdfast.dcp.async_save in the place of the framework's.
FILES = {
    "test_file_system_checkpoint_cpu.py": False,
    "test_save_load_api.py": False,
    "test_checkpoint.py": False,
    "test_async_process_executor.py": False,
    "e2e/test_e2e_save_and_load.py": True,
    "test_dtensor_checkpoint.py": False,
    "test_dtensor_resharding.py": False,
    "test_state_dict_stager.py": False,
    "test_file_system_checkpoint.py": False,
    "test_fsspec.py": False,
}
ASYNC = "*_async_*"

# By key, as the journal of a run names them: the change, and its reason.
CHANGES = {
    "no GPU": (
        "the decorator that demands GPUs is left out",
        "the test runs on the CPU's process group as it is",
    ),
    "cuda()": ("Module.cuda() returns the module", "there is no GPU"),
    "fully_shard": (
        "fully_shard in the place of FullyShardedDataParallel",
        "the latter refuses to run without a GPU",
    ),
    "placement": (
        "shards lie on rank:R/cpu, not rank:R/DEVICE:R",
        "the CPU has no device numbers",
    ),
    "gloo": ("gloo in the place of NCCL", "there is no GPU"),
    "argument thread_count": (
        "FileSystemWriter's thread_count is dropped",
        "the writing is the worker process's, with a number of threads of its own",
    ),
    "argument cache_staged_state_dict": (
        "FileSystemWriter's cache_staged_state_dict is dropped",
        "staged memory is always kept for the next save, up to a cap",
    ),
    "staging options": (
        "DefaultStager's options are dropped; the stager is holdfast.dcp.Stager",
        "it has no pinned or shared memory to choose: it stages in its own",
    ),
    "faulty storage": (
        "the writer and the reader that fail derive from Holdfast's and fail at the same points; "
        "a save that works goes before each that fails, and must stay",
        "the test's own classes write and read nothing",
    ),
    "failing writer": (
        "the writer that fails once derives from Holdfast's",
        "the test's own class writes nothing",
    ),
}

# Tests that are not run: pattern of FILE::CLASS.TEST, and the reason.
_TRANSFORMS = (
    "a stream transformation, by FileSystemWriter's private argument _extensions: Holdfast writes "
    "tensors as they lie"
)
IMPOSSIBLE = {
    "test_file_system_checkpoint_cpu.py::*Rot13.*": _TRANSFORMS,
    "test_file_system_checkpoint_cpu.py::*ZStandard.*": _TRANSFORMS,
    "test_async_process_executor.py::TestProcessGroupInitInfo.*": "tests a private class of "
    "PyTorch; no writer, reader or stager takes part",
    "test_checkpoint.py::TestDistributedCheckpointing.*": "tests a private function of PyTorch's "
    "planner; no writer, reader or stager takes part",
    "test_state_dict_stager.py::*": "tests the private class StateDictStager, which no AsyncStager "
    "has; Holdfast's stager is tested through async_save",
    "test_file_system_checkpoint.py::*": "test_file_system_checkpoint_cpu.py again, on two GPUs",
    "test_fsspec.py::*": "writes to URLs, which Holdfast leaves to the framework",
}

# Tests that want a newer PyTorch than the installed one: pattern, what they look for.
NEEDS = {
    "test_file_system_checkpoint_cpu.py::*.test_dtype_mismatch_casting": (
        "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner",
        "allow_unsafe_types",
    ),
}

# Saves that another writer is meant to do, as the test says: pattern, reason.
STOCK_SAVES = {
    "test_save_load_api.py::*.test_auto_detect": "one save is made to fall back to fsspec's "
    "writer, which is what is tested",
}
