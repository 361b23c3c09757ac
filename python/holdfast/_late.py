"""Which device memory may be copied behind the training: one rule, for plain and for DCP saves.

By default none: every tensor is captured in the order of the current stream, as it is at the call.
`late` names optimizers, whose step alone changes what they own, and further tensors. A tensor that
is named wrongly is torn in the checkpoint without any error, because its digest is taken after the
copy. So nothing is taken to be late that was not named.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any

import torch

from holdfast import _state
from holdfast.errors import Error

# Memory that is not late is cloned on its device, up to this much of one save and device; beyond
# it the current stream waits for the copies.
CLONE_MAX = 64 << 20


class Late:
    """Memory that stays unchanged from the call until the save has staged.

    Args:
        named: optimizers and tensors, in dicts, lists and tuples. Of an optimizer: the parameters
            that it owns and its moments. A parameter without ``requires_grad`` is left out: the
            forward pass, not the step, changes it.

    Raises:
        Error: INVALID_ARGUMENT for anything else.
    """

    def __init__(self, named: Iterable[Any] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for value in named:
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
            self._ranges.extend(_state.memory_of(value.detach()))
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
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

    def covers(self, begin: int, end: int) -> bool:
        """Whether all memory between two addresses is late."""
        i = bisect.bisect_right(self._ranges, begin, key=lambda r: r[0]) - 1
        return i >= 0 and end <= self._ranges[i][1]


def too_much_to_clone(early: Iterable[tuple[torch.device, int]]) -> set[torch.device]:
    """Devices whose stream must wait, of the device and size of each tensor that is not late."""
    total: dict[torch.device, int] = {}
    for device, nbytes in early:
        total[device] = total.get(device, 0) + nbytes
    return {device for device, nbytes in total.items() if nbytes > CLONE_MAX}
