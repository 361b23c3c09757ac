"""Memory beside the state: loading a DCP checkpoint takes a bounded amount, saving through a process no second copy."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from pathlib import Path

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import holdfast.dcp
from holdfast.dcp import staging

MIB = 1 << 20
_ROWS = 24 * MIB // 4 // 1024


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _load(rank: int, path: str, layout: str) -> tuple[int, bool]:
    shape = (_ROWS, 1024)
    if layout == "row-major":
        state = {str(i): torch.ones(shape) for i in range(8)}
    else:  # nothing can be read in place
        state = {str(i): torch.ones(shape[::-1]).t() for i in range(8)}
    warm = {"0": torch.ones(shape)}
    dcp.load(warm, storage_reader=holdfast.dcp.StorageReader(path))
    before = _peak()
    dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path))
    grown = _peak() - before
    right = all(bool((state[str(i)] == i).all()) for i in range(8))
    return grown, right


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_loading_grows_the_process_by_the_buffer_at_most(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "large"  # 192 MiB
    state = {str(i): torch.full((_ROWS, 1024), float(i)) for i in range(8)}
    if writer == "ours":
        dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))
    del state
    for layout in ("row-major", "transposed"):
        ((grown, right),) = dcp_ranks.run_ranks(1, tmp_path, _load, str(path), layout)
        assert right
        assert grown < 96 * MIB, f"{layout}: {grown / MIB:.0f} MiB"


def _processes() -> list[int]:
    """This process and all that it has started, they too."""
    found = [os.getpid()]
    for pid in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _in_use() -> tuple[int, int]:
    """Shared memory that any of them has mapped, each file once, and anonymous memory of them all."""
    shared: dict[str, int] = {}
    anonymous = 0
    for pid in _processes():
        mapped: dict[str, int] = {}
        file = ""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                key, _, value = line.partition(":")
                if "-" in key:  # addresses, rights, offset, device, inode, path
                    fields = line.split(maxsplit=5)
                    file = " ".join(fields[3:5]) if fields[1].endswith("s") else ""
                elif key == "Rss" and file:
                    mapped[file] = mapped.get(file, 0) + int(value.split()[0]) * 1024
                elif key == "Anonymous" and not file:
                    anonymous += int(value.split()[0]) * 1024
        for name, nbytes in mapped.items():
            shared[name] = max(nbytes, shared.get(name, 0))
    return sum(shared.values()), anonymous


class _Peak:
    def __init__(self) -> None:
        self.shared, self.anonymous = self.before = _in_use()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            shared, anonymous = _in_use()
            self.shared = max(self.shared, shared)
            self.anonymous = max(self.anonymous, anonymous)

    def stop(self) -> tuple[int, int]:
        self._stop.set()
        self._thread.join()
        return self.shared, self.anonymous - self.before[1]


def _through_a_process(rank: int, path: str, nbytes: int) -> tuple[int, int]:
    """At the peak of a save through the framework's checkpoint process."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    del os.environ["HOLDFAST_ARENA_BYTES"]  # as large as a save wants it
    for step, state in enumerate(({"w": torch.ones(1000)}, {str(i): torch.ones(nbytes // 8 // 4) for i in range(8)})):
        peak = _Peak()  # of the second: the first one starts the process
        writer = holdfast.dcp.StorageWriter(os.path.join(path, str(step)), staging_bytes_max=2 * nbytes)
        future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        future.result()
        used = peak.stop()
    del future
    executor._CHECKPOINT_PROCESS = None
    return used


@pytest.mark.filterwarnings("ignore")
def test_a_save_through_a_process_takes_one_copy_of_the_state_and_a_window(tmp_path: Path) -> None:
    state = 192 * MIB
    ((shared, anonymous),) = dcp_ranks.run_ranks(1, tmp_path, _through_a_process, str(tmp_path / "run"), state)
    told = f"shared {shared / MIB:.0f} MiB, anonymous {anonymous / MIB:.0f} MiB"
    print(told)
    # The staged copy, and the memory that it streams through, with its slack for the next save's first chunks.
    assert shared >= state, told
    assert shared <= state + staging.WINDOW_BYTES + 64 * MIB + 4 * MIB, told
    assert anonymous < 48 * MIB, told
