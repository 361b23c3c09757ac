"""Deliberate mistakes for the tests of integrity-fuzz: each breaks a promise of a save through Megatron-Core."""

from __future__ import annotations

import os
from typing import Any

from holdfast.integrity import megatron, queues, states
from holdfast.megatron import writer


def megatron_saves_late() -> None:
    """The request is made with what the training has one step later."""
    real = megatron.state_of

    def late(made: dict[str, Any], *of_rank: Any) -> dict[str, Any]:
        states.mutate(made)
        return real(made, *of_rank)

    megatron.state_of = late


def megatron_forgets_its_file() -> None:
    """A finalized save lacks the file by which Megatron knows a checkpoint."""
    real = queues.Scheduled.end

    def end(self: Any, failure: Any) -> None:
        os.unlink(os.path.join(self.path, megatron.CONFIG))
        real(self, failure)

    queues.Scheduled.end = end  # type: ignore[method-assign]


def megatron_syncs_nothing() -> None:
    """What Megatron has written by itself is finalized without an fsync."""
    writer.FileSystemWriterAsync.sync_added = lambda self: None  # type: ignore[method-assign]


def megatron_fails_silently() -> None:
    """A save that has failed is finalized."""
    real = queues.Scheduled.end
    queues.Scheduled.end = lambda self, failure: (  # type: ignore[method-assign]
        real(self, None) if failure is None else self.durable.set_result({})
    )
