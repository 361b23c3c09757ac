"""The command convert: every format into every other, and what a format cannot hold."""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import signal
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import programs
import pytest
import torch
import torch.distributed.checkpoint as dcp
from command_line import Run, each, refused
from command_line import holdfast as command
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import holdfast
import holdfast.dcp
from holdfast.cli import exact

MIB = 1 << 20
ATTEMPT = "00112233445566778899aabbccddeeff"
# As names, what each format is called with --to, or by its suffix.
TARGETS = ("plain", "dcp", "file.pt", "file.safetensors")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "weight": torch.randn(40, 8, generator=generator),
        "large": torch.randn(MIB, generator=generator),
        "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 3),
    }


def state() -> dict[str, Any]:
    return {"model": tensors(), "list": [torch.ones(3), 5], "step": 7, "lr": 0.1, "name": "x", "on": True,
            "nothing": None}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(torch.nan_to_num(a, 9.0), torch.nan_to_num(b, 9.0))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def ordered(value: Any) -> Any:
    """DCP keeps no order of keys."""
    return {k: ordered(value[k]) for k in sorted(value)} if isinstance(value, dict) else value


def write(path: Path, contents: Any) -> Path:
    if path.name == "dcp":
        dcp.save(contents, checkpoint_id=path, no_dist=True)
    elif path.suffix == ".pt":
        torch.save(contents, path)
    elif path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(contents, path)
    else:
        holdfast.save_async(contents, path, step=12).wait(60)
    return path


