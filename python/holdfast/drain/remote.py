"""Checkpoints of a second place for a load: found, and streamed from it by ranges that are read in parallel."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import os
import threading
import time
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from holdfast import _durable, _names, _native
from holdfast._dcp_directories import age_of_listed, remove_tree
from holdfast._regular import MANIFEST_BYTES_MAX
from holdfast.drain import slots
from holdfast.drain.contents import contents_of, files_of, manifest_name, parse, proven
from holdfast.drain.copying import Copy
from holdfast.drain.options import Drain
from holdfast.drain.places import File, Info, Place, Seen, check_place, open_place, scheme_of
from holdfast.errors import Error, of_damage, of_system

__all__ = ["Found", "Reader", "SecondPlace", "fetch", "find", "let_go", "open_place"]

logger = logging.getLogger("holdfast")

_AT_ONCE = 16  # range reads
_asides: dict[str, list[_durable.Presence]] = {}  # of this process's loads, by directory


def held(path: str) -> contextlib.AbstractContextManager[None]:
    """Keeps a checkpoint of a directory while it is loaded."""
    return contextlib.nullcontext() if is_url(path) else slots.in_use(path)


def is_url(path: str) -> bool:
    """Whether a path is a URL of a store."""
    return scheme_of(path) not in ("", "file")


class Found(NamedTuple):
    """A complete checkpoint of a store, in the place of its URL: what opens it lists nothing again."""

    place: Place
    info: Info

    def __fspath__(self) -> str:
        return self.place.path(self.info.slot)


class SecondPlace:
    """The second place of a directory, and what its last listing has found: a load asks for nothing twice."""

    def __init__(self, url: str, storage: dict[str, Any], seen: Seen | None) -> None:
        self.place = open_place(url, storage, seen)
        self._found: dict[str, Info] = {}

    def merged(self, local: list[dict[str, Any]], format: str) -> list[dict[str, Any]]:
        """Lists the checkpoints of both places by the time of their saves, the newest last; the later one of a name."""
        found, passed_over = self.place.complete(format)
        for entry in passed_over:
            logger.warning("list %s: passed over %s", self.place.url, entry)
        self._found = {self.place.path(c.slot): c for c in found}
        keys = {(c["name"], c["attempt"]) for c in local}
        there = [c.listed(self.place) for c in found if c.key not in keys]
        every = sorted((*local, *there), key=age_of_listed)
        latest = {c["name"]: c["path"] for c in every}
        return [c for c in every if latest[c["name"]] == c["path"]]

    def found(self, path: str) -> Info | None:
        """The checkpoint of a path that `merged` has returned last; None where it is not of this place."""
        return self._found.get(path)

    def to_load(self, path: str) -> str | Found:
        """A path that `merged` has returned last, as `loading.load` takes it."""
        info = self.found(path)
        return Found(self.place, info) if info and is_url(path) else path


def find(url: str, storage: dict[str, Any] | None = None) -> Found:
    """The complete checkpoint of a URL, and the place that it is in.

    Raises:
        Error: NOT_FOUND; what the store says.
    """
    check_place(url)
    above, _, name = url.rstrip("/").rpartition("/")
    if scheme_of(above):  # else the bucket alone
        place = open_place(above, storage)
        complete = place.complete()[0]
        for text in (urllib.parse.unquote(name), name):
            for info in complete:
                if text in (info.name, info.slot):
                    return Found(place, info)
        if held := open_place(url, storage).complete()[0]:
            raise Error("FAILED_PRECONDITION", f"load {url}: it is no checkpoint and holds some; load one of them, the newest is {held[-1].slot}")
    raise Error("NOT_FOUND", f"open {url}: there is no complete checkpoint")


def fetch(place: Place, info: Info, directory: str, options: Drain) -> str:
    """Copies a checkpoint into a directory, verified, and returns its path. What is there already is not copied again.

    Another save of its name, or a user's files there, stays: the copy is then made below a directory that `let_go`
    removes, and until then no recovery.
    """
    from holdfast.drain.file_system import Directory

    target = Directory(directory)
    complete = target.complete()[0]
    for there in complete:
        if there.key == info.key:
            return target.path(there.slot)
    if any(there.name == info.name for there in complete) or not target.may_take(info, lambda: contents_of(place, info).names()):
        # The name is one that a recovery removes with all in it, for a load that was killed.
        aside = os.path.abspath(os.path.join(directory, _names.retired(_names.hidden(info.name)[1:], info.attempt)))
        _durable.make_directory(aside)
        with of_system(f"fetch into {aside}"):
            _asides.setdefault(aside, []).append(_durable.Presence(aside))
        try:
            return fetch(place, info, aside, options)
        except BaseException:
            _asides[aside].pop().clear()
            raise
    # The limit of the rate is for the time of the training, which waits now.
    try:
        late = Copy(place, target, dataclasses.replace(options, bytes_per_second=None), threading.Event()).run(info).late
    finally:
        target.let_go()
    for why in late:
        logger.warning("fetch %s: %s; the checkpoint comes without this file", place.path(info.slot), why)
    return target.path(info.name)


def let_go(path: str) -> None:
    """Removes what `fetch` has copied beside another save of its name, unless another load uses it."""
    aside = os.path.dirname(path)
    if _names.is_retired_hidden(os.path.basename(aside)):
        if held := _asides.get(aside):
            held.pop().clear()
        if _native.saves_at_work(aside) == "trainer":
            return
        try:
            remove_tree(aside)
        except Error as error:  # the load has done its work
            logger.warning("%s", error)


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    file: int
    begin: int
    end: int


class _Wanted(NamedTuple):
    """Bytes [begin, end) of a file, and where they go."""

    begin: int
    end: int
    address: int
    device: Any


class Reader:
    """An open checkpoint of a store: what `_native.CheckpointReader` is for one in a directory.

    Attributes:
        files: their names.
        step, world_size, attempt: of the checkpoint.
    """

    def __init__(self, place: Place, info: Info, rank: int = 0) -> None:
        self._place, self._info = place, info
        self.step, self.world_size, self.attempt = info.step, info.world_size, info.attempt
        with ThreadPoolExecutor(_AT_ONCE, "holdfast-load") as pool:
            self._of: dict[str, File] = {f.name: f for f in contents_of(place, info, pool).data}
        self.files: list[str] = []
        self._kept: dict[tuple[str, int], bytes] = {}  # chunks of a first reading, until the second
        self._tensors: dict[str, _Tensor] = {}
        self.add(rank)

    def add(self, rank: int) -> None:
        """Adds the tensors of another rank, which count before those of one name."""
        if not 0 <= rank < self.world_size:
            raise Error("INVALID_ARGUMENT", f"open {self._place.path(self._info.slot)}: there is no rank {rank} of {self.world_size}")
        name = manifest_name(self._info, rank)
        where = f"{self._place.path(self._info.slot)}/{name}"
        manifest = parse(self._place.read(self._info.slot, name, MANIFEST_BYTES_MAX), where)
        base = len(self.files)
        with of_damage(f"read {where}"):
            files = files_of(manifest, where)
            if any(self._of[file.name] != file for file in files):
                raise Error("DATA_LOSS", f"read {where}: it has changed meanwhile")
            self.files += [file.name for file in files]
            for t in manifest["tensors"]:
                begin, end, file = t["begin"], t["end"], t["file"]
                if not (0 <= file < len(files) and 0 <= begin <= end <= files[file].bytes):
                    raise Error("DATA_LOSS", f"read {where}: tensor {t['name']} leaves its file")
                self._tensors[t["name"]] = _Tensor(t["name"], t["dtype"], list(t["shape"]), base + file, begin, end)

    def tensors(self) -> list[_Tensor]:
        """(name, dtype, shape, file, begin, end) of each."""
        return list(self._tensors.values())

    def entry_bytes(self) -> dict[str, int]:
        """The length of each tensor by its name."""
        return {t.name: t.end - t.begin for t in self._tensors.values()}

    def load(self, targets: Sequence[tuple[str, int, int, Any, int | None]], verify: bool, buffer_bytes: int, threads: int,
             engine: str, direct_io: bool) -> dict[str, Any]:  # fmt: skip
        """Reads parts of tensors to addresses: (name, address, bytes, device, begin).

        Every range is read in whole chunks, which are compared with their digests before a byte of them is delivered.
        Without `direct_io`, which stands for the page cache here, chunks are kept in memory for a second reading.
        """
        since = time.monotonic()
        by_file: dict[str, list[_Wanted]] = {}
        for name, address, nbytes, device, offset in targets:
            tensor = self._tensors.get(name)
            if tensor is None:
                raise Error("NOT_FOUND", f"load {self._place.path(self._info.slot)}: it has no tensor {name}")
            begin = tensor.begin + (offset or 0)
            if nbytes < 0 or begin + nbytes > tensor.end or (offset is None and nbytes != tensor.end - tensor.begin):
                raise Error("INVALID_ARGUMENT", f"load {name}: {nbytes} bytes from {offset or 0} are not in its {tensor.end - tensor.begin}")
            if nbytes:
                by_file.setdefault(self.files[tensor.file], []).append(_Wanted(begin, begin + nbytes, address, device))
        for name in {t[3].name() for t in targets if t[3] is not None}:
            import torch

            torch.cuda.synchronize(_torch_name(name))  # the last owner's work on the memory has ended
        jobs = [job for name, wanted in by_file.items() for job in _jobs(self._of[name], wanted)]
        at_once = max(1, min(threads or _AT_ONCE, buffer_bytes // _native.CHUNK_BYTES))
        read = 0
        with ThreadPoolExecutor(at_once, "holdfast-load") as pool:
            futures = [pool.submit(self._read, *job, verify, not direct_io) for job in jobs]
            try:
                for future in futures:
                    read += future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return {
            "bytes": sum(t[2] for t in targets), "bytes_read": read, "seconds": time.monotonic() - since,
            "verified": verify, "engine": "none", "engine_reason": f"streamed from {self._place.url}", "direct_io": "no",
        }  # fmt: skip

    def _read(self, file: File, begin: int, end: int, wanted: list[_Wanted], verify: bool, keep: bool) -> int:
        data = self._kept.pop((file.name, begin), None)
        count = 0
        if data is None:
            where = f"{self._place.path(self._info.slot)}/{file.name}"
            with self._place.opened(self._info.slot, file.name) as read:
                data = bytes((proven(read, file, where) if verify else read)(begin, end))
            if len(data) != end - begin:
                raise Error("DATA_LOSS", f"read {where} @ {begin}: {len(data)} of {end - begin} bytes are there")
            count = end - begin
            if keep:
                self._kept[file.name, begin] = data
        source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
        for one in wanted:
            first, last = max(begin, one.begin), min(end, one.end)
            if first < last:
                _deliver(one.address + first - one.begin, source + first - begin, last - first, one.device)
        return count


def _jobs(file: File, wanted: list[_Wanted]) -> list[tuple[File, int, int, list[_Wanted]]]:
    """The chunks of a file that are wanted, each with what is wanted of it."""
    of: dict[int, list[_Wanted]] = {}
    for one in wanted:
        for chunk in range(one.begin // file.span, (one.end - 1) // file.span + 1):
            of.setdefault(chunk, []).append(one)
    return [(file, k * file.span, min(file.bytes, (k + 1) * file.span), of[k]) for k in sorted(of)]


def _deliver(address: int, source: int, nbytes: int, device: Any) -> None:
    if device is None:
        ctypes.memmove(address, source, nbytes)
        return
    import torch

    # The address as PyTorch takes memory of others.
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}
    memory = type("Memory", (), {"__cuda_array_interface__": interface})()
    staged = torch.frombuffer((ctypes.c_char * nbytes).from_address(source), dtype=torch.uint8)
    torch.as_tensor(memory, device=_torch_name(device.name())).copy_(staged)


def _torch_name(name: str) -> str:
    """PyTorch calls the devices of its ROCm build cuda, too."""
    return name.replace("hip", "cuda")
