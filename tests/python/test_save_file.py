"""`save_file`: what torch.load makes of its files is what it makes of torch.save's."""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from command_line import holdfast as command
from slow_device import SlowDevice
from test_late_copies import slow  # noqa: F401

import holdfast
from holdfast import _framing, _late, files

LONG = bool(os.environ.get("HOLDFAST_LONG"))


@pytest.fixture(autouse=True)
def fresh_options() -> Iterator[None]:
    yield
    holdfast.flush(60)


def saved(item: Any, path: Path) -> holdfast.Save:
    return holdfast.save_file(item, path, wait=True)


def record(path: Path | io.BytesIO, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        (found,) = [each for each in archive.namelist() if each.split("/", 1)[1] == name]
        return archive.read(found)


def storages(path: Path | io.BytesIO) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        split = [(each.split("/", 1)[1], each) for each in archive.namelist()]
        return {name: archive.read(each) for name, each in split if name.startswith("data/")}


def check(item: Any, path: Path) -> None:
    """The pickle and the storages are torch.save's, byte for byte; every way of loading reads them."""
    theirs = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(item, theirs)
    saved(item, path)
    assert record(path, "data.pkl") == record(theirs, "data.pkl")
    assert storages(path) == storages(theirs)
    for options in ({}, {"mmap": True}):
        torch.load(path, weights_only=False, **options)
    theirs.seek(0)
    try:
        torch.load(theirs, weights_only=True)
    except pickle.UnpicklingError:
        return
    torch.load(path, weights_only=True)


@dataclasses.dataclass
class Config:
    width: int
    scale: torch.Tensor


class Marked(torch.Tensor):
    pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8, bias=False)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("statistics", torch.ones(4, dtype=torch.float16))


def kinds() -> dict[str, Callable[[], Any]]:
    base = torch.arange(48, dtype=torch.float32)
    grid = base.view(6, 8)

    def with_gradient() -> torch.Tensor:
        tensor = torch.ones(3, requires_grad=True)
        tensor.square().sum().backward()
        return tensor

    def optimizer() -> Any:
        net = Net()
        adam = torch.optim.Adam(net.parameters())
        net.first(torch.ones(2, 8)).sum().backward()
        adam.step()
        return {"net": net.state_dict(), "adam": adam.state_dict(), "step": 3}

    return {
        "None": lambda: None,
        "plain values": lambda: {"a": [1, 2.5, "x", b"y", None], ("k", 1): {3}},
        "one tensor": lambda: base,
        "a tie and views": lambda: [grid, grid, grid.t(), grid[1:3, ::2], base[5:], grid.diagonal()],
        "expanded": lambda: torch.ones(1, 4).expand(3, 4),
        "0-dim and empty": lambda: [torch.tensor(3), torch.empty(0), torch.empty(2, 0, 3), base[:0]],
        "conj and neg": lambda: [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.cfloat).conj().imag],
        "parameters": lambda: [torch.nn.Parameter(torch.ones(3)), with_gradient()],
        "module": Net,
        "module without weights yet": lambda: torch.nn.LazyLinear(4),
        "state of a training": optimizer,
        "sparse": lambda: [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()],
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": lambda: torch.empty(3, 4, device="meta"),
        "subclass": lambda: torch.ones(3).as_subclass(Marked),
        "storages": lambda: [base.untyped_storage(), base.untyped_storage(), torch.UntypedStorage(0)],
        "typed storage": lambda: torch.FloatStorage([1.0, 2.0]),
        "dataclass": lambda: Config(3, torch.ones(2)),
        "ordered": lambda: collections.OrderedDict(a=base, b=grid),
        "numpy": lambda: {"array": numpy.arange(1000), "scalar": numpy.float64(3)},
        "large bytes": lambda: {"blob": os.urandom(9 << 20), "x": base},
        "attributes": lambda: _with_attribute(),
        "generator state": torch.get_rng_state,
        "size and dtype": lambda: [torch.Size([1, 2]), torch.float16, torch.device("cpu")],
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.filterwarnings("ignore")
def test_every_kind_is_pickled_as_torch_save_does(tmp_path: Path, kind: str) -> None:
    check(kinds()[kind](), tmp_path / "x.pt")


DTYPES = sorted(
    {
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype)
        and not re.fullmatch(r"torch\.(q.*|bits[124]x.*|u?int[1-7])", str(dtype))
    },
    key=str,
)


