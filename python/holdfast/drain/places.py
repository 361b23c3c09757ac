"""Places that checkpoints are copied from and to: directories of file systems, and prefixes of object stores."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from holdfast import directories
from holdfast._dcp_directories import AGE
from holdfast.errors import Error

logger = logging.getLogger("holdfast")

# Before the name of a file that no manifest names: `File.name`, and the key in a store.
BESIDE = "beside/"
# No store has such names, and a terminal no place for them.
NO_NAME = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
Content = bytes
# A read returns bytes [begin, end) of one file. A view is of the thread's own memory, until it reads again.
Read = Callable[[int, int], bytes | memoryview]
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Those of the library without its own memory, which no other process sees.
_SCHEMES = ("file", "s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")
# A path of Windows, or a URL that lacks a slash: as a path it would make a directory of that name.
_NO_PATH = re.compile(rf"(?:[A-Za-z]:[\\/]|[A-Za-z][A-Za-z0-9+.-]*:/|(?:{'|'.join(_SCHEMES)}):)", re.IGNORECASE)
# What a URL's parser drops without a word, or cuts off: two runs would have one prefix.
_DROPPED = re.compile(r"[#\x00-\x1f\x7f]|^\s|\s/*$")
_KNOWN = "known are a path, file:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX and https://HOST/PATH (WebDAV)"


class Info(NamedTuple):
    """A complete checkpoint of a place.

    Attributes:
        slot: the directory or prefix that holds its files, below the place.
        record: name of its commit record; "" where none was made.
        The others are those of `list_checkpoints`; `format` is ``"holdfast"`` or ``"dcp"``.
    """

    name: str
    slot: str
    format: str
    step: int
    saved_at: float
    attempt: str
    parent: str
    world_size: int
    bytes: int
    record: str

    @property
    def key(self) -> tuple[str, str]:
        """Name and attempt: a copy under another name is a checkpoint of its own."""
        return self.name, self.attempt

    def listed(self, place: Place) -> dict[str, Any]:
        """The checkpoint as `list_checkpoints` has it, with its path in a place."""
        return {
            "name": self.name, "path": place.path(self.slot), "step": self.step, "saved_at": self.saved_at,
            "attempt": self.attempt, "parent": self.parent or None, "world_size": self.world_size,
            "bytes": self.bytes,
        }  # fmt: skip


age_of: Callable[[Info], tuple[float, int, str]] = operator.attrgetter(*AGE)


class File(NamedTuple):
    """A file of a checkpoint.

    Attributes:
        span: bytes under one digest; the last one ends with the file.
        digests: XXH3-128 of each span.
        content: of a small file that is in memory; None: it is read from its place.
    """

    name: str
    bytes: int
    span: int
    digests: tuple[str, ...]
    content: Content | None = None


class Seen(NamedTuple):
    """A directory that has to stay where it is: where its file system is mounted, and whether the directory was there."""

    mount: str
    was_there: bool = False

    @classmethod
    def of(cls, told: list[Any] | None) -> Seen | None:
        """As another process has told it, in JSON."""
        return None if told is None else cls(*told)


class Place(Protocol):
    """A directory or a prefix that holds checkpoints.

    Attributes:
        url: as the user wrote it.
        proves_arrival: whether the place compares a checksum of what arrives with one made by the sender.
        copies_at_once: whether `write` is done with what a read has returned before it reads again: views serve it.
    """

    url: str
    proves_arrival: bool
    copies_at_once: bool

    @property
    def is_gone(self) -> bool:
        """Whether the last look has found no directory any more, on the file system where it was."""

    @property
    def seen(self) -> Seen | None:
        """Of a directory of a drain: another process goes on from there."""

    def path(self, slot: str) -> str:
        """Path or URL of a slot. In a URL, %XX stands for a character that it cannot have."""

    def complete(self, format: str = "") -> tuple[list[Info], list[str]]:
        """The complete checkpoints, the oldest first, and "NAME: why" of those that are damaged, or that nothing proves.

        Args:
            format: of one format alone.

        Raises:
            Error: what reading says where none is complete and at least one cannot be read.
        """

    def signature(self, slot: str = "") -> object:
        """A value that differs once something may have changed, with a slot one of its files; None where only a listing says."""

    def opened(self, slot: str, name: str) -> AbstractContextManager[Read]:
        """Opens a file to read ranges of it."""

    def opened_past_cache(self, slot: str, name: str) -> AbstractContextManager[Read]:
        """As `opened`, past the page cache where that is possible: to compare what was written."""

    def read(self, slot: str, name: str, bytes_max: int) -> bytes:
        """Reads a file into memory; DATA_LOSS where it is larger than it may be."""

    def sizes(self, slot: str) -> dict[str, int]:
        """Lengths of the files in a slot; empty where there is none."""

    def beside(self, info: Info, names: Callable[[], set[str]], pace: Callable[[int], None]) -> tuple[list[File], list[str]]:
        """What a slot has beside the files of its checkpoint and those of other attempts: files, and names of what no copy takes.

        Args:
            names: returns those of the checkpoint's own files.
            pace: called before so many bytes are read.
        """

    def begin(self, info: Info, files: Iterable[str] = ()) -> str:
        """Returns the slot for a checkpoint that is about to arrive, with these files. No reader takes it for complete.

        Raises:
            Error: FAILED_PRECONDITION where the place cannot have such a name.
        """

    def let_go(self) -> None:
        """Holds no copy that has failed any longer: others may complete or remove it. `begin` takes it up again."""

    def late(self, info: Info) -> AbstractContextManager[Callable[[], None]]:
        """Lets `write` put files beside a complete checkpoint, and into no other one that gets its name meanwhile; gives what asks again.

        Raises:
            Error: ABORTED where another one has the name, also from what is given.
        """

    def write(self, slot: str, file: File, read: Read, is_resumed: bool) -> None:
        """Writes a file durably, in a slot of `begin` or `late`; `read` gives its proven bytes, `is_resumed`: a part may be there."""

    def settle(self, slot: str = "", name: str = "") -> None:
        """Makes durable what another process may have left in memory alone: the checkpoints' names, the names in a slot, or a file of it.

        Raises:
            Error: what is said of the file, which is removed: the system says once that it has lost a part, and then reads from memory.
        """

    def discard(self, slot: str, name: str) -> None:
        """Removes a file that cannot be read or made durable from a slot of `begin` or `late`. It is written anew."""

    def commit(self, slot: str, info: Info, last: File, files: set[str]) -> None:
        """Writes the last file and makes the checkpoint complete. Of its name it is the one that listings have from then on.

        Args:
            files: names of all its files. Others are removed from the slot, or count for nothing.
        """

    def remove_replaced(self, info: Info) -> None:
        """Removes older saves of a checkpoint's name, where it is complete."""

    def remove(self, info: Info) -> None:
        """Removes a complete checkpoint: first what makes it complete, durably, then the rest."""

    def clean(self, keep: set[str]) -> list[str]:
        """Removes what interrupted copies left long ago, and replaced attempts; returns the slots.

        Args:
            keep: attempts that may be on their way.
        """


