"""A checkpoint from others runs no code, crashes nothing, and takes no memory that it does not have."""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import datetime
import decimal
import fractions
import io
import os
import pathlib
import pickle
import pickletools
import random
import resource
import signal
import struct
import types
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core import multiarray
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast import _unpickle
from holdfast.dcp import objects

GIB = 1 << 30


class Call:
    """Pickles as a call of `function`, and as the state and the items that come after it."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self._reduced = (function, args, state) if state is not None else (function, args)

    def __reduce__(self) -> Any:
        return self._reduced


def in_child(read: Any) -> str:
    """What `read` ends with: its error's code, or what it made. Bounded in time and memory."""
    answer, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "nothing"
        try:
            signal.alarm(60)
            torch.set_num_threads(1)  # those of the parent are not here, and would be waited for
            in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (in_use + GIB, in_use + GIB))
            text = f"made {read()!r:.200}"
        except holdfast.Error as error:
            text = f"{error.code} {error.message:.200}"
            if isinstance(error.__cause__, MemoryError):  # taken, had the limit not been there
                text = "raised MemoryError"
        except BaseException as error:
            text = f"raised {type(error).__name__} {error!s:.200}"
        finally:
            os.write(told, text.encode(errors="replace"))
            os._exit(0)
    os.close(told)
    with os.fdopen(answer, "rb") as file:
        text = file.read().decode()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"it ended with status {status}"
    return text


def touched(data: bytes) -> Any:
    value = _unpickle.loads(data, "o")
    repr(value)
    return value


def _built(made: bytes, state: Any, reduce: bytes = b"R") -> bytes:
    """A call without arguments, or a name, and a state for it."""
    return b"\x80\x04" + made + pickle.dumps(state, 4)[2:-1] + b"b."


_OBJECTS = numpy.dtype([("a", "O")])
_CLEARED = (3, "|", None, None, None, -1, -1, 0)


def _names(depth: int) -> bytes:
    return b"\x80\x04}" + b")" + b"\x85" * depth + b"Ns."


def _hashed(key: bytes) -> bytes:
    """A dict with one key, many times."""
    return b"\x80\x04}(" + key + b"q\xffN" + b"h\xffN" * 1_000_000 + b"u."


