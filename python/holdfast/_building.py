"""New tensors and what stands around them, from the description of a state."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from holdfast import _dtypes, _kinds, _plain, _state, _tensor_kinds, _unpickle
from holdfast._pieces import Loading
from holdfast._plain import Node
from holdfast.errors import Error

if TYPE_CHECKING:
    from holdfast.loading import Checkpoint


class Builder:
    """Plans new tensors; what `value` returns makes the value once the bytes have been read.

    Args:
        allow: classes that may be made.
        device: of tensors, whatever they were saved from; scalars stay.
        parameters: DTensors whose mesh those of equal layout get.
    """

    def __init__(self, checkpoint: Checkpoint, loading: Loading, allow: tuple[Any, ...] = (),
                 device: torch.device | None = None,
                 parameters: list[torch.Tensor] | None = None) -> None:
        self._checkpoint = checkpoint
        self._loading = loading
        self._allow = allow
        self._allowed = {_plain.name_of(a) for a in allow}
        self._device = device
        self._parameters = parameters
        self._memory: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._queue: deque[tuple[int, str]] = deque()
        self._deep: set[int] = set()
        self._made: dict[int, Any] = {}

    def value(self, node: Node, path: str) -> Callable[[], Any]:
        """Plans a value, with what is nested deeply in it."""
        root = self.plan(node, path)
        plans = []
        while self._queue:
            index, below = self._queue.popleft()
            plans.append((index, self.plan(self._checkpoint.deep[index], below)))

        def make() -> Any:
            for index, plan in reversed(plans):  # the deepest first
                self._made[index] = plan()
            return root()

        return make

    # ---- What a kind's `build` calls.

    def plan(self, node: Node, path: str) -> Callable[[], Any]:
        return _kinds.kind_of_node(node, path).build(self, node, path)

    def deep(self, index: int, path: str) -> Callable[[], Any]:
        if index in self._deep:
            raise Error("DATA_LOSS", f"load {path or 'state'}: its description contains itself")
        self._deep.add(index)
        self._queue.append((index, path))
        return lambda: self._made[index]

    def tensor(self, node: Node) -> torch.Tensor:
        """A tensor that has its bytes after the reading, of no class of its own."""
        device = self._checkpoint.location(node["device"])
        if self._device is not None and node["shape"]:
            device = self._device
        key = node["stored"], device
        if key not in self._memory:
            self._checkpoint.require_alike(node["stored"])
            nbytes = self._checkpoint.entry_bytes(node["stored"])
            dtype = _dtypes.torch_dtype(node["dtype"])
            # All of the entry, or bytes of which it is a view.
            whole = not {"offset", "stride"} & node.keys() \
                and _state.elements_of(node) * dtype.itemsize == nbytes
            memory = _empty(node["shape"], dtype, device) if whole else _empty([nbytes], torch.uint8, device)
            self._memory[key] = memory
            self._loading.add_whole(self._checkpoint.reader, node["stored"], memory)
            if whole:
                return _tensor_kinds.marked(memory, node)
        return _tensor_kinds.marked(_view(self._memory[key], node), node)

    def key(self, node: Node, path: str) -> Any:
        return _plain.key_of(node, lambda name: self.class_of(name, path, "enum"))

    def differs(self, path: str, shards: bool) -> Error:
        return self._checkpoint.differs(path, shards)

    def object(self, name: str) -> Any:
        return self._checkpoint.object(self._loading, name, self._allow)

    def factory(self, name: str | None, path: str) -> Any:
        """What a defaultdict calls for a key that it lacks."""
        if name is None:
            return None
        return _plain.imported(name) if _kinds.is_listed_factory(name) else self.class_of(name, path, "factory")

    def class_of(self, name: str, path: str, kind: str) -> Any:
        if name not in self._allowed:
            safe = _unpickle.safe_globals()
            if name.replace(":", ".") in safe:
                return safe[name.replace(":", ".")]
            raise Error(
                "PERMISSION_DENIED",
                f"load {path or 'state'}: it is a {kind}, {name}; pass allow=[{name!r}] to have it "
                "made again, or load into an existing one",
            )
        return _plain.imported(name)

    def like(self, node: Node, path: str) -> torch.Tensor | None:
        """A parameter that lies over the ranks as a DTensor's node says; None: it becomes a plain tensor."""
        if self._parameters is None:
            return None
        for parameter in self._parameters:
            layout = _tensor_kinds.layout_of(parameter)
            if all(layout[key] == node[key] for key in layout):
                return parameter
        raise Error(
            "FAILED_PRECONDITION",
            f"load {path}: it was saved as a DTensor, and no parameter of the target lies over the ranks "
            "like it; load it into the layout that it was saved in, or save with holdfast.dcp",
        )


def _empty(shape: list[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except NotImplementedError:  # with deterministic algorithms PyTorch fills it, but not in every dtype
        memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
        return memory.view(dtype).view(shape)


def _view(memory: torch.Tensor, node: Node) -> torch.Tensor:
    """The tensor of a node over the memory of what it is stored in."""
    offset, shape, stride = _state.place_of(node, memory.nbytes)
    dtype = _dtypes.torch_dtype(node["dtype"])
    tensor = _empty([0], dtype, memory.device)
    return tensor.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, stride)
