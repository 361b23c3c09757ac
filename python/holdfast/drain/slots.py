"""The directory of one checkpoint in a place: what its entries are by their names, and how it is removed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable

from holdfast import _durable, _names
from holdfast.drain.places import BESIDE

# Made first and removed last: without a mark a recovery takes the directory for a user's own (FORMAT.md, section 1).
MARK = _names.RECORD + _names.UNFINISHED


def is_of_save(name: str) -> bool:
    return _names.is_record(name) and name != _names.METADATA


def is_foreign(name: str) -> bool:
    """Whether a file may be of no checkpoint: by its name it is of none, and is not being written."""
    return not _names.is_reserved(name) and not _names.format_of(name) and not _names.DCP_ANY_DATA.fullmatch(name)


def unrecorded(names: Iterable[str]) -> list[str]:
    """Of the names in a directory those that a drain has put beside the checkpoint, or begun to, without the record of them."""
    marks = sorted(filter(_names.is_unfinished_beside, names))
    return [*(n for n in names if _names.unfinished_beside(BESIDE + n) in marks), *marks]


def _removed_in_turn(name: str) -> int:
    """A list goes behind the files that it names: it tells them from a user's own, after a crash, too."""
    if name == _names.BESIDE_RECORD or _names.is_unfinished_beside(name):
        return 1
    if _names.is_commit_record(_names.finished(name)):
        return 4 if name == MARK else 3
    return 2 if name.endswith(_names.MANIFEST_END) else 0


def remove_unnamed(path: str) -> bool:
    """Removes what has no name, or no longer; false where something stays, or another process uses it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The other process may have given it the name in between.
        if not _durable.locked(fd, fcntl.LOCK_EX) or not os.path.samestat(os.fstat(fd), os.stat(path)):
            return False
        for name in sorted(os.listdir(path), key=_removed_in_turn):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
