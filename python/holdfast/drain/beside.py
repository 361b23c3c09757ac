"""What lies in a checkpoint's directory and no manifest names, as ``common.pt`` of Megatron-Core: it travels with the checkpoint.

A record in the second place names these files with their digests (runtime/layout/FORMAT.md, section 9).
"""

from __future__ import annotations

from holdfast import _names
from holdfast._regular import RECORD_BYTES_MAX
from holdfast.drain.contents import files_of, parse, sealed, whole
from holdfast.drain.places import BESIDE, NO_NAME, File, Info, Place
from holdfast.errors import Error, of_damage


def can_be_sent(name: str) -> bool:
    """Whether every place has such a name, and no record of a checkpoint."""
    return not NO_NAME.search(name) and not _names.is_reserved(name)


def record_of(info: Info, files: list[File]) -> File:
    """The record of some files, ready to be sent."""
    document = {
        "format": "holdfast.beside", "version": 1, "attempt": info.attempt,
        "files": [
            {"name": f.name.removeprefix(BESIDE), "bytes": f.bytes, "chunk_bytes": f.span, "digests": list(f.digests)} for f in files
        ],
    }  # fmt: skip
    return whole(_names.BESIDE_RECORD, sealed(document))


def recorded(place: Place, info: Info) -> list[File]:
    """The files that the record of a place names; none where it has no record, or that of another attempt.

    Raises:
        Error: DATA_LOSS; what the place says.
    """
    try:
        text = place.read(info.slot, _names.BESIDE_RECORD, RECORD_BYTES_MAX)
    except Error as error:
        if error.code == "NOT_FOUND":
            return []
        raise
    where = f"{place.path(info.slot)}/{_names.BESIDE_RECORD}"
    document = parse(text, where)
    with of_damage(f"read {where}"):
        if document["format"] != "holdfast.beside" or document["version"] != 1:
            raise Error("DATA_LOSS", f"read {where}: {document['format']!r:.40} of version {document['version']!r:.20} is not known")
        if document["attempt"] != info.attempt:
            return []
    files = files_of(document, where)
    for file in files:
        if not can_be_sent(file.name):
            raise Error("DATA_LOSS", f"read {where}: {file.name!r:.80} is no name of a file")
    return [file._replace(name=BESIDE + file.name) for file in files]
