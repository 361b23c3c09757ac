"""Uploads: saves until they are complete on all ranks, and the line that they form."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata

from holdfast import _collector, _completion, _runtime, events, handle
from holdfast._names import manifest
from holdfast._process import PerProcess
from holdfast.dcp.failures import error_of, portable
from holdfast.dcp.matching import Standing
from holdfast.dcp.plans import Cache
from holdfast.errors import TimeoutError

# Before PyTorch 2.14 it has no public name.
_set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout

logger = logging.getLogger("holdfast.dcp")

_CALLS_MAX = 4096
_CALLS_TOLD_MAX = 64  # by which a rank can be ahead of another one that has left out calls


class Upload:
    """One save until its ``.metadata`` is durable; what `holdfast.flush` waits for.

    Observers are told of it, and not of this rank's `Save`: that may well be durable without the
    checkpoint being complete. A failure of this rank's own is told at once, to them and by
    `durable`, while the exchange, by which the other ranks learn of it, goes on behind.
    """

    def __init__(self, path: str, step: int, own: Callable[[], None],
                 run: Callable[[], tuple[Metadata, dict[str, Any]]],
                 line: Line, save: handle.Save | None, extra: dict[str, Any],
                 runtime: _runtime.Runtime) -> None:  # fmt: skip
        self.path = path
        self.step = step
        self.extra = extra if save is None else save.extra
        self.durable = _completion.SeenFuture()
        self.staged: Future = save.staged if save is not None else self.durable
        self._save: handle.Save | None = save
        self._own: Callable[[], None] | None = own
        self._run: Callable[[], tuple[Metadata, dict[str, Any]]] | None = run
        self._line = line
        self.refused = False
        self.runtime: _runtime.Runtime | None = runtime
        self._exchanged = threading.Event()
        self._once = threading.Lock()
        self._completion = _completion.Completion(self._run_to_the_end, "holdfast-dcp-finish")

    def start(self) -> None:
        """Puts the upload into the line, and begins with it. To be called again after an interrupt."""
        if self._once.locked() or self._completion.has_started:
            return
        self._line.joined(self)
        events.begin(self)
        handle.begun(self)
        self._completion.start()

    def _run_to_the_end(self) -> None:
        """The upload's own thread. Whatever is raised here, its future ends."""
        if not self._once.acquire(blocking=False):
            return
        metadata = None
        failure: BaseException | None = None
        try:
            failure = self._write()
            metadata, found = self._exchange()
            if failure is None:
                self._publish_report(found)
        except BaseException as error:
            failure = failure or error
        finally:
            self._end(metadata, failure)

    def _write(self) -> BaseException | None:
        """Waits for this rank's part. Its own failure ends the future before the exchange with other ranks."""
        own, self._own = self._own, None
        assert own is not None
        try:
            own()
        except BaseException as failure:
            if self._line.world_size > 1:
                with contextlib.suppress(BaseException):  # the other ranks wait in the exchange
                    self._fail(failure)
            return failure
        return None

    def _exchange(self) -> tuple[Metadata, dict[str, Any]]:
        run, self._run = self._run, None
        assert run is not None
        before = self._line.before(self)
        if before is not None:
            # First come, first finished, on every rank: exchanges between ranks must not cross.
            before._exchanged.wait()
        del before
        return run()

    def _end(self, metadata: Metadata | None, failure: BaseException | None) -> None:
        self._exchanged.set()
        self._line.left(self)
        try:
            if failure is not None:
                self._fail(failure)
        finally:
            handle.ended(self, failed=failure is not None)
            _completion.end(self.durable, metadata, failure)

    def _fail(self, failure: BaseException) -> None:
        if not self.durable.done():
            try:
                events.publish(self, None, error_of(failure, self.path))
            finally:
                _completion.end(self.durable, None, failure)

    def _publish_report(self, found: dict[str, Any]) -> None:
        assert self._save is not None and self._save.report is not None
        report = {**self._save.report, **found}
        report["at_complete"] = (time.monotonic_ns() - report["entered_ns"]) / 1e9
        self.durable.report = report
        events.publish(self, report, None)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the save has ended, well or not: `durable` tells.

        Raises:
            TimeoutError: the save goes on.
        """
        self._completion.join(timeout)
        if not self.durable.done():
            raise TimeoutError("DEADLINE_EXCEEDED", f"wait for {self.path}: not complete yet")

    def join(self) -> None:
        """Waits until the upload's thread has ended."""
        self._completion.join()

    def hold_back_training(self) -> None:
        """Does nothing: this rank's `Save` has the copies."""


