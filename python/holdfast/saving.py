"""Saving a state asynchronously: `save_async`, the handle that it returns, and `flush`."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fnmatch
import json
import math
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from holdfast import (
    _completion,
    _devices,
    _late,
    _native,
    _ranks,
    _runtime,
    _state,
    directories,
    events,
)
from holdfast.errors import Error, TimeoutError
from holdfast.events import observers, publish  # noqa: F401 (observers: for whoever observes)

STRUCTURE = "holdfast:structure"
OBJECTS = "holdfast:objects"
FORMAT_VERSION = 1


def structure_file(rank: int, world_size: int) -> str:
    return f"state-{rank:05d}-of-{world_size:05d}.json"


def objects_file(rank: int, world_size: int) -> str:
    return f"objects-{rank:05d}-of-{world_size:05d}.pickle"


def model_file(rank: int, world_size: int) -> str:
    return f"model-{rank:05d}-of-{world_size:05d}.safetensors"


class Save:
    """One save under way. Dropping it does not stop the save.

    Attributes:
        path: where the checkpoint will stand.
        step: the training step that it was given.
        staged: a future, done once everything was copied out of the state; CPU tensors always are
            when `save_async` returns. Before that, device tensors must not be changed.
        durable: a future of the report, done once the checkpoint survives power loss. Its exception
            is the save's.
        objects: paths of what was pickled.
        contiguous_copies: paths of tensors that had to be copied to be saved.
    """

    def __init__(self, start: Callable[[], _native.SaveHandle], path: str, step: int,
                 extra: dict[str, Any], keep: list[Any], door: _native.Checkpointer, *,
                 ordered: Iterable[torch.device] = (), publishes: bool = True) -> None:
        # `start` may wait for memory. It is called in the thread that sees the save through: Ctrl-C
        # ends the caller's wait for it, and never gets between a save that began and its handle.
        self.path = path
        self.step = step
        self.staged = _completion.SeenFuture()
        self.durable = _completion.SeenFuture()
        self.objects: list[str] = extra["objects"]
        self.contiguous_copies: list[str] = extra["contiguous_copies"]
        self.extra = extra
        self._native: Any = None  # there once it has begun
        self._start: Callable[[], _native.SaveHandle] | None = start
        self._begun = threading.Event()
        self._refusal: BaseException | None = None
        self._raised = False  # whether the call has raised, so that nobody has this handle
        self._keep: list[Any] | None = keep
        # It must outlive the save. A handle may live on for long, and keeps no staging memory.
        self._door: _native.Checkpointer | None = door
        self._pid = os.getpid()
        self._publishes = publishes  # False: it is a part of what its owner publishes
        self._report: dict[str, Any] | None = None
        self._devices = {s.device for s in keep}
        self._completion = _completion.Completion(self._run, "holdfast-save")
        try:
            self._completion.start()
            self._begun.wait()
            self.hold_back(ordered)
        except BaseException:
            self._raised = True
            self._give_up()
            raise
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            try:
                raise refusal
            finally:
                del refusal  # its traceback has this frame

    def _run(self) -> None:
        """The save's own thread. Whatever is raised here, `_end` ends the futures."""
        report = None
        error: Error | None = None
        try:
            self._begin()
            report = self._watch()
        except Error as failed:
            error = failed
        except BaseException as failed:
            error = Error("INTERNAL", f"wait for {self.path}: {failed!r}")
        finally:
            self._end(report, error)

    def _begin(self) -> None:
        with _lock:
            _in_flight.add(self)
        start, self._start = self._start, None
        assert start is not None
        try:
            self._native = start()
        except BaseException as refusal:
            refusal.__traceback__ = None  # it would keep what `start` was made of
            self._refusal, self._raised = refusal, True
            raise Error("CANCELLED", f"save {self.path}: it did not begin") from None
        finally:
            del start  # and all that it was made of
        if self._publishes:
            events.begin(self)
        if "called_ns" in self.extra:
            self.extra["time_blocked"] = (time.monotonic_ns() - self.extra["called_ns"]) / 1e9
        self._begun.set()
        self._completion.name(f"holdfast-save-{self._native.epoch}")

    def _give_up(self) -> None:
        with contextlib.suppress(Error):
            if self._native is not None:
                self._native.cancel()

    def _watch(self) -> dict[str, Any]:
        if self._raised:
            self._give_up()
        try:
            self._native.wait_staged(None)
            self._keep = None
            _completion.end(self.staged, None, None)
        except BaseException:
            pass  # the save's own error, which follows, says why
        return {**self._native.wait_durable(None), **self.extra}

    def _end(self, report: dict[str, Any] | None, error: Error | None) -> None:
        self._keep = None
        try:
            if self._publishes and self._native is not None:
                publish(self, report, error)
        finally:
            self._report = report
            if report is None and error is None:
                error = Error("INTERNAL", f"save {self.path}: its thread has died")
            _completion.end(self.staged, None, error)
            _completion.end(self.durable, report, error)
            _ended(self, failed=error is not None and not self._raised)
            self._door = None
            self._begun.set()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Error(
                "FAILED_PRECONDITION",
                f"use of the save of {self.path} in a process that did not start it",
            )

    @property
    def report(self) -> dict[str, Any] | None:
        """What became of it (see the documentation of reports); None while it is under way."""
        return self._report

    def progress(self) -> dict[str, Any]:
        """``phase``, ``bytes_total``, ``bytes_sealed`` and ``bytes_written``."""
        self._check_process()
        return self._native.progress()

    def cancel(self) -> None:
        """Asks for the save to be given up and its partial files removed.

        `durable` then fails with CANCELLED, unless the save was already committing.
        """
        self._check_process()
        self._native.cancel()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Blocks until the checkpoint is durable and returns the report.

        Raises:
            TimeoutError: the save goes on.
            Error: the save's own; FAILED_PRECONDITION inside of an observer, where the save has not
                ended.
        """
        self._check_process()
        try:
            return self.durable.result(timeout)
        except builtins.TimeoutError:
            raise TimeoutError("DEADLINE_EXCEEDED", f"wait for {self.path}: not durable yet") from None

    def wait_staged_on(self, stream: Any = None) -> None:
        """Makes a CUDA stream wait, not the CPU, until this save's copies have ended.

        To be put in front of what changes the saved tensors, the optimizer's step: see
        `wait_before_step`. Without CUDA tensors in the state it does nothing.

        Args:
            stream: a ``torch.cuda.Stream``; default the current one of each device.
        """
        self._check_process()
        for device in self._devices if self._native is not None else ():
            _devices.wait_staged_on(self._native, device, stream)

    def hold_back(self, devices: Iterable[torch.device]) -> None:
        """Makes the current stream of some devices wait for the copies, or else this thread.

        A failed save raises nothing here: its futures and `flush` tell of it.
        """
        try:
            for device in devices if self._native is not None else ():
                _devices.wait_staged_on(self._native, device)
        except Error as error:
            events.logger.warning("wait for the copies of %s: %s", self.path, error)
            self.staged.exception()  # should the save go on, its tensors stay as they are

_lock = threading.Lock()
_in_flight: set[Save] = set()
_failed: list[Save] = []


def _ended(save: Any, *, failed: bool) -> None:
    """Takes a save off the list. Of those that failed, what somebody has looked at is forgotten."""
    with _lock:
        _in_flight.discard(save)
        if failed:
            _failed[:] = [s for s in _failed if not s.durable.seen] + [save]


def _clone(stored: _state.Stored) -> None:
    """Puts a copy on the same device, ordered into the current stream, in the tensor's place."""
    owner = stored.keep[0] if isinstance(stored.keep, list) else stored.keep
    storage = owner.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=owner.device).set_(
        storage, stored.address - storage.data_ptr(), (stored.nbytes,), (1,)
    )
    copy = view.clone()
    stored.keep, stored.address = copy, copy.data_ptr()