def scheme_of(url: str) -> str:
    """The scheme of a URL; empty for a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else ""


def path_of(place: str) -> str | None:
    """The path of a directory, also of one that is written as ``file:///path``; None for other URLs.

    Raises:
        Error: INVALID_ARGUMENT.
    """
    scheme = scheme_of(place)
    if scheme == "file" and not place.startswith("/", len("file://")):
        raise Error("INVALID_ARGUMENT", f"open {place}: file:// is followed by an absolute path")
    return place if not scheme else place[len("file://") :] if scheme == "file" else None


def identity_of(place: str) -> str:
    """One text for all ways to write a place."""
    path = path_of(place)
    return place.rstrip("/") if path is None else os.path.realpath(path)


def mount_of(place: str) -> str | None:
    """Where the file system is mounted that a directory is on, or will be on once it is made; None for other places."""
    path = path_of(place)
    if path is None:
        return None
    path = os.path.realpath(path)
    mount = _mount_id(path)
    while path != "/" and (mount is None or _mount_id(os.path.dirname(path)) == mount):
        path = os.path.dirname(path)
        mount = mount or _mount_id(path)
    return path


def _mount_id(path: str) -> str | None:
    """A number of the mount, which differs for two mounts of one disk, too; None for a path that is not there, or cannot be opened."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as told:
            return next(line for line in told if line.startswith("mnt_id:"))
        return str(os.fstat(fd).st_dev)  # without /proc
    finally:
        os.close(fd)


