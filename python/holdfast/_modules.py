"""State dicts: how an object gives its own, and what a load of one does besides copying tensors."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch


def is_stateful(value: Any) -> bool:
    """Whether it hands out its state by itself: modules, optimizers, schedulers, loaders."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def state_of(value: Any) -> Any:
    """Its state, with parameters as they are rather than detached copies."""
    if isinstance(value, torch.nn.Module) and _takes_keep_vars(value.state_dict):
        return value.state_dict(keep_vars=True)
    return value.state_dict()


def _takes_keep_vars(state_dict: Any) -> bool:
    """Whether a module's method has the argument of the base class."""
    parameters = inspect.signature(state_dict).parameters
    return "keep_vars" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def is_own_memory(module: torch.nn.Module, state: Mapping[Any, Any]) -> bool:
    """Whether all of a module's state are its parameters and buffers: no copies, and no extra state."""
    own = {id(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())}
    return own.issuperset(map(id, state.values()))


def does_more_at_a_load(module: torch.nn.Module) -> bool:
    """Whether a load of its state dict does more than to copy tensors."""
    if getattr(module.load_state_dict, "__func__", None) is not torch.nn.Module.load_state_dict:
        return True
    return any(
        m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks
        or _converts(type(m))  # type: ignore[arg-type]  # a class is hashable
        for m in module.modules()
    )


@functools.cache
def _converts(kind: type[torch.nn.Module]) -> bool:
    """Whether a class loads in a way of its own. PyTorch's convert other versions, which is done before."""
    owner = next(c for c in kind.__mro__ if "_load_from_state_dict" in vars(c))
    return not owner.__module__.startswith("torch.nn.modules.")


def refuses_by_groups(target: Any) -> bool:
    """Whether it is an optimizer that refuses a state by its groups of parameters alone."""
    return (
        isinstance(target, torch.optim.Optimizer)
        and type(target).load_state_dict is torch.optim.Optimizer.load_state_dict
        and not target._optimizer_load_state_dict_pre_hooks
        and not target._optimizer_load_state_dict_post_hooks
    )
