"""``holdfast.dcp.async_save``: plan first, then copy each tensor once, straight to its place.

The framework's own ``async_save`` stages the whole state, replicas included, and plans from the
copy. Here the plan is made first, in the caller's thread, by the framework's own calls; then what
this rank has to write, and nothing else, is captured by the runtime; a background thread waits for
it to be durable and makes the framework's last, finishing exchange between the ranks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast import _completion, _runtime, events, handle
from holdfast.dcp.staging import Stager
from holdfast.dcp.writer import StorageWriter, Written
from holdfast.errors import Error, TimeoutError

logger = logging.getLogger("holdfast.dcp")

_lock = threading.Lock()
# By the ranks of a process group: the world that it belongs to, and the finishing exchanges' group.
# Neither is held: that would keep their threads beyond destroy_process_group(), and such a thread that
# lets go of a tensor while the interpreter finalizes aborts the process.
_groups: dict[tuple[int, ...], tuple[weakref.ref[Any], str]] = {}
# By the name of the finishing group: the youngest upload that goes on.
_last: dict[Any, Upload] = {}


def _error_of(failure: BaseException, path: str) -> Error:
    """A failure as observers take it; of several ranks' failures the first."""
    if isinstance(failure, Error):
        return failure
    of = ""
    if isinstance(failure, CheckpointException) and failure.failures:
        rank = min(failure.failures)
        failure, of = failure.failures[rank][0], f", rank {rank}"
        if isinstance(failure, Error):
            return failure
    number = failure.errno or 0 if isinstance(failure, OSError) else 0
    return Error("UNKNOWN", f"save {path}{of}: {failure!r}", number)


def _interrupt_of(failure: BaseException, rank: int) -> BaseException | None:
    """The interrupt of this rank that the framework has wrapped, if it is one: Ctrl-C is no failure."""
    if isinstance(failure, CheckpointException) and rank in failure.failures:
        own = failure.failures[rank][0]
        return own if isinstance(own, (KeyboardInterrupt, SystemExit)) else None
    return None


class Upload:
    """One save until its ``.metadata`` is durable; what `holdfast.flush` waits for.

    Observers are told of it, and not of this rank's `Save`: that may well be durable without the
    checkpoint being complete. A failure of this rank's own is told at once, to them and by
    `durable`, while the exchange, by which the other ranks learn of it, goes on behind.
    """

    def __init__(self, path: str, step: int, own: Callable[[], None], run: Callable[[], Metadata],
                 after: Upload | None, save: handle.Save | None, extra: dict[str, Any]) -> None:  # fmt: skip
        self.path = path
        self.step = step
        self.extra = extra if save is None else save.extra
        self.durable = _completion.SeenFuture()
        self.staged: Future = save.staged if save is not None else self.durable
        self._save: handle.Save | None = save
        self._own: Callable[[], None] | None = own
        self._run: Callable[[], Metadata] | None = run
        self._after: Upload | None = after
        self.refused = False
        self.runtime: _runtime.Runtime | None = None
        self._exchanged = threading.Event()
        self._completion = _completion.Completion(self._run_to_the_end, "holdfast-dcp-finish")
        events.begin(self)
        handle.begun(self)

    def start(self) -> None:
        self._completion.start()

    def _run_to_the_end(self) -> None:
        """The upload's own thread. Whatever is raised here, its future ends."""
        metadata = None
        failure: BaseException | None = None
        try:
            failure = self._write()
            metadata = self._exchange()
            if failure is None:
                self._publish_report()
        except BaseException as error:
            failure = failure or error
        finally:
            self._end(metadata, failure)

    def _write(self) -> BaseException | None:
        """Waits for this rank's part. Its own failure ends the future before the exchange."""
        own, self._own = self._own, None
        assert own is not None
        try:
            own()
        except BaseException as failure:
            with contextlib.suppress(BaseException):  # the other ranks wait in the exchange
                self._fail(failure)
            return failure
        return None

    def _exchange(self) -> Metadata:
        run, self._run = self._run, None
        assert run is not None
        if self._after is not None:
            # First come, first finished, on every rank: exchanges between ranks must not cross.
            self._after._exchanged.wait()
            self._after = None
        return run()

    def _end(self, metadata: Metadata | None, failure: BaseException | None) -> None:
        self._exchanged.set()
        with _lock:
            for key in [k for k, last in _last.items() if last is self]:
                del _last[key]
        try:
            if failure is not None:
                self._fail(failure)
        finally:
            handle.ended(self, failed=failure is not None)
            _completion.end(self.durable, metadata, failure)

    def _fail(self, failure: BaseException) -> None:
        if not self.durable.done():
            try:
                events.publish(self, None, _error_of(failure, self.path))
            finally:
                _completion.end(self.durable, None, failure)

    def _publish_report(self) -> None:
        assert self._save is not None and self._save.report is not None
        report = dict(self._save.report)
        report["at_complete"] = (time.monotonic_ns() - report["entered_ns"]) / 1e9
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