def _capture_early(stored: list[_state.Stored], late: _late.Late) -> set[torch.device]:
    """Clones what may not be copied late; returns devices where that would be too much."""
    early = [
        s for s in stored
        if s.nbytes and _devices.device_of(s.device) is not None
        and not late.covers(s.address, s.address + s.nbytes)
    ]
    wait = _late.too_much_to_clone((s.device, s.nbytes) for s in early)
    for item in early:
        if item.device not in wait:
            _clone(item)
    return wait


def _pickled(objects: dict[str, Any], policy: str) -> tuple[bytes, dict[str, list[int]]]:
    if objects and policy == "refuse":
        raise Error(
            "INVALID_ARGUMENT",
            "save: " + ", ".join(f"{name} ({_state.class_name(o)})" for name, o in objects.items())
            + ": neither tensors nor plain values, and objects='refuse'",
        )
    if policy not in ("pickle", "refuse"):
        raise Error("INVALID_ARGUMENT", "save: objects is 'pickle' or 'refuse'")
    blob, index = bytearray(), {}
    for name, value in objects.items():
        try:
            data = pickle.dumps(value, protocol=4)
        except Exception as error:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {name}: a {_state.class_name(value)} cannot be pickled ({error}); leave it out "
                "of the state, or give it a state_dict()",
            ) from error
        index[name] = [len(blob), len(data)]
        blob += data
    return bytes(blob), index


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
    text = directories.local_path(path, "save")
    full = directories.absolute_path(text, "save")
    directory, name = os.path.split(full)
    if not name:
        raise Error("INVALID_ARGUMENT", f"save {text!r}: a checkpoint's name is expected")
    return directory, name


