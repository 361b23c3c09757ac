"""`save_async` and `save`: saving a state."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from holdfast import _agreement, _arguments, _hf, _lineage, _native, _ranks, _runtime, directories, events
from holdfast._durable import make_directory_of
from holdfast._process import PerProcess
from holdfast.capture import Part
from holdfast.errors import Error, reason_of
from holdfast.handle import Save


def _split(path: str | os.PathLike[str]) -> tuple[str, str]:
    text = directories.local_path(path, "save")
    full = directories.absolute_path(text, "save")
    directory, name = os.path.split(full)
    if not name:
        raise Error("INVALID_ARGUMENT", f"save {text!r}: a checkpoint's name is expected")
    return directory, name


@events.tells_refusals
@_arguments.checked
def save_async(
    state: Any,
    path: str | os.PathLike[str],
    *,
    step: int = 0,
    replace: bool = False,
    when_full: Literal["wait", "skip", "fail"] = "wait",
    keep_last: int = 0,
    keep_every: int = 0,
    late: Iterable[Any] | bool = (),
    objects: Literal["pickle", "refuse"] = "pickle",
    files: Mapping[str, Any] | None = None,
    replicas: Literal["per_rank", "refuse"] = "per_rank",
    layout: Literal["holdfast", "hf"] = "holdfast",
    shard_bytes_max: int = _hf.SHARD_BYTES_MAX,
    rank: int | None = None,
    world_size: int | None = None,
    attempt: str = "",
    runtime: _runtime.Runtime | None = None,
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
        path: the checkpoint's directory; those above it are made, durably.
        step: recorded, for ``keep_every`` and for a run that resumes.
        replace: exchange an existing checkpoint that holds nothing else; by default it
            is refused.
        when_full: what to do while earlier saves hold the staging memory: ``"wait"``, ``"skip"``
            (the handle's ``skipped`` is true) or ``"fail"`` (RESOURCE_EXHAUSTED).
        keep_last: afterwards remove all but the newest so many of this one's series (``step-{}``).
        keep_every: but keep those whose step is a multiple of this.
        late: optimizers (True: those in the state), or tensors, whose GPU memory is copied behind
            forward and backward: of an optimizer the parameters with ``requires_grad`` that it owns,
            and its moments. The step of every optimizer then waits for the copies, on the GPU. A
            save whose late tensors change before that fails with DATA_LOSS. Changes that autograd
            does not see (``tensor.data``, a replayed CUDA graph) are not found.
        files: further files of the checkpoint by name, committed and proven with it: text, bytes, or
            the ``pathlib.Path`` of a file to copy, of at most 1 GiB. With several ranks, those of
            rank 0. Names that readers take for other files are refused.
        objects: ``"pickle"`` what is neither tensor nor plain value, or ``"refuse"`` it.
        replicas: with several ranks, what becomes of tensors of 1 MiB and more that not all ranks
            hold alike: ``"per_rank"`` writes them for every rank that holds them, ``"refuse"``
            raises INVALID_ARGUMENT. Tensors that all ranks hold alike are written once, and their
            digests compared at every save. All smaller tensors are written by every rank.
        layout: ``"holdfast"``, or ``"hf"`` for a directory that ``from_pretrained`` of the Hugging Face
            libraries loads: ``model.safetensors``, or shards with an index. The state is a model or
            its state dict; ``config.json`` and the like go into `files`.
        shard_bytes_max: with ``"hf"``, the most bytes of tensors in one file.
        rank, world_size: default those of torch.distributed. Others need `attempt`, except
            ``world_size=1``.
        attempt: 32 hex digits that all ranks pass; default agreed through the key-value store of
            torch.distributed. With it, every rank writes all that it holds.
        runtime: options and staging memory, for `Checkpointer`; default those of `configure`.

    Raises:
        Error: ALREADY_EXISTS, INVALID_ARGUMENT (naming the entry), RESOURCE_EXHAUSTED,
            DEADLINE_EXCEEDED (a rank has not called), ABORTED (another rank's call has failed), ...
    """
    called_ns = time.monotonic_ns()
    step = operator.index(step)
    own_rank, own_world = _ranks.rank_and_world()
    if (rank, world_size, attempt) == (None, None, ""):
        _ranks.check_alone(f"save {directories.path_text(path, 'save')}", "rank=0, world_size=1")
    rank = own_rank if rank is None else rank
    world_size = own_world if world_size is None else world_size
    runtime = runtime or _runtime.default
    directory, name = _split(path)
    whole = os.path.join(directory, name)
    liveness = runtime.options.get("time_liveness_max")
    call: _agreement.Call | None = None
    if world_size > 1 and not attempt:
        if (rank, world_size) != (own_rank, own_world):
            raise Error(
                "INVALID_ARGUMENT",
                f"save {os.fspath(path)}: rank {rank} of {world_size} is not this process's in "
                "torch.distributed; pass attempt=, one id on all ranks (32 hex digits)",
            )
        call = _agreement.Call(
            whole, step, rank, world_size, liveness or _native.TIME_LIVENESS_MAX,
            runtime.options.get("time_ranks_max") or _native.TIME_RANKS_MAX, _lineage.resumed_from(whole, step),
        )
        attempt = call.attempt
    attempt = attempt or _native.new_attempt()
    with contextlib.ExitStack() as stack:
        if call is not None:
            stack.callback(call.close)
        try:
            make_directory_of(whole)
            announced = stack.enter_context(
                _ranks.Announcement(directory, name, attempt, rank, world_size, liveness)
            )
            if call is not None:
                call.watch(announced.check)
            part = Part(state, objects=objects, files=files or {}, rank=rank, world_size=world_size,
                        layout=layout, shard_bytes_max=shard_bytes_max)
        except BaseException as error:
            if call is not None:
                call.refuse(reason_of(error))
            raise
        refuse = replicas == "refuse" and world_size > 1
        agreement = _agreement.NONE if call is None else call.agree(part.entries(), part.own, refuse)
        if refuse:
            agreement.check(os.fspath(path), part.entries(), part.own)
        captured = part.plan(late=late, replicated=agreement.replicated, attempt=attempt)
        door = runtime.door(
            directory, name, captured.plan.total_bytes, when_full=when_full, keep_last=keep_last,
            keep_every=keep_every, rank=rank, world_size=world_size,
        )
        extra = {
            "kind": "state",
            "called_ns": called_ns,
            "rank": rank,
            "world_size": world_size,
            "objects": captured.objects,
            "contiguous_copies": captured.contiguous_copies,
            "needs_allow": captured.needs_allow,
            "tensors_replicated": len(agreement.replicated),
            "tensors_per_rank": part.count - len(agreement.replicated),
            "tensors_on_some_ranks": len(agreement.elsewhere),
        }

        def start() -> _native.SaveHandle:
            announced.begun = True
            parent = _lineage.begin(whole, attempt, step)
            return door.save(name, captured.plan, step, replace, attempt, False, bool(captured.watch), parent,
                             saved_after_ns=_lineage.latest_ns(whole))

        def on_failure() -> None:
            _agreement.forget(agreement)
            _lineage.failed(whole, attempt)

        begun = Save(start, whole, step, extra, captured.keep, door, runtime=runtime,
                     ordered=captured.waiting, watch=captured.watch, skips=when_full == "skip",
                     on_failure=on_failure)
        captured.release()
        _say_what_loads(whole, captured.needs_allow, rank)
        return begun


class _Said(PerProcess):
    """What the log has said of classes: once is enough."""

    def clear(self) -> None:
        self.of: set[tuple[str, ...]] = set()


_said = _Said()


def _say_what_loads(path: str, classes: list[str], rank: int) -> None:
    """Warns of values that are saved and that no load makes by default: on rank 0, whose state the others' are mostly like."""
    key = tuple(classes)
    with _said.lock:
        if not classes or key in _said.of:
            return
        _said.of.add(key)
    events.logger.log(
        logging.INFO if rank else logging.WARNING,
        "save %s: it holds what a load makes only if it is allowed to: load(..., allow=%r). Plain values, dicts and lists "
        "need no permission", path, classes,
    )  # fmt: skip


def save(state: Any, path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Saves a state and waits until the checkpoint is durable.

    Args:
        state, path, **options: as of `save_async`.

    Returns:
        The report.

    Raises:
        Error: as `save_async`, and the save's own. UNAVAILABLE where it was skipped.
    """
    return save_async(state, path, **options).wait()
