"""The contents of a directory of checkpoints: the newest, the list, verification; paths of checkpoints."""

from __future__ import annotations

import contextlib
import errno
import logging
import operator
import os
from typing import Any

from holdfast import _arguments, _dcp_directories, _names, _native
from holdfast.errors import Error, of_system, printable

logger = logging.getLogger("holdfast")


def local_path(path: str | os.PathLike[str], operation: str, instead: str = "") -> str:
    """A path as text; `instead` is what to do with a URL.

    Raises:
        TypeError: it is neither text nor an os.PathLike.
        Error: INVALID_ARGUMENT for a URL, for empty text, for text with a zero byte, and for a name that the file system
            encoding lacks.
    """
    text = path_text(path, operation)
    if not text:
        raise Error("INVALID_ARGUMENT", f"{operation} '': the path is empty")
    if "\0" in text:
        raise Error("INVALID_ARGUMENT", f"{operation} {text!r}: no path can have a zero byte; choose another name")
    if "://" in text:
        raise Error(
            "INVALID_ARGUMENT",
            f"{operation} {shown_url(text)}: only directories of mounted file systems are supported, no URLs"
            + (instead and f"; {instead}"),
        )
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise Error(
            "INVALID_ARGUMENT",
            f"{operation} {printable(text)}: the file system encoding of this process is {error.encoding}, which lacks a "
            "character of the path; run Python with PYTHONUTF8=1, or in a UTF-8 locale",
        ) from None
    return text


def shown_url(url: str) -> str:
    """A URL as messages have it: credentials, and a query, which may be a signature, are left out."""
    return f"{url.partition(':')[0]}:..." if "@" in url or "?" in url else url


def path_text(path: Any, operation: str) -> str:
    """A path or URL as text. Raises TypeError for what is neither text nor an os.PathLike."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{operation}: the path is a str or an os.PathLike, not {type(path).__name__}") from None


def format_of(names: list[str]) -> str:
    """``"holdfast"`` or ``"dcp"`` for the names of a checkpoint's files; empty for other names."""
    kinds = set(map(_names.format_of, names))
    return "dcp" if "dcp" in kinds else "holdfast" if "holdfast" in kinds else ""


def check_is_no_checkpoint(path: str, operation: str) -> None:
    """Refuses a checkpoint, or a file, where the directory that holds checkpoints is expected.

    Raises:
        Error: FAILED_PRECONDITION, and of the system.
    """
    if not os.path.isdir(path):
        if os.path.exists(path):
            raise Error("FAILED_PRECONDITION", f"{operation}: {path} is a file; name a directory for checkpoints", errno.ENOTDIR)
        return
    with of_system(f"{operation}: list {path}"):
        names = os.listdir(path)
    if any(map(_names.is_record, names)):  # tensors may lie in any directory
        above = os.path.dirname(os.path.abspath(path))
        raise Error(
            "FAILED_PRECONDITION",
            f"{operation}: {path} is a checkpoint; name the directory that holds checkpoints, for example {above}",
        )


def whole_step(step: int, operation: str = "save") -> int:
    """A step as the files have it.

    Raises:
        Error: INVALID_ARGUMENT for what is no whole number from 0 to 2^64 - 1.
    """
    _arguments.check(whole_step, {"step": step}, operation)
    return operator.index(step)


def absolute_path(path: str, operation: str) -> str:
    """A path from the root.

    Raises:
        Error: NOT_FOUND for a relative one where the working directory was removed.
    """
    with of_system(f"{operation} {path}: find the working directory"):
        head, dots, tail = path.rpartition("..")
        if dots and head[-1:] in ("", "/") and tail[:1] in ("", "/") and os.path.exists(head + dots):
            # Behind a link `..` is not what stands before it in the text.
            path = os.path.realpath(head + dots) + tail
        return os.path.abspath(path)


@_arguments.checked
def find_newest(
    directory: str | os.PathLike[str], *, format: str = "holdfast"
) -> dict[str, Any]:
    """The newest complete checkpoint: name, path, step, saved_at, attempt, parent, world_size, bytes.

    The newest is the one whose save was called last (``saved_at``, seconds since 1970), whatever
    its step and name. Checkpoints that cannot be read or are damaged are passed over, each with a
    warning in the log.

    Args:
        directory: where checkpoints are saved.
        format: ``"holdfast"``, or ``"dcp"`` for those of PyTorch Distributed Checkpoint.

    Raises:
        Error: NOT_FOUND when there is none. What reading says, when none is complete and at least
            one cannot be read.
    """
    path = local_path(directory, "list")
    if _is_dcp(format):
        complete = list_checkpoints(path, format=format)
        if not complete:
            raise Error("NOT_FOUND", f"find newest in {path}: there is no complete DCP checkpoint")
        return complete[-1]
    _warn_of_links(path)
    found, passed_over = _native.find_newest(path)
    _warn_of(passed_over, path)
    return found


