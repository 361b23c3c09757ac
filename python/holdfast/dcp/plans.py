"""Plans that are known from an earlier save of the same structure.

The framework's own cache is one per process and class of planners, and nothing proves that the
coordinator has the plan that a rank takes for granted. Here a plan has an id. A rank follows a plan only
if its state has the structure that was planned: names, kinds, shapes, dtypes, placements. At the end of
the save every rank says which plan its file follows; only if it is one, that plan's metadata is used.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import threading
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from holdfast import _collector, _native
from holdfast._tensor_kinds import PLAIN_TENSORS
from holdfast.dcp.failures import of_object
from holdfast.dcp.items import Layout, detached
from holdfast.dcp.parts import Plan, in_order
from holdfast.dcp.replicas import Digests, Forms

_KNOWN_MAX = 8
_PLAIN = (int, float, str, bool, type(None))


class _NotComparable(Exception):
    """The state has a tensor whose plan does not follow from its structure."""


@dataclasses.dataclass(eq=False)
class Marks:
    """The structure of a state. States of equal structure have one plan, and one layout of their plain tensors.

    Attributes:
        of_nodes: a mark of each container and leaf; the mark of a plain tensor is its class.
        tensors: plain tensors, and local tensors of DTensors.
    """

    of_nodes: list[Any]
    tensors: _native.TensorTable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marks) and self.of_nodes == other.of_nodes and self.tensors.is_like(other.tensors)


@dataclasses.dataclass
class Look:
    """A state as it was found.

    Attributes:
        marks: its structure.
        nodes: every container and leaf, in the order of the marks.
    """

    marks: Marks
    nodes: list[Any]

    @functools.cached_property
    def rows(self) -> dict[int, int]:
        """By the number of a node, the row that the table of tensors has of it, or of its local tensor."""
        marks = (mark[-1] if type(node) is DTensor else mark for node, mark in zip(self.nodes, self.marks.of_nodes[1:], strict=True))
        plain = (number for number, mark in enumerate(marks) if isinstance(mark, type) and mark in PLAIN_TENSORS)
        return {number: row for row, number in enumerate(plain)}


@_collector.paused()
def look(state: Any, flags: tuple[Any, ...]) -> Look | None:
    """The structure of a state; None for a state that only the framework can plan.

    Args:
        state: of tensors, DTensors, ShardedTensors and objects.
        flags: of the planner.
    """
    try:
        try:
            return _look(state, flags, PLAIN_TENSORS)
        except (RuntimeError, ValueError):  # of a tensor that is not strided, or has no memory
            return _look(state, flags, frozenset())
    except _NotComparable:
        return None


def _look(state: Any, flags: tuple[Any, ...], in_table: frozenset[type]) -> Look:
    """As `look`. Tensors of the classes `in_table` are described all at once, the rest one by one."""
    marks: list[Any] = [flags]
    nodes: list[Any] = []
    tensors: list[torch.Tensor] = []
    meshes: dict[int, Any] = {}

    def mark_of(tensor: torch.Tensor) -> Any:
        if type(tensor) in in_table:
            tensors.append(tensor)
            return type(tensor)
        if tensor.is_nested:  # has no shape
            raise _NotComparable
        return tensor.shape, tensor.dtype, tensor.requires_grad, tensor.layout, tensor.is_cpu

    def visit_all(values: Collection[Any]) -> None:
        if in_table.issuperset(map(type, values)):
            nodes.extend(values)
            marks.extend(map(type, values))
            tensors.extend(values)
        else:
            for value in values:
                visit(value)

    def visit(value: Any) -> None:
        nodes.append(value)
        kind = type(value)
        if kind in PLAIN_TENSORS:
            marks.append(mark_of(value))
        elif isinstance(value, Mapping):
            keys = tuple(value)
            marks.append((keys, tuple(map(type, keys))))
            visit_all(value.values())
        elif isinstance(value, list):
            inner = any(isinstance(item, (Mapping, list, torch.Tensor)) for item in value)
            marks.append((list, len(value) if inner else -1))
            visit_all(value if inner else ())
        elif kind is DTensor and type(value._local_tensor) is torch.Tensor:
            mesh = value.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = (
                    mesh.device_type, mesh.mesh_dim_names, str(mesh.mesh.tolist()), mesh.get_coordinate(),
                )  # fmt: skip
            of_local = mark_of(value._local_tensor)
            marks.append((value.shape, value.placements, meshes[id(mesh)], value.requires_grad, of_local))
        elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
            if is_lazy(value) or isinstance(value, ShardedTensor) and any(
                isinstance(shard.tensor, ShardedTensor) for shard in value.local_shards()
            ):
                raise _NotComparable
            marks.append((kind, pickle.dumps(_create_write_items("", value))))
        else:
            marks.append(kind)

    visit(state)
    return Look(Marks(marks, _native.TensorTable(tensors)), nodes)


def check_state(state_dict: Any, operation: str) -> None:
    """Raises TypeError for a value that is no state dict."""
    if not hasattr(state_dict, "items"):
        raise TypeError(f"{operation}: the state is a dict by names, not {type(state_dict).__name__}; pass {{\"state\": ...}}")


def _paths(state: Any) -> dict[tuple[Any, ...], int]:
    """Where in `Look.nodes` each part of a state is, by the path that the framework gives it."""
    found: dict[tuple[Any, ...], int] = {}
    count = 0

    def visit(path: tuple[Any, ...], value: Any) -> None:
        nonlocal count
        found[path] = count
        count += 1
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit((*path, str(key)), item)
        elif isinstance(value, list) and any(
            isinstance(item, (Mapping, list, torch.Tensor)) for item in value
        ):
            for number, item in enumerate(value):
                visit((*path, number), item)

    visit((), state)
    return found


# Plain values as ``torch.save`` writes them: hyperparameters recur in every group and every save.
_kept: dict[tuple[type, str], bytes] = {}
_KEPT_MAX = 4096


def _bytes_of(value: Any) -> io.BytesIO:
    """An object as the framework's planner writes it."""
    kind = type(value)
    plain = kind in _PLAIN or (kind is tuple and all(type(item) in _PLAIN for item in value))
    # Not the value is the key: 0.0 and -0.0 are equal, and so are 1 and 1.0.
    key = (kind, repr(value)) if plain else None
    if key in _kept:
        return io.BytesIO(_kept[key])
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if key is not None and len(key[1]) < 200:
        if len(_kept) >= _KEPT_MAX:
            _kept.clear()
        _kept[key] = buffer.getvalue()
    return buffer


