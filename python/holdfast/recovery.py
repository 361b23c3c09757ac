"""Cleaning up after a crash, of plain and of DCP checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

from holdfast import _arguments, _dcp_directories, _names, _native, _regular, directories
from holdfast.errors import Error, of_system

logger = logging.getLogger("holdfast")


def _uncommitted_dcp(path: str) -> list[str]:
    """Directories with DCP saves that no metadata speaks of, or under way; "." for `path` itself."""
    with of_system(f"recover {path}: list it"), os.scandir(path) as entries:
        found = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
    names = [".", *(name for name in found if not _names.retired_name(name))]
    return [name for name in names if _has_uncommitted(os.path.join(path, name))]


def _has_uncommitted(path: str) -> bool:
    try:
        # Asked before the list: a worker without its trainer has no manifest before its data is durable, and may end meanwhile.
        is_orphaned = _native.saves_at_work(path) == "orphan"
        names = os.listdir(path)
        attempts = {m["attempt"].encode() for m in map(_names.DCP_MANIFEST.fullmatch, names) if m}
        for name in names if attempts else ():
            if _names.DCP_METADATA.fullmatch(name):
                data, _ = _regular.read_whole(os.path.join(path, name), "recover", _regular.METADATA_BYTES_MAX)
                attempts = {attempt for attempt in attempts if attempt not in data}
        return bool(attempts) or is_orphaned
    except (OSError, Error):  # removed meanwhile, damaged, or not ours to read
        return False


@_arguments.checked
def recover(
    directory: str | os.PathLike[str],
    *,
    wait_for_orphans: float = 30.0,
    promote: bool = True,
    clean_up: bool = True,
    silence_without_locks: float = 120.0,
    age_without_locks: float = 86400.0,
) -> dict[str, Any]:
    """Makes the directory clean after a crash; safe beside running saves, harmless to repeat.

    DCP checkpoints are completed, where all ranks' data is durable: see `holdfast.dcp.recover`. Those
    whose removal has begun are removed, and what failed and killed saves have left in directories without
    ``.metadata``. Complete copies of a drain get their names.
    Files of `holdfast.save_file` in the directory itself likewise.

    Args:
        directory: where checkpoints are saved, or a DCP checkpoint.
        wait_for_orphans: seconds to wait without progress for a worker whose trainer is dead, before it is
            fenced, and ten times that in all; and for processes that have a single file's save open, before it is kept.
        promote: give complete but unfinished checkpoints their final name.
        clean_up: remove incomplete ones.
        silence_without_locks: where locks tell nothing (network file systems), seconds without a
            change after which a complete checkpoint is promoted. Waited for, unless
            `wait_for_orphans` is 0.
        age_without_locks: the same for an incomplete one, which is then removed; 0 where no save
            runs.

    Returns:
        ``complete`` (as `list_checkpoints`, of both formats), ``promoted`` (names, those of DCP checkpoints, too),
        ``removed``, ``fenced``, ``kept_incomplete``.
    """
    path = directories.local_path(directory, "recover")
    _arguments.check_seconds(
        "recover", wait_for_orphans=wait_for_orphans, silence_without_locks=silence_without_locks,
        age_without_locks=age_without_locks,
    )  # fmt: skip
    report = _native.recover(
        path, wait_for_orphans, promote, clean_up, silence_without_locks, age_without_locks
    )
    with of_system(f"recover {path}"):  # what no step below says more of
        _settle_dcp(path, report, wait_for_orphans, promote, clean_up, age_without_locks)
    return report


def _settle_dcp(path: str, report: dict[str, Any], wait_for_orphans: float, promote: bool, clean_up: bool,
                age_without_locks: float) -> None:  # fmt: skip
    """Recovers DCP's directories and copies of a drain, and adds them to the report."""
    for name, to in _dcp_directories.settle_copies(path, promote, clean_up).items():
        report["kept_incomplete"] = [why for why in report["kept_incomplete"] if not why.startswith(f"{name}: ")]
        report["promoted"] += [] if _names.kind_of(to) else [to]
    for name in _dcp_directories.settle_retired(path, clean_up):
        kept = [why for why in report["kept_incomplete"] if not why.startswith(f"{name}: ")]
        report["kept_incomplete"] = kept if clean_up else [*kept, f"{name}: incomplete"]
        report["removed"] += [name] if clean_up else []
    for name in _uncommitted_dcp(path) if promote else ():
        try:
            from holdfast import dcp  # only here: it takes seconds
        except ImportError as error:
            logger.warning("recover %s: %s is left as it is: %s", path, name, error)
            continue
        at = os.path.join(path, name)
        try:
            promoted = dcp.recover(at, wait_for_orphans)
        except Error as error:
            if name == ".":
                raise
            if os.path.lexists(at):  # else a running save has removed it meanwhile
                logger.warning("recover %s: %s", at, error.message)
                report["kept_incomplete"].append(f"{name}: {error.message}")
            continue
        if promoted:
            report["promoted"].append(os.path.basename(os.path.abspath(path)) if name == "." else name)
    removed, kept_dcp = _dcp_directories.settle_unfinished(path, clean_up, age_without_locks)
    report["removed"] += removed if clean_up else []
    report["kept_incomplete"] += [f"{name}: incomplete" for name in removed if not clean_up]
    report["kept_incomplete"] += [f"{name}: {why}" for name, why in kept_dcp.items()]
    with contextlib.suppress(Error):  # none can be read: a list of them says so
        complete, damaged = _dcp_directories.list_complete(path)
        report["complete"] = sorted([*report["complete"], *complete], key=_dcp_directories.age_of_listed)
        report["kept_incomplete"] += damaged