def test_every_dtype_is_saved(tmp_path: Path) -> None:
    state = {}
    for dtype in DTYPES:
        raw = (torch.arange(64 * dtype.itemsize) % (2 if dtype == torch.bool else 251)).to(torch.uint8)
        state[str(dtype)] = raw.view(dtype)
    check(state, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


def test_large_storages_keep_their_bytes_and_their_alignment(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randint(0, 255, ((3 << 20) + 17 * i,), dtype=torch.uint8) for i in range(5)}
    check(state, tmp_path / "x.pt")
    mapped = torch.load(tmp_path / "x.pt", mmap=True)
    for name, tensor in state.items():
        assert torch.equal(mapped[name], tensor)
        assert mapped[name].data_ptr() % 64 == 0


def test_many_storages_are_saved(tmp_path: Path) -> None:
    count = 66_000 if LONG else 3000
    saved([torch.tensor([i]) for i in range(count)], tmp_path / "x.pt")
    assert torch.equal(torch.cat(torch.load(tmp_path / "x.pt")), torch.arange(count))
    assert holdfast.verify(tmp_path / "x.pt")["verdict"] == "sound"


def test_an_archive_holds_more_records_than_a_plain_zip_can_count() -> None:
    archive, data = _framing.Archive(), bytearray()
    for i in range(66_000):
        data += archive.record(b"%d" % i, b"x")
    data += archive.directory()[0]
    assert len(data) == archive.length
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        assert len(opened.namelist()) == 66_000
        assert opened.read("65999") == b"x"


def test_storages_of_more_than_4_gib_have_zip64_records() -> None:
    archive = _framing.Archive()
    head = archive.begin(b"archive/data/0", 5 << 30)
    assert len(head) % _framing.ALIGNMENT == 0
    descriptor, slot = archive.end()
    assert (len(descriptor), slot) == (24, 4)
    second = archive.begin(b"archive/data/1", 7)
    assert (archive.length - 7) % _framing.ALIGNMENT == 0
    tail = archive.end()[0] + archive.directory()[0]

    class Sparse(io.RawIOBase):
        """The archive, with zeros for the bytes of the storages."""

        parts = {0: head, len(head) + (5 << 30): descriptor + second, archive.length - len(tail): tail}
        at = 0

        def seekable(self) -> bool:
            return True

        def readable(self) -> bool:
            return True

        def tell(self) -> int:
            return self.at

        def seek(self, offset: int, whence: int = 0) -> int:
            self.at = offset + (0, self.at, archive.length)[whence]
            return self.at

        def read(self, size: int = -1) -> bytes:
            size = archive.length - self.at if size < 0 else min(size, archive.length - self.at)
            out = bytearray(size)
            for begin, part in self.parts.items():
                for i in range(max(begin, self.at), min(begin + len(part), self.at + size)):
                    out[i - self.at] = part[i - begin]
            self.at += size
            return bytes(out)

    with zipfile.ZipFile(Sparse()) as opened:  # type: ignore[arg-type]
        sizes = {info.filename: info.file_size for info in opened.infolist()}
        assert sizes == {"archive/data/0": 5 << 30, "archive/data/1": 7}
        assert opened.getinfo("archive/data/1").header_offset == len(head) + (5 << 30) + len(descriptor)


def test_what_is_changed_after_the_call_is_not_saved(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1 << 20), "step": [1]}
    save = holdfast.save_file(state, tmp_path / "x.pt")
    state["x"].fill_(7)
    state["step"][0] = 2
    save.wait(60)
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded["step"] == [1] and not loaded["x"].any()


@pytest.mark.parametrize(
    "options",
    [
        {"launcher": "persistent"},
        {"launcher": "fork"},
        {"engine": "pwrite", "direct_io": False},
        {"read_back": True},
        {"arena_bytes": 16 << 20},
    ],
    ids=str,
)
def test_every_way_of_writing_makes_the_file(tmp_path: Path, options: dict[str, Any]) -> None:
    holdfast.flush(60)
    before = {"launcher": "spawn", "engine": "auto", "direct_io": True, "read_back": False, "arena_bytes": 0}
    holdfast.configure(**options)
    try:
        for number in range(2):
            state = {"x": torch.full((8 << 20,), float(number)), "y": torch.arange(number + 1)}
            saved(state, tmp_path / "x.pt")
            loaded = torch.load(tmp_path / "x.pt", mmap=True)
            assert torch.equal(loaded["x"], state["x"]) and torch.equal(loaded["y"], state["y"])
            assert holdfast.verify(tmp_path / "x.pt")["verdict"] == "sound"
            assert len(os.listdir(tmp_path)) == 2
    finally:
        holdfast.flush(60)
        holdfast.configure(**{key: before[key] for key in options})


