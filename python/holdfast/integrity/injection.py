"""Makes one system call of a trainer or of its workers fail, return short, or end its process: from outside, by a filter.

A trainer gives a seccomp filter to itself; the programs and workers that it starts inherit it. The kernel then asks the
driver about each call of the names below. The driver counts the calls that concern a save, in the one order of all
processes, and answers one of them. Nothing of the package is replaced, no tracer is needed, and no privilege.

A ring's operations are no calls; a filter cannot see them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
import platform
import select
import signal
import socket
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Any

_SECCOMP = 317
_SET_MODE_FILTER, _ALL_THREADS, _NEW_LISTENER, _WAIT_KILLABLE = 1, 1 << 0, 1 << 3, 1 << 5
_ARCH = 0xC000003E  # x86-64
_ALLOW, _ASK, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_PR_SET_NO_NEW_PRIVS = 38
_NOTICE = struct.Struct("<QIIiIQ6Q")
_ANSWER = struct.Struct("<QqiI")
_AT_FDCWD = -100
MARK = "/holdfast-integrity-mark/"

_OF_PATHS = (errno.EACCES, errno.EIO, errno.ENOMEM, errno.ESTALE)
_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_OF_FDS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OF_RINGS = (errno.ENOMEM, errno.EPERM, errno.EAGAIN)
# Transfers of half of the bytes in whole pages, of an odd number of bytes, and of none.
SHORT = ("short", "odd", "none")
# The number of each call on x86-64, and the errors that it can return where its arguments are sound.
CALLS: dict[str, tuple[int, tuple[int, ...]]] = {
    "read": (0, (errno.EIO, errno.EINTR, errno.ESTALE)),
    "write": (1, (*_OF_SPACE, errno.EFBIG, errno.EINTR)),
    "close": (3, ()),  # one that fails has closed all the same, which an answer in its place cannot do
    "poll": (7, (errno.EINTR, errno.ENOMEM)),
    "mmap": (9, (errno.ENOMEM, errno.EAGAIN, errno.ENFILE, errno.EPERM)),
    "munmap": (11, ()),  # the same
    "pread64": (17, (errno.EIO, errno.EINTR, errno.ESTALE)),
    "pwrite64": (18, (*_OF_SPACE, errno.EFBIG, errno.EINTR)),
    "madvise": (28, (errno.ENOMEM, errno.EAGAIN)),
    "sendmsg": (46, (errno.ENOBUFS, errno.ENOMEM, errno.EPIPE, errno.EINTR)),
    "recvmsg": (47, (errno.ENOMEM, errno.EINTR)),
    "socketpair": (53, (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES)),
    "clone": (56, (errno.EAGAIN, errno.ENOMEM)),
    "vfork": (58, (errno.EAGAIN, errno.ENOMEM)),
    "execve": (59, (errno.EACCES, errno.ENOENT, errno.ENOMEM, errno.EMFILE)),
    "fcntl": (72, (errno.EMFILE, errno.EPERM, errno.EINTR)),
    "flock": (73, (errno.EWOULDBLOCK, errno.ENOLCK, errno.EINTR, errno.EIO)),
    "fsync": (74, (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR)),
    "ftruncate": (77, (*_OF_SPACE, errno.EFBIG, errno.EINTR)),
    "rename": (82, (*_OF_PATHS, errno.ENOSPC, errno.EROFS)),
    "mkdir": (83, (*_OF_PATHS, errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
    "rmdir": (84, (*_OF_PATHS, errno.EBUSY, errno.EROFS)),
    "unlink": (87, (*_OF_PATHS, errno.EBUSY, errno.EROFS)),
    "fstatfs": (138, (errno.EIO, errno.ENOSYS, errno.EINTR)),
    "setpriority": (141, (errno.EACCES, errno.EPERM)),
    "sched_setaffinity": (203, (errno.EINVAL, errno.EPERM)),
    "getdents64": (217, (errno.EIO, errno.ENOMEM, errno.ESTALE)),
    "waitid": (247, (errno.EINTR,)),
    "ioprio_set": (251, (errno.EPERM,)),
    "openat": (257, (*_OF_PATHS, *_OF_FDS, errno.ENOSPC, errno.EROFS, errno.EINTR)),
    "mkdirat": (258, (*_OF_PATHS, errno.EEXIST, errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
    "newfstatat": (262, _OF_PATHS),
    "unlinkat": (263, (*_OF_PATHS, errno.EBUSY, errno.EROFS)),
    "readlinkat": (267, _OF_PATHS),
    "sync_file_range": (277, (errno.EIO, errno.ENOSPC, errno.ENOSYS)),
    "utimensat": (280, (errno.EACCES, errno.EPERM, errno.EROFS)),
    "fallocate": (285, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EOPNOTSUPP, errno.EINTR)),
    "eventfd2": (290, _OF_FDS),
    "prlimit64": (302, (errno.EPERM,)),
    "renameat2": (316, (*_OF_PATHS, errno.EEXIST, errno.ENOSPC, errno.EROFS, errno.EINVAL)),
    "memfd_create": (319, _OF_FDS),
    "statx": (332, (*_OF_PATHS, errno.ENOSYS)),
    "io_uring_setup": (425, (*_OF_RINGS, errno.EMFILE, errno.ENOSYS)),
    "io_uring_enter": (426, (errno.EAGAIN, errno.EBUSY, errno.EINTR)),
    "io_uring_register": (427, (errno.ENOMEM, errno.EFAULT, errno.EOPNOTSUPP)),
    "pidfd_send_signal": (424, (errno.EPERM,)),
    "fsopen": (430, (errno.EPERM, errno.ENOSYS, errno.EMFILE)),
    "pidfd_open": (434, (*_OF_FDS, errno.ENOSYS)),
    "clone3": (435, (errno.EAGAIN, errno.ENOMEM)),
}  # fmt: skip
SHORTENED = ("write", "pwrite64", "read", "pread64")
_NAMES = {number: name for name, (number, _) in CALLS.items()}
# Of a trainer these are always calls of a save: nothing else there makes them.
_OF_PROCESSES = frozenset({
    "socketpair", "clone", "vfork", "execve", "waitid", "memfd_create", "io_uring_setup", "io_uring_enter",
    "io_uring_register", "pidfd_send_signal", "fsopen", "pidfd_open", "clone3", "eventfd2",
})  # fmt: skip
_AT_PATH = {
    "openat": (0, 1), "mkdirat": (0, 1), "newfstatat": (0, 1), "unlinkat": (0, 1), "readlinkat": (0, 1), "utimensat": (0, 1),
    "statx": (0, 1), "renameat2": (2, 3), "rename": (None, 1), "mkdir": (None, 0), "rmdir": (None, 0), "unlink": (None, 0),
    "execve": (None, 0),
}  # fmt: skip
_AT_FD = {
    "read": 0, "write": 0, "close": 0, "mmap": 4, "pread64": 0, "pwrite64": 0, "fcntl": 0, "flock": 0, "fsync": 0,
    "ftruncate": 0, "fstatfs": 0, "getdents64": 0, "sync_file_range": 0, "fallocate": 0, "sendmsg": 0, "recvmsg": 0,
}  # fmt: skip


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


def _program(answers: dict[int, int]) -> _Program:
    """Answers the calls with these numbers, and allows all others."""
    steps = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCH), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    for number, answer in sorted(answers.items()):
        steps += [(0x15, 0, 1, number), (0x06, 0, 0, answer)]
    steps.append((0x06, 0, 0, _ALLOW))
    made = (_Instruction * len(steps))(*(_Instruction(*s) for s in steps))
    return _Program(len(steps), made)


def forbid(calls: dict[str, str]) -> None:
    """Makes calls fail in this process and in what it starts, as the filter of a container does.

    Args:
        calls: names of `CALLS`, each with the name of its error; "": it does nothing and succeeds.

    Raises:
        OSError: the kernel or a filter of the container refuses it.
    """
    _give(_program({CALLS[call][0]: _ERRNO | (getattr(errno, error) if error else 0) for call, error in calls.items()}), _ALL_THREADS)


def _give(program: _Program, flags: int) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    result = _seccomp(flags, ctypes.byref(program))
    if result < 0:
        raise OSError(-result, f"seccomp: {os.strerror(-result)}")
    return result


def _seccomp(flags: int, program: Any) -> int:
    """The result of the call, or a negative error number."""
    result: int = ctypes.CDLL(None, use_errno=True).syscall(_SECCOMP, _SET_MODE_FILTER, flags, program)
    return result if result >= 0 else -ctypes.get_errno()


def why_not() -> str:
    """Why calls cannot be made to fail here; "" where they can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "it needs Linux on x86-64"
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if release < (5, 19):
        return f"it needs Linux 5.19, this is {platform.release()}"
    # Without a program the kernel answers EFAULT, if it and the container's filter take the flags.
    refused = -_seccomp(_NEW_LISTENER | _WAIT_KILLABLE, None)
    return "" if refused == errno.EFAULT else f"seccomp: {os.strerror(refused)}"


