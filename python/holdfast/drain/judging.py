"""The state of a directory of a place, by the lists in it: which files are of a checkpoint, and whether a copy may replace it."""

from __future__ import annotations

import contextlib
import os
import stat

from holdfast import _dcp_directories, _names, _native, _regular
from holdfast.drain import slots
from holdfast.drain.beside import recorded
from holdfast.drain.contents import VERSIONS, contents_of, files_of, parse
from holdfast.drain.places import BESIDE, Info, Place, age_of
from holdfast.errors import Error, of_damage, of_system

FORMATS = ("holdfast", "dcp")
# Messages of readers about files that a checkpoint lacks, or that have other bytes.
_DAMAGE = ("DATA_LOSS", "NOT_FOUND")


def replaceable(place: Place, info: Info, new: set[str]) -> tuple[Info | None, object]:
    """The checkpoint that one of its name replaces, and the stamp of its directory; None for a damaged one, and an empty directory.

    Refuses a directory with anything else, and a later checkpoint, which another process has sent meanwhile.
    """
    path = place.path(info.name)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise Error("FAILED_PRECONDITION", f"replace {path}: it is a link or a file, and no checkpoint; move it away")
    before = slots.stamp(path)
    complete = place.complete()[0]
    for other in complete:
        if other.name != info.name and _is_same(place.path(other.slot), path):
            raise Error("FAILED_PRECONDITION", f"replace {path}: the file system takes this name for that of {other.name}, another checkpoint; "
                        "save under another name")  # fmt: skip
    old = next((c for c in complete if c.name == info.name), None)
    if old and age_of(old) > age_of(info):
        raise Error("ABORTED", f"replace {path}: a later save has arrived there")
    foreign = set(os.listdir(path))
    try:
        foreign -= {*contents_of(place, old).names(), *recorded_in(place, old)} if old else set()
    except Error as error:
        if error.code not in _DAMAGE:
            raise
        old = None
    if old is None and _is_damaged(place, info):
        # The lists of its files may be gone. Its successor has most of their names.
        foreign = foreign_in(place, info.name) - new
        if _is_unreadable(place, info.name, _names.BESIDE_RECORD):
            foreign -= {name.removeprefix(BESIDE) for name in new}
    if foreign:
        raise Error("FAILED_PRECONDITION", f"replace {path}: {min(foreign)} is no file of a complete "
                    "checkpoint; move the directory away")  # fmt: skip
    return old, before


def _is_same(a: str, b: str) -> bool:
    """Whether two names are of one entry, as where letters count without their case."""
    try:
        return os.path.samestat(os.lstat(a), os.lstat(b))
    except FileNotFoundError:
        return False


def _is_unreadable(place: Place, slot: str, name: str) -> bool:
    """Whether a list is there that says nothing."""
    try:
        parse(place.read(slot, name, _regular.MANIFEST_BYTES_MAX), name)
    except Error as error:
        return error.code == "DATA_LOSS"
    return False


def _is_damaged(place: Place, info: Info) -> bool:
    """Whether the directory of a checkpoint's name is of a save that has ended, and of no other program that has written there since.

    Raises:
        Error: where this process cannot read it: it may be sound. Where what can be read is of a later save than the checkpoint.
    """
    path = place.path(info.name)
    records = sorted(filter(slots.is_of_save, os.listdir(path)))
    if not records or _native.saves_at_work(path) in ("trainer", "orphan"):
        return False
    for name in records:
        _refuse_later(place, info, name)
    try:
        with of_system(f"read {path}"):
            found = _dcp_directories.look(path)
    except Error as error:
        if error.code not in _DAMAGE:
            raise
        return True
    return found is None or bool(found["attempt"])


def _refuse_later(place: Place, info: Info, name: str) -> None:
    """Refuses to replace a directory whose record or manifest is of a later save, or of a later version; a damaged one says nothing."""
    where = f"{place.path(info.name)}/{name}"
    try:
        document = parse(place.read(info.name, name, _regular.MANIFEST_BYTES_MAX), where)
        with of_damage(f"read {where}"):
            if document["version"] > VERSIONS[document["format"]]:
                raise Error("FAILED_PRECONDITION", f"replace {where}: version {document['version']} is not known; update holdfast, or move the "
                            "directory away")  # fmt: skip
            is_later = (document.get("saved_at_ns", 0) / 1e9, document["step"]) > (info.saved_at, info.step)
            if is_later and document["attempt"] != info.attempt:
                raise Error("FAILED_PRECONDITION", f"replace {where}: it is of a later save, which is damaged; move the directory away")
    except Error as error:
        if error.code not in _DAMAGE:
            raise


def is_over(place: Place, slot: str, by: Info | None) -> bool:
    """Whether a directory without a name is the rest of a removal, or of a replaced checkpoint, or an older save."""
    try:
        if _names.retired_name(slot):
            return not foreign_in(place, slot)
        if by is None:
            return False
        # A kill may have left a later save in the place of the one that was to be replaced.
        saved_at, step, attempt = _save_of(place, slot)
        return (saved_at, step) < (by.saved_at, by.step) or attempt == by.attempt
    except Error as error:  # without a list that says it
        return by is not None and error.code in _DAMAGE and slot in _names.replaced(by.name, by.attempt)
    except OSError:  # removed meanwhile
        return False


def _save_of(place: Place, slot: str) -> tuple[float, int, str]:
    """When a save was called, its step, and its attempt: of the commit record of a directory, else of the manifest of rank 0.

    Raises:
        Error: NOT_FOUND, DATA_LOSS.
    """
    names = sorted(os.listdir(place.path(slot)), key=lambda name: (not _names.is_commit_record(name), name))
    for name in names:
        manifest = _names.MANIFEST.fullmatch(name) or _names.DCP_MANIFEST.fullmatch(name)
        if _names.is_commit_record(name) or manifest and int(manifest["rank"]) == 0:
            where = f"{place.path(slot)}/{name}"
            document = parse(place.read(slot, name, _regular.MANIFEST_BYTES_MAX), where)
            with of_damage(f"read {where}"):
                return document["saved_at_ns"] / 1e9, document["step"], document["attempt"]
    raise Error("NOT_FOUND", f"read {place.path(slot)}: it has no list of rank 0")


def foreign_in(place: Place, slot: str, format: str = "") -> set[str]:
    """The files in a directory that are of no checkpoint, of a format or any, by all lists that can be read.

    The name of a data file proves nothing: the weights of Hugging Face have such names.
    """
    names = set(os.listdir(place.path(slot)))
    formats = (format,) if format else FORMATS
    own = {n for n in names if slots.is_list(n) and _names.format_of(_names.finished(n)) in ("", *formats)}.union(slots.unrecorded(names))
    for name in sorted(own):
        if name == _names.BESIDE_RECORD or name.endswith(_names.MANIFEST_END):
            with contextlib.suppress(Error):  # damaged, or half written
                where = os.path.join(slot, name)
                own |= {f.name for f in files_of(parse(place.read(slot, name, _regular.MANIFEST_BYTES_MAX), where), where)}
    return names - own


def recorded_in(place: Place, info: Info) -> list[str]:
    """The names of a drain's files beside a checkpoint, with those that a kill has left; the record last."""
    files = recorded(place, info)
    return slots.unrecorded(os.listdir(place.path(info.slot))) + ([*(f.name.removeprefix(BESIDE) for f in files), _names.BESIDE_RECORD] if files else [])
