"""Disks that record what a file system does to them: served over /dev/fuse, or of device-mapper's log-writes.

Block writes, flushes and marks of the driver are kept in the order in which the disk got them. From them the disk of
any power cut is made: everything until the last flush, and of what came later any part. Needs root.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
from multiprocessing.connection import Connection
from typing import Any

from holdfast.integrity import device_mapper, fuse, log_writes, served_disk

LOG_BYTES = 1 << 30  # most that is written to a disk; of a sparse file


class Log:
    """What a disk got, in order.

    Attributes:
        operations: ``(offset, bytes)`` of a write, ``None`` of a flush, a string of a mark.
        size: of the disk.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.operations: list[tuple[int, bytes] | str | None] = []


class _Server(served_disk.Server):
    def __init__(self, device: int, image: int, size: int, control: Connection) -> None:
        super().__init__(device, image, size)
        self.control = control
        self.log = Log(size)

    def run(self) -> None:
        while True:
            ready = select.select([self.device, self.control.fileno()], [], [])[0]
            if self.device in ready:
                self.serve()
            else:
                said = self.control.recv()
                if said is None:
                    self.control.send_bytes(pickle.dumps(self.log.operations, 5))
                    return
                self.log.operations.append(said)
                self.control.send(True)

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data)
        self.log.operations.append((offset, data))

    def flush(self) -> None:
        self.log.operations.append(None)


def _serve(device: int, path: str, size: int, control: Connection) -> None:
    image = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(image, size)
    with contextlib.suppress(OSError):  # unmounted
        _Server(device, image, size, control).run()


class Recorder:
    """A recorded disk with a file system, mounted at a directory: served over /dev/fuse.

    It orders a write before a flush that came while the write was under way.

    Args:
        kind: of `served_disk.MAKING`.
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
            disk = self._attach(stack)
            served_disk.make(self.kind, disk)
            stack.enter_context(served_disk.mounted(disk, self.directory, self.kind))
            self._stack = stack.pop_all()
        return self

    def _attach(self, stack: contextlib.ExitStack) -> str:
        """The disk's device; the stack takes it away, and fills the log."""
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
        return stack.enter_context(served_disk.attached(os.path.join(fuse_directory, served_disk.NAME)))

    def mark(self, text: str) -> None:
        """Notes that something happened: after all that the disk got before."""
        self._control.send(text)
        self._control.recv()

    def _stop(self) -> None:
        self._control.send(None)
        self.log.operations = pickle.loads(self._control.recv_bytes())

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


class LogWrites(Recorder):
    """A recorded disk of device-mapper's log-writes, which orders a write before the flushes that follow its end."""

    def _attach(self, stack: contextlib.ExitStack) -> str:
        self._name, self._texts = f"holdfast-recorder-{os.getpid()}", list[str]()
        log = os.path.join(self.scratch, "log")
        stack.callback(os.unlink, log)
        stack.callback(self._read, log)
        disk = stack.enter_context(served_disk.attached(served_disk.sparse(os.path.join(self.scratch, "image"), self.size)))
        to = stack.enter_context(served_disk.attached(served_disk.sparse(log, LOG_BYTES)))
        return stack.enter_context(device_mapper.mapped(self._name, device_mapper.table_of((self.size, f"log-writes {disk} {to}"))))

    def mark(self, text: str) -> None:
        # A mark has to fit into a sector, in a message whose words are split.
        device_mapper.send(self._name, f"mark {len(self._texts)}")
        self._texts.append(text)

    def _read(self, path: str) -> None:
        with open(path, "rb") as file:
            for entry in log_writes.entries(file):
                if entry.is_mark:
                    self.log.operations.append(self._texts[int(entry.data)])
                if entry.is_flush:
                    self.log.operations.append(None)
                if entry.data and not entry.is_mark:
                    self.log.operations.append((entry.offset, entry.data))
                if entry.is_durable:  # so is all that stands before it
                    self.log.operations.append(None)


RECORDERS: dict[str, type[Recorder]] = {"fuse": Recorder, "log-writes": LogWrites}
