"""Sharded checkpoints: written into a directory of another name, which takes its own when it is whole.

A directory at that name that has anything beside a checkpoint stays, with all that is not the
checkpoint's: the files are moved into it, ``.metadata`` last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator

from holdfast import _dcp_directories, _names, _native
from holdfast._durable import locked, replace_directory, sync_directory
from holdfast._names import METADATA
from holdfast.errors import of_system
from holdfast.files import manifests_of

META = "meta.pt"
_ASIDE = "-old"
# A whole checkpoint on its way into a directory that stays: first the older one's files go there, then its own come.
_CLEARS, _MOVES = "-clears", "-moves"


def _hidden(path: str) -> str:
    # Not the name itself: Lightning looks for parts of names, of a requeue's checkpoint for one.
    return _names.hidden(os.path.basename(path))


def _hidden_within(path: str) -> str:
    return _names.hidden(os.path.join(os.path.basename(path), ""))


def _left(path: str) -> list[str]:
    """What saves of `path` have left under other names."""
    found = []
    for directory, prefix in ((os.path.dirname(path), _hidden(path)), (path, _hidden_within(path))):
        with contextlib.suppress(OSError):  # there is none, or it cannot be listed
            found += [os.path.join(directory, name) for name in os.listdir(directory) if name.startswith(prefix)]
    return found


def _own(path: str) -> list[str]:
    """The files of a sharded checkpoint in a directory, ours or the framework's."""
    beside_meta = {META, *map(os.path.basename, manifests_of(os.path.join(path, META)))}
    with os.scandir(path) as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return [
        name for name in files
        if name in beside_meta or _names.is_record_of_dcp(whole := _names.finished(name)) or _names.DCP_DATA.fullmatch(whole)
    ]  # fmt: skip


def _stays(path: str) -> bool:
    """Whether a directory stands there that is no checkpoint, or has something beside one."""
    if os.path.islink(path) or not os.path.isdir(path):
        return False
    own = set(_own(path))
    return METADATA not in own or own != set(os.listdir(path))


def unfinished(path: str) -> str:
    """A new name for the directory of `path` until it is whole; removes those that a crash left.

    One that a crash has left without its name, before its successor had it, gets the name back.
    """
    complete(path)
    for left in _left(path):
        if left.endswith(_ASIDE) and not os.path.lexists(path):
            with of_system(f"bring {path} back"):
                os.rename(left, path)
        elif not left.endswith((_CLEARS, _MOVES)):
            shutil.rmtree(left, ignore_errors=True)
    token = secrets.token_hex(8)
    if _stays(path):  # it may be a file system of its own
        return os.path.join(path, f"{_hidden_within(path)}-{token}")
    return os.path.join(os.path.dirname(path), f"{_hidden(path)}-{token}")


def complete(path: str) -> None:
    """Ends what a crash has left of a commit into a directory that stays.

    Raises:
        Error: of the system.
    """
    for left in _left(path):
        if left.endswith((_CLEARS, _MOVES)):
            with of_system(f"complete {path}"), _locked(left) as is_alone:
                if not is_alone or not os.path.isdir(left):
                    continue
                if not os.path.lexists(path) and left.endswith(_CLEARS):  # whole, and nothing stays any more
                    os.rename(left, path)
                    sync_directory(os.path.dirname(path))
                    continue
                with contextlib.suppress(FileExistsError):
                    os.mkdir(path)
                _move_into(left, path)


def commit(new: str, path: str) -> None:
    """Gives the directory `new`, which is whole and durable, the name `path`.

    What stands at `path` until then stays whole, and is removed afterwards. A directory that stays has no
    checkpoint after a crash in this, until `complete`.

    Raises:
        Error: of the system.
    """
    with of_system(f"complete {path}"):
        if _stays(path):
            with _locked(new):
                os.rename(new, new + _CLEARS)
                sync_directory(os.path.dirname(new))
                _move_into(new + _CLEARS, path)
            return
        old = ""
        if os.path.lexists(path):
            old = replace_directory(new, path, _aside(path))
        else:
            os.rename(new, path)
        sync_directory(os.path.dirname(path))
        if os.path.isdir(old) and not os.path.islink(old):
            for name in set(os.listdir(old)) - set(_own(old)):  # put there meanwhile
                os.rename(os.path.join(old, name), os.path.join(path, name))
            _remove_from(old, path)
        elif old:
            os.unlink(old)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[bool]:
    """Whether no other process moves this directory's files."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        yield locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _move_into(new: str, path: str) -> None:
    """Goes on with the move of a whole checkpoint, in the place of the one in the directory `path`."""
    if new.endswith(_CLEARS):
        for name in sorted(_own(path), key=lambda n: n != METADATA):
            os.unlink(os.path.join(path, name))
            if name == METADATA:
                sync_directory(path)
        sync_directory(path)
        moves = new.removesuffix(_CLEARS) + _MOVES
        os.rename(new, moves)
        sync_directory(os.path.dirname(new))
        new = moves
    for name in sorted(os.listdir(new), key=lambda n: n == METADATA):
        if name == METADATA:
            sync_directory(path)
        os.rename(os.path.join(new, name), os.path.join(path, name))
    sync_directory(path)
    os.rmdir(new)


def remove(path: str) -> None:
    """Removes a directory. Under its name it is whole, or not there.

    Raises:
        Error: of the system.
    """
    with of_system(f"remove {path}"):
        _remove_from(path, path)


def replace(path: str, new: str) -> None:
    """Gives the entry `new` the name of the directory at `path`, and removes that.

    Raises:
        Error: of the system.
    """
    with of_system(f"replace {path}"):
        _remove_from(replace_directory(new, path, _aside(path)), path)


def _aside(path: str) -> str:
    return os.path.join(os.path.dirname(path), f"{_hidden(path)}-{secrets.token_hex(8)}{_ASIDE}")


def _remove_from(here: str, path: str) -> None:
    """Removes the directory `here`, which has stood at `path`, under a name that `holdfast.recover` knows."""
    leaving = os.path.join(os.path.dirname(path), _names.retired(_hidden(path)[1:], _native.new_attempt()))
    os.rename(here, leaving)
    sync_directory(os.path.dirname(path))  # else a power loss may give a part its name back
    _dcp_directories.remove_tree(leaving)
