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
from holdfast import _native
from holdfast._tensor_kinds import as_bytes, same_bytes
from holdfast.integrity import megatron, schedule, states

MEGATRON = "megatron.core"
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
    save = int(holdfast.open(path, rank=0)["id"][0])
    target = states.zeros(expected.state(save, 0))
    holdfast.load(path, into=target, rank=0)
    yield save, states.difference(target, expected.state(save, 0))


def _load_plan(path: str, expected: Expected) -> Iterator[Finding]:
    """The C++ reader, into memory of the tensors of the save that the checkpoint says it is of."""
    for rank in range(expected.round["ranks"]):
        reader = _native.CheckpointReader.open(path, rank)
        id_ = torch.zeros(2, dtype=torch.int64)
        _fill(reader, {"id": id_})
        save = int(id_[0])
        wanted = expected.state(save, rank)
        target = states.zeros(wanted)
        _fill(reader, target)
        names = {name for name, *_ in reader.tensors()}
        yield save, states.difference(target, wanted) if names == wanted.keys() else f"it has the tensors {sorted(names)[:5]}, ..."


def _fill(reader: _native.CheckpointReader, tensors: dict[str, torch.Tensor]) -> None:
    targets: list[Any] = [(name, tensor.data_ptr(), tensor.nbytes, None, None) for name, tensor in tensors.items()]
    reader.load(targets, True, 64 << 20, 1, "auto", True)


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
    wanted = [dict(states.tensors(expected.state(save, rank))) for rank in range(expected.round["ranks"])]
    for file in files:
        number = os.path.basename(file).removeprefix("model-").split("-")[0]
        rank = int(number) if number.isdecimal() else 0
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                if name in wanted[rank]:
                    mine = as_bytes(wanted[rank][name])
                    if not same_bytes(as_bytes(opened.get_tensor(name)), mine):
                        yield save, f"{name} in {os.path.basename(file)} differs"
    yield save, ""


def _dcp_with(load: Callable[[Any, str], None]) -> Callable[[str, Expected], Iterator[Finding]]:
    def read(path: str, expected: Expected) -> Iterator[Finding]:
        id_ = {"r0.id": torch.zeros(2, dtype=torch.int64)}
        load(id_, path)
        save = int(id_["r0.id"][0])
        whole = expected.dcp(save)
        if expected.round["door"] == schedule.MEGATRON:  # its objects are no values of DCP's
            whole = {name: value for name, value in whole.items() if isinstance(value, torch.Tensor)}
        target = states.zeros(whole)
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


def _stock_load(target: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)


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
        of_dcp = {"holdfast.dcp": _dcp_with(_own_load), "torch.distributed.checkpoint": _dcp_with(_stock_load)}
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
    causes = [e[0] for e in getattr(error, "failures", {0: (error,)}).values()]
    return all(isinstance(e, holdfast.Error) or _CODE.search(str(e)) for e in causes)


def verdict(path: str, format_: str) -> str:
    """What verifying says: ``"sound"``, another verdict, or the code of its error."""
    try:
        report = holdfast.dcp.verify(path) if format_ == "dcp" else holdfast.verify(path)
    except holdfast.Error as error:
        return error.code
    return report["verdict"]
