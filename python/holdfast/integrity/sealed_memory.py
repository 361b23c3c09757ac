"""Sealed memory of a trainer's saves: a bit of it is changed on purpose, and files of dead workers are compared with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from typing import NamedTuple

DEAD = ("kill-worker", "terminate-worker", "hang-worker", "oom-worker")  # events after which the worker is dead and its trainer lives
_HELD_IN = ("writing", "syncing", "reading back")  # phases of a save in which it holds its staged memory
_PAGE = 4096
_KEEP_SIZE = 1


class _Held(NamedTuple):
    save: int
    name: str
    fd: int
    sealed: dict[int, list[bytes]]  # by offset


class SealedMemory:
    """Sees each extent between its digest and its write.

    Args:
        tell: as of `trainer.Trainer.tell`.
        keeps: whether copies are kept, for `hold`.
    """

    def __init__(self, tell: Callable[..., None], keeps: bool) -> None:
        self._tell = tell
        self._keeps = keeps
        self._copies: dict[str, dict[int, list[bytes]]] = {}
        self._held: list[_Held] = []
        self._change: Callable[[int], None] | None = None
        self._restoring: list[threading.Timer] = []
        self._extents: list[tuple[int, int]] = []
        self._may_change = False

    def sealed(self, address: int, nbytes: int, file: str, offset: int, *_: object) -> None:
        """The hook ``on_sealed``."""
        self._keep(address, nbytes, file, offset)
        if nbytes:
            self._extents.append((address, nbytes))
        if nbytes and (change := self._change):
            self._change = None
            change(address + nbytes // 2)
            self._keep(address, nbytes, file, offset)  # either is written

    # ---- Changes.

    def watch(self, may_change: bool) -> None:
        """A save begins, and none is under way. `may_change`: no memory of it is taken twice, so that ``change`` can change it."""
        self._extents, self._may_change = [], may_change

    def change_next(self, save: int, kind: str, seconds: float) -> None:
        """Changes a bit of the extent that is sealed next; with ``"change-and-restore"`` back after some seconds."""
        self._change = lambda place: self._change_at(place, save, kind, seconds, "sealed")

    def change(self, save: int, kind: str, place: float, seconds: float, phase: str) -> None:
        """The same with an extent that was sealed since ``watch``, in a phase of the save."""
        if self._extents and self._may_change and phase in _HELD_IN:
            address, nbytes = self._extents[int(len(self._extents) * place)]
            self._change_at(address + nbytes // 2, save, kind, seconds, phase)

    def _change_at(self, place: int, save: int, kind: str, seconds: float, phase: str) -> None:
        old = ctypes.string_at(place, 1)
        ctypes.memset(place, old[0] ^ 0x10, 1)
        self._tell("fired", n=save, kind=kind, phase=phase)
        if kind == "change-and-restore":
            timer = threading.Timer(seconds, lambda: ctypes.memset(place, old[0], 1))
            self._restoring.append(timer)
            timer.start()

    def leave(self) -> None:
        """No later save is changed in the place of one that has ended; what is restored lies in memory that it may take."""
        self._change = None
        self._extents = []
        while self._restoring:
            self._restoring.pop().join()

    # ---- Files of dead workers: each byte is zero, or what was sealed for its place.

    def _keep(self, address: int, nbytes: int, file: str, offset: int) -> None:
        if self._keeps:
            self._copies.setdefault(file, {}).setdefault(offset, []).append(ctypes.string_at(address, nbytes))

    def hold(self, save: int, pid: int) -> None:
        """Opens the files that a worker has open, before it dies. What is sealed later is not of its saves."""
        links = {}
        with contextlib.suppress(OSError):  # it is gone
            for fd in os.listdir(f"/proc/{pid}/fd"):
                links[os.readlink(f"/proc/{pid}/fd/{fd}")] = f"/proc/{pid}/fd/{fd}"
        for path, link in links.items():
            for name, copies in list(self._copies.items()):
                # Between what marks it as unfinished; the manifest of a single file has its name, too.
                _, is_there, behind = os.path.basename(path).partition(name)
                if is_there and ".json" not in behind:
                    with contextlib.suppress(OSError):  # of a file system that errs
                        held = os.open(link, os.O_RDWR | os.O_CLOEXEC)
                        self._held.append(_Held(save, name, held, {offset: list(of) for offset, of in list(copies.items())}))

    def look(self) -> None:
        """Tells what is in the files, and closes them."""
        while self._held:
            save, name, fd, sealed = self._held.pop()
            ctypes.CDLL(None).fallocate(fd, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(_PAGE))  # waits for direct writes under way
            with contextlib.suppress(OSError):  # likewise
                found = [_compare(os.pread(fd, max(map(len, of)), offset), of) for offset, of in sealed.items()]
                self._tell("looked", n=save, file=name, written=sum(w for w, _ in found), foreign=sum(f for _, f in found))
            with contextlib.suppress(OSError):
                os.close(fd)


def _compare(found: bytes, sealed: list[bytes]) -> tuple[int, int]:
    """How many bytes of what is found are in pages that were written, and how many of those nothing had that was sealed there."""
    if found in sealed:
        return len(found), 0
    written = foreign = 0
    for at in range(0, len(found), _PAGE):
        page = found[at : at + _PAGE]
        if any(page):
            written += len(page)
            foreign += min(_differing(page, of[at : at + _PAGE].ljust(len(page), b"\0")) for of in sealed)
    return written, foreign


def _differing(page: bytes, sealed: bytes) -> int:
    return 0 if page == sealed else sum(a not in (0, b) for a, b in zip(page, sealed, strict=False))
