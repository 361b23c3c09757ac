"""`.metadata`: written so that it appears whole and last, read without running any code."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import pickle
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties, TensorStorageMetadata

from holdfast import _collector, _dcp_directories, _durable, _native, _regular, _unpickle
from holdfast._durable import sync_directory
from holdfast._names import DCP_RECORD, METADATA
from holdfast.errors import Error, of_system

# What the framework's own writers put there, and Megatron, which keeps the ranks' plans. Planners may
# add plain values.
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
    torch.distributed.checkpoint.filesystem:_StoragePrefix
    torch.distributed.checkpoint.planner:SavePlan
    torch.distributed.checkpoint.planner:WriteItem
    torch.distributed.checkpoint.planner:WriteItemType
    torch.distributed.checkpoint.planner:TensorWriteData
    torch.distributed.checkpoint.planner:BytesIOWriteData
    megatron.core.dist_checkpointing.strategies.torch:MCoreMetadata
    megatron.core.dist_checkpointing.strategies.torch:MCoreSavePlan
    """.split()
)
# Where older PyTorch had them. Its own reader still finds the old classes there.
_METADATA, _SHARDS = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
_MOVED = {
    (_SHARDS, "TensorProperties"): (_METADATA, "TensorProperties"),
    (_SHARDS, "MEM_FORMAT_ENCODING"): (_METADATA, "_MEM_FORMAT_ENCODING"),
}
_POLL = 0.01  # seconds between two looks whether a lock is free
_ATTEMPT = re.compile(r"[0-9a-f]{32}")


# Fields of a tensor's properties in this PyTorch. In 2.15 a sixth one says which strides the saved tensor had, which
# no load needs; older versions cannot take it.
_FIELDS, _FIELDS_KNOWN = len(TensorProperties().__getstate__()), 6


def _set_properties(pickle: Any, target: Any, state: Any) -> None:
    if type(state) is tuple and len(state) > max(_FIELDS, _FIELDS_KNOWN):
        raise Error(
            "UNIMPLEMENTED",
            f"{pickle.operation}: its tensors have {len(state)} properties, as newer versions than PyTorch {torch.__version__} "
            "write them; load it with the version that has saved it",
        )
    pickle.check_names(state)
    target.__setstate__(state[:_FIELDS])


class _Unpickler(_unpickle.Unpickler):
    states = {**_unpickle.Unpickler.states, TensorProperties: _set_properties}

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(*_MOVED.get((module, name), (module, name)))


def unpickle(data: bytes, operation: str, allow: frozenset[str] = frozenset()) -> Any:
    """What is in a pickle of metadata's classes.

    Raises:
        Error: PERMISSION_DENIED naming what it needs, DATA_LOSS for what is no pickle.
    """
    return _unpickle.run(_Unpickler(data, operation, _ALLOWED | allow), operation)


def loads(data: bytes, path: str, allow: frozenset[str] = frozenset()) -> Metadata:
    """The metadata in a pickle.

    Raises:
        Error: PERMISSION_DENIED naming what it needs, DATA_LOSS for what is no metadata.
    """
    metadata = unpickle(data, f"load {path}", allow)
    if not isinstance(metadata, Metadata):
        raise Error("DATA_LOSS", f"load {path}: it holds a {type(metadata).__name__}, no Metadata")
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    if not _is_sound(metadata):
        raise Error("DATA_LOSS", f"load {path}: its tensors or places lack what they need; it is damaged")
    # A rank's own metadata has that rank's chunks alone, and so has that of a save without other ranks.
    if os.path.basename(path) == METADATA:
        partial = partial_names(metadata)
        if partial and manifest_digests(Path(path), data, metadata) is None:
            raise Error(
                "DATA_LOSS",
                f"load {path}: it has a part of {partial[0]} alone, and no commit record that proves this; it is damaged, or "
                "another program has saved one rank's shards with no_dist=True, which torch.distributed.checkpoint.load reads",
            )
    return metadata


def partial_names(metadata: Metadata) -> list[str]:
    """Tensors that the chunks do not fill. PyTorch checks this when it saves, but for a save of one rank alone."""
    return [
        name for name, of in metadata.state_dict_metadata.items()
        if isinstance(of, TensorStorageMetadata) and len(of.size)
        and sum(math.prod(chunk.sizes) for chunk in of.chunks) != math.prod(of.size)
    ]  # fmt: skip


def _is_sound(metadata: Metadata) -> bool:
    """Whether everything has its fields, and the chunks of a tensor lie in it.

    A pickle fills objects in without a look at their classes.
    """

    def are_ints(*values: Any) -> bool:
        return all(type(value) is int and value >= 0 for value in values)

    try:
        for item in metadata.state_dict_metadata.values():
            if not isinstance(item, TensorStorageMetadata):
                continue
            dims = len(item.size)
            shapes = [item.size, *(each for c in item.chunks for each in (c.offsets, c.sizes))]
            if not isinstance(item.properties.dtype, torch.dtype) or not all(
                len(shape) == dims and are_ints(*shape) for shape in shapes
            ):
                return False
            for chunk in item.chunks:
                if any(at + n > whole for at, n, whole in zip(chunk.offsets, chunk.sizes, item.size, strict=True)):
                    return False
        for index, place in (metadata.storage_data or {}).items():
            if not isinstance(index.fqn, str) or not isinstance(place.relative_path, str):
                return False
            if not are_ints(place.offset, place.length):
                return False
    except (AttributeError, TypeError):
        return False
    return True


