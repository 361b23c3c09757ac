"""``holdfast.dcp.async_save`` and ``save``: each tensor is copied once, straight to its place.

The framework's own ``async_save`` stages the whole state, replicas included, and plans from the copy.
Here the plan comes first: by the framework's own calls in the first save over a set of ranks, and from
then on as it is known from the save before. What this rank has to write, and nothing else, is captured
by the runtime; a background thread waits for it to be durable and exchanges with the other ranks what
each has written.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast import _arguments, _ranks, _runtime, events
from holdfast.dcp import placement, plans
from holdfast.dcp.failures import copied, error_of, interrupt_of, of_ranks, told_to_ranks, without_state
from holdfast.dcp.items import Layout, check_layouts, resolved
from holdfast.dcp.matching import Committed, Message, Unmatched, discard, out_of_order, unmatched
from holdfast.dcp.parts import Part, Plan, assemble, check_kinds, in_order, plan_for_all
from holdfast.dcp.placement import Placement, new_attempt
from holdfast.dcp.replicas import Differing, Digests, check_replicas, compare, settle
from holdfast.dcp.staging import Stager
from holdfast.dcp.stock import answers_with_both, why_stock
from holdfast.dcp.targets import expanded
from holdfast.dcp.uploads import Call, Exchange, Line, Upload, line_of, started
from holdfast.dcp.writer import StorageWriter, Written
from holdfast.errors import Error

logger = logging.getLogger("holdfast.dcp")


def _state_dicts(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    return {key: expanded(value, (key,)) for key, value in state_dict.items()}


@dataclasses.dataclass
class _Begun:
    """What this rank has begun to write.

    Attributes:
        written: the data.
        part: what the file says of itself.
        plan: that the file follows, where the coordinator may not have it, and on the coordinator.
        known: the same for this rank's next saves, if its state can be compared.
        digests: of what other ranks have, too.
    """

    written: Written
    part: Part
    plan: Plan | None
    known: plans.Known | None
    digests: Digests | None


class _Saving:
    """One call of `async_save`, and what its background thread needs of it."""

    def __init__(self, writer: StorageWriter, planner: SavePlanner | None, line: Line,
                 use_collectives: bool, late: Any, ways: str) -> None:  # fmt: skip
        self.called_ns = time.monotonic_ns()
        self.writer = writer
        self.line = line
        self.use_collectives = use_collectives
        self.late = late
        self.replicas = ways
        self.differing = Differing()
        self.exchange: Exchange | None = line.exchange()
        self.begun: _Begun | None = None
        # Whether the plan of an earlier save may be used: a planner or a writer of another class may
        # plan the same structure differently in the next save.
        self.may_follow = (
            type(planner or DefaultSavePlanner()) is DefaultSavePlanner
            and type(writer) is StorageWriter
            and use_collectives
        )
        self.planner: Any = planner or DefaultSavePlanner()
        if self.may_follow:
            self.planner = copy.copy(self.planner)
            self.planner._enable_plan_caching = False
        # A planner of another kind may not have the data of what it has left to other ranks.
        self._compares = isinstance(self.planner, DefaultSavePlanner) and not getattr(
            self.planner, "_enable_plan_caching", False
        )
        if ways == "refuse" and not self._compares and line.world_size > 1:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {writer.path}: replicas='refuse' compares nothing with a planner that caches its plans, or is no "
                f"DefaultSavePlanner ({type(planner).__name__}); leave one of them out",
            )
        self._flags = tuple(sorted((k, v) for k, v in vars(self.planner).items() if isinstance(v, bool)))
        self._lowest_rank = getattr(self.planner, "dedup_save_to_lowest_rank", False)
        # The same on all ranks: it depends on what was called, and how often.
        self.plans_together = not self.may_follow or (line.world_size > 1 and not line.has_agreed)
        self.call: Call | None = None
        if line.world_size > 1 and not self.plans_together:
            self.call = line.next(str(writer.path), writer.step)

    # ---- In the call.

    def look(self, state: STATE_DICT_TYPE) -> plans.Look | None:
        return plans.look(state, self._flags)

    def plan_together(self, state_dict: STATE_DICT_TYPE) -> None:
        """The framework's planning, by its own calls: local plans, and the global one.

        Raises:
            CheckpointException: planning failed on some rank.
        """
        writer, planner = self.writer, self.planner
        ranks = _DistWrapper(self.line.planning, self.line.world_size > 1, 0)
        plan: Plan | None = None
        state: STATE_DICT_TYPE = {}
        local: list[WriteItem] = []

        @told_to_ranks()
        def local_step() -> SavePlan:
            nonlocal local, state
            state = _state_dicts(state_dict)
            self._set_up(state)
            found = writer.prepare_local_plan(planner.create_local_plan())
            local = found.items
            return found

        @told_to_ranks()
        def global_step(local_plans: list[SavePlan]) -> list[tuple[SavePlan, list[MetadataIndex]]]:
            nonlocal plan
            check_kinds([p.items for p in local_plans], str(writer.path))
            made, metadata = planner.create_global_plan(list(local_plans))  # it may change the list
            placed = writer.prepare_global_plan(made)
            # A planner with a cache gives in the place of plans that have not changed empty ones.
            whole = [p if getattr(p, "usable", True) else planner.global_plan[r] for r, p in enumerate(made)]
            plan = Plan.of(placed[0].storage_data.attempt, metadata, local_plans if self._compares else whole, whole)
            shared = [[index for index in row if index in plan.shared] for row in plan.written]
            return list(zip(placed, shared, strict=True))

        if self.use_collectives:
            with of_ranks(str(writer.path), "plan with"):
                mine, shared = ranks.reduce_scatter("plan", local_step, global_step)
            self.line.agree(mine.storage_data.attempt, mine.storage_data.generation)
        else:
            mine, shared = global_step([local_step()])[0]
        self._planned = (state, plan, mine, local, shared)

    def begin_planned(self) -> None:
        """Starts to write what was planned together."""
        state, plan, mine, local, shared = self._planned
        del self._planned
        agreed = mine.storage_data
        if agreed.directory != str(self.writer.path):  # a rank's call failed before it met the others
            raise out_of_order(str(self.writer.path), f"rank 0 saves {agreed.directory} in the same call")
        finished = self.planner.finish_plan(mine)
        place = placement.take(finished.storage_data, str(self.writer.path))
        items, known = finished.items, None
        seen = self.look(state) if self.may_follow else None
        if seen is not None:
            known = plans.known_from(state, seen, self.planner, agreed.attempt, place.rank, local, items, shared)
            self.line.cache.add(known, plan)
        data = [resolved(self.planner, item) for item in items]
        layout = known.layout if known is not None else Layout(items)
        if known is not None and seen is not None:
            known.fix(seen, data)
        digests = self._digests(local, items, data, shared) if self._compares else None
        self._begin(place, agreed.attempt, place.rank, layout, data, plan, known, [plan] if plan else [], digests)

    def begin_known(self, state: STATE_DICT_TYPE) -> bool:
        """Starts to write by a known plan, or, without one, all that this rank has.

        Returns:
            False where there is one rank and no known plan: `plan_together` must be called.
        """
        seen = self.look(state)
        known = self.line.cache.find(seen) if seen is not None else None
        of_all = self.line.cache.plans()  # after that, so that the known plan is there
        if known is None and self.line.world_size == 1:
            return False
        if known is not None:
            self.writer.set_up_storage_writer(self.line.rank == 0, rank=self.line.rank)
            self.writer.make_directory()
            data, addresses = known.data(seen)  # type: ignore[arg-type]
            needed = [of_all[known.plan]] if self.line.rank == 0 else []
            digests = known.digests(seen.nodes, data)  # type: ignore[union-attr]
            self._begin(self._place(), known.plan, known.row, known.layout, data, None, known, needed, digests, addresses)
            return True
        self._set_up(state)
        self.writer.make_directory()
        local = self.planner.create_local_plan()
        alone, metadata = plans.of_one_rank(self.planner, local)
        plan = Plan(new_attempt(), metadata, [[item.index for item in alone.items]], [[]])
        shared = plan.written[0]  # what others have is not known here
        if seen is not None:
            known = plans.known_from(state, seen, self.planner, plan.id, 0, local.items, alone.items, shared)
        data = [resolved(self.planner, item) for item in alone.items]
        digests = self._digests(local.items, alone.items, data, shared)
        needed = [plan, *(of_all.values() if self.line.rank == 0 else ())]
        self._begin(self._place(), plan.id, 0, Layout(alone.items), data, plan, known, needed, digests)
        return True

    def _digests(self, local: list[WriteItem], written: list[WriteItem], data: list[Any],
                 shared: list[MetadataIndex]) -> Digests | None:  # fmt: skip
        """Digests of what other ranks have, too."""
        there = {item.index: d for item, d in zip(written, data, strict=True)}
        items = {item.index: item for item in local}
        compared = in_order(plans.compared_of(local, written, shared))
        if not compared:
            return None
        return Digests([there[i] if i in there else resolved(self.planner, items[i]) for i in compared])

    def _set_up(self, state: STATE_DICT_TYPE) -> None:
        planner, writer, is_coordinator = self.planner, self.writer, self.line.rank == 0
        meta = writer.storage_meta()
        if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
            planner.set_up_planner(state_dict=state, storage_meta=meta, is_coordinator=is_coordinator)
        else:
            planner.set_up_planner(state, is_coordinator)
        check_layouts(getattr(planner, "state_dict", state))
        writer.set_up_storage_writer(
            is_coordinator, rank=self.line.rank, use_collectives=self.use_collectives
        )

    def _place(self) -> Placement:
        path, line = self.writer.path, self.line
        call = self.call
        if call is None:
            return self.writer.in_directory(lambda: placement.choose(path, self.writer.save_id, [0], False)[0])
        self.writer.save_id = call.attempt
        return self.writer.in_directory(
            lambda: placement.follow(path, call.attempt, call.generation, line.rank, line.world_size)
        )

    def _begin(self, place: Placement, plan_id: str, row: int, layout: Layout, data: list[Any],
               plan: Plan | None, known: plans.Known | None, needed: list[Plan],
               digests: Digests | None, addresses: list[int] | None = None) -> None:  # fmt: skip
        part = Part(place.attempt, self.writer.metadata_name(), place.data_file, plan_id, row, layout.digest,
                    self.replicas)
        written = self.writer.begin(
            place, layout, data, self.called_ns, self.late,
            part=part, plans=[p.data for p in needed], digests=digests.tensors if digests is not None else (),
            addresses=addresses, publishes=False,
        )  # fmt: skip
        self.begun = _Begun(written, part, plan, known, digests)

    # ---- In the background.

    def wait_written(self) -> Message:
        """Blocks until this rank's data is durable."""
        begun = self.begun
        assert begun is not None
        writer, manifest = self.writer, begun.written.placement.manifest
        message = Message(str(writer.path), writer.step, manifest, begun.part, begun.plan, b"", has_step=writer.has_step)
        try:
            self.writer.sync_made()
            begun.written.wait()
            if begun.digests is not None:
                message.digests = begun.digests.read()
        except BaseException:
            with contextlib.suppress(BaseException):
                begun.written.wait()
                discard([message])
            raise
        return message

    def finish(self, mine: Message | BaseException) -> Metadata:
        """The last exchange between the ranks: the coordinator commits what all have written.

        Raises:
            CheckpointException: the failures of all ranks.
            Error: UNAVAILABLE, a rank is gone or late.
        """
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        try:
            metadata = self._finish(mine, exchange)
        except BaseException:
            self.writer.take_back()
            raise
        self.writer.leave()
        return metadata

    def _finish(self, mine: Message | BaseException, exchange: Exchange) -> Metadata:
        with of_ranks(str(self.writer.path), "exchange with"):
            if not self.use_collectives:
                return self._finish_alone(mine, exchange)
            committed = self._reduce(mine, exchange)
        if committed.plan is not None and self.begun is not None and self.begun.known is not None:
            following = self.begun.known.following(committed.plan, exchange.rank)
            self.line.cache.add(following, None)
        if committed.refused is not None:
            raise committed.refused
        self.differing = committed.differing
        return committed.metadata

    def _reduce(self, mine: Message | BaseException, exchange: Exchange) -> Committed:
        while True:
            if isinstance(mine, Message):
                mine.standing = self.line.standing(self.call)
            answer = exchange.reduce(mine, self._commit, discard)
            if not isinstance(answer, Unmatched):
                return answer
            if answer.count is not None and self.call is not None:
                self.line.count_on(self.call, answer.count)
            if answer.forget_plans:
                self.line.cache.forget()
            # A save that was planned in the call meets no other one: the planning has crossed, too.
            if exchange.rank not in answer.again or self.plans_together:
                raise answer.failure

    def _finish_alone(self, mine: Message | BaseException, exchange: Exchange) -> Metadata:
        # Every rank must come to the exchange, else those that succeeded wait for ever.
        try:
            if isinstance(mine, BaseException):
                raise mine
            try:
                answer = self._commit([mine])
                if isinstance(answer, Unmatched):
                    raise answer.failure
                return answer.metadata
            except BaseException:
                discard([mine])
                raise
        finally:
            with contextlib.suppress(RuntimeError):
                exchange.reduce(None, lambda _: None)

    def _commit(self, messages: list[Message]) -> Committed | Unmatched:
        path, line = str(self.writer.path), self.line
        apart = unmatched(messages)
        if apart is not None:
            discard(m for rank, m in enumerate(messages) if rank not in apart.again)
            return apart
        parts = [m.part for m in messages]
        of_all = {**line.cache.plans(), **{m.plan.id: m.plan for m in messages if m.plan is not None}}
        try:
            metadata = assemble(parts, of_all, path)
        except Exception as error:
            discard(messages)
            return Unmatched(frozenset(), CheckpointException("write", {0: _wrap_exception(error)}), forget_plans=True)
        refused, differing = None, Differing()
        if len(parts) > 1 and self._compares:
            differing = compare(parts, of_all, [m.digests for m in messages], path)
        try:
            settle(differing, parts, path)
        except Error as error:
            refused = CheckpointException("write", {differing.ranks[0][1]: _wrap_exception(error)})
            discard(messages)
        else:
            files = [part.file for part in parts]
            self.writer.complete(metadata, len(parts), files, line.younger(path))
        return Committed(metadata, self._replanned(messages, of_all), differing, refused)

    def _replanned(self, messages: list[Message], of_all: dict[str, Plan]) -> Plan | None:
        """A plan for the saves to come, where the ranks have not followed one. Plans that no rank holds are dropped."""
        if not self.may_follow:
            return None
        plan, parts = None, [m.part for m in messages]
        if len({part.plan for part in parts}) > 1:
            rows = [(of_all[p.plan], p.row) for p in parts]
            ranks = [(of, row, of.written[row] + of.left_out[row]) for of, row in rows]
            try:
                plan = plan_for_all(parts[0].attempt, ranks, self._lowest_rank)
            except ValueError as error:  # of the framework: the states do not fit together
                logger.warning("save %s: plan the next save: %s", self.writer.path, error)
        self.line.cache.keep(frozenset().union(*(m.standing.held for m in messages)), plan)
        if plan is None:
            return None
        return dataclasses.replace(plan, metadata=Metadata({}), left_out=[list(plan.shared)], unlike=[])


