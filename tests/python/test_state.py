"""States of every kind come back as they were, bit for bit, with what shares memory sharing it."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import math
import random
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast._tensor_kinds import as_bytes, in_memory, same_bytes

DTYPES = sorted(
    (
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and "q" not in str(d).removeprefix("torch.") and "bits" not in str(d)
    ),
    key=str,
)


def raw(tensor: torch.Tensor) -> bytes:
    """Its elements' bytes in order, whatever they mean."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested states, types and strides included."""
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and (a.numel() == 0 or raw(a) == raw(b))
        )
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return a == b


def through_disk(state: Any, path: Path, **options: Any) -> Any:
    holdfast.save_async(state, path).wait(60)
    assert holdfast.verify(path)["verdict"] == "sound"
    return holdfast.load(path, **options)


class Point(NamedTuple):
    x: torch.Tensor
    y: int


@dataclasses.dataclass
class Config:
    weight: torch.Tensor
    names: list[str]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bitwise(dtype: torch.dtype, tmp_path: Path) -> None:
    item = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * item,), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), 0, (2, 3, 4))
    state = {"all": tensor, "zero_dim": tensor[0, 0, 0], "empty": torch.empty((0, 3), dtype=dtype)}
    assert same(through_disk(state, tmp_path / "s"), state)


def test_every_dtype_is_loaded_under_deterministic_algorithms(tmp_path: Path) -> None:
    """PyTorch then fills new memory, which it cannot in every dtype."""
    bits = torch.randint(0, 2, (64,), dtype=torch.uint8)

    def tensors(copied: bool) -> list[torch.Tensor]:
        memory = [bits.clone() if copied else bits for _ in DTYPES]
        return [torch.empty(0, dtype=d).set_(m.untyped_storage(), 0, (2,)) for d, m in zip(DTYPES, memory, strict=True)]

    state = {"views": tensors(False), "alone": tensors(True)}
    holdfast.save(state, tmp_path / "s")
    torch.use_deterministic_algorithms(True)
    try:
        assert same(holdfast.load(tmp_path / "s"), state)
    finally:
        torch.use_deterministic_algorithms(False)