def read(path: Path, like: Any) -> Any:
    """With the formats' own readers."""
    if path.name == "dcp":
        flat = {"state": ordered(like)}["state"]
        target = _empty(flat)
        dcp.load(target, checkpoint_id=path, no_dist=True)
        return target
    if path.suffix == ".pt":
        return torch.load(path, weights_only=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return holdfast.load(path)


def _empty(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: _empty(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_empty(v) for v in value]
    return None


@pytest.mark.parametrize("source", TARGETS)
def test_every_format_becomes_every_other(tmp_path: Path, source: str) -> None:
    of_state = source != "file.safetensors"
    contents = state() if of_state else tensors()
    write(tmp_path / source, contents)
    (tmp_path / "to").mkdir()
    targets = [target for target in TARGETS if target != "file.safetensors" or not of_state]
    lines = [
        ["convert", *(["--to", "dcp"] if target == "dcp" else []), tmp_path / source, tmp_path / "to" / target]
        for target in targets
    ]
    for target, done in zip(targets, each(*lines), strict=True):
        assert done.status == 0, done
        assert "read back and compared" in done.out and not done.error
        assert same(ordered(contents), ordered(read(tmp_path / "to" / target, contents))), target
        assert holdfast.verify(tmp_path / "to" / target)["verdict"] == "sound", target
    assert sorted(os.listdir(tmp_path / "to")) == sorted(targets)


@pytest.mark.parametrize("source", TARGETS[:-1])
def test_the_tensors_of_every_format_become_safetensors(tmp_path: Path, source: str) -> None:
    write(tmp_path / source, tensors())
    (done,) = each(["convert", tmp_path / source, tmp_path / "x.safetensors"])
    assert done.status == 0, done
    assert same(ordered(tensors()), ordered(read(tmp_path / "x.safetensors", None)))


def test_the_step_and_tied_tensors_survive(tmp_path: Path) -> None:
    w = torch.ones(5)
    plain, file = write(tmp_path / "plain", {"a": w, "b": w}), tmp_path / "x.pt"
    five, copy = tmp_path / "five" / "step-5", tmp_path / "copies" / "copy"
    five.parent.mkdir()
    copy.parent.mkdir()
    runs = each(["convert", plain, file], ["convert", "--step", "5", file, five], ["convert", plain, copy])
    assert [done.status for done in runs] == [0, 0, 0], runs
    loaded = torch.load(file, weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert [holdfast.find_newest(path.parent)["step"] for path in (plain, five, copy)] == [12, 5, 12]


def test_items_of_a_list_keep_their_places(tmp_path: Path) -> None:
    """The planner of DCP writes nothing for an empty container."""
    dcp.save({"l": [{}, {"a": torch.ones(2)}, {}, {"a": torch.zeros(3)}]}, checkpoint_id=tmp_path / "dcp")
    (done,) = each(["convert", tmp_path / "dcp", tmp_path / "plain"])
    assert done.status == 0, done
    found = holdfast.load(tmp_path / "plain")["l"]
    assert [None if item is None else item["a"].tolist() for item in found] == [None, [1.0, 1.0], None, [0.0, 0.0, 0.0]]


def test_values_that_dcp_stores_whole_keep_their_containers(tmp_path: Path) -> None:
    """The planner flattens nothing here; earlier ones stored a Counter so."""
    whole = {"optimizer": {"state": {0: {"m": torch.ones(2)}, 1: {"m": torch.zeros(2)}}}, "milestones": Counter({0: 1, 60: 1})}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(whole, checkpoint_id=tmp_path / "dcp", no_dist=True, planner=planner)
    (done,) = each(["convert", tmp_path / "dcp", tmp_path / "plain"])
    assert done.status == 0, done
    found = holdfast.load(tmp_path / "plain")
    assert found["optimizer"]["state"][1]["m"].tolist() == [0.0, 0.0]
    assert type(found["milestones"]) is Counter and found["milestones"] == {0: 1, 60: 1}


@pytest.mark.parametrize("path", [("w", "inside"), ("w",)])
def test_metadata_that_places_two_values_at_one_place_is_refused(tmp_path: Path, path: tuple[str, ...]) -> None:
    write(tmp_path / "dcp", {"w": torch.ones(2), "x": torch.ones(2)})
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = {"w": ("w",), "x": path}
    file.write_bytes(pickle.dumps(metadata))
    refused(command("convert", tmp_path / "dcp", tmp_path / "x.pt"), "load x: ", "the metadata places it")


def test_what_a_format_cannot_hold_is_named(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {"w": torch.ones(2), "train": {"step": 3}})
    number = write(tmp_path / "complex.pt", {"deep": [torch.ones(2, dtype=torch.complex128)]})
    rows = write(tmp_path / "list.pt", [torch.ones(2)])
    twice = write(tmp_path / "twice.pt", {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}})
    target, good = tmp_path / "x.safetensors", tmp_path / "good.safetensors"
    runs = each(
        ["convert", plain, target],
        ["convert", number, target],
        ["convert", rows, target],
        ["convert", twice, target],
        ["convert", "--tensors-only", plain, good],
    )
    refused(runs[0], "train.step", "--tensors-only")
    refused(runs[1], "deep.0", "complex128")
    refused(runs[2], "list")
    refused(runs[3], "a.b", "two entries")
    assert runs[4].status == 0 and read(good, None).keys() == {"w"}
    assert not target.exists()


@pytest.mark.parametrize("to", ["holdfast", "dcp", "torch", "safetensors"])
def test_no_tensor_of_two_with_one_name_is_lost(tmp_path: Path, to: str) -> None:
    twice = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}, 0: torch.ones(1), "0": torch.zeros(1)}
    source = write(tmp_path / "twice.pt", twice)
    only, whole = each(["convert", "--to", to, "--tensors-only", source, tmp_path / "only"],
                       ["convert", "--to", to, source, tmp_path / "whole"])  # fmt: skip
    refused(only, "a.b", "two entries have this name")
    assert not (tmp_path / "only").exists()
    if to in ("dcp", "safetensors"):
        refused(whole, "a.b", "two entries have this name")
    else:
        assert whole.status == 0, whole
        found = holdfast.load(tmp_path / "whole") if to == "holdfast" else torch.load(tmp_path / "whole")
        assert [found["a.b"].sum(), found["a"]["b"].sum(), found[0].sum(), found["0"].sum()] == [2, 0, 1, 0]


def test_tensors_alone_have_the_names_that_show_prints(tmp_path: Path) -> None:
    source = write(tmp_path / "nested.pt", {"optimizer": [{"m": torch.ones(2)}, 5]})
    formats = ("holdfast", "dcp", "torch")
    runs = each(*(["convert", "--tensors-only", "--to", to, source, tmp_path / to] for to in formats),
                *(["show", "--json", tmp_path / to] for to in formats))  # fmt: skip
    assert [run.status for run in runs] == [0] * 6, runs
    assert all([tensor["name"] for tensor in run.json["tensors"]] == ["optimizer.0.m"] for run in runs[3:])
    assert holdfast.load(tmp_path / "holdfast").keys() == torch.load(tmp_path / "torch").keys() == {"optimizer.0.m"}


