"""The places of rounds: the directory that the user gave, or a file system that is mounted there for one round."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from holdfast.integrity import fuse, fuse_files, jobs, served_disk, slow_disk

TIME_SERVER_MAX = 60.0  # seconds in which the server of a file system starts and ends


@functools.cache
def why_not(kind: str = "small") -> str:
    """Why no file system of a kind of `schedule.MOUNTS` can be mounted here; "" where one can: it is tried."""
    if os.geteuid() != 0:
        return "mounting a file system needs root"
    with tempfile.TemporaryDirectory(prefix="integrity-place-") as base:
        directory = os.path.join(base, "disk")
        os.mkdir(directory)
        try:
            if kind in ("small", "quota"):
                with _limited(directory, 24, kind):
                    return ""
            os.close(fuse.mount("holdfast-integrity", directory))
            fuse.detach(directory)
            if kind == slow_disk.NAME:
                _try_loop_device(os.path.join(base, "image"), directory)
            return ""
        except subprocess.CalledProcessError as error:
            return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
        except OSError as error:
            return str(error)


def _try_loop_device(image: str, directory: str) -> None:
    served_disk.make("ext4", served_disk.sparse(image, 16 << 20))
    served_disk.run("mount", "-t", "ext4", "-o", "loop", image, directory)
    fuse.detach(directory)


class _Served:
    """A hostile file system, mounted at one directory, or at two. A context manager.

    Args:
        directory: that is served; on the file system that is tried.
        targets: where it is mounted.
        given: of `fuse_files.draw`, or of `slow_disk.draw`.

    Raises:
        OSError: it cannot be mounted.
    """

    def __init__(self, directory: str, targets: list[str], given: dict[str, Any]) -> None:
        self._arguments = directory, targets, given
        self.made: dict[str, int] = {}  # errors, by operation

    def __enter__(self) -> _Served:
        self._control, theirs = jobs.context.Pipe()
        serve = slow_disk.serve if self._arguments[2]["kind"] == slow_disk.NAME else fuse_files.serve
        self._process = jobs.context.Process(target=serve, args=(*self._arguments, theirs))
        self._process.start()
        try:
            theirs.close()
            self._await_mounts()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _await_mounts(self) -> None:
        try:
            error = self._control.recv() if self._control.poll(TIME_SERVER_MAX) else "the server does not start"
        except EOFError:
            error = "the server has ended"
        if error:
            raise OSError(errno.ENODEV, error)

    @contextlib.contextmanager
    def hostile(self) -> Any:
        """While it lasts, operations err or are slow."""
        self._control.send(True)
        self._control.recv()
        try:
            yield
        finally:
            self._control.send(False)
            self.made = self._control.recv()

    def cut(self) -> None:
        """Loses what was not synced, where the file system is of that kind."""
        self._control.send("cut")
        self._control.recv()

    def __exit__(self, *_: object) -> None:
        self._control.close()
        self._process.join(TIME_SERVER_MAX)
        self._process.kill()
        self._process.join()
        self._process.close()
        for target in self._arguments[1]:
            fuse.detach(target)


class Place:
    """Where the checkpoints of a round are.

    Attributes:
        directory: of the round.
        second: another mount of it, which every second trainer sees in its place; "" where there is none.
        errors: what the file system has made fail, by operation and error.
    """

    def __init__(self, directory: str, second: str = "", hostile: _Served | None = None, late: float = 0.0) -> None:
        self.directory, self.second = directory, second
        self._hostile, self._late = hostile, late

    @contextlib.contextmanager
    def hostile(self) -> Iterator[None]:
        """While it lasts, operations err or are slow."""
        with self._hostile.hostile() if self._hostile else contextlib.nullcontext():
            yield
        time.sleep(self._late)  # what this process knows is no older

    def cut(self) -> None:
        """What a power cut does, where the file system loses what was not synced."""
        if self._hostile:
            self._hostile.cut()

    @property
    def errors(self) -> dict[str, int]:
        return self._hostile.made if self._hostile else {}


def has_second(round_: dict[str, Any]) -> bool:
    """Whether every second trainer of a round has a mount of its own."""
    return round_["fuse"].get("kind") in fuse_files.OF_TWO_MOUNTS


@contextlib.contextmanager
def made(round_: dict[str, Any], base: str) -> Iterator[Place]:
    """The place of a round, in a directory that exists.

    Raises:
        OSError: the file system of the round cannot be mounted.
    """
    directory = os.path.join(base, "disk")
    os.mkdir(directory)
    if not round_["fuse"]:
        with _limited(directory, round_["disk"], round_["disk_kind"]):
            yield Place(directory)
        return
    served, targets = os.path.join(base, "served"), [directory]
    if has_second(round_):
        targets.append(os.path.join(base, "second"))
    for made_ in (served, *targets[1:]):
        os.mkdir(made_)
    with _Served(served, targets, round_["fuse"]) as hostile:
        second = targets[1] if targets[1:] else ""
        yield Place(directory, second, hostile, round_["fuse"].get("seconds", 0.0))


@contextlib.contextmanager
def _limited(directory: str, mib: int, kind: str) -> Iterator[None]:
    """A file system at a directory that gets full.

    Args:
        directory: exists.
        mib: size of the file system, or of its quota; 0: none is mounted.
        kind: ``"small"``, a small one, or ``"quota"``, a large one with a quota of btrfs.

    Raises:
        OSError: it cannot be mounted, or has no quota.
    """
    image = os.path.join(os.path.dirname(directory), "image")
    try:
        try:
            if mib and kind == "small":
                served_disk.run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "holdfast-integrity", directory)
            elif mib:
                served_disk.make("btrfs", served_disk.sparse(image, 256 << 20))
                served_disk.run("mount", "-o", "loop", image, directory)
                served_disk.run("btrfs", "quota", "enable", directory)
                served_disk.run("btrfs", "qgroup", "limit", f"{mib}M", "0/5", directory)
        except subprocess.CalledProcessError as error:
            raise OSError(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield
    finally:
        if mib:
            subprocess.run(["umount", "--lazy", directory], capture_output=True, check=False)
