"""What a checkpoint consists of: by its commit record the manifests, by these the files and their digests.

Each step is proven by the one before (runtime/layout/FORMAT.md, sections 3 and 5).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, NamedTuple

from holdfast import _names, _native
from holdfast._dcp_directories import series_of
from holdfast._names import METADATA, RECORD
from holdfast._regular import MANIFEST_BYTES_MAX, RECORD_BYTES_MAX, digest
from holdfast.drain.places import File, Info, Place, Read
from holdfast.errors import Error, of_damage

# The latest that are known, of records and manifests with a self-digest.
VERSIONS = {"holdfast.commit": 1, "holdfast.manifest": 4}
_NO_ATTEMPT = "0" * 32
# A record ends with the digits of its self-digest and these bytes.
_END = b'"}\n'
_TAIL = 32 + len(_END)
_NAME_MAX = 255
_DIGITS = re.compile(r"[0-9a-f]{32}")


class Contents(NamedTuple):
    """The files of a checkpoint, in the order in which they are sent.

    Attributes:
        data: the large ones.
        manifests: of all ranks.
        proofs: a framework's commit file, and the commit record. The record is the last: every listing compares its self-digest, so
            that it needs no other proof of its arrival.
    """

    data: list[File]
    manifests: list[File]
    proofs: list[File]

    def names(self) -> set[str]:
        return {f.name for f in (*self.data, *self.manifests, *self.proofs)}


def parse(text: bytes, what: str) -> dict[str, Any]:
    """A record or manifest whose self-digest is right.

    Raises:
        Error: DATA_LOSS.
    """
    if text[-3:] != _END or digest(text[: -_TAIL]).encode() != text[-_TAIL : -len(_END)]:
        raise Error("DATA_LOSS", f"read {what}: its self-digest does not match its text")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Error("DATA_LOSS", f"read {what}: {error}") from error


def sealed(document: dict[str, Any]) -> bytes:
    """The text of a record, with its self-digest."""
    text = json.dumps(document, separators=(",", ":"))[:-1].encode() + b',\n"self_digest":"'
    return text + digest(text).encode() + _END


def info_of(record: dict[str, Any], name: str, slot: str, record_name: str) -> Info:
    """What a commit record says of the checkpoint that has a name in its place.

    Raises:
        Error: DATA_LOSS. The digests of a record prove no intention: its names and sizes are checked before they are used.
    """
    where = f"read {slot}/{record_name}"
    with of_damage(where):
        rows, commit = record["manifests"], record.get("commit_file")
        texts = [record["attempt"], record["parent"], *(row["digest"] for row in rows)]
        numbers = [record["step"], record["saved_at_ns"], record["bytes"], *(row["bytes"] for row in rows)]
        if commit is not None:
            texts.append(commit["digest"])
            numbers.append(commit["bytes"])
        is_right = all(_DIGITS.fullmatch(text) for text in texts) and all(map(_is_whole, numbers)) \
            and 0 < len(rows) == record["world_size"] and (commit is None or commit["name"] == METADATA)
        info = Info(
            name, slot, "holdfast" if commit is None else "dcp", record["step"], record["saved_at_ns"] / 1e9, record["attempt"],
            record["parent"] if record["parent"] != _NO_ATTEMPT else "", len(rows), record["bytes"], record_name,
        )  # fmt: skip
    if not is_right:
        raise Error("DATA_LOSS", f"{where}: a field has a value that none can have")
    return info


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def manifest_name(info: Info, rank: int) -> str:
    """Name of a rank's manifest."""
    return _names.manifest(rank, info.world_size, info.attempt if info.format == "dcp" else "")


