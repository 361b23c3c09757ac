"""Damaged metadata of the framework's own saves: an error, or the same values; never a part of a tensor, silently."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hostile_objects import in_child
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import holdfast
import holdfast.dcp
from holdfast.dcp import metadata

pytestmark = pytest.mark.filterwarnings("ignore")

LONG = bool(os.environ.get("HOLDFAST_LONG"))
FILES = 60
SAVED = {"w": torch.arange(12.0).view(3, 4), "n": {"b": torch.ones(5, dtype=torch.bfloat16)}, "o": {1, 2}, "step": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with contextlib.redirect_stdout(io.StringIO()):
        dcp.save(SAVED, checkpoint_id=path)
    return path


def _damaged(data: bytes, seed: int) -> bytes:
    choose = random.Random(seed)
    damaged = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 3))):
        at, kind = choose.randrange(len(damaged)), choose.randrange(6)
        if kind == 0:
            damaged[at] = ord(choose.choice(pickletools.opcodes).code)
        elif kind == 1:
            begin = choose.randrange(len(data))
            damaged[at:at] = data[begin : begin + choose.randint(1, 40)]
        elif kind == 2:
            del damaged[at : at + choose.randint(1, 8)]
        elif kind == 3:
            damaged[at] ^= 1 << choose.randrange(8)
        else:  # another small integer: sizes, offsets, places
            numbers = [i + 1 for i in range(len(damaged) - 1) if damaged[i] == pickle.BININT1[0]]
            damaged[choose.choice(numbers)] = choose.choice((0, 1, 2, 3, 4, 5, 12, 48, 255))
    return bytes(damaged)


def _load(path: Path) -> str:
    """What becomes of a load: "same", "error", or what is wrong with it."""
    state: dict[str, Any] = {"w": torch.full((3, 4), -1.0), "n": {"b": -torch.ones(5, dtype=torch.bfloat16)}, "o": None, "step": 0}
    try:
        dcp.load(state, storage_reader=holdfast.dcp.StorageReader(path))
    except (holdfast.Error, CheckpointException):
        return "error"
    same = torch.equal(state["w"], SAVED["w"]) and torch.equal(state["n"]["b"], SAVED["n"]["b"])  # type: ignore[arg-type, index]
    return "same" if same and state["o"] == SAVED["o"] and state["step"] == SAVED["step"] else f"other values: {state}"


@settings(max_examples=100 if LONG else 3, deadline=None, derandomize=not LONG)
@given(first=st.integers(0, 1 << 40))
def test_damaged_metadata_is_an_error_or_loads_the_same(run: Path, tmp_path_factory: pytest.TempPathFactory, first: int) -> None:
    data = (run / ".metadata").read_bytes()
    path = tmp_path_factory.mktemp("damaged")
    for file in run.iterdir():
        (path / file.name).write_bytes(file.read_bytes())

    def many() -> str:
        logging.disable(logging.CRITICAL)  # of the framework: a trace for each
        if _load(run) != "same":
            return "the undamaged run is not loaded"
        errors = 0
        for seed in range(first, first + FILES):
            (path / ".metadata").write_bytes(_damaged(data, seed))
            outcome = _load(path)
            if outcome not in ("same", "error"):
                return f"seed {seed}: {outcome}"
            errors += outcome == "error"
        return "all" if errors else "no damage was found"

    assert in_child(many) == "made 'all'"


@pytest.mark.parametrize("change", ["missing", "short", "outside"])
def test_chunks_that_do_not_fill_their_tensor_are_found(change: str, run: Path) -> None:
    data = (run / ".metadata").read_bytes()
    found = metadata.loads(data, str(run / ".metadata"))
    chunks = found.state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    [whole] = chunks
    if change == "missing":
        chunks.clear()
    elif change == "short":
        chunks[0] = ChunkStorageMetadata(whole.offsets, torch.Size([2, 4]))
    else:
        chunks[0] = ChunkStorageMetadata(torch.Size([0, 4]), whole.sizes)
    changed = pickle.dumps(found)
    with pytest.raises(holdfast.Error, match="DATA_LOSS"):
        metadata.loads(changed, str(run / ".metadata"))
    if change != "outside":  # a rank's own metadata has that rank's chunks
        metadata.loads(changed, str(run / "__0.metadata"))
