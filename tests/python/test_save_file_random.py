"""`save_file` of random objects: torch.load makes of its files what it makes of torch.save's, or fails as there."""

from __future__ import annotations

import collections
import dataclasses
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_save_file import DTYPES, Config, Marked, record

import holdfast

EXAMPLES = 1000 if os.environ.get("HOLDFAST_LONG") else 40


def _filled(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Any bit patterns but those of a bool, which has two."""
    raw = (torch.arange(size * dtype.itemsize) * 37 % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    return raw.view(dtype)


def _noted(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.view_as(tensor)
    tensor.note = ["kept"]  # type: ignore[attr-defined]
    return tensor


# What is made of a tensor that lies as it is: views, subclasses, other layouts.
CHANGES: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "slice": lambda t, n: t[n:] if t.dim() else t,
    "stride": lambda t, n: t[:: n + 1] if t.dim() else t,
    "expand": lambda t, n: t.unsqueeze(0).expand(n, *t.shape),
    "turn": lambda t, n: t.t() if t.dim() == 2 else t.unsqueeze(-1),
    "element": lambda t, n: t[n] if t.dim() and t.shape[0] > n else t,
    "conj": lambda t, n: t.conj(),
    "part": lambda t, n: t.conj().imag if t.is_complex() else t,
    "subclass": lambda t, n: t.as_subclass(Marked),
    "attribute": lambda t, n: _noted(t),
    "parameter": lambda t, n: torch.nn.Parameter(t, requires_grad=n % 2 == 1 and t.is_floating_point()),
    "buffer": lambda t, n: torch.nn.Buffer(t),
}
# These make other tensors, whose storages are their own.
KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "coo": lambda n: torch.eye(n + 1).to_sparse(),
    "csr": lambda n: torch.eye(n + 1, dtype=torch.cfloat).to_sparse_csr(),
    "bsr": lambda n: torch.eye(4 * n + 4).to_sparse_bsr((2, 2)),
    "quantized": lambda n: torch.quantize_per_tensor(torch.arange(n + 2.0), 0.5, 1, torch.quint8)[n % 2 :],
    "by channel": lambda n: torch.quantize_per_channel(
        torch.ones(3, n + 1), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
    ),
    "meta": lambda n: torch.empty(n, 3, device="meta"),
    "jagged": lambda n: torch.nested.nested_tensor([torch.ones(n), torch.ones(2)]),
}  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn, bases: list[torch.Tensor]) -> torch.Tensor:
    if draw(st.integers(0, 5)) == 0:
        return KINDS[draw(st.sampled_from(sorted(KINDS)))](draw(st.integers(0, 5)))
    if bases and draw(st.booleans()):
        tensor = draw(st.sampled_from(bases))
    else:
        tensor = _filled(draw(st.sampled_from(DTYPES)), draw(st.integers(0, 40)))
        bases.append(tensor)
    for _ in range(draw(st.integers(0, 3))):
        tensor = CHANGES[draw(st.sampled_from(sorted(CHANGES)))](tensor, draw(st.integers(0, 5)))
    return tensor


@st.composite
def objects(draw: st.DrawFn) -> Any:
    """Containers of containers, with tensors that share their memory, and parts that stand there twice."""
    bases: list[torch.Tensor] = []
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    further = st.sampled_from([torch.float16, torch.Size([1, 2]), torch.device("cpu"), 1j, {3}, range(3)])
    keys = st.text(max_size=5) | st.integers(0, 9) | st.tuples(st.integers(0, 9))

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        mapping = st.dictionaries(keys, inner, max_size=4)
        return (
            st.lists(inner, max_size=4)
            | mapping
            | mapping.map(collections.OrderedDict)
            | st.tuples(inner, inner)
            | inner.map(lambda each: [each, each])
            | inner.map(lambda each: Config(3, each))
        )

    return draw(st.recursive(plain | further | tensors(bases), around, max_leaves=12))


class Same:
    """Compares two objects; what is one object, or one storage, in the first is one in the other."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, int], int] = {}
        self._keep: list[Any] = []  # an address is used for nothing else

    def _tied(self, kind: str, a: int, b: int) -> None:
        assert self._pairs.setdefault((kind, a), b) == b, f"{kind}: tied in one, not in the other"

    def check(self, a: Any, b: Any) -> None:
        assert type(a) is type(b)
        self._keep += [a, b]
        if isinstance(a, torch.Tensor):
            self._tensors(a, b)
        elif isinstance(a, dict):
            self._tied("object", id(a), id(b))
            assert list(a) == list(b)
            for key in a:
                self.check(a[key], b[key])
        elif isinstance(a, (list, tuple)):
            if isinstance(a, list):
                self._tied("object", id(a), id(b))
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                self.check(x, y)
        elif dataclasses.is_dataclass(a):
            self.check(vars(a), vars(b))
        else:
            assert a == b

    def _tensors(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._tied("object", id(a), id(b))
        assert (a.dtype, a.layout, a.device, a.is_nested) == (b.dtype, b.layout, b.device, b.is_nested)
        assert (a.requires_grad, a.is_conj(), a.is_neg()) == (b.requires_grad, b.is_conj(), b.is_neg())
        if a.is_nested:
            self.check(a.unbind(), b.unbind())
            return
        assert a.shape == b.shape
        self.check(vars(a), vars(b))
        if a.layout == torch.sparse_coo:
            assert a.is_coalesced() == b.is_coalesced()
            self.check([a._indices(), a._values()], [b._indices(), b._values()])
        elif a.layout == torch.sparse_csr or a.layout == torch.sparse_bsr:
            parts = ("crow_indices", "col_indices", "values")
            self.check([getattr(a, p)() for p in parts], [getattr(b, p)() for p in parts])
        else:
            self._strided(a, b)

    def _strided(self, a: torch.Tensor, b: torch.Tensor) -> None:
        assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
        if a.is_quantized:
            assert repr(a.q_per_channel_scales() if a.qscheme() == torch.per_channel_affine else a.q_scale()) == repr(
                b.q_per_channel_scales() if b.qscheme() == torch.per_channel_affine else b.q_scale()
            )
        ours, theirs = a.untyped_storage(), b.untyped_storage()
        self._keep += [ours, theirs]
        self._tied("storage", ours._cdata, theirs._cdata)
        assert ours.nbytes() == theirs.nbytes()
        if a.device.type != "meta":
            assert bytes(ours) == bytes(theirs)


def loaded(path: Path, options: dict[str, Any]) -> Any:
    """What torch.load makes of a file, or the class of its exception."""
    try:
        return torch.load(path, **options)
    except (pickle.UnpicklingError, RuntimeError, ValueError) as error:
        return type(error)


@pytest.fixture
def in_thread() -> Iterator[None]:
    """Saves that start no process each."""
    holdfast.flush(60)
    holdfast.configure(launcher="thread")
    yield
    holdfast.flush(60)
    holdfast.configure(launcher="spawn")


@settings(max_examples=EXAMPLES, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(item=objects())
@pytest.mark.filterwarnings("ignore")
def test_random_objects_are_loaded_as_those_of_torch_save(in_thread: None, tmp_path: Path, item: Any) -> None:
    path, theirs = tmp_path / "x.pt", tmp_path / "theirs.pt"
    with warnings.catch_warnings(), torch.serialization.safe_globals([Config, Marked]):
        warnings.simplefilter("ignore")
        try:
            torch.save(item, theirs)
        except Exception as error:
            event(f"refused: {error}")
            with pytest.raises(holdfast.Error, match="cannot be pickled|share memory"):
                holdfast.save_file(item, path)
            return
        holdfast.save_file(item, path, wait=True)
        assert record(path, "data.pkl") == record(theirs, "data.pkl")
        for options in ({"weights_only": w, "mmap": m} for w in (False, True) for m in (False, True)):
            mine, expected = loaded(path, options), loaded(theirs, options)
            event(f"{options}: {'refused' if isinstance(expected, type) else 'loaded'}")
            Same().check(mine, expected)


def test_what_is_not_the_same_is_found() -> None:
    x = torch.arange(4.0)
    for a, b in (
        ([x, x[:2]], [x.clone(), x[:2].clone()]),
        ([x, x], [x, x.clone()]),
        (x, x[::1].clone().t()[:0]),
        (x.to(torch.cfloat), x.to(torch.cfloat).conj()),
        ({"a": [x]}, {"a": (x,)}),
        (x, x.clone().fill_(1)),
        (_noted(x), x),
    ):
        with pytest.raises(AssertionError):
            Same().check(a, b)
