"""How saves are made: options, the staging memory, and a front door to it for every directory."""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast import _arguments, _log, _native, _ranks, events, snapshots
from holdfast._completion import waitable
from holdfast._process import PerProcess
from holdfast._programs import program
from holdfast.errors import Error, TimeoutError, of_operation

# What launchers say of the number of processes on a node.
_LOCAL_WORLD = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_DOORS_MAX = 8

# What a save or its directory says is no option of a runtime.
OPTIONS = frozenset(_native.option_names()) - {
    "directory",
    "when_full",
    "keep_last",
    "keep_every",
    "rank",
    "world_size",
}
# Those that messages name: a hook of tests is none.
TOLD = OPTIONS - {"on_sealed"}
# Options of the staging memory and its workers: the same for all that share the memory.
_OF_MEMORY = OPTIONS & frozenset(
    """arena_bytes control_bytes_max threads idle_trim pages launcher worker_program fused_copy
    second_look on_sealed time_memory_max time_stalled_max""".split()
)
# What options are that are whole numbers, or times. The runtime has the ranges.
_WHOLE = {
    **dict.fromkeys("threads nice queue_depth pwrite_threads".split(), "a whole number"),
    **dict.fromkeys("arena_bytes control_bytes_max bytes_per_second_max".split(), "a whole number of bytes"),
    "io_priority_class": "0 (none), 1 (real time), 2 (best effort) or 3 (idle)",
    "io_priority_level": "a whole number from 0 (first) to 7",
}
_SECONDS = frozenset(name for name in OPTIONS if name.startswith("time_")) | {"idle_trim"}


def _taken(name: str, value: Any, operation: str) -> Any:
    """The value of an option as the runtime takes it: also 2e8 is a whole number."""
    if name in _WHOLE:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _arguments.wrong(operation, name, value, _WHOLE[name])
    elif name in _SECONDS and value is not None and not _arguments.is_number(value):
        raise _arguments.wrong(operation, name, value, "a number of seconds")
    return value


def _check(options: dict[str, Any], operation: str) -> dict[str, Any]:
    """The options as the runtime takes them."""
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        told = TOLD | ({"stale_warning"} if operation == "configure" else set())
        raise Error("INVALID_ARGUMENT", f"{operation}: {_arguments.unknown(unknown, told)}")
    automatic = () if options.get("arena_bytes") else ("arena_bytes",)
    given = {k: _taken(k, v, operation) for k, v in options.items() if k not in automatic}
    with of_operation(operation):
        _native.check_options(given)
    return {**options, **given}


def _with_worker(options: dict[str, Any]) -> dict[str, Any]:
    return {"worker_program": program("holdfast-worker"), **options}


def fixed_arena_bytes(options: dict[str, Any]) -> int:
    """The size of staging memory that the user has chosen; 0: none.

    Raises:
        Error: INVALID_ARGUMENT, the environment says something else.
    """
    if options.get("arena_bytes"):
        return int(options["arena_bytes"])
    text = os.environ.get("HOLDFAST_ARENA_BYTES", "").strip() or "0"
    if not (text.isascii() and text.isdecimal()):
        raise Error("INVALID_ARGUMENT", f"HOLDFAST_ARENA_BYTES={text}: a number of bytes is expected")
    return int(text)


def default_arena_bytes(nbytes: int, owned: int) -> int:
    """The size of shared memory for states of `nbytes`, in place of `owned` bytes."""
    said = (os.environ.get(name, "") for name in _LOCAL_WORLD)
    processes = next((int(text) for text in said if text.isdecimal() and int(text) > 0), 1)
    return _native.default_arena_bytes(nbytes, processes, owned)


def fits_in_page_cache(nbytes: int) -> bool:
    """Whether a load may leave `nbytes` of files in the page cache: as many as saves may stage."""
    return default_arena_bytes(nbytes, 0) >= nbytes


class Deadline:
    """A time-out that several waits share."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds until then; None: for ever."""
        return None if self._end is None else waitable(max(0.0, self._end - time.monotonic()))