def _tensor_of(value: Any, item: WriteItem) -> torch.Tensor:
    """The shard that an item writes, of a tensor or of an object with its own way of sharding."""
    if type(value) in PLAIN_TENSORS:
        return detached(value)
    if type(value) is DTensor and type(value._local_tensor) is torch.Tensor:  # not one that is still awaited
        return value._local_tensor.detach()
    return find_tensor_shard(value, item.index).detach()


def _data_of(value: Any, item: WriteItem) -> Any:
    if item.type != WriteItemType.BYTE_IO:
        return _tensor_of(value, item)
    with of_object(item.index.fqn):
        return _bytes_of(value)


class Known:
    """A state and the items of it that this rank writes by a plan.

    Attributes:
        marks: of the state.
        plan: id of the plan.
        row: number of this rank among the ranks of the plan.
        local: all items of this rank, also items that another rank writes.
        compared: items that other ranks have, too, as of `Plan.compared`.
    """

    def __init__(self, marks: Marks, plan: str, row: int, local: list[WriteItem], written: list[WriteItem],
                 shared: Collection[MetadataIndex], nodes: dict[str, int]) -> None:  # fmt: skip
        self.marks = marks
        self.plan = plan
        self.row = row
        self.local = local
        self.layout = Layout(written)
        self._nodes = nodes
        self._at = [nodes[item.index.fqn] for item in written]
        self._apart: list[int] = []  # positions of items that are made of their nodes in each save
        self._rows: list[Any] | None = None  # in the table of tensors, of the items that are fixed
        items = {item.index: item for item in local}
        self.compared = [items[index] for index in in_order(compared_of(local, written, shared))]
        places = {item.index: at for at, item in enumerate(written)}
        self._forms: Forms | None = None
        self._compared_at = [(places.get(i.index), nodes[i.index.fqn], i) for i in self.compared]

    def following(self, plan: Plan, row: int) -> Known:
        """The same state under another plan."""
        mine = {item.index: item for item in self.local}
        written = [dataclasses.replace(mine[i], index=i) for i in plan.written[row]]
        return Known(self.marks, plan.id, row, self.local, written, plan.shared, self._nodes)

    def data(self, seen: Look) -> tuple[list[Any], list[int] | None]:
        """The data of every item, a tensor or the bytes of an object; and addresses, as of `Layout.plan_file`."""
        is_fixed = self.layout.is_fixed
        data = [seen.nodes[at] for at in self._at]
        for i in self._apart if is_fixed else range(len(data)):
            data[i] = _data_of(data[i], self.layout.items[i])
        if not is_fixed:
            self.fix(seen, data)
        if self._rows is None:
            return data, None
        addresses = seen.marks.tensors.in_host()[0]
        return data, [addresses[row] for row in self._rows]

    def fix(self, seen: Look, data: list[Any]) -> None:
        """Plans the part that is the same in all saves: see `Layout.fix`."""
        self.layout.fix(data)
        first = self.layout.first
        as_it_is = {i for i in first if type(seen.nodes[self._at[i]]) in PLAIN_TENSORS}
        self._apart = [i for i in range(len(data)) if i not in as_it_is]
        rows = [seen.rows.get(self._at[i]) for i in first]
        self._rows = None if None in rows else rows

    @_collector.paused()
    def digests(self, nodes: list[Any], data: list[Any]) -> Digests | None:
        """Digests of the items that are compared with other ranks. `data`: of the items that are written."""
        if not self._compared_at:
            return None
        made = Digests([_data_of(nodes[at], item) if place is None else detached(data[place])
                        for place, at, item in self._compared_at], self._forms)  # fmt: skip
        self._forms = made.forms  # which follow from the marks
        return made


