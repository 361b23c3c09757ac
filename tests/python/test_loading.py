"""Loading into tensors of every kind: in place, each byte once, or a clear refusal."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_map

import holdfast
import holdfast.dcp
from holdfast import _devices, _native

MIB = 1 << 20
BENCHMARKS = str(Path(__file__).resolve().parents[2] / "python/benchmarks")


def saved(state: Any, path: Path) -> Path:
    holdfast.save_async(state, path).wait(60)
    return path


class Scaled(torch.Tensor):
    """Values times a scale, as quantized weights are: a wrapper without memory of its own."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, bits: int = 8) -> None:
        self.values_, self.scale, self.bits = values, scale, bits

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_", "scale"], {"bits": self.bits}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, *_: Any) -> Scaled:
        return cls(inner["values_"], inner["scale"], context["bits"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale, args[0].bits)
        plain = [tree_map(lambda x: x.dense() if isinstance(x, Scaled) else x, a) for a in (args, kwargs or {})]
        return function(*plain[0], **plain[1])

    def dense(self) -> torch.Tensor:
        return self.values_.to(self.scale.dtype) * self.scale


class Tagged(torch.Tensor):
    """A class and nothing else: its memory is a tensor's."""


def scaled(fill: int) -> Scaled:
    return Scaled(torch.full((6, 4), fill, dtype=torch.int8), torch.full((4,), fill / 2))


class Graph(torch.nn.Module):
    """Parameters and buffers of every kind."""

    def __init__(self, fill: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(scaled(fill), requires_grad=False)
        indices = torch.tensor([[0] * fill, range(fill)])
        self.register_buffer("adjacent", torch.sparse_coo_tensor(indices, torch.full((fill,), float(fill)), (8, 8)))
        self.sparse = torch.nn.Parameter(torch.eye(4).mul(fill).to_sparse())


def test_a_module_is_filled_whatever_its_tensors_are(tmp_path: Path) -> None:
    source, target = Graph(5), Graph(1)
    weight, values = target.weight, target.weight.values_
    loaded = holdfast.load(saved({"m": source}, tmp_path / "s"), into={"m": target})
    assert loaded["m"] is target
    assert torch.equal(target.linear.weight, source.linear.weight)
    assert torch.equal(target.adjacent.to_dense(), source.adjacent.to_dense())
    assert torch.equal(target.sparse.to_dense(), source.sparse.to_dense())
    assert target.weight is weight and weight.values_ is values
    assert torch.equal(weight.dense(), source.weight.dense())


class Restored(torch.nn.Module):
    """Its state dict has an entry that no tensor can be filled with."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.register_buffer("names", None)
        self.known = names

    def get_extra_state(self) -> Any:
        return tuple(self.known)

    def set_extra_state(self, state: Any) -> None:
        self.known = list(state)


def test_a_module_gets_what_had_to_be_made_anew(tmp_path: Path) -> None:
    target = Restored([])
    target.known = ["x", "y"]
    holdfast.load(saved({"m": Restored(["a", "b"])}, tmp_path / "s"), into={"m": target})
    assert target.known == ["a", "b"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_targets_are_filled_in_place(layout: str, tmp_path: Path) -> None:
    def make(count: int) -> torch.Tensor:
        dense = torch.zeros(4, 6)
        dense.view(-1)[:count] = float(count)
        return (
            dense.to_sparse()
            if layout == "coo"
            else getattr(dense, f"to_sparse_{layout}")(*[(2, 2)] * layout.startswith("bs"))
        )

    target = {"s": make(3)}
    there = target["s"]
    holdfast.load(saved({"s": make(20)}, tmp_path / "s"), into=target)
    assert target["s"] is there
    assert torch.equal(there.to_dense(), make(20).to_dense())
    for other in (torch.zeros(4, 6), torch.zeros(6, 4).to_sparse(), torch.zeros(4, 6).double().to_sparse()):
        with pytest.raises(holdfast.Error, match=r"load s: it (is|has shape) ") as error:
            holdfast.load(tmp_path / "s", into={"s": other})
        assert error.value.code == "INVALID_ARGUMENT"


def test_a_dense_tensor_is_not_read_into_a_sparse_one(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="load t: it is strided, the target sparse_coo"):
        holdfast.load(saved({"t": torch.ones(3, 3)}, tmp_path / "s"), into={"t": torch.eye(3).to_sparse()})


# ---- Subclasses.


def test_a_subclass_is_filled_and_not_replaced(tmp_path: Path) -> None:
    target = {"w": scaled(1)}
    there = target["w"]
    holdfast.load(saved({"w": scaled(7)}, tmp_path / "s"), into=target)
    assert target["w"] is there
    assert torch.equal(there.dense(), scaled(7).dense())
    with pytest.raises(holdfast.Error, match=r"w: it has shape \[6, 4\], the target \[2, 4\]"):
        other = Scaled(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(4))
        holdfast.load(tmp_path / "s", into={"w": other})


def test_a_subclass_of_another_context_is_made_anew(tmp_path: Path) -> None:
    path = saved({"w": scaled(7)}, tmp_path / "s")
    target = {"w": Scaled(torch.zeros(6, 4, dtype=torch.int8), torch.zeros(4), bits=4)}
    holdfast.load(path, into=target, allow=[Scaled])
    assert target["w"].bits == 8
    assert torch.equal(target["w"].dense(), scaled(7).dense())


def test_a_plain_tensor_is_read_into_a_subclass_by_its_own_copy(tmp_path: Path) -> None:
    target = {"t": torch.zeros(3, 4).as_subclass(Tagged)}
    there = target["t"]
    holdfast.load(saved({"t": torch.ones(3, 4)}, tmp_path / "s"), into=target)
    assert target["t"] is there and bool((there == 1).all())


def test_subclasses_come_back_as_what_they_were(tmp_path: Path) -> None:
    tagged = torch.arange(6.0).reshape(2, 3).as_subclass(Tagged)
    state = {"wrapped": torch.nn.Parameter(scaled(3), requires_grad=False), "tagged": tagged}
    path = saved(state, tmp_path / "s")
    with pytest.raises(holdfast.Error, match="allow=") as error:
        holdfast.load(path)
    assert error.value.code == "PERMISSION_DENIED"
    loaded = holdfast.load(path, allow=[Scaled, Tagged])
    assert type(loaded["tagged"]) is Tagged and torch.equal(loaded["tagged"], tagged)
    assert type(loaded["wrapped"]) is Scaled and isinstance(loaded["wrapped"], torch.nn.Parameter)
    assert not loaded["wrapped"].requires_grad
    assert torch.equal(loaded["wrapped"].dense(), scaled(3).dense())
    # One by one the bytes are asked for, which need no class.
    assert type(holdfast.open(path)["tagged"]) is torch.Tensor


class Named(torch.nn.Parameter):
    """As libraries derive them."""


def test_parameters_come_back_as_parameters_of_their_class(tmp_path: Path) -> None:
    state = {"named": Named(torch.ones(3)), "sparse": torch.nn.Parameter(torch.eye(3).to_sparse())}
    loaded = holdfast.load(saved(state, tmp_path / "s"), allow=[Named])
    assert type(loaded["named"]) is Named and loaded["named"].is_leaf and loaded["named"].requires_grad
    assert isinstance(loaded["sparse"], torch.nn.Parameter) and loaded["sparse"].requires_grad


class Bare(torch.Tensor):
    """A wrapper that does not say what it wraps."""

    @staticmethod
    def __new__(cls) -> Bare:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise AssertionError(f"{function} is asked of it")


def test_a_subclass_whose_bytes_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="save w: .*:Bare has no memory of its own") as error:
        holdfast.save_async({"w": Bare()}, tmp_path / "s")
    assert error.value.code == "INVALID_ARGUMENT"


# ---- Layouts.


def test_targets_that_overlap_are_all_filled(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    path = saved({"all": base, "low": base[:60]}, tmp_path / "s")
    for order in (("all", "low"), ("low", "all")):
        target = torch.zeros(100)
        views = {"all": target, "low": target[:60]}
        holdfast.load(path, into={name: views[name] for name in order})
        assert torch.equal(target, base)


@pytest.mark.parametrize(
    "lazy", [lambda t: t.conj(), lambda t: t.conj().imag, lambda t: torch._neg_view(t)], ids=["conj", "imag", "neg"]
)
def test_lazily_changed_targets_get_the_values(lazy: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    source = lazy(torch.randn(3, 4, dtype=torch.complex64))
    target = lazy(torch.zeros(3, 4, dtype=torch.complex64))
    holdfast.load(saved({"t": source}, tmp_path / "s"), into={"t": target})
    assert torch.equal(target.resolve_conj().resolve_neg(), source.resolve_conj().resolve_neg())


def test_expanded_targets(tmp_path: Path) -> None:
    row = torch.arange(4.0)
    path = saved({"t": row.expand(3, 4), "u": torch.ones(3, 4)}, tmp_path / "s")
    target = torch.zeros(4)
    holdfast.load(path, into={"t": target.expand(3, 4)}, strict=False)
    assert torch.equal(target, row)
    with pytest.raises(holdfast.Error, match=r"load u: the target is expanded.*contiguous\(\)") as error:
        holdfast.load(path, into={"u": torch.zeros(4).expand(3, 4)}, strict=False)
    assert error.value.code == "INVALID_ARGUMENT"


def test_targets_that_overlap_themselves(tmp_path: Path) -> None:
    path = saved({"x": torch.arange(12.0).reshape(3, 4)}, tmp_path / "s")
    run = torch.zeros(6)
    with pytest.raises(holdfast.Error, match=r"load x: the target .*overlaps itself.*contiguous\(\)"):
        holdfast.load(path, into={"x": run.as_strided((3, 4), (1, 1))})
    assert not run.any()
    windows = torch.arange(6.0).unfold(0, 4, 1)
    path = saved({"x": windows}, tmp_path / "windows")
    holdfast.load(path, into={"x": run.as_strided((3, 4), (1, 1))})  # as what was saved
    assert torch.equal(run, torch.arange(6.0))
    apart = torch.zeros(40).as_strided((3, 4), (5, 1), 2)
    holdfast.load(path, into={"x": apart})
    assert torch.equal(apart, windows)


@pytest.mark.parametrize(
    ("saved_as", "target_as"),
    [
        (lambda x: x, lambda x: x.t()),
        (lambda x: x.t(), lambda x: x),
        (lambda x: x.t(), lambda x: x.t()),
        (lambda x: x[::2, ::3], lambda x: x),
        (lambda x: x[:, :5], lambda x: x.repeat(2, 2)[::2, ::2]),
    ],
)
def test_any_stride_is_read_into_any_other(saved_as: Any, target_as: Any, tmp_path: Path) -> None:
    source = saved_as(torch.arange(4096.0).reshape(64, 64))
    target = target_as(
        torch.zeros(source.shape if target_as(torch.zeros(1, 2)).shape == (1, 2) else source.shape[::-1])
    )
    holdfast.load(saved({"t": source}, tmp_path / "s"), into={"t": target})
    assert torch.equal(target, source)


@pytest.mark.parametrize("begin", range(4))
def test_views_that_overlap_at_any_byte_come_back(begin: int, tmp_path: Path) -> None:
    memory = torch.arange(40, dtype=torch.uint8)
    state = {"a": memory[begin : begin + 25], "b": memory[4:12].view(torch.int32), "c": memory[8:24].view(torch.int64)}
    path = saved(state, tmp_path / "s")
    loaded = holdfast.load(path)
    assert all(torch.equal(loaded[k], v) for k, v in state.items())
    loaded["b"][0] = -1
    assert loaded["a"][4 - begin] == 255
    into = {k: torch.zeros_like(v) for k, v in state.items()}
    holdfast.load(path, into=into)
    assert all(torch.equal(into[k], v) for k, v in state.items())


def test_overlaps_that_no_memory_can_have_again_are_refused(tmp_path: Path) -> None:
    memory = bytearray(64)
    state = {
        "a": torch.frombuffer(memory, dtype=torch.int32, count=4, offset=0),
        "b": torch.frombuffer(memory, dtype=torch.int32, count=4, offset=6),
    }
    with pytest.raises(holdfast.Error, match=r"save b: it overlaps a .*clone\(\)") as error:
        holdfast.save_async(state, tmp_path / "s")
    assert error.value.code == "INVALID_ARGUMENT"


PEAK = """
import sys, torch, holdfast, holdfast.loading
sys.path.append(sys.argv[2])
import resident_memory
target = {"view": torch.ones(4096, 2048).t(), "turned": torch.ones(4096, 8192).t()}
holdfast.load(sys.argv[1], into={"small": torch.zeros(10, 10).t()}, strict=False)
memory = resident_memory.Since()
holdfast.load(sys.argv[1], into=target, strict=False, buffer_bytes=32 << 20)
assert target["view"][3, 2] == 3 + 2 * 8192 and target["turned"][5, 7] == 7 + 5 * 4096
print(memory.peak())
"""


def test_another_layout_takes_the_buffer_and_no_second_copy(tmp_path: Path) -> None:
    """Neither of the tensor nor of the storage that it is a view of."""
    base = torch.arange(4096.0 * 8192).reshape(8192, 4096)
    state = {"view": base.view(4096, 8192).t()[:2048], "turned": base.clone(), "small": torch.ones(10, 10)}
    path = saved(state, tmp_path / "s")
    done = subprocess.run([sys.executable, "-c", PEAK, str(path), BENCHMARKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64 * MIB


# ---- Damage.


@pytest.mark.parametrize("partial", [True, False])
def test_a_damaged_checkpoint_leaves_the_target_as_it_is(partial: bool, tmp_path: Path) -> None:
    """With partial=False; by default only what was read before the damage was found is changed."""
    path = saved({f"t{i}": torch.ones(3 * MIB) for i in range(4)}, tmp_path / "s")
    with open(path / "model-00000-of-00001.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")
    target = {f"t{i}": torch.zeros(3 * MIB) for i in range(4)}
    with pytest.raises(holdfast.Error) as error:
        holdfast.load(path, into=target, partial=partial, buffer_bytes=9 * MIB)
    assert error.value.code == "DATA_LOSS" and "t3" in error.value.message
    assert partial or not any(t.any() for t in target.values())


def test_a_sound_checkpoint_is_loaded_after_the_comparison(tmp_path: Path) -> None:
    path = saved({"t": torch.ones(3 * MIB), "empty": torch.ones(0), "n": 5}, tmp_path / "s")
    target = {"t": torch.zeros(3 * MIB), "empty": torch.ones(0), "n": 0}
    holdfast.load(path, into=target, partial=False, buffer_bytes=9 * MIB)
    assert target["t"].all() and target["n"] == 5


# ---- Devices.


class Ordered(_native.Device):
    """Copies at once, and notes what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def name(self) -> str:
        return "ordered:0"

    def order_after(self, stream: int) -> None:
        self.events.append("order")

    def copy_from_host(self, destination: int, source: int, nbytes: int) -> int:
        ctypes.memmove(destination, source, nbytes)
        self.events.append("copy")
        return 0

    def is_done(self, ticket: int) -> bool:
        return True

    def wait(self, ticket: int, seconds: float) -> bool:
        return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["new", "in place", "dcp"])
def test_copies_to_a_device_come_after_what_its_stream_has_queued(way: str, tmp_path: Path) -> None:
    """Memory that is loaded into may still be written by a kernel, of its last owner or its own."""
    state, target = {"t": torch.ones(1000)}, {"t": torch.zeros(1000)}
    if way == "dcp":
        dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(tmp_path / "s"))
    else:
        saved(state, tmp_path / "s")
    device = Ordered()
    with _devices.stand_in("cpu", device):
        if way == "dcp":
            dcp.load(target, storage_reader=holdfast.dcp.StorageReader(tmp_path / "s"))
        else:
            target = holdfast.load(tmp_path / "s", into=target if way == "in place" else None)
    assert target["t"].all()
    assert device.events == ["order", "copy"]