class _Memory(PerProcess):
    """The staging memory of one or several runtimes, and the front doors to it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options  # of the runtime that owns the memory
        super().__init__()

    def clear(self) -> None:
        """Lets go of the memory. In a forked child the parent's objects do nothing by themselves."""
        # By runtime, directory, and the options of the save.
        self.doors: OrderedDict[tuple[Any, ...], _native.Checkpointer] = OrderedDict()
        self.core: _native.Checkpointer | None = None
        self.nbytes = 0
        self._holds = 0  # the largest state that the memory was made for and holds whole

    def is_busy(self) -> bool:
        """Whether a save goes on, or memory of one that has ended may still be touched."""
        if self.core is None:
            return False
        stats = self.core.staging()
        return bool(stats["saves_in_flight"] or stats["bytes_held"])

    def take(self, nbytes: int) -> _native.Checkpointer:
        """The memory, for a save of `nbytes`. The lock must be held."""
        if self.core is not None and nbytes <= self._holds:
            return self.core
        fixed = fixed_arena_bytes(self.options)
        wanted = fixed or default_arena_bytes(nbytes, self.nbytes)
        if self.core is not None:
            # A state that has grown gets more, unless saves are in flight: then it streams.
            if fixed or wanted <= self.nbytes or self.is_busy():
                return self.core
            self.clear()
        self.core = _native.Checkpointer(
            _with_worker({**self.options, "arena_bytes": wanted})
        )
        self.nbytes = wanted
        self._holds = 0 if fixed or wanted < nbytes else nbytes
        return self.core


class Runtime:
    """Options of saves, and staging memory: its own, or that of another runtime.

    Args:
        options: fields of ``holdfast::CheckpointerOptions``, by their names.
        beside: the runtime whose staging memory this one shares; default memory of its own.
        operation: what checks the options, for messages.

    Raises:
        Error: INVALID_ARGUMENT for an unknown option, a value that cannot be, or an option of the
            memory that is shared.
    """

    def __init__(self, options: dict[str, Any], beside: Runtime | None = None,
                 operation: str = "configure") -> None:  # fmt: skip
        options = _check(options, operation)
        shared = sorted(_OF_MEMORY & set(options)) if beside is not None else []
        if shared:
            raise Error(
                "INVALID_ARGUMENT",
                f"{operation}: {', '.join(shared)} belongs to the staging memory, which is shared; "
                "set it where the memory is made",
            )
        self.options = options
        self._number = next(_numbers)  # never used again, unlike an id
        self._memory: _Memory = _Memory(options) if beside is None else beside._memory
        _runtimes.add(self)

    def configure(self, options: dict[str, Any]) -> None:
        """Changes options. The staging memory is made anew by the next save.

        Raises:
            Error: INVALID_ARGUMENT, FAILED_PRECONDITION while a save is in flight.
        """
        options = _check(options, "configure")
        with self._memory.lock:
            if self._memory.is_busy():
                raise Error("FAILED_PRECONDITION", "configure: a save is in flight; flush() first")
            self._memory.clear()
            self.options.update(options)

    def door(self, directory: str, name: str, nbytes: int, **own: Any) -> _native.Checkpointer:
        """A native Checkpointer for `directory`, with staging memory for the save of `name`, of `nbytes`.

        Raises:
            Error: of an option, or of the system.
        """
        with of_operation(f"save {os.path.join(directory, name)}"):
            return self._door(directory, nbytes, own)

    def _door(self, directory: str, nbytes: int, own: dict[str, Any]) -> _native.Checkpointer:
        memory = self._memory
        key = (self._number, directory, *sorted(own.items()))
        with memory.lock:
            core = memory.take(nbytes)
            found = memory.doors.get(key)
            if found is None:
                options = {**self.options, **own, "directory": directory}
                found = memory.doors[key] = core.create_beside(_with_worker(options))
                while len(memory.doors) > _DOORS_MAX:
                    # Dropped, not closed: closing waits for its saves, and handles keep it alive.
                    memory.doors.popitem(last=False)
            memory.doors.move_to_end(key)
            return found

    def flush(self, left: Callable[[], float | None]) -> None:
        """Waits for the saves and deletions of the doors; then no directory is held open.

        Raises:
            TimeoutError: they go on.
        """
        memory = self._memory
        with memory.lock:
            doors = {key: door for key, door in memory.doors.items() if key[0] == self._number}
        for door in doors.values():
            try:
                door.flush(left())
            except TimeoutError as error:
                raise TimeoutError(error.code, f"flush: {error.message}") from None
            except Error as error:
                # A save's own error is raised by its handle. This one is of a removal.
                events.logger.warning("flush: an old checkpoint was kept: %s", error)
        with memory.lock:
            for key in [k for k, door in memory.doors.items() if door is doors.get(k)]:
                del memory.doors[key]

    def close(self) -> None:
        """Lets go of the doors, and of the memory where no other runtime shares it."""
        _runtimes.discard(self)
        memory = self._memory
        with memory.lock:
            for key in [k for k in memory.doors if k[0] == self._number]:
                del memory.doors[key]
            if not any(r._memory is memory for r in _runtimes):
                memory.clear()

    def staging(self) -> dict[str, Any]:
        """Statistics of the staging memory; empty before the first save."""
        with self._memory.lock:
            return self._memory.core.staging() if self._memory.core is not None else {}

    def warm_up(self, nbytes: int = 0) -> None:
        """Takes the staging memory for a state of `nbytes`, and registers it with the GPU in use."""
        with self._memory.lock:
            core = self._memory.take(nbytes)
        if "torch" not in sys.modules:
            return
        from holdfast import _devices  # needs it

        for device in _devices.in_use():
            try:
                core.register_device(device)
            except Error as error:  # as in a save: copies are right, and slow
                _log.warn_of(error.message, _ranks.rank_and_world()[0])

    def trim(self) -> None:
        """Gives the staging memory back to the system; the next save takes it again."""
        with self._memory.lock:
            if self._memory.core is not None:
                self._memory.core.trim()


