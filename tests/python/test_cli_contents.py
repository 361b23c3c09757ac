"""The commands about the contents of checkpoints: show and diff."""

from __future__ import annotations

import collections
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dcp_ranks
import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import each, refused
from command_line import holdfast as command

import holdfast
import holdfast.dcp

MIB = 1 << 20


def state_of(seed: int, **values: Any) -> dict[str, Any]:
    """Tensors within a chunk and over several, plain values, and an object."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Linear(8, 4)
    model.weight.data = torch.randn(4, 8, generator=generator)
    model.bias.data = torch.zeros(4)
    large = torch.randn(3 * MIB, generator=generator)
    return {"model": model, "large": large, "half": torch.ones(3, 2, dtype=torch.bfloat16), "note": os.path.join,
            "optimizer": {"lr": 0.1, "betas": (0.9, None)}, "big": 2**60, **values}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    holdfast.save_async(state_of(1, step=1), path / "step-1", step=1).wait(60)
    holdfast.save_async(state_of(1, step=1), path / "same", step=1).wait(60)
    changed = state_of(1, step=2, new=torch.ones(2))
    changed["large"][2 * MIB] += 1
    changed["half"] = torch.ones(2, 3, dtype=torch.bfloat16)
    changed["optimizer"]["lr"] = 0.01
    changed["note"] = os.path.split
    del changed["big"]
    holdfast.save_async(changed, path / "step-2", step=2).wait(60)
    for seed in (1, 2):
        state = {"model": state_of(seed)["model"].state_dict(), "large": state_of(1)["large"], "step": seed}
        holdfast.dcp.async_save(state, checkpoint_id=path / f"dcp-{seed}").result()
        dcp.save(state, checkpoint_id=path / f"stock-{seed}", no_dist=True)
        torch.save(state, path / f"{seed}.pt")
    return path


# ---- show


def test_show_lists_tensors_objects_and_values(run: Path) -> None:
    told = command("show", "--values", "--json", run / "step-1", torch=False).json
    assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in told["tensors"]} == {
        "model.weight": ("F32", [4, 8], 128),
        "model.bias": ("F32", [4], 16),
        "large": ("F32", [3 * MIB], 12 * MIB),
        "half": ("BF16", [3, 2], 12),
    }
    assert {t["file"] for t in told["tensors"]} == {"model-00000-of-00001.safetensors"}
    (note,) = told["objects"]
    assert note["name"] == "note" and note["bytes"] > 0
    assert told["values"] == {"optimizer.lr": "0.1", "optimizer.betas.0": "0.9", "optimizer.betas.1": "None",
                              "big": str(2**60), "step": "1"}  # fmt: skip
    assert (told["format"], told["step"], told["world_size"]) == ("holdfast", 1, 1)
    attempts = {c["name"]: c["attempt"] for c in holdfast.list_checkpoints(run)}
    assert told["attempt"] == attempts["step-1"]


def test_show_prints_a_table_and_totals(run: Path) -> None:
    done = command("show", run / "step-1", torch=False)
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["NAME", "DTYPE", "SHAPE", "BYTES", "FILE"]
    row = next(line for line in lines if line.startswith("half "))
    assert row.split() == ["half", "BF16", "[3,", "2]", "12", "model-00000-of-00001.safetensors"]
    assert "optimizer.lr" not in done.out
    assert lines[-1].startswith("holdfast: 4 tensors, 12.00 MiB; 1 object; step 1, saved ")


@pytest.mark.parametrize("name", ["dcp-1", "stock-1", "1.pt"])
def test_show_reads_other_formats(run: Path, name: str) -> None:
    told = command("show", "--values", "--json", run / name).json
    assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in told["tensors"]} == {
        "model.weight": ("F32", [4, 8], 128),
        "model.bias": ("F32", [4], 16),
        "large": ("F32", [3 * MIB], 12 * MIB),
    }
    assert told["values"] == {"step": "1"}
    assert told["format"] == ("torch" if name == "1.pt" else "dcp")


def test_show_reads_a_safetensors_file_without_torch(run: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "foreign.safetensors")
    told = command("show", "--json", tmp_path / "foreign.safetensors", torch=False).json
    assert [(t["name"], t["dtype"], t["shape"]) for t in told["tensors"]] == [("a", "F32", [3]), ("b", "I8", [2, 2])]
    own = command("show", "--json", run / "step-1" / "model-00000-of-00001.safetensors", torch=False).json
    assert sorted(t["name"] for t in own["tensors"]) == ["half", "large", "model.bias", "model.weight"]


def _save_replicas(rank: int, directory: str) -> None:
    for step in (1, 2):
        state = {"w": torch.full((MIB,), 1.0), "large": torch.full((MIB,), float(step)), "own": torch.tensor(rank)}
        holdfast.save(state, f"{directory}/step-{step}", step=step)


def test_replicas_are_listed_once(tmp_path: Path) -> None:
    dcp_ranks.run_ranks(2, tmp_path, _save_replicas, str(tmp_path))
    shown = command("show", tmp_path / "step-1", torch=False)
    rows = {line.rpartition("  ")[0].split("  ")[0]: line.split() for line in shown.out.splitlines()}
    assert rows["w"][-2:] == ["model-replicas.safetensors", "2"] and rows["rank 0: own"][-1] == "1"
    assert set(rows) >= {"w", "large", "rank 0: own", "rank 1: own"} and "rank 1: w" not in rows
    assert "4 tensors, 8.00 MiB" in shown.out
    told = command("show", "--json", tmp_path / "step-1", torch=False).json["tensors"]
    assert {t["name"]: t["ranks"] for t in told} == {"w": 2, "large": 2, "rank 0: own": 1, "rank 1: own": 1}
    done = command("diff", "--json", tmp_path / "step-1", tmp_path / "step-2", torch=False)
    assert (done.status, list(done.json["changed"]), done.json["identical"]) == (1, ["large"], 3)
    # And beside a checkpoint of one rank.
    holdfast.save({"w": torch.full((MIB,), 1.0), "large": torch.full((MIB,), 1.0)}, tmp_path / "alone")
    done = command("diff", "--json", tmp_path / "step-1", tmp_path / "alone", torch=False)
    assert list(done.json["removed"]) == ["rank 0: own", "rank 1: own"] and not done.json["changed"], done


def test_show_of_several_ranks_names_the_rank(tmp_path: Path) -> None:
    attempt = "00112233445566778899aabbccddeeff"
    saves = [
        holdfast.save_async({"rng": torch.full((4,), rank)}, tmp_path / "step-1", rank=rank, world_size=2,
                            attempt=attempt)
        for rank in (0, 1)
    ]  # fmt: skip
    for save in saves:
        save.wait(60)
    told = command("show", "--json", tmp_path / "step-1", torch=False).json
    assert sorted(t["name"] for t in told["tensors"]) == ["rank 0: rng", "rank 1: rng"]
    assert command("diff", tmp_path / "step-1", tmp_path / "step-1").status == 0


def test_tied_tensors_are_listed_and_compared_by_each_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    model[0].bias = model[1].bias
    state = {"model": model.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    for name in ("a", "b"):
        holdfast.save(state, tmp_path / name)
        model[0].bias.data += 1
    told = command("show", "--json", tmp_path / "a", torch=False).json["tensors"]
    tied = {t["name"]: t["tied_to"] for t in told}
    assert tied == {"model.0.weight": None, "model.0.bias": None, "model.1.weight": None, "model.1.bias": "model.0.bias"}
    assert "4 tensors, 320 B" in command("show", tmp_path / "a", torch=False).out
    done = command("diff", "--read", tmp_path / "a.pt", tmp_path / "a")
    assert (done.status, done.out) == (0, "no differences, 4 identical\n")
    assert list(command("diff", "--json", tmp_path / "a", tmp_path / "b", torch=False).json["changed"]) == [
        "model.0.bias", "model.1.bias",
    ]  # fmt: skip


# ---- diff


def test_diff_finds_what_changed_by_the_digests(run: Path) -> None:
    done = command("diff", "--json", run / "step-1", run / "step-2", torch=False)
    assert done.status == 1, done
    told = done.json
    assert told["changed"] == {
        "large": "",
        "half": "BF16 [3, 2] -> BF16 [2, 3]",
        "step": "1 -> 2",
        "optimizer.lr": "0.1 -> 0.01",
        "note": "a pickled object",
    }
    assert (told["added"], told["removed"], told["unknown"]) == ({"new": ""}, {"big": ""}, {})
    assert told["identical"] == 4  # weight, bias, and the two betas
    lines = command("diff", run / "step-1", run / "step-2").out.splitlines()
    assert "changed optimizer.lr: 0.1 -> 0.01" in lines and "added new" in lines and "removed big" in lines
    assert lines[-1] == "5 changed, 1 added, 1 removed, 4 identical"


def test_diff_of_the_same_is_0_and_reads_no_data(run: Path, tmp_path: Path) -> None:
    done = command("diff", run / "step-1", run / "same", torch=False)
    assert (done.status, done.out) == (0, "no differences, 10 identical\n")
    shutil.copytree(run / "same", tmp_path / "copy")
    file = tmp_path / "copy" / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert command("diff", "-q", run / "step-1", tmp_path / "copy") == (0, "", "")


def test_diff_says_what_digests_cannot_tell_and_reads_it(tmp_path: Path) -> None:
    large = torch.randn(3 * MIB)
    holdfast.save_async({"w": large}, tmp_path / "a").wait(60)
    # A larger alignment comes first: `w` begins elsewhere in its chunk.
    holdfast.save_async({"w": large, "before": torch.ones(100, dtype=torch.float64)}, tmp_path / "b").wait(60)
    done = command("diff", "--json", tmp_path / "a", tmp_path / "b", torch=False)
    assert (done.status, done.json["unknown"], done.json["added"]) == (1, {"w": ""}, {"before": ""})
    done = command("diff", "--read", "--json", tmp_path / "a", tmp_path / "b", torch=False)
    assert (done.status, done.json["unknown"], done.json["identical"]) == (1, {}, 1)
    large[7] += 1
    holdfast.save_async({"w": large, "before": torch.ones(100, dtype=torch.float64)}, tmp_path / "c").wait(60)
    done = command("diff", "--read", "--json", tmp_path / "a", tmp_path / "c", torch=False)
    assert done.json["changed"] == {"w": ""}


def test_diff_that_only_reading_could_decide_is_trouble(tmp_path: Path) -> None:
    large = torch.randn(3 * MIB)
    first, second = torch.ones(100), torch.ones(100)
    holdfast.save_async({"first": first, "w": large, "second": second}, tmp_path / "a").wait(60)
    holdfast.save_async({"w": large, "first": first, "second": second}, tmp_path / "b").wait(60)
    done = command("diff", "--json", tmp_path / "a", tmp_path / "b", torch=False)
    assert (done.status, done.json["unknown"]) == (2, {"w": ""})
    assert command("diff", "--read", tmp_path / "a", tmp_path / "b", torch=False).status == 0


def test_diff_of_dcp_checkpoints_uses_their_manifests(run: Path) -> None:
    other, same = each(["diff", "--json", run / "dcp-1", run / "dcp-2"], ["diff", run / "dcp-1", run / "dcp-1"])
    assert other.json["changed"] == {"model.weight": "", "step": "1 -> 2"} and other.json["identical"] == 2
    assert same.status == 0


def test_diff_without_digests_needs_to_read(run: Path) -> None:
    refusals = each(["diff", run / "stock-1", run / "dcp-1"], ["diff", run / "dcp-1", run / "1.pt"])
    for done, name in zip(refusals, ("stock-1", "1.pt"), strict=True):
        refused(done, name, "--read")
    others = ("stock-1", "dcp-1", "1.pt")
    for done in each(*(["diff", "--read", run / "1.pt", run / other] for other in others)):
        assert done.status == 0, done
    for done in each(*(["diff", "--read", "--json", run / other, run / "2.pt"] for other in others)):
        assert done.json["changed"] == {"model.weight": "", "step": "1 -> 2"}, done


@dataclasses.dataclass
class Scheduler:
    rate: float


def _scheduler(warmup: int) -> Scheduler:
    scheduler = Scheduler(0.1)
    scheduler.warmup = warmup  # type: ignore[attr-defined]  # beside the fields
    return scheduler


# Of each pair one is not the other, whatever they look like.
UNLIKE: dict[str, tuple[Any, Any]] = {
    "numbers": (list(range(2000)), [*range(1999), 0]),
    "length": ((0.5,) * 2000, (0.5,) * 2001),
    "attribute": (_scheduler(1), _scheduler(2)),
    "bytes": (b"ABC", "QUJD"),
    "precision": (numpy.float32(1.0), numpy.float64(1.0)),
    "truth": (True, 1),
    "set": ({"a", "b", "c"}, {"a", "b", "d"}),
    "zero": (0.0, -0.0),
}


def test_diff_tells_values_apart_that_look_alike(tmp_path: Path) -> None:
    for side, name in enumerate("ab"):
        holdfast.save({key: pair[side] for key, pair in UNLIKE.items()}, tmp_path / name)
    done = command("diff", "--json", tmp_path / "a", tmp_path / "b", torch=False)
    assert done.status == 1
    assert {name.partition(".")[0] for name in done.json["changed"]} == UNLIKE.keys(), done
    assert "attribute.warmup" in done.json["changed"]
    assert not done.json["added"] and not done.json["removed"]
    # A set has another order in each process.
    script = f"import holdfast, sys; holdfast.save({{'s': set('abcdefgh')}}, '{tmp_path}/' + sys.argv[1])"
    for seed in ("1", "2"):
        subprocess.run([sys.executable, "-c", script, seed], env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
    assert command("diff", tmp_path / "1", tmp_path / "2", torch=False).status == 0


@pytest.mark.parametrize("saved", ["holdfast", "torch"])
def test_diff_compares_containers(saved: str, tmp_path: Path) -> None:
    a = {"list": [1, 2], "dict": {"x": 1}, "empty": [], "gone": {}, "shape": torch.Size([2])}
    b = {"list": (1, 2), "dict": collections.OrderedDict(x=1), "empty": {}, "new": (), "shape": (2,)}
    for name, state in {"a": a, "b": b}.items():
        if saved == "torch":
            torch.save(state, tmp_path / name)
        else:
            holdfast.save(state, tmp_path / name)
    read = ["--read"] if saved == "torch" else []
    same, other = each(*(["diff", *read, "--json", tmp_path / "a", tmp_path / name] for name in "ab"))
    assert (same.status, same.json["identical"]) == (0, 4)
    assert set(other.json["changed"]) == {"list", "dict", "empty", "shape"} and other.json["changed"]["list"] == "list -> tuple"
    assert (set(other.json["removed"]), set(other.json["added"])) == ({"gone"}, {"new"}) and other.status == 1


def test_diff_compares_no_versions_of_modules(tmp_path: Path) -> None:
    linear = torch.nn.Linear(2, 2)
    for name, model in {"a": torch.nn.Sequential(linear), "b": torch.nn.Sequential(linear, torch.nn.ReLU())}.items():
        holdfast.save({"m": model.state_dict()}, tmp_path / name)
    assert command("diff", tmp_path / "a", tmp_path / "b", torch=False).status == 0


def test_diff_compares_both_values_of_one_name(tmp_path: Path) -> None:
    for name, value in {"a": 1, "b": 2}.items():
        holdfast.save({"x.y": value, "x": {"y": 3}}, tmp_path / name)
    done = command("diff", tmp_path / "a", tmp_path / "b", torch=False)
    assert (done.status, done.out) == (1, "changed x.y: 1 -> 2\n1 changed, 1 identical\n")


def test_diff_of_other_formats_compares_whole_values(tmp_path: Path) -> None:
    large, other = torch.ones(2000), torch.ones(2000)
    other[1000] += 1e-7
    for name, tensor in (("a", large), ("b", other)):
        state = {"t": (tensor, 0), "array": tensor.numpy()}
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    runs = each(*(["diff", "--read", "--json", tmp_path / "a", tmp_path / name] for name in "ab"))
    assert [run.status for run in runs] == [0, 1], runs
    assert sorted(runs[1].json["changed"]) == ["array", "t"]


def test_diff_compares_views_and_further_files(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    parts = {"a": {"v": w[0]}, "same": {"v": w[0]}, "b": {"v": w[1]}, "c": {}}
    for name, part in parts.items():
        files = {"config.json": "{}" if name in ("a", "same") else "{ }", f"{name[0]}.txt": ""}
        holdfast.save({"w": w, **part}, tmp_path / name, files=files)
    same, other, less = (command("diff", "--json", tmp_path / "a", tmp_path / name, torch=False) for name in ("same", "b", "c"))
    assert list(same.json["added"]) == ["file s.txt"] and not same.json["changed"]
    assert list(other.json["changed"]) == ["v", "file config.json"]
    assert (list(other.json["added"]), list(other.json["removed"])) == (["file b.txt"], ["file a.txt"])
    assert list(less.json["removed"]) == ["v", "file a.txt"]


# ---- What is wrong with the paths.


def test_wrong_paths_are_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "zip.pt").write_bytes(b"PK\3\4" + bytes(100))
    torch.save({"a": torch.ones(2)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    for name, said in (
        ("nowhere", "No such file or directory"),
        ("text.json", "neither a torch.save zip nor safetensors"),
        ("empty.pt", "neither a torch.save zip nor safetensors"),
        ("zip.pt", "load "),
        ("legacy.pt", "load it with torch.load and save it again"),
        ("pipe", "neither a file nor a directory"),
        (".", "holdfast ls"),
    ):
        needs_torch = name == "zip.pt"
        refused(command("show", tmp_path / name, torch=needs_torch), "holdfast show: ", said)
        refused(command("diff", run / "step-1", tmp_path / name, torch=needs_torch), "holdfast diff: ", said)


def test_an_incomplete_or_damaged_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    for name in ("step-1", "dcp-1"):
        shutil.copytree(run / name, tmp_path / name)
        manifest = next((tmp_path / name).glob("*.manifest.json"))
        manifest.write_bytes(manifest.read_bytes().replace(b'"step":1,', b'"step":9,'))
    shutil.copytree(run / "dcp-1", tmp_path / "no-metadata")
    (tmp_path / "no-metadata" / ".metadata").unlink()
    shutil.copytree(run / "dcp-1", tmp_path / "other-metadata")
    (tmp_path / "other-metadata" / ".metadata").write_bytes((run / "dcp-1" / ".metadata").read_bytes() + b".")
    shutil.copytree(run / "step-1", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model-00000-of-00001.safetensors", 5000)
    plain, framework, incomplete, other, cut = each(
        ["show", tmp_path / "step-1"],
        ["diff", tmp_path / "dcp-1", run / "dcp-1"],
        ["show", tmp_path / "no-metadata"],
        ["show", tmp_path / "other-metadata"],
        ["show", tmp_path / "cut"],
    )
    refused(plain, "holdfast show: ", "rank-00000-of-00001.manifest.json")
    refused(framework, "holdfast diff: ", ".manifest.json")
    refused(incomplete, ".metadata")
    refused(other, ".metadata", "commit record")
    refused(cut, "5000 bytes")


def test_a_hostile_torch_file_runs_no_code(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"w": torch.ones(2), "x": Hostile()}, tmp_path / "hostile.pt")
    done = command("show", tmp_path / "hostile.pt")
    refused(done, "mkdir", "save the state_dict()")
    assert "add_safe_globals" not in done.error  # no advice for a command
    assert not (tmp_path / "made").exists()


def test_a_deeply_nested_state_is_shown(tmp_path: Path) -> None:
    deep: Any = [1]
    for _ in range(2000):
        deep = [deep]
    holdfast.save_async({"w": torch.ones(2), "deep": deep}, tmp_path / "deep").wait(60)
    done = command("show", "--values", "--json", tmp_path / "deep", torch=False)
    assert list(done.json["values"].items()) == [("deep" + ".0" * 2001, "1")]


def test_without_torch_it_says_what_it_needs(run: Path) -> None:
    for name in ("dcp-1", "1.pt"):
        refused(command("show", run / name, torch=False), "PyTorch", "install torch")


def test_a_closed_pipe_is_quiet(run: Path) -> None:
    done = subprocess.run(f"'{sys.executable}' -m holdfast show '{run}/step-1' | true", shell=True, timeout=60,
                          capture_output=True)  # fmt: skip
    assert (done.stdout, done.stderr) == (b"", b"")
