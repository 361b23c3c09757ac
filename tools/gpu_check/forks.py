"""Fork, spawn and the end of processes beside a live CUDA context; what pinned memory is. By the driver alone, but for the last."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import random
import signal
import statistics
import struct
import time
from pathlib import Path
from typing import Any

from driver import DEVICE_MAP, PORTABLE, WRITE_COMBINED, Driver, StandIn, address_of, gpu_name
from report import GIB, MIB, Child, Report, Skip, run, timed

ROUNDS = 10
_libc = ctypes.CDLL(None, use_errno=True)
_IO_URING_SETUP, _IO_URING_REGISTER, _REGISTER_BUFFERS = 425, 427, 0


def driver_of(report: Report) -> Any:
    return Driver() if report.cuda else StandIn()


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def memfd(nbytes: int, flags: int = 0) -> mmap.mmap:
    fd = os.memfd_create("gpu-check", flags)
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    except OSError as error:  # no huge pages are reserved
        raise Skip(f"{nbytes // MIB} MiB of shared memory: {error}") from None
    finally:
        os.close(fd)


# ---- What pinned memory is.


def mapping_of(address: int) -> str:
    """Rights, path and flags of the mapping at an address."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    found = ""
    for line in lines:
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            begin, end = (int(part, 16) for part in head[0].split("-"))
            found = f"{head[1]} {head[5] if len(head) > 5 else '(anonymous)'}" if begin <= address < end else ""
        elif found and head[0] == "VmFlags:":
            return f"{found}, {line.partition(':')[2].strip()}"
    return "none"


def mappings(report: Report) -> dict[str, str]:
    driver = driver_of(report)
    kinds = {"default": 0, "portable": PORTABLE, "mapped": DEVICE_MAP, "write-combined": WRITE_COMBINED}
    return {name: mapping_of(driver.host_allocate(2 * MIB, flags)) for name, flags in kinds.items()}


def kernel_uses(report: Report) -> dict[str, str]:
    """Whether the kernel registers such memory with a ring, and writes it past the page cache."""
    driver = driver_of(report)
    address = driver.host_allocate(2 * MIB)
    ctypes.memset(address, 5, 2 * MIB)
    found = {}
    ring = _libc.syscall(_IO_URING_SETUP, 4, ctypes.create_string_buffer(120))
    if ring < 0:
        found["io_uring_register_buffers"] = f"no ring: {os.strerror(ctypes.get_errno())}"
    else:
        iovec = ctypes.create_string_buffer(struct.pack("PN", address, 2 * MIB))
        status = _libc.syscall(_IO_URING_REGISTER, ring, _REGISTER_BUFFERS, iovec, 1)
        found["io_uring_register_buffers"] = "works" if status == 0 else errno.errorcode[ctypes.get_errno()]
        os.close(ring)
    path = report.scratch / "direct"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        wrote = _libc.write(fd, ctypes.c_void_p(address), ctypes.c_size_t(2 * MIB))
        found["O_DIRECT write"] = f"{wrote} bytes" if wrote >= 0 else errno.errorcode[ctypes.get_errno()]
    finally:
        os.close(fd)
    return found


def registration(report: Report, kind: str, nbytes: int) -> list[float]:
    """Seconds to pin a GiB, and bytes a second from the device to it."""
    driver = driver_of(report)
    if kind == "cuMemHostAlloc":
        seconds, address = timed(lambda: driver.host_allocate(nbytes))
        kept: Any = None
    else:
        kept = memfd(nbytes, os.MFD_HUGETLB if kind.endswith("2 MiB pages") else 0)
        address = address_of(kept)
        ctypes.memset(address, 1, nbytes)
        seconds, _ = timed(lambda: driver.register(address, nbytes))
    device = driver.allocate(nbytes)

    def copy() -> None:
        driver.to_host(address, device, nbytes)
        driver.synchronize()

    copy()
    return [seconds * GIB / nbytes, nbytes / statistics.median(timed(copy)[0] for _ in range(ROUNDS))]


# ---- Fork.