@pytest.mark.parametrize("layout", ["holdfast", "hf"])
def test_further_files_come_along_or_are_named(tmp_path: Path, layout: Any) -> None:
    files = {"config.json": b'{"layers": 2}', "empty": b""}
    if layout == "holdfast":  # names that the other layout has for files of its own
        files.update({"model.safetensors": b"1", "model.safetensors.index.json": b"2"})
    model = {"a": torch.ones(400), "b": torch.zeros(400)}
    holdfast.save(model, tmp_path / "from", files=files, layout=layout, shard_bytes_max=1600)
    (tmp_path / "to").mkdir()
    plain, file = each(["convert", tmp_path / "from", tmp_path / "to" / "plain"], ["convert", tmp_path / "from", tmp_path / "x.pt"])
    assert (plain.status, plain.error, file.status) == (0, "", 0), (plain, file)
    assert file.error.count("\n") == 1 and f"files {', '.join(files)}, which" in file.error
    assert holdfast.open(tmp_path / "to" / "plain").files() == files
    assert "model.safetensors" in os.listdir(tmp_path / "to" / "plain")
    own = (tmp_path / "to" / "plain" / "model-00000-of-00001.safetensors").exists()
    assert own == (layout == "holdfast")
    assert command("diff", tmp_path / "from", tmp_path / "to" / "plain", torch=False).status == 0


def test_empty_dicts_that_dcp_does_not_store_are_named(tmp_path: Path) -> None:
    contents = {"optimizer": {"state": {}, "groups": [{"lr": torch.ones(1)}, {}], "empty": []}, "pair": ({}, 1)}
    source = write(tmp_path / "x.pt", contents)
    as_dcp, plain = each(["convert", "--to", "dcp", source, tmp_path / "dcp"], ["convert", source, tmp_path / "plain"])
    assert (as_dcp.status, plain.status, plain.error) == (0, 0, ""), (as_dcp, plain)
    said = f"holdfast convert: {tmp_path}/dcp lacks the empty dicts optimizer.state, optimizer.groups.1, which DCP does not store\n"
    assert as_dcp.error == said
    (back,) = each(["convert", tmp_path / "dcp", tmp_path / "back.pt"])
    found = torch.load(tmp_path / "back.pt")
    assert found == {"optimizer": {"groups": [{"lr": torch.ones(1)}], "empty": []}, "pair": ({}, 1)}, back


def test_a_rank_of_what_has_none_is_refused(tmp_path: Path) -> None:
    for name in TARGETS[1:]:
        write(tmp_path / name, {"w": torch.ones(2)})
    for run in each(*(["convert", "--rank", "3", tmp_path / name, tmp_path / "x"] for name in TARGETS[1:])):
        refused(run, "leave --rank out")


def test_a_launchers_environment_makes_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "x.pt", {"w": torch.ones(2)})
    for name, value in (("WORLD_SIZE", "8"), ("RANK", "3")):
        monkeypatch.setenv(name, value)
    runs = each(*(["convert", "--to", to, source, tmp_path / to] for to in ("holdfast", "dcp")))
    assert [(run.status, run.error) for run in runs] == [(0, "")] * 2, runs


def _views() -> dict[str, torch.Tensor]:
    """Whose memory has other elements than they have."""
    return {"conj": torch.tensor([1 + 2j, 3]).conj(), "neg": torch._neg_view(torch.arange(6.0).reshape(2, 3).t())}


@pytest.mark.parametrize("source", ["dcp", "file.pt"])
def test_views_that_conjugate_or_negate_keep_their_values(tmp_path: Path, source: str) -> None:
    write(tmp_path / source, _views())
    write(tmp_path / "neg.pt", {"neg": _views()["neg"]})
    (tmp_path / "to").mkdir()
    targets = {name: tmp_path / "to" / name for name in ("plain", "dcp", "file.pt")}
    runs = each(
        *(["convert", *(["--to", "dcp"] if name == "dcp" else []), tmp_path / source, path] for name, path in targets.items()),
        ["convert", tmp_path / "neg.pt", tmp_path / "x.safetensors"],
        ["diff", "--read", tmp_path / source, tmp_path / "to" / "plain"],
    )  # fmt: skip
    assert [run.status for run in runs] == [0] * 5, runs
    for path in targets.values():
        found = read(path, {name: tensor.clone() for name, tensor in _views().items()})
        assert all(torch.equal(found[name], tensor) for name, tensor in _views().items()), path
    assert torch.equal(read(tmp_path / "x.safetensors", None)["neg"], _views()["neg"])


