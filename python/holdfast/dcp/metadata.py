"""`.metadata`: written so that it appears whole and last, read without running any code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from holdfast import _unpickle
from holdfast.errors import Error, of_system

# What the framework's own writers put there; planners may add plain values.
_ALLOWED = frozenset(
    """
    torch.distributed.checkpoint.metadata:Metadata
    torch.distributed.checkpoint.metadata:MetadataIndex
    torch.distributed.checkpoint.metadata:TensorStorageMetadata
    torch.distributed.checkpoint.metadata:BytesStorageMetadata
    torch.distributed.checkpoint.metadata:ChunkStorageMetadata
    torch.distributed.checkpoint.metadata:TensorProperties
    torch.distributed.checkpoint.metadata:StorageMeta
    torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING
    torch.distributed.checkpoint.filesystem:_StorageInfo
    """.split()
)
_BYTES_MAX = 4 << 30


def loads(data: bytes, path: str, allow: frozenset[str] = frozenset()) -> Metadata:
    """The metadata in a pickle.

    Raises:
        Error: PERMISSION_DENIED naming what it needs, DATA_LOSS for what is no metadata.
    """
    metadata = _unpickle.loads(data, path, _ALLOWED | allow)
    if not isinstance(metadata, Metadata):
        raise Error("DATA_LOSS", f"load {path}: it holds a {type(metadata).__name__}, no Metadata")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    return metadata


def read(path: Path, allow: frozenset[str] = frozenset()) -> Metadata:
    """Reads a metadata file.

    Raises:
        Error: NOT_FOUND (the save did not end, or this is no checkpoint), and as of `loads`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise Error(
            "NOT_FOUND",
            f"load {path}: there is no such file; the checkpoint was never completed, or the path "
            "is wrong",
            error.errno or 0,
        ) from error
    except OSError as error:
        raise Error("UNAVAILABLE", f"load {path}: {error.strerror}", error.errno or 0) from error
    if len(data) > _BYTES_MAX:
        raise Error("DATA_LOSS", f"load {path}: longer than {_BYTES_MAX} bytes")
    return loads(data, str(path), allow)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Makes a directory and those above it, durably: else a crash takes them with all in them."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    with of_system(f"make directory {path}"):
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def commit(directory: Path, name: str, metadata: Metadata) -> None:
    """Writes `directory`/`name` durably, whole or not at all, in the place of an older one.

    To be called only when everything that the metadata names is durable.
    """
    temporary = directory / f"{name}.tmp"
    with of_system(f"write {directory / name}"):
        with open(temporary, "wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            # Before the rename: else a crash could leave the name with no bytes behind it.
            os.fsync(file.fileno())
        os.rename(temporary, directory / name)
        # Before anything that the older metadata names is deleted: a crash could bring it back.
        sync_directory(directory)
