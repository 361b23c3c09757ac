"""Failures of ranks: as exceptions of this rank, and as observers take them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import traceback
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException

from holdfast.errors import Error, add_note


def error_of(failure: BaseException, path: str) -> Error:
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
    code = "CANCELLED" if isinstance(failure, (KeyboardInterrupt, SystemExit)) else "UNKNOWN"
    return Error(code, f"save {path}{of}: {failure!r}", number)


def interrupt_of(failure: BaseException, rank: int) -> BaseException | None:
    """The interrupt of this rank that the framework has wrapped, if it is one: Ctrl-C is no failure."""
    if isinstance(failure, CheckpointException) and rank in failure.failures:
        own = failure.failures[rank][0]
        return own if isinstance(own, (KeyboardInterrupt, SystemExit)) else None
    return None


def without_state(failure: BaseException) -> BaseException:
    """A failure with its traceback as text: its frames, and those above them, keep the state."""
    if not isinstance(failure, Error):  # which says itself what failed
        add_note(failure, "".join(traceback.format_tb(failure.__traceback__)))
    one: BaseException | None = failure
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return failure


def copied(failure: BaseException) -> BaseException:
    """A copy of a failure that has a traceback of its own; where its class cannot be copied, its text."""
    try:
        return copy.copy(failure)
    except Exception:
        return _text_of(failure)


def portable(failure: BaseException) -> BaseException:
    """A failure as other ranks can have it: or its text, where its class cannot be pickled, or made anew."""
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:
        return _text_of(failure)
    return failure


def _text_of(failure: BaseException) -> Error:
    try:
        return Error("UNKNOWN", repr(failure))
    except Exception:
        return Error("UNKNOWN", type(failure).__name__)


@contextlib.contextmanager
def told_to_ranks() -> Iterator[None]:
    """Raises exceptions so that the framework can send them to the other ranks, which wait."""
    try:
        yield
    except BaseException as error:
        sent = portable(error)
        if sent is error:
            raise
        raise sent from error


@contextlib.contextmanager
def of_object(name: str) -> Iterator[None]:
    """Raises what the pickling of an object raises as INVALID_ARGUMENT with its name."""
    try:
        yield
    except (Error, MemoryError):
        raise
    except Exception as error:
        raise Error(
            "INVALID_ARGUMENT",
            f"save {name}: it cannot be pickled ({error!r:.300}); leave it out of the state, or give it a state_dict()",
        ) from error


# Gloo ends the connections of a group in which one rank has waited too long for another one.
GROUP_ENDED = (
    "; start the job again, or, without torchrun, call destroy_process_group() and init_process_group() on all ranks, with "
    "another MASTER_PORT: over the old store it may hang; configure(time_ranks_max=...) says how long a save waits for a rank that is late"
)


@contextlib.contextmanager
def of_ranks(path: str, does: str, then: str = GROUP_ENDED) -> Iterator[None]:
    """Raises what a group says as UNAVAILABLE. What fails on a rank comes as its own exception.

    Args:
        path, does: for the message.
        then: what follows, and what to do.
    """
    try:
        yield
    except RuntimeError as error:
        raise Error(
            "UNAVAILABLE", f"save {path}: {does} the other ranks: {error}; a rank has died or hangs{then}"
        ) from error