# ---- Device memory.


@pytest.mark.parametrize("clone_max", [64 << 20, 0], ids=["cloned", "the stream waits"])
def test_device_tensors_hold_the_values_at_the_call(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clone_max: int  # noqa: F811
) -> None:
    monkeypatch.setattr(_late, "CLONE_MAX", clone_max)
    x = torch.arange(1000.0)
    save = holdfast.save_file({"x": x, "view": x[::2], "e": torch.empty(0)}, tmp_path / "x.pt")
    x.fill_(-1)  # ordered behind the copies
    slow.open.set()
    save.wait(60)
    loaded = torch.load(tmp_path / "x.pt")
    assert torch.equal(loaded["x"], torch.arange(1000.0))
    assert torch.equal(loaded["view"], torch.arange(0, 1000.0, 2))
    assert holdfast.verify(tmp_path / "x.pt")["verdict"] == "sound"


def test_late_tensors_that_change_too_early_fail_the_save(slow: SlowDevice, tmp_path: Path) -> None:  # noqa: F811
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    torch.save({"old": 1}, tmp_path / "x.pt")
    save = holdfast.save_file(layer.state_dict(), tmp_path / "x.pt", late=[optimizer])
    with torch.no_grad():
        layer.weight.fill_(1)
    slow.open.set()
    with pytest.raises(holdfast.Error, match="late= names changed") as error:
        save.wait(60)
    assert error.value.code == "DATA_LOSS"
    assert torch.load(tmp_path / "x.pt") == {"old": 1}
    assert os.listdir(tmp_path) == ["x.pt"]

    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    slow.open.clear()
    save = holdfast.save_file(layer.state_dict(), tmp_path / "x.pt", late=[optimizer])
    optimizer.step()  # waits, on the device
    slow.open.set()
    save.wait(60)
    loaded = torch.load(tmp_path / "x.pt")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items())


# ---- Hostile arguments.


def refusal(item: Any, path: Any, code: str, **options: Any) -> str:
    with pytest.raises(holdfast.Error) as caught:
        holdfast.save_file(item, path, **options)
    assert caught.value.code == code
    return caught.value.message


def test_what_cannot_be_saved_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    saved({"old": 1}, path)
    before = sorted(os.listdir(tmp_path))
    assert "cannot be pickled" in refusal({"f": lambda: 0}, path, "INVALID_ARGUMENT")
    entry = "model.layers.1: a Tensor cannot be pickled: 'dtype torch.int4"
    assert entry in refusal({"model": {"layers": [1, torch.zeros(4, dtype=torch.uint8).view(torch.int4)]}}, path, "INVALID_ARGUMENT")
    assert "hooks.0: a function cannot be pickled" in refusal({"hooks": (lambda: 0,)}, path, "INVALID_ARGUMENT")
    x = torch.zeros(4)
    assert "share memory" in refusal([x, x.view(torch.int32)], path, "INVALID_ARGUMENT")
    assert "torch.save writes to objects" in refusal(1, io.BytesIO(), "INVALID_ARGUMENT")
    assert "URL" in refusal(1, "s3://bucket/x.pt", "INVALID_ARGUMENT")
    assert "name of a file" in refusal(1, f"{tmp_path}/new/", "INVALID_ARGUMENT")
    assert "it is a directory" in refusal(1, tmp_path, "FAILED_PRECONDITION")
    assert ".tmp" in refusal(1, tmp_path / "x.pt.tmp", "INVALID_ARGUMENT")
    assert "203 bytes" in refusal(1, tmp_path / ("n" * 204), "INVALID_ARGUMENT")
    manifest = Path(files.manifests_of(path)[0])
    assert "manifest" in refusal(1, manifest, "INVALID_ARGUMENT")
    refusal(1, path, "ALREADY_EXISTS", replace=False)
    assert sorted(os.listdir(tmp_path)) == before
    assert torch.load(path) == {"old": 1}
    assert holdfast.verify(path)["verdict"] == "sound"