@_arguments.checked
def newest(
    directory: str | os.PathLike[str], *, format: str = "holdfast"
) -> dict[str, Any] | None:
    """As `find_newest`, but None when there is none: ``if last := holdfast.newest("run"): ...``."""
    try:
        return find_newest(directory, format=format)
    except Error as error:
        if error.code == "NOT_FOUND":
            return None
        raise


@_arguments.checked
def list_checkpoints(
    directory: str | os.PathLike[str], *, format: str = "holdfast"
) -> list[dict[str, Any]]:
    """All complete checkpoints by the time of their saves, newest last; changes nothing.

    Others are passed over as `find_newest` does it, which has the arguments, too.
    """
    path = local_path(directory, "list")
    complete, passed_over = listed(path, format)
    _warn_of(passed_over, path)
    _warn_of_links(path)
    return complete


def listed(path: str, format: str) -> tuple[list[dict[str, Any]], list[str]]:
    """As `list_checkpoints`; and what was passed over, ``NAME: why``, without a warning."""
    return (_dcp_directories.list_complete if _is_dcp(format) else _native.list_checkpoints)(path)


def _is_dcp(format: str) -> bool:
    if format not in ("holdfast", "dcp"):
        raise Error("INVALID_ARGUMENT", f"format {format!r}: there is only 'holdfast' and 'dcp'")
    return format == "dcp"


def _warn_of(passed_over: list[str], path: str) -> None:
    for entry in passed_over:
        logger.warning("list %s: passed over %s", path, entry)


def _warn_of_links(path: str) -> None:
    """Tells of links to checkpoints that stand in another directory: lists pass over links."""
    found = []
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        found = [entry.path for entry in entries if entry.is_symlink() and entry.is_dir()]
    for link in found:
        to = os.path.realpath(link)
        is_elsewhere = os.path.dirname(to) != os.path.realpath(path)
        if is_elsewhere and (_dcp_directories.may_be_loaded(to) or os.path.exists(os.path.join(to, _names.RECORD))):
            logger.warning("list %s: passed over %s, a link to a checkpoint at %s; load it by its path, or mount its disk there "
                           "in the place of the link", path, os.path.basename(link), to)  # fmt: skip


@_arguments.checked
def verify(
    path: str | os.PathLike[str],
    *,
    threads: int = 0,
    buffer_bytes: int = _native.LOAD_BUFFER_BYTES,
    engine: str = "auto",
    direct_io: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint, or all below a directory, again and compares it with the digests of its save.

    Returns:
        ``verdict`` (``"sound"``, ``"corrupt"``, ``"incomplete"``, ``"unreadable"``), ``faults``
        (file, tensor, byte range, expected and found), ``bytes``, ``seconds``, ... Of several
        checkpoints the gravest verdict, the faults of all, with the files' paths below `path`, and
        the sums.
    """
    text = local_path(path, "verify")
    options = threads, buffer_bytes, engine, direct_io
    found, uncommitted = _native.find_checkpoints(text)
    if found == [text]:
        return _native.verify(text, *options)
    reports = [
        report for each in found
        # Retention may have removed it since it was found.
        if (report := _native.verify(each, *options))["verdict"] == "sound" or os.path.lexists(each)
    ]  # fmt: skip
    return _merged(text, reports, uncommitted) if reports else _native.verify(text, *options)


_GRAVITY = ("sound", "incomplete", "unreadable", "corrupt")
_SUMS = ("faults_total", "bytes", "files", "tensors", "seconds")


def _merged(path: str, reports: list[dict[str, Any]], uncommitted: list[str]) -> dict[str, Any]:
    """One report of the checkpoints below a directory; step and attempt are those of the newest one by its step."""

    def below(name: str, file: str = "") -> str:
        return os.path.normpath(os.path.join(os.path.relpath(name, path), file))

    merged = dict(max(reports, key=operator.itemgetter("step")))
    merged.update({key: sum(r[key] for r in reports) for key in _SUMS})
    notes = [f"{below(r['path'])}: {r['note']}" for r in reports if r["note"]]
    if uncommitted:
        notes.append(f"Not looked at, because no save has committed them: {', '.join(map(below, uncommitted))}.")
    merged.update(
        path=path,
        verdict=max((r["verdict"] for r in reports), key=_GRAVITY.index),
        checked="; ".join(dict.fromkeys(r["checked"] for r in reports)),
        faults=[{**f, "file": below(r["path"], f["file"])} for r in reports for f in r["faults"]],
        direct_io=min((r["direct_io"] for r in reports), key=("no", "claimed", "proven").index),
        note=" ".join(notes),
    )
    return merged
