"""The storage reader: DCP checkpoints, ours with their digests and anybody's without."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import io
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from holdfast import _arguments, _dtypes, _lineage, _native, _plain, _regular, _runtime, directories
from holdfast._names import DCP_MANIFEST, METADATA, dcp_metadata
from holdfast._pieces import Loading, Source
from holdfast.dcp import metadata as _metadata
from holdfast.dcp import objects, plans
from holdfast.dcp.placement import new_attempt, rank_of
from holdfast.dcp.records import NotPlain, find_tensor
from holdfast.dcp.targets import load_into
from holdfast.dcp.writer import StorageWriter, local_path
from holdfast.errors import Error, counted, of_damage, of_system

logger = logging.getLogger("holdfast.dcp")


class Proved:
    """A rank's manifest: which tensor begins where in its files."""

    def __init__(self, path: Path, manifest: str, digest: Any = None) -> None:
        self.reader = _native.CheckpointReader.open_manifest(str(path), manifest, digest)
        self.files = list(self.reader.files)
        self._tensors: dict[str, list[tuple[int, int, str, str, tuple[int, ...]]]] = {}
        for name, dtype, shape, file, begin, end in self.reader.tensors():
            entry = (begin, end, name, dtype, tuple(shape))
            self._tensors.setdefault(self.files[file], []).append(entry)
        for entries in self._tensors.values():
            entries.sort()

    def find(
        self, file: str, begin: int, length: int
    ) -> tuple[int, int, str, str, tuple[int, ...]]:
        """The one tensor inside of an item."""
        entries = self._tensors.get(file, [])
        at = bisect.bisect_left(entries, (begin,))
        while length and at < len(entries) and entries[at][1] == begin:
            at += 1  # an item without bytes, at the same place
        if at == len(entries) or entries[at][1] > begin + length:
            raise Error(
                "DATA_LOSS",
                f"load {file}: the manifest knows no tensor at {begin}, unlike the metadata",
            )
        return entries[at]


@dataclasses.dataclass
class _Compared:
    """A plan whose bytes were compared before the reading.

    Attributes:
        items: of the plan.
        proved: by data file, the manifest that names it.
        direct_io: whether the reading passes by the page cache, which else has the bytes.
    """

    items: list[Any]
    proved: dict[str, Proved]
    direct_io: bool


