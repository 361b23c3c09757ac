"""Loading a checkpoint: into existing tensors, as new ones on given devices, or one by one."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from holdfast import _devices, _dtypes, _native, _ranks, _state, _unpickle
from holdfast.errors import Error
from holdfast.saving import FORMAT_VERSION, OBJECTS, STRUCTURE

BUFFER_BYTES = 64 << 20

MapLocation = None | str | torch.device | Mapping[str, Any] | Callable[[str], Any]


@dataclasses.dataclass
class _Entry:
    """One stored run of bytes, and the reader that has it."""

    reader: _native.CheckpointReader
    dtype: str
    shape: list[int]
    nbytes: int


@dataclasses.dataclass
class _Options:
    verify: bool = True
    buffer_bytes: int = BUFFER_BYTES
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

    def __init__(self, path: str | os.PathLike[str], *, rank: int | None = None,
                 map_location: MapLocation = None, verify: bool = True,
                 buffer_bytes: int = BUFFER_BYTES, threads: int = 0, engine: str = "auto",
                 direct_io: bool = True) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._map = map_location
        self._options = _Options(verify, buffer_bytes, threads, engine, direct_io)
        self.report: dict[str, Any] = {}
        own_rank, own_world = _ranks.rank_and_world()
        zero = _native.CheckpointReader.open(self.path, 0)
        self.world_size = zero.world_size
        if rank is None:
            if self.world_size != own_world:
                raise Error(
                    "FAILED_PRECONDITION",
                    f"load {self.path}: it was saved by {self.world_size} ranks, this job has "
                    f"{own_world}; use holdfast.dcp for states that are loaded with another number "
                    "of ranks, or pass rank= to read one rank's",
                )
            rank = own_rank
        self.rank = rank
        own = zero if rank == 0 else _native.CheckpointReader.open(self.path, rank)
        self.step = own.step
        self._entries: dict[str, _Entry] = {}
        for reader in {id(r): r for r in (zero, own)}.values():  # own wins
            for name, dtype, shape, _, begin, end in reader.tensors():
                self._entries[name] = _Entry(reader, dtype, shape, end - begin)
        structure = json.loads(self._bytes(STRUCTURE))
        if structure.get("holdfast_state") != FORMAT_VERSION:
            raise Error(
                "UNIMPLEMENTED",
                f"load {self.path}: its description has version {structure.get('holdfast_state')}, "
                f"this is {FORMAT_VERSION}",
            )
        self._root: _state.Node = structure["root"]
        self._objects: dict[str, list[int]] = structure["objects"]
        self._views = {_state.join(p): n for p, n in _state.tensor_nodes(self._root)}

    # ---- One by one.

    def __getitem__(self, name: str) -> torch.Tensor:
        node = self._views.get(name)
        if node is None:
            raise KeyError(name)
        return self._build(node, (), ())

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, name: object) -> bool:
        return name in self._views

    # ---- As a whole.

    def state(self, allow: Iterable[Any] = ()) -> Any:
        """The state as it was saved, in new tensors. See `load`."""
        return self._build(self._root, (), tuple(allow))

    def into(self, target: Any, *, strict: bool = True, allow: Iterable[Any] = ()) -> Any:
        """Reads into the tensors of `target`, and returns it. See `load`."""
        filling = _Filling(self, strict, tuple(allow))
        result = filling.fill(self._root, target, ())
        filling.run()
        return result

    # ---- Reading.

    def _read(self, targets: list[tuple[str, int, int, Any, int | None]]) -> None:
        """targets: (stored name, address, bytes, device, first byte of a part)."""
        by_reader: dict[int, tuple[_native.CheckpointReader, list[Any]]] = {}
        for target in targets:
            reader = self._entries[target[0]].reader
            by_reader.setdefault(id(reader), (reader, []))[1].append(target)
        o = self._options
        self.report = {"bytes": 0, "bytes_read": 0, "seconds": 0.0, "verified": o.verify}
        for reader, wanted in by_reader.values():
            report = reader.load(wanted, o.verify, o.buffer_bytes, o.threads, o.engine, o.direct_io)
            for key in ("bytes", "bytes_read", "seconds"):
                report[key] += self.report[key]
            self.report = report

    def _bytes(self, name: str) -> bytes:
        entry = self._entries.get(name)
        if entry is None:
            raise Error(
                "FAILED_PRECONDITION",
                f"load {self.path}: it has no {name}: it was not saved by the Python package; its "
                "tensors are ordinary safetensors files",
            )
        buffer = torch.empty(entry.nbytes, dtype=torch.uint8)
        self._read([(name, buffer.data_ptr(), entry.nbytes, None, None)])
        return _bytes_of(buffer)

    def _location(self, saved: str) -> torch.device:
        where = self._map
        if where is None:
            device = torch.device(saved)
        elif callable(where):
            device = torch.device(where(saved) or saved)
        elif isinstance(where, Mapping):
            device = torch.device(where.get(saved, saved))
        else:
            device = torch.device(where)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise Error(
                "FAILED_PRECONDITION",
                f"load {self.path}: a tensor was saved from {saved}, and there is no CUDA here; pass "
                "map_location='cpu'",
            )
        return device

    def _object(self, name: str, allow: tuple[Any, ...]) -> Any:
        begin, length = self._objects[name]
        buffer = torch.empty(length, dtype=torch.uint8)
        self._read([(OBJECTS, buffer.data_ptr(), length, None, begin)])
        return _unpickle.loads(_bytes_of(buffer), name, allow)

    def _build(self, node: _state.Node, path: _state.Path, allow: tuple[Any, ...]) -> Any:
        builder = _Builder(self, allow)
        value = builder.plan(node, path)
        self._read(builder.targets)
        return value()


def _bytes_of(buffer: torch.Tensor) -> bytes:
    return ctypes.string_at(buffer.data_ptr(), buffer.numel())


def _empty_storage(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _view(memory: torch.Tensor, node: _state.Node, offset: int) -> torch.Tensor:
    """The tensor of a node over memory whose first byte is `offset` bytes before the node's."""
    dtype = _dtypes.torch_dtype(node["dtype"])
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    stride = node.get("stride")
    shape = tuple(node["shape"])
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return tensor.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, tuple(stride))


