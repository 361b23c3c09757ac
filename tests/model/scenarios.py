"""What is searched: scenarios that hold, and the deliberate bugs that a scenario must find."""

from __future__ import annotations

from typing import NamedTuple

from .protocol import Config
from .state import Left

# Each takes some seconds. A scenario bounds the saves and the faults, and nothing else.
SCENARIOS = {
    "three ranks, an error": Config(ranks=3, left=Left(failures=1)),
    "three ranks, power cut": Config(ranks=3, left=Left(cuts=1, recoveries=1)),
    "two ranks, kills and an error": Config(ranks=2, left=Left(kills=2, failures=1)),
    "two ranks, kills and recovery": Config(ranks=2, left=Left(kills=2, recoveries=1)),
    "two ranks, an error, power cut": Config(ranks=2, left=Left(failures=1, cuts=1, recoveries=1)),
    "two ranks, a kill, power cut": Config(ranks=2, left=Left(kills=1, cuts=1, recoveries=1)),
    "two ranks, kills, power cut": Config(ranks=2, left=Left(kills=2, cuts=1)),
    "replace": Config(saves=2, standing=True, replace=True, left=Left(kills=2, failures=1, cuts=1, recoveries=1)),
    "replace on two ranks": Config(ranks=2, saves=2, standing=True, replace=True, left=Left(cuts=1, recoveries=1)),
    "two jobs, a kill": Config(saves=2, replace=True, together=2, left=Left(kills=1)),
    "two jobs, recovery": Config(saves=2, replace=True, together=2, left=Left(recoveries=1)),
    "two jobs, power cut": Config(saves=2, replace=True, together=2, left=Left(cuts=1, recoveries=1)),
    "two jobs over a third": Config(saves=3, standing=True, replace=True, together=2),
    "retention and rollback": Config(saves=4, keep_last=2, left=Left(rollbacks=1)),
    "retention, power cut": Config(saves=3, keep_last=1, left=Left(cuts=1, rollbacks=1)),
    "retention, a kill": Config(saves=3, keep_last=1, left=Left(kills=1)),
}

# Each takes minutes (HOLDFAST_LONG=1).
LONG = {
    "three ranks, a kill": Config(ranks=3, left=Left(kills=1)),
    "three ranks, kills and an error": Config(ranks=3, left=Left(kills=2, failures=1)),
    "three ranks, a kill, power cut": Config(ranks=3, left=Left(kills=1, cuts=1, recoveries=1)),
    "two ranks, all faults": Config(ranks=2, left=Left(kills=2, failures=1, cuts=1, recoveries=2)),
    "replace, all faults": Config(
        saves=3, standing=True, replace=True, left=Left(kills=2, failures=1, cuts=1, recoveries=2)
    ),
    "two jobs, all faults": Config(saves=2, replace=True, together=2, left=Left(2, 1, 1, 1)),
    "retention, all faults": Config(saves=4, keep_last=2, left=Left(kills=1, cuts=1, recoveries=1, rollbacks=1)),
}


class Planted(NamedTuple):
    """A mistake in the protocol, the scenario that must find it, and the promise that it breaks there."""

    bug: str
    scenario: str
    violation: str


PLANTED = [
    Planted("failure not published", "three ranks, an error", "left no mark"),
    Planted("record before a manifest", "two ranks, kills and an error", "is listed and not whole"),
    Planted("votes not kept", "two ranks, kills, power cut", "is listed and not whole"),
    Planted("names before data", "two ranks, an error, power cut", "is listed and not whole"),
    Planted("data removed first", "two ranks, an error, power cut", "is listed and not whole"),
    Planted("durable early", "two ranks, an error, power cut", "was reported durable and is lost"),
    Planted("no look after the announcement", "two ranks, kills and an error", "durable for one rank and has failed"),
    Planted("no fence", "two ranks, kills and recovery", "a recovery has reported that it is not there"),
    Planted("fence ignored", "two ranks, kills and recovery", "a recovery has reported that it is not there"),
    Planted("locks ignored", "two ranks, kills and recovery", "which is running"),
    Planted("promoted without a record", "two ranks, a kill, power cut", "is listed and not whole"),
    Planted("promoted without a sync", "replace", "is listed and not whole"),
    Planted("reported before the parent is synced", "two ranks, a kill, power cut", "durable and is lost"),
    Planted("removed before the parent is synced", "replace on two ranks", "is listed and not whole"),
    Planted("removal without locks", "replace", "is listed and not whole"),
    Planted("older replaces newer", "two jobs, a kill", "was reported durable and is lost"),
    Planted("retention by step", "retention and rollback", "from which the newest descends"),
]
