"""The framework's reader loads what ours writes, and ours what its writer wrote, bit for bit."""

from __future__ import annotations

import enum
import io
import math
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

import holdfast
import holdfast.dcp

pytestmark = pytest.mark.filterwarnings("ignore")

_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.frombuffer(
        bytearray(draw(st.binary(min_size=nbytes, max_size=nbytes)) or b"\0"), dtype=torch.uint8
    )[:nbytes].clone()
    if dtype == torch.bool:
        raw %= 2
    tensor = raw.view(dtype).reshape(shape)
    kind = draw(st.sampled_from(["plain", "transposed", "sliced", "part", "parameter", "conjugated", "negated"]))
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == "sliced" and tensor.dim() and tensor.shape[0] > 1:
        return tensor[::2]
    if kind == "part" and tensor.dim() and tensor.shape[0] > 1:
        return tensor[1:]
    if kind == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(tensor)
    if kind == "conjugated" and dtype.is_complex:
        return tensor.conj()
    if kind == "negated" and dtype not in (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2):
        return torch._neg_view(tensor)
    return tensor


_VALUES = st.one_of(
    tensors(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=10),
    st.booleans(),
    st.none(),
    st.binary(max_size=20),
    st.lists(st.integers(), max_size=3),
)
_KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
_STATES = st.dictionaries(
    _KEYS,
    st.one_of(_VALUES, st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=3)),
    min_size=1,
    max_size=5,
)


def empty_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {k: empty_like(v) for k, v in value.items()}
    return None


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, raw(a)) == (b.dtype, b.shape, raw(b))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert type(a) is type(b) and a == b


_SETTINGS = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _distinct(state: dict[str, Any]) -> bool:
    """Flattened names that collide are the framework's own limit."""
    flat = [f"{k}.{i}" if isinstance(v, dict) else k
            for k, v in state.items() for i in (v if isinstance(v, dict) else [""])]  # fmt: skip
    return len(set(flat)) == len(flat)


@_SETTINGS
@given(state=_STATES.filter(_distinct))
def test_what_ours_writes_the_stock_reader_loads(state: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ours"
    shutil.rmtree(path, ignore_errors=True)
    dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
    for reader in (dcp.FileSystemReader(path), holdfast.dcp.StorageReader(path)):
        loaded = empty_like(state)
        dcp.load(loaded, storage_reader=reader)
        assert_same(state, loaded)


@_SETTINGS
@given(state=_STATES.filter(_distinct))
@example(state={"no bytes": torch.zeros(0)})
def test_what_the_stock_writer_writes_ours_loads(state: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "stock"
    shutil.rmtree(path, ignore_errors=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))
    loaded = empty_like(state)
    reader = holdfast.dcp.StorageReader(path)
    dcp.load(loaded, storage_reader=reader)
    assert_same(state, loaded)
    assert reader.report["verified"] is False


def _box(name: str, shape: tuple[int, ...], dest: Any, source: Any, lengths: Any) -> ReadItem:
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, torch.Size([0] * len(shape))),
        dest_offsets=torch.Size(dest),
        storage_index=MetadataIndex(name, torch.Size([0] * len(shape))),
        storage_offsets=torch.Size(source),
        lengths=torch.Size(lengths),
    )