def started(make: Callable[[], Upload]) -> Upload:
    """Makes and starts an upload. Ctrl-C is raised when this is done: other ranks and younger uploads wait for it."""
    upload = None
    try:
        upload = make()
        upload.start()
    except BaseException:
        (upload or make()).start()
        raise
    return upload


def _timeout_of(group: Any, configured: float | None) -> timedelta:
    """How long an exchange waits for a rank: as configured, else as the job's own exchanges do."""
    if configured is not None:
        return timedelta(seconds=configured)
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend that does not tell
            return group._get_backend(device).options._timeout
    return dist.default_pg_timeout


class Exchange:
    """Exchanges of one upload between its ranks, on a group that nothing else uses meanwhile.

    It holds the process group itself. So it goes on when the job has called
    ``destroy_process_group()``, until all ranks are done.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = world_size

    def reduce(self, mine: Any, combine: Callable[[list[Any]], Any],
               discard: Callable[[list[Any]], None] = lambda _: None) -> Any:  # fmt: skip
        """Gives every rank what rank 0 makes of the values of all.

        Args:
            mine: this rank's value, or the exception that it has in the place of one.
            combine: called on rank 0, unless a rank has failed.
            discard: called on rank 0 with the values of the others, where a rank or `combine` has failed; does not raise.

        Raises:
            CheckpointException: with the failures of all ranks.
            RuntimeError: of the group: a rank is gone or late.
        """
        if isinstance(mine, BaseException):
            mine = _Failed(_wrap_exception(mine if self._group is None else portable(mine)))
        if self._group is None:
            return _value_of(_combined([mine], combine, discard))
        gathered = self._gather(pickle.dumps(mine))
        answer = b""
        if gathered is not None:
            values = [mine, *map(pickle.loads, gathered[1:])]
            own = _combined(values, combine, discard)
            with _collector.paused():
                answer = pickle.dumps(own)
        try:
            answer = self._broadcast(answer)
        except RuntimeError as error:
            if gathered is None:
                raise
            # What this rank has decided, and may have committed, is so whether the others hear of it or not.
            logger.warning("answer the other ranks of a save: %s; a rank has died or hangs", error)
        if gathered is None:
            with _collector.paused():
                own = pickle.loads(answer)
        return _value_of(own)

    def _gather(self, data: bytes) -> list[bytes] | None:
        """The bytes of all ranks, on rank 0."""
        size = torch.tensor([len(data)], device="cpu")
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        self._group.allgather([sizes], [size]).wait()
        most = max(int(s) for s in sizes)
        mine = torch.zeros(most, dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        options = c10d.GatherOptions()
        options.rootRank = 0
        if self.rank != 0:
            self._group.gather([], [mine], options).wait()
            return None
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._group.gather([found], [mine], options).wait()
        return [f[: int(s)].numpy().tobytes() for f, s in zip(found, sizes, strict=True)]

    def _broadcast(self, data: bytes) -> bytes:
        options = c10d.BroadcastOptions()
        options.rootRank = 0
        size = torch.tensor([len(data)], device="cpu")
        self._group.broadcast([size], options).wait()
        whole = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
        self._group.broadcast([whole], options).wait()
        return data if self.rank == 0 else whole.numpy().tobytes()


class _Failed:
    """A failure in the place of a value, as the framework's exceptions hold it."""

    def __init__(self, failure: Any) -> None:
        self.failure = failure


def _combined(values: list[Any], combine: Callable[[list[Any]], Any], discard: Callable[[list[Any]], None]) -> Any:
    failures = {r: v.failure for r, v in enumerate(values) if isinstance(v, _Failed)}
    if not failures:
        try:
            return combine(values)
        except BaseException as error:
            failures[0] = _wrap_exception(portable(error))
    discard([value for value in values if not isinstance(value, _Failed)])
    return CheckpointException("write", failures)


def _value_of(answer: Any) -> Any:
    if isinstance(answer, CheckpointException):
        raise answer
    return answer


@dataclasses.dataclass
class Call:
    """One save without a common planning.

    Attributes:
        path, step: of the save.
        agreed: what the ranks had agreed on before.
        number: of the calls of this rank for this path and step since then, with this one.
        attempt, generation: for its files.
        before: attempts that this rank has begun last, the youngest first.
    """

    path: str
    step: int
    agreed: str
    number: int
    attempt: str
    generation: int
    before: list[str]