def test_sparse_tensors_are_converted_and_quantized_ones_refused(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float("nan")], (3,), check_invariants=True)
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.quint8)
    source, odd = write(tmp_path / "s.pt", {"s": sparse}), write(tmp_path / "q.pt", {"q": quantized})
    dcp.save({"q": quantized}, checkpoint_id=tmp_path / "stock", no_dist=True)
    runs = each(["convert", source, tmp_path / "plain"], ["convert", odd, tmp_path / "x.pt"], ["diff", "--read", odd, odd],
                ["convert", tmp_path / "stock", tmp_path / "y.pt"])  # fmt: skip
    assert runs[0].status == 0, runs
    assert torch.equal(holdfast.load(tmp_path / "plain")["s"]._indices(), torch.tensor([[0, 2]]))
    refused(runs[1], "convert q: ", "int_repr()")
    refused(runs[2], "quantized")
    refused(runs[3], "load q: ", "int_repr()")


def test_a_tensor_without_memory_is_converted_to_a_file_and_refused_elsewhere(tmp_path: Path) -> None:
    source = write(tmp_path / "m.pt", {"w": torch.ones(3), "m": torch.empty(5, device="meta")})
    runs = each(*(["convert", "--to", to, source, tmp_path / to] for to in ("torch", "holdfast", "dcp", "safetensors")),
                ["diff", "--read", source, source])  # fmt: skip
    assert runs[0].status == 0, runs
    refused(runs.pop(), "meta device")
    assert torch.load(tmp_path / "torch")["m"].is_meta
    for run in runs[1:]:
        refused(run, " m: ", "meta")
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "torch"]


def test_nested_tensors_are_refused_for_every_format(tmp_path: Path) -> None:
    source = tmp_path / "n.pt"
    torch.save({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, source)
    runs = each(*(["convert", "--to", to, source, tmp_path / to] for to in ("holdfast", "dcp", "torch", "safetensors")),
                ["show", source])  # fmt: skip
    for run in runs:
        refused(run, " n: nested tensors", "unbind()")
    assert os.listdir(tmp_path) == ["n.pt"]


@pytest.mark.parametrize("to", ["holdfast", "dcp", "safetensors"])
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, to: str) -> None:
    source = write(tmp_path / "x.pt", {"\ud800": torch.ones(2)})
    refused(command("convert", "--to", to, source, tmp_path / "y"), " \\ud800: the name is not UTF-8")


def test_a_pickle_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    """Python raises many kinds of exceptions there."""
    pickles = (b"\x80\x02.", b"\x80\x02J\x01", b"\x80\x02NNR.", b"\x80\x02Q.", b"\x80\x02N\x85b.", b"")
    for number, data in enumerate(pickles):
        with zipfile.ZipFile(tmp_path / f"{number}.pt", "w") as file:
            for name, content in (("data.pkl", data), ("version", b"3\n"), ("byteorder", b"little")):
                file.writestr(f"archive/{name}", content)
    paths = [tmp_path / f"{number}.pt" for number in range(len(pickles))]
    for path, done in zip(paths, each(*(["show", path] for path in paths)), strict=True):
        refused(done, f"load {path}: ")


def test_a_dcp_checkpoint_is_compared_with_what_torch_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.cli import framework_sources, sources

    write(tmp_path / "dcp", {"w": torch.ones(3), "deep": {"w": torch.zeros(2, 2), "n": 5}})
    source = sources.open_source(str(tmp_path / "dcp"))
    assert source.state()["deep"]["n"] == 5
    find = framework_sources.StorageReader._read_unproved

    def misread(self: Any, *arguments: Any) -> Any:
        result = find(self, *arguments)
        arguments[4].append(lambda: arguments[1].state_dict["w"].fill_(2))
        return result

    monkeypatch.setattr(framework_sources.StorageReader, "_read_unproved", misread)
    with pytest.raises(holdfast.Error, match="load w: torch.load finds other"):
        source.state()


