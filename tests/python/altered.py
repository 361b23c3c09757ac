"""Checkpoints of every format whose files are altered: what verifying must tell of it, in which bounds, and how loading ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dcp_ranks
import safetensors.torch
import torch
from draining import swept
from test_ranks import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
import holdfast.dcp
from holdfast import _native
from holdfast._programs import program
from holdfast.drain.places import open_place
from holdfast.integrity import readers

CHUNK = _native.CHUNK_BYTES
# Above what the process uses: the buffers, and the stacks of a thread for each processor.
MEMORY_MAX = (256 << 20) + (os.cpu_count() or 1) * (16 << 20)
CPU_SECONDS_MAX = 2.0
CPU_RATE_MIN = 64 << 20  # bytes in a second
PAGE = 4096
VERDICTS = ("sound", "corrupt", "incomplete", "unreadable")
_PUNCH_HOLE = 3  # and keep the size


class Tensor(NamedTuple):
    """What a manifest says of a tensor in a file."""

    name: str
    begin: int
    end: int


def digested(directory: Path) -> dict[str, list[Tensor]]:
    """The files that manifests in a directory have digests of, each with its tensors."""
    found: dict[str, list[Tensor]] = {}
    for path in directory.iterdir():
        if not path.name.endswith(".manifest.json") and ".holdfast-" not in path.name:
            continue
        manifest = json.loads(path.read_bytes())
        for number, file in enumerate(manifest["files"]):
            tensors = [t for t in manifest["tensors"] if t["file"] == number]
            found[file["name"]] = [Tensor(t["name"], t["begin"], t["end"]) for t in tensors]
    return found


@contextlib.contextmanager
def bounded(directory: Path) -> Iterator[None]:
    """Limits the memory to ask for, and the processors' time: a little and, for the bytes of the files, in proportion."""
    nbytes = sum(file.lstat().st_size for file in directory.iterdir())
    old = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_MAX + 4 * nbytes, old[1]))
    begin = time.process_time()
    try:
        yield
    finally:
        seconds = time.process_time() - begin
        resource.setrlimit(resource.RLIMIT_AS, old)
    assert seconds < CPU_SECONDS_MAX + nbytes / CPU_RATE_MIN, f"{seconds:.1f} s of the processors for {nbytes} bytes"


