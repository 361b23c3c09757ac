"""What lies at a path, by the names of its files, and the committed save of a DCP directory."""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple

from holdfast import _native
from holdfast.errors import Error, of_system

# runtime/layout/FORMAT.md, section 1.
UNCOMMITTED = re.compile(r"\.?(?P<name>.+)\.(?P<kind>partial|fenced|retired)-(?P<attempt>[0-9a-f]{32})")
_OF_DCP = re.compile(
    r"(__\d+)?\.metadata|__\d+_\d+\.distcp|holdfast\.commit-[0-9a-f]{32}\.json"
    r"|rank-\d{5,}-of-\d{5,}-[0-9a-f]{32}\.manifest\.json"
)
_OF_HOLDFAST = re.compile(
    r"holdfast\.commit\.json|rank-\d{5,}-of-\d{5,}\.manifest\.json|model-\d{5,}-of-\d{5,}\.safetensors"
)
_RECORD = re.compile(r"holdfast\.commit-([0-9a-f]{32})\.json")
_RECORD_BYTES_MAX = 16 << 20


def names_in(path: str, operation: str) -> list[str]:
    """Names in a directory, sorted.

    Raises:
        Error: of the system.
    """
    with of_system(f"{operation} {path}"):
        return sorted(os.listdir(path))


def format_of(names: list[str]) -> str:
    """``"holdfast"`` or ``"dcp"`` for the names of a checkpoint's files; empty for other names."""
    for kind, pattern in (("dcp", _OF_DCP), ("holdfast", _OF_HOLDFAST)):
        if any(map(pattern.fullmatch, names)):
            return kind
    return ""


class DcpCommit(NamedTuple):
    """The save by which a DCP directory is complete.

    Attributes:
        metadata: name of the framework's last file; empty where there is none.
        record: the commit record of that file, parsed; None where no record has its digest.
    """

    metadata: str
    record: dict[str, Any] | None


def dcp_commit(path: str, names: list[str]) -> DcpCommit:
    """Finds the committed save of a DCP directory, without reading what ``.metadata`` says.

    Raises:
        Error: of the system.
    """
    files = [n for n in names if os.path.isfile(os.path.join(path, n))]  # reading a pipe would wait
    metadata = next(filter(re.compile(r"(__\d+)?\.metadata").fullmatch, files), "")
    if not metadata:
        return DcpCommit("", None)
    for match in filter(None, map(_RECORD.fullmatch, files)):
        with of_system(f"read {path}/{match[0]}"), open(os.path.join(path, match[0]), "rb") as file:
            text = file.read(_RECORD_BYTES_MAX)
        with of_system(f"read {path}/{metadata}"), open(os.path.join(path, metadata), "rb") as file:
            contents = file.read()
        try:
            digests = _native.check_commit_file(path, match[1], metadata, contents)
            record = json.loads(text)
        except (Error, ValueError) as error:
            if isinstance(error, Error) and error.code != "DATA_LOSS":
                raise
            continue  # of another save of this directory
        if digests is not None:
            return DcpCommit(metadata, record)
    return DcpCommit(metadata, None)