def test_objects_are_made_only_as_allowed(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {"w": torch.ones(2), "args": argparse.Namespace(lr=0.1)})
    unsafe = write(tmp_path / "unsafe.pt", {"args": argparse.Namespace(lr=0.1)})
    allow = ("--allow", "argparse:Namespace")
    copy = tmp_path / "copies" / "copy"
    copy.parent.mkdir()
    runs = each(
        ["convert", plain, tmp_path / "x.pt"],
        ["convert", *allow, plain, tmp_path / "x.pt"],
        ["convert", unsafe, tmp_path / "x.pt"],
        ["convert", *allow, plain, copy],
        ["convert", "--tensors-only", plain, tmp_path / "w.pt"],
    )
    refused(runs[0], "args", "--allow argparse:Namespace")
    refused(runs[1], "args", "argparse.Namespace")
    refused(runs[2], "argparse.Namespace")
    assert not (tmp_path / "x.pt").exists()
    assert runs[3].status == 0 and runs[4].status == 0
    assert holdfast.load(copy, allow=[argparse.Namespace])["args"].lr == 0.1


def test_objects_are_compared_by_what_they_consist_of(tmp_path: Path) -> None:
    """And not by their repr, which has addresses, or leaves elements out."""
    values = {
        "generator": torch.Generator().manual_seed(5),
        "namespace": argparse.Namespace(rates=numpy.arange(5000.0), tags={"a", "b", "c", "d"}),
        "set": {7, 15, "x", (1, 2)},
        "nan": float("nan"),
    }
    allow = [option for name in ("torch._C:Generator", "argparse:Namespace") for option in ("--allow", name)]
    (tmp_path / "to").mkdir()
    write(tmp_path / "plain", values)
    plain, as_dcp = each(["convert", *allow, tmp_path / "plain", tmp_path / "to" / "plain"],
                         ["convert", *allow, "--to", "dcp", tmp_path / "plain", tmp_path / "to" / "dcp"])  # fmt: skip
    assert [plain.status, as_dcp.status] == [0, 0], (plain, as_dcp)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (numpy.zeros(5000), numpy.zeros(5000) + numpy.eye(1, 5000, 2500)[0]),
        (argparse.Namespace(x=numpy.zeros(5000)), argparse.Namespace(x=numpy.eye(1, 5000, 2500)[0])),
        (True, 1), (1, 1.0), (0.0, -0.0), ({1}, {True}), ({1}, frozenset({1})), (Counter(a=1), {"a": 1}),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)), ((1, 2), [1, 2]), (torch.float16, "torch.float16"),
    ],
)  # fmt: skip
def test_values_that_differ_have_other_texts(a: Any, b: Any) -> None:
    assert exact.text(a) != exact.text(b)
    assert exact.text(a) == exact.text(copy.deepcopy(a) if not isinstance(a, torch.Generator) else a.clone_state())


def test_an_object_that_contains_itself_has_a_text() -> None:
    around = argparse.Namespace(x=[1])
    around.x.append(around)
    assert exact.text(around) == exact.text(copy.deepcopy(around))


def test_a_rank_of_several_is_chosen(tmp_path: Path) -> None:
    two, file = tmp_path / "two", tmp_path / "x.pt"
    saves = [
        holdfast.save_async({"rng": torch.full((4,), rank)}, two, rank=rank, world_size=2, attempt=ATTEMPT)
        for rank in (0, 1)
    ]
    saves += [
        holdfast.save_async({"w": torch.ones(4)}, tmp_path / "alike", rank=rank, world_size=2, attempt=ATTEMPT)
        for rank in (0, 1)
    ]
    for save in saves:
        save.wait(60)
    assert command("convert", tmp_path / "alike", tmp_path / "alike.pt").status == 0
    assert torch.load(tmp_path / "alike.pt", weights_only=True)["w"].tolist() == [1, 1, 1, 1]
    runs = each(*(["convert", *rank, two, file] for rank in ([], ["--rank", "2"], ["--rank", "1"])))
    refused(runs[0], "2 ranks", "--rank")
    refused(runs[1], "2 ranks", "--rank")
    assert runs[2].status == 0
    holdfast.save({"w": torch.ones(1)}, tmp_path / "one")
    refused(command("convert", "--rank", "5", tmp_path / "one", tmp_path / "y.pt"), "1 rank saved it; pass --rank 0\n")
    assert torch.load(file, weights_only=True)["rng"].tolist() == [1, 1, 1, 1]