def _timeout_of(group: Any, configured: float | None) -> timedelta:
    """How long an exchange waits for a rank: as configured, else as the job's own exchanges do."""
    if configured is not None:
        return timedelta(seconds=configured)
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend that does not tell
            return group._get_backend(device).options._timeout
    return dist.default_pg_timeout


def _finishing_group(group: Any, time_ranks_max: float | None) -> Any:
    """A gloo group over the same ranks, on which nothing but finishing exchanges ever goes on.

    They run in the background. On a group that the caller uses as well, in another thread, they
    could meet another rank's exchange half-way, which blocks both for ever.
    """
    world = dist.group.WORLD
    group = group or world
    ranks, timeout = tuple(dist.get_process_group_ranks(group)), _timeout_of(group, time_ranks_max)
    with _lock:
        for stale in [r for r, (w, _) in _groups.items() if w() is not world]:
            del _groups[stale]
        if ranks not in _groups:
            made = dist.new_group(list(ranks), timeout, "gloo", use_local_synchronization=True)
            _groups[ranks] = (weakref.ref(world), made.group_name)
        own = c10d._resolve_process_group(_groups[ranks][1])  # type: ignore[arg-type]
        c10d._set_pg_timeout(timeout, own)  # one that was made for another may wait otherwise
        return own


def _without_state(failure: BaseException) -> BaseException:
    """A failure with its traceback as text: its frames, and those above them, keep the state."""
    if not isinstance(failure, Error):  # which says itself what failed
        failure.add_note("".join(traceback.format_tb(failure.__traceback__)))
    one: BaseException | None = failure
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return failure


