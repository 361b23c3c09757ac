"""What PyTorch reads for the commands: torch.save zips and DCP checkpoints."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from holdfast import _dtypes, _names, snapshots
from holdfast._tensor_kinds import NESTED, QUANTIZED, as_bytes, in_memory, same_bytes, sparse_parts
from holdfast.cli import exact, places, scratch, sources
from holdfast.cli.sources import Part, Source, Tensor
from holdfast.dcp import StorageReader
from holdfast.dcp import metadata as dcp_metadata
from holdfast.dcp.reader import narrowed
from holdfast.errors import Error, of_system


def _bytes_of(tensor: torch.Tensor, begin: int, nbytes: int) -> bytes:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = (
            "quantized tensor" if tensor.is_quantized
            else "tensor on the meta device, which has no data" if tensor.is_meta
            else f"tensor of layout {tensor.layout}"
        )  # fmt: skip
        raise Error("UNIMPLEMENTED", f"read a {kind}: only ordinary tensors are compared")
    memory = in_memory(tensor)
    return ctypes.string_at(memory.data_ptr() + begin, nbytes) if nbytes else b""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, which are not quantized, have the same form and elements."""
    if (a.dtype, a.shape, a.layout, a.is_meta) != (b.dtype, b.shape, b.layout, b.is_meta):
        return False
    if a.is_meta:
        return True
    if a.layout != torch.strided:
        parts = zip(sparse_parts(a).values(), sparse_parts(b).values(), strict=True)
        return bool(sparse_parts(a)) and all(same(x, y) for x, y in parts)
    return same_bytes(as_bytes(in_memory(a)), as_bytes(in_memory(b)))  # so, a NaN equals itself


class _Comparing(StorageReader):
    """Compares a state with what ``torch.load`` makes of the same items, in the place of filling it."""

    def set_up_storage_reader(self, metadata: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, *args, **kwargs)
        self._items = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            info = self._items[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                continue  # the framework has read it
            found = narrowed(_by_torch(self.path, info), item)
            if not same(planner.resolve_tensor(item), found):
                name = item.storage_index.fqn
                raise Error("DATA_LOSS", f"load {name}: torch.load finds other elements in {info.relative_path}; please report this")
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _by_torch(path: Path, info: Any) -> torch.Tensor:
    """The tensor of an item, in pages of a file unless the item has the old format, which cannot be mapped."""
    name = path / info.relative_path
    with of_system(f"load {name}"), open(name, "rb") as file, tempfile.NamedTemporaryFile(dir=sources.scratch_directory) as item:
        done = 0
        while done < info.length and (count := os.sendfile(item.fileno(), file.fileno(), info.offset + done, info.length - done)):
            done += count
        is_zip = os.pread(item.fileno(), 4, 0) == b"PK\3\4"
        return torch.load(item.name, map_location="cpu", mmap=is_zip, weights_only=True)


@contextlib.contextmanager
def framework_errors(operation: str) -> Iterator[None]:
    """Raises the reason in the place of the framework's exception around it."""
    try:
        yield
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        is_own = isinstance(reason, Error) or not isinstance(reason, Exception)  # the latter: an interruption
        raise reason if is_own else Error("UNKNOWN", f"{operation}: {reason}") from error


def _shape(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.is_nested and tensor.layout == torch.strided:
        raise Error("UNIMPLEMENTED", f"load {name}: {NESTED}")
    return tuple(tensor.shape)


class TorchFile(Source):
    format = "torch"

    @functools.cached_property
    def _loaded(self) -> Any:
        return self.state()

    @functools.cached_property
    def _leaves(self) -> dict[str, Any]:
        return dict(sources.leaves(self._loaded))

    def parts(self) -> list[Part]:
        tensors = {
            name: Tensor(
                name, _dtypes.file_name(value.dtype), _shape(name, value), value.numel() * value.itemsize,
                os.path.basename(self.path), functools.partial(_bytes_of, value),
            )
            for name, value in self._leaves.items()
            if isinstance(value, torch.Tensor)
        }  # fmt: skip
        return [Part("", tensors, None)]

    def values(self) -> dict[str, str]:
        return {n: exact.text(v) for n, v in self._leaves.items() if not isinstance(v, torch.Tensor)}

    def containers(self) -> dict[str, tuple[str, bool]]:
        found: dict[str, tuple[str, bool]] = {}
        stack = [("", self._loaded)]
        while stack:
            name, value = stack.pop()
            if isinstance(value, (dict, list, tuple)):
                found[name] = type(value).__name__, not value
                items = value.items() if isinstance(value, dict) else enumerate(value)
                stack += [(f"{name}.{key}" if name else str(key), item) for key, item in items]
        return found

    def state(self, rank: int | None = None, allow: Iterable[str] = ()) -> Any:
        try:
            return torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            # The framework's advice is for callers of torch.load.
            reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), "its pickle is not plain")
            raise Error(
                "PERMISSION_DENIED",
                f"load {self.path}: {reason.strip().partition('. Please use')[0]}; only tensors, plain values and containers "
                "are read: save the state_dict() of an object",
            ) from error
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of any kind: nothing proves the bytes of the pickle
            raise Error("DATA_LOSS", f"load {self.path}: {(str(error) or repr(error)).splitlines()[0]}") from error


