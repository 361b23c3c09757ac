"""A disk that records what a file system does to it: a file behind a loop device, served over /dev/fuse.

Block writes, flushes and marks of the driver are kept in the order in which the disk got them. From them the disk of
any power cut is made: everything until the last flush, and of what came later any part. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import pickle
import select
import stat
import struct
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

NAME = "disk"
SECTOR = 4096
WRITE_MAX = 1 << 20
TIME_BUSY_MAX = 30.0  # seconds in which a file system that was used is free again
# Of linux/fuse.h, version 7.31.
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_WRITE = struct.Struct("<QQII")
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE_OP, _STATFS = 1, 2, 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _INTERRUPT, _BATCH_FORGET = 18, 20, 25, 26, 36, 42
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_DIRECT_IO = 1
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
    def __init__(self, fuse: int, image: int, size: int, control: Connection) -> None:
        self.fuse, self.image, self.control = fuse, image, control
        self.log = Log(size)

    def run(self) -> None:
        while True:
            ready = select.select([self.fuse, self.control.fileno()], [], [])[0]
            if self.fuse in ready:
                try:
                    request = os.read(self.fuse, WRITE_MAX + 8192)
                except OSError as error:
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue
                    return  # unmounted
                self._answer(request)
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
        return _ATTR.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, SECTOR, 0)

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return
        error, body = 0, b""
        at = _IN.size
        if opcode == _INIT:
            _, _, ahead, flags = struct.unpack_from("<IIII", request, at)
            body = struct.pack("<IIIIHHIIHHI28x", 7, 31, ahead, flags & (_BIG_WRITES | _MAX_PAGES), 16, 12, WRITE_MAX, 1,
                               WRITE_MAX >> 12, 0, 0)  # fmt: skip
        elif opcode == _LOOKUP:
            if request[at:].rstrip(b"\0") == NAME.encode():
                body = struct.pack("<QQQQII", _FILE_NODE, 0, 3600, 3600, 0, 0) + self._attributes(_FILE_NODE)
            else:
                error = errno.ENOENT
        elif opcode in (_GETATTR, _SETATTR):
            body = struct.pack("<QII", 3600, 0, 0) + self._attributes(node)
        elif opcode == _OPEN:
            body = struct.pack("<QII", 1, _DIRECT_IO, 0)
        elif opcode == _READ:
            _, offset, size, _ = _WRITE.unpack_from(request, at)
            body = os.pread(self.image, size, offset)
        elif opcode == _WRITE_OP:
            _, offset, size, _ = _WRITE.unpack_from(request, at)
            data = request[at + 40 : at + 40 + size]
            os.pwrite(self.image, data, offset)
            self.log.operations.append((offset, data))
            body = struct.pack("<II", size, 0)
        elif opcode == _FSYNC:
            self.log.operations.append(None)
        elif opcode == _STATFS:
            body = struct.pack("<QQQQQIII28x", 0, 0, 0, 1, 0, SECTOR, 255, SECTOR)
        elif opcode not in (_RELEASE, _FLUSH):
            error = errno.ENOSYS
        with contextlib.suppress(OSError):  # the request was interrupted
            os.write(self.fuse, _OUT.pack(_OUT.size + len(body), -error, unique) + body)


def _serve(fuse: int, path: str, size: int, control: Connection) -> None:
    image = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(image, size)
    _Server(fuse, image, size, control).run()


def _mount(source: str, target: str, kind: str, data: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), 0, data.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind}: {os.strerror(number)}", target)


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


def _unmount(target: str) -> None:
    """Waits for what keeps files open: the ring of a killed process does, for a moment after its end."""
    end = time.monotonic() + TIME_BUSY_MAX
    while True:
        try:
            _run("umount", target)
            return
        except subprocess.CalledProcessError as error:
            if "busy" not in error.stderr or time.monotonic() > end:
                raise
        time.sleep(0.02)


@contextlib.contextmanager
def mounted(device: str, target: str, kind: str) -> Iterator[None]:
    """A file system on a device.

    Raises:
        subprocess.CalledProcessError: it cannot be mounted.
    """
    os.makedirs(target, exist_ok=True)
    _run("mount", "-t", kind, device, target)
    try:
        yield
    finally:
        _unmount(target)


class Recorder:
    """A recorded disk with a file system, mounted at a directory.

    Args:
        kind: ``"ext4"``, ``"xfs"`` or ``"btrfs"``.
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
            fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, fuse)
            self._control, theirs = multiprocessing.Pipe()
            server = multiprocessing.get_context("fork").Process(
                target=_serve, args=(fuse, os.path.join(self.scratch, "image"), self.size, theirs), daemon=True
            )
            _mount("holdfast-recorder", fuse_directory, "fuse", f"fd={fuse},rootmode=40000,user_id=0,group_id=0")
            stack.callback(_run, "umount", "--lazy", fuse_directory)
            server.start()
            theirs.close()
            stack.callback(server.join, 10)
            stack.callback(self._stop)
            device = stack.enter_context(attached(os.path.join(fuse_directory, NAME)))
            _run(f"mkfs.{self.kind}", "-q", *(["-f"] if self.kind != "ext4" else []), device)
            stack.enter_context(mounted(device, self.directory, self.kind))
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
