"""Lets Megatron-Core train, save and load on the CPU: for ``train_megatron.py``, imported before Megatron.

Megatron asks for GPU memory and for a GPU's random state by name, and compiles some functions; PyTorch's C++
compiler call fails where its own path has a blank. A training on GPUs leaves this out.
"""

from __future__ import annotations

import typing
from typing import Any

import torch
import torch._dynamo
import typing_extensions
from torch.overrides import TorchFunctionMode

# Python 3.12 has it, and `megatron.training` imports it.
typing.override = typing_extensions.override


class CpuMemory(TorchFunctionMode):
    """Makes tensors in CPU memory where GPU memory is asked for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def use_cpu() -> None:
    """Replaces the GPU by the CPU, in this thread."""
    from megatron.core.tensor_parallel import random
    from megatron.training import arguments

    CpuMemory().__enter__()
    torch._dynamo.config.disable = True
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda: None
    torch.cuda.get_rng_state, torch.cuda.set_rng_state = torch.get_rng_state, torch.set_rng_state
    random._get_cuda_rng_state = lambda **_: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, **_: torch.set_rng_state(state)
    arguments.get_device_arch_version = lambda: 10
