"""What a verification must tell of altered files: class, tensors and ranges of bytes. And the bounds that it must keep."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from holdfast import _native

CHUNK = _native.CHUNK_BYTES
# Above what the process uses: the buffers, and the stacks of a thread for each processor.
MEMORY_MAX = (256 << 20) + (os.cpu_count() or 1) * (16 << 20)
CPU_SECONDS_MAX = 2.0
CPU_RATE_MIN = 64 << 20  # bytes in a second


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


def _differing(old: bytes, new: bytes, begin: int, end: int) -> tuple[int, int] | None:
    """The first and the last place in [begin, end) that differs; a byte that is no longer there does."""
    one, other = memoryview(old)[begin:end], memoryview(new)[begin:end]
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
