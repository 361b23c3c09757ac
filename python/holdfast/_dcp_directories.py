"""Directories of DCP checkpoints: which are complete, and which of them go. Needs no PyTorch.

A DCP checkpoint is complete once its ``.metadata`` stands, which is its save's last file. Where the
save made a commit record (runtime/layout/FORMAT.md, section 5), ``.metadata`` must be as it says.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import functools
import io
import json
import logging
import operator
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Container
from typing import Any, TypeVar

from holdfast import _names, _native, _regular
from holdfast._durable import locked, names_in, sync_directory
from holdfast._names import METADATA
from holdfast.errors import Error, of_system

logger = logging.getLogger("holdfast")

T = TypeVar("T")
Found = TypeVar("Found")

# What checkpoints are sorted by, the newest last.
AGE = ("saved_at", "step", "name")
age_of_listed = operator.itemgetter(*AGE)
# Of this process, not of a checkpoint: a second try may succeed.
_OF_THIS_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# The lock of a save that has ended is held until the kernel has freed the ring of its worker.
_ENDING_SECONDS = 2.0
_POLL = 0.02
_LAST_NUMBER = re.compile(r"(\d+)(?=\D*$)")


def series_of(name: str) -> str:
    """A checkpoint's name with its last run of digits replaced: ``step-{}``."""
    return _LAST_NUMBER.sub("{}", name)


def step_of(name: str) -> int:
    """The step that a name ends in; else 0."""
    return _step_in(name) or 0


def _step_in(name: str) -> int | None:
    """The last number of a name, unless letters follow as in ``llama-8b``."""
    number = _LAST_NUMBER.search(name)
    if number is None or name[number.end() :][:1].isalpha():
        return None
    return int(number[1]) % 2**63


def has_step(name: str, step: int) -> bool:
    """Whether a name ends in the step: in ``seed-1`` the number tells one job from another."""
    return _step_in(name) == step


def check_step(path: str, name: str, attempt: str, recorded: int, wanted: int | None) -> None:
    """Refuses a checkpoint, plain or of DCP, that is of another step than the one that is asked for.

    A save without a step records 0: then the name may have it. Without an attempt nothing is recorded.

    Raises:
        Error: NOT_FOUND.
    """
    if wanted in (None, recorded) or not attempt or (recorded == 0 and has_step(name, wanted or 0)):
        return
    raise Error("NOT_FOUND", f"load {path}: it is a checkpoint of step {recorded}, not of step {wanted}; "
                f"pass step={recorded}, or the name of another checkpoint")  # fmt: skip