class _Unread(Metadata):
    """In the place of metadata that could not be read. PyTorch before 2.13 drops that error, and raises one without a reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__(state_dict_metadata={})
        self.error = error


class StorageReader(_StorageReader):
    """Reads DCP checkpoints: ``dcp.load(state, storage_reader=StorageReader(path))``.

    Tensors are read straight into the tensors that they belong in; what is sharded or laid out in
    another way goes through a buffer of `buffer_bytes`. What `StorageWriter` wrote is compared with
    its digests on the way; what other writers wrote cannot be, and `report` says so.

    ``.metadata`` and objects are read through an allow-list. ``.metadata`` and manifests are compared
    with the save's commit record, where there is one.

    Attributes:
        path: the checkpoint's directory.
        report: of the last load by this rank: ``bytes``, ``bytes_read``, ``seconds``, ``verified``.
    """

    @_arguments.checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        allow: Iterable[Any] = (),
        trust: bool = False,
        partial: bool = False,
        buffer_bytes: int = _native.LOAD_BUFFER_BYTES,
        threads: int = 0,
    ) -> None:
        """A reader for one checkpoint, or, with `reset`, for one after the other.

        Args:
            path: the checkpoint's directory.
            verify: compare digests, where there are any.
            allow: classes and functions (or "module:name") that objects and metadata may use beside
                what is harmless.
            trust: let objects use anything, as the framework's own reader does.
            partial: whether a load that finds damage may leave the state partly filled. By default each
                rank compares all bytes that it reads before any rank changes its state. True reads
                them once.
            buffer_bytes: memory beside the tensors.
            threads: of the reading; default one per CPU, at most four.

        Raises:
            Error: INVALID_ARGUMENT for a URL.
        """
        super().__init__()
        self.path = local_path(path)
        self.report: dict[str, Any] = {}
        self._verify = verify
        self._allow = _plain.allowed(allow, f"load {self.path}")
        self._trust = trust
        self._partial = partial
        self._buffer_bytes = buffer_bytes
        self._threads = threads
        self._fresh()

    def _fresh(self) -> None:
        self.load_id = new_attempt()
        self._storage_data: dict[Any, Any] = {}
        self._partial_names: frozenset[str] = frozenset()
        self._save_id = ""
        self._error: Exception | None = None  # of reading the metadata of all ranks
        self._manifest_digests: list[Any] | None = None
        self._compared: _Compared | None = None

    # ---- What the framework calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = local_path(checkpoint_id)
        self._fresh()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        path = self.path / (METADATA if rank is None else dcp_metadata(rank))
        try:
            return self._read_metadata(path)
        except Exception as error:
            if rank is None:
                self._error = error
            elif self._error is not None:  # the framework's second try
                return _Unread(error if path.exists() else self._error)
            raise

    def _read_metadata(self, path: Path) -> Metadata:
        data = _metadata.read_bytes(path)
        metadata = _metadata.loads(data, str(path), self._allow)
        if self._verify:
            self._manifest_digests = _metadata.manifest_digests(path, data, metadata)
        assert metadata.storage_meta is not None  # the reading sees to it
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(metadata, _Unread):
            raise metadata.error
        if metadata.storage_data is None:
            raise Error(
                "DATA_LOSS", f"load {self.path}: its metadata does not say where things are"
            )
        self._storage_data = metadata.storage_data
        self._partial_names = frozenset(_metadata.partial_names(metadata))
        self._save_id = _metadata.save_id_of(metadata)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        # An error in this step ends the load on all ranks before any of them reads into its state.
        with self._of_damage():
            self._compare(plan)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with self._of_damage():
            self._read(plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _of_damage(self) -> contextlib.AbstractContextManager[None]:
        # What is compared with digests is as it was written: then an exception has another cause.
        if self._verify and self._manifest_digests is not None:
            return contextlib.nullcontext()
        return of_damage(f"load {self.path}: no digest was compared, and it cannot be read")

    def _compare(self, plan: LoadPlan) -> _Compared:
        """Compares all bytes of a plan that have digests, unless the load may be partial."""
        proved = self._manifests(plan)
        loading = Loading(self._verify, self._buffer_bytes, self._threads)
        if self._verify and not self._partial:
            for item in plan.items:
                info = self._storage_data[item.storage_index]
                if info.relative_path in proved and not getattr(info, "transform_descriptors", None):
                    source, is_box = _source(item, info, proved[info.relative_path])
                    loading.add_compared(_box(item, source) if is_box else source)
            loading.check(_runtime.fits_in_page_cache)
        self._compared = _Compared([item.storage_index for item in plan.items], proved, loading.direct_io)
        return self._compared

    def _check_filled(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Refuses a target that the stored chunks do not fill: PyTorch leaves the rest of it as it was."""
        state = getattr(planner, "state_dict", None)
        found: Counter[str] = Counter()
        for item in plan.items if self._partial_names else ():
            found[item.dest_index.fqn] += math.prod(item.lengths)
        for name in self._partial_names:
            if isinstance(state, Mapping) and name in state and found[name] < _local_elements(state[name]):
                raise Error(
                    "INVALID_ARGUMENT",
                    f"load {name}: {self.path} has a part of it alone, of the rank that saved it, and the target wants more; "
                    "load it as that rank has it",
                )

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        self._check_filled(plan, planner)
        compared, self._compared = self._compared, None
        if compared is None or compared.items != [item.storage_index for item in plan.items]:
            compared, self._compared = self._compare(plan), None
        proved = compared.proved
        loading = Loading(self._verify, self._buffer_bytes, self._threads, direct_io=compared.direct_io)
        later: list[Callable[[], None]] = []  # what changes the state, once all is read
        foreign: list[ReadItem] = []
        unproved: list[ReadItem] = []
        done: list[tuple[ReadItem, torch.Tensor]] = []
        for item in plan.items:
            info = self._storage_data[item.storage_index]
            if getattr(info, "transform_descriptors", None):
                foreign.append(item)
            elif info.relative_path in proved:
                self._read_proved(item, info, proved[info.relative_path], planner, loading, done, later)
            else:
                unproved.append(item)
        if unproved:
            self._read_unproved(unproved, planner, loading, done, later)
        loading.run()
        for put in later:
            put()
        for item, target in done:
            planner.commit_tensor(item, target)
        if foreign:
            self._read_foreign(foreign, planner)
        is_ours = bool(proved) or self._manifest_digests is not None  # also where nothing is to be read
        self.report = {
            **{key: loading.report[key] for key in ("bytes", "bytes_read", "seconds")},
            "verified": self._verify and is_ours and not unproved and not foreign,
        }
        steps = (p.reader.step for p in proved.values())
        _lineage.loaded(str(self.path), self._save_id, next(steps, 0))
        if unproved:
            logger.info(
                "load %s: %s without digests to compare with: not written by "
                "holdfast, or the manifests are gone",
                self.path, counted(len(unproved), "item"),
            )  # fmt: skip

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return StorageWriter.validate_checkpoint_id(checkpoint_id)

    # ---- Files with a manifest.

    def _manifests(self, plan: LoadPlan) -> dict[str, Proved]:
        """By data file, the manifest that names it, of the save that the metadata speaks of."""
        found: dict[str, Proved] = {}
        if not self._save_id:
            return found
        files = {self._storage_data[item.storage_index].relative_path for item in plan.items}
        ranks = {rank_of(name) for name in files}
        with of_system(f"load {self.path}: list it"):
            names = sorted(os.listdir(self.path))
        matches = [m for m in map(DCP_MANIFEST.fullmatch, names) if m]
        if self._verify and matches and all(m["attempt"] != self._save_id for m in matches):
            raise Error(
                "DATA_LOSS",
                f"load {self.path}: {METADATA} is of save {self._save_id}, the manifests are of others: files of several "
                "checkpoints are mixed",
            )
        for match in matches:
            if match["attempt"] != self._save_id:
                continue
            name = match[0]
            rank, world_size = int(match["rank"]), int(match["world_size"])
            digests = self._manifest_digests or [None] * world_size
            # Where each rank has metadata of its own, its manifest is that of the only one.
            if (rank in ranks or world_size == 1) and len(digests) == world_size:
                proved = Proved(self.path, name, digests[rank])
                found.update(dict.fromkeys(proved.files, proved))
        missing = sorted(files - found.keys())
        if self._verify and missing and any(m["attempt"] == self._save_id for m in matches):
            raise Error(
                "DATA_LOSS",
                f"load {self.path}: the manifest of {missing[0]} is missing, while others of the save are there; verify=False "
                "loads without proof",
            )
        return found

    def _read_proved(
        self,
        item: ReadItem,
        info: Any,
        proved: Proved,
        planner: LoadPlanner,
        loading: Loading,
        done: list[tuple[ReadItem, torch.Tensor]],
        later: list[Callable[[], None]],
    ) -> None:
        source, is_box = _source(item, info, proved)
        if is_box:
            done.append((item, _ask(item, source, planner, loading)))
            return
        data = self._bytes(loading, proved.reader, source.name, info.length)
        if item.type == LoadItemType.BYTE_IO:
            later.append(self._object(item, data, planner))
        else:
            _serialized(item, data, planner, done, later)

    # ---- Files without.

    def _read_unproved(self, items: list[ReadItem], planner: LoadPlanner, loading: Loading,
                       done: list[tuple[ReadItem, torch.Tensor]],
                       later: list[Callable[[], None]]) -> None:  # fmt: skip
        """Looks into the files. Of a tensor whose bytes are not found there ``torch.load`` reads the whole item."""
        found: list[tuple[ReadItem, str, int, int, Any]] = []
        with contextlib.ExitStack() as stack:
            fds: dict[str, int] = {}
            for item in items:
                info = self._storage_data[item.storage_index]
                if info.relative_path not in fds:
                    fd = self._open(info.relative_path)
                    stack.callback(os.close, fd)
                    fds[info.relative_path] = fd
                if item.type == LoadItemType.BYTE_IO:
                    begin, end, record = info.offset, info.offset + info.length, None
                else:
                    read = functools.partial(_read_at, fds[info.relative_path], info)
                    try:
                        record = find_tensor(read, info.length)
                        begin, end = info.offset + record.begin, info.offset + record.end
                    except NotPlain:
                        begin, end, record = info.offset, info.offset + info.length, None
                found.append((item, info.relative_path, begin, end, record))
        # The same bytes may be asked for several times, in parts.
        names: dict[tuple[str, int, int], str] = {}
        files = sorted({file for _, file, _, _, _ in found})
        places = []
        for _, file, begin, end, _ in found:
            if (file, begin, end) not in names and end > begin:
                names[file, begin, end] = f"{file}@{begin}"
                places.append(
                    (f"{file}@{begin}", "U8", [end - begin], files.index(file), begin, end)
                )
        if not places:
            reader = None
        else:
            reader = _native.CheckpointReader.open_places(str(self.path), files, places)
        for item, file, begin, end, record in found:
            name = names.get((file, begin, end), "")
            if record is None:
                data = self._bytes(loading, reader, name, end - begin)
                if item.type == LoadItemType.BYTE_IO:
                    later.append(self._object(item, data, planner))
                else:
                    _serialized(item, data, planner, done, later)
            else:
                source = Source(
                    reader, name, record.storage_offset * record.dtype.itemsize, record.dtype,
                    record.shape, record.stride,
                )  # fmt: skip
                done.append((item, _ask(item, source, planner, loading)))

    def _open(self, name: str) -> int:
        with of_system(f"load {self.path / name}"):
            return _regular.open_to_read(self.path / name, "load")

    def _read_foreign(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """What the framework alone can read: transformed streams."""
        reader = FileSystemReader(self.path)
        reader.storage_data = self._storage_data
        wrapped = planner if self._trust else _CheckedPlanner(planner, self._allow)
        reader.read_data(LoadPlan(items), wrapped)  # type: ignore[arg-type]

    # ---- Objects.

    def _bytes(self, loading: Loading, reader: Any, name: str, nbytes: int) -> io.BytesIO:
        data = bytearray(nbytes)
        if nbytes:
            view = torch.frombuffer(data, dtype=torch.uint8)
            loading.read(reader, [(name, view.data_ptr(), nbytes, None, None)])
        return io.BytesIO(data)

    def _object(self, item: ReadItem, data: io.BytesIO, planner: LoadPlanner) -> Callable[[], None]:
        """What gives the planner an object, which is looked at now."""
        if not self._trust:
            data = objects.resaved(data, item.storage_index.fqn, self._allow)
        return functools.partial(planner.load_bytes, item, data)


class _CheckedPlanner:
    """A planner that gets objects serialized anew, and never their bytes in the file."""

    def __init__(self, planner: LoadPlanner, allow: frozenset[str]) -> None:
        self._planner = planner
        self._allow = allow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, item: ReadItem, data: io.BytesIO) -> None:
        name = item.storage_index.fqn
        self._planner.load_bytes(item, objects.resaved(data, name, self._allow))


