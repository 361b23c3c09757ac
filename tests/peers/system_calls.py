"""Counts what each saver asks of the disk in one save: fsyncs of its file and of directories, renames.

    build/venv-frameworks/bin/python tests/peers/system_calls.py [SAVER...]

Needs strace(1). Each saver saves 4 MiB over a checkpoint of the same name, in a process of its own; the calls
of the second save count. docs/compared.md has the results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile

import torch

SAVERS = ("torch.save", "dcp.async_save thread", "dcp.async_save process", "Lightning AsyncCheckpointIO", "holdfast",
          "holdfast.dcp")  # fmt: skip
SINGLE_FILE = ("torch.save", "Lightning AsyncCheckpointIO")
CALLS = "fsync,fdatasync,sync_file_range,rename,renameat,renameat2"


def saving(saver: str):
    """A function that saves a state under a name."""
    if saver == "torch.save":
        return torch.save
    if saver.startswith("Lightning"):
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        plugin = AsyncCheckpointIO(TorchCheckpointIO())

        def save(state: dict, path: str) -> None:
            plugin.save_checkpoint(state, path)
            plugin._executor.submit(int).result()  # behind the save, in the plugin's only thread

        return save
    import holdfast
    import holdfast.dcp

    if saver == "holdfast":
        return lambda state, path: holdfast.save(state, path, replace=True)
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/group", rank=0, world_size=1)
    if saver == "holdfast.dcp":
        return lambda state, path: holdfast.dcp.async_save(state, checkpoint_id=path).result()
    kind = AsyncCheckpointerType[saver.split()[-1].upper()]
    return lambda state, path: dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind).result()


def one(saver: str) -> None:
    save, state = saving(saver), {"w": torch.ones(1 << 20)}
    save(state, "saved")
    with open("first-is-done", "wb") as file:  # seen in the trace: what follows is the second save's
        os.fsync(file.fileno())
    save(state, "saved")
    os._exit(0)


def trace(saver: str) -> str:
    with tempfile.TemporaryDirectory() as directory:
        log = os.path.join(directory, "log")
        command = ["strace", "-f", "-y", "-qq", "-o", log, "-e", f"trace={CALLS}", sys.executable, "-B"]
        done = subprocess.run([*command, os.path.abspath(__file__), "--one", saver], cwd=directory, timeout=300)
        assert done.returncode == 0, saver
        with open(log, encoding="utf-8", errors="replace") as file:
            calls = file.read().partition("first-is-done")[2].splitlines()[1:]
        targets = [m[1] for call in calls if (m := re.search(r"(?:fsync|fdatasync)\(\d+<([^>]*)>", call))]
        in_directory = [t for t in targets if t.startswith(directory)]
        is_file = saver in SINGLE_FILE
        folders = sum(
            t == directory or not is_file and re.fullmatch(r"\.?saved(\.\w+-\w+)?", os.path.basename(t)) is not None
            for t in in_directory
        )
        renames = sum("rename" in call and "unfinished" not in call for call in calls)
        return f"| {saver} | {len(in_directory) - folders} | {folders} | {renames} |"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    print("| saver | fsync of files | fsync of directories | renames |\n| --- | --- | --- | --- |")
    for name in sys.argv[1:] or SAVERS:
        print(trace(name), flush=True)