def read(path: Path, allow: frozenset[str] = frozenset()) -> Metadata:
    """Reads a metadata file.

    Raises:
        Error: NOT_FOUND (the save did not end, or this is no checkpoint), and as of `loads`.
    """
    return loads(read_bytes(path), str(path), allow)


def save_id_of(metadata: Metadata) -> str:
    """The attempt id of the save that wrote it; empty where another program did."""
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id if isinstance(save_id, str) and _ATTEMPT.fullmatch(save_id) else ""


def _names_another_save(metadata: Metadata) -> bool:
    """Whether the framework's own writer has made it: its saves have UUIDs."""
    try:
        return str(uuid.UUID(metadata.storage_meta.save_id)) == metadata.storage_meta.save_id  # type: ignore[union-attr, arg-type]
    except (AttributeError, TypeError, ValueError):
        return False


def manifest_digests(path: Path, data: bytes, metadata: Metadata) -> list[Any] | None:
    """Compares a metadata file with the commit record of its save.

    Returns:
        The digests of the manifests, by rank. None without a record: an earlier version or another
        program wrote it.

    Raises:
        Error: DATA_LOSS for metadata that is not as it was written.
    """
    attempt = save_id_of(metadata)
    if not attempt:
        if not _names_another_save(metadata) and any(map(DCP_RECORD.fullmatch, os.listdir(path.parent))):
            raise Error(
                "DATA_LOSS",
                f"load {path}: it does not name its save, and the directory has the commit record of one; it is damaged, or "
                "another program has written it",
            )
        return None
    return _native.check_commit_file(str(path.parent), attempt, path.name, data)


def read_bytes(path: Path) -> bytes:
    """The bytes of a metadata file.

    Raises:
        Error: NOT_FOUND (the save did not end, or this is no checkpoint), DATA_LOSS (too long).
    """
    with of_system(f"load {path}"):
        try:
            return _regular.read_whole(path, "load", _regular.METADATA_BYTES_MAX)[0]
        except FileNotFoundError as error:
            raise Error(
                "NOT_FOUND",
                f"load {path}: there is no such file; {_dcp_directories.why_none(str(path.parent))}",
                error.errno or 0,
            ) from error


@contextlib.contextmanager
def locked(path: Path, end: float | None = None) -> Iterator[None]:
    """Keeps others from committing in a directory, on file systems that can lock one.

    Args:
        path: the directory.
        end: when to give up, by the monotonic clock; None: after the default of `time_ranks_max`.

    Raises:
        Error: DEADLINE_EXCEEDED, or NOT_FOUND: the directory is gone.
    """
    with of_system(f"save {path}: lock it"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Error(
                "NOT_FOUND",
                f"save {path}: lock it: the directory was renamed or removed during the save; save again, and leave a checkpoint where it "
                "is until its save has ended",
                error.errno or 0,
            ) from error
    try:
        if end is None:
            end = time.monotonic() + _native.TIME_RANKS_MAX
        while not _durable.locked(fd, fcntl.LOCK_EX):
            if time.monotonic() >= end:
                raise Error(
                    "DEADLINE_EXCEEDED",
                    f"save {path}: another process has its lock; a save or a recovery completes a checkpoint there, or hangs: "
                    "try again when it has ended",
                )
            time.sleep(_POLL)
        yield
    finally:
        os.close(fd)


def commit(directory: Path, name: str, metadata: Metadata, attempt: str, parent: str, world_size: int) -> None:
    """Writes `directory`/`name` durably, whole or not at all, in the place of an older one.

    To be called only when everything that the metadata names is durable.

    Args:
        directory, name, metadata: what is written where.
        attempt, parent, world_size: of the save. Its commit record is written first.
    """
    with _collector.paused():
        data = pickle.dumps(metadata)
    record = _native.make_commit_record(str(directory), attempt, parent, world_size, name, data)
    try:
        # The record's name before the metadata's: else a crash could leave metadata without its proof.
        _write(directory, *record)
        _sync(directory, record[0])
        _write(directory, name, data)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(directory / record[0])
        raise
    # Before anything that the older metadata names is deleted: a crash could bring it back.
    _sync(directory, name)


def _write(directory: Path, name: str, data: bytes) -> None:
    temporary = directory / f"{name}.tmp"
    with of_system(f"write {directory / name}"):
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                # Before the rename: else a crash could leave the name with no bytes behind it.
                os.fsync(file.fileno())
            os.rename(temporary, directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _sync(directory: Path, name: str) -> None:
    with of_system(f"write {directory / name}"):
        sync_directory(directory)