@_arguments.checked
def async_save(
    state_dict: Any,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: _StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    replicas: str = "warn",
) -> Future | AsyncSaveResponse:
    """Saves a state asynchronously, in place of ``torch.distributed.checkpoint.async_save``.

    When it returns, CPU tensors and objects were captured. GPU tensors are copied behind it; the
    current stream waits for the copies, so that they may be changed at once by what it does next.
    With a `Stager` that was told what stays unchanged, only the rest is ordered into the stream.

    All ranks of the group must call it, in the same order.

    Args:
        state_dict: of tensors, DTensors, ShardedTensors, objects, and, at any depth, Statefuls, which give their state dicts.
        checkpoint_id: the checkpoint's directory. A DCP checkpoint there is replaced, as by the framework's
            own (``StorageWriter(path, overwrite=False)`` refuses to); it stays whole until the new one is
            complete. A URL is handed on to the framework's own ``async_save``, with one line in the log.
        storage_writer: a `StorageWriter`, default one for `checkpoint_id`. Any other is handed on.
        planner: default DCP's; plans are cached as it does.
        process_group: the ranks that save; default all. Plans are exchanged on gloo groups of their own.
        async_checkpointer_type: accepted and not needed: writing is a process's work either way.
        async_stager: decides the form of the answer. A `Stager`, or DCP's ``DefaultStager`` with
            asynchronous staging: both futures. None, or one that stages in the call: one future.
            Nothing is staged by it. Any other is handed on, with the writer of Holdfast.
        no_dist, use_collectives: as of the framework's.
        replicas: what becomes of tensors and objects that several ranks have under one name, and not
            alike. DCP's files hold one rank's value: ``"warn"`` says so in the log, once, and in
            every report; with ``"refuse"`` on any rank the save fails on all, INVALID_ARGUMENT.

    Returns:
        A future of the metadata, or an ``AsyncSaveResponse`` of two: ``staging_completion``, after
        which GPU tensors may be changed, and ``upload_completion``. The future of the metadata has the
        save's ``report`` once it has ended well.

    Raises:
        CheckpointException: planning failed on some rank. What fails later, fails the future, on
            all ranks, with the failing rank's error: on that rank at once, on the others when
            they have written what is theirs.
        Error: FAILED_PRECONDITION, several processes by the environment, and no process group.
            INVALID_ARGUMENT, a wrong argument, or ``"refuse"`` for a save that is handed on.
    """
    check_replicas(replicas)
    plans.check_state(state_dict, "async_save")
    if not no_dist:
        _ranks.check_alone("async_save", "no_dist=True")
    no_dist = no_dist or not (dist.is_available() and dist.is_initialized())
    why = why_stock("async_save", checkpoint_id, storage_writer, async_stager)
    if why is not None:
        writer_to_use = storage_writer
        if writer_to_use is None and "://" not in os.fspath(checkpoint_id or ""):
            writer_to_use = StorageWriter(checkpoint_id or "")
        check_replicas(replicas, why)
        logger.warning("async_save: %s, so the framework's own async_save does it", why)
        return dcp.async_save(
            state_dict, checkpoint_id=checkpoint_id, storage_writer=writer_to_use, planner=planner,
            process_group=process_group, async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager, no_dist=no_dist, use_collectives=use_collectives,
        )  # fmt: skip
    # A writer of this save's own: the caller's may be given the next save while this one goes on.
    writer = copy.copy(storage_writer) if storage_writer else StorageWriter(checkpoint_id or "")
    assert isinstance(writer, StorageWriter)
    writer.reset(checkpoint_id)
    writer.staged = False
    runtime = writer.runtime or _runtime.default
    with of_ranks(str(writer.path), "make a group of", then=""):  # the next save tries again
        line = line_of(process_group, no_dist, runtime.options.get("time_ranks_max"))
    late = async_stager.late if isinstance(async_stager, Stager) else ()
    saving = _Saving(writer, planner, line, use_collectives, late, replicas)
    who = {"kind": "dcp", "rank": line.rank, "world_size": line.world_size}

    failure: BaseException | None = None
    raises = False
    if not saving.plans_together:
        try:
            state_dict = _state_dicts(state_dict)
        except BaseException as error:
            failure, raises = error, True
    if failure is None:
        try:
            if saving.plans_together or not saving.begin_known(state_dict):
                saving.plans_together = True
                saving.plan_together(state_dict)
        except BaseException as error:
            failure, raises = error, saving.plans_together
            if raises and (use_collectives or line.world_size == 1):
                _raise_unplanned(error, saving, who)
    if saving.plans_together and failure is None:
        try:
            saving.begin_planned()
        except BaseException as error:
            failure = error
    if raises and line.world_size == 1:
        assert failure is not None
        writer.take_back()
        raise failure
    return _upload(saving, failure, raises, who, answers_with_both(async_stager))


