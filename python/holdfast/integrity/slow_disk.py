"""A slow disk: a local file system, whose writes and flushes wait in the block layer.

No signal interrupts a transfer there, where a request of a FUSE file ends with its process: direct writes of a killed
worker's ring read their memory long after its end. The server is a process of its own, as that of `fuse_files`. Needs
root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import shutil
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from holdfast.integrity import fuse, served_disk

NAME = "slow-disk"
FILE_SYSTEMS = ("ext4", "xfs", "btrfs")
DELAY_MAX = 0.1  # seconds of a write or a flush
_MIB = 1 << 20
_SIZE = 16 << 30  # of the disk, whose file has holes
_PR_SET_IO_FLUSHER = 57


def draw(choose: random.Random) -> dict[str, Any]:
    """A slow disk, as it is in a round."""
    return {"kind": NAME, "key": choose.randrange(1 << 30), "file_system": choose.choice(FILE_SYSTEMS),
            "rate": choose.choice((32, 64, 128)) * _MIB, "share": choose.choice((0.05, 0.3))}  # fmt: skip


class _Server(served_disk.Server):
    """One thread: each request waits for those before it, as on a disk with one queue."""

    def __init__(self, device: int, image: int, given: dict[str, Any]) -> None:
        super().__init__(device, image, _SIZE)
        self.is_slow = True
        self._rate, self._share = given["rate"], given["share"]
        self._choose = random.Random(given["key"])

    def run(self) -> None:
        """The body of the thread. It may not wait for room that only its own disk can make."""
        ctypes.CDLL(None).prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0)
        with contextlib.suppress(OSError):  # unmounted
            while True:
                self.serve()

    def write(self, offset: int, data: bytes) -> None:
        self._wait(len(data))
        super().write(offset, data)

    def flush(self) -> None:
        self._wait(0)

    def _wait(self, size: int) -> None:
        late = self._choose.random() * DELAY_MAX if self._choose.random() < self._share else 0.0
        if self.is_slow:
            time.sleep(size / self._rate + late)


def _mounted(directory: str, target: str, given: dict[str, Any]) -> tuple[_Server, threading.Thread]:
    """Makes the disk and its file system, ext4 where a program for another is missing, and mounts it.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be made or mounted.
    """
    kind = given["file_system"] if shutil.which(f"mkfs.{given['file_system']}") else "ext4"
    image = os.open(os.path.join(directory, "image"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.ftruncate(image, _SIZE)
    served_disk.make(kind, os.path.join(directory, "image"))
    server = _Server(fuse.mount("holdfast-slow-disk", directory), image, given)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        served_disk.run("mount", "-t", kind, "-o", "loop", os.path.join(directory, served_disk.NAME), target)
    finally:
        fuse.detach(directory)  # the loop device keeps the file, and ends with its last user
    return server, thread


def serve(directory: str, targets: list[str], given: dict[str, Any], control: Connection) -> None:
    """The body of the server's process, as of `fuse_files.serve`: the disk is slow from its mount to its end.

    Args:
        directory: of the disk's file.
        targets: where the file system is mounted, one.
        given: of `draw`.
        control: what is said there changes nothing.
    """
    fuse.begin_process()
    (target,) = targets
    try:
        try:
            server, thread = _mounted(directory, target, given)
        except (OSError, subprocess.CalledProcessError) as error:
            control.send(f"{error} {getattr(error, 'stderr', '')}")
            return
        with contextlib.suppress(EOFError, OSError):
            control.send("")
            while True:
                control.recv()
                control.send({})
        server.is_slow = False
        fuse.detach(target)
        thread.join()  # the rings of killed processes, too, have ended
    finally:
        os._exit(0)  # no thread of this process needs what is left