def test_wrong_paths_leave_nothing_behind(tmp_path: Path) -> None:
    source = write(tmp_path / "plain", {"w": torch.ones(1000)})
    refused(command("convert", source, source), "exists already")
    refused(command("convert", tmp_path / "nowhere", tmp_path / "x.pt"), "No such file")
    refused(command("convert", source, tmp_path / "no" / "x.pt"), "does not exist")
    refused(command("convert", source, "s3://bucket/x"), "s3://bucket/x")
    file = source / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(command("convert", source, tmp_path / "x.pt"), "corrupt", "digest", "holdfast verify")
    assert [p.name for p in tmp_path.iterdir()] == ["plain"]


def _begun(source: Path, target: Path) -> programs.Program:
    """A conversion that has begun to write."""
    target.parent.mkdir()
    to = {"dcp": "dcp", "plain": "holdfast"}.get(target.name, "safetensors")
    running = programs.Program(["-m", "holdfast", "convert", "--to", to, str(source), str(target)])
    while not os.listdir(target.parent) and running.poll() is None:
        time.sleep(0.001)
    return running


@pytest.mark.parametrize("name", ["plain", "dcp", "file.safetensors"])
def test_what_appears_at_dst_meanwhile_stays(tmp_path: Path, name: str) -> None:
    target = tmp_path / "to" / name
    running = _begun(write(tmp_path / "source.pt", {"w": torch.ones(16 * MIB)}), target)
    os.kill(running.pid, signal.SIGSTOP)
    if name == "plain":
        holdfast.save({"w": torch.zeros(3)}, target, step=9)
    else:
        target.mkdir(exist_ok=True)
        (target / "mine").write_text("x")
    before = sorted(os.listdir(target))
    os.kill(running.pid, signal.SIGCONT)
    _, error = running.communicate(timeout=200)
    refused(Run(running.wait(), "", error.decode()), f"convert to {target}: ", "exist")
    assert sorted(os.listdir(target)) == before and os.listdir(target.parent) == [name]


def test_the_result_is_not_the_newest_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holdfast.save({"w": torch.ones(3)}, run / "step-300", step=300)
    file = write(tmp_path / "model.pt", {"w": torch.zeros(3)})
    runs = each(
        ["convert", "--to", "dcp", file, run / "dcp-100"],  # checkpoints of the other format only
        ["convert", file, run / "step-0"],
        ["convert", "--to", "dcp", run / "step-300", run / "dcp-300"],
        ["convert", run / "step-300", run / "step-300.pt"],
    )
    assert [done.status for done in runs] == [0, 2, 2, 0], runs
    refused(runs[1], f"convert to {run}/step-0: ", "step-300", "choose a directory")
    refused(runs[2], f"convert to {run}/dcp-300: ", "dcp-100", "choose a directory")
    assert sorted(os.listdir(run)) == ["dcp-100", "step-300", "step-300.pt"]
    assert holdfast.find_newest(run)["name"] == "step-300"


@pytest.mark.parametrize("name", ["plain", "dcp", "file.safetensors"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    running = _begun(write(tmp_path / "source.pt", {"w": torch.ones(64 * MIB)}), tmp_path / "to" / name)
    os.kill(running.pid, signal.SIGINT)
    _, error = running.communicate(timeout=200)
    assert (running.returncode, error) == (130, b"")
    assert os.listdir(tmp_path / "to") == []


@pytest.mark.parametrize(("source", "target"), [("plain", "dcp"), ("dcp", "file.pt")])
def test_memory_is_bounded(tmp_path: Path, source: str, target: str) -> None:
    """Of 512 MiB in four tensors; pages of files are the system's to write out."""
    write(tmp_path / source, {f"w{i}": torch.full((32 * MIB,), float(i)) for i in range(4)})
    holdfast.trim()
    to = "dcp" if target == "dcp" else "torch"
    running = programs.Program(["-m", "holdfast", "convert", "--to", to, str(tmp_path / source), str(tmp_path / f"to-{target}")], stderr=False)
    peak = 0
    while running.poll() is None:
        try:
            status = Path(f"/proc/{running.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        found = dict(line.split(":", 1) for line in status.splitlines())
        if "RssAnon" in found:
            peak = max(peak, int(found["RssAnon"].split()[0]))
        time.sleep(0.01)
    assert running.wait(300) == 0
    assert 0 < peak < 400 * 1024, "KiB"