def _local_elements(tensor: Any) -> int:
    """How many elements of a target this rank has."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return 0
    return sum(math.prod(chunk.sizes) for chunk in _create_chunk_list(tensor))


def _read_at(fd: int, info: Any, offset: int, nbytes: int) -> bytes:
    """Bytes of an item; fewer only at its end."""
    if offset < 0 or nbytes < 0 or offset + nbytes > info.length:
        nbytes = max(0, min(nbytes, info.length - offset))
    return os.pread(fd, nbytes, info.offset + offset)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def narrowed(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if (offset, length) != (0, tensor.shape[dim]):  # torch does not narrow all kinds of tensors
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise Error(
            "INVALID_ARGUMENT",
            f"load {item.storage_index.fqn}: the plan asks for {list(item.lengths)}, the target "
            f"has {list(target.shape)}",
        )
    if any(count > 1 and stride == 0 for count, stride in zip(target.shape, target.stride(), strict=True)):
        raise Error(
            "INVALID_ARGUMENT",
            f"load {item.storage_index.fqn}: the target was expanded, and has several elements at one address; load into a clone",
        )
    return target


def _serialized(item: ReadItem, data: io.BytesIO, planner: LoadPlanner, done: list[tuple[ReadItem, torch.Tensor]],
                later: list[Callable[[], None]]) -> None:  # fmt: skip
    """Reads a tensor that ``torch.save`` serialized; it is copied later."""
    source, target = narrowed(torch.load(data, map_location="cpu", weights_only=True), item), _target(item, planner)
    if source.is_quantized and _quantization(source) != _quantization(target):  # a copy has the target's scale
        raise Error(
            "INVALID_ARGUMENT",
            f"load {item.storage_index.fqn}: a quantized tensor is stored there, and the target has another scale or zero "
            "point; give a target that is quantized as the stored tensor is",
        )
    later.append(functools.partial(_copy, source, target))
    done.append((item, target))


def _quantization(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the elements of a quantized tensor mean; () for any other, and for one that has no scale yet."""
    try:
        kind = tensor.dtype, tensor.qscheme()
    except RuntimeError:
        return ()
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return *kind, tensor.q_scale(), tensor.q_zero_point()
    of_channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return *kind, tensor.q_per_channel_axis(), *(tuple(values.tolist()) for values in of_channels)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _source(item: ReadItem, info: Any, proved: Proved) -> tuple[Source, bool]:
    """Where an item's bytes are, and whether a box of them is read.

    Else the item is one run of bytes: an object, or a tensor that ``torch.save`` serialized.
    """
    begin, end, name, dtype, shape = proved.find(info.relative_path, info.offset, info.length)
    if begin == info.offset and end - begin == info.length:
        return Source(proved.reader, name, 0, torch.uint8, (info.length,), (1,)), False
    if item.type == LoadItemType.BYTE_IO:
        raise Error("DATA_LOSS", f"load {item.storage_index.fqn}: an object, but a tensor lies there")
    return Source(proved.reader, name, 0, _dtypes.of_file(dtype), shape, _row_major(shape)), True


