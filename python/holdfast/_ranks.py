"""Who of how many this process is, and what they must agree on, without a collective."""

from __future__ import annotations

import hashlib
import re
import threading
from typing import Any

from holdfast import _native

_NONCE_KEY = "holdfast/nonce"
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_OWN = re.compile(r"rng\w*|\w*rng|\w*loaders?")
_OWN_UNLESS_FLOATS = re.compile(_OWN.pattern + "|(data|batch|distributed)?samplers?|generators?")

_lock = threading.Lock()
_nonces: dict[int, bytes] = {}
_counts: dict[str, int] = {}


def rank_and_world() -> tuple[int, int]:
    """From torch.distributed where it is initialized, otherwise one of one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _nonce() -> bytes:
    """Random bytes that rank 0 chose for this process group, from its key-value store."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store: Any = c10d._get_default_store()
    with _lock:
        known = _nonces.get(id(store))
        if known is None:
            if dist.get_rank() == 0:
                store.set(_NONCE_KEY, _native.new_attempt())
            known = bytes(store.get(_NONCE_KEY))  # waits for rank 0, up to the store's time-out
            _nonces[id(store)] = known
        return known


def is_own(name: str, dtype: str) -> bool:
    """Whether a tensor is random state, or where data loading stands: each rank's own, by its name.

    Words count, at dots, underscores and changes of case: ``upsamplers`` are layers. So are floats
    under ``generator`` or ``sampler``: what these have for a state is made of integers.
    """
    floats = dtype.startswith(("F", "BF", "C"))
    pattern = _OWN if floats else _OWN_UNLESS_FLOATS
    return any(pattern.fullmatch(word.lower()) for word in _WORD.findall(name))


def attempt_of(path: str, step: int, world_size: int) -> str:
    """An attempt id that all ranks arrive at by themselves: same path, same count, same nonce."""
    if world_size == 1:
        return _native.new_attempt()
    nonce = _nonce()
    with _lock:
        count = _counts.get(path, 0)
        _counts[path] = count + 1
    text = b"\0".join([nonce, path.encode(), str(step).encode(), str(count).encode()])
    return hashlib.sha256(text).hexdigest()[:32]


class Announcement:
    """From the call on the other ranks see that this one has begun the save.

    What fails on this rank alone, before the save has begun, ends theirs with its reason.
    """

    def __init__(self, directory: str, name: str, attempt: str, rank: int, world_size: int,
                 time_liveness_max: float | None) -> None:
        self.begun = False  # from then on the save says itself how it ends
        self._native: _native.RankAnnouncement | None = None
        if world_size > 1:
            self._native = _native.announce_save(
                directory, name, attempt, rank, world_size, time_liveness_max
            )

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        announcement, self._native = self._native, None
        if announcement is not None and error is not None and not self.begun:
            announcement.abandon(str(error) or repr(error))
