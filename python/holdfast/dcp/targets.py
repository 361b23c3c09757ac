"""States as the framework's planners take them: nested dicts and lists of tensors and objects.

The planners know names. So an object that has a ``state_dict`` stands there with its result, at any
depth. A load puts the values that it has read back into the object.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from holdfast._modules import is_stateful
from holdfast._tensor_kinds import NO_MEMORY
from holdfast.errors import Error

logger = logging.getLogger("holdfast.dcp")

_Path = tuple[Any, ...]  # as the framework's: names of dict entries, and numbers of list items


def expanded(value: Any, path: _Path = ()) -> Any:
    """A state with state dicts in the place of the objects that have them.

    Raises:
        Error: INVALID_ARGUMENT for such an object in a tuple, which the planners take for one object.
    """
    if isinstance(value, torch.Tensor):
        return value
    if is_stateful(value):
        return value.state_dict()
    if isinstance(value, Mapping):
        parts = {key: expanded(item, (*path, key)) for key, item in value.items()}
        return value if all(parts[key] is item for key, item in value.items()) else parts
    if isinstance(value, list):
        items = [expanded(item, (*path, number)) for number, item in enumerate(value)]
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, tuple):
        for item in value:
            if is_stateful(item):
                raise Error(
                    "INVALID_ARGUMENT",
                    f"save {_name(path)}: a tuple is saved as one object, and it has a {type(item).__name__}, which has a "
                    "state_dict; make it a list or a dict",
                )
    return value


def _name(path: _Path) -> str:
    return ".".join(map(str, path))


class _Target:
    """A state that a load fills.

    The planner gets dicts and lists of its own: it changes what it is given before anything is read.

    Attributes:
        state: as the planner takes it, once `complete` has been called: all keys are strings, as in
            the planner's names.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._found: dict[_Path, Any] = {}
        self._states: dict[int, Any] = {}  # by the object that has the state dict
        self._views: dict[int, Any] = {}  # by the container in whose place it is
        self._whole: set[int] = set()  # objects that were saved as such
        for key in sorted(target):
            self._look(target[key], (str(key),))

    def _look(self, value: Any, path: _Path) -> None:
        """Finds the objects that have a state dict, and calls it: as the framework does, before the ranks meet."""
        if isinstance(value, torch.Tensor):
            return
        if is_stateful(value):
            self._found[path] = value
            if id(value) not in self._states:
                self._states[id(value)] = value.state_dict()
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._look(item, (*path, str(key)))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                self._look(item, (*path, number))

    def complete(self, metadata: Metadata) -> None:
        """Makes `state`, in which optimizers and schedulers have a place for all that the checkpoint has of them."""
        names = metadata.state_dict_metadata
        self._whole = {id(value) for path, value in self._found.items() if _name(path) in names}
        for path, value in self._found.items():
            if isinstance(value, torch.nn.Module):
                self._states[id(value)] = _with_memory(self._states[id(value)], path, metadata)
        growing = {path: _Growing(value, self._states[id(value)]) for path, value in self._found.items()
                   if _takes_any(value, self._states[id(value)])}  # fmt: skip
        depths = sorted({len(path) for path in growing})
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        # The state dicts were flattened in the order of the paths.
        for name in {**dict.fromkeys(n for n in paths if n in names), **names} if growing else ():
            path = tuple(paths.get(name, ())) or tuple(name.split("."))
            for depth in depths:
                if len(path) > depth and path[:depth] in growing:
                    growing[path[:depth]].add(path[depth:], names[name])
        self._states.update((id(one.owner), one.state) for one in growing.values())
        self.state = {str(key): self._view(item) for key, item in self._target.items()}

    def _view(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        if id(value) in self._whole:
            return None
        if id(value) in self._states:
            return self._view(self._states[id(value)])
        if id(value) in self._views:
            return self._views[id(value)]
        view: Any = value
        if isinstance(value, Mapping):
            view = {str(key): self._view(item) for key, item in value.items()}
            if len(view) != len(value):  # the planner refuses two of one name
                view = {key: self._view(item) for key, item in value.items()}
        elif isinstance(value, list) and not _is_one_object(value):
            view = [self._view(item) for item in value]
        if view is not value:
            self._views[id(value)] = view
        return view

    def put(self, state: dict[str, Any]) -> None:
        """Puts the values that were read into `state` in their places."""
        for key in sorted(self._target):
            value, loaded = self._target[key], state[str(key)]
            placed = self._put(value, loaded)
            if not is_stateful(value) or placed is not value:
                self._target[key] = placed

    def _put(self, value: Any, loaded: Any) -> Any:
        """Returns the new content of the place of a value."""
        if id(value) in self._whole:
            if not is_stateful(loaded):
                return loaded
            value.load_state_dict(loaded.state_dict())
            return value
        if id(value) in self._states:
            value.load_state_dict(self._put(self._states[id(value)], loaded))
            return value
        view, container = self._views.get(id(value)), value
        if isinstance(view, Mapping) and isinstance(loaded, Mapping) and view.keys() == loaded.keys():
            pairs = [(key, item, loaded[key if key in loaded else str(key)]) for key, item in value.items()]
        elif isinstance(view, list) and isinstance(loaded, list) and len(view) == len(loaded):
            pairs = list(zip(range(len(value)), value, loaded, strict=True))
        else:  # it was no view, or the checkpoint has it as one object
            return loaded
        for key, item, new in pairs:
            placed = self._put(item, new)
            if placed is not item:
                container[key] = placed
        return value


def _is_one_object(value: list[Any]) -> bool:
    """Whether the planners take a list for one object: it has no tensor and no dict, at any depth of lists."""
    return not any(
        isinstance(item, (torch.Tensor, Mapping)) or is_stateful(item) or (isinstance(item, list) and not _is_one_object(item))
        for item in value
    )


def _own(view: Any, made: dict[int, Any]) -> Any:
    """A view with all dicts, lists and tuples anew, also in what is one object; `made`: of views that occur again, by id."""
    if isinstance(view, tuple):
        return tuple(_own(item, made) for item in view)
    if not isinstance(view, (dict, list)):
        return view
    if id(view) not in made:
        own: Any = [] if isinstance(view, list) else {}
        made[id(view)] = own
        if isinstance(view, list):
            own += (_own(item, made) for item in view)
        else:
            own.update((key, _own(item, made)) for key, item in view.items())
    return made[id(view)]


def _restored(view: Any, own: Any) -> Any:
    """`own`, made of a view, with the view's objects, which the framework's planner replaces by None and by copies."""
    if type(view) is dict and isinstance(own, dict):
        own.update({key: _restored(item, own[key]) for key, item in view.items() if key in own})
        return own
    if type(view) is list and not _is_one_object(view) and isinstance(own, list) and len(own) == len(view):
        own[:] = map(_restored, view, own)
        return own
    return own if isinstance(view, torch.Tensor) else view


def _with_memory(state: Any, path: _Path, metadata: Metadata) -> Any:
    """A module's state dict whose tensors can be filled: a lazy module gets the shapes from the checkpoint.

    Raises:
        Error: INVALID_ARGUMENT for a tensor on the meta device.
    """
    new: dict[Any, Any] = {}
    for key, item in state.items() if isinstance(state, dict) else ():
        if not isinstance(item, torch.Tensor):
            continue
        name = _name((*path, key))
        stored = metadata.state_dict_metadata.get(name)
        if is_lazy(item) and isinstance(stored, TensorStorageMetadata):
            new[key] = torch.empty(tuple(stored.size), dtype=stored.properties.dtype, device=item.device)
        elif item.is_meta:
            raise Error("INVALID_ARGUMENT", f"load {name}: {NO_MEMORY}")
    return {**state, **new} if new else state


def _takes_any(value: Any, state: Any) -> bool:
    """Whether it is one of torch.optim's objects, which take entries that a new one has not made yet."""
    if isinstance(value, torch.optim.Optimizer):
        return isinstance(state, dict) and isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)
    return isinstance(value, LRScheduler) and isinstance(state, dict)


