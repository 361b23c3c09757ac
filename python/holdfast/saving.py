"""`save_async` and `save`: saving a state."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast import _native, _ranks, _runtime, directories, events
from holdfast._durable import make_directory
from holdfast.capture import capture
from holdfast.errors import Error
from holdfast.handle import Save


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
    late: Iterable[Any] | bool = (),
    objects: str = "pickle",
    files: Mapping[str, Any] | None = None,
    per_rank: Sequence[str] | None = None,
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
            the ``pathlib.Path`` of a file to copy. With several ranks, those of rank 0.
        objects: ``"pickle"`` what is neither tensor nor plain value, or ``"refuse"`` it.
        per_rank: with several ranks, patterns of paths (of `fnmatch`, in lower case) whose tensors
            each rank saves for itself; all others are taken to be the same everywhere and saved by
            rank 0. Default: what a word of its path, ``rng``, ``sampler``, ``loader`` or
            ``generator``, calls random state or a loader's; floats of a ``sampler`` or
            ``generator`` are weights. DTensors are always each rank's own, but for replicas over all
            ranks.
        rank, world_size: default those of torch.distributed.
        attempt: agreed by all ranks; default derived by each alone.
        runtime: options and staging memory, for `Checkpointer`; default those of `configure`.

    Raises:
        Error: ALREADY_EXISTS, INVALID_ARGUMENT (naming the entry), RESOURCE_EXHAUSTED, ...
    """
    called_ns = time.monotonic_ns()
    own_rank, own_world = _ranks.rank_and_world()
    rank = own_rank if rank is None else rank
    world_size = own_world if world_size is None else world_size
    runtime = runtime or _runtime.default
    directory, name = _split(path)
    # First of all that may fail on one rank alone: every rank has to count every save.
    attempt = attempt or _ranks.attempt_of(os.path.join(directory, name), step, world_size)
    liveness = runtime.options.get("time_liveness_max")
    make_directory(directory)
    with _ranks.Announcement(directory, name, attempt, rank, world_size, liveness) as announced:
        captured = capture(
            state, late=late, objects=objects, per_rank=per_rank, rank=rank,
            world_size=world_size, attempt=attempt, files=files or {},
        )
        door = runtime.door(
            directory, captured.plan.total_bytes, when_full=when_full, keep_last=keep_last,
            keep_every=keep_every, rank=rank, world_size=world_size,
        )
        extra = {
            "kind": "state",
            "called_ns": called_ns,
            "rank": rank,
            "world_size": world_size,
            "objects": captured.objects,
            "contiguous_copies": captured.contiguous_copies,
        }

        def start() -> _native.SaveHandle:
            announced.begun = True
            return door.save(name, captured.plan, step, replace, attempt, False, bool(captured.watch))

        begun = Save(start, os.path.join(directory, name), step, extra, captured.keep, door,
                     runtime=runtime, ordered=captured.waiting, watch=captured.watch)
        captured.release()
        return begun


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