class Dcp(Source):
    format = "dcp"

    def __init__(self, path: str, names: list[str]) -> None:
        super().__init__(path)
        self._names = names
        self.facts = places.look_at_dcp(path)
        self.facts.pop("bytes", None)

    @functools.cached_property
    def _metadata(self) -> Any:
        return dcp_metadata.read(Path(self.path) / (_names.METADATA if _names.METADATA in self._names else _names.dcp_metadata(0)))

    @functools.cached_property
    def _tensor_names(self) -> list[str]:
        return [n for n, entry in self._metadata.state_dict_metadata.items() if hasattr(entry, "properties")]

    def parts(self) -> list[Part]:
        files: dict[str, set[str]] = {}
        for index, info in (self._metadata.storage_data or {}).items():
            files.setdefault(index.fqn, set()).add(info.relative_path)
        tensors = {}
        for name in self._tensor_names:
            entry = self._metadata.state_dict_metadata[name]
            dtype, shape, own = entry.properties.dtype, tuple(entry.size), files.get(name, set())
            tensors[name] = Tensor(
                name, _dtypes.file_name(dtype), shape, math.prod(shape) * dtype.itemsize,
                next(iter(own)) if len(own) == 1 else f"{len(own)} files",
                functools.partial(self._read, name),
            )  # fmt: skip
        return [Part("", tensors, self._digests())]

    def _read(self, name: str, begin: int, nbytes: int) -> bytes:
        return _bytes_of(self._flat[name], begin, nbytes)

    def _digests(self) -> dict[str, dict[str, snapshots.Digest]] | None:
        if not self.facts.get("attempt"):
            return None
        found: dict[str, dict[str, snapshots.Digest]] = {name: {} for name in self._tensor_names}
        for manifest in self._names:
            if manifest.endswith(f"-{self.facts['attempt']}{_names.MANIFEST_END}"):
                for piece, digest in sources.stored(self.path, manifest).digests.items():
                    # A shard's name ends with its place in the tensor.
                    name = piece if piece in found else piece.rpartition("@")[0]
                    if name in found:
                        found[name][piece] = digest
        return found

    def values(self) -> dict[str, str]:
        others = self._metadata.state_dict_metadata.keys() - set(self._tensor_names)
        return {name: exact.text(value) for name, value in self._load(sorted(others)).items()}

    @functools.cached_property
    def _flat(self) -> dict[str, Any]:
        return self._load(self._metadata.state_dict_metadata)

    def _load(self, names: Iterable[str], allow: Iterable[str] = ()) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        with scratch.Memory(sources.scratch_directory):
            for name in names:
                entry = self._metadata.state_dict_metadata[name]
                is_tensor = hasattr(entry, "properties")
                dtype = entry.properties.dtype if is_tensor else None
                flat[name] = torch.empty(entry.size, dtype=dtype, device="cpu") if is_tensor else None
                if is_tensor and flat[name].is_quantized:
                    raise Error("UNIMPLEMENTED", f"load {name}: {QUANTIZED}")
        with framework_errors(f"load {self.path}"):
            dcp.load(flat, storage_reader=StorageReader(self.path, allow=allow), no_dist=True)
        return flat

    def _load_compared(self, names: Iterable[str], allow: Iterable[str] = ()) -> dict[str, Any]:
        """As `_load`. ``torch.load`` must find the same tensors."""
        flat = self._load(names, allow)
        tensors = {name: flat[name] for name in self._tensor_names if name in flat}
        with framework_errors(f"load {self.path}"):
            dcp.load(tensors, storage_reader=_Comparing(self.path, verify=False), no_dist=True)
        return flat

    def tensors(self, rank: int | None = None) -> dict[str, Any]:
        return self._load_compared(self._tensor_names)

    def state(self, rank: int | None = None, allow: Iterable[str] = ()) -> Any:
        return _nested(self._load_compared(self._metadata.state_dict_metadata, allow), self._metadata.planner_data)


class _Flattened(dict[Any, Any]):
    """A container that the planner has flattened, by its keys. A value that it has stored whole is none, whatever it is."""


def _nested(flat: dict[str, Any], paths: Any) -> Any:
    """The containers that the framework's planner has flattened: numbers are places in lists."""
    root = _Flattened()
    for name, value in flat.items():
        path = paths.get(name, (name,)) if isinstance(paths, dict) else (name,)
        at: Any = root
        for key in path[:-1]:
            at = at.setdefault(key, _Flattened()) if isinstance(at, _Flattened) else None
        if not isinstance(at, _Flattened) or path[-1] in at:
            raise Error("DATA_LOSS", f"load {name}: the metadata places it inside of another value, or where another one is")
        at[path[-1]] = value
    return _with_lists(root)


_PLACES_MAX = 1_000_000  # of a list, beyond the items that it has


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Flattened):
        return value
    if value and all(type(key) is int and key >= 0 for key in value):
        count = max(value) + 1
        if count > len(value) + _PLACES_MAX:
            raise Error("DATA_LOSS", f"a list has {len(value)} items, the last at place {count - 1}")
        # The planner writes nothing for an empty container. As in the framework's own loads, its place has None.
        return [_with_lists(value.get(place)) for place in range(count)]
    return {key: _with_lists(item) for key, item in value.items()}