def _copied(value: Any) -> Any:
    """Containers anew: they are the object's own."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


class _Growing:
    """The state dict of an optimizer or a scheduler, with a place for each entry that the checkpoint has.

    Of an optimizer's state it has these alone, as after ``load_state_dict`` of the saved one.

    Attributes:
        owner: the object.
        state: its state dict.
    """

    def __init__(self, owner: Any, state: Any) -> None:
        self.owner = owner
        self.state = _copied(state)
        self._old: dict[Any, Any] = {}
        self._parameters: list[torch.Tensor] = []
        self._is_optimizer = isinstance(owner, torch.optim.Optimizer)
        if self._is_optimizer:
            self._parameters = [p for group in owner.param_groups for p in group["params"]]

    def add(self, path: _Path, stored: Any) -> None:
        """Makes a place.

        Args:
            path: of an entry in the state dict.
            stored: its metadata.
        """
        parameter = None
        if self._is_optimizer:
            if not self._old:  # the checkpoint has something of the optimizer
                self._old = {"state": self.state["state"]}
                self.state["state"] = {}
            if len(path) < 2 or path[0] not in ("state", "param_groups"):
                return
            if str(path[1]).isdigit():
                number = int(path[1])
                if number >= len(self._parameters if path[0] == "state" else self.owner.param_groups):
                    return  # of another model
                path = (path[0], number, *path[2:])
                parameter = self._parameters[number] if path[0] == "state" else None
        holder = self.state
        for key, following in zip(path, path[1:], strict=False):
            holder = _entry(holder, key, [] if isinstance(following, int) else {})
        _entry(holder, path[-1], _room(stored, parameter, path[-1], functools.reduce(_item, path, self._old)))


def _item(holder: Any, key: Any) -> Any:
    """An item of a container; None where there is none."""
    if isinstance(holder, list) and isinstance(key, int):
        return holder[key] if key < len(holder) else None
    return holder.get(key) if isinstance(holder, dict) else None


def _entry(holder: Any, key: Any, new: Any) -> Any:
    """An entry of a container: a new one where there is none."""
    if isinstance(holder, list):
        holder.extend([None] * (int(key) + 1 - len(holder)))
        if holder[int(key)] is None:
            holder[int(key)] = new
        return holder[int(key)]
    if not isinstance(holder, dict):
        return None
    if key not in holder and isinstance(key, str) and not all(isinstance(own, str) for own in holder):
        # Which kind of key it was is known from the target alone.
        return next((item for own, item in holder.items() if str(own) == key), None)
    return holder.setdefault(key, new)


def _room(stored: Any, parameter: torch.Tensor | None, key: Any, old: Any) -> Any:
    """A tensor as the stored one, on the parameter's device and mesh; None for an object.

    Args:
        stored: its metadata.
        parameter: whose state it is, if it is one's.
        key: its own.
        old: the present value, which is used where it fits.
    """
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype, shape = stored.properties.dtype, tuple(stored.size)
    if isinstance(old, torch.Tensor) and old.dtype == dtype and tuple(old.shape) == shape:
        return old
    if parameter is None or key == "step":  # a load moves it, where the optimizer wants it on the device
        return torch.empty(shape, dtype=dtype, device="cpu")
    if not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    room = torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
    mesh = parameter.device_mesh
    return DTensor.from_local(room, mesh, [Replicate()] * mesh.ndim, run_check=False) if shape else room


class _Planner:
    """A planner of a load into a `_Target`; on the coordinator it looks for entries that no rank loads."""

    def __init__(self, planner: LoadPlanner, target: _Target, path: str, strict: bool) -> None:
        self._planner = planner
        self._fill = target
        self._path = path
        self._strict = strict
        # Another planner may give names of its own.
        self._compares = (
            type(planner) is DefaultLoadPlanner and planner.flatten_state_dict and not planner.allow_partial_load
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata
        self._fill.complete(metadata)
        self.state = _own(self._fill.state, {})
        self._planner.set_up_planner(self.state, metadata, is_coordinator)
        _restored(self._fill.state, self.state)

    def create_local_plan(self) -> LoadPlan:
        plan = self._planner.create_local_plan()
        return dataclasses.replace(plan, planner_data=self._lacking()) if self._compares else plan

    def _lacking(self) -> int:
        """Bits for the metadata's names, in their order: 1 for one that is below an entry of this rank's target, and not in it."""
        there = self._planner.state_dict  # type: ignore[attr-defined]
        state = self._fill.state

        def lacks(name: str, stored: Any) -> bool:
            if name in there or (isinstance(stored, TensorStorageMetadata) and 0 in stored.size):
                return False
            parts = name.split(".")
            return any(".".join(parts[:n]) in state for n in range(1, len(parts)))

        return int("".join("01"[lacks(*entry)] for entry in self._metadata.state_dict_metadata.items()) or "0", 2)

    def create_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        bits = functools.reduce(operator.or_, (plan.planner_data for plan in plans), 0) if self._compares else 0
        if bits:
            names = self._metadata.state_dict_metadata
            lacking = {name for name, bit in zip(names, f"{bits:0{len(names)}b}", strict=True) if bit == "1"}
            # Each stage of a pipeline has names of its own.
            lacking -= {item.dest_index.fqn for plan in plans for item in plan.items}
            if lacking:
                self._say(sorted(lacking))
        return self._planner.create_global_plan(plans)

    def _say(self, lacking: list[str]) -> None:
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        names = ", ".join(lacking[:5]) + more
        if self._strict:
            raise Error(
                "INVALID_ARGUMENT",
                f"load {self._path}: not in the target: {names} (strict=False loads what both have)",
            )
        logger.warning("load %s: not in the target, and not loaded: %s", self._path, names)


def load_into(state_dict: Any, reader: StorageReader | None, checkpoint_id: Any, planner: LoadPlanner | None,
              process_group: dist.ProcessGroup | None, no_dist: bool, strict: bool) -> None:  # fmt: skip
    """Loads into a state by the framework's code.

    Args:
        state_dict: what is loaded into.
        reader, checkpoint_id, planner, process_group, no_dist: as of ``dcp.load``.
        strict: refuse a checkpoint with an entry that no rank's target has, below one that a target has.
            False: one line in the log.
    """
    target = _Target(state_dict)
    path = str(checkpoint_id if reader is None else getattr(reader, "checkpoint_id", checkpoint_id))
    wrapped: Any = _Planner(planner or DefaultLoadPlanner(), target, path, strict)
    dcp.load({}, checkpoint_id=checkpoint_id, storage_reader=reader, planner=wrapped, process_group=process_group,
             no_dist=no_dist)  # fmt: skip
    target.put(wrapped.state)
