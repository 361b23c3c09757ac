"""Which device memory may be copied behind the training: one rule, for plain and for DCP saves.

By default none: every tensor is captured in the order of the current stream, as it is at the call.
`late` names optimizers, whose step alone changes what they own, and further tensors. Two mechanisms
enforce that these do not change too early: a hook in front of every optimizer's step makes the
stream wait for the copies, and a save whose tensors' version counters moved before is failed.
Changes that neither can show are possible (``tensor.data``, a replayed CUDA graph), so that no
tensor is late by default.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast import _tensor_kinds
from holdfast.errors import Error

# Memory that is not late is cloned on its device, up to this much of one save and device; beyond
# it the current stream waits for the copies.
CLONE_MAX = 64 << 20


class Late:
    """Memory that stays unchanged from the call until the save has staged.

    Args:
        named: optimizers and tensors, in dicts, lists and tuples. Of an optimizer: the parameters
            that it owns and its moments. A parameter without ``requires_grad`` is left out: the
            forward pass, not the step, changes it. True: the optimizers of `state`.

    Raises:
        Error: INVALID_ARGUMENT for anything else.
    """

    def __init__(self, named: Iterable[Any] | bool = (), state: Any = None) -> None:
        self._ranges: list[tuple[int, int]] = []
        if named is True:
            named = _optimizers_in(state)
            if not named:
                raise Error(
                    "INVALID_ARGUMENT",
                    "late=True: the state holds no optimizer whose step could be made to wait; pass "
                    "late=[optimizer]",
                )
        for value in named or ():
            self._add(value)
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(self._ranges):
            if merged and begin <= merged[-1][1]:  # tensors that overlap are stored as one
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        self._ranges = merged

    def _add(self, value: Any) -> None:
        if isinstance(value, torch.nn.Parameter) and not value.requires_grad:
            return
        if isinstance(value, torch.Tensor):
            self._ranges.extend(_tensor_kinds.memory_of(value.detach()))
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                if group.get("capturable"):
                    raise Error(
                        "INVALID_ARGUMENT",
                        f"late={type(value).__name__}: with capturable=True its step may be replayed in "
                        "a CUDA graph, which calls no hook; leave it out of late",
                    )
                self._add(group["params"])
            for entry in value.state.values():
                # A step counter, of no dimension, is in memory that other kernels may use.
                self._add([v for v in entry.values() if isinstance(v, torch.Tensor) and v.dim()])
        elif isinstance(value, (dict, list, tuple)):
            for item in value.values() if isinstance(value, dict) else value:
                self._add(item)
        else:
            raise Error(
                "INVALID_ARGUMENT",
                f"late={type(value).__name__}: nothing says when it changes; name the optimizer that "
                "owns the parameters, or tensors",
            )

    def of(self, entries: Sequence[Sequence[torch.Tensor]]) -> list[bool]:
        """Which entries are late, each given as the tensors over its memory.

        An entry in a storage with another that is not late is not late either: changes of the
        other would count as its own, because views of one tensor share a version counter.
        """
        if not self._ranges:
            return [False] * len(entries)
        # What has no memory does not change, and its version counter may be another tensor's.
        filled = [[tensor for tensor in entry if any(_tensor_kinds.memory_of(tensor))] for entry in entries]
        late = [bool(entry) and all(map(self._covers, entry)) for entry in filled]
        early = {
            storage
            for entry, is_late in zip(filled, late, strict=True)
            if not is_late
            for storage in map(_storage, entry)
        }
        return [
            is_late and early.isdisjoint(map(_storage, entry))
            for entry, is_late in zip(entries, late, strict=True)
        ]

    def _covers(self, tensor: torch.Tensor) -> bool:
        if tensor.is_inference() or not _storage(tensor)[1]:  # no version, or no memory of its own
            return False
        return all(self._is_late(begin, end) for begin, end in _tensor_kinds.memory_of(tensor))

    def _is_late(self, begin: int, end: int) -> bool:
        i = bisect.bisect_right(self._ranges, begin, key=lambda r: r[0]) - 1
        return i >= 0 and end <= self._ranges[i][1]


def _storage(tensor: torch.Tensor) -> tuple[torch.device, int]:
    try:
        return tensor.device, tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a subclass that wraps others
        return tensor.device, 0


class Watch:
    """Compares the version counters of late tensors, from the call until a stream waits for them.

    Args:
        tensors: by the names under which they are saved.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._lock = threading.Lock()
        self._versions = [(name, tensor, tensor._version) for name, tensor in tensors]
        self._changed: list[str] = []

    def __bool__(self) -> bool:
        """Whether there is any late tensor."""
        return bool(self._versions or self._changed)

    def release(self) -> None:
        """Ends the watch: what changes the tensors from now on is ordered behind their copies."""
        with self._lock:
            self._changed += [name for name, tensor, version in self._versions if tensor._version != version]
            self._versions = []

    def end(self) -> str:
        """Ends the watch; returns the reason why the copies cannot be trusted, or an empty text."""
        self.release()
        if not self._changed:
            return ""
        some = ", ".join(self._changed[:8]) + (", ..." if len(self._changed) > 8 else "")
        return (
            f"{len(self._changed)} of the tensors that late= names changed before their copies ended "
            f"({some}): only the step of an optimizer may change them, or what follows "
            "h.wait_staged_on(); leave them out of late"
        )


def _optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in a nested state."""
    if isinstance(state, torch.optim.Optimizer):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    if not isinstance(state, (dict, list, tuple)):
        return []
    return [optimizer for value in values for optimizer in _optimizers_in(value)]


def before_every_step(hold_back: Callable[[], None]) -> None:
    """Calls `hold_back` in front of the step of every optimizer of this process."""

    def hook(*_: Any) -> None:
        hold_back()

    register_optimizer_step_pre_hook(hook)


def too_much_to_clone(early: Iterable[tuple[torch.device, int]]) -> set[torch.device]:
    """Devices whose stream must wait, of the device and size of each tensor that is not late."""
    total: dict[torch.device, int] = {}
    for device, nbytes in early:
        total[device] = total.get(device, 0) + nbytes
    return {device for device, nbytes in total.items() if nbytes > CLONE_MAX}
