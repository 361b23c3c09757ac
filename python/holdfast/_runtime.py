"""The staging memory of this process, and a front door to it for every directory."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast import _native, events, snapshots
from holdfast.commands import program
from holdfast.errors import Error, TimeoutError

# What launchers say of the number of processes on a node.
_LOCAL_WORLD = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_DOORS_MAX = 8

_lock = threading.RLock()
_options: dict[str, Any] = {}
_core: _native.Checkpointer | None = None
_core_bytes = 0
_doors: OrderedDict[tuple[Any, ...], _native.Checkpointer] = OrderedDict()

# What a save or its directory says is no option of the process.
_OPTIONS = frozenset(_native.option_names()) - {
    "directory",
    "when_full",
    "keep_last",
    "keep_every",
    "rank",
    "world_size",
}


def configure(**options: Any) -> None:
    """Sets how this process saves, from the next save on.

    Call it before the first save, or while none is in flight: the staging memory is made anew.

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
        nice, io_priority_class, io_priority_level, cpus, bytes_per_second_max: manners of the
            worker.
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
    unknown = sorted(set(options) - _OPTIONS - {"stale_warning"})
    if unknown:
        raise Error(
            "INVALID_ARGUMENT",
            f"configure: there is no option {', '.join(unknown)}; there is "
            + ", ".join(sorted({*_OPTIONS, "stale_warning"})),
        )
    automatic = ("stale_warning", *(() if options.get("arena_bytes") else ("arena_bytes",)))
    _native.check_options({k: v for k, v in options.items() if k not in automatic})
    if "stale_warning" in options:
        snapshots.warning = bool(options.pop("stale_warning"))
        if not options:
            return
    with _lock:
        if _core is not None and _is_busy(_core):
            raise Error("FAILED_PRECONDITION", "configure: a save is in flight; flush() first")
        _close()
        _options.update(options)


def configured(option: str) -> Any:
    """What `configure` set an option to; None: nothing."""
    return _options.get(option)


def staging() -> dict[str, Any]:
    """Statistics of the staging memory; empty before the first save."""
    with _lock:
        return _core.staging() if _core is not None else {}


def warm_up(nbytes: int = 0) -> None:
    """Takes the staging memory now, so that the first save need not wait for its pages.

    Args:
        nbytes: of the state to come, where `configure` did not set ``arena_bytes``.
    """
    with _lock:
        _make_core(nbytes)


def trim() -> None:
    """Gives the staging memory back to the system; the next save takes it again."""
    with _lock:
        if _core is not None:
            _core.trim()


class Deadline:
    """A time-out that several waits share."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Seconds until then; None: for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


def flush_native(left: Callable[[], float | None]) -> None:
    """Waits for every door's saves and background deletions; then no directory is held open.

    Raises:
        TimeoutError: they go on.
    """
    with _lock:
        doors = list(_doors.values())
    for door in doors:
        try:
            door.flush(left())
        except Error as error:
            if error.code == "DEADLINE_EXCEEDED":
                raise TimeoutError(error.code, f"flush: {error.message}") from None
            # A save's own error is raised by its handle. This one is a removal's: no save failed.
            events.logger.warning("flush: an old checkpoint was kept: %s", error)
    with _lock:
        for key in [k for k, door in _doors.items() if any(door is d for d in doors)]:
            del _doors[key]


def door(directory: str, nbytes: int, **own: Any) -> _native.Checkpointer:
    """A Checkpointer for `directory`, with staging memory for a save of `nbytes`."""
    key = (directory, *sorted(own.items()))
    with _lock:
        _make_core(nbytes)
        found = _doors.get(key)
        if found is None:
            assert _core is not None
            found = _core.create_beside(_with_defaults({**own, "directory": directory}))
            _doors[key] = found
            while len(_doors) > _DOORS_MAX:
                # Dropped, not closed: closing waits for its saves, and handles keep it alive.
                _doors.popitem(last=False)
        _doors.move_to_end(key)
        return found


def _with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {"worker_program": program("holdfast-worker"), **_options, **options}


def fixed_arena_bytes() -> int:
    """The size of staging memory that the user has chosen; 0: none."""
    return int(_options.get("arena_bytes") or os.environ.get("HOLDFAST_ARENA_BYTES") or 0)


def default_arena_bytes(nbytes: int, owned: int) -> int:
    """The size of shared memory for states of `nbytes`, in place of `owned` bytes."""
    said = (os.environ.get(name, "") for name in _LOCAL_WORLD)
    processes = next((int(text) for text in said if text.isdecimal() and int(text) > 0), 1)
    return _native.default_arena_bytes(nbytes, processes, owned)


def _is_busy(core: _native.Checkpointer) -> bool:
    """Whether a save goes on, or memory of one that has ended may still be touched."""
    stats = core.staging()
    return bool(stats["saves_in_flight"] or stats["bytes_held"])


def _make_core(nbytes: int) -> None:
    global _core, _core_bytes
    fixed = fixed_arena_bytes()
    wanted = fixed or default_arena_bytes(nbytes, _core_bytes)
    if _core is not None:
        # A state that has grown gets more, unless saves are in flight: then it streams.
        if fixed or wanted <= _core_bytes or _is_busy(_core):
            return
        _close()
    _core = _native.Checkpointer(_with_defaults({"directory": "/", "arena_bytes": wanted}))
    _core_bytes = wanted


def _close() -> None:
    global _core, _core_bytes
    _doors.clear()
    _core, _core_bytes = None, 0


def _forget() -> None:
    """In a forked child: all of it is the parent's; the native objects know and do nothing."""
    global _lock
    _lock = threading.RLock()
    _close()


os.register_at_fork(after_in_child=_forget)
