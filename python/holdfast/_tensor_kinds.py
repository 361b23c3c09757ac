"""The kinds of nodes that consist of tensors: plain ones, arrays, DTensors, sparse, subclasses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from holdfast import _dtypes, _records
from holdfast._kinds import BY_NAME, Kind, Later, container_kind, under
from holdfast._plain import Node, class_name
from holdfast.errors import Error

# Tensors without a class of their own.
PLAIN_TENSORS = frozenset([torch.Tensor, torch.nn.Parameter])

QUANTIZED = "quantized tensors are not supported; save int_repr(), scale and zero point instead"
NESTED = "nested tensors of the strided layout are not supported; save unbind(), or use torch.jagged"

NO_MEMORY = "the target is on the meta device and has no memory; call to_empty(device=...) of the model first"


def why_no_data(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no elements to save; None if it has."""
    if is_lazy(tensor):
        return "a lazy module's parameter or buffer has no shape before the first forward; call the module once"
    if tensor.is_meta:
        return "a tensor on the meta device has no data; give it values, or leave it out of the state"
    return why_no_storage(tensor)


def why_no_storage(tensor: torch.Tensor) -> str | None:
    """Why the memory of a tensor ends before its elements; None if it does not, or wraps others that have it."""
    if is_lazy(tensor) or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout != torch.strided or tensor.is_nested or not tensor.numel() or tensor._is_zerotensor():
            return None
        try:
            there = tensor.untyped_storage().nbytes()
        except (NotImplementedError, RuntimeError):  # of a transform, such as vmap
            return None
        needed = tensor.storage_offset() * tensor.itemsize + span_of(tensor)
    if needed <= there:
        return None
    return (
        f"its storage has {there} of the {needed} bytes that it needs, because it was freed or resized, as FSDP does "
        "with parameters that are not gathered; save a state dict that FSDP makes, or give it memory first"
    )


def _why_unseen(tensor: torch.Tensor, error: Exception) -> str:
    return f"a {class_name(tensor)} lets nothing look at it: {error!r}; save what it wraps"


def _why_no_node(tensor: torch.Tensor) -> str | None:
    """Why a tensor with elements cannot be saved; None if it can."""
    if tensor.is_quantized:
        return QUANTIZED
    if tensor.is_nested:
        return NESTED
    if type(tensor) not in PLAIN_TENSORS and tensor.numel() and not tensor.data_ptr():
        return (
            f"a {class_name(tensor)} has no memory of its own and no __tensor_flatten__ that says "
            "what it wraps; save that instead"
        )
    return None


def _flattened(tensor: Any) -> tuple[list[str], Any] | None:
    """Names of the tensors that it wraps, and what else it is made of, if its class says so."""
    if type(tensor) in PLAIN_TENSORS or not hasattr(tensor, "__tensor_flatten__"):
        return None
    return tensor.__tensor_flatten__()


def sparse_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a sparse one by their names; none if its layout is not known."""
    if tensor.layout == torch.sparse_coo:
        # Not coalesced here: that would change what is loaded.
        return {"indices": tensor._indices(), "values": tensor._values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = ("ccol_indices", "row_indices", "values")
    else:
        return {}
    return {name: getattr(tensor, name)() for name in names}


def foreign_array(value: Any) -> torch.Tensor | None:
    """The memory of another framework's array (DLPack) as a tensor; None if it is none."""
    if not (hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")):
        return None
    try:
        return torch.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):  # a dtype or a device that torch lacks
        return None


