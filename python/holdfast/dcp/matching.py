"""What ranks tell each other of one save, and what follows if some of them have not called it.

The ranks' saves meet in pairs, in the order of their calls. A rank that has left out a call would
meet the others' older save with its younger one, now and in every save to come. So the older one
fails, and the younger one goes on to the next exchange, where the others come with theirs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata

from holdfast._dcp_directories import series_of
from holdfast.dcp.parts import Part, Plan
from holdfast.dcp.replicas import Differing
from holdfast.dcp.writer import remove_data
from holdfast.errors import Error


@dataclasses.dataclass
class Standing:
    """Where a rank is, after the exchanges of all its saves before.

    Attributes:
        held: see `plans.Cache.held`.
        count: which of the saves of its path and step this one is, with what other ranks have had more before it.
        before: attempts that the rank has begun last before this one.
    """

    held: frozenset[str]
    count: int
    before: list[str]


@dataclasses.dataclass
class Message:
    """What a rank tells the coordinator when its data is durable.

    Attributes:
        path, step: of the save.
        manifest: name of the rank's.
        part: what its file says of itself.
        plan: that the file follows, where the coordinator may not have it.
        digests: of what other ranks have, too, as the plan says.
        standing: of the rank in this exchange.
        has_step: whether the caller has given the step; else it is of the path's name.
    """

    path: str
    step: int
    manifest: str
    part: Part
    plan: Plan | None
    digests: bytes
    standing: Standing = dataclasses.field(default_factory=lambda: Standing(frozenset(), 0, []))
    has_step: bool = False


@dataclasses.dataclass
class Committed:
    """What the coordinator tells all ranks of a save whose ranks have all come.

    Attributes:
        metadata: of the checkpoint.
        plan: for the saves to come, where the ranks have not followed one.
        differing: what the ranks do not have alike.
        refused: why there is no checkpoint.
    """

    metadata: Metadata
    plan: Plan | None
    differing: Differing
    refused: CheckpointException | None


@dataclasses.dataclass
class Unmatched:
    """The coordinator's answer where not all ranks have come with the same save, or with parts that make no checkpoint.

    Attributes:
        again: ranks whose save is younger; they come to the next exchange with it.
        failure: of the other ranks' saves.
        count: where the ranks have counted the saves of this path and step apart, the highest count: all go on from it.
        forget_plans: whether the plans that the ranks have followed would fail their next saves, too.
    """

    again: frozenset[int]
    failure: CheckpointException
    count: int | None = None
    forget_plans: bool = False


def unmatched(messages: list[Message]) -> Unmatched | None:
    """Compares what all ranks have come with; None if it is one save.

    Args:
        messages: by rank.
    """
    first = messages[0]
    path, others = first.path, [(rank, m) for rank, m in enumerate(messages)]
    for rank, other in others:
        if (other.path, other.step) != (path, first.step):
            why = f"rank {rank} saves {_what(other, first)} in the same call"
            younger = _younger(messages)
            again_used = not younger and max(m.standing.count for m in messages) > 1
            needs_step = again_used and not all(m.has_step for m in messages)
            return Unmatched(younger, _failure(rank, path, why, _NEEDS_STEP if needs_step else ""))
    for rank, other in others:
        if other.part.attempt != first.part.attempt:
            why = f"rank {rank} has called for it another number of times than rank 0"
            return Unmatched(frozenset(), _failure(rank, path, why), max(m.standing.count for m in messages))
    return None


def _younger(messages: list[Message]) -> frozenset[int]:
    """Ranks whose save is younger than another one; none where all would be."""
    one_of = {m.part.attempt: m for m in messages}
    younger = {attempt for attempt, m in one_of.items() if any(_is_younger(m, other) for other in one_of.values())}
    if len(younger) == len(one_of):
        return frozenset()
    return frozenset(rank for rank, m in enumerate(messages) if m.part.attempt in younger)


def _is_younger(one: Message, other: Message) -> bool:
    """By the calls of the rank that has begun both, else by the steps of one series.

    The steps of names that were saved to before say nothing: such names may be used in turn.
    """
    is_after, is_before = other.part.attempt in one.standing.before, one.part.attempt in other.standing.before
    if is_after and is_before:
        # Of a name that is used again one attempt may be another save on each rank. Beside one that was used more than
        # twice, a name that was used once is new each time, as of a series of steps: its attempt is one save.
        return other.standing.count == 1 and one.standing.count > 2
    if is_after or is_before:
        return is_after
    if max(one.standing.count, other.standing.count) > 1:
        return False
    return one.step > other.step and _series(one.path) == _series(other.path)


def _series(path: str) -> tuple[str, str]:
    directory, name = os.path.split(path)
    return directory, series_of(name)


def _what(other: Message, first: Message) -> str:
    return other.path if other.path != first.path else f"step {other.step} there, and rank 0 step {first.step}"


_NEEDS_STEP = "; of names that are used again only steps tell which save is the older one: pass StorageWriter(path, step=...)"


def out_of_order(path: str, why: str, hint: str = "") -> Error:
    """The error of a save whose ranks have met with calls of different saves."""
    return Error(
        "FAILED_PRECONDITION",
        f"save {path}: {why}; all ranks must call async_save for the same checkpoints in the same order{hint}",
    )


def _failure(rank: int, path: str, why: str, hint: str = "") -> CheckpointException:
    return CheckpointException("write", {rank: _wrap_exception(out_of_order(path, why, hint))})


def discard(messages: Iterable[Message]) -> None:
    """Removes the files of saves that have failed, before they learn of it: they may then begin a new one there."""
    for message in messages:
        part = message.part
        remove_data(message.path, part.attempt, part.metadata, [part.file], message.manifest)
