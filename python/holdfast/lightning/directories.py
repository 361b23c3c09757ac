"""Sharded checkpoints: written into a directory of another name, which takes its own when it is whole."""

from __future__ import annotations

import os
import secrets
import shutil

from holdfast import _dcp_directories, _names, _native
from holdfast._durable import replace_directory, sync_directory
from holdfast.errors import of_system

META = "meta.pt"
_ASIDE = "-old"


def _hidden(path: str) -> str:
    # Not the name itself: Lightning looks for parts of names, of a requeue's checkpoint for one.
    return _names.hidden(os.path.basename(path))


def unfinished(path: str) -> str:
    """A new name beside `path` for its directory until it is whole; removes those that a crash left.

    One that a crash has left without its name, before its successor had it, gets the name back.
    """
    directory, prefix = os.path.dirname(path), _hidden(path)
    if os.path.isdir(directory):
        for name in os.listdir(directory):
            if name.startswith(prefix) and name.endswith(_ASIDE) and not os.path.lexists(path):
                with of_system(f"bring {path} back"):
                    os.rename(os.path.join(directory, name), path)
            elif name.startswith(prefix):
                shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    return os.path.join(directory, f"{prefix}-{secrets.token_hex(8)}")


def commit(new: str, path: str) -> None:
    """Gives the directory `new`, which is whole and durable, the name `path`.

    What stands at `path` until then stays whole, and is removed afterwards.

    Raises:
        Error: of the system.
    """
    with of_system(f"complete {path}"):
        old = ""
        if os.path.lexists(path):
            old = replace_directory(new, path, _aside(path))
        else:
            os.rename(new, path)
        sync_directory(os.path.dirname(path))
        if os.path.isdir(old) and not os.path.islink(old):
            _remove_from(old, path)
        elif old:
            os.unlink(old)


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