def _box(item: ReadItem, source: Source) -> Source:
    """The box of a stored tensor that an item asks for."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    fits = len(offsets) == len(source.shape) and all(
        o + n <= s for o, n, s in zip(offsets, lengths, source.shape, strict=True)
    )
    if not fits:
        raise Error(
            "DATA_LOSS",
            f"load {item.storage_index.fqn}: the metadata asks for {list(lengths)} at "
            f"{list(offsets)} of what is {list(source.shape)} in the file",
        )
    return source.narrow(offsets, lengths)


def _ask(item: ReadItem, source: Source, planner: LoadPlanner, loading: Loading) -> torch.Tensor:
    box, target = _box(item, source), _target(item, planner)
    loading.add(box, target)
    return target


@_arguments.checked
def load(
    state_dict: Any,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: _StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Loads into a state, as ``torch.distributed.checkpoint.load`` does, through a `StorageReader`.

    The state of an optimizer that has made no step yet, of `torch.optim`, is loaded, too. What has a
    ``state_dict`` is filled at any depth of dicts and lists.

    Args:
        state_dict: what is loaded into. Of what the checkpoint has below one of its entries, and no
            rank's state has, the log has one line.
        checkpoint_id: the checkpoint's directory. A URL is left to the framework's own reader.
        storage_reader: default a `StorageReader` for `checkpoint_id`.
        planner, process_group, no_dist: as of the framework's.

    Raises:
        CheckpointException: with the failures of all ranks.
        Error: INVALID_ARGUMENT, an argument of a wrong type.
    """
    plans.check_state(state_dict, "load")
    if storage_reader is None and checkpoint_id is not None and "://" not in directories.path_text(checkpoint_id, "load"):
        storage_reader = StorageReader(checkpoint_id)
    load_into(state_dict, storage_reader, checkpoint_id, planner, process_group, no_dist, strict=False)
