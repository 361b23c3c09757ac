"""The CUDA driver's own interface, by ctypes: it needs neither PyTorch nor a compiler. And a stand-in for a rehearsal."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

PORTABLE, DEVICE_MAP, WRITE_COMBINED = 1, 2, 4  # of cuMemHostAlloc


class DriverError(RuntimeError):
    """A call of the driver that has failed."""


class Driver:
    """The first GPU, with its primary context current and one stream."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(str(error)) from None
        self._call("cuInit", 0)
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), device)
        self.name = text.value.decode()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(stream), 1)  # non-blocking
        self._stream = stream

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def host_allocate(self, nbytes: int, flags: int = 0) -> int:
        """Pinned host memory, as PyTorch's allocator takes it."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(nbytes), flags)
        return address.value or 0

    def register(self, address: int, nbytes: int) -> None:
        """Pins memory that is there."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def fill(self, device: int, byte: int, nbytes: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(device), ctypes.c_ubyte(byte), ctypes.c_size_t(nbytes))

    def to_host(self, address: int, device: int, nbytes: int) -> None:
        """Queues a copy; `synchronize` awaits it."""
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(address), ctypes.c_uint64(device), ctypes.c_size_t(nbytes),
                   self._stream)  # fmt: skip

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)


class StandIn:
    """Host memory in the place of a GPU. Its pinned memory is shared with forked children, as the driver's is."""

    name = ""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def allocate(self, nbytes: int) -> int:
        return self.host_allocate(nbytes)

    def host_allocate(self, nbytes: int, flags: int = 0) -> int:
        self._maps.append(mmap.mmap(-1, nbytes))
        return address_of(self._maps[-1])

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def fill(self, device: int, byte: int, nbytes: int) -> None:
        ctypes.memset(device, byte, nbytes)

    def to_host(self, address: int, device: int, nbytes: int) -> None:
        ctypes.memmove(address, device, nbytes)

    def synchronize(self) -> None:
        pass


def address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def gpu_name() -> str:
    """Of the first GPU; "" where the driver finds none."""
    try:
        return Driver().name
    except DriverError:
        return ""