def test_quantized_tensors_are_refused_with_what_to_do(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    with pytest.raises(holdfast.Error, match=r"a\.b: quantized.*int_repr") as error:
        holdfast.save_async({"a": {"b": quantized}}, tmp_path / "s")
    assert error.value.code == "INVALID_ARGUMENT"
    assert not (tmp_path / "s").exists()


def test_nested_tensors_are_refused_with_what_to_do(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(holdfast.Error, match=r"a\.b: nested.*unbind") as error:
        holdfast.save_async({"a": {"b": nested}}, tmp_path / "s")
    assert error.value.code == "INVALID_ARGUMENT"


def test_arrays_that_torch_cannot_share_keep_their_values(tmp_path: Path) -> None:
    records = np.zeros(3, dtype=[("count", "i4"), ("mean", "f8")])
    records["mean"] = [1, 2, 3]
    arrays = {"foreign order": np.array([1, 258], ">i4"), "field": records["mean"], "reversed": np.arange(4)[::-1]}
    loaded = through_disk(arrays, tmp_path / "s")
    assert {name: array.tolist() for name, array in loaded.items()} == {
        "foreign order": [1, 258],
        "field": [1.0, 2.0, 3.0],
        "reversed": [3, 2, 1, 0],
    }


@pytest.mark.parametrize(
    "array", [np.ma.array([1, 2], mask=[False, True]), np.ma.array([1.0]), np.ndarray.view(np.ones(2), np.matrix)]
)
def test_arrays_that_are_more_than_elements_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(holdfast.Error, match=r"save a\.b: a numpy.*asarray") as error:
        holdfast.save_async({"a": {"b": array}}, tmp_path / "s")
    assert error.value.code == "INVALID_ARGUMENT"


def test_an_array_over_a_file_is_saved_as_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "mapped", dtype="f4", mode="w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    loaded = through_disk({"mapped": mapped}, tmp_path / "s")["mapped"]
    assert type(loaded) is np.ndarray
    assert loaded.tolist() == [1, 2, 3]


def test_containers_and_plain_values_keep_their_types(tmp_path: Path) -> None:
    state = {
        "ordered": collections.OrderedDict(b=1, a=2),
        "tuple": (1, (2.5, None), [True, "text", b"\x00\xff"]),
        "set": {1, 2},
        "frozen": frozenset({"x"}),
        5: "an int key",
        (1, "a"): "a tuple key",
        "huge": 2**80,
        "negative zero": -0.0,
        "infinity": -math.inf,
        "nan": struct.unpack("d", b"\x01\x00\x00\x00\x00\x00\xf8\x7f")[0],
        "complex": complex(1, -2.5),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "slice": slice(1, None, 2),
        "array": np.arange(6, dtype=np.float16).reshape(2, 3),
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state(),
        "torch rng": torch.get_rng_state(),
    }
    loaded = through_disk(state, tmp_path / "s")
    assert same(loaded, state)


def test_named_tuples_and_dataclasses_need_leave_and_come_back(tmp_path: Path) -> None:
    state = {"point": Point(torch.ones(2), 3), "config": Config(torch.zeros(3), ["a"])}
    holdfast.save_async(state, tmp_path / "s").wait(60)
    with pytest.raises(holdfast.Error, match="allow="):
        holdfast.load(tmp_path / "s")
    loaded = holdfast.load(tmp_path / "s", allow=[Point, Config])
    assert isinstance(loaded["point"], Point)
    assert loaded["point"].y == 3
    assert isinstance(loaded["config"], Config)
    assert torch.equal(loaded["config"].weight, state["config"].weight)


def test_tied_weights_stay_one_storage_and_are_written_once(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(1000, 10))
    state = {"embedding": weight, "head": {"weight": weight}, "detached": weight.detach()}
    save = holdfast.save_async(state, tmp_path / "s")
    assert save.wait(60)["bytes"] < 2 * weight.nbytes
    loaded = holdfast.load(tmp_path / "s")
    assert loaded["embedding"].data_ptr() == loaded["head"]["weight"].data_ptr()
    assert loaded["detached"].data_ptr() == loaded["embedding"].data_ptr()
    assert isinstance(loaded["embedding"], torch.nn.Parameter)
    assert same(loaded, state)


def test_overlapping_views_come_back_overlapping(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    state = {"low": base[:60], "high": base[40:], "strided": base[::2], "bits": base[:10].view(torch.int32)}
    loaded = through_disk(state, tmp_path / "s")
    assert same(loaded, state)
    loaded["low"][50] = -1.0
    assert loaded["high"][10] == -1.0
    assert loaded["strided"][25] == -1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, 1],
        lambda x: x[1:3, 2:4],
        lambda x: x.expand(4, 6, 8),
        lambda x: x.reshape(2, 3, 2, 4).permute(3, 1, 0, 2),
        lambda x: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda x: x.flip(0),
        lambda x: torch.randn(3, 4, dtype=torch.complex64).conj(),
        lambda x: torch.randn(3, 4, dtype=torch.complex64).imag,
        lambda x: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    ],
)
def test_views_of_any_stride_come_back(make: Any, tmp_path: Path) -> None:
    tensor = make(torch.randn(6, 8))
    loaded = through_disk({"t": tensor}, tmp_path / "s")["t"]
    assert same(loaded, tensor.resolve_conj().resolve_neg())
    if tensor.is_contiguous(memory_format=torch.channels_last) and tensor.dim() == 4:
        assert loaded.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(7, 5)[:, 1:4],
        lambda: torch.arange(40, dtype=torch.uint8)[1::3],
        lambda: torch.zeros(3, 5)[:1, 2],
        lambda: torch.zeros(3, 5)[:0, 2],
        lambda: torch.tensor([math.nan, -0.0]),
        lambda: torch.randn(6, dtype=torch.complex64).conj().imag,
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.zeros((64 << 20) + 3, dtype=torch.int8),
    ],
)
def test_tensors_are_compared_bit_for_bit(make: Any) -> None:
    tensor = make()
    one, again = (as_bytes(in_memory(t)) for t in (tensor, tensor.detach().clone()))
    assert same_bytes(one, again)
    for at in {0, len(one) // 2, len(one) - 1} if len(one) else ():
        again[at] ^= 1
        assert not same_bytes(one, again), at
        again[at] ^= 1
    assert not same_bytes(one, torch.zeros(len(one) + 1, dtype=torch.uint8))


def test_a_subclass_compares_its_bytes_itself() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return True if function is torch.equal else super().__torch_function__(function, types, args, kwargs or {})

    assert same_bytes(torch.zeros(3, dtype=torch.uint8).as_subclass(Wrapper), torch.ones(3, dtype=torch.uint8))


def test_a_thin_view_does_not_write_all_of_its_storage(tmp_path: Path) -> None:
    column = torch.randn(1000, 1000)[:, 3]
    save = holdfast.save_async({"column": column}, tmp_path / "s")
    assert save.wait(60)["bytes"] < 100_000
    assert save.contiguous_copies == ["column"]
    assert same(holdfast.load(tmp_path / "s")["column"], column)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "uncoalesced"])
def test_sparse_layouts_come_back(layout: str, tmp_path: Path) -> None:
    dense = torch.zeros(4, 6)
    dense[1, 2], dense[3, 5] = 1.5, -2.0
    sparse = {
        "coo": lambda: dense.to_sparse(),
        "csr": lambda: dense.to_sparse_csr(),
        "csc": lambda: dense.to_sparse_csc(),
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 6)),
    }[layout]()
    loaded = through_disk({"s": sparse}, tmp_path / "s")["s"]
    assert loaded.layout == sparse.layout
    assert torch.equal(loaded.to_dense(), sparse.to_dense())
    if layout == "uncoalesced":
        assert not loaded.is_coalesced()


def test_objects_are_pickled_listed_and_refusable(tmp_path: Path) -> None:
    state = {"price": decimal.Decimal("1.50"), "when": datetime.date(2026, 1, 2)}
    save = holdfast.save_async(state, tmp_path / "s")
    assert save.wait(60)["objects"] == ["price", "when"]
    assert holdfast.load(tmp_path / "s") == state
    with pytest.raises(holdfast.Error, match="price.*decimal:Decimal"):
        holdfast.save_async(state, tmp_path / "t", objects="refuse")