class _Builder:
    """Plans new tensors; what `plan` returns makes the value once the bytes have been read."""

    def __init__(self, checkpoint: Checkpoint, allow: tuple[Any, ...],
                 device: torch.device | None = None) -> None:
        self._checkpoint = checkpoint
        self._allow = allow
        self._device = device  # of tensors, whatever they were saved from; scalars stay
        self._memory: dict[tuple[str, torch.device], torch.Tensor] = {}
        self.targets: list[tuple[str, int, int, Any, int | None]] = []

    def _storage(self, name: str, device: torch.device) -> torch.Tensor:
        key = (name, device)
        if key not in self._memory:
            nbytes = self._checkpoint._entries[name].nbytes
            memory = _empty_storage(nbytes, device)
            self._memory[key] = memory
            if nbytes:
                self.targets.append(
                    (name, memory.data_ptr(), nbytes, _devices.device_of(device), None)
                )
        return self._memory[key]

    def tensor(self, node: _state.Node) -> torch.Tensor:
        device = self._checkpoint._location(node["device"])
        if self._device is not None and node["shape"]:
            device = self._device
        tensor = _view(self._storage(node["stored"], device), node, node.get("offset", 0))
        if node.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=bool(node.get("requires_grad")))
        return tensor.requires_grad_() if node.get("requires_grad") else tensor

    def plan(self, node: _state.Node, path: _state.Path) -> Callable[[], Any]:
        kind = node["kind"]
        if _state.is_scalar(node):
            value = _state.scalar_of(node)
            return lambda: value
        if kind == "tensor":
            tensor = self.tensor(node)
            return lambda: tensor
        if kind == "size":
            return lambda: torch.Size(node["items"])
        if kind in ("dict", "ordered_dict"):
            items = [
                (_state.key_of(k), self.plan(n, (*path, str(_state.key_of(k)))))
                for k, n in node["items"]
            ]
            make_dict = dict if kind == "dict" else _state.OrderedDict
            return lambda: make_dict((k, item()) for k, item in items)
        if kind in ("list", "tuple", "set", "frozenset"):
            plans = [self.plan(n, (*path, str(i))) for i, n in enumerate(node["items"])]
            make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return lambda: make(p() for p in plans)
        if kind in ("namedtuple", "dataclass"):
            fields = [
                (f, self.plan(n, (*path, f)))
                for f, n in zip(node["fields"], node["items"], strict=True)
            ]
            return lambda: self._instance(node["class"], path, {f: p() for f, p in fields}, kind)
        if kind == "stateful":
            return self.plan(node["state"], path)
        if kind == "ndarray":
            tensor = self.tensor(node["tensor"])
            return lambda: tensor.numpy()
        if kind == "dtensor":
            # Without its mesh it cannot be made; the local shard is what this rank has.
            return self.plan(node["local"], path)
        if kind == "sparse":
            parts = {n: self.plan(t, (*path, n)) for n, t in node["parts"].items()}
            return lambda: _sparse(node, {n: p() for n, p in parts.items()})
        if kind == "subclass":
            inner = {n: self.plan(t, (*path, n)) for n, t in node["inner"].items()}

            def make_subclass() -> Any:
                cls, context, shape, stride = self._checkpoint._object(node["context"], self._allow)
                parts = {n: p() for n, p in inner.items()}
                return cls.__tensor_unflatten__(parts, context, shape, stride)

            return make_subclass
        if kind == "object":
            return lambda: self._checkpoint._object(node["name"], self._allow)
        raise Error("UNIMPLEMENTED", f"load {_state.join(path)}: unknown kind {kind!r}")

    def _instance(self, name: str, path: _state.Path, fields: dict[str, Any], kind: str) -> Any:
        if name not in {_unpickle.name_of(a) for a in self._allow}:
            raise Error(
                "PERMISSION_DENIED",
                f"load {_state.join(path)}: it is a {kind}, {name}; pass allow=[{name!r}] to have it "
                "made again, or load into an existing one",
            )
        module, _, qualname = name.partition(":")
        cls: Any = importlib.import_module(module)
        for part in qualname.split("."):
            cls = getattr(cls, part)
        return cls(**fields)


