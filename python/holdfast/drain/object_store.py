"""A prefix of an object store as a place, by `obstore`: S3, Google Cloud Storage, Azure, HTTP with WebDAV, memory.

A checkpoint has the prefix ``NAME.attempt-<attempt>/``: a store has no rename, and two processes that send attempts of one name
must not meet. The commit record is put last, behind DCP's ``.metadata``; what commits, both of them, is deleted first.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import logging
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from holdfast import _regular
from holdfast._names import BESIDE_RECORD, DCP_RECORD, MANIFEST_END, METADATA, RECORD
from holdfast._packages import is_installed
from holdfast.drain.beside import record_of, recorded
from holdfast.drain.contents import contents_of, info_of, parse
from holdfast.drain.places import BESIDE, NO_NAME, File, Info, Read, age_of, pieces, scheme_of
from holdfast.errors import Error

logger = logging.getLogger("holdfast")

_AT_ONCE = 8  # parts of one file, and small objects
_PART_BYTES = 16 << 20
_PARTS_MAX = 9000  # S3 takes 10,000
# Of a name what a URL has for other things, or what `check_place` refuses.
_ESCAPED = re.compile(r"[%?#@\s\x00-\x1f\x7f]")
_SLOT = re.compile(r"(.+)\.attempt-([0-9a-f]{32})")
_AGE_OF_LEFTOVERS = 86400.0
# No checkpoint has such a name.
_NOTHING = ".holdfast-nothing"


class _Object(NamedTuple):
    bytes: int
    changed: datetime.datetime
    tag: str


def find_library() -> None:
    """Looks for `obstore`, without importing it.

    Raises:
        Error: UNIMPLEMENTED where it is missing.
    """
    if not is_installed("obstore"):
        raise Error("UNIMPLEMENTED", "drain: obstore is not installed; pip install 'obstore>=0.8'")


def load_library() -> Any:
    """The module `obstore`.

    Raises:
        Error: UNIMPLEMENTED where it is missing.
    """
    find_library()
    import obstore
    import obstore.exceptions
    import obstore.store

    return obstore


class Store:
    """A prefix of an object store."""

    seen = None
    is_gone = False

    def __init__(self, url: str, storage: dict[str, Any]) -> None:
        self.url = url.rstrip("/")
        self._library = load_library()
        self._known: dict[tuple[str, _Object], dict[str, Any]] = {}  # commit records that were read
        self._judged: dict[str, tuple[object, Info | str]] = {}  # by slot: the objects that were compared, and the verdict
        scheme = scheme_of(url)
        of_s3 = scheme in ("s3", "s3a")
        # S3 compares the checksum of each part before it answers.
        self.proves_arrival = of_s3 and str(storage.get("checksum_algorithm", "SHA256")) != "None"
        self.copies_at_once = False  # the library sends what it was given later
        options = {**({"checksum_algorithm": "SHA256"} if of_s3 else {}), **storage}
        keys = ("endpoint", "aws_endpoint", "endpoint_url", "aws_endpoint_url")
        endpoints = [*(options.get(k) for k in keys), *(os.environ.get(k.upper()) for k in keys if of_s3)]
        if not isinstance(options.get("client_options", {}), dict):
            raise Error("INVALID_ARGUMENT", f"open {url}: client_options is no dict (of the command: no JSON object)")
        if scheme == "http" or any(str(e).startswith("http://") for e in endpoints):
            options["client_options"] = {"allow_http": True, **options.get("client_options", {})}
        try:
            self._store = self._library.store.from_url(self.url, **options)
        except (self._library.exceptions.BaseError, TypeError, ValueError) as error:
            raise Error("INVALID_ARGUMENT", f"open {url}: {_reason(error)}") from error
        # WebDAV has no uploads in parts, and collections that stay when they are empty.
        self._of_webdav = type(self._store).__name__ == "HTTPStore"
        self._prefix = ""
        if self._of_webdav:
            # From the root: listings have all of a path, and the library makes the collections that are missing.
            parts = urllib.parse.urlsplit(self.url)
            self._prefix = urllib.parse.unquote(parts.path).strip("/") + "/" if parts.path.strip("/") else ""
            self._store = self._library.store.from_url(f"{parts.scheme}://{parts.netloc}", **options)

    def path(self, slot: str) -> str:
        return f"{self.url}/{_ESCAPED.sub(lambda found: urllib.parse.quote(found[0]), slot)}"

    @contextlib.contextmanager
    def _call(self, operation: str, slot: str, name: str = "") -> Iterator[None]:
        """Raises what the library raises as an `Error`."""
        try:
            yield
        except Error:
            raise
        except Exception as error:
            where = (self.path(slot) if slot else self.url) + (f"/{name}" if name else "")
            code = _code_of(error, self._library.exceptions)
            status = _STATUS.search(str(error))
            if self._of_webdav and status and status[1] in _REFUSED_BY_WEBDAV.get(operation, ()):
                # Two files may make one collection at the same time: the next try finds it.
                code = code if status[1] == "403" or "MKCOL" in str(error) else "UNIMPLEMENTED"
                raise Error(code, f"{operation} {where}: {_reason(error)}; a drain needs a server that does this part of WebDAV: "
                            f"{_NEEDED_OF_WEBDAV[operation]}, or choose another store") from error  # fmt: skip
            hint = _MAKE_BUCKET if code == "NOT_FOUND" and operation == "list" else _HINTS.get(code, "")
            raise Error(code, f"{operation} {where}: {_reason(error)}{hint}") from error

    # ---- Reading.

    def _objects(self, prefix: str = "") -> dict[str, dict[str, _Object]]:
        """The objects by slot and name."""
        found: dict[str, dict[str, _Object]] = {}
        with self._call("list", prefix):
            for batch in self._library.list(self._store, self._prefix + prefix or None):
                for meta in batch:
                    slot, _, name = meta["path"].removeprefix(self._prefix).partition("/")
                    if name:
                        found.setdefault(slot, {})[name] = _Object(meta["size"], meta["last_modified"], meta["e_tag"] or "")
        return found

    def _looked(self) -> dict[str, tuple[dict[str, _Object], Info | str | None]]:
        """The slots of one listing: their objects, and what `_look` says."""
        objects = self._objects()
        if not objects and not self._of_webdav:  # whose answers say what they are
            self._check_is_store()
        with ThreadPoolExecutor(_AT_ONCE, "holdfast-drain") as pool:
            looked = list(pool.map(lambda item: self._look(*item), objects.items()))
        self._judged = {slot: judged for slot, judged in self._judged.items() if slot in objects}
        self._known = {key: record for key, record in self._known.items() if key[0].partition("/")[0] in objects}
        return {slot: (objects[slot], found) for slot, found in zip(objects, looked, strict=True)}

    def _check_is_store(self) -> None:
        """The library takes any page for an empty listing: with one of a proxy or a console a run would begin anew.

        Raises:
            Error: UNAVAILABLE where a server has what cannot be there.
        """
        said = "it is there"
        try:
            with self._call("look for", "", _NOTHING):
                self._library.head(self._store, f"{self._prefix}{_NOTHING}")
        except Error as error:
            if error.code in ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED"):
                return
            said = error.message
        raise Error("UNAVAILABLE", f"list {self.url}: an answer without an object, and of one that cannot be there the server says: {said}; "
                    "is the endpoint that of the store's interface, not of its console or of a proxy?")  # fmt: skip

    def complete(self, format: str = "") -> tuple[list[Info], list[str]]:
        looked = [found for _, found in self._looked().values()]
        found = [info for info in _latest(looked).values() if format in ("", info.format)]
        return sorted(found, key=age_of), [text for text in looked if isinstance(text, str)]

    def signature(self, slot: str = "") -> object:
        return None

    def _look(self, slot: str, objects: dict[str, _Object]) -> Info | str | None:
        """The checkpoint of a prefix, or why it is none, or None for a prefix of something else."""
        called, attempt = _parts(slot)
        names = _committing(objects)
        if not called or not names:
            return None
        try:
            for name in names:
                record = self._record(slot, name, objects[name])
                info = info_of(record, called, slot, name)
                if (info.format == "dcp") == (name == RECORD) or (attempt or info.attempt) != info.attempt:
                    return f"{slot}: {name} is not of this checkpoint"
                commit = record.get("commit_file")
                if commit and objects[METADATA].bytes != commit["bytes"]:
                    continue  # of another attempt
                sizes = {n: o.bytes for n, o in objects.items()}
                return info if _is_whole(info, sizes) else self._compared(info, sizes)
        except Error as error:
            if error.code not in ("DATA_LOSS", "NOT_FOUND"):
                raise
            return f"{slot}: {error.message}"
        return None

    def _compared(self, info: Info, sizes: dict[str, int]) -> Info | str:
        """As `_look`, by the manifests: other objects are in the prefix, or some are missing."""
        of = (info, frozenset(sizes.items()))
        if self._judged.get(info.slot, (None,))[0] != of:
            contents = contents_of(self, info)
            wrong = [f.name for f in (*contents.data, *contents.manifests, *contents.proofs) if sizes.get(f.name) != f.bytes]
            self._judged[info.slot] = of, f"{info.slot}: {min(wrong)} is missing, or has another length" if wrong else info
        return self._judged[info.slot][1]

    def _record(self, slot: str, name: str, meta: _Object) -> dict[str, Any]:
        key = (f"{slot}/{name}", meta)
        if key not in self._known:
            self._known[key] = parse(self.read(slot, name, _regular.RECORD_BYTES_MAX), f"{self.path(slot)}/{name}")
        return self._known[key]

    @contextlib.contextmanager
    def opened(self, slot: str, name: str) -> Iterator[Read]:
        def read(begin: int, end: int) -> bytes:
            if begin == end:
                return b""
            with self._call("read", slot, name):
                return bytes(self._library.get_range(self._store, self._key(slot, name), start=begin, end=end))

        yield read

    opened_past_cache = opened

    def read(self, slot: str, name: str, bytes_max: int) -> bytes:
        with self._call("read", slot, name):
            found = self._library.get(self._store, self._key(slot, name))
            if found.meta["size"] > bytes_max:
                raise _regular.too_large(f"read {self.path(slot)}/{name}", found.meta["size"], bytes_max)
            return bytes(found.bytes())

    def sizes(self, slot: str) -> dict[str, int]:
        return {name: o.bytes for name, o in self._objects(f"{slot}/").get(slot, {}).items()}

    def beside(self, info: Info, names: Callable[[], set[str]], pace: Callable[[int], None]) -> tuple[list[File], list[str]]:
        try:
            return recorded(self, info), []  # other objects are a user's own
        except Error as error:
            if error.code != "DATA_LOSS":
                raise
            return [], sorted(self.sizes(info.slot).keys() - names())  # nothing proves them

    # ---- Writing.

    def begin(self, info: Info, files: Iterable[str] = ()) -> str:
        for name in (info.name, *files):
            if NO_NAME.search(name):
                of = "" if name == info.name else f", file {name!r}"
                raise Error("FAILED_PRECONDITION", f"drain {info.name!r}{of}: a store has no names with control characters, or that are not "
                            "UTF-8; save under another name, or drain to a directory")  # fmt: skip
        return f"{info.name}.attempt-{info.attempt}"

    def let_go(self) -> None:
        pass

    def late(self, info: Info) -> contextlib.AbstractContextManager[Callable[[], None]]:
        return contextlib.nullcontext(lambda: None)  # a slot is of one attempt

    def write(self, slot: str, file: File, read: Read, is_resumed: bool) -> None:
        part = max(_PART_BYTES, -(-file.bytes // _PARTS_MAX))
        failed: list[builtins.BaseException] = []

        def stream() -> Iterator[bytes]:
            for begin, end in pieces(file, _PART_BYTES):
                try:
                    piece = bytes(read(begin, end))  # no copy of what is bytes
                except BaseException as error:  # the library would hide it behind its own
                    failed.append(error)
                    raise
                yield piece  # the library ends here where a request has failed

        try:
            with self._call("write", slot, file.name):
                if not self._of_webdav and file.bytes > part:
                    self._library.put(self._store, self._key(slot, file.name), stream(), chunk_size=part, use_multipart=True,
                                      max_concurrency=_AT_ONCE)  # fmt: skip
                else:
                    whole = read(0, file.bytes)
                    self._library.put(self._store, self._key(slot, file.name), whole, use_multipart=False)
        except Error:
            if failed:
                raise failed[0] from None
            raise

    def settle(self, slot: str = "", name: str = "") -> None:
        pass  # what a store has it has made durable

    def discard(self, slot: str, name: str) -> None:
        pass  # it is replaced as it is written

    def _write_small(self, slot: str, file: File) -> None:
        content = file.content
        assert content is not None
        self.write(slot, file, lambda begin, end: content[begin:end], False)

    def commit(self, slot: str, info: Info, last: File, files: set[str]) -> None:
        # Files that an interrupted copy has left beside the checkpoint count for nothing and go with it: a place may let nothing be deleted.
        is_left = BESIDE_RECORD not in files and BESIDE_RECORD in self.sizes(slot)
        for file in ([record_of(info, [])] if is_left else []) + [last]:
            self._write_small(slot, file)

    def remove_replaced(self, info: Info) -> None:
        with self._call("list", ""):
            found = self._library.list_with_delimiter(self._store, self._prefix or None)["common_prefixes"]
        slots = [p.strip("/").removeprefix(self._prefix) for p in found]
        others = [self._look_at(slot) for slot in slots if slot != info.slot and _parts(slot)[0] == info.name]
        older = [other for other in others if isinstance(other, Info) and _order(other) < _order(info)]
        if older and isinstance(self._look_at(info.slot), Info):  # a store may confirm a write, and lose it
            for other in older:
                self.remove(other)

    def _look_at(self, slot: str) -> Info | str | None:
        return self._look(slot, self._objects(f"{slot}/").get(slot, {}))

    def remove(self, info: Info) -> None:
        names = self.sizes(info.slot)
        if not _is_whole(info, names):
            foreign = {n for n in names if not _is_beside(n)} - contents_of(self, info).names() - {BESIDE_RECORD}
            if foreign:
                raise Error("FAILED_PRECONDITION", f"remove {self.path(info.slot)}: {min(foreign)} is no file of the checkpoint; move it elsewhere")
        commits = METADATA if info.format == "dcp" else info.record
        for first in (commits, info.record):  # from here on no reader finds it
            if first in names:
                self._delete(info.slot, [first])
                del names[first]
        self._delete(info.slot, list(names))
        self._delete_collection(info.slot)

    def _key(self, slot: str, name: str) -> str:
        return f"{self._prefix}{slot}/{name}"

    def _delete(self, slot: str, names: list[str]) -> None:
        for begin in range(0, len(names), 1000):
            with self._call("delete", slot):
                self._library.delete(self._store, [self._key(slot, name) for name in names[begin : begin + 1000]])

    def _delete_collection(self, slot: str) -> None:
        """Removes what WebDAV leaves of a prefix, where nothing is in it. Some servers refuse that; no reader sees what stays."""
        if self._of_webdav:
            try:
                with self._call("delete", slot):
                    if not any(self._library.list(self._store, f"{self._prefix}{slot}/")):
                        self._library.delete(self._store, f"{self._prefix}{slot}")
            except Error as error:
                logger.debug("an empty collection stays: %s", error)

    def clean(self, keep: set[str]) -> list[str]:
        removed = []
        # One listing: of two, the second may have a checkpoint that another process has committed after the first.
        looked = self._looked()
        latest = _latest(found for _, found in looked.values())
        # By the clock of the store, where that of this node is ahead: another node may be sending.
        changes = [o.changed.timestamp() for objects, _ in looked.values() for o in objects.values()]
        limit = min(time.time(), max(changes, default=0.0)) - _AGE_OF_LEFTOVERS
        for slot, (objects, found) in looked.items():
            attempt = _parts(slot)[1]
            if not attempt:
                continue
            if isinstance(found, Info):
                if latest[found.name].attempt != found.attempt:  # an older attempt, whose removal was interrupted
                    self.remove(found)
                    removed.append(slot)
            # What commits comes last and goes first: with it there, something else has happened, and a part may be of use.
            elif attempt not in keep and not _committing(objects) and all("/" not in n or _is_beside(n) for n in objects) \
                    and all(o.changed.timestamp() < limit for o in objects.values()) \
                    and objects == self._objects(f"{slot}/").get(slot):  # fmt: skip  # or its copy goes on
                self._delete(slot, list(objects))
                self._delete_collection(slot)
                removed.append(slot)
        return removed


def _parts(slot: str) -> tuple[str, str]:
    """Name and attempt of a prefix, as `Store.begin` makes it. One that another program has copied has no attempt; its name is empty
    where it begins with a point: among the directories of a run such a one may be on its way to be removed."""
    match = _SLOT.fullmatch(slot)
    return (match[1], match[2]) if match else ("" if slot.startswith(".") else slot, "")


def _committing(names: Iterable[str]) -> list[str]:
    """The commit records among the objects of a slot: those of DCP where its metadata is there, too."""
    names = set(names)
    return [n for n in names if n == RECORD or (DCP_RECORD.fullmatch(n) and METADATA in names)]


def _is_whole(info: Info, sizes: dict[str, int]) -> bool:
    """Whether a slot has as many manifests and bytes of data as the record says, and so nothing else."""
    proofs = {info.record, BESIDE_RECORD, *([METADATA] if info.format == "dcp" else [])}
    own = {n: nbytes for n, nbytes in sizes.items() if n not in proofs and not _is_beside(n)}
    manifests = [n for n in own if n.endswith(MANIFEST_END)]
    stored = sum(nbytes for n, nbytes in own.items() if n not in manifests)
    # An empty object may be of anybody.
    return len(manifests) == info.world_size and stored == info.bytes and 0 not in own.values()


def _is_beside(name: str) -> bool:
    return name.startswith(BESIDE) and "/" not in name.removeprefix(BESIDE)


def _order(info: Info) -> tuple[Any, ...]:
    """Of two attempts of one name the greater one counts, for all processes alike."""
    return (*age_of(info), info.attempt)


def _latest(looked: Iterable[Info | str | None]) -> dict[str, Info]:
    """The checkpoints by name. Of two attempts the later one: the removal of the other was interrupted."""
    return {info.name: info for info in sorted((i for i in looked if isinstance(i, Info)), key=_order)}


# In the library's text of an HTTP error: status, and what S3 says in XML.
_STATUS = re.compile(r"status code: (\d{3}) ?([^:<\n]*)")
_SAID = re.compile(r"<Code>([^<]*)</Code>\s*(?:<Message>([^<]*)</Message>)?")
_CREDENTIALS = "; credentials come from the environment, from storage=, or from --storage-file"
_HINTS = {
    "PERMISSION_DENIED": _CREDENTIALS,
    "UNAUTHENTICATED": _CREDENTIALS,
    "UNAVAILABLE": "; look at the endpoint, and at its server",
}
_MAKE_BUCKET = "; make the bucket, or choose another place"
_CODE_OF_STATUS = {"401": "UNAUTHENTICATED", "403": "PERMISSION_DENIED", "404": "NOT_FOUND", "507": "RESOURCE_EXHAUSTED"}


# What servers that do a part of WebDAV, or none, answer.
_REFUSED_BY_WEBDAV = {"list": ("403", "405", "501"), "write": ("405", "501"), "delete": ("405", "501")}
_NEEDED_OF_WEBDAV = {
    "list": "let it answer PROPFIND with `Depth: infinity` (Apache: `DavDepthInfinity on`; nginx: the dav-ext module)",
    "write": "let it take PUT and MKCOL",
    "delete": "let it take DELETE",
}


def _code_of(error: Exception, exceptions: Any) -> str:
    for kind, code in (
        (exceptions.NotFoundError, "NOT_FOUND"),
        (FileNotFoundError, "NOT_FOUND"),
        (exceptions.PermissionDeniedError, "PERMISSION_DENIED"),
        (exceptions.UnauthenticatedError, "UNAUTHENTICATED"),
        (exceptions.InvalidPathError, "INVALID_ARGUMENT"),
        (exceptions.UnknownConfigurationKeyError, "INVALID_ARGUMENT"),
        (exceptions.NotSupportedError, "UNIMPLEMENTED"),
    ):
        if isinstance(error, kind):
            return code
    status = _STATUS.search(str(error))
    return _CODE_OF_STATUS.get(status[1] if status else "", "UNAVAILABLE")


def _reason(error: Exception) -> str:
    """What the server says, or the first paragraph of the library's text: behind it stand its own structures."""
    text = str(error).partition("\n\nDebug source")[0]
    status, said = _STATUS.search(text), _SAID.search(text)
    if status:
        text = f"HTTP status {status[1]} {status[2].strip()}" + (f": {': '.join(filter(None, said.groups()))}" if said else "")
    return re.sub(r"\s+", " ", text).strip()[:500]