def _raise_unplanned(error: BaseException, saving: _Saving, who: dict[str, Any]) -> None:
    """Ends a call whose planning has failed, on every rank alike."""
    writer, rank = saving.writer, saving.line.rank
    writer.take_back()
    if isinstance(error, CheckpointException):
        plans.drop_cached(saving.planner)
    events.publish_raised(str(writer.path), writer.step, error_of(error, str(writer.path)), **who)
    interrupt = interrupt_of(error, rank)
    if interrupt is not None:
        raise interrupt from error
    raise error


def _upload(saving: _Saving, failure: BaseException | None, raises: bool, who: dict[str, Any],
            answers_with_both: bool | None) -> Future | AsyncSaveResponse:  # fmt: skip
    """Starts what goes on behind. The other ranks learn of a failure in the exchange at its end."""
    raises = raises or isinstance(failure, (KeyboardInterrupt, SystemExit))
    raised = failure
    if failure is not None:
        failure = without_state(copied(failure) if raises else failure)
    saving.planner = None  # it has the state
    save = saving.begun.written.save if saving.begun is not None else None
    own, run = _finisher(saving, failure)
    upload = started(lambda: Upload(str(saving.writer.path), saving.writer.step, own, run, saving.line, save, who,
                                    saving.writer.runtime or _runtime.default))  # fmt: skip
    if raises:
        upload.durable.seen = True  # nobody has it
        assert raised is not None
        raise raised
    if answers_with_both:
        staged: Future[None] = save.staged if save is not None else Future()
        if save is None:
            staged.set_exception(failure)
        return AsyncSaveResponse(staging_completion=staged, upload_completion=upload.durable)
    return upload.durable


