"""Every reader that accepts checkpoints: what each of them finds, compared with what was saved."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

import holdfast
import holdfast.dcp
from holdfast import _dtypes, _native
from holdfast._tensor_kinds import as_bytes
from holdfast.integrity import megatron, schedule, states

MEGATRON = "megatron.core"
_VALUE = "a value"
_AS_BYTES = (torch.complex64,)  # dtypes of `states.DTYPES` that are bytes to safetensors
Finding = tuple[int, str]  # number of the save that was found, and how it differs from it


class Unknown(Exception):
    """What is found belongs to no save."""


class Expected:
    """What the saves of a round have in them.

    Args:
        round_: the round.
    """

    def __init__(self, round_: dict[str, Any]) -> None:
        self.round = round_
        self._saves = schedule.saves_of(round_)
        self._last: tuple[int, int, dict[str, Any]] = (-1, -1, {})

    def spec(self, save: int) -> dict[str, Any]:
        if save not in self._saves:
            raise Unknown(f"it says that it is save {save}, which was never made")
        return self._saves[save]["spec"]

    def state(self, save: int, rank: int) -> dict[str, Any]:
        if self._last[:2] != (save, rank):  # one reader after the other asks for the same
            made = states.make(self.round["seed"], save, rank, self.spec(save))
            self._last = save, rank, states.as_plan(made) if self.round["door"] == schedule.PLAN else made
        return self._last[2]

    def step(self, save: int) -> int:
        return self._saves[save]["step"]

    def dcp(self, save: int) -> dict[str, Any]:
        whole = states.dcp_of_ranks(self.round["seed"], save, self.round["ranks"], self.spec(save))
        return megatron.whole(whole, self.round["ranks"]) if self.round["door"] == schedule.MEGATRON else whole


def _load(path: str, expected: Expected) -> Iterator[Finding]:
    for rank in range(expected.round["ranks"]):
        found = holdfast.load(path, rank=rank)
        save = int(found["id"][0])
        yield save, states.difference(found, expected.state(save, rank))


def _load_into(path: str, expected: Expected) -> Iterator[Finding]:
    for rank in range(expected.round["ranks"]):
        save = int(holdfast.open(path, rank=rank)["id"][0])
        target = states.unlike(expected.state(save, rank))
        holdfast.load(path, into=target, rank=rank)
        yield save, states.difference(target, expected.state(save, rank))


def _load_plan(path: str, expected: Expected) -> Iterator[Finding]:
    """The C++ reader, into memory of the tensors of the save that the checkpoint says it is of."""
    for rank in range(expected.round["ranks"]):
        reader = _native.CheckpointReader.open(path, rank)
        id_ = torch.zeros(2, dtype=torch.int64)
        _fill(reader, {"id": id_})
        save = int(id_[0])
        wanted = expected.state(save, rank)
        entries = {name: (_dtypes.of_file(dtype), tuple(shape)) for name, dtype, shape, *_ in reader.tensors()}
        if different := _other_entry(entries, wanted):
            yield save, different
            continue
        target = states.unlike(wanted)
        _fill(reader, target)
        yield save, states.difference(target, wanted)


def _fill(reader: _native.CheckpointReader, tensors: dict[str, torch.Tensor]) -> None:
    targets: list[Any] = [(name, tensor.data_ptr(), tensor.nbytes, None, None) for name, tensor in tensors.items()]
    reader.load(targets, True, 64 << 20, 1, "auto", True)


def _other_entry(entries: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The first name that only one of the two has, or that has another dtype or shape; empty where there is none.

    Args:
        entries: by name dtype and shape; `_VALUE` for what is no tensor.
        wanted: a state.
    """
    of_state = {name: (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else _VALUE
                for name, value in states.leaves(wanted)}  # fmt: skip
    for name in sorted(entries.keys() | of_state.keys()):
        if entries.get(name) != of_state.get(name):
            return f"{name} is {entries.get(name, 'absent')}, not {of_state.get(name, 'absent')}"
    return ""


def _number_in(files: list[str]) -> int:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as opened:
            if "id" in opened.keys():
                return int(opened.get_tensor("id")[0])
    raise Unknown("no file has a tensor that says which save it is")


def _safetensors(path: str, expected: Expected) -> Iterator[Finding]:
    from safetensors import safe_open

    files = sorted(glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    save = _number_in(files)
    for rank in range(expected.round["ranks"]):
        found: dict[str, torch.Tensor] = {}
        for file in files:
            number = os.path.basename(file).removeprefix("model-").split("-")[0]
            if not number.isdecimal() or int(number) == rank:  # one of all ranks has no number
                with safe_open(file, "pt") as opened:
                    found |= {name: opened.get_tensor(name) for name in opened.keys()}
        wanted = states.tensors(expected.state(save, rank))
        yield save, states.difference(found, {n: as_bytes(t) if t.dtype in _AS_BYTES else t for n, t in wanted})


def _dcp_with(load: Callable[[Any, str], None], storage: Callable[[str], Any]) -> Callable[[str, Expected], Iterator[Finding]]:
    """A reader of DCP.

    Args:
        load: fills a state from a path.
        storage: makes the storage reader of a path, for the entries that no load looks at.
    """

    def read(path: str, expected: Expected) -> Iterator[Finding]:
        id_ = {"r0.id": torch.zeros(2, dtype=torch.int64)}
        load(id_, path)
        save = int(id_["r0.id"][0])
        whole = expected.dcp(save)
        entries = {name: (stored.properties.dtype, tuple(stored.size)) if hasattr(stored, "size") else _VALUE
                   for name, stored in storage(path).read_metadata().state_dict_metadata.items()}  # fmt: skip
        if expected.round["door"] == schedule.MEGATRON:  # its objects are no values of DCP's
            whole = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}
            entries = {name: entry for name, entry in entries.items() if entry != _VALUE}
        if different := _other_entry(entries, whole):
            yield save, different
            return
        target = states.unlike(whole)
        load(target, path)
        yield save, states.difference(target, whole)

    return read


def _torch(**options: Any) -> Callable[[str, Expected], Iterator[Finding]]:
    def read(path: str, expected: Expected) -> Iterator[Finding]:
        found = torch.load(path, **options)
        save = int(found["id"][0])
        yield save, states.difference(found, expected.state(save, 0))

    return read


def _own_load(target: Any, path: str) -> None:
    holdfast.dcp.load(target, checkpoint_id=path, no_dist=True)


def _stock_reader(path: str) -> Any:
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemReader(path)


def _stock_load(target: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(target, storage_reader=_stock_reader(path), no_dist=True)


Reader = Callable[[str, Expected], Iterator[Finding]]


def readers_of(format_: str, door: str = "") -> dict[str, Reader]:
    """Readers by name, for ``"holdfast"``, ``"dcp"`` or ``"file"``. Those of others compare no digests."""
    if format_ == "file":
        return {
            "torch.load": _torch(weights_only=False),
            "torch.load of weights": _torch(weights_only=True),
            "torch.load with mmap": _torch(mmap=True, weights_only=True),
        }
    if format_ == "dcp":
        of_dcp = {"holdfast.dcp": _dcp_with(_own_load, holdfast.dcp.StorageReader),
                  "torch.distributed.checkpoint": _dcp_with(_stock_load, _stock_reader)}  # fmt: skip
        return {**of_dcp, MEGATRON: megatron.read} if door == schedule.MEGATRON else of_dcp
    found: dict[str, Reader] = {"holdfast.load": _load, "holdfast.load into": _load_into}
    if door == schedule.PLAN:
        found = {"holdfast::CheckpointReader": _load_plan}
    with contextlib.suppress(ImportError):
        import safetensors  # noqa: F401

        found["safetensors"] = _safetensors
    return found


def of_trainer(format_: str, door: str) -> Reader:
    """What a training loads with that saves so."""
    found = readers_of(format_, door)
    return found.get(MEGATRON) or next(iter(found.values()))


def complete(directory: str, format_: str) -> list[dict[str, Any]]:
    """The complete checkpoints of a directory, as `holdfast.list_checkpoints` gives them.

    A file is complete when it has its name; of files there is no newest.
    """
    if format_ != "file":
        return holdfast.list_checkpoints(directory, format=format_)
    names = sorted(name for name in os.listdir(directory) if name.endswith(".pt") and not name.startswith("."))
    return [{"name": name, "path": os.path.join(directory, name)} for name in names]


_CODE = re.compile(r"\[(DATA_LOSS|NOT_FOUND|PERMISSION_DENIED|INVALID_ARGUMENT|FAILED_PRECONDITION)\]")


def is_own(error: BaseException) -> bool:
    """Whether it is an error of this package, or one of the framework that says what such an error said.

    The framework's loading turns what a reader raises into exceptions of its own, with the text.
    """
    return all(isinstance(e, holdfast.Error) or _CODE.search(str(e)) for e in _causes(error))


def is_interrupt(error: BaseException) -> bool:
    """Whether it is Ctrl-C, also inside of an exception of the framework."""
    return any(isinstance(e, KeyboardInterrupt) for e in _causes(error))


def _causes(error: BaseException) -> list[BaseException]:
    return [e[0] for e in getattr(error, "failures", {0: (error,)}).values()]


def verdict(path: str, format_: str) -> str:
    """What verifying says: ``"sound"``, another verdict, or the code of its error."""
    try:
        report = holdfast.dcp.verify(path) if format_ == "dcp" else holdfast.verify(path)
    except holdfast.Error as error:
        return error.code
    return report["verdict"]
