"""Loading a checkpoint: into existing tensors, as new ones on given devices, or one by one."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from holdfast import (
    _arguments,
    _collector,
    _dcp_directories,
    _devices,
    _kinds,
    _lineage,
    _native,
    _plain,
    _ranks,
    _state,
    _unpickle,
)
from holdfast._building import Builder
from holdfast._filling import Filling
from holdfast._merging import merged
from holdfast._pieces import Loading
from holdfast.capture import FILE, OBJECTS, STRUCTURE
from holdfast.directories import absolute_path, local_path, path_text
from holdfast.drain import remote
from holdfast.errors import Error, of_damage

_COMPARED_BYTES = 8 << 20  # at a time

MapLocation = None | str | torch.device | Mapping[str, Any] | Callable[[str], Any]


class _Entry(NamedTuple):
    """One stored run of bytes, and its place: a file and the offset in it."""

    dtype: str
    shape: list[int]
    nbytes: int
    place: tuple[str, int]


class _View:
    """The checkpoint as one rank saved it."""

    def __init__(self, reader: Any, structure: dict[str, Any]) -> None:
        self.reader = reader
        self.structure = structure

    @functools.cached_property
    def entries(self) -> dict[str, _Entry]:
        files = self.reader.files
        return {
            name: _Entry(dtype, shape, end - begin, (files[file], begin))
            for name, dtype, shape, file, begin, end in self.reader.tensors()
        }


@dataclasses.dataclass
class _Options:
    verify: bool = True
    buffer_bytes: int = _native.LOAD_BUFFER_BYTES
    threads: int = 0
    engine: str = "auto"
    direct_io: bool = True


class Checkpoint(Mapping[str, torch.Tensor]):
    """An open checkpoint, as a mapping from names to tensors that are read when they are asked for.

    Attributes:
        path: its directory.
        step: as given to `save_async`.
        rank, world_size: whose view of it this is, and how many saved it.
        report: of the last load: bytes, bytes_read, seconds, verified, engine, ...
    """

    @_arguments.checked
    def __init__(self, path: str | os.PathLike[str], *, rank: int | None = None,
                 map_location: MapLocation = None, verify: bool = True,
                 buffer_bytes: int = _native.LOAD_BUFFER_BYTES, threads: int = 0, engine: str = "auto",
                 direct_io: bool = True, storage: dict[str, Any] | None = None) -> None:
        text = path_text(path, "load")
        self._remote = path if isinstance(path, remote.Found) else remote.find(text, storage) if remote.is_url(text) else None
        self.path = text if self._remote else absolute_path(local_path(text, "load"), "load")
        if storage and not self._remote:
            raise Error("INVALID_ARGUMENT", f"load {text}: storage is for a URL of a store, and the path is a directory's; leave it out")
        self._map = map_location
        self._locations: dict[str, torch.device] = {}
        self._options = _Options(verify, buffer_bytes, threads, engine, direct_io)
        self.report: dict[str, Any] = {}
        own_rank, own_world = _ranks.rank_and_world()
        self.reader = self._open()
        self.step, self.world_size = self.reader.step, self.reader.world_size
        # In a job of another size: what all ranks had alike.
        together = rank is None and self.world_size != own_world
        self.rank = own_rank if rank is None else rank
        if self.rank != 0 and not together:
            with self._or_instead():
                self.reader.add(self.rank)  # what both have is the own one
        self._entry_bytes: dict[str, int] = self.reader.entry_bytes()
        self._ranks: list[_View] = []
        self._alike: set[str] = set()
        with self.of_description():
            own = self._view_of(self.reader, self._entry_bytes)
            self._root: _plain.Node = own.structure["root"]
            self.deep: list[_plain.Node] = own.structure.get("deep", [])
            self._objects: dict[str, list[int]] = own.structure["objects"]
            if together:
                self._compare_ranks(own)

    def _open(self) -> Any:
        if self._remote is not None:
            return remote.Reader(*self._remote)
        with self._or_instead():
            return _native.CheckpointReader.open(self.path, 0)

    @contextlib.contextmanager
    def _or_instead(self) -> Iterator[None]:
        """Errors of what is no plain checkpoint name what loads it."""
        try:
            yield
        except Error as error:
            instead = self._instead()
            if not instead:
                raise
            raise Error("FAILED_PRECONDITION", f"load {self.path}: {instead}") from error

    def _instead(self) -> str:
        """What stands in the place of a plain checkpoint, and what loads it; empty for anything else."""
        dcp = "it is a checkpoint of PyTorch Distributed Checkpoint; "
        if self._remote is not None:
            how = "copy it with holdfast drain and use holdfast.dcp.load, or use a Checkpointer with format='dcp' and drain_to="
            return dcp + how if self._remote.info.format == "dcp" else ""
        if os.path.isfile(self.path):
            return "it is a file; use what wrote it (torch.load, safetensors), or holdfast convert"
        if _dcp_directories.may_be_loaded(self.path):
            return dcp + "use holdfast.dcp.load, or holdfast convert"
        with contextlib.suppress(Error):
            newest = _native.find_newest(self.path)[0]["name"]
            return f"it is no checkpoint and holds some; load one of them, the newest is {newest}"
        return ""

    def of_description(self) -> contextlib.AbstractContextManager[None]:
        """What damage of the description makes Python raise, or an object that gets it, becomes DATA_LOSS.

        With `verify` its digest was compared: then an exception has another cause, and stays.
        """
        if self._options.verify:
            return contextlib.nullcontext()
        files = self.reader.files
        names = {files[file] for name, _, _, file, _, _ in self.reader.tensors() if name == STRUCTURE}
        return of_damage(f"load {os.path.join(self.path, *names)}: no digest was compared, and it cannot be used")

    def _view_of(self, reader: Any, entry_bytes: dict[str, int]) -> _View:
        structure = json.loads(self._bytes(STRUCTURE, reader, entry_bytes))
        if structure.get("holdfast_state") not in _state.VERSIONS_READ:
            raise Error(
                "UNIMPLEMENTED",
                f"load {self.path}: its description has version {structure.get('holdfast_state')}, "
                f"this Holdfast reads {', '.join(map(str, _state.VERSIONS_READ))}; load it with a newer one",
            )
        return _View(reader, structure)

    # ---- In a job of another size than saved it.

    def _compare_ranks(self, own: _View) -> None:
        """Leaves in the description what all ranks had alike."""
        self._ranks.append(own)
        for other in range(1, self.world_size):
            reader = self._open()
            reader.add(other)
            self._ranks.append(self._view_of(reader, reader.entry_bytes()))
        structures = [view.structure for view in self._ranks]
        self._root = merged([structure["root"] for structure in structures])
        if any(structure.get("deep", []) != self.deep for structure in structures):
            self.deep = [{"kind": _kinds.DIFFERS, "shards": False} for _ in self.deep]

    def differs(self, name: str, shards: bool = False) -> Error:
        """The error for an entry that not all ranks had alike; `shards`: of a DTensor."""
        return Error(
            "FAILED_PRECONDITION",
            f"load {name or 'state'} of {self.path}: it differs over the {self.world_size} ranks that "
            "saved it; pass rank= (holdfast convert: --rank) to read one rank's, or "
            + ("save with holdfast.dcp, which loads into any number of ranks" if shards else "leave it out"),
        )

    def require_alike(self, name: str) -> None:
        """Proves that all ranks had the same bytes under a stored name.

        Raises:
            Error: FAILED_PRECONDITION naming it.
        """
        if not self._ranks or name in self._alike:
            return
        entry = self._ranks[0].entries[name]
        for view in self._ranks[1:]:
            other = view.entries.get(name)
            if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
                raise self.differs(name)
            # A replicated file is in the manifests of all ranks, with equal digests.
            if other.place != entry.place and not self._same_bytes(view, name, entry.nbytes):
                raise self.differs(name)
        self._alike.add(name)

    def _same_bytes(self, view: _View, name: str, nbytes: int, begin: int = 0,
                    other_begin: int = 0) -> bool:
        with self._reading() as loading:
            for at in range(0, nbytes, _COMPARED_BYTES):
                count = min(_COMPARED_BYTES, nbytes - at)
                own = _read(loading, self.reader, name, count, begin + at)
                if own != _read(loading, view.reader, name, count, other_begin + at):
                    return False
        return True

    @functools.cached_property
    def _views(self) -> dict[str, _plain.Node]:
        names: dict[str, int] = {}
        with self.of_description():
            found = _state.tensor_nodes(self._root, self.deep)
            return {_state.unique(path or "state", names): node for path, node in found}

    # ---- One by one.

    def __getitem__(self, name: str) -> torch.Tensor:
        node = self._views.get(name)
        if node is None:
            raise KeyError(name)
        with self._reading() as loading:
            with self.of_description():
                tensor = Builder(self, loading).tensor(node)
            loading.run()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def files(self) -> dict[str, bytes]:
        """The further files that `save_async` was given, by name."""
        named = [name for name in self._entry_bytes if name.startswith(FILE)]
        return {name.removeprefix(FILE): self._bytes(name) for name in named}

    # ---- As a whole.

    def state(self, allow: Iterable[Any] = ()) -> Any:
        """The state as it was saved, in new tensors. See `load`."""
        given = _plain.allowed(allow, f"load {self.path}")
        allow = tuple(given)
        with self._reading() as loading:
            try:
                with self.of_description():
                    value = Builder(self, loading, allow).value(self._root, "")
                    loading.run()
                    return value()
            except Error as error:
                if error.code != "PERMISSION_DENIED" or error.errno:
                    raise
                needed = self._needed(loading)
                if len(needed - given) < 2:
                    raise
                everything = sorted(needed | given)
                raise Error(
                    error.code, f"{error.message}; the whole checkpoint needs allow={everything!r}"
                ) from error

    def into(self, target: Any, *, strict: bool = True, allow: Iterable[Any] = (),
             partial: bool = False) -> Any:
        """Reads into the tensors of `target`, and returns it. See `load`."""
        names = tuple(_plain.allowed(allow, f"load {self.path}"))
        with self._reading() as loading, self.of_description():
            return Filling(self, loading, strict, names, partial).run(self._root, target)

    # ---- Reading.

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Loading]:
        o = self._options
        direct_io = o.direct_io or self._remote is not None  # no page cache
        loading = Loading(o.verify, o.buffer_bytes, o.threads, o.engine, direct_io)
        yield loading
        self.report = loading.report

    def _bytes(self, name: str, reader: Any = None, entry_bytes: dict[str, int] | None = None) -> bytes:
        nbytes = (self._entry_bytes if entry_bytes is None else entry_bytes).get(name)
        if nbytes is None:
            raise Error(
                "FAILED_PRECONDITION",
                f"load {self.path}: "
                + (self._instead() or f"it has no {name}: it was not saved by the Python package; its "
                   "tensors are ordinary safetensors files"),
            )
        with self._reading() as loading:
            return _read(loading, reader or self.reader, name, nbytes)

    def entry_bytes(self, name: str) -> int:
        """The length of an entry."""
        return self._entry_bytes[name]

    def location(self, saved: str) -> torch.device:
        """Where a tensor goes that was saved from a device."""
        device = self._locations.get(saved)
        if device is None:
            device = self._locations[saved] = self._mapped(saved)
        return device

    def _mapped(self, saved: str) -> torch.device:
        where = self._map
        try:
            if callable(where):
                where = where(saved)
            elif isinstance(where, Mapping):
                where = where.get(saved)
            device = torch.device(saved if where is None else where)
        except (TypeError, RuntimeError) as error:
            raise Error(
                "INVALID_ARGUMENT",
                f"load {self.path}: map_location gives no device for {saved!r} "
                f"({str(error).partition(chr(10))[0]}); pass a device, "
                "a dict of devices by the saved one's name, or a function from that name to a device",
            ) from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Error(
                "FAILED_PRECONDITION",
                f"load {self.path}: a tensor was saved from {saved}, and there is no CUDA here; pass "
                "map_location='cpu'",
            )
        return device

    def _pickle(self, loading: Loading, name: str) -> bytes:
        begin, length = self._objects[name]
        for view in self._ranks[1:]:
            other, other_length = view.structure["objects"].get(name, (0, -1))
            if other_length != length or not self._same_bytes(view, OBJECTS, length, begin, other):
                raise self.differs(name)
        return _read(loading, self.reader, OBJECTS, length, begin)

    def object(self, loading: Loading, name: str, allow: tuple[Any, ...]) -> Any:
        return _unpickle.loads(self._pickle(loading, name), name, allow, lambda saved: str(self.location(saved)))

    def _needed(self, loading: Loading) -> set[str]:
        """All names that a load of the whole state needs `allow` for."""
        with self.of_description():
            needed = _kinds.needed_classes(_state.nodes([self._root, self.deep]))
            for name in self._objects:
                needed |= _unpickle.unlisted(self._pickle(loading, name))
        return needed


def _read(loading: Loading, reader: Any, name: str, nbytes: int, begin: int | None = None) -> bytes:
    buffer = _devices.host_bytes(nbytes)
    loading.read(reader, [(name, buffer.data_ptr(), nbytes, None, begin)])
    return ctypes.string_at(buffer.data_ptr(), nbytes)


def open(path: str | os.PathLike[str], **options: Any) -> Checkpoint:
    """Opens a checkpoint to read single tensors: ``holdfast.open(path)["model.weight"]``.

    Where several paths read the same, the second is ``"model.weight~2"``, and so on. Tensors come
    without their classes.

    Args:
        path: the checkpoint's directory.
        **options: as of `load`, without `into`, `strict`, `partial` and `allow`; also ``engine`` and
            ``direct_io``.
    """
    return Checkpoint(path, **options)


@_arguments.checked
def load(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    step: int | None = None,
    map_location: MapLocation = None,
    strict: bool = True,
    partial: bool = False,
    allow: Iterable[Any] = (),
    rank: int | None = None,
    verify: bool = True,
    buffer_bytes: int = _native.LOAD_BUFFER_BYTES,
    threads: int = 0,
    storage: dict[str, Any] | None = None,
) -> Any:
    """Loads a checkpoint.

    Every byte is compared with the digests of its seal on the way. Memory beside the tensors
    themselves is bounded by `buffer_bytes`, and nothing is kept afterwards. The next save of this
    process into the same directory names the checkpoint as its parent (docs/cli.md), unless a later
    one was loaded or saved, too.

    Args:
        path: the checkpoint's directory, or a URL as ``s3://bucket/run/step-100`` that a drain has filled:
            it is streamed by range reads.
        into: a state of the same structure, whose tensors are read into in place: modules,
            optimizers, dicts of them, state dicts. An optimizer before its first step gets new
            tensors on its parameters' device. Default: new tensors.
        map_location: where new tensors go: a device, a dict of devices by the saved one's name, or a
            function from that name to a device. Default: where they were saved from. Tensors in
            objects go by it, too, unless they were saved from host memory.
        strict: complain about entries that only one side has.
        partial: whether a load that fails may leave `into` partly filled. By default all bytes are
            compared once before, and a damaged checkpoint, or a ``load_state_dict`` that refuses its
            state, leaves the tensors as they are. True reads everything once.
        allow: classes (or "module:name") that objects, dataclasses and named tuples may be made of.
        rank: whose view to read; default this process's. In a job of another size than saved the
            checkpoint: what all ranks had alike; an entry that differs over the ranks raises.
        verify: compare digests.
        buffer_bytes, threads: of the reading.
        storage: with a URL, options of the store as of `holdfast.Drain`.

    Returns:
        `into`, or the state.

    Raises:
        Error: NOT_FOUND (none, or one of another step), FAILED_PRECONDITION (incomplete, differs over the ranks), DATA_LOSS (with
            tensor, file and range), INVALID_ARGUMENT (structure, shape, dtype), PERMISSION_DENIED
            (an object needs a class that is not allowed).
    """
    with _collector.paused():
        checkpoint = Checkpoint(
            path, rank=rank, map_location=map_location, verify=verify, buffer_bytes=buffer_bytes,
            threads=threads, storage=storage,
        )
        name = os.path.basename(checkpoint.path)
        _dcp_directories.check_step(checkpoint.path, name, checkpoint.reader.attempt, checkpoint.step, step)
        if into is None:
            loaded = checkpoint.state(allow)
        else:
            loaded = checkpoint.into(into, strict=strict, allow=allow, partial=partial)
        _lineage.loaded(checkpoint.path, checkpoint.reader.attempt, checkpoint.step)
        return loaded
