"""A disk of this program: a file behind a loop device, served over /dev/fuse. Needs root."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
from collections.abc import Iterator

from holdfast.integrity import fuse
from holdfast.integrity.fuse import Op

NAME = "disk"  # of the file, below the mount point
SECTOR = 4096
_FILE_NODE = 2
_LINES = 8  # of the kernel's log
_RACE_SECONDS = 20.0
_HELD_SECONDS = 120.0  # as long as a round


class Server:
    """Serves the file. A subclass sees each write and each flush before it is answered.

    Args:
        device: descriptor of /dev/fuse.
        image: descriptor of the file that has the bytes.
        size: of the disk.
    """

    def __init__(self, device: int, image: int, size: int) -> None:
        self.device, self.image, self.size = device, image, size
        self._buffer = bytearray(fuse.BUFFER_BYTES)

    def serve(self) -> None:
        """Answers one request.

        Raises:
            OSError: the file system is unmounted.
        """
        if request := fuse.read(self.device, self._buffer):
            fuse.answer(self.device, request, self._handle)

    def write(self, offset: int, data: bytes) -> None:
        os.pwrite(self.image, data, offset)

    def flush(self) -> None:
        pass

    def _attributes(self, node: int) -> bytes:
        is_file = node == _FILE_NODE
        size = self.size if is_file else 0
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
            self.write(offset, bytes(body[fuse.WRITE_DATA : fuse.WRITE_DATA + size]))
            return fuse.written(size)
        if opcode == Op.FSYNC:
            self.flush()
        elif opcode == Op.STATFS:
            return fuse.STATISTICS.pack(0, 0, 0, 1, 0, SECTOR, 255, SECTOR)
        elif opcode not in (Op.RELEASE, Op.FLUSH, *fuse.UNANSWERED):
            raise OSError(errno.ENOENT if opcode == Op.LOOKUP else errno.ENOSYS, "")
        return b""


def run(*command: str) -> str:
    """Runs a command; returns what it printed.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def kernel_log() -> str:
    """The last lines of the kernel's log, which say why a file system cannot be mounted; "" for who may not read it."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return "\n".join(run("dmesg").splitlines()[-_LINES:])
    return ""


def sparse(path: str, size: int) -> str:
    """Makes a file of zeros, and returns its path."""
    with open(path, "wb") as file:
        file.truncate(size)
    return path


@contextlib.contextmanager
def attached(image: str) -> Iterator[str]:
    """A loop device over a file."""
    device = run("losetup", "--find", "--show", "--sector-size", str(SECTOR), image)
    try:
        yield device
    finally:
        run("losetup", "--detach", device)


# Kinds of file systems: the options with which each is made.
# No disk is discarded first: a record would have all of it as zeros.
_OF_EXT4 = ["-E", "nodiscard"]
MAKING = {"ext4": _OF_EXT4, "ext4-nojournal": [*_OF_EXT4, "-O", "^has_journal"], "xfs": ["-f", "-K"], "btrfs": ["-f", "-K"]}


def type_of(kind: str) -> str:
    """The file system of a kind, as mount(8) has it."""
    return kind.partition("-")[0]


def make(kind: str, disk: str) -> None:
    """Makes a file system on a device, or in a file.

    Raises:
        subprocess.CalledProcessError: it cannot be made.
        FileNotFoundError: there is no program that makes it.
    """
    # mkfs.btrfs asks each mounted loop device for its file, and fails where one is unmounted meanwhile.
    fuse.retried(lambda: run(f"mkfs.{type_of(kind)}", "-q", *MAKING[kind], disk),
                 lambda error: "cannot check mount status" in getattr(error, "stderr", ""), _RACE_SECONDS)  # fmt: skip


def _wait_until_free(device: str) -> None:
    """Waits for mount namespaces of other programs: one that has a copy of a mount keeps the file system after its unmount."""
    fuse.retried(lambda: os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)),
                 lambda error: error.errno == errno.EBUSY, _HELD_SECONDS)  # fmt: skip


def repaired(device: str, kind: str) -> None:
    """Repairs a file system after a power cut, where it has no journal that its mount replays.

    Raises:
        subprocess.CalledProcessError: it cannot be repaired.
        OSError: it is in use.
    """
    if kind == "ext4-nojournal":
        _wait_until_free(device)
        for _ in range(2):  # a repair may leave an error that the next one corrects
            done = subprocess.run(["e2fsck", "-fy", device], capture_output=True, text=True, check=False)
            if not done.returncode & ~3:  # 1 and 2: errors that were corrected
                break
        else:
            raise subprocess.CalledProcessError(done.returncode, "e2fsck", done.stdout, done.stdout + done.stderr)


@contextlib.contextmanager
def mounted(device: str, target: str, kind: str) -> Iterator[None]:
    """A file system on a device.

    Raises:
        subprocess.CalledProcessError: it cannot be mounted.
        OSError: it is in use.
    """
    os.makedirs(target, exist_ok=True)
    _wait_until_free(device)
    run("mount", "-t", type_of(kind), device, target)
    try:
        yield
    finally:
        fuse.unmount(target)
