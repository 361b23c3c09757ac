"""Reading into what is there: a state's tensors, and what they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from holdfast import _devices, _dtypes, _state
from holdfast._building import Builder
from holdfast._pieces import Loading, Source
from holdfast.errors import Error

if TYPE_CHECKING:
    from holdfast.loading import Checkpoint


class Filling:
    """Reads into what is there. First everything is compared, then read, then put in place."""

    def __init__(self, checkpoint: Checkpoint, loading: Loading, strict: bool,
                 allow: tuple[Any, ...]) -> None:
        self._checkpoint = checkpoint
        self._loading = loading
        self._strict = strict
        self._allow = allow
        self._after: list[Callable[[], None]] = []

    def run(self) -> None:
        self._loading.run()
        for act in self._after:
            act()

    def _complain(self, path: _state.Path, what: str) -> Error:
        return Error("INVALID_ARGUMENT", f"load {_state.join(path)}: {what}")

    def _compare(self, saved: Any, there: Any, path: _state.Path, has: str = "is") -> None:
        if saved != there:
            raise self._complain(path, f"it {has} {saved}, the target {there}")

    def _compare_layouts(self, node: _state.Node, target: torch.Tensor, path: _state.Path) -> None:
        """What a rank has of a DTensor goes only to where the same elements of it belong."""
        there = _state.layout_of(target)
        if node["kind"] == "dtensor":
            saved = node
        elif there["placements"] and "shape" in node:
            saved = {"shape": node["shape"], "placements": [], "mesh": [], "coordinate": []}
        else:
            return
        if saved["shape"] != there["shape"] or _state.share_of(saved) != _state.share_of(there):
            raise self._complain(
                path,
                f"it was saved as {_described(saved)}, the target is {_described(there)}; load it into the "
                "layout that it was saved in, or save with holdfast.dcp, which loads into any",
            )

    def fill(self, node: _state.Node, target: Any, path: _state.Path) -> Any:
        """Plans the filling of `target`; returns what belongs in its place."""
        kind = node["kind"]
        if isinstance(target, torch.Tensor):
            self._compare_layouts(node, target, path)
            self._loading.changes(target)  # a wrapper counts its changes apart from what it wraps
            if kind == "tensor":
                self._tensor(node, getattr(target, "_local_tensor", target), path)
                return target
            if kind == "dtensor":
                self._inner(node["local"], getattr(target, "_local_tensor", target), path)
                return target
            if kind == "sparse":
                return self._sparse(node, target, path)
            if kind == "subclass" and _state.class_name(target) == node["class"]:
                return self._subclass(node, target, path)
        if kind == "ndarray" and type(target).__name__ == "ndarray" and target.flags.writeable:
            self._tensor(node["tensor"], torch.from_numpy(target), path)
            return target
        if kind == "tensor" and not isinstance(target, torch.Tensor):
            array = _state.foreign_array(target)
            if array is not None:
                self._tensor(node, array, path)
                return target
        if kind == "stateful" and _state.is_stateful(target):
            return self._stateful(node, target, path)
        if kind == "stateful" and isinstance(target, Mapping):
            return self.fill(node["state"], target, path)
        if kind in ("dict", "ordered_dict"):
            if isinstance(target, torch.nn.Module):
                return self._module(node, target, path)
            if isinstance(target, Mapping):
                self._mapping(node, target, path)
                return target
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
        builder = Builder(self._checkpoint, self._loading, self._allow, device)
        return _Later(builder.plan(node, path))

    def _mapping(self, node: _state.Node, target: Any, path: _state.Path) -> bool:
        """Fills what a mapping holds; returns whether any of it is made anew and put there."""
        saved = {_state.key_of(k): n for k, n in node["items"]}
        self._compare_keys(set(saved), set(target), path)
        values = {
            k: self.fill(n, target[k], (*path, str(k))) for k, n in saved.items() if k in target
        }
        later = {k: v for k, v in values.items() if isinstance(v, _Later)}

        def assign() -> None:
            for k, v in later.items():
                target[k] = v.value()
            _state.put_metadata(node, target)

        self._after.append(assign)
        return bool(later)

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
        if _state.is_of_other_version(node, there):  # only the module can convert it
            value = self._new(node, path)
            self._after.append(
                lambda: _ignore(module.load_state_dict(value.value(), strict=self._strict))
            )
            return module
        anew = self._mapping(node, there, path)
        if anew or any(not isinstance(v, torch.Tensor) for v in there.values()):  # extra state
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
        self._compare(node["shape"], list(target.shape), path, "has shape")
        self._compare(node["dtype"], _dtypes.torch_name(target.dtype), path)
        self._compare("strided", _layout(target), path)
        _devices.device_of(target.device)  # where nothing can be read to, it says so
        shape, stride = tuple(node["shape"]), _state.stride_of(node)
        target = target.detach()
        plain = type(target) is torch.Tensor
        if plain and target.stride() == stride and _is_dense(target):
            # Of one order in memory, whichever it is: one run of it.
            shape, stride = (_state.span_of(target) // target.itemsize,), (1,)
            target = target.as_strided(shape, stride)
        elif any(s == 0 and n > 1 for s, n in zip(target.stride(), target.shape, strict=True)):
            raise self._complain(
                path, "the target is expanded, so that elements share memory; load into its contiguous()"
            )
        source = Source(
            self._checkpoint._reader, node["stored"], node.get("offset", 0),
            target.dtype, shape, stride,
        )
        self._loading.add(source, target)

    def _inner(self, node: _state.Node, target: torch.Tensor, path: _state.Path) -> None:
        """Fills a part of a tensor, in whose place no other can be put."""
        if self.fill(node, target, path) is not target:
            name = _state.class_name(target)
            raise self._complain(path, f"it is a {node['kind']} that the target, a {name}, cannot hold")

    def _subclass(self, node: _state.Node, target: Any, path: _state.Path) -> Any:
        """Fills what it wraps; it is made anew where it differs in more than that."""
        names, context = target.__tensor_flatten__()
        allow = (*self._allow, type(target))
        saved = self._checkpoint._object(self._loading, node["context"], allow)
        self._compare(list(saved[2]), list(target.shape), path, "has shape")
        if set(names) != set(node["inner"]) or (context, target.stride()) != (saved[1], saved[3]):
            return self._new(node, path)
        for name, inner in node["inner"].items():
            self._inner(inner, getattr(target, name), (*path, name))
        return target

    def _sparse(self, node: _state.Node, target: torch.Tensor, path: _state.Path) -> torch.Tensor:
        """Gives it the elements that were saved, which may be more or fewer than it has."""
        self._compare(node["layout"], _layout(target), path)
        self._compare(node["shape"], list(target.shape), path, "has shape")
        dtype = node["parts"]["values"]["dtype"]
        self._compare(dtype, _dtypes.torch_name(target.dtype), path)
        later = self._new(node, path, target.device)

        def put() -> None:
            value = later.value()
            with torch.no_grad():
                target.resize_as_sparse_(value)
                target.copy_(value)

        self._after.append(put)
        return target


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


def _layout(tensor: torch.Tensor) -> str:
    return str(tensor.layout).removeprefix("torch.")


def _described(layout: _state.Node) -> str:
    if not layout["placements"]:
        return f"a tensor of shape {layout['shape']}"
    return (
        f"a DTensor of shape {layout['shape']}, placed ({', '.join(layout['placements'])}) on a mesh of "
        f"{layout['mesh']} with this rank at {layout['coordinate']}"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether what it has in memory is one run of elements."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
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
