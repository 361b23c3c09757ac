"""New tensors and what stands around them, from the description of a state."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from holdfast import _dtypes, _state, _unpickle
from holdfast._pieces import Loading, Source
from holdfast.errors import Error

if TYPE_CHECKING:
    from holdfast.loading import Checkpoint


def _view(memory: torch.Tensor, node: _state.Node) -> torch.Tensor:
    """The tensor of a node over the memory of what it is stored in."""
    dtype = _dtypes.torch_dtype(node["dtype"])
    offset = node.get("offset", 0)
    if offset % dtype.itemsize:
        raise Error(
            "DATA_LOSS",
            f"load {node['stored']}: a {node['dtype']} begins at byte {offset} of it, where none can",
        )
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(
        memory.untyped_storage(), offset // dtype.itemsize, tuple(node["shape"]),
        _state.stride_of(node),
    )


def _marked(tensor: torch.Tensor, node: _state.Node) -> torch.Tensor:
    """A tensor as the parameter, or with the need of a gradient, that its node tells of."""
    requires_grad = bool(node.get("requires_grad"))
    if node.get("parameter") and not isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


class Builder:
    """Plans new tensors; what `plan` returns makes the value once the bytes have been read."""

    def __init__(self, checkpoint: Checkpoint, loading: Loading, allow: tuple[Any, ...] = (),
                 device: torch.device | None = None) -> None:
        self._checkpoint = checkpoint
        self._loading = loading
        self._allow = allow
        self._device = device  # of tensors, whatever they were saved from; scalars stay
        self._memory: dict[tuple[str, torch.device], torch.Tensor] = {}

    def _storage(self, name: str, device: torch.device) -> torch.Tensor:
        key = (name, device)
        if key not in self._memory:
            entry = self._checkpoint._entries[name]
            memory = torch.empty(entry.nbytes, dtype=torch.uint8, device=device)
            self._memory[key] = memory
            self._loading.add(
                Source(self._checkpoint._reader, name, 0, torch.uint8, (entry.nbytes,), (1,)), memory
            )
        return self._memory[key]

    def _plain(self, node: _state.Node) -> torch.Tensor:
        device = self._checkpoint._location(node["device"])
        if self._device is not None and node["shape"]:
            device = self._device
        return _view(self._storage(node["stored"], device), node)

    def tensor(self, node: _state.Node) -> torch.Tensor:
        """A tensor that has its bytes after the reading, of no class of its own."""
        return _marked(self._plain(node), node)

    def plan(self, node: _state.Node, path: _state.Path) -> Callable[[], Any]:
        kind = node["kind"]
        if _state.is_scalar(node):
            value = _state.scalar_of(node)
            return lambda: value
        if kind == "tensor":
            if "class" in node:
                tensor = _marked(self._plain(node).as_subclass(self._class(node, path)), node)
            else:
                tensor = self.tensor(node)
            return lambda: tensor
        if kind == "size":
            return lambda: torch.Size(node["items"])
        if kind in ("dict", "ordered_dict"):
            items = [
                (_state.key_of(k), self.plan(n, (*path, str(_state.key_of(k)))))
                for k, n in node["items"]
            ]

            def make_dict() -> Any:
                made: dict[Any, Any] = {} if kind == "dict" else _state.OrderedDict()
                made.update((k, item()) for k, item in items)
                _state.put_metadata(node, made)
                return made

            return make_dict
        if kind in ("list", "tuple", "set", "frozenset"):
            plans = [self.plan(n, (*path, str(i))) for i, n in enumerate(node["items"])]
            make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
            return lambda: make(p() for p in plans)
        if kind in ("namedtuple", "dataclass"):
            fields = [
                (f, self.plan(n, (*path, f)))
                for f, n in zip(node["fields"], node["items"], strict=True)
            ]
            made = self._class(node, path)
            return lambda: made(**{f: p() for f, p in fields})
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
            return lambda: _marked(_sparse(node, {n: p() for n, p in parts.items()}), node)
        if kind == "subclass":
            inner = {n: self.plan(t, (*path, n)) for n, t in node["inner"].items()}

            def make_subclass() -> Any:
                cls, context, shape, stride = self._object(node["context"])
                parts = {n: p() for n, p in inner.items()}
                return _marked(cls.__tensor_unflatten__(parts, context, shape, stride), node)

            return make_subclass
        if kind == "object":
            return lambda: self._object(node["name"])
        raise Error("UNIMPLEMENTED", f"load {_state.join(path)}: unknown kind {kind!r}")

    def _object(self, name: str) -> Any:
        return self._checkpoint._object(self._loading, name, self._allow)

    def _class(self, node: _state.Node, path: _state.Path) -> Any:
        name, kind = node["class"], node["kind"]
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
        return cls


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
