"""Damage to committed checkpoints, and its repair: verifying and loading must find it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterator
from typing import Any

from holdfast import _names

PAGE = 4096
_LEFT = ("ranks.board", _names.RECORD + _names.UNFINISHED)


def _files(path: str, attempt: str) -> list[str]:
    """The files of a checkpoint. A DCP directory may also have some of a save that was never completed.

    Of a single file that file alone: without its manifest it counts as one that another program has written.
    """
    if os.path.isfile(path):
        return [""]
    # What a crash may leave beside a checkpoint is no part of it.
    names = sorted(f for f in os.listdir(path) if os.path.isfile(os.path.join(path, f)) and f not in _LEFT)
    if not attempt:
        return names
    own = [name for name in names if attempt in name and not name.endswith(".tmp")]
    text = b"".join(_read(os.path.join(path, name)) for name in own)
    return [name for name in names if name in own or name == _names.METADATA or f'"{name}"'.encode() in text]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _changed(kind: str, data: bytes, choose: random.Random) -> bytes | None:
    """The bytes with damage; None where this kind does nothing to them."""
    if kind == "extend":
        return data + b"\0" * choose.choice((1, PAGE))
    if not data:
        return None
    at = choose.randrange(len(data))
    if kind == "truncate":
        return data[: choose.choice((0, at, len(data) - 1))]
    new = bytearray(data)
    if kind == "zero a page":
        begin = at // PAGE * PAGE
        new[begin : begin + PAGE] = bytes(len(new[begin : begin + PAGE]))
    elif kind == "swap chunks":
        size = choose.choice((64, PAGE, 4 << 20))
        a, b = (choose.randrange(max(1, len(data) // size)) * size for _ in range(2))
        if a != b and max(a, b) + size <= len(data):
            new[a : a + size], new[b : b + size] = data[b : b + size], data[a : a + size]
    if bytes(new) == data:  # as "flip a bit"
        new[at] ^= 1 << choose.randrange(8)
    return bytes(new)


@contextlib.contextmanager
def damaged(path: str, attempt: str, others: list[str], given: dict[str, Any]) -> Iterator[str]:
    """Damages one file of a checkpoint while it lasts, then puts the old bytes back.

    Args:
        path: of the checkpoint.
        attempt: of a DCP checkpoint; "" for others, of which every file is damaged.
        others: paths of other complete checkpoints, for files that are swapped or stale.
        given: ``kind`` and ``key``, the seed of the place.

    Yields:
        What was done; empty where nothing was.
    """
    choose = random.Random(given["key"])
    kind = given["kind"]
    names = _files(path, attempt)
    name = choose.choice(names)
    file = os.path.join(path, name) if name else path
    data = _read(file)
    if kind == "remove":
        os.unlink(file)
        new: bytes | None = data
    elif kind in ("swap files", "stale file"):
        # A whole file of another save in the place of a single one is what `cp` would do.
        donors = [os.path.join(other, name) for other in others if name and os.path.isfile(os.path.join(other, name))]
        new = _read(choose.choice(donors)) if donors else _changed("flip a bit", data, choose)
        new = None if new == data else new
    else:
        new = _changed(kind, data, choose)
    try:
        if kind != "remove" and new is not None:
            try:
                _write(file, new)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                new = None  # a small file system has no room for more bytes
        yield f"{kind} in {name or os.path.basename(path)}" if new is not None else ""
    finally:
        _write(file, data)
