"""`.metadata`: written so that it appears whole and last, read without running any code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from holdfast._unpickle import AllowList
from holdfast.errors import Error

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
    torch.serialization:_get_layout torch:Size torch:device
    collections:OrderedDict collections:defaultdict
    builtins:set builtins:frozenset builtins:dict builtins:list builtins:tuple builtins:int
    builtins:float builtins:complex builtins:str builtins:bool
    pathlib:Path pathlib:PosixPath pathlib:PurePosixPath
    """.split()
)
_BYTES_MAX = 4 << 30


class _MetadataUnpickler(AllowList):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # Python 3.13's name of what others have in pathlib
            module = "pathlib"
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return super().find_class(module, name)


def loads(data: bytes, path: str, allow: frozenset[str] = frozenset()) -> Metadata:
    """The metadata in a pickle.

    Raises:
        Error: PERMISSION_DENIED naming what it needs, DATA_LOSS for what is no metadata.
    """
    try:
        metadata = _MetadataUnpickler(data, f"load {path}", _ALLOWED, allow).load()
    except Error:
        raise
    except Exception as error:
        raise Error("DATA_LOSS", f"load {path}: its pickle cannot be read: {error}") from error
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
    try:
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise Error(
            "UNAVAILABLE", f"make directory {path}: {error.strerror}", error.errno or 0
        ) from error


def commit(directory: Path, name: str, metadata: Metadata) -> None:
    """Writes `directory`/`name` durably, whole or not at all, in the place of an older one.

    To be called only when everything that the metadata names is durable.
    """
    temporary = directory / f"{name}.tmp"
    try:
        with open(temporary, "wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            # Before the rename: else a crash could leave the name with no bytes behind it.
            os.fsync(file.fileno())
        os.rename(temporary, directory / name)
        # Before anything that the older metadata names is deleted: a crash could bring it back.
        sync_directory(directory)
    except OSError as error:
        raise Error(
            "RESOURCE_EXHAUSTED" if error.errno in (28, 122) else "UNAVAILABLE",
            f"write {directory / name}: {error.strerror}",
            error.errno or 0,
        ) from error
