"""A disk: its raw limit in seconds (O_DIRECT, 4 MiB at a time, four at once, from Python and by holdfast-bench), and syncing."""

from __future__ import annotations

import json
import mmap
import os
import queue
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

BLOCK = 4 << 20
AT_ONCE = 4
ENGINES = {"write": ("fixed", "plain", "pwrite", "fio"), "read": ("engine", "fio")}


def fresh_blocks() -> queue.SimpleQueue[mmap.mmap]:
    blocks: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(AT_ONCE):
        block = mmap.mmap(-1, BLOCK)
        block.madvise(mmap.MADV_HUGEPAGE)  # small pages cost the kernel more than the disk's time
        block.write(os.urandom(BLOCK))
        blocks.put(block)
    return blocks


def transfer(blocks: queue.SimpleQueue[mmap.mmap], call: Callable[[mmap.mmap, int], object], nbytes: int) -> None:
    """Calls with a block and its offset in the file, for each of the file's blocks."""

    def one(offset: int) -> None:
        block = blocks.get()
        call(block, offset)
        blocks.put(block)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(0, nbytes, BLOCK)))


def write(directory: str, nbytes: int) -> float:
    """A fresh, reserved file, and its fsync."""
    blocks = fresh_blocks()
    path = os.path.join(directory, "raw")
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        begin = time.perf_counter()
        transfer(blocks, lambda block, offset: os.pwrite(fd, block, offset), nbytes // BLOCK * BLOCK)
        os.fsync(fd)
        return time.perf_counter() - begin
    finally:
        os.close(fd)
        os.unlink(path)


def read(path: str) -> float:
    """A file, dropping what is read."""
    blocks = fresh_blocks()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        begin = time.perf_counter()
        transfer(blocks, lambda block, offset: os.preadv(fd, [block], offset), os.fstat(fd).st_size)
        return time.perf_counter() - begin
    finally:
        os.close(fd)


def by_program(program: str, kind: Literal["write", "read"], directory: str, nbytes: int) -> float:
    """As many bytes by the best engine of holdfast-bench."""
    done = subprocess.run(
        [program, "--dir", directory, "--bytes", str(nbytes), "--only", kind, "--pairs", "1", "--json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    figures = json.loads(done.stdout)
    rates = [figures.get(f"raw.{kind}_bytes_per_second.{way}") for way in ENGINES[kind]]
    return nbytes / max(r for r in rates if r)


def sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(path: str) -> None:
    """What survives power loss afterwards: all below a directory, and itself."""
    for directory, _, files in os.walk(path):
        for name in (*files, "."):
            sync_file(os.path.join(directory, name))
