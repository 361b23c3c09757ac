"""A hostile file system: a directory that is served over /dev/fuse, by a server that errs, lies about locks, answers from
old knowledge, is slow, or loses what was not synced.

The server is a process of its own. It unmounts when the driver says so, and when the driver is gone. Two mounts of one
directory are as two machines: neither sees the locks of the other, and each keeps names and attributes for itself. Needs
root.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import os
import random
import resource
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from holdfast.integrity import fuse
from holdfast.integrity.fuse import Flag, Op, Request
from holdfast.integrity.fuse_loss import Unsynced

KINDS = ("errs", "locks", "late", "slow", "forgets")
OF_TWO_MOUNTS = ("locks", "late")
LATE_MAX = 2.0  # seconds for which names and attributes are kept
DELAY_MAX = 0.03  # seconds of a request
THREADS = 4  # of a mount: requests are answered beside each other
# The operations that err, with their errors.
ERRORS = {
    "WRITE": ("EIO", "ENOSPC"), "FSYNC": ("EIO", "ENOSPC"), "FSYNCDIR": ("EIO",), "CREATE": ("EIO", "ENOSPC"),
    "MKDIR": ("EIO", "ENOSPC"), "RENAME": ("EIO", "ENOSPC"), "RENAME2": ("EIO", "ENOSPC"), "LINK": ("EIO", "ENOSPC"),
    "UNLINK": ("EIO",), "RMDIR": ("EIO",), "OPEN": ("EIO",), "READ": ("EIO",), "READDIR": ("EIO",), "LOOKUP": ("EIO",), "GETATTR": ("EIO",), "SETATTR": ("EIO", "ENOSPC"),
    "FALLOCATE": ("EIO", "ENOSPC"), "FLUSH": ("EIO", "ENOSPC"), "STATFS": ("EIO",),
}  # fmt: skip
_OF_ITSELF = ("OPEN", "READDIR", "GETATTR", "SETATTR", "STATFS")  # never of an entry of the mount's root
_SLOW = (Op.WRITE, Op.READ, Op.FSYNC, Op.FSYNCDIR, Op.CREATE, Op.MKDIR, Op.RENAME2, Op.LOOKUP, Op.UNLINK, Op.RELEASE)
_CHANGES = struct.Struct("<IIQQQQQQIIIIIIII")
_F_UNLCK = 2
_libc = ctypes.CDLL(None, use_errno=True)


def draw(choose: random.Random, kind: str) -> dict[str, Any]:
    """A file system of a kind of `KINDS`, as it is in a round."""
    made: dict[str, Any] = {"kind": kind, "key": choose.randrange(1 << 30)}
    if kind == "errs":
        every = sorted(ERRORS)
        made["operations"] = choose.choice((["FSYNC"], ["FSYNC", "FSYNCDIR"], ["WRITE"], choose.sample(every, 3), every))
        made["share"] = choose.choice((0.3, 0.1) if len(made["operations"]) < 4 else (0.05, 0.01))
    if kind == "late":
        made["seconds"] = round(0.2 + choose.random() * (LATE_MAX - 0.2), 2)
    if kind == "slow":
        made["share"] = choose.choice((0.05, 0.3))
    return made


# ---- The server.


class _Node:
    """A file or directory that the kernel knows."""

    def __init__(self, fd: int, key: tuple[int, int], is_top: bool) -> None:
        self.fd, self.key = fd, key
        self.is_top = is_top  # an entry of the mount's root
        self.lookups = 0
        # What a failing fsync takes back, the newest last: an offset, and the bytes that were there.
        self.unsynced: list[tuple[int, bytes]] = []
        self.hidden = (0, 0)  # time of the taking back, and what is told in its place

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self.fd}"


class _Mount:
    """One mount: the nodes and handles that its kernel side knows."""

    def __init__(self, server: _Server, target: str) -> None:
        self.server = server
        self.target = target
        self.device = fuse.mount("holdfast-hostile", target, ",default_permissions,allow_other")
        root = os.open(server.directory, os.O_PATH)
        self._nodes = {fuse.ROOT: _Node(root, (0, 0), False)}
        self._ids: dict[tuple[int, int], int] = {}
        self._handles: dict[int, _Node] = {}
        self._lists: dict[int, list[tuple[str, os.stat_result]]] = {}
        self._next = fuse.ROOT
        self._lock = threading.Lock()
        self._known = server.given.get("seconds", 0.0)
        self._handlers: dict[int, Callable[[int, memoryview], bytes | None]] = {
            op: getattr(self, f"_{op.name.lower()}") for op in Op if hasattr(self, f"_{op.name.lower()}")
        }
        for op, like in ((Op.SETLKW, Op.SETLK), (Op.RELEASEDIR, Op.RELEASE), (Op.FSYNCDIR, Op.FSYNC)):
            self._handlers[op] = self._handlers[like]

    def run(self) -> None:
        """The body of each thread."""
        buffer = bytearray(fuse.BUFFER_BYTES)
        with contextlib.suppress(OSError):  # unmounted
            while True:
                if request := fuse.read(self.device, buffer):
                    fuse.answer(self.device, request, self._handle)

    def _handle(self, request: Request) -> bytes | None:
        if request.opcode == Op.INIT:
            return fuse.begin(request, self.server.offered)
        if request.opcode == self.server.ignored:
            return b""
        handler = self._handlers.get(request.opcode)
        if handler is None:
            raise OSError(errno.ENOSYS, "")
        op = Op(request.opcode)
        self.server.delay(op)
        if error := self._drawn_error(op, request):
            if op == Op.FSYNC:
                self._take_back(request.body)
                if self.server.given.get("swallowed"):
                    return b""
            raise OSError(error, "")
        return handler(request.node, request.body)

    def _drawn_error(self, op: Op, request: Request) -> int:
        node = self._nodes.get(request.node)
        if request.node == fuse.ROOT or node is None or node.is_top and op.name in _OF_ITSELF:
            return 0
        return self.server.error(op)

    # ---- Nodes and handles.

    def _entry(self, parent: int, name: str) -> bytes:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent].fd)
        found = os.stat(fd)
        key = (found.st_dev, found.st_ino)
        with self._lock:
            number = self._ids.get(key, 0)
            if number:
                os.close(fd)
            else:
                self._next += 1
                number = self._ids[key] = self._next
                self._nodes[number] = _Node(fd, key, parent == fuse.ROOT)
            self._nodes[number].lookups += 1
            hidden = self._nodes[number].hidden
        return fuse.entry(number, _attributes(found, hidden), self._known, self._known)

    def _drop(self, number: int, count: int) -> None:
        with self._lock:
            node = self._nodes.get(number)
            if node is None or number == fuse.ROOT:
                return
            node.lookups -= count
            if node.lookups <= 0:
                del self._nodes[number], self._ids[node.key]
                os.close(node.fd)

    def _open_handle(self, node: int, flags: int) -> int:
        # A handle that only writes is read, too, for what a failing fsync takes back.
        access = os.O_RDONLY if flags & os.O_ACCMODE == os.O_RDONLY else os.O_RDWR
        kept = flags & (os.O_TRUNC | os.O_DIRECTORY | os.O_DSYNC | os.O_SYNC)
        fd = os.open(self._nodes[node].path, access | kept)
        with self._lock:
            self._handles[fd] = self._nodes[node]
        return fd

    def _take_back(self, body: memoryview) -> None:
        """What a kernel does with pages that could not be written: they are gone, and size and times stay."""
        (handle,) = struct.unpack_from("<Q", body)
        node = self._handles[handle]
        with self.server.writing:
            before = os.fstat(handle)
            while node.unsynced:
                offset, data = node.unsynced.pop()
                os.pwrite(handle, data[: max(0, before.st_size - offset)], offset)
            os.utime(handle, ns=(before.st_atime_ns, before.st_mtime_ns))
            node.hidden = (os.fstat(handle).st_ctime_ns, before.st_ctime_ns)

    @contextlib.contextmanager
    def _making(self, node: int, name: str) -> Iterator[None]:
        """While an entry is made, which may be lost."""
        unsynced, parent = self.server.unsynced, self._nodes[node].fd
        if not unsynced:
            yield
            return
        with unsynced.lock:
            there = os.path.lexists(f"/proc/self/fd/{parent}/{name}")
            yield
            if not there:
                unsynced.made(parent, os.fsencode(name))

    @contextlib.contextmanager
    def _removing(self, node: int, body: memoryview) -> Iterator[None]:
        """While an entry is removed, which may come back."""
        unsynced = self.server.unsynced
        if not unsynced:
            yield
            return
        with unsynced.lock:
            done = unsynced.removing(self._nodes[node].fd, os.fsencode(_text(body)))
            yield
            done()

    # ---- Operations, named as they are in `Op`.

    def _forget(self, node: int, body: memoryview) -> None:
        self._drop(node, struct.unpack_from("<Q", body)[0])

    def _batch_forget(self, _: int, body: memoryview) -> None:
        (count,) = struct.unpack_from("<I", body)
        for i in range(count):
            self._drop(*struct.unpack_from("<QQ", body, 8 + 16 * i))

    def _interrupt(self, *_: Any) -> None:
        pass

    def _lookup(self, node: int, body: memoryview) -> bytes:
        try:
            return self._entry(node, _text(body))
        except FileNotFoundError:
            if not self._known:
                raise
            return fuse.entry(0, bytes(fuse.ATTRIBUTES.size), self._known, 0)

    def _getattr(self, node: int, _: memoryview) -> bytes:
        return fuse.attributes(_attributes(os.stat(self._nodes[node].fd), self._nodes[node].hidden), self._known)

    def _setattr(self, node: int, body: memoryview) -> bytes:
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = _CHANGES.unpack_from(body)
        path = self._nodes[node].path
        if valid & fuse.SIZE_CHANGES:
            os.truncate(path, size)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 6:
            os.chown(path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 48:
            now = time.time_ns()
            found = os.stat(path)
            times = [found.st_atime_ns, found.st_mtime_ns]
            for i, (seconds, nanoseconds) in enumerate(((atime, atime_ns), (mtime, mtime_ns))):
                if valid & 16 << i:
                    times[i] = now if valid & 128 << i else seconds * 10**9 + nanoseconds
            os.utime(path, ns=(times[0], times[1]))
        return self._getattr(node, body)

    def _readlink(self, node: int, _: memoryview) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes[node].fd))

    def _symlink(self, node: int, body: memoryview) -> bytes:
        name, target = _names(body)
        with self._making(node, name):
            os.symlink(target, name, dir_fd=self._nodes[node].fd)
        return self._entry(node, name)

    def _mkdir(self, node: int, body: memoryview) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        with self._making(node, _text(body[8:])):
            os.mkdir(_text(body[8:]), mode, dir_fd=self._nodes[node].fd)
        return self._entry(node, _text(body[8:]))

    def _unlink(self, node: int, body: memoryview) -> None:
        with self._removing(node, body):
            os.unlink(_text(body), dir_fd=self._nodes[node].fd)

    def _rmdir(self, node: int, body: memoryview) -> None:
        with self._removing(node, body):
            os.rmdir(_text(body), dir_fd=self._nodes[node].fd)

    def _rename(self, node: int, body: memoryview) -> None:
        self._move(node, struct.unpack_from("<Q", body)[0], body[8:], 0)

    def _rename2(self, node: int, body: memoryview) -> None:
        target, flags, _ = struct.unpack_from("<QII", body)
        self._move(node, target, body[16:], flags)

    def _move(self, node: int, target: int, body: memoryview, flags: int) -> None:
        old, new = (os.fsencode(name) for name in _names(body))
        source, directory = self._nodes[node].fd, self._nodes[target].fd
        # In the mount's root a trainer itself moves the directory of the checkpoints, and tells so: that is durable.
        unsynced = self.server.unsynced if node != fuse.ROOT else None
        with unsynced.lock if unsynced else contextlib.nullcontext():
            done = unsynced.moving(source, old, directory, new, flags) if unsynced else None
            if _libc.renameat2(source, old, directory, new, flags) != 0:
                raise OSError(ctypes.get_errno(), "")
            if done:
                done()

    def _link(self, node: int, body: memoryview) -> bytes:
        (old,) = struct.unpack_from("<Q", body)
        with self._making(node, _text(body[8:])):
            os.link(self._nodes[old].path, _text(body[8:]), dst_dir_fd=self._nodes[node].fd, follow_symlinks=True)
        return self._entry(node, _text(body[8:]))

    def _open(self, node: int, body: memoryview) -> bytes:
        return fuse.opened(self._open_handle(node, struct.unpack_from("<I", body)[0]))

    def _create(self, node: int, body: memoryview) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", body)
        name = _text(body[16:])
        exclusive = flags & os.O_EXCL
        with self._making(node, name):
            os.close(os.open(name, os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR | exclusive, mode, dir_fd=self._nodes[node].fd))
        made = self._entry(node, name)
        (number,) = struct.unpack_from("<Q", made)
        return made + fuse.opened(self._open_handle(number, flags))

    def _read(self, _: int, body: memoryview) -> bytes:
        handle, offset, size, _ = fuse.TRANSFER.unpack_from(body)
        return os.pread(handle, size, offset)

    def _write(self, _: int, body: memoryview) -> bytes:
        handle, offset, size, _ = fuse.TRANSFER.unpack_from(body)
        with self.server.writing:
            if self.server.given["kind"] == "errs":
                self._handles[handle].unsynced.append((offset, os.pread(handle, size, offset).ljust(size, b"\0")))
            if self.server.unsynced:
                self.server.unsynced.written(handle, offset, size)
            return fuse.written(os.pwrite(handle, body[fuse.WRITE_DATA : fuse.WRITE_DATA + size], offset))

    def _statfs(self, node: int, _: memoryview) -> bytes:
        found = os.statvfs(self._nodes[node].path)
        return fuse.STATISTICS.pack(found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree,
                                    found.f_bsize, found.f_namemax, found.f_frsize)  # fmt: skip

    def _release(self, _: int, body: memoryview) -> None:
        (handle,) = struct.unpack_from("<Q", body)
        with self._lock:
            del self._handles[handle]
            self._lists.pop(handle, None)
        os.close(handle)

    def _fsync(self, _: int, body: memoryview) -> None:
        (handle,) = struct.unpack_from("<Q", body)
        with self.server.writing:
            if self.server.unsynced:
                self.server.unsynced.synced(handle)
                return
            os.fsync(handle)
            self._handles[handle].unsynced.clear()

    def _flush(self, *_: Any) -> None:
        pass

    def _opendir(self, node: int, _: memoryview) -> bytes:
        return fuse.opened(self._open_handle(node, os.O_RDONLY | os.O_DIRECTORY))

    def _readdir(self, _: int, body: memoryview) -> bytes:
        handle, offset, size, _ = fuse.TRANSFER.unpack_from(body)
        if offset == 0 or handle not in self._lists:
            self._lists[handle] = _list(handle)
        made = b""
        for i, (name, found) in enumerate(self._lists[handle][offset:], offset + 1):
            data = os.fsencode(name)
            one = struct.pack("<QQII", found.st_ino, i, len(data), stat.S_IFMT(found.st_mode) >> 12) + data
            one += bytes(-len(one) % 8)
            if len(made) + len(one) > size:
                break
            made += one
        return made

    def _getlk(self, _: int, body: memoryview) -> bytes:
        return struct.pack("<QQII", 0, (1 << 63) - 1, _F_UNLCK, 0)

    def _setlk(self, *_: Any) -> None:
        pass

    def _fallocate(self, _: int, body: memoryview) -> None:
        handle, offset, length, mode, _ = struct.unpack_from("<QQQII", body)
        if _libc.fallocate(handle, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
            raise OSError(ctypes.get_errno(), "")


def _text(body: memoryview) -> str:
    return os.fsdecode(bytes(body).split(b"\0", 1)[0])


def _names(body: memoryview) -> tuple[str, str]:
    first, second, *_ = bytes(body).split(b"\0")
    return os.fsdecode(first), os.fsdecode(second)


def _list(fd: int) -> list[tuple[str, os.stat_result]]:
    found = [(name, os.fstat(fd)) for name in (".", "..")]
    for name in os.listdir(fd):
        with contextlib.suppress(FileNotFoundError):
            found.append((name, os.stat(name, dir_fd=fd, follow_symlinks=False)))
    return found


def _attributes(found: os.stat_result, hidden: tuple[int, int]) -> bytes:
    changed = hidden[1] if found.st_ctime_ns == hidden[0] else found.st_ctime_ns
    times = (found.st_atime_ns, found.st_mtime_ns, changed)
    return fuse.ATTRIBUTES.pack(
        found.st_ino, found.st_size, found.st_blocks, *(t // 10**9 for t in times), *(t % 10**9 for t in times),
        found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, found.st_blksize, 0,
    )  # fmt: skip


class _Server:
    """What the mounts of one directory share."""

    def __init__(self, directory: str, given: dict[str, Any]) -> None:
        self.directory, self.given = directory, given
        self.offered = Flag.ASYNC_READ | Flag.BIG_WRITES | Flag.ASYNC_DIO | Flag.PARALLEL_DIROPS | Flag.MAX_PAGES
        if given["kind"] == "locks":
            self.offered |= Flag.POSIX_LOCKS | Flag.FLOCK_LOCKS
        # What may be taken back is remembered in the order in which it was written.
        self.writing: Any = threading.Lock() if given["kind"] == "errs" else contextlib.nullcontext()
        self.unsynced: Unsynced | None = None
        if given["kind"] == "forgets":
            self.unsynced = Unsynced(os.path.join(os.path.dirname(directory), "kept"))
            self.writing = self.unsynced.lock
        self.ignored = Op[given["ignored"]] if "ignored" in given else None
        self.is_hostile = False
        self.made: collections.Counter[str] = collections.Counter()
        self._choose = random.Random(given["key"])
        self._drawing = threading.Lock()

    def hear(self, said: bool | str) -> None:
        """Whether it is hostile from now on, or ``"cut"``: what is not durable is lost."""
        if said == "cut":
            if self.unsynced:
                self.unsynced.lose(self._choose)
            return
        self.is_hostile = bool(said)
        if self.unsynced and said:
            self.unsynced.forget()

    def error(self, op: Op) -> int:
        """The error of the next operation; 0 for none."""
        if not self.is_hostile or op.name not in self.given.get("operations", ()):
            return 0
        with self._drawing:
            if self._choose.random() >= self.given["share"]:
                return 0
            name = self._choose.choice(ERRORS[op.name])
            self.made[f"{op.name} {name}"] += 1
        return int(getattr(errno, name))

    def delay(self, op: Op) -> None:
        """Holds a request up, so that later ones overtake it."""
        if self.given["kind"] == "slow" and self.is_hostile and op in _SLOW:
            with self._drawing:
                seconds = self._choose.random() * DELAY_MAX if self._choose.random() < self.given["share"] else 0.0
            time.sleep(seconds)


def serve(directory: str, targets: list[str], given: dict[str, Any], control: Connection) -> None:
    """The body of the server's process: mounts, tells so, and unmounts when the driver has closed its side.

    Args:
        directory: that is served.
        targets: where it is mounted.
        given: of `draw`; for tests of this program also ``"swallowed"``: no failure of an fsync is told, and ``"ignored"``:
            the name of an operation that does nothing.
        control: gets what `_Server.hear` takes, and is told which errors it has made.
    """
    fuse.begin_process()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.umask(0)
    server, mounts = _Server(directory, given), list[_Mount]()
    try:
        try:
            for target in targets:
                mounts.append(_Mount(server, target))
        except OSError as error:
            control.send(str(error))
            return
        for mount in mounts:
            for _ in range(THREADS):
                threading.Thread(target=mount.run, daemon=True).start()
        control.send("")
        with contextlib.suppress(EOFError, OSError):
            while True:
                server.hear(control.recv())
                control.send(dict(server.made))
                server.made.clear()
    finally:
        for target in targets:
            fuse.detach(target)
        os._exit(0)  # no thread of this process needs what is left
