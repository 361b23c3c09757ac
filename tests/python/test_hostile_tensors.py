"""Tensors in plain objects: their storages are calls of what unpickles anything, and run no code here."""

from __future__ import annotations

import builtins
import io
import pickle
import struct
from typing import Any

import pytest
import torch
from test_hostile_objects import Call, Evil, archive, in_child, same, touched

from holdfast import _unpickle


def _storage(pickled: bytes, memory: bytes = bytes(8)) -> bytes:
    """What ``pickle`` writes of a storage of two floats, with another pickle in the place of its third."""
    function, (data,) = torch.zeros(2).untyped_storage().__reduce__()
    stream = io.BytesIO(data)
    for _ in range(3):
        pickle.load(stream)
    return pickle.dumps(Call(function, data[: stream.tell()] + pickled + struct.pack("<Q", 2) + memory), 4)


class _Id(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.id if isinstance(value, Call) else None


def _named(*pid: Any) -> bytes:
    out = io.BytesIO()
    call = Call(None)
    call.id = pid  # type: ignore[attr-defined]
    _Id(out, 2).dump(call)
    return out.getvalue() + pickle.dumps([pid[2]], 2)


_FLOATS = ("storage", torch.FloatStorage, "1", "cpu", 2, None)

STORAGES = {
    "code in its pickle": lambda: _storage(pickle.dumps(Evil(), 2)),
    "code behind its pickle": lambda: _storage(_named(*_FLOATS)[:-1] + b"0" + pickle.dumps(Evil(), 2)[2:]),
    "code in an archive": lambda: pickle.dumps(
        Call(torch.storage._load_from_bytes, archive({"archive/data.pkl": pickle.dumps(Evil(), 2), "archive/version": b"3\n"})), 4
    ),
    "code alone": lambda: pickle.dumps(Call(torch.storage._load_from_bytes, pickle.dumps(Evil(), 2)), 4),
    "more elements than memory": lambda: _storage(_named("storage", torch.FloatStorage, "1", "cpu", 1 << 40, None)),
    "memory that ends early": lambda: _storage(_named(*_FLOATS), bytes(7)),
    "more memory than elements": lambda: _storage(_named(*_FLOATS), bytes(9)),
    "a class that is no storage": lambda: _storage(_named("storage", list, "1", "cpu", 2, None)),
    "no bytes": lambda: pickle.dumps(Call(torch.storage._load_from_bytes, [1]), 4),
    "a tensor beyond its storage": lambda: pickle.dumps(
        Call(torch._utils._rebuild_tensor_v2, torch.zeros(2)._typed_storage(), 0, (1 << 30,), (1,), False, {}), 4
    ),
}  # fmt: skip


# What errors of earlier versions said that objects with tensors need.
_EARLIER = ["torch._utils:_rebuild_tensor_v2", "torch.storage:_load_from_bytes"]


@pytest.mark.parametrize("allow", [[], _EARLIER])
@pytest.mark.parametrize("name", STORAGES)
def test_a_storage_in_an_object_runs_no_code(name: str, allow: list[str]) -> None:
    def read() -> Any:
        try:
            return repr(_unpickle.loads(STORAGES[name](), "o", allow))
        finally:
            assert not hasattr(builtins, "holdfast_was_here")

    answer = in_child(read)
    assert answer.startswith(("DATA_LOSS load o: ", "PERMISSION_DENIED ")), answer


def test_a_storage_is_what_pickle_writes() -> None:
    assert same(torch.tensor([], dtype=torch.float32).set_(touched(_storage(_named(*_FLOATS))).untyped()), torch.zeros(2))
