"""Rounds on disks that go bad: a thin one runs out of room; of device-mapper flakey loses or refuses writes, delay is late, and
linear misreads.

Afterwards the disk is sound again. It is mounted, recovered and held against the model, and the round goes on.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import functools
import mmap
import os
import random
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import filterfalse
from pathlib import Path
from typing import Any

from holdfast.integrity import device_mapper, fuse, judge, power_cuts, processes, readers, rounds, schedule, served_disk
from holdfast.integrity.served_disk import attached, make, mounted, repaired, sparse

_ROOM_BYTES = 64 << 20  # of a pool, for saves until it is full
TIME_MOMENT_MAX = 1.0  # seconds after a call in which a disk goes bad; mostly in the first quarter
_RUNS_OUT, _LOSES, _REFUSES, _MISREADS, _IS_LATE = "runs out of room", "loses writes", "refuses writes", "misreads", "is late"
_DOWN = "flakey {disk} 0 0 1000000"  # from now on, without an end
_SOUND = "linear {disk} 0"
_WRITES = {
    _LOSES: f"{_DOWN} 1 drop_writes",
    _REFUSES: f"{_DOWN} 1 error_writes",
    _IS_LATE: "delay {disk} 0 0 {disk} 0 100",  # milliseconds
}
ATTACKS = (_RUNS_OUT, *_WRITES, _MISREADS)
PAGE = 4096


@functools.cache
def why_not(attack: str) -> str:
    """Why a disk cannot have an attack here; "" where it can."""
    return "" if attack == _RUNS_OUT else device_mapper.why_not("flakey", "delay")


class Disk(abc.ABC):
    """A disk with a file system. A context manager.

    Args:
        kind: of `served_disk.MAKING`.
        scratch: a directory for its file and its mount point.
    """

    def __init__(self, kind: str, scratch: str) -> None:
        self._kind, self._size, self._scratch = kind, power_cuts.SIZES[kind], scratch
        self._stack = contextlib.ExitStack()
        self.directory = os.path.join(scratch, "mounted")

    def __enter__(self) -> Disk:
        with contextlib.ExitStack() as stack:
            self._device = self._made(stack)
            make(self._kind, self._device)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @abc.abstractmethod
    def _made(self, stack: contextlib.ExitStack) -> str:
        """Makes the disk; its device. What it is made of ends with `stack`."""

    @abc.abstractmethod
    def go_bad(self, attack: str) -> None: ...

    @abc.abstractmethod
    def be_sound(self) -> None: ...

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Mounts the file system, repaired where it has no journal."""
        repaired(self._device, self._kind)
        with mounted(self._device, self.directory, self._kind):
            yield


class ThinDisk(Disk):
    """A disk that takes room of a pool in memory when a block is first written. It goes bad when the pool is full."""

    def _made(self, stack: contextlib.ExitStack) -> str:
        pool = os.path.join(self._scratch, "pool")
        os.mkdir(pool)
        served_disk.run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "holdfast-integrity", pool)
        stack.callback(fuse.unmount, pool)
        self._ballast = os.path.join(pool, "ballast")
        device = stack.enter_context(attached(sparse(os.path.join(pool, "image"), self._size)))
        # Of a larger write a part may fail, and the kernel then reports the whole one as done (6.18).
        setting = Path(f"/sys/block/{os.path.basename(device)}/queue/max_sectors_kb")
        stack.callback(setting.write_text, setting.read_text())  # a loop device keeps it for its next user
        setting.write_text(f"{PAGE >> 10}\n")
        return device

    def __enter__(self) -> Disk:
        super().__enter__()
        self._take(_ROOM_BYTES)  # what is left is taken in a moment
        return self

    def _take(self, left: int) -> None:
        """Takes the pool's room, but as much as this."""
        with open(self._ballast, "ab") as file:
            pool, at = os.statvfs(self._ballast), file.seek(0, os.SEEK_END)
            step = pool.f_bavail * pool.f_frsize - left
            end = at + step
            while step >= PAGE and at < end:
                try:
                    os.posix_fallocate(file.fileno(), at, step)
                    at += step
                except OSError:  # as much is not left now
                    step //= 2

    def go_bad(self, attack: str) -> None:
        self._take(0)

    def be_sound(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._ballast)