def _finisher(saving: _Saving, failure: BaseException | None
              ) -> tuple[Callable[[], None], Callable[[], tuple[Metadata, dict[str, Any]]]]:  # fmt: skip
    """The second half of a save, for the background thread: its own rank's part, and all ranks'."""
    mine: Any = failure

    def own() -> None:
        nonlocal mine
        try:
            if failure is not None:
                saving.writer.release_name()
                raise failure
            mine = saving.wait_written()
        except BaseException as error:
            mine = error
            if not saving.use_collectives:
                raise
            raise CheckpointException("write", {saving.line.rank: _wrap_exception(error)}) from None

    return own, lambda: (saving.finish(mine), saving.differing.report())


@_arguments.checked
def save(
    state_dict: Any,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: _StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    replicas: str = "warn",
) -> Metadata:
    """Saves a state, in place of ``torch.distributed.checkpoint.save``: `async_save` and its end.

    Args:
        state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, use_collectives,
            replicas: as of `async_save`. What that hands on, goes to the framework's own ``save``.

    Returns:
        The metadata of the checkpoint, which is durable on all ranks.

    Raises:
        CheckpointException: with the failures of all ranks.
        Error: as of `async_save`.
    """
    plans.check_state(state_dict, "save")
    why = why_stock("save", checkpoint_id, storage_writer, None)
    if why is not None:
        check_replicas(replicas, why)
        logger.warning("save: %s, so the framework's own save does it", why)
        return dcp.save(
            state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner,
            process_group=process_group, no_dist=no_dist, use_collectives=use_collectives,
        )  # fmt: skip
    future = async_save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner,
        process_group=process_group, no_dist=no_dist, use_collectives=use_collectives, replicas=replicas,
    )  # fmt: skip
    assert isinstance(future, Future)
    return future.result()