def test_metadata_of_older_torch_is_read(tmp_path: Path) -> None:
    """As PyTorch wrote it before the properties of tensors moved, and before `StorageMeta`."""
    from torch.distributed._shard.sharded_tensor import metadata as old
    from torch.distributed.checkpoint import metadata as new

    path = tmp_path / "old"
    state = {"a": torch.randn(10, 3), "b": torch.arange(5, dtype=torch.int16), "n": 5}
    dcp.save(state, checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for name in ("a", "b"):
        stored = metadata.state_dict_metadata[name]
        p = stored.properties
        stored.properties = old.TensorProperties(
            p.dtype, p.layout, p.requires_grad, p.memory_format, p.pin_memory
        )
    del metadata.storage_meta, metadata.version
    for protocol in (2, 3, pickle.DEFAULT_PROTOCOL):
        data = pickle.dumps(metadata, protocol)
        assert b"sharded_tensor.metadata" in data and b"save_id" not in data
        (path / ".metadata").write_bytes(data)
        for reader in (dcp.FileSystemReader(path), holdfast.dcp.StorageReader(path)):
            loaded = empty_like(state)
            dcp.load(loaded, storage_reader=reader)
            assert_same(state, loaded)
        read = holdfast.dcp.StorageReader(path).read_metadata()
        assert type(read.state_dict_metadata["a"].properties) is new.TensorProperties
        assert read.state_dict_metadata["b"].properties.dtype is torch.int16
        assert holdfast.dcp.verify(path)["verdict"] != "corrupt"


def test_metadata_of_newer_torch_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In PyTorch 2.15 a sixth property of a tensor has its strides; a seventh would be a newer one's."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    path = tmp_path / "new"
    state = {"a": torch.randn(10, 3)}
    dcp.save(state, checkpoint_id=path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    first_five = TensorProperties.__getstate__(metadata.state_dict_metadata["a"].properties)[:5]
    for further, is_read in ((((3, 1),), True), (((3, 1), "more"), False)):
        with monkeypatch.context() as patch:
            patch.setattr(TensorProperties, "__getstate__", lambda _, further=further: (*first_five, *further))
            data = pickle.dumps(metadata)
        (path / ".metadata").write_bytes(data)
        if is_read:
            loaded = empty_like(state)
            holdfast.dcp.load(loaded, checkpoint_id=path)
            assert_same(state, loaded)
            continue
        with pytest.raises(holdfast.Error, match="7 properties, as newer versions than PyTorch") as error:
            holdfast.dcp.StorageReader(path).read_metadata()
        assert error.value.code == "UNIMPLEMENTED"


@pytest.mark.parametrize("writer", ["ours", "stock", "stock transposed"])
@pytest.mark.parametrize("buffer_bytes", [256, 4096, 1 << 20])
def test_any_box_of_a_tensor_is_read_into_any_layout(
    writer: str, buffer_bytes: int, tmp_path: Path
) -> None:
    saved = torch.arange(7 * 9 * 11, dtype=torch.float32).reshape(7, 9, 11)
    if writer == "stock transposed":
        saved = saved.transpose(0, 2)
    path = tmp_path / "box"
    dcp.save(
        {"t": saved},
        storage_writer=(
            holdfast.dcp.StorageWriter(path)
            if writer == "ours"
            else dcp.FileSystemWriter(path, sync_files=False)
        ),
    )
    generator = torch.Generator().manual_seed(buffer_bytes)
    reader = holdfast.dcp.StorageReader(path, buffer_bytes=buffer_bytes)
    for target_kind in ("row-major", "transposed", "double"):
        shape = tuple(saved.shape)
        items = []
        target = torch.zeros(shape)
        if target_kind == "transposed":
            target = torch.zeros(shape[::-1]).transpose(0, 2)
        if target_kind == "double":
            target = torch.zeros(shape, dtype=torch.float64)
        expected = target.clone()
        for _ in range(4):
            lengths = [int(torch.randint(1, n + 1, (), generator=generator)) for n in shape]
            source = [int(torch.randint(0, n - k + 1, (), generator=generator))
                      for n, k in zip(shape, lengths, strict=True)]  # fmt: skip
            items = [_box("t", shape, source, source, lengths)]
            cut = tuple(slice(o, o + n) for o, n in zip(source, lengths, strict=True))
            expected[cut] = saved[cut].to(expected.dtype)
            planner = DefaultLoadPlanner()
            metadata = reader.read_metadata()
            planner.set_up_planner({"t": target}, metadata, True)
            reader.set_up_storage_reader(metadata, True)
            reader.read_data(LoadPlan(items), planner)
            assert torch.equal(target, expected)


def test_sharded_reading_is_bounded_by_the_buffer(tmp_path: Path) -> None:
    from holdfast._pieces import Piece, Source, cut

    source = Source(None, "t", 0, torch.float32, (1000, 10), (1000, 1))
    pieces = list(cut(Piece(source, torch.zeros(1000, 10)), 65536))
    assert len(pieces) > 10
    assert all(p.source.span <= 65536 for p in pieces)
    assert sum(math.prod(p.source.shape) for p in pieces) == 10000


class _Own(torch.Tensor):
    """Only ``torch.save`` can write it."""


def test_what_torch_alone_can_serialize_is_saved_by_torch(tmp_path: Path) -> None:
    own = torch.randn(5, 3).as_subclass(_Own)
    path = tmp_path / "own"
    dcp.save({"q": own}, storage_writer=holdfast.dcp.StorageWriter(path))
    read = dcp.FileSystemReader(path)
    metadata = read.read_metadata()
    (info,) = metadata.storage_data.values()
    data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
    with torch.serialization.safe_globals([_Own]):
        assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), own)
    assert holdfast.dcp.verify(path)["verdict"] == "sound"