_numbers = itertools.count()
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()
# Of `holdfast.save_async` and of saves through `holdfast.dcp`.
default = Runtime({})


def runtimes() -> list[Runtime]:
    """Those of this process that have not been closed."""
    return list(_runtimes)


def total_staging() -> dict[str, int]:
    """Sizes of the staging memory of all runtimes, added."""
    memories = {id(r._memory): r for r in runtimes()}
    total: dict[str, int] = {}
    for runtime in memories.values():
        for key, value in runtime.staging().items():
            if key.endswith("bytes") or key.startswith("bytes"):
                total[key] = total.get(key, 0) + value
    return total


def configure(**options: Any) -> None:
    """Sets how `holdfast.save_async` and `holdfast.dcp` save, from the next save on.

    Call it before the first save, or while none is in flight: the staging memory is made anew. A
    `holdfast.Checkpointer` has options of its own.

    Args:
        arena_bytes: size of the staging memory, the cap of what saves hold; larger saves stream
            through it. Default: 64 MiB more than the first save, at most this process's share of
            a quarter of the memory that the machine and its control groups have available then;
            made anew for a larger state while no save is in flight. ``LOCAL_WORLD_SIZE`` (or what
            MPI and Slurm set) tells how many processes share the node.
        launcher: ``"spawn"`` (a worker process per save), ``"persistent"`` (one that is kept),
            ``"fork"`` or ``"thread"``.
        engine: ``"auto"``, ``"io_uring-fixed"``, ``"io_uring"`` or ``"pwrite"``.
        read_back: compare what is really on disk before committing.
        second_look: compare host tensors again after they were copied.
        nice, io_priority_class, io_priority_level, cpus, bytes_per_second_max: scheduling and rate
            limit of the worker.
        stale_warning: False: no warning when all tensors of a save are those of the previous one.
            May be set at any time.
        time_liveness_max: seconds without a sign of life after which another rank counts as gone;
            the same on all ranks. Default 30.
        time_ranks_max: seconds that a rank which lives is waited for by those that are done.
        idle_trim: give the memory back after so many seconds without a save.
        **options: further fields of ``holdfast::CheckpointerOptions``, by their names.

    Raises:
        Error: INVALID_ARGUMENT for an unknown option or a value that cannot be, FAILED_PRECONDITION while a save is in flight.
    """
    warns = options.pop("stale_warning", None)
    if options or warns is None:
        default.configure(options)
    if warns is not None:
        snapshots.warning = bool(warns)


def staging() -> dict[str, Any]:
    """Statistics of the staging memory; empty before the first save."""
    return default.staging()


@_arguments.checked
def warm_up(nbytes: int = 0) -> None:
    """Takes the staging memory now, so that the first save need not wait for its pages.

    If the process has begun to use a GPU, the current one's driver pins the memory here, and not in
    the first save's call.

    Args:
        nbytes: of the state to come, where `configure` did not set ``arena_bytes``.

    Raises:
        Error: RESOURCE_EXHAUSTED, ... where there is no such memory. Where the driver does not pin it,
            a warning says so once, and copies from the GPU are slow.
    """
    default.warm_up(nbytes)


def trim() -> None:
    """Gives the staging memory back to the system; the next save takes it again."""
    default.trim()
