"""Planning a save, and finalizing it: the functions that Megatron calls, in both dialects."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast.dcp.placement import new_attempt
from holdfast.megatron.group_saves import saves_of
from holdfast.megatron.writer import FileSystemWriterAsync


class Planned(NamedTuple):
    """What a planning has made.

    Attributes:
        metadata: on the coordinator; None where that of an earlier save holds.
        ranks: those that have planned.
        central, local: this rank's plan as it is written, and before the planner finished it.
        is_repeated: whether the plan is the cached one.
        is_loaded: whether all ranks plan as the checkpoint that was loaded says.
    """

    metadata: Metadata | None
    ranks: _DistWrapper
    central: SavePlan
    local: SavePlan
    is_repeated: bool
    is_loaded: bool


class _Planning:
    """One planning of this rank, by the planner's and the writer's own methods."""

    def __init__(self, state: STATE_DICT_TYPE, writer: Any, group: Any, coordinator: int,
                 planner: SavePlanner | None, local: SavePlan | None) -> None:  # fmt: skip
        self.state = state
        self.writer = writer
        self.planner: Any = planner if planner is not None else DefaultSavePlanner()
        self.ranks = _DistWrapper(group, dist.is_available() and dist.is_initialized(), coordinator)
        self.local = local
        self.metadata: Metadata | None = None
        self.saves = saves_of(group)
        self._has_planned = False
        if isinstance(writer, FileSystemWriterAsync):
            writer.join(group)

    @property
    def can_decentralize(self) -> bool:
        both = (self.planner, self.writer)
        return all(getattr(one, "can_run_decentralized_global_plan", False) for one in both)

    def plan_locally(self) -> SavePlan:
        """This rank's local plan: the cached one, or a new one."""
        self.planner.set_up_planner(self.state, is_coordinator=self.ranks.is_coordinator)
        self.writer.set_up_storage_writer(self.ranks.is_coordinator)
        if self.local is None:
            self.local = self.planner.create_local_plan()
        self.local = self.writer.prepare_local_plan(self.local)
        return self.local

    def agree(self) -> None:
        """Makes the ranks agree on an id for their saves, once for a process group."""
        if not self.saves.id:
            self.saves.id = self.ranks.broadcast_object(self.new_id())

    def new_id(self) -> str | None:
        return new_attempt() if self.ranks.is_coordinator else None

    def repeat(self, central: SavePlan) -> SavePlan:
        """Follows the cached plan: no rank asks another. A failure is this rank's own part's."""
        self.agree()
        try:
            self.plan_locally()
        except Exception as error:
            self.fail(error)
        return central

    def plan_decentralized(self, loaded: list[SavePlan] | None) -> tuple[SavePlan, bool]:
        """Each rank turns its local plan into its global one; the coordinator only makes the metadata.

        Args:
            loaded: the local plans of all ranks, of the checkpoint that was loaded.

        Returns:
            This rank's plan, and whether the metadata of that checkpoint holds.

        Raises:
            CheckpointException: on all ranks, with the failures of all.
        """
        is_loaded = False
        if loaded and len(loaded) == self.ranks.get_world_size():
            answer = self.ranks.all_reduce("plan", lambda: self._is_as(loaded[self.ranks.rank]), self._all)
            is_loaded = self._agreed(answer)
        if not is_loaded:
            self._agreed(self.ranks.all_reduce("plan", self._planned_once, self._combine))
        assert self.local is not None
        try:
            local = self.planner.create_decentralized_global_plan(self.local)
            self.local = self.writer.prepare_decentralized_global_plan(local)
        except Exception as error:
            self.fail(error)
        return self.local, is_loaded

    def fail(self, error: Exception) -> None:
        """Fails this rank's part: the other ranks go on, and learn of it at the end."""
        if not isinstance(self.writer, FileSystemWriterAsync):
            raise error
        self.writer.fail(error)

    def _planned_once(self) -> SavePlan:
        if self._has_planned:
            assert self.local is not None
            return self.local
        self._has_planned = True
        return self.plan_locally()

    def _is_as(self, loaded: SavePlan) -> bool:
        """Whether this rank plans as it did in the checkpoint that was loaded."""
        local = self._planned_once()
        names = {field.name for field in dataclasses.fields(local)} - {"storage_data"}
        return all(getattr(local, name) == getattr(loaded, name, None) for name in names)

    def _all(self, equal: list[bool]) -> tuple[bool, str | None]:
        return all(equal), self.new_id()

    def _combine(self, plans: list[SavePlan]) -> tuple[bool, str | None]:
        _, self.metadata = self.planner.create_global_plan(plans)
        # Where Megatron looks for them when it resumes.
        self.metadata.all_local_plans = plans  # type: ignore[union-attr]
        return False, self.new_id()

    def _agreed(self, answer: tuple[bool, str | None]) -> bool:
        self.saves.id = self.saves.id or answer[1] or ""
        return answer[0]

    def plan_together(self) -> SavePlan:
        """The framework's planning: the coordinator makes the plans of all ranks.

        Raises:
            CheckpointException: on all ranks, with the failures of all.
        """
        self.agree()

        def global_step(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self.metadata = self.planner.create_global_plan(plans)
            return self.writer.prepare_global_plan(plans)

        return self.ranks.reduce_scatter("plan", self.plan_locally, global_step)


def _plan(state: STATE_DICT_TYPE, writer: Any, group: Any, coordinator: int, planner: SavePlanner | None,
          cached: tuple[SavePlan | None, SavePlan | None, bool],
          loaded: list[SavePlan] | None) -> Planned:  # fmt: skip
    """Plans, and starts to write.

    Args:
        state, writer, group, coordinator, planner: as of `save_state_dict_async_plan`.
        cached: this rank's central plan and local plan of an earlier save, and whether they hold.
        loaded: the local plans of all ranks in the checkpoint that was loaded.
    """
    kept, local, holds = cached
    planning = _Planning(state, writer, group, coordinator, planner, local)
    is_loaded = False
    if holds and kept is not None:
        central = planning.repeat(kept)
    elif planning.can_decentralize:
        central, is_loaded = planning.plan_decentralized(loaded)
    else:
        central = planning.plan_together()
    try:
        central = planning.planner.finish_plan(central)
    except Exception as error:
        planning.fail(error)
    writer.prepare_write_data(central, planning.planner)
    assert planning.local is not None
    return Planned(planning.metadata, planning.ranks, central, planning.local, central == kept, is_loaded)


_NOT_GIVEN: Any = object()


def plan_mcore(
    state_dict: STATE_DICT_TYPE,
    storage_writer: Any,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: tuple[SavePlan | None, SavePlan | None, bool] | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
    enable_cache: bool = _NOT_GIVEN,
    metadata_cache: Any = None,
) -> tuple[Any, ...]:
    """``save_state_dict_async_plan`` as Megatron-Core has it: all ranks of a group call it.

    Args:
        state_dict: what is saved.
        storage_writer: that of the same dialect.
        process_group: the ranks that save; default all.
        coordinator_rank: of the rank that makes the metadata.
        planner: default DCP's.
        cached_ckpt_structure: what the call before has returned: central and local plan, and whether
            they hold.
        loaded_all_plans: ``all_local_plans`` of the metadata that was loaded.
        enable_cache, metadata_cache: as of `plan_nvrx`, whose answer is then given. Megatron's formats
            ``torch_dcp`` and ``fsdp_dtensor`` ask for it in both dialects.

    Returns:
        The arguments of `finalize`, the two plans, whether they hold in the next call, and whether the
        metadata that was loaded does.

    Raises:
        CheckpointException: planning failed on some rank. A failure to capture or to write is that
            of the request, on all ranks.
    """
    if enable_cache is not _NOT_GIVEN:
        return plan_nvrx(state_dict, storage_writer, process_group, coordinator_rank, planner,
                         enable_cache, metadata_cache)  # fmt: skip
    cached = cached_ckpt_structure or (None, None, False)
    done = _plan(state_dict, storage_writer, process_group, coordinator_rank, planner, cached, loaded_all_plans)
    ended = (storage_writer, done.metadata, done.ranks)
    return ended, done.central, done.local, done.is_repeated, done.is_loaded


def plan_nvrx(
    state_dict: STATE_DICT_TYPE,
    storage_writer: Any,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: Any = None,
) -> tuple[Any, Metadata | None, _DistWrapper]:
    """``save_state_dict_async_plan`` as nvidia-resiliency-ext has it.

    Args:
        state_dict, storage_writer, process_group, coordinator_rank, planner: as of `plan_mcore`.
        enable_cache, metadata_cache: a `CheckpointMetadataCache` is asked for plans, and keeps them.
            Without one every call plans: nothing says whose plans a common cache would have.

    Returns:
        The arguments of `finalize`.

    Raises:
        CheckpointException: as of `plan_mcore`.
    """
    cache = metadata_cache if enable_cache else None
    *cached, loaded = cache.get_cache_metadata() if cache is not None else (None, None, False, None)
    done = _plan(state_dict, storage_writer, process_group, coordinator_rank, planner, tuple(cached), loaded)
    ended = (storage_writer, done.metadata, done.ranks)
    if cache is None:
        return ended
    cache.set_cache_metadata(done.central, done.local, done.is_loaded)
    writer, metadata, ranks = cache.prepare_save_state_dict_ret(done.ranks.rank, coordinator_rank, ended)
    return writer, metadata, ranks


class CheckpointMetadataCache:
    """The plans and the metadata of earlier saves of one structure; on the coordinator also those of all ranks.

    Attributes:
        cached_central_plan, cached_local_plan: of the save before.
        cached_global_metadata: of an earlier save, or of the checkpoint that was loaded.
        validated_cache_reuse: whether two saves in a row had one plan.
        validated_loaded_metadata_reuse: whether all ranks plan as the checkpoint that was loaded says.
        loaded_all_plans: that checkpoint's.
    """

    def __init__(self) -> None:
        self.cached_central_plan: SavePlan | None = None
        self.cached_local_plan: SavePlan | None = None
        self.cached_global_metadata: Metadata | None = None
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self.loaded_all_plans: list[SavePlan] | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Takes the metadata of the checkpoint that was loaded."""
        self.cached_global_metadata = cached_global_metadata
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def set_cache_metadata(self, central_plan: SavePlan, local_plan: SavePlan, global_md_verify_reuse: bool) -> None:
        """Takes the plans of a save."""
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        self.validated_cache_reuse = central_plan == self.cached_central_plan
        self.cached_central_plan, self.cached_local_plan = central_plan, local_plan

    def prepare_save_state_dict_ret(self, rank: int, coordinator: int, save_state_dict_ret: Any) -> Any:
        """Puts the metadata that holds in the place of what the planning has not made."""
        writer, metadata, ranks = save_state_dict_ret
        kept = self.cached_global_metadata
        if self.loaded_all_plans and kept is not None and self.validated_loaded_metadata_reuse:
            metadata = kept if rank == coordinator else metadata
        elif self.validated_cache_reuse and metadata is not None:
            self.cached_global_metadata = metadata
        elif self.validated_cache_reuse and rank == coordinator:
            metadata = kept
        return writer, metadata, ranks

    def get_cache_metadata(self) -> tuple[Any, ...]:
        """What the next planning is given."""
        return (self.cached_central_plan, self.cached_local_plan, self.validated_cache_reuse, self.loaded_all_plans)

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Whether the cached plan holds, and whether the metadata that was loaded does."""
        return self.validated_cache_reuse, self.validated_loaded_metadata_reuse


def finalize(storage_writer: Any, global_metadata: Metadata | None, dist_wrapper: _DistWrapper) -> None:
    """``save_state_dict_async_finalize``: commits a checkpoint that all ranks have written.

    Args:
        storage_writer, global_metadata, dist_wrapper: what the planning has returned.

    Raises:
        CheckpointException: on all ranks, with the failures of all. Each has removed its files.
    """

    def own() -> Any:
        results = storage_writer.retrieve_write_results()
        if isinstance(results, tuple):  # as the framework wraps an exception
            raise results[0]
        return results

    def commit(results: list[Any]) -> None:
        if global_metadata is None:
            raise RuntimeError("the coordinator has no metadata: its cache has lost what the ranks rely on")
        storage_writer.finish(global_metadata, results)

    try:
        dist_wrapper.all_reduce("write", own, commit)
    except CheckpointException:  # of any other exception only the coordinator knows whether there is a checkpoint
        if isinstance(storage_writer, FileSystemWriterAsync):
            storage_writer.cancel()
        raise
