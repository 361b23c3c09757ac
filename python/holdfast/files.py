"""`save_file`: what ``torch.save`` writes, in the background, and files of it that are removed."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch

from holdfast import (
    _arguments,
    _collector,
    _devices,
    _dtypes,
    _framing,
    _late,
    _native,
    _runtime,
    _torch_pickle,
    directories,
    events,
)
from holdfast._durable import make_directory_of
from holdfast.errors import Error, of_operation
from holdfast.handle import Save


@events.tells_refusals
@_arguments.checked
def save_file(
    state: Any,
    path: str | os.PathLike[str],
    *,
    step: int = 0,
    replace: bool = True,
    wait: bool = False,
    late: Iterable[Any] | bool = (),
    when_full: Literal["wait", "skip", "fail"] = "wait",
    pickle_protocol: int = 2,
    runtime: _runtime.Runtime | None = None,
) -> Save:
    """Saves an object as ``torch.save(state, path)`` does, without waiting for the disk.

    The file is one that ``torch.load`` reads in all its ways. It has its name once it is whole and
    durable; until then an older file of that name stays as it is. A manifest with digests of every
    byte stands beside it, by which `holdfast.verify` proves it.

    Everything is captured as it is at the call, as by `holdfast.save_async`.

    Args:
        state: whatever ``torch.save`` takes.
        path: of the file; directories above it are made, durably. A symbolic link is followed.
        step: recorded in the manifest and in reports.
        replace: whether a file that is there may be replaced.
        wait: return when the file is durable; an error of the save is raised then.
        late, when_full: of `holdfast.save_async`.
        pickle_protocol: of ``torch.save``.
        runtime: options and staging memory; default those of `configure`.

    Returns:
        The handle, as that of `holdfast.save_async`. Of two saves of one file the later one stays:
        an earlier one that ends after it fails with ABORTED.

    Raises:
        Error: INVALID_ARGUMENT (an object that cannot be pickled, no path), ALREADY_EXISTS,
            FAILED_PRECONDITION (no regular file is there), RESOURCE_EXHAUSTED, ...
    """
    called_ns = time.monotonic_ns()
    step = directories.whole_step(step)
    directory, name = _split(path, "save")
    whole = os.path.join(directory, name)
    attempt = _native.new_attempt()
    captured = _Captured(state, name, attempt, _late.Late(late, state), pickle_protocol)
    make_directory_of(whole)
    runtime = runtime or _runtime.default
    door = runtime.door(directory, name, captured.plan.total_bytes, when_full=when_full)
    extra = {
        "kind": "file",
        "called_ns": called_ns,
        "rank": 0,
        "world_size": 1,
        "objects": [],
        "contiguous_copies": captured.copies,
    }

    def start() -> _native.SaveHandle:
        return door.save(
            name, captured.plan, step, replace, attempt, False, bool(captured.watch), single_file=True
        )

    save = Save(
        start, whole, step, extra, captured.keep, door, runtime=runtime, ordered=captured.waiting,
        watch=captured.watch, skips=when_full == "skip",
    )  # fmt: skip
    if wait:
        save.wait()
    return save


def manifests_of(path: str | os.PathLike[str]) -> list[str]:
    """Paths of the manifests beside a file: one, or also those of saves that were interrupted."""
    directory, name = _split(path, "look for manifests of")
    return [os.path.join(directory, each) for each in _native.file_manifests(directory, name)]


def remove_file(path: str | os.PathLike[str]) -> None:
    """Removes a file, durably, and then the manifests beside it. Does nothing where none is.

    Of a symbolic link the link alone is removed, as by `os.remove`.

    A save of it that is under way will put it there again.

    Raises:
        Error: of the system; FAILED_PRECONDITION for a directory.
    """
    _native.remove_file(*_split(path, "remove", follow=False))


def _split(path: str | os.PathLike[str], operation: str, follow: bool = True) -> tuple[str, str]:
    """The directory and the name of a file; `follow`: of the one that a link at the path leads to, as torch.save does."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise Error(
            "INVALID_ARGUMENT",
            f"{operation} a {type(path).__name__}: the path of a file is expected; torch.save writes to "
            "objects",
        )
    text = directories.local_path(path, operation)
    full = directories.absolute_path(text, operation)
    if follow and os.path.islink(full):
        full = os.path.realpath(full)
    directory, name = os.path.split(full)
    if not name or text.endswith(os.sep):
        raise Error("INVALID_ARGUMENT", f"{operation} {text!r}: the name of a file is expected")
    return directory, name


@dataclasses.dataclass
class _Placed:
    """A storage, and where its bytes are read.

    Attributes:
        owner: keeps them.
        device: the runtime's; None: host memory.
    """

    stored: _torch_pickle.Stored
    owner: Any
    address: int
    device: _native.Device | None
    stream: int


