"""Reading into what is there: a state's tensors, and what they are in."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from holdfast import _devices, _dtypes, _kinds, _runtime, _state, _tensor_kinds
from holdfast._building import Builder
from holdfast._kinds import Later, resolved
from holdfast._pieces import Loading, Source
from holdfast._plain import Node
from holdfast.errors import Error

if TYPE_CHECKING:
    from holdfast.loading import Checkpoint


class Filling:
    """Reads into what is there. First everything is compared, then read, then put in place.

    A load that is not `partial` changes a target when nothing can fail any more. It proves the bytes
    before it reads them into place. What may refuse its state, it loads first, from new memory or
    with copies of the old tensors at hand.
    """

    def __init__(self, checkpoint: Checkpoint, loading: Loading, strict: bool,
                 allow: tuple[Any, ...], partial: bool) -> None:
        self.strict = strict
        self._checkpoint = checkpoint
        self._first = loading  # new memory, and tensors that can be put back
        self._in_place = loading if partial else loading.beside()
        self._allow = allow
        self._partial = partial
        self._refusable = False
        self._old: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        # What is to be done once all bytes are there, and whether it may be refused: of the root,
        # then of each deep value.
        self._acts: list[list[tuple[bool, Callable[[], Any]]]] = [[]]
        self._queue: deque[tuple[int, Any, str, bool]] = deque()
        self._deep: set[int] = set()
        self._made: dict[int, Any] = {}

    def run(self, node: Node, target: Any) -> Any:
        """Fills `target`; returns what belongs in its place."""
        result = self.fill(node, target, "")
        while self._queue:
            index, below, path, self._refusable = self._queue.popleft()
            self._acts.append([])
            value = self.fill(self._checkpoint.deep[index], below, path)
            self.after(functools.partial(self._keep_made, index, value))
        if not self._partial:
            self._in_place.check(_runtime.fits_in_page_cache)
            self._old = [(tensor, tensor.detach().clone()) for tensor, _ in self._old]
        try:
            self._first.run()
            self._act(True)
        except BaseException:
            self._put_back()
            raise
        self._old.clear()
        if not self._partial:
            self._in_place.run()
        self._act(False)
        return resolved(result)

    def _act(self, refusable: bool) -> None:
        for acts in reversed(self._acts):  # the deepest first
            for may_be_refused, act in acts:
                if may_be_refused == refusable:
                    act()

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor, old in self._old:
                if old is not None:
                    tensor.copy_(old)

    def _keep_made(self, index: int, value: Any) -> None:
        self._made[index] = resolved(value)

    # ---- What a kind's `fill` calls.

    @contextlib.contextmanager
    def refusable(self, may_refuse: bool = True) -> Iterator[None]:
        """What is filled and done inside may end with a refusal. The tensors then get their old values."""
        before = self._refusable
        self._refusable |= may_refuse and not self._partial
        try:
            yield
        finally:
            self._refusable = before

    def after(self, act: Callable[[], Any]) -> None:
        """Something to be done once all bytes are there."""
        self._acts[-1].append((self._refusable, act))

    def keep(self, tensors: Iterable[Any]) -> None:
        """Keeps the old values of tensors that an act may change before it is refused."""
        if self._refusable:
            there = (tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and not is_lazy(tensor))
            self._old += [(tensor.detach(), None) for tensor in there]

    def changes(self, target: torch.Tensor) -> None:
        """Notes a tensor whose values change."""
        self._loading.changes(target)

    @property
    def _loading(self) -> Loading:
        """What reads into a target."""
        return self._first if self._refusable else self._in_place

    def complaint(self, path: str, what: str) -> Error:
        return Error("INVALID_ARGUMENT", f"load {path or 'state'}: {what}")

    def compare(self, saved: Any, there: Any, path: str, has: str = "is") -> None:
        if saved != there:
            raise self.complaint(path, f"it {has} {saved}, the target {there}")

    def complain_of_keys(self, missing: list[str], unknown: list[str], path: str) -> None:
        parts = []
        if missing:
            parts.append("not in the target: " + _some(missing))
        if unknown:
            parts.append("not in the checkpoint: " + _some(unknown))
        raise self.complaint(path, "; ".join(parts) + " (strict=False loads what both have)")

    def fill(self, node: Node, target: Any, path: str) -> Any:
        """Plans the filling of `target`; returns what belongs in its place."""
        return _kinds.kind_of_node(node, path).fill(self, node, target, path)

    def deep(self, index: int, target: Any, path: str) -> Any:
        if index in self._deep:
            raise Error("DATA_LOSS", f"load {path or 'state'}: its description contains itself")
        self._deep.add(index)
        self._queue.append((index, target, path, self._refusable))
        return Later(lambda: self._made[index])

    def new(self, node: Node, path: str, device: torch.device | None = None, like: Any = None) -> Later:
        """A new value.

        Args:
            device: of its tensors.
            like: an optimizer, whose parameters' device and meshes its tensors get.
        """
        parameters = None
        if like is not None:
            parameters = [p for g in getattr(like, "param_groups", ()) for p in g.get("params", ())]
            device = parameters[0].device if parameters else None
            parameters = [p for p in parameters if hasattr(p, "placements")]
        builder = Builder(self._checkpoint, self._first, self._allow, device, parameters)
        return Later(builder.value(node, path))

    def differs(self, path: str, shards: bool) -> Error:
        return self._checkpoint.differs(path, shards)

    def object(self, name: str, cls: type) -> Any:
        """A pickled object that may have `cls` in it."""
        return self._checkpoint.object(self._first, name, (*self._allow, cls))

    def tensor(self, node: Node, target: torch.Tensor, path: str) -> None:
        """Reads a tensor node into a strided tensor."""
        dtype = _dtypes.torch_name(target.dtype)
        if target.layout is not torch.strided or node["dtype"] != dtype or node["shape"] != list(target.shape):
            self.compare(node["shape"], list(target.shape), path, "has shape")
            self.compare(node["dtype"], dtype, path)
            self.compare("strided", str(target.layout).removeprefix("torch."), path)
        if target.is_meta:
            raise self.complaint(path, _tensor_kinds.NO_MEMORY)
        self._checkpoint.require_alike(node["stored"])
        reader = self._checkpoint.reader
        target = target.detach()
        if self._refusable:
            self.keep([target])
        nbytes = self._checkpoint.entry_bytes(node["stored"])
        contiguous = type(target) is torch.Tensor and target.is_contiguous()
        if contiguous and not {"offset", "stride"} & node.keys() and not target.is_neg() \
                and not target.is_conj() and target.nbytes == nbytes:
            self._loading.add_whole(reader, node["stored"], target)
            self.changes(target)
            return
        _devices.device_of(target.device)  # where nothing can be read to, it says so
        offset, shape, stride = _state.place_of(node, nbytes)
        if type(target) is torch.Tensor and target.stride() == stride and _is_dense(target):
            # Of one order in memory, whichever it is: one run of it.
            shape, stride = (_tensor_kinds.span_of(target) // target.itemsize,), (1,)
            target = target.as_strided(shape, stride)
        elif _shares(target) and (target.stride() != stride or 0 in stride):
            raise self.complaint(
                path, "the target is expanded or overlaps itself, so that elements share memory; load into its contiguous()"
            )
        source = Source(reader, node["stored"], offset, target.dtype, shape, stride)
        self._loading.add(source, target)


def _some(keys: list[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _shares(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory: along a dimension, by a step that does not pass over those of smaller steps."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


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