def _sparse(node: _state.Node, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    shape = tuple(node["shape"])
    if node["layout"] == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"], parts["values"], shape, is_coalesced=node["coalesced"]
        )
    layout = getattr(torch, node["layout"])
    rows = "crow_indices" in parts
    compressed = parts["crow_indices" if rows else "ccol_indices"]
    plain = parts["col_indices" if rows else "row_indices"]
    return torch.sparse_compressed_tensor(compressed, plain, parts["values"], shape, layout=layout)


class _Filling:
    """Reads into what is there. First everything is compared, then read, then put in place."""

    def __init__(self, checkpoint: Checkpoint, strict: bool, allow: tuple[Any, ...]) -> None:
        self._checkpoint = checkpoint
        self._strict = strict
        self._allow = allow
        self._targets: dict[tuple[int, str], tuple[str, int, int, Any, int | None]] = {}
        self._copies: list[tuple[torch.Tensor, _state.Node]] = []
        self._after: list[Callable[[], None]] = []
        self._builders: list[_Builder] = []

    def run(self) -> None:
        targets = list(self._targets.values())
        for builder in self._builders:
            targets += builder.targets
        self._checkpoint._read(targets)
        for target, node in self._copies:
            # One at a time: a tensor whose layout differs needs its bytes once beside it.
            builder = _Builder(self._checkpoint, self._allow, target.device)
            source = builder.tensor(node).detach()
            self._checkpoint._read(builder.targets)
            with torch.no_grad():
                target.detach().copy_(source)
        for act in self._after:
            act()

    def _complain(self, path: _state.Path, what: str) -> Error:
        return Error("INVALID_ARGUMENT", f"load {_state.join(path)}: {what}")

    def fill(self, node: _state.Node, target: Any, path: _state.Path) -> Any:
        """Plans the filling of `target`; returns what belongs in its place."""
        kind = node["kind"]
        if kind == "tensor" and isinstance(target, torch.Tensor):
            self._tensor(node, getattr(target, "_local_tensor", target), path)
            return target
        if kind == "dtensor" and isinstance(target, torch.Tensor):
            local = getattr(target, "_local_tensor", target)
            self._tensor(node["local"], local, path)
            return target
        if kind == "ndarray" and type(target).__name__ == "ndarray" and target.flags.writeable:
            self._tensor(node["tensor"], torch.from_numpy(target), path)
            return target
        if kind == "stateful" and _state.is_stateful(target):
            return self._stateful(node, target, path)
        if kind == "stateful" and isinstance(target, Mapping):
            return self.fill(node["state"], target, path)
        if kind in ("dict", "ordered_dict"):
            if isinstance(target, torch.nn.Module):
                return self._module(node, target, path)
            if isinstance(target, Mapping):
                return self._mapping(node, target, path)
            if _state.is_stateful(target):
                return self._stateful({"state": node}, target, path)
        if kind in ("list", "tuple") and isinstance(target, (list, tuple)):
            if len(target) != len(node["items"]):
                raise self._complain(
                    path, f"it has {len(node['items'])} entries, the target {len(target)}"
                )
            items = [
                self.fill(n, t, (*path, str(i)))
                for i, (n, t) in enumerate(zip(node["items"], target, strict=True))
            ]
            if isinstance(target, list):
                self._after.append(lambda: target.__setitem__(slice(None), _resolve(items)))
                return target
            return _Later(lambda: tuple(_resolve(items)))
        if kind in ("namedtuple", "dataclass") and hasattr(target, node["fields"][0] if node["fields"] else "__class__"):
            values = {
                f: self.fill(n, getattr(target, f), (*path, f))
                for f, n in zip(node["fields"], node["items"], strict=True)
            }
            if kind == "namedtuple":
                return _Later(lambda: type(target)(**{f: _resolved(v) for f, v in values.items()}))

            def set_fields() -> None:
                for f, v in values.items():
                    object.__setattr__(target, f, _resolved(v))

            self._after.append(set_fields)
            return target
        return self._new(node, path)

    def _new(self, node: _state.Node, path: _state.Path, device: torch.device | None = None) -> _Later:
        builder = _Builder(self._checkpoint, self._allow, device)
        self._builders.append(builder)
        return _Later(builder.plan(node, path))

    def _mapping(self, node: _state.Node, target: Any, path: _state.Path) -> Any:
        saved = {_state.key_of(k): n for k, n in node["items"]}
        self._compare_keys(set(saved), set(target), path)
        values = {
            k: self.fill(n, target[k], (*path, str(k))) for k, n in saved.items() if k in target
        }

        def assign() -> None:
            for k, v in values.items():
                if isinstance(v, _Later):
                    target[k] = v.value()

        self._after.append(assign)
        return target

    def _compare_keys(self, saved: set[Any], there: set[Any], path: _state.Path) -> None:
        if not self._strict or saved == there:
            return
        parts = []
        if saved - there:
            parts.append("not in the target: " + _some(saved - there))
        if there - saved:
            parts.append("not in the checkpoint: " + _some(there - saved))
        raise self._complain(path, "; ".join(parts) + " (strict=False loads what both have)")

    def _module(self, node: _state.Node, module: torch.nn.Module, path: _state.Path) -> Any:
        there = module.state_dict(keep_vars=True)
        self._mapping(node, there, path)
        if any(not isinstance(v, torch.Tensor) for v in there.values()):  # extra state
            self._after.append(lambda: _ignore(module.load_state_dict(there, strict=self._strict)))
        return module

    def _stateful(self, node: _state.Node, target: Any, path: _state.Path) -> Any:
        inner = node["state"]
        if isinstance(target, torch.nn.Module) and inner["kind"] in ("dict", "ordered_dict"):
            return self._module(inner, target, path)
        current = target.state_dict()
        if _same_shape(inner, current):
            value = self.fill(inner, current, path)
        else:
            # An optimizer before its first step has nothing to read into.
            value = self._new(inner, path, _device_of_state(target))
        self._after.append(lambda: _ignore(target.load_state_dict(_resolved(value))))
        return target

    def _tensor(self, node: _state.Node, target: torch.Tensor, path: _state.Path) -> None:
        if list(target.shape) != node["shape"]:
            raise self._complain(
                path, f"it has shape {node['shape']}, the target {list(target.shape)}"
            )
        if _dtypes.torch_name(target.dtype) != node["dtype"]:
            raise self._complain(
                path, f"it is {node['dtype']}, the target {_dtypes.torch_name(target.dtype)}"
            )
        if target.numel() == 0:
            return
        stride = node.get("stride")
        same = target.is_contiguous() if stride is None else list(target.stride()) == stride
        if target.layout != torch.strided or not same or not _is_dense(target):
            self._copies.append((target, node))
            return
        nbytes = target.numel() * target.itemsize
        name = node["stored"]
        whole = nbytes == self._checkpoint._entries[name].nbytes
        begin = None if whole else node.get("offset", 0)
        # Tied tensors are the same memory: once is enough.
        self._targets[(target.data_ptr(), str(target.device))] = (
            name, target.data_ptr(), nbytes, _devices.device_of(target.device), begin,
        )