def _state_dicts(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    return {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}


def _plan(
    state_dict: STATE_DICT_TYPE,
    writer: StorageWriter,
    planner: SavePlanner,
    ranks: _DistWrapper,
    use_collectives: bool,
) -> tuple[SavePlan, Metadata | None]:
    """The framework's planning, by its own calls: local plans, the global one, and each its own."""
    metadata: Metadata | None = None

    def local_step() -> SavePlan:
        meta = writer.storage_meta()
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            planner.set_up_planner(
                state_dict=state_dict, storage_meta=meta, is_coordinator=ranks.is_coordinator
            )
        else:
            planner.set_up_planner(state_dict, ranks.is_coordinator)  # type: ignore[arg-type]
        writer.set_up_storage_writer(
            ranks.is_coordinator, rank=ranks.rank, use_collectives=use_collectives
        )
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    if use_collectives:
        mine = ranks.reduce_scatter("plan", local_step, global_step)
    else:
        mine = global_step([local_step()])[0]
    return mine, metadata


def _forget_plans(planner: SavePlanner) -> None:
    """Drops what a planner has cached: of a failed planning its coordinator has kept the global plan.

    It would take that for the plan of the next save whose ranks all say "unchanged".
    """
    key = getattr(planner, "_cached_plans_key", None)
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.pop(key, None)


def _answers_with_both(stager: Any) -> bool | None:
    """Whether the framework would answer a stager with both futures; None: who knows."""
    if stager is None or isinstance(stager, (StorageWriter, BlockingAsyncStager)):
        return False
    if isinstance(stager, Stager):
        return True
    if type(stager) is DefaultStager:
        return bool(stager._config.use_async_staging)
    return None


def _why_stock(checkpoint_id: Any, writer: Any, stager: Any) -> str | None:
    if writer is not None and not isinstance(writer, StorageWriter):
        return f"the storage writer is a {type(writer).__name__}"
    if writer is None and checkpoint_id is not None and "://" in os.fspath(checkpoint_id):
        return "the checkpoint id is a URL"
    if _answers_with_both(stager) is None:
        return f"the stager is a {type(stager).__name__}"
    return None


def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: _StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future | AsyncSaveResponse:
    """Saves a state asynchronously, in place of ``torch.distributed.checkpoint.async_save``.

    When it returns, CPU tensors and objects were captured. GPU tensors are copied behind it; the
    current stream waits for the copies, so that they may be changed at once by what it does next.
    With a `Stager` that was told what stays unchanged, only the rest is ordered into the stream.

    All ranks of the group must call it, in the same order.

    Args:
        state_dict: of tensors, DTensors, ShardedTensors and objects; what is Stateful is asked for
            its state dict.
        checkpoint_id: the checkpoint's directory. A URL is handed on to the framework's own
            ``async_save``, with one line in the log.
        storage_writer: a `StorageWriter`, default one for `checkpoint_id`. Any other is handed on.
        planner: default DCP's; plans are cached as it does.
        process_group: the ranks that save; default all. Plans are exchanged on it.
        async_checkpointer_type: accepted and not needed: writing is a process's work either way.
        async_stager: decides the form of the answer. A `Stager`, or DCP's ``DefaultStager`` with
            asynchronous staging: both futures. None, or one that stages in the call: one future.
            Nothing is staged by it. Any other is handed on, with the writer of Holdfast.
        no_dist, use_collectives: as of the framework's.

    Returns:
        A future of the metadata, or an ``AsyncSaveResponse`` of two: ``staging_completion``, after
        which GPU tensors may be changed, and ``upload_completion``.

    Raises:
        CheckpointException: planning failed on some rank. What fails later, fails the future, on
            all ranks, with the failing rank's error: on that rank at once, on the others when
            they have written what is theirs.
    """
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    if storage_writer is None and checkpoint_id is None:
        raise Error("INVALID_ARGUMENT", "async_save: pass checkpoint_id or storage_writer")
    why = _why_stock(checkpoint_id, storage_writer, async_stager)
    if why is not None:
        writer_to_use = storage_writer
        if writer_to_use is None and "://" not in os.fspath(checkpoint_id or ""):
            writer_to_use = StorageWriter(checkpoint_id or "")
        logger.warning("async_save: %s, so the framework's own async_save does it", why)
        return dcp.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer_to_use,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    # A writer of this save's own: the caller's may be given the next save while this one goes on.
    writer = copy.copy(storage_writer) if storage_writer else StorageWriter(checkpoint_id or "")
    assert isinstance(writer, StorageWriter)
    writer.reset(checkpoint_id)
    writer.staged = False
    planner = planner if planner is not None else DefaultSavePlanner()
    state_dict = _state_dicts(state_dict)
    planning = _DistWrapper(process_group, not no_dist, 0)
    runtime = writer.runtime or _runtime.default
    time_ranks_max = runtime.options.get("time_ranks_max")
    own_group = None if no_dist else _finishing_group(process_group, time_ranks_max)
    finishing = _DistWrapper(own_group, not no_dist, 0)
    who = {"kind": "dcp", "rank": planning.get_rank(), "world_size": planning.get_world_size()}

    try:
        mine, metadata = _plan(state_dict, writer, planner, planning, use_collectives)
    except BaseException as error:
        if isinstance(error, CheckpointException):  # on every rank, so that all forget alike
            _forget_plans(planner)
        told = _error_of(error, str(writer.path))
        events.publish_raised(str(writer.path), writer.step, told, **who)
        interrupt = _interrupt_of(error, planning.get_rank())
        if interrupt is not None:
            raise interrupt from error
        raise
    written, failure = None, None
    late = async_stager.late if isinstance(async_stager, Stager) else ()
    try:
        written = writer.begin(planner.finish_plan(mine), planner, late, publishes=False)
    except BaseException as error:
        # The other ranks wait for this one in the finishing exchange: they learn of it there.
        failure = _without_state(error)
    own, run = _finisher(writer, metadata, written, failure, finishing, use_collectives)
    key = finishing.group.group_name if finishing.group is not None else None
    save = written.save if written is not None else None
    with _lock:
        after = _last.get(key)
        upload = Upload(str(writer.path), writer.step, own, run, after, save, who)
        upload.runtime = runtime
        _last[key] = upload
    upload.start()
    if isinstance(failure, (KeyboardInterrupt, SystemExit)):
        upload.durable.seen = True  # nobody has it
        raise failure
    if _answers_with_both(async_stager):
        staged: Future[None] = save.staged if save is not None else Future()
        if save is None:
            staged.set_exception(failure)
        return AsyncSaveResponse(
            staging_completion=staged,
            upload_completion=upload.durable,
        )
    return upload.durable


def _finisher(writer: StorageWriter, metadata: Metadata | None, written: Written | None,
              failure: BaseException | None, ranks: _DistWrapper,
              use_collectives: bool) -> tuple[Callable[[], None], Callable[[], Metadata]]:  # fmt: skip
    """The second half of a save, for the background thread: its own rank's part, and all ranks'."""

    def write_data() -> list[WriteResult]:
        if failure is not None:
            raise failure
        assert written is not None
        return written.wait()

    def own() -> None:
        try:
            write_data()
        except BaseException as error:
            if not use_collectives:
                raise
            raise CheckpointException("write", {ranks.get_rank(): _wrap_exception(error)}) from None

    def finish_checkpoint(results: list[list[WriteResult]]) -> Metadata:
        # A planner that caches its plans caches the metadata object, too.
        own = copy.copy(metadata)
        assert own is not None
        writer.finish(own, results)
        return own

    def run() -> Metadata:
        if use_collectives:
            try:
                return ranks.all_reduce("write", write_data, finish_checkpoint)
            except RuntimeError as error:  # of the exchange: what fails on a rank comes as its own
                raise Error(
                    "UNAVAILABLE",
                    f"save {writer.path}: exchange with the other ranks: {error}; a rank has died or hangs",
                ) from error
        # Every rank must come to the barrier, else those that succeeded wait for ever.
        try:
            return finish_checkpoint([write_data()])
        finally:
            with contextlib.suppress(RuntimeError):
                ranks.barrier()

    return own, run


def _forget() -> None:
    """In a forked child: uploads and groups are the parent's."""
    global _lock
    _lock = threading.Lock()
    _groups.clear()
    _last.clear()


os.register_at_fork(after_in_child=_forget)
