"""Objects in a checkpoint, made here and serialized anew for the framework's planner.

The planner unpickles an object itself, with everything allowed. A check in front of it would have to
read the bytes exactly as it does. So the planner never gets those bytes: the object is made through
the allow-list, and what ``torch.save`` writes of it goes to the planner.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from holdfast import _unpickle
from holdfast._constructors import storage_at
from holdfast.dcp import records
from holdfast.errors import Error


class _ObjectUnpickler(_unpickle.Unpickler):
    """Makes what ``torch.save`` wrote, from the archive's records."""

    def __init__(self, archive: records.Archive, operation: str, allow: frozenset[str]) -> None:
        super().__init__(archive.record("data.pkl"), operation, allow)
        self._archive = archive
        self._storages: dict[str, Any] = {}

    def persistent_load(self, pid: Any) -> Any:
        key: Any = pid[2] if type(pid) is tuple and len(pid) > 2 else None
        if key not in self._storages:
            self._storages[key] = storage_at(pid, lambda key: self._archive.record(f"data/{key}"), self.place)
        return self._storages[key]


def resaved(data: io.BytesIO, entry: str, allow: frozenset[str]) -> io.BytesIO:
    """The bytes of an object as ``torch.save`` writes it here, whatever its own bytes are.

    Raises:
        Error: PERMISSION_DENIED naming all that it needs, DATA_LOSS for what cannot be read.
    """
    operation = f"load {entry}"
    try:
        archive = records.Archive(_reader(data), data.getbuffer().nbytes)
        unpickler = _ObjectUnpickler(archive, operation, allow)
    except records.NotPlain as error:
        raise Error(
            "PERMISSION_DENIED",
            f"{operation}: not what torch.save makes of an object: {error}; if you trust this "
            "checkpoint, pass trust=True",
        ) from error
    value = _unpickle.run(unpickler, operation)
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except RecursionError:
        raise Error("DATA_LOSS", f"{operation}: it is nested too deeply") from None
    out.seek(0)
    return out


def _reader(data: io.BytesIO) -> records.ReadAt:
    contents = data.getvalue()
    return lambda offset, nbytes: contents[offset : offset + nbytes]
