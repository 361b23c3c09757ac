"""`Drain`: how checkpoints are copied to their second place."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast import _arguments
from holdfast.errors import Error

VERIFY = ("auto", "store", "read")
BEHIND = ("keep", "skip")


@dataclasses.dataclass(frozen=True)
class Drain:
    """Options of a drain.

    Attributes:
        keep_last: complete checkpoints of a series that stay in the second place; 0: all.
        keep_every: but those whose step is a multiple stay; 0: none.
        bytes_per_second: the most that is read and sent; None: no limit.
        verify: how arrival is proven. ``"read"``: every byte is read back and compared with the manifest's digests.
            ``"store"``: the store compares a checksum of what it gets, and the bytes under it were compared with the
            digests before. ``"auto"``: ``"store"`` where the store can (S3), else ``"read"``.
        behind: what happens when saves are faster than the drain. ``"keep"``: a local checkpoint stays until it has
            arrived. ``"skip"``: local retention goes on, and what it removes is not sent.
        give_up: seconds without a byte that arrives after which the end of the job waits no longer.
        nice: of the process, 0 to 19.
        storage: options of `obstore`'s store: credentials, region, endpoint, client options.
    """

    keep_last: int = 20
    keep_every: int = 0
    bytes_per_second: float | None = None
    verify: str = "auto"
    behind: str = "keep"
    give_up: float = 600.0
    nice: int = 10
    storage: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)  # it may hold secrets

    def __post_init__(self) -> None:
        _arguments.check(Drain, vars(self), "Drain")
        for name, valid, expected in (
            ("bytes_per_second", self.bytes_per_second is None or self.bytes_per_second > 0, "a number above 0"),
            ("verify", self.verify in VERIFY, f"one of {', '.join(VERIFY)}"),
            ("behind", self.behind in BEHIND, f"one of {', '.join(BEHIND)}"),
            ("give_up", self.give_up >= 0, "a number of seconds from 0"),
            ("nice", self.nice < 20, "a whole number from 0 to 19"),
        ):
            if not valid:
                raise Error("INVALID_ARGUMENT", f"Drain: {name} {getattr(self, name)!r}: {expected} is expected")