def _per_tensor(scale: float, *values: float) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(values), scale, 3, torch.qint8)


def _per_channel(scale: float, *values: float) -> torch.Tensor:
    scales = torch.full((len(values),), scale)
    return torch.quantize_per_channel(torch.tensor(values), scales, torch.zeros(len(values)), 0, torch.qint8)


@pytest.mark.parametrize("make", [_per_tensor, _per_channel])
def test_quantized_tensors_are_never_read_with_another_scale(make: Any, tmp_path: Path) -> None:
    saved = make(0.5, 1.0, 2.0)
    dcp.save({"w": torch.ones(2), "deep": {"q": saved}}, checkpoint_id=tmp_path)
    for target in (make(0.25, 0.0, 0.0), torch.zeros(2), torch.empty(2, dtype=torch.qint8)):
        with pytest.raises(CheckpointException, match="load deep.q: a quantized tensor is stored there"):
            holdfast.dcp.load({"w": torch.zeros(2), "deep": {"q": target}}, checkpoint_id=tmp_path)
    alike = {"w": torch.zeros(2), "deep": {"q": make(0.5, 0.0, 0.0)}}
    holdfast.dcp.load(alike, checkpoint_id=tmp_path)
    assert torch.equal(alike["deep"]["q"], saved) and torch.equal(alike["w"], torch.ones(2))


_ODD = {
    "coo": (lambda: torch.eye(3).to_sparse(), "indices() and values()"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "crow_indices() and col_indices() and values()"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind()"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "unbind()"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "to_dense()"),
    "quantized": (lambda: _per_tensor(0.5, 1.0), "int_repr()"),
}


@pytest.mark.parametrize("kind", _ODD)
def test_a_layout_that_dcp_cannot_hold_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    make, remedy = _ODD[kind]
    state = {"w": torch.ones(2), "deep": {"odd": make()}}
    with pytest.raises(CheckpointException) as caught:
        holdfast.dcp.save(state, checkpoint_id=tmp_path / "first")
    (failure, _) = caught.value.failures[0]
    assert isinstance(failure, holdfast.Error) and failure.code == "INVALID_ARGUMENT"
    assert failure.message.startswith("save deep.odd: ") and remedy in failure.message
    # Also where a plan is known of the save before.
    holdfast.dcp.save({"w": torch.ones(2), "deep": {"odd": torch.ones(3)}}, checkpoint_id=tmp_path / "known")
    with pytest.raises(CheckpointException, match="save deep.odd: "):
        holdfast.dcp.save(state, checkpoint_id=tmp_path / "second")


def test_a_dtensor_that_was_not_reduced_is_refused_by_its_name(tmp_path: Path) -> None:
    with dcp_ranks.one_rank():
        mesh = init_device_mesh("cpu", (1,))
        state = {"w": torch.ones(2), "deep": {"odd": DTensor.from_local(torch.ones(2), mesh, [Partial()])}}
        with pytest.raises(CheckpointException, match=r"save deep\.odd: a DTensor with partial placements.*redistribute"):
            holdfast.dcp.save(state, checkpoint_id=tmp_path / "first")
        state["deep"]["odd"] = state["deep"]["odd"].redistribute(placements=[Replicate()])
        holdfast.dcp.save(state, checkpoint_id=tmp_path / "first")


def test_a_target_that_was_expanded_is_refused_by_its_name(tmp_path: Path) -> None:
    holdfast.dcp.save({"deep": {"w": torch.ones(3, 2)}}, checkpoint_id=tmp_path / "s")
    with pytest.raises(CheckpointException, match=r"load deep\.w: the target was expanded.*clone"):
        holdfast.dcp.load({"deep": {"w": torch.zeros(1, 2).expand(3, 2)}}, checkpoint_id=tmp_path / "s")


def test_a_layout_that_dcp_cannot_hold_is_refused_by_the_writer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="save s: tensors of layout"):
        dcp.save({"s": torch.eye(3).to_sparse()}, storage_writer=holdfast.dcp.StorageWriter(tmp_path / "a"))


