"""The default device of torch changes no save and no load."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_ranks
import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import holdfast
import holdfast.dcp
from holdfast.dcp import framing

pytestmark = pytest.mark.filterwarnings("ignore")

MAKERS = frozenset(
    "arange as_tensor empty empty_strided eye full linspace ones rand randint randn randperm scalar_tensor "
    "sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor zeros".split()
)
PACKAGE = Path(holdfast.__file__).parent


@pytest.fixture
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    framing._reduction.cache_clear()
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def _made(nbytes: int, fill: float) -> dict[str, Any]:
    """Tensors of host memory of all kinds: with a gap, sparse, in an object, as an array."""
    with torch.device("cpu"):
        return {
            "whole": torch.full((nbytes // 4,), fill),
            "turned": torch.full((30, 50), fill).T,
            "gap": torch.full((40, 40), fill)[:, 3:20],
            "empty": torch.empty(0),
            "sparse": (torch.eye(5) * fill).to_sparse(),
            "array": np.full(4, fill),
            "number": int(fill),
        }


def _is(value: dict[str, Any], fill: float) -> bool:
    tensors = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in value.values() if v is not value["number"]]
    dense = [t.to_dense() if t.layout is torch.sparse_coo else t for t in tensors]
    return value["number"] == fill and all(t.device.type == "cpu" and bool((t[t != 0] == fill).all()) for t in dense) \
        and all(bool(t.any()) for t in dense if t.numel())


def test_a_plain_checkpoint(default_device: None, tmp_path: Path) -> None:
    state = {**_made(1 << 20, 7.0), "object": {"a tensor in an object": _Box(_made(16, 7.0)["whole"])}}
    holdfast.save(state, tmp_path / "s")
    loaded = holdfast.load(tmp_path / "s", allow=[_Box])
    assert torch.equal(loaded.pop("object")["a tensor in an object"].held, torch.full((4,), 7.0, device="cpu"))
    assert _is(loaded, 7.0)
    target = {**_made(1 << 20, 1.0), "object": None}
    filled = holdfast.load(tmp_path / "s", into=target, allow=[_Box])
    del filled["object"]
    assert _is(filled, 7.0)
    assert holdfast.open(tmp_path / "s")["gap"].device.type == "cpu"


class _Box:
    """An object, which is pickled."""

    def __init__(self, held: Any) -> None:
        self.held = held


def test_a_file_of_torch(default_device: None, tmp_path: Path) -> None:
    holdfast.save_file(_made(1 << 16, 7.0), tmp_path / "s.pt").wait(60)
    with torch.device("cpu"):  # torch.load makes sparse tensors on the default device
        assert _is(torch.load(tmp_path / "s.pt", weights_only=False), 7.0)


@pytest.mark.parametrize("save", ["save", "async_save"])
def test_a_checkpoint_of_dcp(save: str, default_device: None, tmp_path: Path) -> None:
    names = ("whole", "turned", "gap", "empty", "number")
    state, target = ({n: _made(1 << 20, fill)[n] for n in names} for fill in (7.0, 1.0))
    # A sharded DTensor is beyond torch itself: its planner makes tensors on the default device.
    with dcp_ranks.one_rank(), torch.device("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        for made in (state, target):
            made["replicated"] = distribute_tensor(made["whole"].clone(), mesh, [Replicate()])
        with torch.device("meta"):
            done = getattr(holdfast.dcp, save)(state, checkpoint_id=tmp_path / "s")
            if save == "async_save":
                done.result()
            holdfast.dcp.load(target, checkpoint_id=tmp_path / "s")
    assert _is({**target, "replicated": target["replicated"].to_local()}, 7.0)


def test_every_new_tensor_has_a_device() -> None:
    """The integrity campaigns run in processes of their own, where no default is set."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}"
        for path in sorted(PACKAGE.rglob("*.py")) if "integrity" not in path.parts
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in MAKERS
        and isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
        and not any(k.arg in ("device", None) for k in call.keywords)
    ]
    assert wrong == []
