"""What the ranks of a DCP save or load must agree on: one of them decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from holdfast.errors import Error


def _ranks(process_group: Any) -> _DistWrapper:
    return _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), 0)


def is_coordinator(process_group: Any) -> bool:
    """Whether this rank is the first of the group."""
    return _ranks(process_group).is_coordinator


def check_member(operation: str, process_group: Any) -> None:
    """Refuses a call of a process outside of the group, which `new_group` gives no group.

    Args:
        operation: with the object, for the message.
        process_group: None for all ranks.

    Raises:
        Error: FAILED_PRECONDITION.
    """
    if process_group is not None and dist.get_rank(process_group) < 0:
        raise Error(
            "FAILED_PRECONDITION",
            f"{operation}: this process is not in process_group; only the ranks of the group call it",
        )


def agree_on(find: Callable[[], str], process_group: Any) -> str:
    """What `find` returns on the coordinator. All ranks of the group call it.

    Raises:
        Error: the coordinator's, on all ranks. What else it raises there is ABORTED on the others.
    """
    ranks = _ranks(process_group)
    found: Any = None
    own: Exception | None = None
    if ranks.is_coordinator:
        try:
            found = find()
        except Exception as error:
            own = error
            found = error if isinstance(error, Error) else Error("ABORTED", f"the first rank failed: {error!r:.500}")
    found = ranks.broadcast_object(found)
    if own is not None:
        raise own
    if isinstance(found, Error):
        raise found
    return found
