"""What all ranks must know of rank 0, whose plugin alone saves whole checkpoints."""

from __future__ import annotations

from typing import Any

from holdfast.errors import Error


def error_of_ranks(strategy: Any, error: BaseException | None) -> BaseException | None:
    """The error of this rank, else one that names that of rank 0. All ranks call it."""
    of_rank_0 = strategy.broadcast("" if error is None else str(error) or repr(error))
    return error if error is not None or not of_rank_0 else of(of_rank_0)


def of(rank_0: str) -> Error:
    """The error on other ranks."""
    return Error("ABORTED", f"a save has failed on rank 0: {rank_0}")