class Line:
    """The saves over a set of ranks, in the order of their calls, which is the same on all of them.

    Attributes:
        rank, world_size: of this process among them.
        planning: group for exchanges within the call; None without other ranks.
        cache: plans that are known.
    """

    def __init__(self, world: Any, rank: int, groups: tuple[str, str] | None, world_size: int) -> None:
        # No group is held: that would keep its threads beyond destroy_process_group(), and such a
        # thread that lets go of a tensor while the interpreter finalizes aborts the process.
        self._lock = threading.Lock()
        self._world = weakref.ref(world) if world is not None else None
        self._groups = groups
        self._uploads: list[Upload] = []
        self._agreed = ""  # the attempt that the ranks agreed on last
        self._generation = -1
        # By path and step, since then: the number of calls, and by how many another rank has made more of them.
        self._calls: OrderedDict[tuple[str, int], tuple[int, int]] = OrderedDict()
        self._has_dropped = False  # whether some of these are not known any more
        self._begun: OrderedDict[str, None] = OrderedDict()  # attempts of these calls
        self.rank = rank
        self.world_size = world_size
        self.cache = Cache()

    @property
    def is_stale(self) -> bool:
        return self._world is not None and self._world() is not dist.group.WORLD

    @property
    def has_agreed(self) -> bool:
        """Whether the ranks have planned together before, so that the next save needs no exchange in the call."""
        return bool(self._agreed)

    @property
    def planning(self) -> Any:
        return self._group(0)

    def exchange(self) -> Exchange:
        """For the end of one upload; to be dropped with it."""
        return Exchange(self._group(1), self.rank, self.world_size)

    def _group(self, which: int) -> Any:
        if self._groups is None:
            return None
        return c10d._resolve_process_group(self._groups[which])  # type: ignore[arg-type]

    def set_timeout(self, timeout: timedelta) -> None:
        for which in (0, 1) if self._groups is not None else ():
            _set_timeout(timeout, self._group(which))

    def agree(self, attempt: str, generation: int) -> None:
        """Notes what the ranks have agreed on in a common planning."""
        with self._lock:
            self._agreed = attempt
            self._generation = max(self._generation, generation)
            self._calls.clear()
            self._begun.clear()

    def next(self, path: str, step: int) -> Call:
        """A save without a common planning.

        Its attempt follows from the path, the step, and from how often it was saved there: a call that a rank leaves out
        changes nothing for other paths and steps.
        """
        with self._lock:
            self._generation += 1
            number, less = self._calls.pop((path, step), (0, 0))
            is_first = not number
            while True:
                number += 1
                attempt = self._digest(path) + self._digest(f"{step} {number + less} {path}")
                # An earlier save of this name that is not known any more has left its manifest.
                if not (is_first and self._has_dropped and self._has_manifest(path, attempt)):
                    break
            self._calls[path, step] = number, less
            before = list(itertools.islice(reversed(self._begun), _CALLS_TOLD_MAX))
            self._begun[attempt] = None
            for of in (self._calls, self._begun):
                while len(of) > _CALLS_MAX:
                    of.popitem(last=False)
                    self._has_dropped = True
            return Call(path, step, self._agreed, number, attempt, self._generation, before)

    def _has_manifest(self, path: str, attempt: str) -> bool:
        return os.path.lexists(os.path.join(path, manifest(self.rank, self.world_size, attempt)))

    def standing(self, call: Call | None) -> Standing:
        """What this rank tells the others of itself in the exchange of a save."""
        with self._lock:
            count = 0
            if call is not None and call.agreed == self._agreed:
                count = call.number + self._calls.get((call.path, call.step), (0, 0))[1]
        return Standing(self.cache.held(), count, call.before if call is not None else [])

    def count_on(self, call: Call, count: int) -> None:
        """Has the calls after one count on from another count, which is not lower than its own.

        The other ranks do the same. Saves that are in flight keep the attempts that they were begun with.
        """
        with self._lock:
            key = call.path, call.step
            if call.agreed == self._agreed and key in self._calls:
                self._calls[key] = self._calls[key][0], count - call.number

    def younger(self, path: str) -> Container[str]:
        """Attempts that other ranks may have begun, and this one has not: ranks may have left out calls."""
        return _Younger(self, self._digest(path))

    def has_begun(self, attempt: str) -> bool:
        with self._lock:
            return attempt in self._begun

    def _digest(self, text: str) -> str:
        """Half of an attempt's id."""
        return hashlib.sha256(f"{self._agreed} {text}".encode(errors="surrogateescape")).hexdigest()[:16]

    def joined(self, upload: Upload) -> None:
        """Puts an upload at the end of the line, if it is not in it."""
        with self._lock:
            if upload not in self._uploads:
                self._uploads.append(upload)

    def before(self, upload: Upload) -> Upload | None:
        with self._lock:
            at = self._uploads.index(upload)
            return self._uploads[at - 1] if at else None

    def left(self, upload: Upload) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._uploads.remove(upload)


