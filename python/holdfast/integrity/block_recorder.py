"""A disk that records what a file system does to it: a file behind a loop device, served over /dev/fuse.

Block writes, flushes and marks of the driver are kept in the order in which the disk got them. From them the disk of
any power cut is made: everything until the last flush, and of what came later any part. Needs root.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pickle
import select
import stat
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from holdfast.integrity import fuse
from holdfast.integrity.fuse import Op

NAME = "disk"
SECTOR = 4096
_FILE_NODE = 2


class Log:
    """What a disk got, in order.

    Attributes:
        operations: ``(offset, bytes)`` of a write, ``None`` of a flush, a string of a mark.
        size: of the disk.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.operations: list[tuple[int, bytes] | str | None] = []


class _Server:
    def __init__(self, device: int, image: int, size: int, control: Connection) -> None:
        self.device, self.image, self.control = device, image, control
        self.log = Log(size)

    def run(self) -> None:
        buffer = bytearray(fuse.BUFFER_BYTES)
        while True:
            ready = select.select([self.device, self.control.fileno()], [], [])[0]
            if self.device in ready:
                if request := fuse.read(self.device, buffer):
                    fuse.answer(self.device, request, self._handle)
            else:
                said = self.control.recv()
                if said is None:
                    self.control.send_bytes(pickle.dumps(self.log.operations, 5))
                    return
                self.log.operations.append(said)
                self.control.send(True)

    def _attributes(self, node: int) -> bytes:
        is_file = node == _FILE_NODE
        size = self.log.size if is_file else 0
        mode = stat.S_IFREG | 0o600 if is_file else stat.S_IFDIR | 0o700
        return fuse.ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SECTOR, 0)

    def _handle(self, request: fuse.Request) -> bytes:
        opcode, body = request.opcode, request.body
        if opcode == Op.INIT:
            return fuse.begin(request, fuse.Flag.BIG_WRITES | fuse.Flag.MAX_PAGES)
        if opcode == Op.LOOKUP and bytes(body).rstrip(b"\0") == NAME.encode():
            return fuse.entry(_FILE_NODE, self._attributes(_FILE_NODE), 3600, 3600)
        if opcode in (Op.GETATTR, Op.SETATTR):
            return fuse.attributes(self._attributes(request.node), 3600)
        if opcode == Op.OPEN:
            return fuse.opened(1, fuse.DIRECT_IO)
        if opcode == Op.READ:
            _, offset, size, _ = fuse.TRANSFER.unpack_from(body)
            return os.pread(self.image, size, offset)
        if opcode == Op.WRITE:
            _, offset, size, _ = fuse.TRANSFER.unpack_from(body)
            data = bytes(body[fuse.WRITE_DATA : fuse.WRITE_DATA + size])
            os.pwrite(self.image, data, offset)
            self.log.operations.append((offset, data))
            return fuse.written(size)
        if opcode == Op.FSYNC:
            self.log.operations.append(None)
        elif opcode == Op.STATFS:
            return fuse.STATISTICS.pack(0, 0, 0, 1, 0, SECTOR, 255, SECTOR)
        elif opcode not in (Op.RELEASE, Op.FLUSH, *fuse.UNANSWERED):
            raise OSError(errno.ENOENT if opcode == Op.LOOKUP else errno.ENOSYS, "")
        return b""


def _serve(device: int, path: str, size: int, control: Connection) -> None:
    image = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(image, size)
    with contextlib.suppress(OSError):  # unmounted
        _Server(device, image, size, control).run()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def attached(image: str) -> Iterator[str]:
    """A loop device over a file."""
    device = _run("losetup", "--find", "--show", "--sector-size", str(SECTOR), image)
    try:
        yield device
    finally:
        _run("losetup", "--detach", device)


# Kinds of file systems: the options with which each is made.
MAKING = {"ext4": [], "ext4-nojournal": ["-O", "^has_journal"], "xfs": ["-f"], "btrfs": ["-f"]}


def type_of(kind: str) -> str:
    """The file system of a kind, as mount(8) has it."""
    return kind.partition("-")[0]


def repaired(device: str, kind: str) -> None:
    """Repairs a file system after a power cut, where it has no journal that its mount replays.

    Raises:
        subprocess.CalledProcessError: it cannot be repaired.
    """
    if kind == "ext4-nojournal":
        done = subprocess.run(["e2fsck", "-fy", device], capture_output=True, text=True, check=False)
        if done.returncode & ~3:  # 1 and 2: errors that were corrected
            raise subprocess.CalledProcessError(done.returncode, "e2fsck", done.stdout, done.stdout + done.stderr)


@contextlib.contextmanager
def mounted(device: str, target: str, kind: str) -> Iterator[None]:
    """A file system on a device.

    Raises:
        subprocess.CalledProcessError: it cannot be mounted.
    """
    os.makedirs(target, exist_ok=True)
    _run("mount", "-t", type_of(kind), device, target)
    try:
        yield
    finally:
        fuse.unmount(target)


class Recorder:
    """A recorded disk with a file system, mounted at a directory.

    Args:
        kind: of `MAKING`.
        size: of the disk, in bytes.
        scratch: a directory for the disk's file and the mount points.
    """

    def __init__(self, kind: str, size: int, scratch: str) -> None:
        self.kind, self.size, self.scratch = kind, size, scratch
        self.directory = os.path.join(scratch, "recorded")
        self.log = Log(size)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        with contextlib.ExitStack() as stack:
            fuse_directory = os.path.join(self.scratch, "fuse")
            os.makedirs(fuse_directory, exist_ok=True)
            device = fuse.mount("holdfast-recorder", fuse_directory)
            stack.callback(os.close, device)
            stack.callback(fuse.detach, fuse_directory)
            self._control, theirs = multiprocessing.Pipe()
            server = multiprocessing.get_context("fork").Process(
                target=_serve, args=(device, os.path.join(self.scratch, "image"), self.size, theirs), daemon=True
            )
            server.start()
            theirs.close()
            stack.callback(server.join, 10)
            stack.callback(self._stop)
            disk = stack.enter_context(attached(os.path.join(fuse_directory, NAME)))
            _run(f"mkfs.{type_of(self.kind)}", "-q", *MAKING[self.kind], disk)
            stack.enter_context(mounted(disk, self.directory, self.kind))
            self._stack = stack.pop_all()
        return self

    def mark(self, text: str) -> None:
        """Notes that something happened: after all that the disk got before."""
        self._control.send(text)
        self._control.recv()

    def _stop(self) -> None:
        self._control.send(None)
        self.log.operations = pickle.loads(self._control.recv_bytes())

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
