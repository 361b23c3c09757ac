"""One line per save through logging: INFO when it is durable, WARNING when that took a second
attempt, ERROR when it is not. And once in a process, INFO for each thing that saves have to do
without on this machine, with what to change.

No handler is added, not even a null one: with a null handler a program that has not set up logging
would never see a warning or an error, which Python prints to stderr otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from holdfast import _ranks, events
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
    if report.get("tensors_compared"):
        text += (
            f"; {report['tensors_changed']} of {report['tensors_compared']} tensors changed since "
            f"step {report['previous_step']}"
        )
    return text


_told: set[str] = set()


def fallbacks(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a save had to do without on this machine, by a name: what it did instead, and what to change."""
    reason = report["engine_reason"]
    if report["engine"] == "pwrite" and "io_uring" in reason:
        change = (
            "raise the limit on locked memory (ulimit -l; for a container --ulimit memlock=-1)"
            if "ENOMEM" in reason
            else "in a container allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile; "
            "on the host set sysctl kernel.io_uring_disabled=0"
        )
        yield "engine", f"io_uring cannot be used, files are written by pwrite ({reason}): {change}"
    if report["pages"] == "small":
        yield "pages", (
            "staging memory is on small pages, writing costs more CPU: on the host reserve huge pages (1 GiB: sysctl "
            "vm.nr_hugepages=512), or write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        )
    if report["direct_io"] == "no":
        yield "direct_io", (
            f"the file system of {report['path']} takes no direct I/O, files are written through the page cache: save to "
            "ext4 or xfs on a local disk where that costs too much"
        )
    if report["streamed"]:
        yield "streamed", (
            f"{size(report['bytes'])} did not fit into the free staging memory, so that the call waited for the disk: raise "
            "arena_bytes, or the memory limit of the container if the default is in use"
        )


def _once(key: str, level: int, rank: int, text: str) -> None:
    """A line that is the same for all saves of the process."""
    if key not in _told and logger.isEnabledFor(level):
        _told.add(key)
        logger.log(level, "[rank %d] %s", rank, printable(text))


def warn_of(unregistered: str, rank: int) -> None:
    """Says why copies are slow, where the driver has pinned no memory."""
    if unregistered:
        _once(unregistered, logging.WARNING, rank, f"copies from the GPU are slow: {unregistered}")


def warn_of_directory(directory: str, text: str) -> None:
    """Says once what is the matter with a directory."""
    _once(directory, logging.WARNING, _ranks.rank_and_world()[0], text)


def log(subject: Any, report: dict[str, Any] | None, error: Error | None) -> None:
    """The observer that writes the line."""
    if subject.extra.get("raised"):
        return  # the call has raised it
    if report is None:
        outcome = events.outcome(subject, error)
        level = {"cancelled": logging.INFO, "skipped": logging.WARNING}.get(outcome, logging.ERROR)
    else:
        level = logging.WARNING if report["write_attempts"] > 1 else logging.INFO
        rank = subject.extra["rank"]
        warn_of(report.get("unregistered", ""), rank)
        for key, text in fallbacks(report):
            _once(key, logging.INFO, rank, text)
    if logger.isEnabledFor(level):
        text = printable(line(subject, report, error))
        logger.log(level, "[rank %d] %s", subject.extra["rank"], text)