def install(channel: socket.socket) -> None:
    """Gives this process the filter, and its listener to the driver. Before the first thread or process of a save.

    Args:
        channel: to the driver, which has called `Injector.accept`.

    Raises:
        OSError: the kernel or a filter of the container refuses it.
    """
    made: list[int] = []
    ready = threading.Event()

    def hand_over() -> None:  # in a thread without the filter: no answers come yet
        ready.wait()
        for listener in made:
            socket.send_fds(channel, [b"."], [listener])
            os.close(listener)

    helper = threading.Thread(target=hand_over)
    helper.start()
    try:
        made.append(_give(_program(dict.fromkeys(_NAMES, _ASK)), _NEW_LISTENER | _WAIT_KILLABLE))
    finally:
        ready.set()
        helper.join()
    mark("begin")


def mark(name: str) -> None:
    """Tells the driver, in the order of the calls, where the script stands."""
    with contextlib.suppress(FileNotFoundError):
        os.close(os.open(MARK + name, os.O_RDONLY))


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a script: the n-th of its name in one role.

    Attributes:
        role: ``"trainer 0"``, ``"worker"``.
        call: of `CALLS`.
        n: from 1.
    """

    role: str
    call: str
    n: int

    def __str__(self) -> str:
        return f"{self.call} {self.n} of the {self.role}"


@dataclasses.dataclass(frozen=True)
class Injection:
    """What happens at a step.

    Attributes:
        step: at which.
        act: an error's name, one of ``SHORT``, ``"kill"``, or ``"kill-all"``: the trainers, too.
    """

    step: Step
    act: str

    def __str__(self) -> str:
        return f"{self.act} at {self.step}"


class Injector:
    """Answers the calls of a script's processes.

    Args:
        directory: of the checkpoints; calls on what is below it are counted.
        injections: each is made once.
        first, last: marks between which calls are counted; no last one: to the end.
    """

    def __init__(self, directory: str, injections: tuple[Injection, ...] = (), first: str = "begin",
                 last: str = "") -> None:  # fmt: skip
        self.directory, self.injections = directory, injections
        self.first, self.last = first, last
        self.steps: dict[Step, str] = {}  # of a script, with what each concerns
        self.fired: list[dict[str, Any]] = []
        self.trainers: dict[int, str] = {}
        self._pending = {i.step: i.act for i in injections}
        self._counts: dict[tuple[str, str], int] = {}
        self._counting = False
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over = False
        self._is_done = False  # no call is of interest any more

    def accept(self, channel: socket.socket, pid: int, role: str) -> None:
        """Takes the listener of a trainer; its calls wait for an answer from then on."""
        self.trainers[pid] = role
        with channel:
            channel.settimeout(60)
            _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        if fds:
            thread = threading.Thread(target=self._serve, args=(fds[0],), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Returns when all processes with the filter have ended."""
        for thread in self._threads:
            thread.join(30)
        self._over = True

    @property
    def acts(self) -> set[str]:
        """The acts that were made."""
        return {fired["act"] for fired in self.fired}

    @property
    def has_killed(self) -> bool:
        """Whether it has killed a trainer, and not workers alone."""
        return any(f["act"] == "kill-all" or f["act"] == "kill" and f["step"].role != "worker" for f in self.fired)

    def wrong_end(self, returned: bool, status: int) -> str:
        """The mistake in the end of the only process but workers; "" without one.

        Args:
            returned: whether its body did.
            status: of its exit.
        """
        is_right = status == -signal.SIGKILL if self.has_killed else returned and status == 0
        return "" if is_right else f"has ended with status {status} {'after' if returned else 'without'} its result"

    # ---- The listener.

    def _serve(self, listener: int) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        try:
            while not self._over:
                for _, events in poll.poll(1000):
                    if events & select.POLLIN:
                        self._answer(listener)
                    elif events & (select.POLLHUP | select.POLLERR):
                        return
        finally:
            os.close(listener)

    def _answer(self, listener: int) -> None:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice, True)
        except OSError:
            return  # it was killed meanwhile
        id_, tid, _, number, _, _, *arguments = _NOTICE.unpack(notice)
        value, error, flags = 0, 0, _CONTINUE
        with self._lock, contextlib.suppress(OSError):  # the caller may be gone
            act = self._decide(tid, _NAMES[number], arguments)
            if isinstance(act, int):
                value, error, flags = 0, -act, 0
            elif act in SHORT:
                made = self.fired.pop()  # until it is
                value, flags = _part(tid, _NAMES[number], arguments, act), 0
                if value < 0:
                    value, flags = 0, _CONTINUE
                else:
                    self.fired.append(made)
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _SEND, bytearray(_ANSWER.pack(id_, value, error, flags)), True)

    def _decide(self, tid: int, call: str, arguments: list[int]) -> int | str | None:
        """An errno, one of `SHORT`, or None to let the call go on."""
        if self._is_done or (not self._counting and call != "openat"):
            return None
        path = _path(tid, call, arguments)
        if path.startswith(MARK):
            self._see(path.removeprefix(MARK))
            return errno.ENOENT
        pid = _process(tid)
        role = self.trainers.get(pid, "worker")
        if not self._counting or not self._concerns(role, tid, call, path, arguments):
            return None
        n = self._counts[role, call] = self._counts.get((role, call), 0) + 1
        step = Step(role, call, n)
        self.steps[step] = path
        act = self._pending.pop(step, "")
        if not act:
            return None
        self.fired.append({"step": step, "act": act, "of": path, "at": time.time_ns()})
        self._is_done = not self._pending
        if act.startswith("kill"):
            for each in (pid, *(self.trainers if act == "kill-all" else ())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            return None
        return act if act in SHORT else int(getattr(errno, act))

    def _see(self, name: str) -> None:
        if name == self.first:
            self._counting = True
        elif name == self.last:
            self._counting, self._is_done = False, True

    def _concerns(self, role: str, tid: int, call: str, path: str, arguments: list[int]) -> bool:
        if role == "worker":
            return True
        if call in ("clone", "clone3"):  # the threads of others, too
            return True
        if call in _OF_PROCESSES:
            return True
        return path.startswith(self.directory) or "memfd:holdfast" in path


def line(fired: dict[str, Any]) -> dict[str, Any]:
    """What was made of an injection as a line of a trainer, for the judge."""
    role, _, rank = fired["step"].role.partition(" ")
    kind = ("kill-worker" if role == "worker" else "kill-trainer") if fired["act"] == "kill" else "fault"
    number = errno.EIO if fired["act"] == "none" else getattr(errno, fired["act"], 0)
    return {"event": "fired", "kind": "kill-both" if fired["act"] == "kill-all" else kind, "phase": "step",
            "rank": int(rank or 0), "job": 0, "at": fired["at"], "errno": number}  # fmt: skip


def name_of(number: int) -> str:
    """The name of an error number."""
    return errno.errorcode[number]


# ---- What the kernel tells of a caller.


def _process(tid: int) -> int:
    for line in Path(f"/proc/{tid}/status").read_text().splitlines():
        if line.startswith("Tgid:"):
            return int(line.split()[1])
    return tid


def _path(tid: int, call: str, arguments: list[int]) -> str:
    """What a call is about: a path, or what a descriptor is of; "" where it is about nothing."""
    if call in _AT_PATH:
        base, at = _AT_PATH[call]
        name = _text(tid, arguments[at])
        if base is None or name.startswith("/"):
            return name
        fd = ctypes.c_int(arguments[base]).value
        return os.path.join(_link(tid, fd), name) if name else _link(tid, fd)
    if call in _AT_FD:
        return _link(tid, ctypes.c_int(arguments[_AT_FD[call]]).value)
    return ""


def _link(tid: int, fd: int) -> str:
    if fd < 0 and fd != _AT_FDCWD:
        return ""
    try:
        return os.readlink(f"/proc/{tid}/cwd" if fd == _AT_FDCWD else f"/proc/{tid}/fd/{fd}")
    except OSError:
        return ""


def _text(tid: int, address: int) -> str:
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        text = b""
        while b"\0" not in text and len(text) < 4096:
            at = address + len(text)
            text += os.pread(memory.fileno(), 4096 - at % 4096, at) or b"\0"
    return text.partition(b"\0")[0].decode(errors="replace")


def _open_as(tid: int, fd: int, call: str) -> int:
    """A descriptor of a caller's file: for a transfer at an offset without O_DIRECT, which refuses odd sizes; else with its position."""
    if call in ("pwrite64", "pread64"):
        return os.open(f"/proc/{tid}/fd/{fd}", (os.O_WRONLY if call == "pwrite64" else os.O_RDONLY) | os.O_CLOEXEC)
    pidfd = os.pidfd_open(_process(tid))
    try:
        copy: int = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0)  # pidfd_getfd
        return copy
    finally:
        os.close(pidfd)


def _part(tid: int, call: str, arguments: list[int], act: str) -> int:
    """Does a part of a transfer in the caller's place; -1 where there is no such part."""
    fd, address, count, offset = arguments[:4]
    is_file = stat.S_ISREG(os.stat(f"/proc/{tid}/fd/{ctypes.c_int(fd).value}").st_mode)
    if count < 2 or not is_file:
        return -1
    if act == "none":
        return 0
    part = (count // 2 - 1) | 1 if act == "odd" else count // 2 // 4096 * 4096 or count // 2
    copy = _open_as(tid, ctypes.c_int(fd).value, call)
    if copy < 0:
        return -1
    try:
        with mmap.mmap(-1, part) as room, open(f"/proc/{tid}/mem", "r+b", buffering=0) as memory:
            if "write" in call:
                os.preadv(memory.fileno(), [room], address)
                return os.pwrite(copy, room, offset) if call == "pwrite64" else os.write(copy, room)
            view = memoryview(room)
            try:
                done = os.preadv(copy, [view], offset) if call == "pread64" else os.readv(copy, [view])
                return os.pwrite(memory.fileno(), view[:done], address)
            finally:
                view.release()
    finally:
        os.close(copy)