def test_names_of_every_kind_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x", "ü ö.pt", "n" * 203, "a.partial", "epoch=3-step=10.ckpt", ".hidden", "%s.pt"):
        saved({"name": name}, Path(name))
        assert torch.load(name) == {"name": name}
        assert holdfast.verify(name)["checked"].startswith("XXH3-128")
    saved(1, Path("deep/er/x.pt"))
    assert torch.load("deep/er/x.pt") == 1
    os.symlink("deep/er/x.pt", "link.pt")
    saved(2, Path("link.pt"))
    assert os.path.islink("link.pt") and torch.load("deep/er/x.pt") == 2


def test_the_removal_of_a_link_leaves_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "epoch-3.pt", tmp_path / "last.pt"
    saved(1, target)
    link.symlink_to("epoch-3.pt")
    holdfast.remove_file(link)
    assert not link.is_symlink() and torch.load(target) == 1
    assert holdfast.verify(target)["checked"].startswith("XXH3-128")
    (tmp_path / "directory").symlink_to(".")
    holdfast.remove_file(tmp_path / "directory")
    holdfast.remove_file(link)  # nothing is there
    holdfast.remove_file(target)
    assert os.listdir(tmp_path) == []


def test_the_handle_is_that_of_a_save(tmp_path: Path) -> None:
    save = holdfast.save_file({"x": torch.ones(3)}, tmp_path / "x.pt", step=7)
    assert save.step == 7 and save.path == str(tmp_path / "x.pt")
    report = save.wait(60)
    assert report["path"] == str(tmp_path / "x.pt")
    assert report["bytes"] == os.path.getsize(tmp_path / "x.pt")
    assert save.durable.done() and save.staged.done()
    assert holdfast.verify(tmp_path / "x.pt")["step"] == 7
    umask = os.umask(0)
    os.umask(umask)
    assert os.stat(tmp_path / "x.pt").st_mode & 0o777 == 0o666 & ~umask


def test_a_file_in_the_directory_of_a_checkpoint_is_proven_with_it(tmp_path: Path) -> None:
    at = tmp_path / "c"
    holdfast.save_async({"x": torch.ones(1000)}, at, step=3).wait(60)
    whole = holdfast.verify(at)
    saved({"rest": torch.ones(1000)}, at / "meta.pt")
    (at / "notes").write_text("foreign")
    found = holdfast.verify(at)
    assert (found["verdict"], found["files"], found["step"]) == ("sound", whole["files"] + 1, 3)
    assert found["note"].endswith("no manifest names them: notes.")
    data = bytearray((at / "meta.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (at / "meta.pt").write_bytes(data)
    assert [fault["file"] for fault in holdfast.verify(at)["faults"]] == ["meta.pt"]


def test_a_run_is_verified_with_all_its_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save({"x": torch.full((1000,), float(step))}, tmp_path / f"step-{step}", step=step)
    saved({"x": torch.ones(1000)}, tmp_path / "last.pt")
    whole = holdfast.verify(tmp_path)
    assert (whole["verdict"], whole["path"], whole["step"], whole["faults_total"]) == ("sound", str(tmp_path), 2, 0)
    each = [holdfast.verify(tmp_path / name) for name in ("step-1", "step-2", "last.pt")]
    assert [whole[key] for key in ("files", "tensors", "bytes")] == [sum(r[key] for r in each) for key in ("files", "tensors", "bytes")]
    for name in ("step-1/model-00000-of-00001.safetensors", "last.pt"):
        data = bytearray((tmp_path / name).read_bytes())
        data[len(data) // 2 + 500] ^= 1
        (tmp_path / name).write_bytes(data)
    found = holdfast.verify(tmp_path)
    assert (found["verdict"], found["faults_total"]) == ("corrupt", 2)
    assert {fault["file"] for fault in found["faults"]} == {"step-1/model-00000-of-00001.safetensors", "last.pt"}
    (tmp_path / "step-2" / "model-00000-of-00001.safetensors").unlink()
    assert holdfast.verify(tmp_path)["verdict"] == "corrupt"


def test_the_manifest_of_a_file_that_is_gone_changes_no_verdict(tmp_path: Path) -> None:
    holdfast.save({"x": torch.ones(1000)}, tmp_path / "step-1", step=1)
    saved(1, tmp_path / "last.pt")
    (tmp_path / "last.pt").unlink()
    assert holdfast.verify(tmp_path)["verdict"] == "sound"
    assert command("verify", tmp_path).status == 0
    saved(2, tmp_path / "other.pt")
    found = holdfast.verify(tmp_path)
    assert (found["verdict"], found["note"]) == ("sound", ".: Manifests stay of files that are gone: last.pt.")