def seen_now(place: str) -> Seen | None:
    """What a process that begins knows of a place: no more than where it is mounted."""
    mount = mount_of(place)
    return None if mount is None else Seen(mount)


def check_place(url: str) -> None:
    """Refuses what is neither a path nor a URL of a known store, a URL that would mean another one, and one with credentials: it stands in
    logs.

    Raises:
        Error: INVALID_ARGUMENT.
    """
    if not url:
        raise Error("INVALID_ARGUMENT", f"open {url!r}: an empty path; {_KNOWN}")
    text = url.lstrip()
    scheme = scheme_of(text)
    shown = directories.shown_url(text)
    if not scheme and _NO_PATH.match(text):
        raise Error("INVALID_ARGUMENT", f"open {shown}: this is no path of Linux and no URL; {_KNOWN}; a directory of that name is ./{shown}")
    if not scheme or scheme_of(url) == "file":
        return
    rest = text[len(scheme) + 3 :]
    user, at, _ = rest.rpartition("@")  # a password may have slashes
    if "?" in text or ":" in user or (at and scheme in ("http", "https")):
        raise Error("INVALID_ARGUMENT", f"open {scheme}://...: the URL has credentials, an @ or a query, and stands in logs; pass them "
                    "by Drain(storage={...}), --storage or the environment; in a name write %3F for a ? and %40 for an @")  # fmt: skip
    if scheme not in _SCHEMES:
        raise Error("INVALID_ARGUMENT", f"open {shown}: there is no store {scheme}://; {_KNOWN}")
    if _DROPPED.search(url):
        raise Error("INVALID_ARGUMENT", f"open {directories.shown_url(url)!r}: a # with what follows it, a control character or a blank at an end would be "
                    "dropped, and the URL name another place; write %23 for a #, or choose another prefix")  # fmt: skip
    if not rest.partition("/")[0]:
        raise Error("INVALID_ARGUMENT", f"open {shown}: the name of the bucket or host is missing behind {scheme}://; {_KNOWN}")


def check_apart(source: str, target: str) -> None:
    """Refuses one place twice, and checkpoints in the place of directories of checkpoints.

    Raises:
        Error: INVALID_ARGUMENT, FAILED_PRECONDITION for a checkpoint.
    """
    paths = [path_of(place) for place in (source, target)]
    is_one = identity_of(source) == identity_of(target)
    if is_one or (all(path and os.path.exists(path) for path in paths) and os.path.samefile(*paths)):  # type: ignore[arg-type]
        raise Error("INVALID_ARGUMENT", f"drain {source} to {target}: they are one place; choose another")
    for path in filter(None, paths):
        directories.check_is_no_checkpoint(path, f"drain {source} to {target}")


def open_place(url: str, storage: dict[str, Any] | None = None, seen: Seen | None = None) -> Place:
    """Opens a directory or a URL; nothing is read yet.

    Args:
        url: a path, ``file:///path``, or what `obstore.store.from_url` takes.
        storage: further options of the store: credentials, region, endpoint, client and retry options.
        seen: of a directory of a drain, `seen_now` or what another process has seen: it has to stay where it is.

    Raises:
        Error: INVALID_ARGUMENT, UNIMPLEMENTED where obstore is missing.
    """
    check_place(url)
    path = path_of(url)
    if path is not None:
        from holdfast.drain.file_system import Directory

        return Directory(path, seen)
    from holdfast.drain.object_store import Store

    return Store(url, storage or {})


def pieces(file: File, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file that begin and end with digests' spans."""
    size = max(1, piece_bytes // max(1, file.span)) * max(1, file.span)
    for begin in range(0, file.bytes, size):
        yield begin, min(file.bytes, begin + size)


def warn_of_one_file_system(directory: str, target: str) -> None:
    """Says so where a directory and its second place are lost together."""
    path = path_of(target)
    if path is not None and _device_of(os.path.abspath(directory)) == _device_of(os.path.abspath(path)):
        logger.warning("drain %s to %s: both are on one file system, and are lost together; if another was meant to be mounted "
                       "there, mount it", directory, path)  # fmt: skip


def _device_of(path: str) -> int:
    """The file system that a directory is on, or will be."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev
