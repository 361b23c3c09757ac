"""Checkpoints at URLs: written to a local spool, proven there, then copied by ``fsspec``."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast import _runtime
from holdfast.errors import Error, of_system
from holdfast.lightning import files
from holdfast.lightning.following import Following

_COPY_BYTES = 16 << 20


def _file_system(operation: str, url: str, options: Any) -> tuple[Any, str]:
    """The file system of a URL, and the path there.

    Raises:
        Error: INVALID_ARGUMENT, `fsspec` has none for the URL, or not with these options.
    """
    import fsspec  # type: ignore[import-untyped]

    if options is not None and not isinstance(options, Mapping):
        what = f"storage_options = {options!r}: a dict is expected"
        raise Error("INVALID_ARGUMENT", f"{operation} {url}: {what}")
    try:
        # An object of this use's own: a transaction is a state of it.
        return fsspec.core.url_to_fs(url, skip_instance_cache=True, **(options or {}))
    except (ValueError, TypeError, ImportError) as error:
        raise Error("INVALID_ARGUMENT", f"{operation} {url}: fsspec has no file system for it: {error}") from error


@contextlib.contextmanager
def _use_of(there: Any, operation: str, url: str) -> Iterator[None]:
    """Raises what a file system refuses inside as an `Error`."""
    try:
        yield
    except NotImplementedError as error:
        raise Error("UNIMPLEMENTED", f"{operation} {url}: fsspec's {type(there).__name__} only reads; choose another URL") from error
    except Exception as error:
        raise Error("UNAVAILABLE", f"{operation} {url}: {error!r}") from error


def save(checkpoint: Any, url: str, options: Mapping[str, Any] | None,
         spool: str | os.PathLike[str] | None, runtime: _runtime.Runtime | None) -> Following:  # fmt: skip
    """Begins to save an object to a URL; returns the handle."""
    there, path = _file_system("save", url, options)
    with of_system(f"save {url}: make a directory in the spool {spool or tempfile.gettempdir()}"):
        if spool is not None:
            os.makedirs(spool, exist_ok=True)
        directory = tempfile.mkdtemp(prefix="holdfast-", dir=spool)
    local = os.path.join(directory, "checkpoint")
    clean = functools.partial(shutil.rmtree, directory, ignore_errors=True)
    try:
        begun = files.save(checkpoint, local, runtime)
    except BaseException:
        clean()
        raise
    return Following(url, begun.staged, begun.wait, functools.partial(_copy, local, there, path, url), clean, runtime)


def _copy(local: str, there: Any, path: str, url: str) -> None:
    # Where the file system has transactions, the file appears whole at their end.
    with _use_of(there, "save", url):
        with contextlib.suppress(FileExistsError, NotImplementedError):  # a store without directories
            there.makedirs(os.path.dirname(path), exist_ok=True)
        with there.transaction, open(local, "rb") as source, there.open(path, "wb") as target:
            shutil.copyfileobj(source, target, _COPY_BYTES)


def remove(url: str, options: Mapping[str, Any] | None) -> None:
    """Removes the file at a URL. One that is gone is no error."""
    there, path = _file_system("remove", url, options)
    with _use_of(there, "remove", url), contextlib.suppress(FileNotFoundError):
        there.rm(path, recursive=True)
