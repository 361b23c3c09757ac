"""Files of `save_file` and of `holdfast.dcp` in the hands of another version of PyTorch, and the other way round.

HOLDFAST_OTHER_PYTHONS names interpreters with other versions, in the form of PATH; without it nothing runs here.
"""

from __future__ import annotations

import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp

OTHERS = [each for each in os.environ.get("HOLDFAST_OTHER_PYTHONS", "").split(os.pathsep) if each]
pytestmark = pytest.mark.skipif(not OTHERS, reason="HOLDFAST_OTHER_PYTHONS names no interpreter with another PyTorch")

# Of both sides: a state, what is in it as text, and its zeros. It runs in PyTorch 2.9 and newer.
COMMON = """
import hashlib, sys, warnings
import torch
warnings.simplefilter("ignore")

def state():
    torch.manual_seed(7)
    base = torch.arange(48, dtype=torch.float32)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    adam = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 8)).sum().backward()
    adam.step()
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int64, torch.bool,
              torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    return {
        "net": net.state_dict(),
        "adam": adam.state_dict(),
        "views": {"base": base, "grid": base.view(6, 8), "turned": base.view(6, 8).t(), "empty": base[:0]},
        "dtypes": {str(dtype): torch.randn(5).to(dtype) for dtype in dtypes},
        "large": {"weight": torch.randn(700, 1000)},
        "step": 31,
    }

def texts(value, path="state"):
    if isinstance(value, dict):
        for key in value:
            yield from texts(value[key], f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from texts(item, f"{path}.{i}")
    elif isinstance(value, torch.Tensor):
        digest = hashlib.sha256(bytes(value.detach().contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()
        yield path, f"{value.dtype} {tuple(value.shape)} {digest}"
    else:
        yield path, repr(value)

def zeros(value):
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    if isinstance(value, list):
        return [zeros(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()
"""
_own: dict[str, Any] = {}
exec(COMMON, _own)


def in_other(program: str, code: str, path: Path) -> dict[str, Any]:
    """What `code` leaves in `found`, as JSON; `path` is there."""
    text = f"{COMMON}\nimport json\nimport torch.distributed.checkpoint as dcp\npath = {str(path)!r}\n{code}\nprint(json.dumps(found))"
    done = subprocess.run([program, "-c", text], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("program", OTHERS)
def test_another_pytorch_reads_a_file(program: str, tmp_path: Path) -> None:
    state = _own["state"]()
    holdfast.save_file(state, tmp_path / "x.pt", wait=True)
    found = in_other(program, """
found = {"version": torch.__version__}
for options in ({}, {"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}):
    found[str(options)] = dict(texts(torch.load(path, **options)))
""", tmp_path / "x.pt")  # fmt: skip
    assert found.pop("version") != torch.__version__
    expected = dict(_own["texts"](state))
    assert len(found) == 4
    for options, each in found.items():
        assert each == expected, options


@pytest.mark.parametrize("program", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_another_pytorch_reads_a_dcp_checkpoint(program: str, tmp_path: Path) -> None:
    state = _own["state"]()
    holdfast.dcp.save(state, checkpoint_id=tmp_path / "d")
    found = in_other(program, """
target = zeros(state())
dcp.load(target, checkpoint_id=path)
found = dict(texts(target))
""", tmp_path / "d")  # fmt: skip
    assert found == dict(_own["texts"](state))


@pytest.mark.parametrize("program", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_what_another_pytorch_writes_is_read_and_loaded(program: str, tmp_path: Path) -> None:
    expected = in_other(program, """
torch.save(state(), path + "/x.pt")
dcp.save(state(), checkpoint_id=path + "/d")
found = dict(texts(state()))
""", tmp_path)  # fmt: skip
    assert holdfast.verify(tmp_path / "x.pt")["verdict"] == "sound"
    target = _own["zeros"](_own["state"]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        holdfast.dcp.load(target, checkpoint_id=tmp_path / "d")
    assert dict(_own["texts"](target)) == expected
    again = _own["zeros"](_own["state"]())
    dcp.load(again, storage_reader=holdfast.dcp.StorageReader(tmp_path / "d"))
    assert dict(_own["texts"](again)) == expected
