"""layout="hf": a directory that `from_pretrained` of the Hugging Face libraries loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import holdfast


class Model(torch.nn.Module):
    """A tiny language model whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3)])
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))


def names_of(path: Path) -> set[str]:
    return {p.name for p in path.iterdir() if "holdfast" not in p.name and "manifest" not in p.name}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def test_a_model_is_one_file_with_its_tied_weights_once(tmp_path: Path) -> None:
    model = Model()
    config = json.dumps({"model_type": "tiny"})
    report = holdfast.save(model, tmp_path / "m", layout="hf", files={"config.json": config})
    assert report["files"] >= 3
    assert {"model.safetensors", "config.json"} <= names_of(tmp_path / "m")
    assert not {n for n in names_of(tmp_path / "m") if n.endswith(".safetensors")} - {"model.safetensors"}
    assert (tmp_path / "m" / "config.json").read_text() == config
    tensors, metadata = read(tmp_path / "m" / "model.safetensors")
    assert set(tensors) == set(model.state_dict()) - {"head.weight"}
    assert metadata["format"] == "pt" and metadata["head.weight"] == "embed.weight"
    for name, tensor in tensors.items():
        saved = model.state_dict()[name]
        assert tensor.dtype == saved.dtype and torch.equal(tensor, saved), name
    other = Model()
    safetensors.torch.load_model(other, tmp_path / "m" / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    assert holdfast.verify(tmp_path / "m")["verdict"] == "sound"
    # And by this package.
    loaded = holdfast.load(tmp_path / "m")
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_large_model_has_shards_and_an_index(tmp_path: Path) -> None:
    state = {f"layer.{i}.weight": torch.randn(1000) for i in range(7)}
    state["odd.t"] = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    state["big"] = torch.randn(5000)
    state["tied"] = state["layer.0.weight"]
    holdfast.save(state, tmp_path / "m", layout="hf", shard_bytes_max=8500)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    shards = sorted(n for n in names_of(tmp_path / "m") if n.endswith(".safetensors"))
    count = len(shards)
    assert shards == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] and count == 5
    assert index["metadata"]["total_size"] == 7 * 4000 + 24 + 20000
    assert set(index["weight_map"]) == set(state) - {"tied"}
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors, metadata = read(tmp_path / "m" / shard)
        assert metadata["format"] == "pt"
        assert {index["weight_map"][name] for name in tensors} == {shard}
        assert sum(t.nbytes for t in tensors.values()) <= 8500 or set(tensors) == {"big"}
        found.update(tensors)
    assert all(torch.equal(found[name], state[name]) for name in found)
    assert holdfast.verify(tmp_path / "m")["verdict"] == "sound"
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    holdfast.load(tmp_path / "m", into=into)
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())


def test_tensors_that_overlap_are_stored_apart(tmp_path: Path) -> None:
    whole = torch.arange(24.0)
    state = {"q": whole[:8], "k": whole[4:12], "v": whole[16:].reshape(2, 4), "w": whole.view(torch.int32)}
    holdfast.save(state, tmp_path / "m", layout="hf")
    tensors, _ = read(tmp_path / "m" / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in state.items()}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state.items())


def test_every_dtype_is_that_of_the_reference_library(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
              torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]  # fmt: skip
    state = {str(dtype): torch.zeros(3, dtype=torch.uint8).to(dtype) for dtype in dtypes}
    holdfast.save(state, tmp_path / "m", layout="hf")
    safetensors.torch.save_file(state, tmp_path / "reference")
    with safetensors.safe_open(tmp_path / "m" / "model.safetensors", "pt") as ours, \
            safetensors.safe_open(tmp_path / "reference", "pt") as theirs:  # fmt: skip
        for name in state:
            assert ours.get_slice(name).get_dtype() == theirs.get_slice(name).get_dtype(), name


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": {"b": torch.ones(1)}}, "save a: a builtins:dict; layout='hf' takes"),
        ({"a": torch.ones(1), "step": 3}, "save step: a builtins:int"),
        ({3: torch.ones(1)}, "save 3: a key that is no text"),
        ([torch.ones(1)], "save state: a builtins:list"),
        ({"s": torch.eye(2).to_sparse()}, "save s: .* more than one strided tensor"),
    ],
)
def test_what_is_no_flat_state_of_tensors_is_refused(state: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match=said) as error:
        holdfast.save(state, tmp_path / "m", layout="hf")
    assert error.value.code == "INVALID_ARGUMENT" and not (tmp_path / "m").exists()


def test_other_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="layout 'torch': one of holdfast, hf is expected"):
        holdfast.save({"a": torch.ones(1)}, tmp_path / "m", layout="torch")
    with pytest.raises(holdfast.Error, match="of one rank, not of 2"):
        holdfast.save({"a": torch.ones(1)}, tmp_path / "m", layout="hf", rank=0, world_size=2, attempt="1" * 32)


def test_a_checkpointer_saves_models(tmp_path: Path) -> None:
    model = Model()
    with holdfast.Checkpointer(tmp_path, name="model-{step}", layout="hf", keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(model, step, files={"config.json": "{}"})
        checkpointer.wait(60)
        assert [c["step"] for c in checkpointer.list()] == [2]
    tensors, _ = read(tmp_path / "model-2" / "model.safetensors")
    assert torch.equal(tensors["embed.weight"], model.embed.weight)


_FROM_PRETRAINED = """
import sys, torch, holdfast
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config).eval()
for name, most in (("one", 1 << 30), ("shards", 8192)):
    path = f"{sys.argv[1]}/{name}"
    holdfast.save(model, path, layout="hf", shard_bytes_max=most, files={"config.json": config.to_json_string(use_diff=False)})
    loaded, info = GPT2LMHeadModel.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    ours = model.state_dict()
    assert all(torch.equal(t, ours[n]) for n, t in loaded.state_dict().items())
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
print("loaded")
"""


def test_from_pretrained_loads_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", _FROM_PRETRAINED, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "loaded" in done.stdout, done
