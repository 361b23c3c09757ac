"""One line per save through logging: INFO when it is durable, WARNING when that took a second
attempt, ERROR when it is not.

No handler is added, not even a null one: with a null handler a program that has not set up logging
would never see a warning or an error, which Python prints to stderr otherwise.
"""

from __future__ import annotations

import logging
from typing import Any

from holdfast import events
from holdfast.errors import Error, printable

logger = logging.getLogger("holdfast")


def size(nbytes: float) -> str:
    """Bytes as people read them: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError


def line(subject: Any, report: dict[str, Any] | None, error: Error | None) -> str:
    """The text of a save's line, without the rank."""
    if report is None:
        number = f", errno {error.errno}" if error is not None and error.errno else ""
        code = error.code if error is not None else "UNKNOWN"
        message = error.message if error is not None else "no report"
        return f"save {subject.path} (step {subject.step}) {events.outcome(subject, error)}: " + (
            f"{code}{number}: {message}"
        )
    durable = report["time_to_durable"]
    text = f"saved {subject.path} (step {subject.step}): {size(report['bytes'])}"
    text += f", blocked {report.get('time_blocked', report['time_in_call']):.3f} s"
    text += f", staged after {report['time_to_staged']:.3f} s, durable after {durable:.3f} s"
    if durable > 0:
        text += f" ({size(report['bytes'] / durable)}/s)"
    text += f", {report['engine']}"
    if report["write_attempts"] > 1:
        text += ", written again into new files, because an fsync failed at first: look at the disk"
    if "previous" in report:
        text += (
            f"; {report['tensors_changed']} of {report['tensors_compared']} tensors changed since "
            f"step {report['previous_step']}"
        )
    return text


_told: set[str] = set()


def _warn_of(unregistered: str, rank: int) -> None:
    """Once for each reason: copies are slow for all saves of the process."""
    if unregistered and unregistered not in _told:
        _told.add(unregistered)
        logger.warning("[rank %d] copies from the GPU are slow: %s", rank, printable(unregistered))


def log(subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
    """The observer that writes the line."""
    if subject.extra.get("raised"):
        return  # the call has raised it
    if report is None:
        outcome = events.outcome(subject, error)
        level = {"cancelled": logging.INFO, "skipped": logging.WARNING}.get(outcome, logging.ERROR)
    else:
        level = logging.WARNING if report["write_attempts"] > 1 else logging.INFO
        _warn_of(report.get("unregistered", ""), subject.extra["rank"])
    if logger.isEnabledFor(level):
        text = printable(line(subject, report, error))
        logger.log(level, "[rank %d] %s", subject.extra["rank"], text)