def local_of(tensor: Any) -> Any:
    """The shard of a DTensor that this rank has; None for any other tensor."""
    return getattr(tensor, "_local_tensor", None) if hasattr(tensor, "placements") else None


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def memory_of(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Begin and end of the memory of a tensor, or of each that it consists of."""
    local = local_of(tensor)
    if local is not None:
        yield from memory_of(local)
    elif (flattened := _flattened(tensor)) is not None:
        for name in flattened[0]:
            yield from memory_of(getattr(tensor, name))
    elif tensor.layout != torch.strided:
        for part in sparse_parts(tensor.detach()).values():
            yield from memory_of(part)
    elif tensor.numel():
        yield tensor.data_ptr(), tensor.data_ptr() + span_of(tensor)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A strided tensor whose memory has its elements in their order: itself, or a copy of a view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    # The new dimension has stride 1. A contiguous tensor of one element, or none, may have any other, and view refuses that.
    return tensor.unsqueeze(-1).view(torch.uint8).reshape(-1)


_memcmp = ctypes.CDLL(None).memcmp  # torch.equal looks at one byte at a time
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_CHUNK = 64 << 20  # an interrupt waits for no more


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of `as_bytes`, on the CPU, are equal."""
    if len(a) != len(b):
        return False
    if not PLAIN_TENSORS.issuperset({type(a), type(b)}):  # it may have no memory of its own
        return torch.equal(a, b)
    x, y = a.data_ptr(), b.data_ptr()
    return all(_memcmp(x + at, y + at, min(_CHUNK, len(a) - at)) == 0 for at in range(0, len(a), _CHUNK))


def _marks(value: torch.Tensor) -> dict[str, Any]:
    """What a tensor is beside its elements."""
    return {
        **({} if type(value) in PLAIN_TENSORS else {"class": class_name(value)}),
        **({"parameter": True} if isinstance(value, torch.nn.Parameter) else {}),
        **({"requires_grad": True} if value.requires_grad else {}),
    }


def marked(tensor: torch.Tensor, node: Node) -> torch.Tensor:
    """A tensor as the parameter, or with the need of a gradient, that its node says."""
    requires_grad = bool(node.get("requires_grad"))
    if node.get("parameter") and not isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


# ---- How a tensor lies over the ranks.


def layout_of(tensor: torch.Tensor) -> Node:
    """A DTensor's placements on its mesh, and where in that this rank is; a plain tensor has none."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return {"shape": list(tensor.shape), "placements": [], "mesh": [], "coordinate": []}
    return {
        "shape": list(tensor.shape),
        "placements": [str(p) for p in tensor.placements],  # type: ignore[attr-defined]
        "mesh": list(mesh.shape),
        "coordinate": list(mesh.get_coordinate() or [None] * mesh.ndim),
    }


def share_of(layout: Node) -> list[tuple[str, int, int]]:
    """Which share of the tensor a rank has: placements that divide it, among how many, and its place.

    Of tensors of one shape, equal shares are the same elements.
    """
    axes = zip(layout["placements"], layout["mesh"], layout["coordinate"], strict=True)
    return [axis for axis in axes if axis[0] != "R" and axis[1] > 1]


def _described(layout: Node) -> str:
    if not layout["placements"]:
        return f"a tensor of shape {layout['shape']}"
    return (
        f"a DTensor of shape {layout['shape']}, placed ({', '.join(layout['placements'])}) on a mesh of "
        f"{layout['mesh']} with this rank at {layout['coordinate']}"
    )


def _compare_layouts(filling: Any, node: Node, target: torch.Tensor, path: str) -> None:
    """What a rank has of a DTensor goes only to where the same elements of it belong."""
    if node["kind"] == "tensor" and type(target) in PLAIN_TENSORS:
        return
    there = layout_of(target)
    if node["kind"] == "dtensor":
        saved = node
    elif there["placements"] and "shape" in node:
        saved = {"shape": node["shape"], "placements": [], "mesh": [], "coordinate": []}
    else:
        return
    if saved["shape"] != there["shape"] or share_of(saved) != share_of(there):
        raise filling.complaint(
            path,
            f"it was saved as {_described(saved)}, the target is {_described(there)}; load it into the "
            "layout that it was saved in, or save with holdfast.dcp, which loads into any",
        )


# ---- The kinds.


class _Tensors(Kind):
    """What they have in common: how a target is changed."""

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        if not isinstance(target, torch.Tensor):
            return filling.new(node, path)
        if is_lazy(target):  # its module gives it the shape of what it loads
            return filling.new(node, path, target.device)
        _compare_layouts(filling, node, target, path)
        if type(target) not in PLAIN_TENSORS:
            filling.changes(target)  # a wrapper counts its changes apart from what it wraps
        return self._fill(filling, node, target, path)

    def _fill(self, filling: Any, node: Node, target: torch.Tensor, path: str) -> Any:
        raise NotImplementedError


class Tensor(_Tensors):
    """A strided tensor. Its token is its class, unless that says too little."""

    names = ("tensor",)

    def flatten(self, walk: Any, path: str, value: torch.Tensor) -> None:
        walk.tensors.append(value)
        if type(value) in PLAIN_TENSORS:
            walk.add(type(value))
            return
        attributes = {k: v for k, v in vars(value).items() if _records.is_attribute(k)}
        walk.add((self, type(value), isinstance(value, torch.nn.Parameter), bool(attributes)))
        if attributes:
            walk.objects.append(attributes)

    def node(self, outline: Any, path: str, token: Any) -> Node:
        node = outline.leaf(path)
        if token[3]:
            node["attributes"] = outline.name_object(path + "#attributes")
        return node

    def node_of(self, path: str, value: torch.Tensor) -> Node:
        """The node, but for where it is stored.

        Raises:
            Error: INVALID_ARGUMENT for a tensor that cannot be saved.
        """
        try:
            wrong = why_no_data(value) or _why_no_node(value)
        except Exception as error:
            wrong = _why_unseen(value, error)
        if wrong is not None:
            raise Error("INVALID_ARGUMENT", f"save {path or 'state'}: {wrong}")
        return {
            "kind": "tensor",
            **_marks(value),
            "dtype": _dtypes.torch_name(value.dtype),
            "shape": list(value.shape),
            "device": str(value.device),
        }

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        tensor = builder.tensor(node)
        if "class" in node:
            cls = builder.class_of(node["class"], path, "tensor")
            tensor = marked(tensor.detach().as_subclass(cls), node)
            if "attributes" in node:
                _records.put(tensor, path, builder.object(node["attributes"]))
        return lambda: tensor

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        if not isinstance(target, torch.Tensor):
            array = foreign_array(target)
            if array is not None:
                filling.tensor(node, array, path)
                return target
        return super().fill(filling, node, target, path)

    def _fill(self, filling: Any, node: Node, target: torch.Tensor, path: str) -> Any:
        local = local_of(target)
        filling.tensor(node, target if local is None else local, path)
        if "attributes" in node and class_name(target) == node["class"]:
            attributes = filling.object(node["attributes"], type(target))
            filling.after(lambda: _records.put(target, path, attributes))
        return target

    def fits(self, node: Node, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and list(value.shape) == node["shape"]
            and _dtypes.torch_name(value.dtype) == node["dtype"]
        )


class Array(Kind):
    """A numpy array over a tensor's memory."""

    names = ("ndarray",)

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
        walk.add((self,))
        walk.inside(value, path, tensor)

    def node(self, outline: Any, path: str, token: Any) -> Node:
        return {"kind": "ndarray", "tensor": outline.node(path)}

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        yield path, node["tensor"]

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        tensor = builder.tensor(node["tensor"])
        return lambda: tensor.numpy()

    def fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        if type(target).__name__ != "ndarray" or not target.flags.writeable:
            return filling.new(node, path)
        filling.tensor(node["tensor"], torch.from_numpy(target), path)
        return target


class Foreign(Kind):
    """Another framework's array, described as a tensor."""

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        walk.inside(value, path, foreign_array(value))


class Sharded(_Tensors):
    """A DTensor: this rank's shard, and how it lies over the ranks."""

    names = ("dtensor",)

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        layout = layout_of(value)
        walk.add((self, *(tuple(part) for part in layout.values())))
        walk.inside(value, path, local_of(value))

    def node(self, outline: Any, path: str, token: Any) -> Node:
        shape, placements, mesh, coordinate = map(list, token[1:])
        return {"kind": "dtensor", "local": outline.node(path), "shape": shape,
                "placements": placements, "mesh": mesh, "coordinate": coordinate}  # fmt: skip

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        yield path, node["local"]

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        # Without its mesh it cannot be made; the local shard is what this rank has.
        local = builder.plan(node["local"], path)
        like = builder.like(node, path)
        return local if like is None else lambda: _distributed(local(), like)

    def _fill(self, filling: Any, node: Node, target: torch.Tensor, path: str) -> Any:
        local = local_of(target)
        _fill_inner(filling, node["local"], target if local is None else local, path)
        return target

    def fits(self, node: Node, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and list(value.shape) == node["shape"]


def _distributed(local: torch.Tensor, like: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _fill_inner(filling: Any, node: Node, target: torch.Tensor, path: str) -> None:
    """Fills a part of a tensor, in whose place no other can be put."""
    if filling.fill(node, target, path) is not target:
        name = class_name(target)
        raise filling.complaint(path, f"it is a {node['kind']} that the target, a {name}, cannot hold")


class Sparse(_Tensors):
    """A sparse tensor of any layout: its indices and values."""

    names = ("sparse",)

    def flatten(self, walk: Any, path: str, value: torch.Tensor) -> None:
        detached = value.detach()
        parts = sparse_parts(detached)
        if not parts:
            raise Error(
                "INVALID_ARGUMENT",
                f"save {path or 'state'}: tensors of layout {value.layout} are not supported; convert "
                "with to_dense()",
            )
        coalesced = value.layout == torch.sparse_coo and value.is_coalesced()
        layout = str(value.layout).removeprefix("torch.")
        walk.add((self, layout, tuple(value.shape), coalesced, tuple(parts), _marks(value)))
        walk.children(value, path, parts, parts.values())

    def node(self, outline: Any, path: str, token: Any) -> Node:
        _, layout, shape, coalesced, names, marks = token
        parts = {n: outline.node(under(path, n)) for n in names}
        return {"kind": "sparse", "layout": layout, "shape": list(shape), "coalesced": coalesced,
                "parts": parts, **marks}  # fmt: skip

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        return ((under(path, n), part) for n, part in node["parts"].items())

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        plans = {n: builder.plan(part, under(path, n)) for n, part in node["parts"].items()}
        return lambda: marked(_new_sparse(node, {n: plan() for n, plan in plans.items()}, path), node)

    def _fill(self, filling: Any, node: Node, target: torch.Tensor, path: str) -> Any:
        """Gives it the elements that were saved, which may be more or fewer than it has."""
        filling.compare(node["layout"], str(target.layout).removeprefix("torch."), path)
        filling.compare(node["shape"], list(target.shape), path, "has shape")
        dtype = node["parts"]["values"]["dtype"]
        filling.compare(dtype, _dtypes.torch_name(target.dtype), path)
        later: Later = filling.new(node, path, device=target.device)

        def put() -> None:
            value = later.value()
            with torch.no_grad():
                target.resize_as_sparse_(value)
                target.copy_(value)

        filling.after(put)
        return target


def _new_sparse(node: Node, parts: dict[str, torch.Tensor], path: str) -> torch.Tensor:
    """A sparse tensor whose indices are in its shape: torch writes out of bounds for others.

    Raises:
        Error: DATA_LOSS for parts that make no sparse tensor.
    """
    values = parts["values"]
    options: dict[str, Any] = {"device": values.device, "check_invariants": True}
    shape = tuple(node["shape"])
    try:
        if node["layout"] == "sparse_coo":
            options["is_coalesced"] = node["coalesced"]
            return torch.sparse_coo_tensor(parts["indices"], values, shape, **options)
        options["layout"] = getattr(torch, node["layout"])
        rows = "crow_indices" in parts
        compressed = parts["crow_indices" if rows else "ccol_indices"]
        plain = parts["col_indices" if rows else "row_indices"]
        return torch.sparse_compressed_tensor(compressed, plain, values, shape, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise Error("DATA_LOSS", f"load {path or 'state'}: it is no {node['layout']} tensor: {reason}") from error


class Subclass(_Tensors):
    """A tensor that wraps others, and says so by ``__tensor_flatten__``."""

    names = ("subclass",)

    def flatten(self, walk: Any, path: str, value: Any) -> None:
        names, context = value.__tensor_flatten__()
        walk.add((self, tuple(names), _marks(value)))
        walk.objects.append((type(value), context, tuple(value.shape), tuple(value.stride())))
        walk.children(value, path, names, [getattr(value, n) for n in names])

    def node(self, outline: Any, path: str, token: Any) -> Node:
        _, names, marks = token
        context = outline.name_object(path + "#context")
        inner = {n: outline.node(under(path, n)) for n in names}
        return {"kind": "subclass", **marks, "inner": inner, "context": context}

    def children(self, node: Node, path: str) -> Iterator[tuple[str, Node]]:
        return ((under(path, n), inner) for n, inner in node["inner"].items())

    def build(self, builder: Any, node: Node, path: str) -> Callable[[], Any]:
        plans = {n: builder.plan(inner, under(path, n)) for n, inner in node["inner"].items()}
        cls, context, shape, stride = builder.object(node["context"])

        def make() -> Any:
            parts = {n: plan() for n, plan in plans.items()}
            return marked(cls.__tensor_unflatten__(parts, context, shape, stride), node)

        return make

    def _fill(self, filling: Any, node: Node, target: Any, path: str) -> Any:
        """Fills what it wraps; it is made anew where it differs in more than that."""
        if class_name(target) != node["class"]:
            return filling.new(node, path)
        names, context = target.__tensor_flatten__()
        saved = filling.object(node["context"], type(target))
        filling.compare(list(saved[2]), list(target.shape), path, "has shape")
        if set(names) != set(node["inner"]) or (context, target.stride()) != (saved[1], saved[3]):
            return filling.new(node, path)
        for name, inner in node["inner"].items():
            _fill_inner(filling, inner, getattr(target, name), under(path, name))
        return target


TENSOR, ARRAY, FOREIGN, SHARDED, SPARSE, SUBCLASS = (
    Tensor(), Array(), Foreign(), Sharded(), Sparse(), Subclass()
)  # fmt: skip
BY_NAME.update(
    (name, kind) for kind in (TENSOR, ARRAY, SHARDED, SPARSE, SUBCLASS) for name in kind.names
)


def kind_of(path: str, value: Any) -> Kind:
    """The kind of a value that is not plain.

    Raises:
        Error: INVALID_ARGUMENT for a tensor that only holdfast.dcp can save.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "local_shards"):
            raise Error(
                "INVALID_ARGUMENT",
                f"save {path or 'state'}: a {type(value).__name__} is a part of a tensor over several "
                "ranks; save it with holdfast.dcp, or convert it to a DTensor",
            )
        if local_of(value) is not None:
            return SHARDED
        if type(value) not in PLAIN_TENSORS and hasattr(value, "__tensor_flatten__"):
            return SUBCLASS
        try:
            return TENSOR if value.layout == torch.strided else SPARSE
        except Exception as error:
            raise Error("INVALID_ARGUMENT", f"save {path or 'state'}: {_why_unseen(value, error)}") from error
    container = container_kind(value)
    if container.names != ("object",):
        return container
    if any(cls.__module__ == "numpy" and cls.__name__ == "ndarray" for cls in type(value).__mro__):
        return _kind_of_array(path, value, container)
    return container if foreign_array(value) is None else FOREIGN


def _kind_of_array(path: str, value: Any, container: Kind) -> Kind:
    """The kind of a numpy array: `container` for one whose elements torch cannot hold."""
    import numpy

    try:
        torch.from_numpy(numpy.empty(0, value.dtype))
    except (TypeError, ValueError):  # objects, datetimes, strings; a foreign byte order
        return container
    if type(value) not in (numpy.ndarray, numpy.memmap):
        raise Error(
            "INVALID_ARGUMENT",
            f"save {path or 'state'}: a {class_name(value)} may be more than its elements; save "
            "numpy.asarray() of it, and of its mask where it has one",
        )
    shared = not value.flags.writeable or all(stride >= 0 and stride % value.itemsize == 0 for stride in value.strides)
    return ARRAY if shared else container
