"""Checkpoints of one file, or of a directory, on a local file system: saved, linked and removed."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

from holdfast import _runtime
from holdfast._durable import make_directory_of, sync_directory
from holdfast.errors import of_system
from holdfast.files import manifests_of, remove_file, save_file
from holdfast.lightning import directories
from holdfast.lightning.following import Following

# Lightning takes all digits of any name with this in it for a version, those of a manifest's as well.
_REQUEUE = "hpc_ckpt_"
# Where such a checkpoint stands; a link has its name.
_REQUEUED = "holdfast-requeue"


def save(checkpoint: Any, path: str, runtime: _runtime.Runtime | None) -> Any:
    """Begins to save an object as one file of ``torch.save``; returns the handle.

    The directories above are there when it returns.
    """
    directory, name = os.path.split(path)
    make_directory_of(path)
    if _REQUEUE in name:
        at = os.path.join(directory, _REQUEUED, name.replace(_REQUEUE, ""))
        begun = save(checkpoint, at, runtime)
        return Following(path, begun.staged, begun.wait, lambda: link(path, at), lambda: None, runtime)
    if os.path.islink(path):
        _own(path)
    step = checkpoint.get("global_step") if isinstance(checkpoint, dict) else None
    return save_file(checkpoint, path, step=step if isinstance(step, int) else 0, runtime=runtime)


def _own(path: str) -> None:
    """Puts the file that a link leads to in the place of the link: a save follows links."""
    new = _beside(path)
    with of_system(f"replace the link {path}"):
        try:
            os.link(os.path.realpath(path), new)
            os.replace(new, path)
        except OSError:  # it leads nowhere, or there are no hard links
            os.unlink(path)


def _remove_manifests(path: str) -> None:
    for manifest in manifests_of(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(manifest)


def _beside(path: str) -> str:
    """A name beside `path` for what is on its way there."""
    return os.path.join(os.path.dirname(path), f".holdfast-{secrets.token_hex(8)}")


def link(path: str, target: str) -> None:
    """Puts a relative link to `target` at `path`, in the place of what stands there, by one rename.

    Raises:
        Error: of the system; NOT_FOUND where there is no `target`.
    """
    if os.path.abspath(path) == os.path.abspath(target):
        return
    directory = os.path.dirname(path)
    new = _beside(path)
    with of_system(f"link {path} to {target}"):
        os.stat(target)
        os.symlink(os.path.relpath(target, directory), new)
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                directories.replace(path, new)
            else:
                if not os.path.islink(path):
                    _remove_manifests(path)
                os.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        sync_directory(directory)


def target_of(path: str) -> str:
    """Where the link at `path` leads, in one step; "" if there is none."""
    directory = os.path.dirname(path)
    with contextlib.suppress(OSError):
        return os.path.normpath(os.path.join(directory, os.readlink(path)))
    return ""


def links_to(path: str) -> str:
    """The path of a link in the same directory that leads to `path`; "" if there is none."""
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for entry in entries:
            if entry.is_symlink() and target_of(entry.path) == path:
                return entry.path
    return ""


def remove(path: str) -> None:
    """Removes a checkpoint, with what stands beside a file to prove it. One that is gone is no error.

    Raises:
        Error: of the system.
    """
    with of_system(f"remove {path}"):
        if os.path.isdir(path) and not os.path.islink(path):
            directories.remove(path)
            return
    remove_file(path)