def test_values_that_are_their_names_need_no_leave(tmp_path: Path) -> None:
    state = {"values": (..., NotImplemented)}
    assert holdfast.save({"e": ..., **state}, tmp_path / "plain")["needs_allow"] == []
    assert holdfast.load(tmp_path / "plain") == {"e": ..., **state}
    holdfast.dcp.save(state, checkpoint_id=tmp_path / "dcp")
    loaded = {"values": None}
    holdfast.dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert loaded == state


class Odd:
    """Not on any list."""

    def __init__(self) -> None:
        self.value = 3


def test_objects_are_refused_unless_allowed(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    for save in (
        lambda: dcp.save({"o": Odd()}, storage_writer=holdfast.dcp.StorageWriter(path)),
        lambda: dcp.save({"o": Odd()}, checkpoint_id=path),
    ):
        shutil.rmtree(path, ignore_errors=True)
        save()
        with pytest.raises(CheckpointException, match="Odd.*not on the list") as caught:
            dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(path))
        assert "PERMISSION_DENIED" in str(caught.value)
        for options in ({"allow": [Odd]}, {"trust": True}):
            state: dict[str, Any] = {"o": None}
            dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path, **options))
            assert state["o"].value == 3


class Colour(enum.Enum):
    RED = 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As Python 3.11.0 to 3.11.3 write every enum, also those in the framework's metadata.
        return (getattr, (type(self), self.name))


class Reach:
    """Reaches for what an allowed class leads to."""

    def __reduce__(self) -> Any:
        return (getattr, (Colour, "__reduce_ex__"))


def test_enums_are_read_as_every_python_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "enum"
    dcp.save({"o": [Colour.RED]}, storage_writer=holdfast.dcp.StorageWriter(path))
    with pytest.raises(CheckpointException, match="Colour.*not on the list"):
        dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(path))
    state: dict[str, Any] = {"o": None}
    dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path, allow=[Colour]))
    assert state["o"] == [Colour.RED]
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.planner_data = Colour.RED
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="not as the save's commit record has it"):
        dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(path, allow=[Colour]))
    with pytest.raises(CheckpointException, match="Colour.*not on the list"):
        dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(path, verify=False))
    dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path, allow=[Colour], verify=False))
    holdfast.save_async({"o": Colour.RED}, tmp_path / "plain").wait(60)
    with pytest.raises(holdfast.Error, match="Colour.*not on the list"):
        holdfast.load(tmp_path / "plain")
    assert holdfast.load(tmp_path / "plain", allow=[Colour])["o"] is Colour.RED


def test_an_allowed_class_leads_to_nothing_else(tmp_path: Path) -> None:
    dcp.save({"o": Reach()}, storage_writer=holdfast.dcp.StorageWriter(tmp_path / "s"))
    with pytest.raises(CheckpointException, match="no enum's member"):
        dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(tmp_path / "s", allow=[Colour]))


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("import builtins; builtins.holdfast_was_here = True",))


