"""Which device of the runtime a tensor's bytes live on, and the stream that last wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from holdfast import _native
from holdfast.errors import Error

# A test's stand-in for the memory of a torch device type; see `stand_in`.
_stand_ins: dict[str, _native.Device] = {}
# The staging memory is registered with a device until its own end.
_kept: list[_native.Device] = []


def device_of(device: torch.device) -> _native.Device | None:
    """The runtime's device for tensors on `device`; None is host memory."""
    if device.type in _stand_ins:
        return _stand_ins[device.type]
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        return _gpu(device.index or 0)
    raise Error(
        "UNIMPLEMENTED",
        f"use tensors on {device}: only CPU and CUDA or ROCm memory is supported; move them to the CPU",
    )


def in_use() -> list[_native.Device]:
    """The devices that this process has begun to use."""
    gpus = [_gpu(torch.cuda.current_device())] if torch.cuda.is_initialized() else []
    return [*_stand_ins.values(), *gpus]


def _gpu(ordinal: int) -> _native.Device:
    """PyTorch calls the devices of its ROCm build cuda, too."""
    return (_native.hip_device if torch.version.hip else _native.cuda_device)(ordinal)


def bytes_of(owners: Iterable[torch.Tensor], address: int, nbytes: int) -> torch.Tensor | None:
    """A part of the memory below tensors, as bytes on their device; None if the storage of none of them has all of it."""
    for owner in owners:
        storage = owner.untyped_storage()
        offset = address - storage.data_ptr()
        if 0 <= offset <= storage.nbytes() - nbytes:  # else set_ would give the user's storage another size
            return torch.empty(0, dtype=torch.uint8, device=owner.device).set_(storage, offset, (nbytes,), (1,))
    return None


def host_bytes(nbytes: int) -> torch.Tensor:
    """New host memory, whichever device torch's default is."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def stream_of(device: torch.device) -> int:
    """Handle of the current stream of `device`; copies are ordered after it."""
    if device.type == "cuda":
        return int(torch.cuda.current_stream(device).cuda_stream)
    return 0


def order_after_current(device: torch.device) -> None:
    """Orders the runtime's next copies after what the current stream of `device` has queued."""
    native = device_of(device)
    if native is not None:
        native.order_after(stream_of(device))


def wait_staged_on(save: _native.SaveHandle, device: torch.device, stream: Any = None) -> None:
    """Makes a stream of `device`, by default the current one, wait for a save's copies."""
    native = device_of(device)
    if native is not None:
        save.wait_staged_on(native, stream_of(device) if stream is None else int(stream.cuda_stream))


@contextlib.contextmanager
def stand_in(device_type: str, device: _native.Device) -> Iterator[None]:
    """Treats memory of a torch device type as `device`'s: for proving what late copies do."""
    _kept.append(device)
    _stand_ins[device_type] = device
    try:
        yield
    finally:
        del _stand_ins[device_type]