class _Younger:
    """See `Line.younger`."""

    def __init__(self, line: Line, begin: str) -> None:
        self._line = line
        self._begin = begin

    def __contains__(self, attempt: Any) -> bool:
        return attempt.startswith(self._begin) and not self._line.has_begun(attempt)


class _Lines(PerProcess):
    """By the ranks of a process group; () without one. In a forked child groups are the parent's."""

    def clear(self) -> None:
        self.of: dict[tuple[int, ...], Line] = {}
        self.groups_made = 0


_lines = _Lines()


def line_of(group: Any, no_dist: bool, time_ranks_max: float | None) -> Line:
    """The line of the saves over a group's ranks. The first call makes its groups, on all ranks.

    Args:
        group: None for all ranks.
        no_dist: without any other rank.
        time_ranks_max: seconds that an exchange waits for a rank; None: as the job's own exchanges.
    """
    if no_dist:
        with _lines.lock:
            return _lines.of.setdefault((), Line(None, 0, None, 1))
    world = dist.group.WORLD
    group = group or world
    ranks, timeout = tuple(dist.get_process_group_ranks(group)), _timeout_of(group, time_ranks_max)
    with _lines.lock:
        for stale in [r for r, line in _lines.of.items() if line.is_stale]:
            del _lines.of[stale]
        if ranks not in _lines.of:
            groups = None
            if len(ranks) > 1:
                groups = tuple(_new_group(ranks, timeout).group_name for _ in range(2))
            _lines.of[ranks] = Line(world, dist.get_rank(group), groups, len(ranks))
        line = _lines.of[ranks]
    line.set_timeout(timeout)  # one that was made for another may wait otherwise
    return line


_names = getattr(c10d, "_hash_ranks_to_str", None)
_COUNTS_GROUPS_MADE = "group_count" in getattr(getattr(_names, "__code__", None), "co_names", ())
_OWN_COUNTS = 1 << 40  # more groups than anybody makes
# Gloo tries to connect to a rank that has ended or hangs five times, each for the time-out of the group. All ranks have
# called by then.
_TIME_CONNECTING_MAX = timedelta(seconds=30)


def _new_group(ranks: tuple[int, ...], timeout: timedelta) -> Any:
    """A group that its ranks alone make, or all; its time-out is yet to be set.

    PyTorch names a group that its ranks alone make by a count, and ranks that find another name wait for
    each other for ever. PyTorch 2.13 counts the groups that a rank is in: a rank in fewer groups than another
    one makes some of its own. Newer ones count the groups that a rank has made, alone or with others, also for
    the names of groups that all ranks make: this one has a count of its own, and leaves PyTorch's as it was.
    """
    rank = dist.get_rank()
    count = _lines.groups_made if _COUNTS_GROUPS_MADE else len(c10d._world.pg_names)
    most = _most_of(ranks, count, timeout)
    connecting = min(timeout, _TIME_CONNECTING_MAX)
    if not _COUNTS_GROUPS_MADE:
        if len(ranks) == dist.get_world_size():
            return dist.new_group(list(ranks), connecting, "gloo")
        for _ in range(most - count):
            dist.new_group([rank], connecting, "gloo", use_local_synchronization=True)
        return dist.new_group(list(ranks), connecting, "gloo", use_local_synchronization=True)
    _lines.groups_made = most + 1
    of_all = c10d._world.group_count
    c10d._world.group_count = _OWN_COUNTS + most
    try:
        return dist.new_group(list(ranks), connecting, "gloo", use_local_synchronization=True)
    finally:
        c10d._world.group_count = of_all


def _most_of(ranks: tuple[int, ...], count: int, timeout: timedelta) -> int:
    """The most that any of the ranks counts. Returns once all of them have called, or raises after the time-out."""
    rank, store, key = dist.get_rank(), c10d._get_default_store(), f"holdfast/groups of {ranks}"

    def take(name: str) -> int:
        store.wait([name], timeout)
        value = int(store.get(name))
        store.delete_key(name)  # the store may outlive the process group
        return value

    store.set(f"{key}/{rank}", str(count))
    if rank == ranks[0]:
        most = max(take(f"{key}/{r}") for r in ranks)
        for r in ranks:
            store.set(f"{key}/most {r}", str(most))
    return take(f"{key}/most {rank}")