@events.tells_refusals
def save_async(
    state: Any,
    path: str | os.PathLike[str],
    *,
    step: int = 0,
    replace: bool = False,
    when_full: str = "wait",
    keep_last: int = 0,
    keep_every: int = 0,
    late: Iterable[Any] = (),
    objects: str = "pickle",
    per_rank: Sequence[str] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    attempt: str = "",
) -> Save:
    """Saves a state asynchronously: ``h = save_async({"model": model, ...}, "run/step-100")``.

    Everything is captured as it is at the call, and may be changed at once: CPU tensors, and what is
    not a tensor, when it returns; GPU tensors in the order of the current stream, which waits for
    their copies if they are too large to be cloned. Only what `late` names is copied behind the
    training.

    The checkpoint is a directory: a safetensors file of the tensors by their paths, a JSON
    description of the state, objects, and a manifest with digests. It appears under `path` when it
    is complete and durable, never before.

    Args:
        state: nested dicts, lists, tuples and dataclasses of tensors, plain values, modules,
            optimizers and whatever has ``state_dict`` and ``load_state_dict``.
        path: the checkpoint's directory; the one above it must exist.
        step: recorded, for ``keep_every`` and for a run that resumes.
        replace: exchange an existing checkpoint that holds nothing else; by default it
            is refused.
        when_full: what to do while earlier saves hold the staging memory: ``"wait"``, ``"skip"``
            (UNAVAILABLE) or ``"fail"`` (RESOURCE_EXHAUSTED).
        keep_last: afterwards remove all but the newest so many of this one's series (``step-{}``).
        keep_every: but keep those whose step is a multiple of this.
        late: optimizers, or tensors, whose GPU memory stays unchanged until ``h.staged``; it is copied
            behind forward and backward. Of an optimizer: the parameters with ``requires_grad`` that
            it owns, and its moments. Call `wait_before_step` for each one, else its next step
            tears the checkpoint without any error.
        objects: ``"pickle"`` what is neither tensor nor plain value, or ``"refuse"`` it.
        per_rank: with several ranks, patterns of paths (of `fnmatch`, in lower case) whose tensors
            each rank saves for itself; all others are taken to be the same everywhere and saved by
            rank 0. Default: what a word of its path, ``rng``, ``sampler``, ``loader`` or
            ``generator``, calls random state or a loader's; floats of a ``sampler`` or
            ``generator`` are weights. DTensors are always each rank's own, but for replicas over all
            ranks.
        rank, world_size: default those of torch.distributed.
        attempt: agreed by all ranks; default derived by each alone.

    Raises:
        Error: ALREADY_EXISTS, INVALID_ARGUMENT (naming the entry), NOT_FOUND (directory),
            UNAVAILABLE, RESOURCE_EXHAUSTED, ...
    """
    called_ns = time.monotonic_ns()
    own_rank, own_world = _ranks.rank_and_world()
    rank = own_rank if rank is None else rank
    world_size = own_world if world_size is None else world_size
    directory, name = _split(path)
    # First of all that may fail on one rank alone: every rank has to count every save.
    attempt = attempt or _ranks.attempt_of(os.path.join(directory, name), step, world_size)
    liveness = _runtime.configured("time_liveness_max")
    with _ranks.Announcement(directory, name, attempt, rank, world_size, liveness) as announced:
        described = _state.describe(state)
        blob, index = _pickled(described.objects, objects)
        own = _own_of_rank(described, per_rank, world_size) if world_size > 1 else set()
        mine = [s for s in described.stored if world_size == 1 or rank == 0 or s.name in own]
        structure = json.dumps(
            {
                "holdfast_state": FORMAT_VERSION,
                "rank": rank,
                "world_size": world_size,
                "per_rank": sorted(own),
                "objects": index,
                "root": described.root,
            },
            separators=(",", ":"),
            allow_nan=False,
        ).encode()

        waiting = _capture_early(mine, _late.Late(late))
        plan = _native.Plan()
        # Host tensors first: whatever is in host memory is staged before the call returns.
        mine.sort(key=lambda s: _devices.device_of(s.device) is not None)
        tensors: list[Any] = [
            (s.name, s.dtype, list(s.shape), s.address, s.nbytes,
             _devices.device_of(s.device), _devices.stream_of(s.device)) for s in mine
        ]
        plan.add_safetensors(model_file(rank, world_size), tensors, [("format", "pt")], attempt)
        buffers = []
        for file, entry, data in (
            (structure_file(rank, world_size), STRUCTURE, structure),
            (objects_file(rank, world_size), OBJECTS, blob),
        ):
            if data:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                buffers.append(buffer)
                plan.add_file(file)
                plan.add_tensor(entry, "U8", [len(data)], buffer.data_ptr(), len(data), None, 0)
        door = _runtime.door(
            directory, plan.total_bytes, when_full=when_full, keep_last=keep_last,
            keep_every=keep_every, rank=rank, world_size=world_size,
        )
        extra = {
            "kind": "state",
            "called_ns": called_ns,
            "rank": rank,
            "world_size": world_size,
            "objects": sorted(described.objects),
            "contiguous_copies": described.contiguous_copies,
        }

        def start() -> _native.SaveHandle:
            announced.begun = True
            return door.save(name, plan, step, replace, attempt, False)

        return Save(start, os.path.join(directory, name), step, extra, [*mine, *buffers], door,
                    ordered=waiting)