def test_every_pytorch_says_why_metadata_cannot_be_read(tmp_path: Path) -> None:
    """The framework asks for the metadata of all ranks, then for that of this rank. Before 2.13 it drops both errors."""
    reader = holdfast.dcp.StorageReader(tmp_path)
    with pytest.raises(holdfast.Error) as none:
        reader.read_metadata()
    (tmp_path / "__0.metadata").write_bytes(b"")
    with pytest.raises(holdfast.Error) as empty:
        holdfast.dcp.StorageReader(tmp_path).read_metadata(rank=0)
    for rank, why in ((1, none), (0, empty)):
        found = reader.read_metadata(rank=rank)
        with pytest.raises(holdfast.Error) as error:
            reader.set_up_storage_reader(found, True)
        assert error.value.message == why.value.message


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil"
    dcp.save({"o": 1}, storage_writer=holdfast.dcp.StorageWriter(path))
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointException, match="exec.*not on the list"):
        dcp.load({"o": 0}, storage_reader=holdfast.dcp.StorageReader(path))
    import builtins

    assert not hasattr(builtins, "holdfast_was_here")


def test_an_object_that_would_run_code_is_refused_before_the_planner_sees_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "evil"
    dcp.save({"o": Evil()}, storage_writer=holdfast.dcp.StorageWriter(path))
    with pytest.raises(CheckpointException, match="exec.*not on the list"):
        dcp.load({"o": None}, storage_reader=holdfast.dcp.StorageReader(path))
    import builtins

    assert not hasattr(builtins, "holdfast_was_here")


def test_a_flipped_bit_is_told_with_tensor_file_and_range(tmp_path: Path) -> None:
    path = tmp_path / "flip"
    state = {"a": torch.randn(1000), "b": torch.randn(1000)}
    dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(state["b"].numpy().tobytes()) + 17
    data[at] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointException, match="b.*__0_0.distcp|__0_0.distcp.*b") as caught:
        dcp.load(empty_like(state), storage_reader=holdfast.dcp.StorageReader(path))
    assert "DATA_LOSS" in str(caught.value)
    report = holdfast.dcp.verify(path)
    assert report["verdict"] == "corrupt"
    assert {f["tensor"] for f in report["faults"]} == {"b"}


def test_without_manifests_ours_is_read_unverified(tmp_path: Path) -> None:
    path = tmp_path / "bare"
    state = {"a": torch.randn(10, 3), "n": 5}
    dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path))
    for manifest in path.glob("rank-*"):
        manifest.unlink()
    loaded = empty_like(state)
    reader = holdfast.dcp.StorageReader(path)
    dcp.load(loaded, storage_reader=reader)
    assert_same(state, loaded)
    assert not reader.report["verified"]
    assert holdfast.dcp.verify(path)["verdict"] != "sound"


def test_each_rank_may_have_metadata_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "alone"
    state = {"a": torch.randn(10, 3), "n": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):  # the second time over the first
            dcp.save(state, storage_writer=holdfast.dcp.StorageWriter(path), use_collectives=False)
    names = sorted(p.name.split("-")[0] for p in path.iterdir())
    assert names == ["__0.metadata", "__0_1.distcp", "holdfast.commit", "rank"]
    assert holdfast.verify(path)["verdict"] == "sound"
    shutil.copytree(path, tmp_path / "damaged")
    (tmp_path / "damaged/__0.metadata").write_bytes(b"")
    assert holdfast.verify(tmp_path / "damaged")["verdict"] == "corrupt"
    reader = holdfast.dcp.StorageReader(path)
    planner = DefaultLoadPlanner()
    loaded = empty_like(state)
    metadata = reader.read_metadata(rank=0)
    planner.set_up_planner(loaded, metadata, True)
    reader.set_up_storage_reader(metadata, True, rank=0, use_collectives=False)
    reader.read_data(planner.create_local_plan(), planner)
    assert_same(state, loaded)


def test_urls_are_refused_by_writer_and_reader() -> None:
    for make in (holdfast.dcp.StorageWriter, holdfast.dcp.StorageReader):
        with pytest.raises(holdfast.Error, match="s3://bucket/x: only directories"):
            make("s3://bucket/x")