class _Later:
    """A value that exists once everything was read."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def value(self) -> Any:
        return self._make()


def _resolved(value: Any) -> Any:
    return value.value() if isinstance(value, _Later) else value


def _resolve(values: Iterable[Any]) -> list[Any]:
    return [_resolved(v) for v in values]


def _ignore(_: Any) -> None:
    return None


def _some(keys: set[Any]) -> str:
    names = sorted(map(str, keys))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a run of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _same_shape(node: _state.Node, value: Any) -> bool:
    """Whether all tensors of a description have one of the same shape and dtype in `value`."""
    if node["kind"] == "tensor":
        return (
            isinstance(value, torch.Tensor)
            and list(value.shape) == node["shape"]
            and _dtypes.torch_name(value.dtype) == node["dtype"]
        )
    if node["kind"] in ("dict", "ordered_dict"):
        if not isinstance(value, Mapping):
            return False
        saved = {_state.key_of(k): n for k, n in node["items"]}
        return saved.keys() == value.keys() and all(
            _same_shape(n, value[k]) for k, n in saved.items()
        )
    if node["kind"] in ("list", "tuple"):
        return (
            isinstance(value, (list, tuple))
            and len(value) == len(node["items"])
            and all(_same_shape(n, v) for n, v in zip(node["items"], value, strict=True))
        )
    return True


def _device_of_state(target: Any) -> torch.device | None:
    for group in getattr(target, "param_groups", ()):
        for parameter in group.get("params", ()):
            return parameter.device
    return None


def open(path: str | os.PathLike[str], **options: Any) -> Checkpoint:
    """Opens a checkpoint to read single tensors: ``holdfast.open(path)["model.weight"]``.

    Args:
        path: the checkpoint's directory.
        **options: as of `load`, without `into`, `strict` and `allow`.
    """
    return Checkpoint(path, **options)


def load(
    path: str | os.PathLike[str],
    into: Any = None,
    *,
    map_location: MapLocation = None,
    strict: bool = True,
    allow: Iterable[Any] = (),
    rank: int | None = None,
    verify: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    threads: int = 0,
) -> Any:
    """Loads a checkpoint.

    Every byte is compared with the digests of its seal on the way. Memory beside the tensors
    themselves is bounded by `buffer_bytes`, and nothing is kept afterwards.

    Args:
        path: the checkpoint's directory.
        into: a state of the same structure, whose tensors are read into in place: modules,
            optimizers, dicts of them, state dicts. An optimizer before its first step gets new
            tensors on its parameters' device. Default: new tensors.
        map_location: where new tensors go: a device, a dict of devices by the saved one's name, or a
            function of that. Default: where they were saved from.
        strict: complain about entries that only one side has.
        allow: classes (or "module:name") that objects, dataclasses and named tuples may be made of.
        rank: whose view to read; default this process's, of as many ranks as saved.
        verify: compare digests.
        buffer_bytes, threads: of the reading.

    Returns:
        `into`, or the state.

    Raises:
        Error: NOT_FOUND, FAILED_PRECONDITION (incomplete, another number of ranks), DATA_LOSS (with
            tensor, file and range), INVALID_ARGUMENT (structure, shape, dtype), PERMISSION_DENIED
            (an object needs a class that is not allowed).
    """
    checkpoint = Checkpoint(
        path, rank=rank, map_location=map_location, verify=verify, buffer_bytes=buffer_bytes,
        threads=threads,
    )
    if into is None:
        return checkpoint.state(allow)
    return checkpoint.into(into, strict=strict, allow=allow)
