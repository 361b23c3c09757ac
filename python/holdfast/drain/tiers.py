"""Which checkpoints of the first place are sent, and which go from either. Nothing is read or removed here."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast import _native
from holdfast._dcp_directories import series_of
from holdfast.drain.options import Drain
from holdfast.drain.places import Info, age_of


def let_go(complete: Iterable[Info], keep_last: int, keep_every: int) -> set[str]:
    """Names that retention removes from some checkpoints of one place, the newest of each series being the last saved."""
    every = sorted(complete, key=age_of)
    if not keep_last:
        return set()
    rows = [(c.name, c.saved_at, c.step, c.attempt, c.parent) for c in every]
    newest = {series_of(c.name): c.name for c in every}
    return {n for name in newest.values() for n in _native.select_for_removal(rows, keep_last, keep_every, name)}


def _merged(there: Iterable[Info], also: Iterable[Info]) -> list[Info]:
    """Both, the later one of a name."""
    by_name: dict[str, Info] = {}
    for info in sorted((*there, *also), key=age_of):
        by_name[info.name] = info
    return list(by_name.values())


def missing(local: list[Info], remote: list[Info]) -> list[Info]:
    """The local checkpoints that have not arrived, the oldest first; not those that a later one of the name has replaced."""
    late = {c.key for c in overtaken(local, remote)}
    arrived = {c.key for c in remote}
    return [c for c in local if c.key not in arrived and c.key not in late]


def overtaken(local: list[Info], remote: list[Info]) -> list[Info]:
    """The local checkpoints that have not arrived and do not: a later save of the name is there, of another process."""
    latest = {c.name: c for c in remote}
    arrived = {c.key for c in remote}
    return [c for c in local if c.key not in arrived and c.name in latest and age_of(latest[c.name]) >= age_of(c)]


def _own(local: list[Info], remote: list[Info]) -> list[Info]:
    """Of the second place what the first one has, and what that descends from.

    Of these alone the times say which is the later one: the clock of another node, whose run this one does not continue, may be ahead.
    """
    parents = {c.attempt: c.parent for c in (*local, *remote)}
    known: set[str] = set()
    for info in local:
        at = info.attempt
        while at and at not in known:
            known.add(at)
            at = parents.get(at, "")
    return [c for c in remote if c.attempt in known]


def strangers(info: Info, local: list[Info], remote: list[Info]) -> list[Info]:
    """The checkpoints of the second place that every reader takes for later ones of a series, and that are of another run.

    Of names of its own: the others are said to have `overtaken` those of the first place.
    """
    known = {c.key for c in _own(local, remote)} | {c.key for c in remote if c.name in {one.name for one in local}}
    return [c for c in remote if c.key not in known and series_of(c.name) == series_of(info.name) and age_of(c) > age_of(info)]


def to_send(local: list[Info], remote: list[Info], options: Drain, keep_local: int, keep_local_every: int) -> list[Info]:
    """The checkpoints to send, in the order of their saves.

    A second place that gets them in this order has a beginning of the run's history at every moment, and its newest
    checkpoint is of the same branch.
    """
    found = missing(local, remote)
    gone = let_go(_merged(_own(local, remote), found), options.keep_last, options.keep_every)
    if options.behind == "skip":
        gone |= let_go(local, keep_local, keep_local_every)
    return [c for c in found if c.name not in gone]


def to_remove_remotely(local: list[Info], remote: list[Info], options: Drain) -> list[Info]:
    """The checkpoints of the second place that retention lets go: of the series that the first place has. Others are another job's.

    Of the own run the newest stay, whatever the times of others are: the second place may have the only copy.
    """
    series = {series_of(c.name) for c in local}
    gone = let_go((c for c in remote if series_of(c.name) in series), options.keep_last, options.keep_every)
    own = _own(local, remote)
    kept = {c.name for c in own} - let_go(own, options.keep_last, options.keep_every)
    return [c for c in remote if c.name in gone - kept]


def to_remove_locally(local: list[Info], remote: list[Info], options: Drain, keep_local: int,
                      keep_local_every: int) -> list[Info]:  # fmt: skip
    """The local checkpoints that retention lets go: of those that have arrived.

    One that the second place would let go at once, by what has arrived there of the own run, counts as arrived.
    """
    names = let_go(local, keep_local, keep_local_every)
    gone = [c for c in local if c.name in names]
    if options.behind == "skip":
        return gone
    # Not `missing`: where a later save of the name is there, of another node perhaps, this one has not arrived.
    arrived = {c.key for c in remote}
    own = _own(local, remote)
    return [
        c for c in gone
        if c.key in arrived or c.name in let_go(_merged(own, [c]), options.keep_last, options.keep_every)
    ]  # fmt: skip