class MappedDisk(Disk):
    """A disk of device-mapper."""

    def _made(self, stack: contextlib.ExitStack) -> str:
        self._name = f"holdfast-bad-disk-{os.getpid()}"
        self._disk = stack.enter_context(attached(sparse(os.path.join(self._scratch, "image"), self._size)))
        return stack.enter_context(device_mapper.mapped(self._name, self._table(_SOUND)))

    def _table(self, target: str) -> str:
        return device_mapper.table_of((self._size, target.format(disk=self._disk)))

    def go_bad(self, attack: str) -> None:
        device_mapper.change(self._name, self._table(_WRITES[attack]))

    def be_sound(self) -> None:
        device_mapper.change(self._name, self._table(_SOUND))

    def misread(self, page: bytes, choose: random.Random) -> bool:
        """From now on another page is read where this one is; False where the disk does not have it."""
        with open(os.path.join(self._scratch, "image"), "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as image:
            at = image.find(page)
            while at > 0 and at % PAGE:
                at = image.find(page, at + 1)
        if at < 0:
            return False
        other = choose.randrange(self._size // PAGE) * PAGE // device_mapper.SECTOR
        pieces = [(at, f"linear {self._disk} 0"), (PAGE, f"linear {self._disk} {other}"),
                  (self._size - at - PAGE, f"linear {self._disk} {(at + PAGE) // device_mapper.SECTOR}")]  # fmt: skip
        device_mapper.change(self._name, device_mapper.table_of(*pieces))
        return True


class _Telling(list[dict[str, Any]]):
    """The lines of a life. Some time after one of its calls something happens once.

    Attributes:
        before: how many lines had been told by then; None: it has not happened.
    """

    def __init__(self, calls: int, seconds: float, happen: Callable[[], None]) -> None:
        super().__init__()
        self.before: int | None = None
        self._calls, self._happen = calls, happen
        self._timer = threading.Timer(seconds, self._run)

    def append(self, line: dict[str, Any]) -> None:
        super().append(line)
        if line["event"] == "call":
            self._calls -= 1
            if self._calls == 0:
                self._timer.start()

    def _run(self) -> None:
        self.before = len(self)
        self._happen()

    def close(self) -> None:
        """It does not happen from now on."""
        self._timer.cancel()
        if self._timer.ident:
            self._timer.join()


def prepared(round_: dict[str, Any], attack: str) -> dict[str, Any]:
    """The round of `power_cuts.quiet` with a save after the disk was bad, and workers that die while it is late."""
    made = power_cuts.quiet(round_)
    saves = schedule.saves_of(made)
    if len(made["lives"]) == 1:
        last = {k: v for k, v in copy.deepcopy(saves[max(a["n"] for a in saves.values())]).items() if k != "event"}
        made["lives"].append([last | {"n": last["n"] + 1, "step": last["step"] + 1}])
    if attack == _IS_LATE:
        made["launcher"] = "spawn" if made["launcher"] == "thread" else made["launcher"]
        first = next(a for a in made["lives"][0] if a["do"] == "save")
        first["event"] = {"kind": "kill-worker", "rank": 0, "phase": "writing", "share": 0.0, "seconds": 0.0}
    return made


def run(round_: dict[str, Any], kind: str, attack: str, scratch: str, plant: str = "") -> rounds.Result:
    """Runs a round whose disk is bad from a moment of its first life to the end of that life.

    Args:
        round_: of `prepared`.
        kind: of `served_disk.MAKING`.
        attack: of `ATTACKS`.
        scratch: a directory in which a file of the disk's size fits; memory is fastest.
        plant: as of `trainer.serve`, for tests of this program.
    """
    choose = random.Random(f"{round_['seed']}:{round_['number']}:{kind}:{attack}")
    of = ThinDisk if attack == _RUNS_OUT else MappedDisk
    with tempfile.TemporaryDirectory(dir=scratch, prefix="bad-disk-") as base, processes.adopting(), of(kind, base) as disk:
        made = judge.Judge(round_, os.path.join(disk.directory, "run"))
        try:
            _first_life(made, disk, attack, choose, base, plant)
            with disk.mounted():
                made.recover()
                made.look(thorough=True)
                if attack == _MISREADS and isinstance(disk, MappedDisk):
                    with made.blaming("after the disk misread"):
                        _misread(made, disk, choose)
                    disk.be_sound()
                _later_lives(made, base, plant)
        except subprocess.CalledProcessError as error:
            made.blame("i", f"after the disk was bad: {error.stderr or error}")
    counts = collections.Counter({f"{name} {kind}": made.counts[name] for name in ("durable", "failed", "refused")})
    counts[f"states {kind} {attack if made.counts['bad'] else 'sound'}"] += 1
    counts[f"door {round_['door']}"] += 1
    return rounds.Result([{**p, "what": f"{kind}, {attack}: {p['what']}"} for p in made.problems], counts, "", 0.0)


def _first_life(made: judge.Judge, disk: Disk, attack: str, choose: random.Random, scratch: str, plant: str) -> None:
    """The life in which the disk goes bad; afterwards it is sound."""
    actions = made.round["lives"][0]
    calls = sum(a["do"] == "save" for a in actions) * made.round["ranks"] * made.round["jobs"]
    calls, seconds = choose.randint(1, calls), choose.random() ** 2 * TIME_MOMENT_MAX
    if attack == _IS_LATE:  # from the first save on
        calls, seconds = 1, 0.0
    lines = _Telling(calls, seconds, lambda: disk.go_bad(attack))
    with disk.mounted():
        if attack == _MISREADS:
            lines.close()
        power_cuts.live(made, 0, lines, scratch, plant)
        lines.close()
    disk.be_sound()
    made.counts["bad"] = lines.before is not None
    told = lines[: lines.before] if attack == _LOSES else lines
    made.hear(told, actions, {attack: 1} if made.counts["bad"] and attack in (_REFUSES, _RUNS_OUT) else None)
    made.called_late = {line["n"] for line in lines if line["event"] == "call"} - made.made.keys()
    if attack == _IS_LATE and not made.counts["event kill-worker"]:
        made.counts["bad"] = 0  # no write was under way


def _later_lives(made: judge.Judge, scratch: str, plant: str) -> None:
    for life, actions in list(enumerate(made.round["lives"]))[1:]:
        lines: list[dict[str, Any]] = []
        power_cuts.live(made, life, lines, scratch, plant)
        made.hear(lines, actions)
        made.recover()
        made.look(thorough=True)


def _misread(made: judge.Judge, disk: MappedDisk, choose: random.Random) -> None:
    """Verifying finds a page of a checkpoint that is read as another one; no load gives it."""
    complete = readers.complete(made.directory, made.format) if os.path.isdir(made.directory) else []
    os.sync()
    for path in [c["path"] for c in complete]:
        names = [path] if os.path.isfile(path) else [os.path.join(path, name) for name in os.listdir(path)]
        largest = max(names, key=os.path.getsize)
        if os.path.getsize(largest) < PAGE:
            continue
        offset = choose.randrange(os.path.getsize(largest) // PAGE) * PAGE
        right = _page(largest, offset)
        if not any(right) or not disk.misread(right, choose):
            continue
        what = f"a page of {largest} that is read as another one"
        if _page(largest, offset) != right:
            made.counts["bad"] = 1
            if readers.verdict(path, made.format) == "sound":
                made.blame("i", f"{what}: verifying says that {path} is sound")
            _forget(largest)
            made.load_damaged(path, what, judge.OF_ERRORS)
        disk.be_sound()
        _forget(largest)
        if (verdict := readers.verdict(path, made.format)) != "sound":
            made.blame("i", f"{what} is right again, and {path} is {verdict}")


def _page(path: str, offset: int) -> bytes:
    """A page of a file from its disk; b"" where it cannot be read."""
    _forget(path)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return os.pread(file.fileno(), PAGE, offset)
    return b""


def _forget(path: str) -> None:
    """Takes a file out of the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def drawn(draw: Callable[[int], dict[str, Any]], plant: str, number: int, kind: str) -> rounds.Result:
    """Runs the round of a number on a file system with each attack that there is. Arguments as of `power_cuts.drawn`."""
    round_ = draw(number)
    problems: list[dict[str, str]] = []
    counts: collections.Counter[str] = collections.Counter()
    for attack in filterfalse(why_not, ATTACKS):
        result = run(prepared(round_, attack), kind, attack, power_cuts.scratch_directory(), plant)
        problems += result.problems
        counts += result.counts
    return rounds.Result(problems, counts, "", 0.0)
