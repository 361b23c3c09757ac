"""Tensors in files, so that a state may be larger than the memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast import _dtypes, _native
from holdfast.errors import of_system

_BYTES_MIN = 1 << 20  # smaller tensors stay in memory: a process may map 65,530 files


class Memory(TorchDispatchMode):
    """Gives new tensors on the CPU the pages of an unlinked file: the system writes them out when memory is short."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.empty.memory_format or made.device.type != "cpu":
            return made
        if made.nbytes < _BYTES_MIN:
            return made
        with of_system(f"make a file of {made.nbytes} bytes in {self._directory}"):
            with tempfile.TemporaryFile(dir=self._directory) as file:
                os.posix_fallocate(file.fileno(), 0, made.nbytes)
                pages = mmap.mmap(file.fileno(), made.nbytes)
        return torch.frombuffer(pages, dtype=torch.uint8).view(made.dtype).view(made.shape)


def mapped(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name, in pages of the file that are read when they are used."""
    reader = _native.CheckpointReader.open_file(path)
    own = reader.files.index(os.path.basename(path))
    storage = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
    tensors = {}
    for name, kind, shape, file, begin, end in reader.tensors():
        if file != own:
            continue
        dtype = _dtypes.of_file(kind)
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        part = storage[begin:end]
        # Other programs' files need not align their tensors.
        part = part.clone() if begin % dtype.itemsize else part
        tensors[name] = tensor.set_(part, 0, tuple(shape))  # type: ignore[call-overload]
    return tensors