ATTACKS = {
    "array over given pointers": pickle.dumps(Call(numpy.ndarray, (1,), numpy.dtype("O"), b"A" * 8)),
    "array whose dtype lost its flags": pickle.dumps(
        Call(multiarray._reconstruct, numpy.ndarray, (0,), b"b",
             state=(1, (1,), Call(numpy.dtype, "O8", False, True, state=_CLEARED), False, b"A" * 8))
    ),
    "structured array whose dtype lost its flags": pickle.dumps(
        Call(multiarray._reconstruct, numpy.ndarray, (0,), b"b",
             state=(1, (1,), Call(numpy.dtype, "V8", False, True,
                                  state=(3, "|", None, ("a",), {"a": (numpy.dtype("O"), 0)}, 8, 1, 0)),
                    False, b"A" * 8))
    ),
    "array of objects over bytes": pickle.dumps(
        Call(multiarray._reconstruct, numpy.ndarray, (0,), b"b",
             state=(1, (1,), numpy.dtype("O"), False, b"A" * 8))
    ),
    "array of objects with a short list": pickle.dumps(
        Call(multiarray._reconstruct, numpy.ndarray, (0,), b"b",
             state=(1, (1 << 16,), numpy.dtype("O"), False, [1]))
    ),
    "array longer than its bytes": pickle.dumps(
        Call(multiarray._reconstruct, numpy.ndarray, (0,), b"b",
             state=(1, (1 << 40,), numpy.dtype("u1"), False, b"A" * 8))
    ),
    "scalar of objects": pickle.dumps(Call(multiarray.scalar, _OBJECTS, b"A" * 8)),
    "attribute of a class": b"\x80\x04cpathlib\nPath\n(N}X\x06\0\0\0existscbuiltins\nbool\nstb.",
    "attribute of a function": _built(b"c_codecs\nencode\n", {"here": 1}),
    "attribute of a dtype": _built(b"ctorch\nfloat32\n", (None, {"here": 1})),
    "method of an instance": _built(b"ctypes\nSimpleNamespace\n)R", {"__reduce_ex__": str}),
    "fraction with an exponent": pickle.dumps(Call(fractions.Fraction, "1e99999999")),
    "fraction of large integers": pickle.dumps(Call(fractions.Fraction, 3 << (1 << 24), 7 << (1 << 23))),
    "bytearray of a length": pickle.dumps(Call(bytearray, 8 << 30)),
    "bytearray that ends early": b"\x80\x05\x96" + struct.pack("<Q", 8 << 30) + b"abc.",
    "list of a range": pickle.dumps(Call(list, range(200_000_000))),
    "set of a range": pickle.dumps(Call(set, range(200_000_000))),
    "size of a range": pickle.dumps(Call(torch.Size, range(200_000_000))),
    "dict of a range": pickle.dumps(Call(collections.OrderedDict, [range(200_000_000)])),
    "arguments of a range": b"\x80\x04cbuiltins\nrange\n" b"cbuiltins\nrange\nJ\0\xc2\xeb\x0b\x85RR.",
    "deque of a range": pickle.dumps(Call(collections.deque, range(200_000_000))),
    "copies of one value": b"\x80\x04]\x94(" + b"K\0" * 50000 + b"e0" + b"(" +
        b"cbuiltins\nset\nh\0\x85R" * 50000 + b"l.",
    "many hashes of one key": b"\x80\x04}(" + b"K\0" * 50000 + b"t\x940(" + b"h\0N" * 50000 + b"u.",
    "many hashes of one decimal": _hashed(pickle.dumps(decimal.Decimal("9" * 1_000_000), 2)[2:-1]),
    "many hashes of one range": _hashed(b"cbuiltins\nrange\n" + pickle.dumps(1 << (1 << 23), 2)[2:-1] + b"\x85R"),
    "many hashes of a tuple of a large integer": _hashed(pickle.dumps(1 << (1 << 23), 2)[2:-1] + b"\x85"),
    "many hashes of raw memory": _hashed(pickle.dumps(numpy.void(bytes(1 << 20)), 2)[2:-1]),
    "decimal of a large integer": pickle.dumps(Call(decimal.Decimal, 1 << (1 << 23))),
    "text of anything": pickle.dumps(Call(str, [[]])),
    "another codec": pickle.dumps(Call(__import__("_codecs").encode, "x", "zip")),
    "memory of a tensor": pickle.dumps(Call(torch.Tensor, 1 << 33)),
    "tuples in tuples as a key": _names(1_000_000),
    "position beyond the bytes": _built(b"c_io\nBytesIO\n)R", (b"", 1 << 40, None)),
    "extension code": b"\x80\x04\x82\x01.",
    "extension codes of two and four bytes": b"\x80\x04\x83\x01\x01\x84\x01\x01\x01\x01.",
    "buffer from outside": b"\x80\x05\x97.",
    "read-only buffer": b"\x80\x05C\x03abc\x98.",
    "persistent id": b"\x80\x04Px\n.",
    "binary persistent id": b"\x80\x04X\x01\0\0\0xQ.",
    "call of a class by its opcode": b"\x80\x04(ctypes\nSimpleNamespace\no.",
    "name behind an attribute": b"\x80\x04\x8c\x05types\x8c\x18SimpleNamespace.__init__\x93.",
    "name of a submodule": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.",
    "instance of an old class": b"\x80\x04(itypes\nSimpleNamespace\n.",
    "enum's other attribute": pickle.dumps(Call(getattr, uuid.SafeUUID, "mro")),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_an_error(name: str) -> None:
    answer = in_child(lambda: touched(ATTACKS[name]))
    assert answer.startswith(("DATA_LOSS load o: ", "PERMISSION_DENIED ")), answer


@pytest.mark.planted("list_before_another_parser")
def test_the_planted_bug_puts_the_list_in_front_of_another_parser_and_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one parser was asked about, another one makes."""

    def loads(data: bytes, entry: str) -> Any:
        if missing := _unpickle.unlisted(data):
            raise _unpickle.refusal(entry, missing)
        return pickle.loads(data)

    monkeypatch.setattr(_unpickle, "loads", loads)
    answer = in_child(lambda: touched(ATTACKS["attribute of a class"]))
    assert answer.startswith(("made", "raised")), answer


@pytest.mark.parametrize("opcode", [b"r\xff\xff\xff\xff", b"\x95" + struct.pack("<Q", 1 << 40)])
def test_a_length_alone_takes_no_memory(opcode: bytes) -> None:
    assert in_child(lambda: touched(b"\x80\x04N" + opcode + b".")) == "made None"


def _arrays() -> dict[str, Any]:
    fields = numpy.dtype([("a", "f4"), ("b", "<i8", (2, 3)), ("c", ">u2")])
    return {
        "row-major": numpy.arange(6.0).reshape(2, 3),
        "column-major": numpy.asfortranarray(numpy.arange(6, dtype=">i4").reshape(2, 3)),
        "fields": numpy.zeros(3, fields),
        "aligned": numpy.zeros(2, numpy.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "text": numpy.array(["ab", "cde"]),
        "empty": numpy.empty((0, 4), "f2"),
        "dates": numpy.array(["2026-01-02"], "M8[25ns]"),
        "objects": numpy.array([1, "two", None], object),
        "scalars": [numpy.float64(1.5), numpy.int32(7), numpy.bool_(True), numpy.str_("x"),
                    numpy.datetime64("2026"), numpy.zeros((), fields)[()]],
        "dtypes": [numpy.dtype("f8"), numpy.dtype(">i2"), fields, numpy.dtype(("f4", (2, 3)))],
        "one dtype twice": [numpy.zeros(2, ">f4"), numpy.ones(2, ">f4")],
    }  # fmt: skip


BENIGN: dict[str, Any] = {
    "plain": {"a": [1, 2.5, None, True], "b": (1, ("x", b"y")), 3: {1, 2}, "c": 1 << 100},
    "empty": [b"", (), [], {}, set(), frozenset(), bytearray()],
    "builtins": [complex(1, -2), frozenset({1}), bytearray(b"ab"), slice(1, None, 2), range(3)],
    "collections": [
        collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {"a": [1]}),
        collections.deque([1, 2], maxlen=3), collections.Counter("abca"),
    ],
    "times": [
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc), datetime.date(2026, 1, 2),
        datetime.time(3, 4, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "x")),
        datetime.timedelta(1, 2, 3),
    ],
    "numbers": [decimal.Decimal("1.50"), fractions.Fraction(-3, 7)],
    "uuid": [uuid.UUID(int=7), uuid.SafeUUID.unknown],
    "paths": [pathlib.Path("/a/b"), pathlib.PurePosixPath("c")],
    "namespace": types.SimpleNamespace(a=1, b=[2]),
    "tuple keys": {(i, (i, "x")): i for i in range(100)},
    "random": random.Random(3).getstate(),
    "torch": [torch.Size([2, 3]), torch.device("cpu"), torch.float32, torch.strided],
    "numpy random": numpy.random.RandomState(3).get_state(),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.to_dense(), b.to_dense())
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.dtype.alignment == b.dtype.alignment and bool(numpy.all(a == b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return a.getvalue() == b.getvalue() if isinstance(a, io.BytesIO) else bool(a == b)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", [*BENIGN, *_arrays()])
def test_what_states_hold_is_loaded_from_every_protocol(name: str, protocol: int) -> None:
    value = {**BENIGN, **_arrays()}[name]
    if protocol == 5 and name in _arrays() or protocol == 5 and name.startswith("numpy"):
        pytest.skip("numpy has another way for protocol 5, which no save here uses")
    data = pickle.dumps(value, protocol)
    assert same(_unpickle.loads(data, "o"), pickle.loads(data))


def _framework_objects() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.note = "kept"  # type: ignore[attr-defined]
    dense = torch.eye(4)
    generator = torch.Generator().manual_seed(5)
    return {
        "tensors": {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(0), "c": torch.ones(())},
        "views": [base := torch.arange(10), base[2:4]],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "parameter with an attribute": parameter,
        "sparse": [dense.to_sparse(), dense.to_sparse_csr()],
        "generator": generator,
        "bytes": io.BytesIO(b"state"),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", _framework_objects())
def test_tensors_in_an_object_need_no_leave(name: str, protocol: int) -> None:
    value = _framework_objects()[name]
    data = pickle.dumps([value], protocol)
    assert not _unpickle.unlisted(data)
    (loaded,) = _unpickle.loads(data, "o")
    assert same(loaded, value)
    assert getattr(loaded, "note", None) == getattr(value, "note", None)


class Holder:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def test_leave_for_a_class_is_none_for_what_its_tensors_are_made_by(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    holdfast.save({"holder": Holder(torch.arange(3.0)), "generator": generator}, tmp_path / "s")
    with pytest.raises(holdfast.Error) as error:
        holdfast.load(tmp_path / "s")
    given = ast.literal_eval(error.value.message.rpartition("allow=")[2])
    assert given == [_unpickle.name_of(Holder)]
    loaded = holdfast.load(tmp_path / "s", allow=given)
    assert torch.equal(loaded["holder"].weight, torch.arange(3.0))
    assert same(loaded["generator"], generator)


def test_a_shared_value_stays_shared() -> None:
    shared = [1]
    dtype = numpy.dtype(">f4")
    loaded = _unpickle.loads(pickle.dumps([shared, shared, dtype, numpy.zeros(2, dtype)], 4), "o")
    assert loaded[0] is loaded[1]
    assert loaded[2] == dtype
    assert (loaded[3] == 0).all()


_SEEDS = [
    pickle.dumps(value, p)
    for value in [*BENIGN.values(), *_arrays().values(), *_framework_objects().values()]
    for p in (2, 4)
]


def _mutated(seed: int) -> bytes:
    rng = random.Random(seed)
    data = bytearray(rng.choice(_SEEDS))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] = ord(rng.choice(pickletools.opcodes).code)
        elif kind == 2:
            other = rng.choice(_SEEDS)
            begin = rng.randrange(len(other))
            data[at:at] = other[begin : begin + rng.randint(1, 40)]
        else:
            del data[at : at + rng.randint(1, 8)]
    return bytes(data)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_a_damaged_pickle_makes_something_or_is_an_error(first: int) -> None:
    def many() -> str:
        for seed in range(first, first + 200):
            try:
                touched(_mutated(seed))
            except holdfast.Error:
                pass
        return "all"

    assert in_child(many) == "made 'all'"


class Inner:
    pass


class Outer:
    def __init__(self) -> None:
        self.inner = [Inner()]
        self.when = datetime.date(2026, 1, 2)


@dataclasses.dataclass
class Part:
    weight: torch.Tensor


@dataclasses.dataclass
class Whole:
    part: Part
    outer: Outer


def test_all_names_that_a_load_needs_are_in_one_error(tmp_path: Path) -> None:
    state = {"a": Whole(Part(torch.ones(2)), Outer()), "b": Inner()}
    holdfast.save_async(state, tmp_path / "s").wait(60)
    with pytest.raises(holdfast.Error, match="Whole") as error:
        holdfast.load(tmp_path / "s")
    assert error.value.code == "PERMISSION_DENIED"
    given = ast.literal_eval(error.value.message.rpartition("allow=")[2])
    assert sorted(given) == sorted(_unpickle.name_of(c) for c in (Whole, Part, Outer, Inner))
    loaded = holdfast.load(tmp_path / "s", allow=given)
    assert torch.equal(loaded["a"].part.weight, torch.ones(2))
    assert isinstance(loaded["a"].outer.inner[0], Inner)
    # Of one pickle, too, and in both protocols.
    for protocol in (2, 4):
        with pytest.raises(holdfast.Error, match=r"allow=\[.*Inner', '.*Outer'\]"):
            _unpickle.loads(pickle.dumps(Outer(), protocol), "o")


class Trusted:
    def __init__(self, value: int = 3) -> None:
        self.value = value


@dataclasses.dataclass
class TrustedPart:
    weight: torch.Tensor


def test_what_the_user_trusts_in_torch_is_trusted_here(tmp_path: Path) -> None:
    state = {"a": Trusted(7), "b": TrustedPart(torch.ones(2))}
    holdfast.save(state, tmp_path / "s")
    holdfast.dcp.save({"a": Trusted(7)}, checkpoint_id=tmp_path / "dcp")
    into: dict[str, Any] = {"a": None}
    for load in (lambda: holdfast.load(tmp_path / "s"), lambda: holdfast.dcp.load(into, checkpoint_id=tmp_path / "dcp")):
        with pytest.raises((holdfast.Error, CheckpointException), match="PERMISSION_DENIED"):
            load()
    with torch.serialization.safe_globals([Trusted, TrustedPart]):
        loaded = holdfast.load(tmp_path / "s")
        assert isinstance(loaded["a"], Trusted) and loaded["a"].value == 7
        assert isinstance(loaded["b"], TrustedPart) and torch.equal(loaded["b"].weight, torch.ones(2))
        holdfast.dcp.load(into, checkpoint_id=tmp_path / "dcp")
        assert isinstance(into["a"], Trusted)
    with pytest.raises(holdfast.Error, match="PERMISSION_DENIED"):
        holdfast.load(tmp_path / "s")
    # An entry with a name of its own: what a class was called when it was saved.
    moved = pickle.dumps(Trusted(7), 4).replace(b"Trusted", b"Retired")
    with torch.serialization.safe_globals([(Trusted, f"{__name__}.Retired")]):
        assert _unpickle.loads(moved, "o").value == 7
    # It adds to the list, and takes nothing from the checks of what is on it.
    with torch.serialization.safe_globals([decimal.Decimal, Trusted]):
        with pytest.raises(holdfast.Error, match="DATA_LOSS"):
            _unpickle.loads(ATTACKS["decimal of a large integer"], "o")


# ---- Objects of DCP.


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("import builtins; builtins.holdfast_was_here = True",))


def archive(records: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, data in records.items():
            made.writestr(name, data)
    return out.getvalue()


def _stock_object(path: Path, data: bytes) -> None:
    """A checkpoint of the framework's own writer whose one object has these bytes."""
    dcp.save({"o": 1}, checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, len(data)
    (path / info.relative_path).write_bytes(data)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


CRAFTED = {
    "another name for its pickle": {
        "archive/DATA.PKL": pickle.dumps(Evil(), 2), "archive/x/data.pkl": pickle.dumps(1, 2),
        "archive/data/0": b"", "archive/version": b"3\n",
    },
    "two pickles": {"archive/data.pkl": pickle.dumps(1, 2), "archive/DATA.PKL": pickle.dumps(Evil(), 2)},
    "two pickles, the other way": {
        "archive/DATA.PKL": pickle.dumps(Evil(), 2), "archive/data.pkl": pickle.dumps(1, 2),
    },
    "a script": {"archive/data.pkl": pickle.dumps(Evil(), 2), "archive/constants.pkl": b"\x80\x02)."},
    "its pickle": {"archive/data.pkl": pickle.dumps(Evil(), 2)},
}  # fmt: skip


def test_a_deep_object_is_an_error(tmp_path: Path) -> None:
    data = b"\x80\x02]" + b"]" * 100_000 + b"a" * 100_000 + b"."
    _stock_object(tmp_path / "s", archive({"archive/data.pkl": data, "archive/version": b"3\n", "archive/data/0": b""}))

    with pytest.raises(CheckpointException, match=r"load o: .*nested too deeply"):
        dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(tmp_path / "s"))


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_object_runs_no_code(name: str, tmp_path: Path) -> None:
    _stock_object(tmp_path / "s", archive(CRAFTED[name]))
    state: dict[str, Any] = {"o": None}
    if name.startswith("two pickles"):  # the one that has the name is harmless
        dcp.load(state, storage_reader=holdfast.dcp.StorageReader(tmp_path / "s"))
        assert state == {"o": 1}
    else:
        with pytest.raises(CheckpointException, match=r"load o: .*PERMISSION_DENIED"):
            dcp.load(state, storage_reader=holdfast.dcp.StorageReader(tmp_path / "s"))
    assert not hasattr(builtins, "holdfast_was_here")


@pytest.mark.parametrize("name", [*BENIGN, *_arrays(), *_framework_objects()])
def test_every_allowed_object_goes_through_dcp(name: str, tmp_path: Path) -> None:
    value = {**BENIGN, **_arrays(), **_framework_objects()}[name]
    data = io.BytesIO()
    torch.save([value], data)
    for bytes_given in (data, objects.resaved(data, "o", frozenset())):
        again = objects.resaved(io.BytesIO(bytes_given.getvalue()), "o", frozenset())
        (loaded,) = torch.load(again, weights_only=False)
        assert same(loaded, pickle.loads(pickle.dumps(value, torch.serialization.DEFAULT_PROTOCOL)))
        assert getattr(loaded, "note", None) == getattr(value, "note", None)


def _edited(value: Any, old: bytes, new: bytes) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    with zipfile.ZipFile(data) as saved:
        records = {n: saved.read(n) for n in saved.namelist()}
    (name,) = (n for n in records if n.endswith("/data.pkl"))
    assert records[name].count(old) >= 1
    records[name] = records[name].replace(old, new)
    return archive(records)


def _outside() -> torch.Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.tensor([[1 << 20]]), torch.ones(1), (4,))


TENSORS = {
    "storage longer than its record": lambda: _edited(torch.zeros(77), b"K\x4d", b"M\xff\xff"),
    "tensor beyond its storage": lambda: _edited(torch.zeros(77)[:5], b"K\x05\x85", b"J\xff\xff\xff\x7f\x85"),
    "sparse indices beyond the shape": lambda: _edited(_outside(), b"sparse_coo", b"sparse_coo"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_lies_in_its_record(name: str) -> None:
    data = TENSORS[name]()

    def read() -> Any:
        again = objects.resaved(io.BytesIO(data), "o", frozenset())
        value = torch.load(again, weights_only=False)
        return float(value.to_dense().sum())

    answer = in_child(read)
    assert answer.startswith("DATA_LOSS load o: ")
    assert {"storage": "elements in", "tensor": "beyond its storage", "sparse": "size"}[name.split()[0]] in answer
