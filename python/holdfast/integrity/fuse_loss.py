"""What a power cut takes from files of a served directory: every change that no fsync has made durable.

Each file and each directory is durable by its own fsync alone, as POSIX has it. On a disk the flush of one makes all durable, so
that a recorded disk cannot show a missing one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
from collections.abc import Callable
from typing import NamedTuple

Key = tuple[int, int]  # device and inode
Undo = Callable[[], None]
_EXCHANGE, _NOREPLACE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Change(NamedTuple):
    directory: Key
    undo: Undo


class Unsynced:
    """The changes that are not durable, in order.

    Args:
        kept: a directory on the same file system, for what was removed or replaced and may come back.
    """

    def __init__(self, kept: str) -> None:
        os.mkdir(kept, 0o700)
        self._kept = os.open(kept, os.O_RDONLY | os.O_DIRECTORY)
        self._number = 0
        self._names: list[_Change] = []
        self._data: dict[Key, tuple[int, list[tuple[int, bytes]]]] = {}
        self.lock = threading.RLock()  # held over a change and its note

    # ---- Notes of changes, made with the lock held.

    def written(self, fd: int, offset: int, size: int) -> None:
        """Before a write through a descriptor: keeps what was there."""
        key = _key(fd)
        if key not in self._data:
            self._data[key] = os.dup(fd), []
        self._data[key][1].append((offset, os.pread(fd, size, offset).ljust(size, b"\0")))

    def synced(self, fd: int) -> None:
        """A file, or the entries of a directory, are durable."""
        key = _key(fd)
        if key in self._data:
            os.close(self._data.pop(key)[0])
        self._names = [change for change in self._names if change.directory != key]

    def made(self, parent: int, name: bytes) -> None:
        """After an entry was made."""
        directory = os.dup(parent)
        self._note(parent, lambda: self._move(directory, name, self._kept, self._next()))

    def removing(self, parent: int, name: bytes) -> Undo:
        """Before an entry is removed; the result is called when it was."""
        undo = self._kept_back(parent, name)
        return lambda: self._note(parent, undo)

    def _kept_back(self, parent: int, name: bytes) -> Undo:
        number = self._next()
        directory = os.dup(parent)
        is_directory = os.path.isdir(f"/proc/self/fd/{parent}/{os.fsdecode(name)}")
        if is_directory:  # an empty one
            return lambda: os.mkdir(name, dir_fd=directory)
        os.link(name, number, src_dir_fd=parent, dst_dir_fd=self._kept, follow_symlinks=False)
        return lambda: self._move(self._kept, number, directory, name)

    def moving(self, parent: int, name: bytes, target: int, new: bytes, flags: int) -> Undo:
        """Before a rename; the result is called when it was done."""
        source, directory = os.dup(parent), os.dup(target)
        if flags & _EXCHANGE:
            return lambda: self._note(target, lambda: self._move(source, name, directory, new, _EXCHANGE))
        replaced = None
        if not flags & _NOREPLACE:
            with contextlib.suppress(FileNotFoundError):
                replaced = self._kept_back(target, new)

        def undo() -> None:
            self._move(directory, new, source, name)
            if replaced:
                replaced()

        return lambda: self._note(target, undo)

    def _next(self) -> bytes:
        self._number += 1
        return str(self._number).encode()

    def _note(self, parent: int, undo: Undo) -> None:
        self._names.append(_Change(_key(parent), undo))

    @staticmethod
    def _move(source: int, name: bytes, target: int, new: bytes, flags: int = 0) -> None:
        if _libc.renameat2(source, name, target, new, flags) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)

    # ---- The cut.

    def forget(self) -> None:
        """Takes everything that is there as durable."""
        with self.lock:
            for fd, _ in self._data.values():
                os.close(fd)
            self._names, self._data = [], {}

    def lose(self, choose: random.Random) -> None:
        """Takes changes back: of each directory the last ones, and of each file any, or all."""
        with self.lock:
            takes_all = choose.random() < 0.5
            names: dict[Key, list[_Change]] = {}
            for change in self._names:
                names.setdefault(change.directory, []).append(change)
            lost = {id(c) for of in names.values() for c in of[0 if takes_all else choose.randrange(len(of) + 1) :]}
            for change in reversed(self._names):
                if id(change) in lost:
                    # A change in a directory that is gone itself, or on top of one that stays, has nothing to take back.
                    with contextlib.suppress(FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError):
                        change.undo()
            for fd, writes in self._data.values():
                for offset, data in reversed(writes):
                    if takes_all or choose.random() < 0.5:
                        os.pwrite(fd, data, offset)
            self.forget()


def _key(fd: int) -> Key:
    found = os.stat(fd)
    return found.st_dev, found.st_ino
