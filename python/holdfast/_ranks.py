"""The rank of this process, and its announcement to the other ranks of a save."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast import _native
from holdfast.errors import Error, reason_of


def _has_joined() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def rank_and_world() -> tuple[int, int]:
    """From torch.distributed where it is initialized, otherwise one of one."""
    import torch.distributed as dist

    if _has_joined():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def rank_of_process() -> int:
    """The mark of this process in its job: its rank, also before torch.distributed is initialized, from the launcher."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and not _has_joined() else rank_and_world()[0]


def is_another_of_launcher() -> bool:
    """Whether the launcher has made this process another than rank 0, and torch.distributed, which knows, is not initialized."""
    return not _has_joined() and rank_of_process() > 0


def check_alone(operation: str, instead: str) -> None:
    """Refuses a save by one of several processes that have not joined: all would write one path.

    Args:
        operation: with the object, for the message.
        instead: what to pass for a save of this process alone.

    Raises:
        Error: FAILED_PRECONDITION.
    """
    count = os.environ.get("WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 1 and not _has_joined():
        raise Error(
            "FAILED_PRECONDITION",
            f"{operation}: WORLD_SIZE is {count} in the environment, and torch.distributed is not initialized: "
            f"call init_process_group before the first save, or pass {instead} to save this process's state alone",
        )


class Announcement:
    """From the call on the other ranks see that this one has begun the save.

    What fails on this rank alone, before the save has begun, ends theirs with its reason.
    """

    def __init__(self, directory: str, name: str, attempt: str, rank: int, world_size: int,
                 time_liveness_max: float | None) -> None:
        self.begun = False  # from then on the save says itself how it ends
        self._native: _native.RankAnnouncement | None = None
        if world_size > 1:
            self._native = _native.announce_save(
                directory, name, attempt, rank, world_size, time_liveness_max
            )

    def check(self, ranks: Sequence[int]) -> None:
        """Looks for signs of life of other ranks that have not begun their part either.

        Raises:
            Error: DEADLINE_EXCEEDED naming the ranks that have given none for `time_liveness_max`,
                ABORTED with the reason of a rank that has failed.
        """
        if self._native is not None:
            self._native.check_ranks(list(ranks))

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        announcement, self._native = self._native, None
        if announcement is not None and error is not None and not self.begun:
            announcement.abandon(reason_of(error))