def _own_of_rank(described: _state.Description, patterns: Sequence[str] | None,
                 world_size: int) -> set[str]:
    """Names of what each rank saves for itself."""

    def is_own(stored: _state.Stored) -> bool:
        path = _state.join(stored.path)
        if patterns is None:
            return _ranks.is_own(path, stored.dtype)
        return any(fnmatch.fnmatch(path.lower(), p) for p in patterns)

    return _local(described.root, world_size) | {s.name for s in described.stored if is_own(s)}


def _local(root: _state.Node, world_size: int) -> set[str]:
    """Names of what DTensors are stored under, but for those that every rank has a replica of."""
    found: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("kind") == "dtensor":
                # Over a part of the ranks, as in a pipeline, rank 0 may not have it, or one like it.
                if _state.share_of(node) or math.prod(node["mesh"]) < world_size:
                    found.update(n["stored"] for _, n in _state.tensor_nodes(node))
                return
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(root)
    return found


def wait_before_step(optimizer: torch.optim.Optimizer) -> Any:
    """Puts the wait for saves in flight in front of every ``optimizer.step``.

    Required, once, for every optimizer that ``save_async(late=)`` or `holdfast.dcp.Stager` names. On
    a GPU the training stream waits, not the CPU. Returns the hook's handle, to ``remove()`` it.
    """
    reference = weakref.ref(optimizer)

    def hook(*_: Any) -> None:
        if reference() is None:
            return
        with _lock:
            saves = [s for s in _in_flight if not s.staged.done()]
        for save in saves:
            save.hold_back(save._devices)

    return optimizer.register_step_pre_hook(hook)


def flush(timeout: float | None = None) -> None:
    """Waits until no save of this process is in flight, nor a deletion behind one.

    Raises:
        Error: the first of a save that nobody has asked for its outcome yet; FAILED_PRECONDITION
            inside of an observer or a done-callback, where it would wait for itself.
        TimeoutError: saves, or deletions, go on after `timeout` seconds in all.
    """
    _completion.check_may_wait("flush")
    with _lock:
        saves = list(_in_flight)
    waited: list[BaseException] = []
    left = _runtime.Deadline(timeout).left
    for save in saves:
        try:
            save.wait(left())
        except TimeoutError:
            raise
        except Error as error:
            if not save._raised:
                waited.append(error)
        save._completion.join()
    _runtime.flush_native(left)  # a time-out here leaves the failures to the next call
    with _lock:
        unseen = [s.durable.exception() for s in _failed if not s.durable.seen]
        _failed.clear()
    first = next(iter([*unseen, *waited]), None)
    if first is not None:
        raise first


def _at_exit() -> None:
    """The interpreter has waited for the saves' threads; an unseen failure must show.

    A save is still in flight only where Ctrl-C has ended that wait.
    """
    with _lock:
        left = list(_in_flight)
    unseen = [s for s in _failed if not s.durable.seen]
    if not unseen and not left:
        return
    for save in unseen:
        print(f"holdfast: save {save.path} failed: {save.durable.exception()}", file=sys.stderr)
    for save in left:
        print(
            f"holdfast: save {save.path}: the wait for it was interrupted; it may be incomplete, see "
            "holdfast.list_checkpoints and holdfast.recover",
            file=sys.stderr,
        )
    sys.stderr.flush()
    # sys.exit has no effect here, and exit status 0 would say that all went well. Handlers that were
    # registered before this one have yet to run.
    if not _native.fail_at_exit():
        os._exit(1)


def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _in_flight.clear()
    _failed.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_at_exit)