def contents_of(place: Place, info: Info, pool: Executor | None = None) -> Contents:
    """Reads the records of a checkpoint.

    Raises:
        Error: DATA_LOSS where one of them is not what the one before says; what the place says.
    """
    run: Callable[..., Iterable[Any]] = pool.map if pool else map
    limits = [MANIFEST_BYTES_MAX] * info.world_size
    if info.record:
        text = place.read(info.slot, info.record, RECORD_BYTES_MAX)
        record = parse(text, f"{place.path(info.slot)}/{info.record}")
        if info_of(record, info.name, info.slot, info.record).attempt != info.attempt:
            raise Error("ABORTED", f"read {place.path(info.slot)}: another save has replaced it")
        limits = [min(row["bytes"], MANIFEST_BYTES_MAX) for row in record["manifests"]]
    texts = list(run(lambda rank: place.read(info.slot, manifest_name(info, rank), limits[rank]), range(len(limits))))
    if not info.record:
        text = _make_record(info, texts)
        record = json.loads(text)
    proofs: list[File] = []
    manifests: list[File] = []
    data: dict[str, File] = {}
    for rank, (row, manifest) in enumerate(zip(record["manifests"], texts, strict=True)):
        name = manifest_name(info, rank)
        found = whole(name, manifest)
        where = f"{place.path(info.slot)}/{name}"
        if (found.bytes, found.digests[0]) != (row["bytes"], row["digest"]):
            raise Error("DATA_LOSS", f"read {where}: it is not the manifest that the commit record names")
        manifests.append(found._replace(content=None))
        for file in files_of(parse(manifest, where), where):
            if data.setdefault(file.name, file) != file:
                raise Error("DATA_LOSS", f"read {where}: another rank's manifest has another {file.name}")
    if sum(file.bytes for file in data.values()) != record["bytes"]:
        raise Error("DATA_LOSS", f"read {place.path(info.slot)}: its commit record and its manifests differ in bytes")
    if info.format == "dcp":
        commit = record["commit_file"]
        proofs.append(File(commit["name"], commit["bytes"], max(1, commit["bytes"]), (commit["digest"],)))
    proofs.append(whole(info.record or RECORD, text))
    return Contents(list(data.values()), manifests, proofs)


def files_of(manifest: dict[str, Any], where: str) -> list[File]:
    """The files of a manifest, or of a record of others, by number.

    Raises:
        Error: DATA_LOSS.
    """
    with of_damage(f"read {where}"):
        files = [File(e["name"], e["bytes"], e["chunk_bytes"], tuple(e["digests"])) for e in manifest["files"]]
        for name, nbytes, span, digests, _ in files:
            if name in ("", ".", "..") or "/" in name or "\0" in name or len(name.encode()) > _NAME_MAX or _names.is_reserved(name):
                raise Error("DATA_LOSS", f"read {where}: {name!r:.80} is no name of a file")
            if not _is_whole(nbytes) or span != _native.CHUNK_BYTES or len(digests) != -(-nbytes // span):
                raise Error("DATA_LOSS", f"read {where}: the chunks of {name} are not those of its length")
    return files


def whole(name: str, content: bytes) -> File:
    """A small file that is in memory."""
    return File(name, len(content), max(1, len(content)), (digest(content),), content)


def proven(read: Read, file: File, where: str) -> Read:
    """A read that compares digests. Its ranges begin and end with spans.

    Raises:
        Error: DATA_LOSS naming file and range.
    """

    def checked(begin: int, end: int) -> bytes | memoryview:
        data = file.content[begin:end] if file.content is not None else read(begin, end)
        if len(data) != end - begin:
            raise Error("DATA_LOSS", f"read {where} @ {begin}: {len(data)} of {end - begin} bytes are there")
        for at in range(begin, end, file.span):
            upto = min(end, at + file.span)
            chunk = data if (at, upto) == (begin, end) else data[at - begin : upto - begin]
            if digest(chunk) != file.digests[at // file.span]:
                raise Error("DATA_LOSS", f"read {where}: bytes {at} to {upto} have another digest than the manifest")
        return data

    return checked


def _make_record(info: Info, manifests: list[bytes]) -> bytes:
    """The commit record of a checkpoint of an earlier version, which has none."""
    documents = [parse(text, f"{info.slot}/{manifest_name(info, rank)}") for rank, text in enumerate(manifests)]
    files = {f["name"]: f["bytes"] for document in documents for f in document["files"]}
    first = documents[0]
    saved_at_ns = first.get("saved_at_ns", int(info.saved_at * 1e9))
    record = {
        "format": "holdfast.commit", "version": 1, "checkpoint": info.name, "series": series_of(info.name),
        "attempt": info.attempt, "parent": _NO_ATTEMPT, "world_size": len(manifests), "step": first["step"],
        "saved_at_ns": saved_at_ns, "committed_at_ns": saved_at_ns, "bytes": sum(files.values()),
        "manifests": [{"bytes": len(text), "digest": digest(text)} for text in manifests],
    }  # fmt: skip
    return sealed(record)