def seconds_to_fork() -> float:
    begin = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    seconds = time.perf_counter() - begin
    os.waitpid(child, 0)
    return seconds


def fork_times(report: Report, nbytes: int) -> dict[str, float]:
    driver = driver_of(report)
    found = {"without": seconds_to_fork()}
    for kind in ("private", "shared"):
        flags = mmap.MAP_ANONYMOUS | (mmap.MAP_PRIVATE if kind == "private" else mmap.MAP_SHARED)
        memory = mmap.mmap(-1, nbytes, flags=flags)
        address = address_of(memory)
        ctypes.memset(address, 1, nbytes)
        found[f"with {kind} memory"] = seconds_to_fork()
        driver.register(address, nbytes)
        found[f"with pinned {kind} memory"] = seconds_to_fork()
        driver.unregister(address)
        memory.close()
    return found


def child_sees_copies(report: Report) -> str:
    """A forked child reads pinned memory before and after a copy of its parent lands there."""
    driver, nbytes = driver_of(report), 2 * MIB
    address, device = driver.host_allocate(nbytes), driver.allocate(nbytes)
    ctypes.memset(address, 1, nbytes)
    driver.fill(device, 2, nbytes)
    go, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        first = bytes_at(address, nbytes)
        os.write(done[1], b"r")
        os.read(go[0], 1)
        changed = sum(a != b for a, b in zip(first, bytes_at(address, nbytes), strict=True))
        os.write(done[1], struct.pack("q", changed))
        os._exit(0)
    os.read(done[0], 1)
    driver.to_host(address, device, nbytes)
    driver.synchronize()
    os.write(go[1], b"g")
    (changed,) = struct.unpack("q", os.read(done[0], 8))
    os.waitpid(child, 0)
    return f"{changed} of {nbytes}"


def child_ends(report: Report, way: str) -> str:
    """A forked child of a process with a context ends; then the parent copies."""
    driver, nbytes = driver_of(report), 2 * MIB
    address, device = driver.host_allocate(nbytes), driver.allocate(nbytes)
    driver.fill(device, 3, nbytes)
    child = os.fork()
    if child == 0:
        if way == "exit":
            _libc.exit(0)
        os._exit(0)
    deadline = time.monotonic() + 10
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    driver.to_host(address, device, nbytes)
    driver.synchronize()
    copied = "right" if bytes_at(address, nbytes) == bytes([3]) * nbytes else "WRONG"
    return f"child {f'ended with {status}' if ended else 'hung for 10 s'}, the parent's next copy is {copied}"


# ---- The end of a process.


def pages_outlive(report: Report, way: str) -> list[int]:
    """Wrong bytes of shared memory whose registration ended with another process, and after a copy of our own."""
    nbytes = 16 * MIB
    memory = memfd(nbytes)
    address = address_of(memory)
    ready = os.pipe()
    child = os.fork()  # before this process has a context
    if child == 0:
        driver = driver_of(report)
        device = driver.allocate(nbytes)
        driver.fill(device, 4, nbytes)
        driver.register(address, nbytes)
        driver.to_host(address, device, nbytes)
        driver.synchronize()
        if way == "unregistered":
            driver.unregister(address)
        os.write(ready[1], b"r")
        if way == "killed":
            signal.pause()
        os._exit(0)
    os.read(ready[0], 1)
    if way == "killed":
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wrong = [nbytes - bytes_at(address, nbytes).count(4)]
    driver = driver_of(report)
    device = driver.allocate(nbytes)
    driver.fill(device, 6, nbytes)
    driver.register(address, nbytes)
    driver.to_host(address, device, nbytes)
    driver.synchronize()
    return [*wrong, nbytes - bytes_at(address, nbytes).count(6)]