def compared_of(local: list[WriteItem], written: list[WriteItem],
                shared: Collection[MetadataIndex]) -> list[MetadataIndex]:
    """Items that a rank compares: the items that it leaves to other ranks, and the items that other ranks leave to it."""
    own, theirs = {item.index for item in written}, frozenset(shared)
    return [i.index for i in local if i.index not in own or i.index in theirs]


def of_one_rank(planner: DefaultSavePlanner, local: SavePlan) -> tuple[SavePlan, Metadata]:
    """The global plan and the metadata of one rank's plan alone; shards need not fill their tensor."""
    (plan,), metadata = create_default_global_save_plan([local])
    if planner.flatten_state_dict:
        metadata = dataclasses.replace(metadata, planner_data=dict(local.planner_data))
    return plan, metadata


def known_from(state: Any, seen: Look, planner: DefaultSavePlanner, plan: str, row: int,
               local: list[WriteItem], written: list[WriteItem],
               shared: Collection[MetadataIndex]) -> Known:  # fmt: skip
    """A state and its part of a plan that was just made.

    Args:
        state, seen: the planned state, and its structure.
        planner: with the paths of the names in the state.
        plan, row: as of `Known`.
        local, written: items of this rank before and after the planning of all ranks.
        shared: items that other ranks have left to this one.
    """
    paths = _paths(state)
    if planner.flatten_state_dict:
        nodes = {name: paths[tuple(path)] for name, path in planner.mappings.items()}
    else:
        nodes = {name: paths[(name,)] for name in planner.state_dict}
    return Known(seen.marks, plan, row, local, written, shared, nodes)


def drop_cached(planner: SavePlanner) -> None:
    """Drops what a planner has cached: of a failed planning its coordinator has kept the global plan.

    It would take that for the plan of the next save whose ranks all say "unchanged".
    """
    key = getattr(planner, "_cached_plans_key", None)
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.pop(key, None)


class Cache:
    """The plans that the saves over a set of ranks have followed last; used by several threads.

    The coordinator has a plan as long as any rank holds it: may follow it in a next save, or does so in a save in flight.
    At the end of each save every rank says what it holds. A rank that does not hold a plan then cannot come to follow it
    any more, as it learns of plans only in these exchanges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[Known] = []  # the youngest last
        self._held: list[weakref.ref[Known]] = []  # also by saves in flight
        self._of_ranks: frozenset[str] = frozenset()  # plans that the ranks hold, as they have said last
        self._plans: dict[str, Plan] = {}  # of the coordinator, which is asked for those of all ranks

    def find(self, seen: Look) -> Known | None:
        """The plan for a state of this structure."""
        with self._lock:
            for known in reversed(self._known):
                if known.marks == seen.marks:
                    self._known = [*(k for k in self._known if k is not known), known]
                    return known
        return None

    def add(self, known: Known | None, plan: Plan | None) -> None:
        """Keeps this rank's part of a plan and, on the coordinator, the plan of all ranks."""
        with self._lock:
            if known is not None:
                kept = [k for k in self._known if k.marks != known.marks]
                self._known = [*kept[1 - _KNOWN_MAX :], known]
                self._held.append(weakref.ref(known))
            if plan is not None:
                self._plans[plan.id] = plan
            self._drop()

    def held(self) -> frozenset[str]:
        """Ids of the plans that this rank may follow in a next save, or that its saves in flight follow."""
        with self._lock:
            return self._own()

    def keep(self, of_ranks: frozenset[str], plan: Plan | None) -> None:
        """Drops the plans that no rank holds any more, on the coordinator.

        Args:
            of_ranks: what all ranks hold, see `held`.
            plan: a new one, of which the ranks are told next.
        """
        with self._lock:
            self._of_ranks = of_ranks
            if plan is not None:
                self._plans[plan.id] = plan
                self._of_ranks |= {plan.id}
            self._drop()

    def _own(self) -> frozenset[str]:
        self._held = [ref for ref in self._held if ref() is not None]
        return frozenset(known.plan for ref in self._held if (known := ref()) is not None)

    def _drop(self) -> None:
        needed = self._of_ranks | self._own()
        self._plans = {i: plan for i, plan in self._plans.items() if i in needed}

    def forget(self) -> None:
        """Has each rank write all of its items in the next save, from which a new plan follows. Saves in flight keep theirs."""
        with self._lock:
            self._known = []

    def plans(self) -> dict[str, Plan]:
        """By id, as far as this rank has them."""
        with self._lock:
            return dict(self._plans)