def list_complete(directory: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The complete checkpoints, the oldest first, and "NAME: why" of those that are damaged.

    Raises:
        Error: NOT_FOUND and what else the system says of the directory itself; RESOURCE_EXHAUSTED where
            descriptors or memory are short; what reading says where nothing is complete and a
            checkpoint cannot be read. With an answer instead, training would go on from an older
            checkpoint, or begin anew.
    """
    complete, passed_over, unreadable = listed_anew(lambda: _directories_in(directory), functools.partial(_look_at, directory))
    if unreadable is not None and not complete:
        raise unreadable
    return sorted(complete, key=age_of_listed), passed_over


def listed_anew(entries: Callable[[], list[T]], look_at: Callable[[list[T]], tuple[Found, bool]]) -> Found:
    """Looks at the entries of a directory, and once more where one of them is gone: it may have made room for a later one, which the
    list lacks.

    Args:
        look_at: returns what it has found, and whether an entry is gone.
    """
    before: list[T] | None = None
    while True:
        now = entries()
        found, is_gone = look_at(now)
        if not is_gone or now == before:  # a file system may list a removed directory for a while
            return found
        before = now


def _directories_in(directory: str) -> list[str]:
    with of_system(f"list {directory}"):
        # A link leads to what is not of this directory, as in lists of plain checkpoints.
        return sorted(e.name for e in os.scandir(directory) if e.is_dir(follow_symlinks=False))


Looks = tuple[list[dict[str, Any]], list[str], Error | None]  # complete, passed over, the first that cannot be read


def _look_at(directory: str, names: list[str]) -> tuple[Looks, bool]:
    """As `list_complete`; and whether a name is gone."""
    complete, passed_over, unreadable, is_gone = [], [], None, False
    for name in names:
        # A drain gives the name when all is durable; the metadata stands there a moment before.
        if _names.kind_of(name):
            continue
        path, found, failed = os.path.join(directory, name), None, None
        try:
            with of_system(f"list {path}"):
                found = look(path)
        except Error as error:
            if error.errno in _OF_THIS_PROCESS:
                raise
            failed = error
        if found is not None:
            complete.append({"name": name, "path": path, **found})
        elif not os.path.lexists(path):
            is_gone = True
        elif failed is not None:
            if failed.code != "DATA_LOSS":
                unreadable = unreadable or failed
            passed_over.append(f"{name}: {failed.message}")
    return (complete, passed_over, unreadable), is_gone


def why_none(path: str) -> str:
    """Why there is nothing for DCP to load in a directory without metadata."""
    if os.path.exists(os.path.join(path, _names.RECORD)):
        return "it is a plain Holdfast checkpoint; use holdfast.load, or a Checkpointer without format='dcp'"
    return "the checkpoint was never completed, or the path is wrong"


def may_be_loaded(path: str) -> bool:
    """Whether metadata stands there, of all ranks or of rank 0 alone."""
    return any(os.path.exists(os.path.join(path, name)) for name in (METADATA, _names.dcp_metadata(0)))


def look(path: str) -> dict[str, Any] | None:
    """What is known of a complete checkpoint; None for a directory that is none.

    Raises:
        Error: DATA_LOSS where ``.metadata`` is no file or not what the save committed, the save's commit
            record or a manifest is missing, or its data files have fewer bytes than it says.
        OSError: of the system.
    """
    try:
        data, status = _regular.read_whole(os.path.join(path, METADATA), "read", _regular.METADATA_BYTES_MAX)
    except FileNotFoundError:
        return None
    names = os.listdir(path)
    # A record or manifest whose attempt the metadata does not name is of another save.
    for attempt in sorted(set(filter(None, map(_names.dcp_attempt_of, names)))):
        if attempt.encode() not in data:
            continue
        if _native.check_commit_file(path, attempt, METADATA, data) is None:
            continue  # of an earlier version
        name = _names.dcp_record(attempt)
        record = json.loads(_regular.read_whole(os.path.join(path, name), "read", _regular.RECORD_BYTES_MAX)[0])
        stored = sum(_size(os.path.join(path, n)) for n in names if _names.DCP_ANY_DATA.fullmatch(n))
        manifests = sum(match["attempt"] == attempt for match in map(_names.DCP_MANIFEST.fullmatch, names) if match)
        if stored < record["bytes"] or manifests < record["world_size"]:
            if _regular.read_whole(os.path.join(path, METADATA), "read", _regular.METADATA_BYTES_MAX)[0] != data:
                return look(path)  # a save has replaced the checkpoint meanwhile
            raise Error("DATA_LOSS", f"read {path}: its data files have {stored} of {record['bytes']} bytes, and {manifests} of "
                        f"{record['world_size']} manifests are there")  # fmt: skip
        return {
            "step": record["step"],
            "saved_at": record["saved_at_ns"] / 1e9,
            "attempt": attempt,
            "parent": record["parent"] if record["parent"].strip("0") else None,
            "world_size": record["world_size"],
            "bytes": record["bytes"],
        }
    # Of another writer, or an earlier version: nothing proves it, and the name has the step.
    return {
        "step": step_of(os.path.basename(path)),
        "saved_at": status.st_mtime,
        "attempt": "",
        "parent": None,
        "world_size": None,
        "bytes": sum(os.stat(os.path.join(path, n)).st_size for n in names),
    }


def _size(path: str) -> int:
    """The bytes of a file, 0 where it has gone."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _rows(checkpoints: list[dict[str, Any]]) -> list[tuple[str, float, int, str, str]]:
    return [(c["name"], c["saved_at"], c["step"], c["attempt"] or "", c["parent"] or "") for c in checkpoints]


def remove_old(directory: str, saved: str, keep_last: int, keep_every: int,
               busy: Collection[str]) -> None:  # fmt: skip
    """Removes checkpoints of a series, as ``keep_last`` and ``keep_every`` of `save_async` say.

    Those of abandoned branches go first.

    A checkpoint is renamed before its first file goes, so that no crash leaves a part of it under
    its name. What a crash has left of an earlier removal goes, too.

    Args:
        directory: of the checkpoints.
        saved: name of the one that was just completed; it stays.
        keep_last, keep_every: which ones stay.
        busy: paths that saves of this process go into; they stay, and so do those of others.

    Raises:
        Error: of the first checkpoint that could not be removed, after trying all.
    """
    every = list_complete(directory)[0]
    names = set(_native.select_for_removal(_rows(every), keep_last, keep_every, saved))
    first: Error | None = None
    for old in every:
        if old["name"] not in names or old["path"] in busy:
            continue
        try:
            if not _is_saved_into(old["path"], _ENDING_SECONDS):
                _retire(directory, old)
        except Error as error:
            if os.path.lexists(old["path"]):  # else the removal behind another save was faster
                first = first or error
    remove_retired(directory, series_of(saved))
    if first is not None:
        raise first


def remove(checkpoint: dict[str, Any]) -> None:
    """Removes one complete checkpoint.

    Raises:
        Error: FAILED_PRECONDITION for a directory with a foreign file; ABORTED where another process saves into it, or
            has replaced it; of the system.
    """
    if _is_saved_into(checkpoint["path"], _ENDING_SECONDS):
        raise Error("ABORTED", f"remove {checkpoint['path']}: a save is on its way there")
    directory = os.path.dirname(checkpoint["path"])
    _retire(directory, checkpoint)
    remove_retired(directory, series_of(checkpoint["name"]))


def _is_saved_into(path: str, seconds: float = 0.0) -> bool:
    """Whether a save is at work there. A worker without a trainer, or its ring, may end within some seconds."""
    end = time.monotonic() + seconds
    while (at_work := _native.saves_at_work(path)) == "orphan" and time.monotonic() < end:
        time.sleep(_POLL)
    return at_work in ("trainer", "orphan")


def remove_retired(directory: str, series: str) -> None:
    """Removes the directories of a series that have lost their names, those that a crash has left, too."""
    with of_system(f"list {directory}"):
        names = os.listdir(directory)
    for name in names:
        former = _names.retired_name(name)
        path = os.path.join(directory, name)
        if former and series_of(former) == series and not _foreign(path):
            _remove(path)


def settle_copies(directory: str, promote: bool, clean_up: bool) -> dict[str, str]:
    """Ends what a drain that was killed at the last step has begun: a complete copy without a name gets it, and one that was replaced
    there gets the name of a retired one.

    Returns:
        The new names by the former ones.

    Raises:
        Error: the directory cannot be listed.
    """
    with of_system(f"list {directory}"):
        names = sorted(name for name in os.listdir(directory) if _names.kind_of(name) == "partial")
    # Of several copies of a name the latest save gets it.
    names.sort(key=lambda name: _saved_at(os.path.join(directory, name)), reverse=True)
    settled = {}
    # A name is given before what has lost it is looked at.
    for new_name in ([_name_of_copy] if promote else []) + ([_name_of_replaced] if clean_up else []):
        for name in names:
            path = os.path.join(directory, name)
            with contextlib.suppress(Error, OSError):  # damaged, or another process has settled it
                to = new_name(directory, name, look(path))
                if to and not _is_sent(path):
                    os.rename(path, os.path.join(directory, to))
                    sync_directory(directory)
                    settled[name] = to
    return settled


def _saved_at(path: str) -> float:
    with contextlib.suppress(Error, OSError):
        return (look(path) or {}).get("saved_at", 0.0)
    return 0.0


def _name_of_copy(directory: str, name: str, found: dict[str, Any] | None) -> str:
    match = _names.UNCOMMITTED.fullmatch(name)
    is_whole = match and found and found["attempt"] == match["attempt"] and not os.path.lexists(os.path.join(directory, match["name"]))
    return match["name"] if match and is_whole else ""


def _name_of_replaced(directory: str, name: str, found: dict[str, Any] | None) -> str:
    match = _names.UNCOMMITTED.fullmatch(name)
    standing = look(os.path.join(directory, match["name"])) if match and found and found["attempt"] else None
    if match is None or found is None or standing is None:
        return ""
    # A later one is none: a drain that was killed had found it at its own exchange of names.
    is_later = found["saved_at"] > standing["saved_at"]
    is_copy = found["attempt"] == match["attempt"]  # of an earlier save, which nobody completes any more
    is_replaced = (is_copy or name in _names.replaced(match["name"], standing["attempt"])) and not is_later
    return _names.retired(match["name"], found["attempt"]) if is_replaced else ""


def _is_sent(path: str) -> bool:
    """Whether a drain is at work there. Its lock may tell nothing on a network file system: the drain then finds what was done."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return not locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def settle_retired(directory: str, clean_up: bool) -> list[str]:
    """Removes the directories that a crash in a removal has left; returns their names.

    One with a foreign file, or with a save at work, is left as it is, and so is a link. So is one
    that cannot be removed, and the log says why.

    Args:
        directory: of the checkpoints.
        clean_up: whether to remove them; else their names are returned alone.

    Raises:
        Error: the directory cannot be listed.
    """
    settled = []
    with of_system(f"list {directory}"):
        names = sorted(filter(_names.retired_name, os.listdir(directory)))
    for name in names:
        path = os.path.join(directory, name)
        # Of holdfast.lightning, whose trainer removes a directory with all that it holds.
        whole = _names.is_retired_hidden(name) and os.path.isdir(path) and not os.path.islink(path)
        if not whole and (_foreign(path) or not os.listdir(path)):  # an empty one is the runtime's
            continue
        if _is_saved_into(path):
            continue
        try:
            if clean_up and whole:
                remove_tree(path)
            elif clean_up:
                _remove(path)
            settled.append(name)
        except Error as error:
            logger.warning("%s", error)
    return settled


def settle_unfinished(directory: str, clean_up: bool, age_without_locks: float) -> tuple[list[str], dict[str, str]]:
    """Removes the directories of saves that have failed or were killed, and that nothing can complete.

    Args:
        directory: of the checkpoints, or itself one, which is never removed.
        clean_up: whether to remove them; else their names are returned alone.
        age_without_locks: seconds without a change after which, where locks tell nothing, no save is at work.

    Returns:
        Their names, and why others stay that saves have begun.

    Raises:
        Error: the directory cannot be listed.
    """
    with of_system(f"list {directory}"), os.scandir(directory) as entries:
        names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and not _names.kind_of(e.name))
    removed, kept = [], {}
    itself = os.path.abspath(directory)
    for path in [itself, *(os.path.join(directory, name) for name in names)]:
        name = os.path.basename(path)
        try:
            if not _is_unfinished(os.listdir(path)):
                continue
        except OSError:  # gone meanwhile, or not ours to read
            continue
        try:
            why = _unfinished(path, clean_up and path != itself, age_without_locks)
        except FileNotFoundError:  # its save has removed a file
            continue
        except (Error, OSError) as error:
            logger.warning("remove %s: %s", path, error)
            why = f"it cannot be removed: {error}"
        if why:
            kept[name] = why
        elif why is not None and path != itself:
            removed.append(name)
    return removed, kept


def _unfinished(path: str, clean_up: bool, age_without_locks: float) -> str | None:
    """Removes the directory of saves that were not completed.

    Returns:
        Why it is kept; None where it is none.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        is_turn = locked(fd, fcntl.LOCK_EX)  # else of a commit, or of another recovery
        names = names_in(fd)
        # Asked behind the list: a save that begins later has no file in it.
        if not is_turn or (at_work := _native.saves_at_work(path)) in ("trainer", "orphan"):
            return "a save is running there"
        if not _is_unfinished(names):
            return None
        proven = _data_files_of_manifests(path, names)
        lacking = [_lacking(path, manifests, proven) for manifests in _whole_saves(names)]
        if "" in lacking:
            return "all ranks' data is there, and it was not completed"
        if lacking:
            return f"all manifests are there, and {lacking[0]} is gone or not as they say, so nothing completes it; remove the directory yourself"
        foreign = [
            name for name in sorted(names)
            if not _is_own(_names.finished(name))
            or _names.DCP_DATA.fullmatch(name) and proven.get(name) != _stamp(os.stat(name, dir_fd=fd, follow_symlinks=False))
        ]  # fmt: skip
        if foreign:
            return f"nothing proves that {foreign[0]} is of the save that was not completed; remove the directory yourself"
        changed = max(os.stat(each, dir_fd=fd, follow_symlinks=False).st_mtime for each in (*names, "."))
        if at_work == "unknown" and age_without_locks > 0 and time.time() - changed < age_without_locks:
            return f"locks do not tell whether a save is running there, and it changed less than {age_without_locks:g} s ago"
        if clean_up:
            # Proofs go last: files that a crash leaves are still proven.
            for name in sorted(names, key=lambda n: n.endswith(_names.MANIFEST_END)):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
            with contextlib.suppress(OSError):  # a save has begun meanwhile
                os.rmdir(path)
        return ""
    finally:
        os.close(fd)


def _is_unfinished(names: Collection[str]) -> bool:
    """Whether saves of ours have begun in a directory, and none, of any program, was completed."""
    begun = any(
        _names.dcp_attempt_of(whole) or whole != name and _names.DCP_DATA.fullmatch(whole)
        for name, whole in zip(names, map(_names.finished, names), strict=True)
    )
    return begun and not any(map(_names.DCP_METADATA.fullmatch, names))


def _whole_saves(names: Collection[str]) -> list[list[str]]:
    """The manifests of each save whose ranks' manifests are all there."""
    saves: dict[tuple[str, int], list[str]] = collections.defaultdict(list)
    for match in filter(None, map(_names.DCP_MANIFEST.fullmatch, names)):
        saves[match["attempt"], int(match["world_size"])].append(match[0])
    return [sorted(manifests) for (_, world_size), manifests in saves.items() if len(manifests) == world_size]


def _lacking(path: str, manifests: list[str], proven: Container[str]) -> str:
    """The first file of a save that is damaged or gone, "" if none is."""
    for manifest in manifests:
        files, _ = _files_of(path, manifest)
        for name in [file["name"] for file in files] or [manifest]:
            if name not in proven:
                return name
    return ""


def _files_of(path: str, manifest: str) -> tuple[list[dict[str, Any]], int]:
    """What a manifest says of its data files, and when it was changed last; none of a damaged one."""
    with contextlib.suppress(Error, ValueError, KeyError, TypeError):
        text, made = _regular.read_whole(os.path.join(path, manifest), "read", _regular.MANIFEST_BYTES_MAX)
        return [file for file in json.loads(text)["files"] if file["name"]], made.st_ctime_ns
    return [], 0


def _data_files_of_manifests(path: str, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The versions of the data files that are as a manifest says: another program may have written one anew."""
    found = {}
    for name in filter(_names.DCP_MANIFEST.fullmatch, names):
        files, made_ns = _files_of(path, name)
        with contextlib.suppress(Error, ValueError, KeyError, TypeError):  # a damaged one proves nothing
            for file in files:
                if file["name"] not in names:  # gone, as by a recovery that was killed
                    continue
                with open(_regular.open_to_read(os.path.join(path, file["name"]), "read", os.O_NOFOLLOW), "rb") as data:
                    status = os.fstat(data.fileno())
                    # A file that is older than the manifest need not be read.
                    if status.st_size == file["bytes"] and (status.st_ctime_ns <= made_ns or _has_digests(data, file)):
                        found[file["name"]] = _stamp(status)
    return found


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Numbers that change if a file is written, or replaced."""
    return status.st_ino, status.st_size, status.st_ctime_ns


def _has_digests(data: io.BufferedReader, file: dict[str, Any]) -> bool:
    """Whether the bytes are those of a manifest's file."""
    size, digests = _native.CHUNK_BYTES, file["digests"]
    return len(digests) == -(-file["bytes"] // size) and all(_regular.digest(data.read(size)) == digest for digest in digests)


def remove_tree(path: str) -> None:
    """Removes a directory that has lost its checkpoint's name, with all in it. Another process may do so, too.

    Raises:
        Error: of the system.
    """
    with of_system(f"remove {path}"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _is_own(name: str) -> bool:
    """Whether saves through DCP make a file of this name. A directory with any other entry is kept."""
    return _names.is_record_of_dcp(name) or _names.DCP_DATA.fullmatch(name) is not None


def _foreign(path: str) -> list[str]:
    """What a directory has beside a checkpoint's files; of a link, the link."""
    if os.path.islink(path):
        return [os.path.basename(path)]
    try:
        return [name for name in sorted(os.listdir(path)) if not _is_own(_names.finished(name))]
    except OSError:  # removed by another process, or no directory
        return [path]


def _retire(directory: str, old: dict[str, Any]) -> None:
    """Takes a checkpoint's name away. The removal of what it has then follows."""
    foreign = _foreign(old["path"])
    if foreign:
        raise Error(
            "FAILED_PRECONDITION",
            f"remove {old['path']}: {foreign[0]} is no file of a DCP checkpoint, so the directory is "
            "kept; remove it yourself",
        )
    attempt = old["attempt"] or _native.new_attempt()
    retired = os.path.join(directory, _names.retired(old["name"], attempt))
    with of_system(f"remove {old['path']}"):
        before = os.stat(os.path.join(old["path"], METADATA))
        if ((look(old["path"]) or {}).get("attempt") or "") != (old["attempt"] or ""):
            raise Error("ABORTED", f"remove {old['path']}: another save has replaced it")
        os.rename(old["path"], retired)
        after = os.stat(os.path.join(retired, METADATA))
        if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
            os.rename(retired, old["path"])  # a save was completed there meanwhile
        sync_directory(directory)


def _remove(path: str) -> None:
    """Removes a directory that has lost its checkpoint's name. Another process may do so, too."""
    with of_system(f"remove {path}"), contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in sorted(names_in(fd), key=lambda n: n != METADATA):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(path)