def dies_in_a_copy(report: Report, path: str, launcher: str, delay: float) -> None:
    """Begins a save whose copies are late, and ends this process while they go on."""
    import torch
    from report import device_of

    import holdfast

    nbytes = report.size(2 * GIB, 8 * MIB)
    with device_of(report) as device:
        holdfast.configure(arena_bytes=nbytes + 64 * MIB, launcher=launcher)
        parameters = [torch.nn.Parameter(torch.full((nbytes // 4 // 16,), 9.0, device=device)) for _ in range(16)]
        optimizer = torch.optim.SGD(parameters)
        holdfast.warm_up(nbytes)
        holdfast.save_async(dict(enumerate(parameters)), path, late=[optimizer])
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)


def kills(report: Report, launcher: str) -> dict[str, int]:
    """What is there after a trainer has died in its save: nothing, or a checkpoint that verifies."""
    found = {"absent": 0, "sound": 0, "WRONG": 0}
    choose = random.Random(1)
    for number in range(2 if report.cuda else 1):
        path = str(report.scratch / f"killed-{launcher}-{number}")
        delay = choose.random() * 0.06
        trainer = Child(functools.partial(dies_in_a_copy, report, path, launcher, delay))
        try:
            status = trainer.wait(60)
            if status != -signal.SIGKILL:
                raise RuntimeError(f"the trainer ended with {status} before it was killed")
            with contextlib.suppress(TimeoutError):
                wait_for_the_end(trainer.pid)
        finally:
            trainer.end()
        # Apart: a load may begin to use the GPU, after which the next trainer could not be forked.
        found[report.apart(outcome, path) if os.path.exists(path) else "absent"] += 1
    return found


def outcome(report: Report, path: str) -> str:
    """Whether a checkpoint verifies and has what was saved."""
    import holdfast

    values = holdfast.load(path).values()
    is_right = holdfast.verify(path)["verdict"] == "sound" and all(bool((t == 9).all()) for t in values)
    return "sound" if is_right else "WRONG"


def wait_for_the_end(group: int) -> None:
    """Waits until no process of a group is left, an orphaned worker for example."""
    for _ in range(1000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise TimeoutError


def body(report: Report) -> None:
    with report.part("mappings of pinned memory"):
        for name, mapping in report.apart(mappings).items():
            report.note(f"mapping of pinned memory, {name}", mapping)
    with report.part("the kernel's use of pinned memory"):
        for name, outcome in report.apart(kernel_uses).items():
            report.note(f"pinned memory, {name}", outcome)
    with report.part("bytes that change in a forked child"):
        report.note("pinned memory in a forked child: bytes changed by a later copy", report.apart(child_sees_copies))
    for way in ("_exit", "exit"):
        with report.part(f"end of a forked child by {way}"):
            report.note(f"end of a forked child by {way}", report.apart(child_ends, way))
    for way in ("killed", "unregistered"):
        with report.part(f"shared memory whose owner was {way}"):
            first, second = report.apart(pages_outlive, way)
            report.check(f"shared memory whose owner has ended ({way}): wrong bytes, of it and of a later copy",
                         f"{first}, {second}", first == second == 0, aim="0, 0")  # fmt: skip
    for kind in ("cuMemHostAlloc", "memfd, 4 KiB pages", "memfd, 2 MiB pages"):
        with report.part(f"pinning: {kind}"):
            seconds, rate = report.apart(registration, kind, report.size(2 * GIB, 4 * MIB))
            report.row(f"pinning: {kind}", seconds, "s/GiB")
            report.row(f"device to host: {kind}", rate / 1e9, "GB/s")
    with report.part("fork"):
        nbytes = report.size(4 * GIB, 16 * MIB)
        for kind, seconds in report.apart(fork_times, nbytes).items():
            report.row(f"fork of a process {kind}", seconds * 1e3, "ms")
    with report.part("the package"):
        report.need_packages("torch", "holdfast")
        import holdfast.integrity.slow_device  # noqa: F401  # once for all that follow
    for launcher in ("spawn", "fork", "persistent"):
        with report.part(f"trainer killed in a copy, {launcher}"):
            report.need_packages("torch", "holdfast")
            found = report.apart(kills, launcher, timeout=120)
            report.check(f"trainer killed in a copy, {launcher}: what is there", ", ".join(f"{n} {k}" for k, n in found.items()),
                         not found["WRONG"])  # fmt: skip


if __name__ == "__main__":
    run("forks", body, gpu_name)
