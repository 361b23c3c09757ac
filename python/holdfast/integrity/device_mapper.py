"""Disks of device-mapper: made by dmsetup(8), changed while they are used, and sent messages. Needs root."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator

SECTOR = 512  # of tables, whatever the disk's is
_DIRECTORY = "/dev/mapper"
# linux/dm-ioctl.h: struct dm_ioctl, and the message of DM_TARGET_MSG behind it.
_HEADER = struct.Struct("<10IQ128s129s7x")
_MESSAGE = struct.Struct("<Q")
_TARGET_MESSAGE = 0xC138FD0E


def why_not(*targets: str) -> str:
    """Why there are no disks of these targets here; "" where there are."""
    if os.geteuid() != 0:
        return "device-mapper needs root"
    with contextlib.suppress(FileNotFoundError):  # the kernel may have all of its targets built in
        subprocess.run(["modprobe", "-aq", "dm-mod", *(f"dm-{target}" for target in targets)], capture_output=True, check=False)
    try:
        found = {line.split()[0] for line in _dmsetup("targets").splitlines() if line}
    except (OSError, subprocess.CalledProcessError) as error:
        return f"dmsetup targets: {getattr(error, 'stderr', '').strip().partition(chr(10))[0] or error}"
    missing = [target for target in targets if target not in found]
    return f"the kernel has no device-mapper target {', '.join(missing)}" if missing else ""


def _dmsetup(*arguments: str, table: str | None = None) -> str:
    """Without udev, which need not run; device nodes are then made by dmsetup."""
    environment = {**os.environ, "DM_DISABLE_UDEV": "1"}
    return subprocess.run(["dmsetup", *arguments], input=table, check=True, capture_output=True, text=True, env=environment).stdout


def table_of(*pieces: tuple[int, str]) -> str:
    """The table of a disk: the bytes of each piece, and its target with its arguments, as dmsetup(8) has it."""
    lines, begin = [], 0
    for size, target in pieces:
        if size:
            lines.append(f"{begin} {size // SECTOR} {target}\n")
        begin += size // SECTOR
    return "".join(lines)


@contextlib.contextmanager
def mapped(name: str, table: str) -> Iterator[str]:
    """A disk; its device."""
    _dmsetup("create", name, table=table)
    try:
        yield os.path.join(_DIRECTORY, name)
    finally:
        _dmsetup("remove", "--retry", name)


def change(name: str, table: str) -> None:
    """Gives a disk another table. Requests under way end by the old one; the file system is not asked to write anything."""
    _dmsetup("load", name, table=table)
    _dmsetup("suspend", "--nolockfs", name)
    _dmsetup("resume", name)


def send(name: str, message: str) -> None:
    """Sends a message to a disk's target, without the time that starting dmsetup takes."""
    body = _MESSAGE.pack(0) + message.encode() + b"\0"
    size = _HEADER.size + len(body)
    request = bytearray(_HEADER.pack(4, 0, 0, size, _HEADER.size, 0, 0, 0, 0, 0, 0, name.encode(), b"") + body)
    control = os.open(os.path.join(_DIRECTORY, "control"), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(control, _TARGET_MESSAGE, request)
    finally:
        os.close(control)