def verified(verify: Callable[[Path], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """The report of a directory's verification, within its bounds."""
    with bounded(directory):
        return verify(directory)


def punch(fd: int, at: int, nbytes: int) -> None:
    """Frees the space of a part of a file, which then reads as zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH_HOLE, ctypes.c_long(at), ctypes.c_long(nbytes)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def _differing(old: bytes, new: bytes, begin: int, end: int) -> tuple[int, int] | None:
    """The first and the last place in [begin, end) that differs; a byte that is no longer there does."""
    one, other = old[begin:end], new[begin:end]
    if one == other:
        return None

    def same(first: int, last: int) -> bool:
        return one[first:last] == other[first:last]

    low, high = 0, end - begin  # [0, low) is the same, [0, high) is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if same(low, middle) else (low, middle)
    first, low, high = low, 0, end - begin  # [high, end) is the same, [low, end) is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if same(middle, high) else (middle, high)
    return begin + first, begin + low


def untold(report: Mapping[str, Any], name: str, old: bytes, new: bytes, tensors: list[Tensor]) -> list[str]:
    """What a report leaves out, or says wrongly, of a file with digests that has other bytes.

    Each tensor is to be named, in each chunk of the file where it has changed, with a range that contains what has changed;
    and no other. Bytes of no tensor are to be in a range where no tensor of their chunk has changed.
    """
    if old == new:
        return []
    wrong = [] if report["verdict"] == "corrupt" else [f"{name} has changed, and the verdict is {report['verdict']}"]
    faults = [fault for fault in report["faults"] if fault["file"] == name]
    if report["faults_total"] != len(report["faults"]) or any(fault["begin"] >= fault["end"] for fault in faults):
        wrong.append(f"{name}: not all faults have a range")
    reasons = {fault["reason"] for fault in faults} - {"digest", "missing", "size"}
    wrong += [f"{name} has the fault {reason!r}" for reason in reasons]
    if (len(old) != len(new)) != any(fault["reason"] == "size" for fault in faults):
        wrong.append(f"{name} has {len(new)} bytes instead of {len(old)}: the report errs about its size")
    parts = [fault for fault in faults if fault["reason"] != "size"]

    def told(tensor: str, place: tuple[int, int]) -> bool:
        return any(f["tensor"] == tensor and f["begin"] <= place[0] and place[1] < f["end"] for f in parts)

    for begin in range(0, len(old), CHUNK):
        end = min(begin + CHUNK, len(old))
        changed = False
        for tensor in tensors:
            low, high = max(begin, tensor.begin), min(end, tensor.end)
            if low >= high:
                continue
            if len(new) < end:  # the rest of a chunk that is cut can be compared with nothing
                place = (max(low, len(new)), high - 1) if len(new) < high else None
            else:
                place = _differing(old, new, low, high)
            changed |= place is not None
            if place is not None and not told(tensor.name, place):
                wrong.append(f"{name}: not told that {tensor.name} has changed in {place}")
            if place is None and any(f["tensor"] == tensor.name and f["begin"] < high and low < f["end"] for f in parts):
                wrong.append(f"{name}: {tensor.name} has not changed in {low, high}")
        place = _differing(old, new, begin, end)
        if place is not None and not changed and end <= len(new) and not told("", place):
            wrong.append(f"{name}: not told that something has changed in {place}")
    for fault in parts:
        if fault["reason"] == "digest" and fault["begin"] // CHUNK != (fault["end"] - 1) // CHUNK:
            wrong.append(f"{name}: a wrong digest of more than a chunk")
    return wrong


State = dict[str, torch.Tensor]


def save_rank(rank: int, path: str, state: State) -> None:
    holdfast.save({**state, "own": torch.full((100,), rank)}, path)


class Model(torch.nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        for name, value in state.items():
            self.register_buffer(name, value)


def make_plain(path: Path, state: State) -> None:
    holdfast.save(state, path)


def make_ranks(path: Path, state: State) -> None:
    on_ranks(2, save_rank, str(path), state)


def make_hf(path: Path, state: State) -> None:
    holdfast.save(Model(state), path, layout="hf")


def make_dcp(path: Path, state: State) -> None:
    holdfast.dcp.save(state, checkpoint_id=path, no_dist=True)


def save_dcp_rank(rank: int, path: str, state: State) -> None:
    """What all hold is of the first rank; each has a tensor of its own."""
    holdfast.dcp.save({**state, f"own-{rank}": torch.full((PAGE,), rank + state["step"])}, checkpoint_id=path)


def make_dcp_ranks(path: Path, state: State) -> None:
    dcp_ranks.run_ranks(2, path.parent, save_dcp_rank, str(path), state)


def make_stock(path: Path, state: State) -> None:
    torch.distributed.checkpoint.save(state, storage_writer=torch.distributed.checkpoint.FileSystemWriter(path), no_dist=True)


def make_adopted_stock(path: Path, state: State) -> None:
    make_stock(path, state)
    adopt(path)


def make_drained(path: Path, state: State) -> None:
    run = path.parent.parent / f"run-{path.parent.name}"
    holdfast.save(state, run / path.name)
    assert [event["event"] for event in swept(open_place(str(run)), open_place(str(path.parent)))] == ["arrived"]


def make_file(path: Path, state: State) -> None:
    path.mkdir()
    holdfast.save_file(state, path / "state.pt", wait=True)


def adopt(path: Path) -> None:
    assert os.spawnl(os.P_WAIT, program("verify-checkpoint"), "verify-checkpoint", "-q", "--adopt", str(path)) == 0


def make_adopted(path: Path, state: State) -> None:
    path.mkdir()
    safetensors.torch.save_file(state, path / "state.safetensors")
    adopt(path)


def make_torch(path: Path, state: State) -> None:
    path.mkdir()
    torch.save(state, path / "state.pt")


def make_adopted_zip(path: Path, state: State) -> None:
    make_torch(path, state)
    adopt(path)


def load_ranks(path: Path, _: State) -> State:
    return {f"{rank}.{name}": tensor for rank in range(2) for name, tensor in holdfast.load(path, rank=rank).items()}


def load_plain(path: Path, _: State) -> State:
    return holdfast.load(path)


def load_torch(path: Path, _: State) -> State:
    return torch.load(path / "state.pt")


def load_dcp_ranks(path: Path, like: State) -> State:
    return load_dcp(path, {**like, **{f"own-{rank}": torch.empty(PAGE, dtype=torch.int64) for rank in range(2)}})


def load_dcp(path: Path, like: State) -> State:
    target = {name: torch.zeros_like(value) for name, value in like.items()}
    holdfast.dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


class Format(NamedTuple):
    """How a format is written, verified and read.

    Attributes:
        others: another program wrote the files, or reads them. Its errors are as good as ours.
        proven: a whole file of another save counts as damage. Where the file alone says whose it is, it does not.
    """

    make: Callable[[Path, State], None]
    load: Callable[[Path, State], State]
    verify: Callable[[Path], dict[str, Any]] = holdfast.verify
    others: bool = False
    proven: bool = True


FORMATS = {
    "plain": Format(make_plain, load_plain),
    "ranks": Format(make_ranks, load_ranks),
    "hf": Format(make_hf, load_plain),
    "dcp": Format(make_dcp, load_dcp, holdfast.dcp.verify),
    "dcp of ranks": Format(make_dcp_ranks, load_dcp_ranks, holdfast.dcp.verify),
    "stock dcp": Format(make_stock, load_dcp, holdfast.dcp.verify, others=True, proven=False),
    "adopted dcp": Format(make_adopted_stock, load_dcp, others=True),
    "drained": Format(make_drained, load_plain),
    "save_file": Format(make_file, load_torch, lambda path: holdfast.verify(path / "state.pt"), others=True, proven=False),
    "adopted": Format(make_adopted, lambda path, _: safetensors.torch.load_file(path / "state.safetensors"), others=True),
    "adopted zip": Format(make_adopted_zip, load_torch, others=True),
    "torch.save": Format(make_torch, load_torch, lambda path: holdfast.verify(path / "state.pt"), others=True, proven=False),
}


def _same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Checked:
    """A checkpoint, an older one of the same shape, and what loading the first gives.

    Attributes:
        files: their bytes.
        digested: those that digests prove, with their tensors.
        new: what has been changed, and not yet restored.
        report: of the last verification.
        said: the last loading's error.
    """

    def __init__(self, name: str, directory: Path, state_of: Callable[[int], State]) -> None:
        self.format, self.like = FORMATS[name], state_of(0)
        self.path, self.older = directory / "new" / "s", directory / "old" / "s"
        for path, seed in ((self.older, 1), (self.path, 2)):
            path.parent.mkdir()
            self.format.make(path, state_of(seed))
        holdfast.flush(60)
        self.expected, self.before = (self.format.load(path, self.like) for path in (self.path, self.older))
        assert self.outcome() == ("sound", "")
        self.files = {file.name: file.read_bytes() for file in sorted(self.path.iterdir())}
        self.digested = digested(self.path)
        self.new: dict[str, bytes | None] = {}

    def outcome(self) -> tuple[str, str]:
        """What verifying says, and how loading ends: "" where everything is equal."""
        self.said = ""
        try:
            self.report = verified(self.format.verify, self.path)
            verdict = self.report["verdict"]
        except holdfast.Error as error:
            # Of `.metadata` that tells nothing; the other way to verify has a report of it.
            verdict, self.report = error.code, verified(holdfast.verify, self.path)
        try:
            with bounded(self.path):
                found = self.format.load(self.path, self.like)
        except (Exception, CheckpointException) as error:
            # DCP's loading raises an exception of its own, with the text of ours.
            self.said = str(error)
            own = readers.is_own(error)
            return verdict, "refused" if own or self.format.others else f"raised {error!r}"
        if not self.format.proven and _same(found, self.before):
            return verdict, ""  # another whole file
        return verdict, "" if _same(found, self.expected) else "other bytes"

    def escapes(self, what: str) -> list[str]:
        """What is wrong about the outcome after a change."""
        verdict, loaded = self.outcome()
        if loaded == "refused" and self.format.others:
            # Another program's reader, which says so.
            return [f"{what}: {each}" for each in self.untold(verdict)]
        silent = loaded == "other bytes" and not (self.format.others and verdict != "sound")
        wrong = silent or loaded.startswith("raised") or (verdict == "sound" and loaded != "")
        escaped = [f"{what}: verify says {verdict}, loading: {loaded or 'equal'}"] if wrong else []
        return escaped + [f"{what}: {each}" for each in self.untold(verdict)]

    def untold(self, verdict: str) -> list[str]:
        """What the report leaves out of files that digests prove."""
        new = {name: data for name, data in self.new.items() if data != self.files.get(name)}
        if not self.digested or not new or not new.keys() <= self.files.keys():
            return []
        if self.report["verdict"] == "sound":
            return [] if self.report["note"] else ["sound, without a note of what is not proven"]
        if verdict not in VERDICTS and ".metadata" not in new:
            return [f"{verdict} is raised"]
        if self.report["path"] != str(self.path) and None in new.values():
            return []  # the report is of this one file
        named = {fault["file"] for fault in self.report["faults"]}
        if new.keys() <= self.digested.keys():
            wrong = [f"no fault names {name}" for name in new if name not in named]
            for name, data in new.items():
                if data is not None:
                    wrong += untold(self.report, name, self.files[name], data, self.digested[name])
            return wrong
        # Where no record tells of which save a manifest is, another's differs from the files.
        proving = new.keys() | (self.digested.keys() if self.format.others else set())
        if len(new) > 1 or named & proving and (self.report["verdict"] == "corrupt" or None in new.values()):
            return []
        return [f"{self.report['verdict']}, the faults name {named}"]

    @contextlib.contextmanager
    def patched(self, name: str, patches: Mapping[int, bytes], hole: bool = False) -> Iterator[None]:
        """Other bytes at places of a file, which stays the same file; or no bytes there, which then read as zeros."""
        file, old = self.path / name, self.files[name]
        new = bytearray(old)
        for at, data in patches.items():
            new[at : at + len(data)] = data
        self.new[name] = bytes(new)
        with file.open("r+b", buffering=0) as opened:
            for at, data in patches.items():
                if hole:
                    punch(opened.fileno(), at, len(data))
                else:
                    os.pwrite(opened.fileno(), data, at)
            try:
                yield
            finally:
                for at, data in patches.items():
                    os.pwrite(opened.fileno(), old[at : at + len(data)], at)
                del self.new[name]

    @contextlib.contextmanager
    def changed(self, name: str, data: bytes | None) -> Iterator[Path]:
        """One file with other bytes, or without the file."""
        file = self.path / name
        file.unlink(missing_ok=True)
        if data is not None:
            file.write_bytes(data)
        self.new[name] = data
        try:
            yield file
        finally:
            del self.new[name]
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            file.unlink(missing_ok=True)
            if name in self.files:
                file.write_bytes(self.files[name])