class Evil:
    def __reduce__(self) -> Any:
        return (__import__("os").system, ("touch /tmp/holdfast-was-here",))


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    holdfast.save_async({"e": Evil(), "x": torch.ones(2)}, tmp_path / "s").wait(60)
    with pytest.raises(holdfast.Error, match="posix:system") as error:
        holdfast.load(tmp_path / "s")
    assert error.value.code == "PERMISSION_DENIED"
    assert torch.equal(holdfast.open(tmp_path / "s")["x"], torch.ones(2))  # the rest can be read


def test_unpicklable_objects_and_cycles_are_named(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match=r"save a\.f: .*cannot be pickled"):
        holdfast.save_async({"a": {"f": lambda: 1}}, tmp_path / "s")
    cyclic: dict[str, Any] = {"inner": {}}
    cyclic["inner"]["outer"] = cyclic
    with pytest.raises(holdfast.Error, match="contains itself"):
        holdfast.save_async(cyclic, tmp_path / "s")


def test_paths_that_read_the_same_do_not_collide(tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}
    assert same(through_disk(state, tmp_path / "s"), state)


def test_reference_library_reads_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    holdfast.save_async({"model": model}, tmp_path / "s").wait(60)
    read = load_file(tmp_path / "s" / "model-00000-of-00001.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[f"model.{name}"], tensor)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    torch.optim.Adam,
    lambda p: torch.optim.Adam(p, amsgrad=True, fused=True),
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
]


def trained(make: Any, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("steps_there", [0, 1])
def test_optimizers_go_on_as_if_nothing_happened(make: Any, steps_there: int, tmp_path: Path) -> None:
    """Loaded into an optimizer before its first step, and into one that has a state already."""
    model, optimizer, scheduler = trained(make, 3)
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    holdfast.save_async(saved, tmp_path / "s").wait(60)
    other, its_optimizer, its_scheduler = trained(make, steps_there)
    places = [p.data_ptr() for p in other.parameters()]
    holdfast.load(tmp_path / "s", into={"model": other, "optimizer": its_optimizer,
                                        "scheduler": its_scheduler})
    assert [p.data_ptr() for p in other.parameters()] == places
    for m, o, s in ((model, optimizer, scheduler), (other, its_optimizer, its_scheduler)):
        o.zero_grad()
        m(torch.ones(5, 4)).square().sum().backward()
        o.step()
        s.step()
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert its_scheduler.state_dict()["last_epoch"] == scheduler.state_dict()["last_epoch"]


# ---- Anything at all.

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
                          torch.float64, torch.complex64, torch.float8_e4m3fn])


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(dtypes)
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    item = torch.empty(0, dtype=dtype).element_size()
    count = math.prod(shape)
    data = draw(st.binary(min_size=count * item, max_size=count * item))
    if dtype == torch.bool:
        data = bytes(b & 1 for b in data)
    storage = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(storage.untyped_storage(), 0, tuple(shape))
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


states = st.recursive(
    st.one_of(scalars, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=6), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(state=states)
def test_any_state_comes_back(state: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "s"
    holdfast.save_async({"state": state}, path).wait(60)
    assert same(holdfast.load(path)["state"], state)


# ---- Versions of modules.


class Renamed(torch.nn.Module):
    """Version 3 of a module: until 2 its weight was stored transposed."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        if self.seen is None or self.seen < 3:
            state[prefix + "weight"] = state[prefix + "weight"].detach().t().clone()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def old_state() -> dict[str, Any]:
    """What version 2 has saved."""
    state = torch.nn.ModuleDict({"inner": Renamed()}).state_dict()
    state["inner.weight"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    state._metadata["inner"]["version"] = 2
    return state


def test_versions_of_modules_come_back_with_their_state(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"inner": Renamed()})
    for name, state in (("module", model), ("dict", model.state_dict()), ("old", old_state())):
        loaded = through_disk({"m": state}, tmp_path / name)["m"]
        model.load_state_dict(loaded)
        assert model["inner"].seen == (2 if name == "old" else 3), name
    assert torch.equal(model["inner"].weight, torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    target = model.state_dict()
    holdfast.load(tmp_path / "old", into={"m": target})
    assert target._metadata["inner"]["version"] == 2


def test_a_module_that_is_filled_takes_over_an_older_version(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"inner": Renamed()})
    holdfast.save_async({"m": old_state()}, tmp_path / "s").wait(60)
    holdfast.load(tmp_path / "s", into={"m": model})
    assert torch.equal(model["inner"].weight, torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


class Noted(torch.nn.Module):
    """With more than plain values beside its state."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination._metadata[prefix[:-1]]["note"] = object()


def test_of_metadata_plain_values_are_saved(tmp_path: Path) -> None:
    save = holdfast.save_async({"m": Noted()}, tmp_path / "s")
    save.wait(60)
    assert save.objects == []
    assert holdfast.load(tmp_path / "s")["m"]._metadata == {"": {"version": 1}}
