"""A plain checkpoint whose description or indices are crafted ends a load with DATA_LOSS."""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import each, refused

import holdfast
from holdfast import _plain, _state


def _far(layout: str) -> torch.Tensor:
    """A sparse tensor with an index far outside of its shape."""
    values, far = torch.ones(1), torch.tensor([2**36])
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(far[None], values, (4,), check_invariants=False)
    pointers = torch.tensor([0, 1])
    shape = (1, 4) if layout == "sparse_csr" else (4, 1)
    return torch.sparse_compressed_tensor(
        pointers, far, values, shape, layout=getattr(torch, layout), check_invariants=False
    )


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc"])
def test_an_index_outside_of_a_sparse_tensor(layout: str, tmp_path: Path) -> None:
    holdfast.save_async({"a": _far(layout)}, tmp_path / "s").wait(60)
    good = torch.eye(4)[:1] if layout == "sparse_csr" else torch.eye(4)[:, :1]
    target = torch.eye(4)[0].to_sparse() if layout == "sparse_coo" else good.to_sparse(layout=getattr(torch, layout))
    for into in (None, {"a": target}):
        with pytest.raises(holdfast.Error, match=f"load a: it is no {layout} tensor") as error:
            holdfast.load(tmp_path / "s", into=into)
        assert error.value.code == "DATA_LOSS"


@pytest.mark.parametrize("place", [{"stride": [2**40, 2**34]}, {"offset": 8}, {"offset": -8}, {"stride": [-1, 1]}])
def test_a_tensor_outside_of_its_entry(place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_of = _state.Outline.node

    def crafted(self: Any, path: str) -> Any:
        node = node_of(self, path)
        return {**node, "stored": "a", **place} if path == "a" else node

    monkeypatch.setattr(_state, "_recent", collections.deque(maxlen=1))
    monkeypatch.setattr(_state.Outline, "node", crafted)
    holdfast.save_async({"a": torch.zeros(1000, 1000)}, tmp_path / "s").wait(60)
    for into in (None, {"a": torch.zeros(1000, 1000)}, {"a": torch.zeros(1000, 1000).T}):
        begun = time.monotonic()
        with pytest.raises(holdfast.Error, match="load a: .* ends outside") as error:
            holdfast.load(tmp_path / "s", into=into)
        assert error.value.code == "DATA_LOSS" and time.monotonic() - begun < 10


_TWICE = [[{"kind": "deep", "index": at}] * 2 for at in range(1, 31)]


@pytest.mark.parametrize("deep", [[{"kind": "deep", "index": 0}], [*_TWICE, 1]])
def test_a_description_that_contains_itself(deep: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_of = _state.Outline.node

    def crafted(self: Any, path: str) -> Any:
        node = node_of(self, path)
        return {"kind": "deep", "index": 0} if path == "a" else node

    monkeypatch.setattr(_state, "_recent", collections.deque(maxlen=1))
    monkeypatch.setattr(_state.Outline, "node", crafted)
    monkeypatch.setattr(_state, "_encode", lambda value: _plain.encode({**value, "deep": deep} if "root" in value else value))
    holdfast.save_async({"a": torch.zeros(2)}, tmp_path / "s").wait(60)
    path = tmp_path / "s"
    for done in each(["show", "--values", path], ["diff", path, path], ["convert", path, tmp_path / "x.pt"]):
        refused(done, "load a", "its description contains itself")


@pytest.mark.parametrize("node", [
    {"kind": "deep", "index": 7}, {"kind": "dict", "items": [1]}, {"kind": "float", "value": None},
    {"kind": "named", "fields": ["a"], "items": []}, {"kind": []}, {"no": "kind"},
])  # fmt: skip
def test_a_broken_node(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_of = _state.Outline.node

    def crafted(self: Any, path: str) -> Any:
        right = node_of(self, path)
        return node if path == "a" else right

    monkeypatch.setattr(_state, "_recent", collections.deque(maxlen=1))
    monkeypatch.setattr(_state.Outline, "node", crafted)
    holdfast.save_async({"a": torch.zeros(2)}, tmp_path / "s").wait(60)
    path = tmp_path / "s"
    for done in each(["show", "--values", path], ["diff", path, path]):
        refused(done, f"load {path}", "its description cannot be used")
