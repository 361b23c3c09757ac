"""An object as ``torch.save`` pickles it: ``data.pkl``, and the storages that it names.

What torch keeps private is used as `torch.serialization` itself uses it; the tests compare the
pickle with torch's own, byte for byte.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch
from torch.serialization import location_tag

from holdfast._tensor_kinds import why_no_storage
from holdfast.errors import Error

# How deep an entry that cannot be pickled is looked for, to name it.
_DEPTH_MAX = 32


@dataclasses.dataclass
class Stored:
    """A storage of the object.

    Attributes:
        key: names its record, ``data/KEY``.
        storage: the memory.
        dtype: of the tensors over it.
        tensors: those over it that were pickled.
    """

    key: str
    storage: torch.UntypedStorage
    dtype: torch.dtype
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)


class _Pickler(pickle.Pickler):
    """Names storages instead of pickling them, as `torch.serialization` does."""

    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol=protocol)
        self.stored: dict[int, Stored] = {}  # by the storage behind torch's Python objects
        self.tensors: list[torch.Tensor] = []
        self._dtypes: dict[int, torch.dtype] = {}  # by address

    def persistent_id(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if why := why_no_storage(item):
                raise ValueError(why)
            self.tensors.append(item)
            return None
        if isinstance(item, torch.storage.TypedStorage):
            storage, dtype = item._untyped_storage, item.dtype
            kind, count = getattr(torch, item._pickle_storage_type()), storage.nbytes() // dtype.itemsize
        elif torch.is_storage(item):
            storage, dtype = item, torch.uint8
            kind, count = getattr(torch, type(item).__name__), item.nbytes()
        else:
            return None
        self._check_dtype(storage, dtype)
        found = self.stored.get(storage._cdata)
        if found is None:
            found = self.stored[storage._cdata] = Stored(str(len(self.stored)), storage, dtype)
        fake = getattr(item, "_fake_device", None)
        location = str(fake) if fake is not None else location_tag(storage)
        return ("storage", kind, found.key, location, count)

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        if storage.device.type == "meta" or not storage.data_ptr():
            return
        if self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise Error(
                "INVALID_ARGUMENT",
                f"tensors of {self._dtypes[storage.data_ptr()]} and of {dtype} share memory, which "
                "the format of torch.save cannot say; clone one of them",
            )


def pickled(item: Any, protocol: int) -> tuple[bytes, list[Stored]]:
    """The pickle of an object, and its storages in the order of their keys.

    Raises:
        Error: INVALID_ARGUMENT for an object that cannot be pickled.
    """
    buffer = io.BytesIO()
    if protocol > pickle.HIGHEST_PROTOCOL:
        raise Error("INVALID_ARGUMENT", f"pickle_protocol {protocol}: 0 to {pickle.HIGHEST_PROTOCOL} is expected")
    pickler = _Pickler(buffer, protocol)
    try:
        pickler.dump(item)
    except Error:
        raise
    except Exception as error:
        path, part = _unpicklable(item, protocol)
        what = f"{path}: a {type(part).__name__}" if path else f"a {type(part).__name__}"
        raise Error("INVALID_ARGUMENT", f"{what} cannot be pickled: {error}") from error
    for tensor in pickler.tensors:
        try:
            found = pickler.stored.get(tensor.untyped_storage()._cdata)
        except Exception:  # sparse, not initialized, or a subclass that wraps others
            continue
        if found is not None:
            found.tensors.append(tensor)
    return buffer.getvalue(), list(pickler.stored.values())


def _unpicklable(item: Any, protocol: int) -> tuple[str, Any]:
    """The innermost entry that cannot be pickled: its path, and what it is."""
    path: list[str] = []
    for _ in range(_DEPTH_MAX):
        inner: Any = ()
        if isinstance(item, dict):
            inner = ((key if isinstance(key, (str, int)) else type(key).__name__, part) for key, part in item.items())
        elif isinstance(item, (list, tuple)):
            inner = enumerate(item)
        found = next(((key, part) for key, part in inner if not _can_be_pickled(part, protocol)), None)
        if found is None:
            break
        path.append(f"{found[0]:.80}" if isinstance(found[0], str) else str(found[0]))
        item = found[1]
    return ".".join(path), item


def _can_be_pickled(item: Any, protocol: int) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol).dump(item)
    except Exception:
        return False
    return True