class _Captured:
    """What a save captures of an object: the plan of its file.

    Attributes:
        plan: for the runtime.
        keep: what must live until the save has staged.
        waiting: devices whose current stream must wait for the copies.
        watch: of the storages that are copied behind the training.
        copies: names of storages that had to be copied to be saved.
    """

    @_collector.paused()
    def __init__(self, state: Any, name: str, attempt: str, late: _late.Late, protocol: int) -> None:
        with of_operation(f"save {name}"):
            data, stored = _torch_pickle.pickled(state, protocol)
        self.keep: list[Any] = []
        self.waiting: set[torch.device] = set()
        self.watch = _late.Watch(())
        self.copies: list[str] = []
        file = _framing.PlannedFile(name)
        _write(file, data, self._placed(stored, late), attempt, self.keep)
        self.plan = file.plan

    def _placed(self, stored: list[_torch_pickle.Stored], late: _late.Late) -> list[_Placed]:
        """Where the storages' bytes are read; those in host memory, captured in the call, first."""
        host: list[_Placed] = []
        device: list[_Placed] = []
        for each in stored:
            storage = each.storage
            try:
                native = _devices.device_of(storage.device)
            except Error as error:
                if error.code != "UNIMPLEMENTED":
                    raise
                storage, native = storage.cpu(), None  # as torch.save does
                self.copies.append(_name(each))
            place = _Placed(each, storage, storage.data_ptr() if storage.nbytes() else 0, native, 0)
            (host if native is None else device).append(place)
        if device:
            self._capture(device, late)
        self.keep += [place.owner for place in (*host, *device)]
        return host + device

    def _capture(self, places: list[_Placed], late: _late.Late) -> None:
        """Clones device memory that may not be copied late, or has its stream wait."""
        filled = [place for place in places if place.stored.storage.nbytes()]
        owners = [place.stored.tensors for place in filled]
        is_late = [
            after and bool(tensors) for after, tensors in zip(late.of(owners), owners, strict=True)
        ]
        self.watch = _late.Watch(
            (_name(place.stored), tensor)
            for place, after in zip(filled, is_late, strict=True) if after
            for tensor in place.stored.tensors
        )
        early = [place for place, after in zip(filled, is_late, strict=True) if not after]
        storages = [(place.stored.storage.device, place.stored.storage.nbytes()) for place in early]
        self.waiting = _late.too_much_to_clone(storages)
        for place in early:
            storage = place.stored.storage
            if storage.device in self.waiting:
                continue
            # A copy on the same device, ordered into the current stream.
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
            place.owner = whole.set_(storage, 0, (storage.nbytes(),), (1,)).clone()
            place.address = place.owner.data_ptr()
        for place in filled:
            place.stream = _devices.stream_of(place.stored.storage.device)


def _name(stored: _torch_pickle.Stored) -> str:
    return f"data/{stored.key}"


def _write(file: _framing.PlannedFile, data: bytes, places: list[_Placed], attempt: str,
           keep: list[Any]) -> None:  # fmt: skip
    """Plans the archive: small records, the pickle, and the storages."""
    archive = _framing.Archive()
    segments: list[int | None] = []

    def gap(name: str, dtype: str, shape: list[int], address: int, nbytes: int,
            device: _native.Device | None, stream: int) -> None:  # fmt: skip
        file.literal(archive.begin(b"archive/" + name.encode(), nbytes))
        # Without bytes there is no segment, and the checksum is that of nothing, zero.
        segment = file.tensor(name, dtype, shape, address, nbytes, device, stream)
        segments.append(segment if nbytes else None)
        descriptor, slot = archive.end()
        file.literal(descriptor, (slot,) if nbytes else (), segment)

    # torch.load takes the archive's name from its first record. `.format_version` is left out: it
    # promises that the places of all storages follow from their order and torch's own headers.
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    keep.append(buffer)
    gap("data.pkl", "U8", [len(data)], buffer.data_ptr(), len(data), None, 0)
    file.literal(archive.record(b"archive/byteorder", sys.byteorder.encode()))
    for place in places:
        storage, dtype = place.stored.storage, place.stored.dtype
        nbytes, size = storage.nbytes(), dtype.itemsize
        shape = [nbytes // size] if nbytes % size == 0 else [nbytes]
        gap(_name(place.stored), _dtypes.file_name(dtype) if nbytes % size == 0 else "U8", shape,
            place.address, nbytes, place.device, place.stream)  # fmt: skip
    file.literal(archive.record(b"archive/version", b"3\n"))
    # Torch's id of a file has 40 digits; here those of the save, by which a manifest is the file's.
    halves = int(attempt[:16], 16), int(attempt[16:], 16)
    file.literal(archive.record(b"archive/.data/serialization_id", b"%020d%020d" % halves))
    directory, slots = archive.directory()
    file.literal_of(
        directory,
        [(slot, s) for slot, s in zip(slots, segments, strict=True) if s is not None],
    )
    file.flush()