# ---- Arrays of other frameworks.


class Foreign:
    """An array of which nothing is known but DLPack."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.memory = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()


def test_arrays_of_other_frameworks_come_back_bitwise(tmp_path: Path) -> None:
    values = torch.randn(50, 7).t()
    save = holdfast.save_async({"a": Foreign(values)}, tmp_path / "s", objects="refuse")
    kept = values.clone()
    values.zero_()
    save.wait(60)
    target = Foreign(torch.zeros(50, 7).t())
    loaded = holdfast.load(tmp_path / "s", into={"a": target})
    assert loaded["a"] is target
    assert torch.equal(target.memory, kept)
    assert torch.equal(holdfast.load(tmp_path / "s")["a"], kept)


def test_an_array_that_torch_cannot_take_is_an_object(tmp_path: Path) -> None:
    save = holdfast.save_async({"a": Refusing()}, tmp_path / "s")
    save.wait(60)
    assert save.objects == ["a"]


class Refusing:
    """As an array of a dtype that torch lacks."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("no such dtype")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


# ---- Names.


def test_paths_that_read_the_same_can_be_opened(tmp_path: Path) -> None:
    path = saved({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, tmp_path / "s")
    checkpoint = holdfast.open(path)
    assert list(checkpoint) == ["a.b", "a.b~2"]
    assert checkpoint["a.b"].all() and not checkpoint["a.b~2"].any()


@pytest.mark.parametrize(
    "operation",
    [holdfast.verify, holdfast.find_newest, holdfast.list_checkpoints, holdfast.recover],
)
def test_urls_are_refused_as_what_they_are(operation: Any) -> None:
    with pytest.raises(holdfast.Error, match="s3://bucket/run: only directories.*no URLs") as error:
        operation("s3://bucket/run")
    assert error.value.code == "INVALID_ARGUMENT"


# ---- What a graph of autograd and a module's own versions see of a load.


def into_plainly(values: dict[str, Any], path: Path) -> None:
    holdfast.load(path, into=values)


def into_under_dcp(values: dict[str, Any], path: Path) -> None:
    dcp.load(values, storage_reader=holdfast.dcp.StorageReader(path))


@pytest.mark.parametrize("target", ["direct", "through the buffer"])
@pytest.mark.parametrize("way", [into_plainly, into_under_dcp])
def test_a_load_between_forward_and_backward_is_seen_by_backward(
    way: Callable[..., None], target: str, tmp_path: Path
) -> None:
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    if target == "through the buffer":
        weight = weight.detach().t().contiguous().t().requires_grad_()
    if way is into_plainly:
        saved({"w": torch.ones(2, 3)}, tmp_path / "s")
    else:
        dcp.save({"w": torch.ones(2, 3)}, storage_writer=holdfast.dcp.StorageWriter(tmp_path / "s"))
    squares = (weight * weight).sum()
    way({"w": weight}, tmp_path / "s")
    assert (weight == 1).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_tensors_of_inference_are_filled(tmp_path: Path) -> None:
    saved({"w": torch.ones(3)}, tmp_path / "s")
    with torch.inference_mode():
        target = torch.zeros(3)
    holdfast.load(tmp_path / "s", into={"w": target})
    assert (target == 1).all()


class Holder:
    """An object with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_tensor_in_an_object_goes_where_the_map_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    state = {"o": Holder(torch.arange(3.0))}
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
        holdfast.save(state, tmp_path / "s")
        holdfast.dcp.save({"o": state["o"], "t": torch.ones(1)}, checkpoint_id=tmp_path / "d")
    with pytest.raises(holdfast.Error, match="saved from cuda:1, and there is no CUDA here; pass map_location='cpu'"):
        holdfast.load(tmp_path / "s", allow=[Holder])
    asked = []

    def place(saved: str) -> str:
        asked.append(saved)
        return "cpu"

    for given in ("cpu", {"cuda:1": "cpu"}, place):
        loaded = holdfast.load(tmp_path / "s", allow=[Holder], map_location=given)["o"].tensor
        assert torch.equal(loaded, torch.arange(3.0))
    assert asked == ["cuda:1"]
    with pytest.raises(CheckpointException, match="saved from cuda:1, and there is no CUDA here; load it where"):
        reader = holdfast.dcp.StorageReader(tmp_path / "d", allow=[Holder])
        holdfast.dcp.load({"o": None, "t": torch.zeros(1)}, storage_reader=reader)


@pytest.mark.parametrize(("rocm", "kind"), [(None, "cuda"), ("6.4", "hip")])
def test_a_gpu_has_the_driver_of_this_pytorch(rocm: str | None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(torch.version, "hip", rocm)
    with pytest.raises(holdfast.Error, match=rf"{kind}(:0| devices)"):
        _devices.device_of(torch.device("cuda", 0))
