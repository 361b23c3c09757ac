"""Which checkpoints of the first place are sent, and which go from either. Nothing is read or removed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from holdfast import _native
from holdfast._dcp_directories import has_step, series_of
from holdfast.drain.options import Drain
from holdfast.drain.places import Info, age_of

Series = Callable[[Info], tuple[str, str]]  # format and form of the names
Key = tuple[str, str]  # as `Info.key`


class Rules(NamedTuple):
    """What stays.

    Attributes:
        options: of the second place.
        keep_local, keep_local_every: of the first one; 0: everything stays there.
        form: of the names of the Checkpointer, as ``step-{step}``; "": not known.
    """

    options: Drain
    keep_local: int = 0
    keep_local_every: int = 0
    form: str = ""


class Bound:
    """What a drain is for that is to end: what stands in both places then. What comes later is of a drain with the options of later.

    Args:
        complete: of the first place.
        names: of all that is there, also of saves on their way, of which none has an attempt that is known.
        there: what is complete in the second place.
    """

    def __init__(self, complete: Iterable[Info], names: Collection[str], there: Iterable[Key]) -> None:
        self._complete = {c.key for c in complete}
        self._sent = set(self._complete)
        self._names = set(names)
        self._may_go = self._complete | set(there)

    def of(self, local: list[Info]) -> list[Info]:
        """What may be sent: of each name one later save, too, as of a worker whose trainer has ended. More of them might never end."""
        for info in local:
            if info.key not in self._sent and info.name in self._names:
                self._names.remove(info.name)
                self._sent.add(info.key)
        return [c for c in local if c.key in self._sent]

    def may_go(self, info: Info) -> bool:
        """Whether retention may remove a checkpoint."""
        return info.key in self._may_go


def _series(local: list[Info], form: str) -> Series:
    """Tells the series of a checkpoint: the names of the form, in one format. Any other name is a series by itself.

    Where the form is not known, a number in a name counts as that of one series where it is the step, or the first place has several
    of them. Else it may be what tells the names of two jobs apart, as ``seed-1`` and ``seed-2``, and each name is a series.
    """
    if form:
        return lambda info: (info.format, form if form.format(step=info.step) == info.name else info.name)
    counts = Counter((c.format, series_of(c.name)) for c in local)

    def series(info: Info) -> tuple[str, str]:
        usual = info.format, series_of(info.name)
        return usual if counts[usual] > 1 or has_step(info.name, info.step) else (info.format, info.name)

    return series


def let_go(complete: Iterable[Info], keep_last: int, keep_every: int, series: Series) -> set[str]:
    """Names that retention removes from some checkpoints of one place, the newest of each series being the last saved."""
    every = sorted(complete, key=age_of)
    of = [series(c) for c in every]
    gone: set[str] = set()
    for one, count in Counter(of).items():
        if not 0 < keep_last < count:
            continue
        # Names by which the selection tells the series from all others.
        names = [f"{'in' if s == one else 'out'}-{number:09}" for number, s in enumerate(of)]
        rows = [(name, c.saved_at, c.step, c.attempt, c.parent) for name, c in zip(names, every, strict=True)]
        newest = max(name for name in names if name.startswith("in"))
        removed = set(_native.select_for_removal(rows, keep_last, keep_every, newest))
        gone.update(c.name for name, c in zip(names, every, strict=True) if name in removed)
    return gone


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


def strangers(info: Info, local: list[Info], remote: list[Info], rules: Rules) -> list[Info]:
    """The checkpoints of the second place that every reader takes for later ones of a series, and that are of another run.

    Of names of its own: the others are said to have `overtaken` those of the first place.
    """
    names = {c.name for c in local}
    known = {c.key for c in _own(local, remote)}
    series = _series(local, rules.form)
    return [c for c in remote if c.key not in known and c.name not in names and series(c) == series(info) and age_of(c) > age_of(info)]


def _kept_at_last(local: list[Info], remote: list[Info], found: list[Info], rules: Rules) -> set[str]:
    """Names that the second place has once all that is `found` has arrived and retention was applied."""
    every = _merged(_own(local, remote), found)
    gone = let_go(every, rules.options.keep_last, rules.options.keep_every, _series(local, rules.form))
    return {c.name for c in every} - gone


def to_send(local: list[Info], remote: list[Info], rules: Rules, failed: Collection[Key] = (), chosen: Collection[Key] | None = None) -> list[Info]:
    """The checkpoints to send, in the order of their saves. Those that have `failed` are not, and no older one makes room for them.

    A second place that gets them in this order has a beginning of the run's history at every moment, and its newest
    checkpoint is of the same branch.

    Args:
        chosen: what may be sent; None: all.
    """
    found = _found(local, remote, failed, chosen)
    kept = _kept_at_last(local, remote, found, rules)
    if rules.options.behind == "skip":
        kept -= too_many(local, rules)
    return [c for c in found if c.name in kept]


def _found(local: list[Info], remote: list[Info], failed: Collection[Key], chosen: Collection[Key] | None) -> list[Info]:
    return [c for c in missing(local, remote) if c.key not in failed and (chosen is None or c.key in chosen)]


def to_remove_remotely(local: list[Info], remote: list[Info], rules: Rules, failed: Collection[Key] = (),
                       chosen: Collection[Key] | None = None) -> list[Info]:  # fmt: skip
    """The checkpoints of the second place that retention lets go: of the series that the first place has. Others are another job's.

    Of the own run the newest stay, whatever the times of other runs are: the second place may have the only copy. So does what stays
    once all has arrived that is on its way: after a rollback that is of another branch than the newest that is there.

    Args:
        failed, chosen: as of `to_send`.
    """
    series = _series(local, rules.form)
    keep = rules.options.keep_last, rules.options.keep_every
    here = {series(c) for c in local}
    gone = let_go((c for c in remote if series(c) in here), *keep, series)
    own = _own(local, remote)
    kept = {c.name for c in own} - let_go(own, *keep, series)
    kept |= _kept_at_last(local, remote, _found(local, remote, failed, chosen), rules)
    return [c for c in remote if c.name in gone - kept]


def too_many(local: list[Info], rules: Rules) -> set[str]:
    """Names of the local checkpoints that retention lets go once they have arrived."""
    return let_go(local, rules.keep_local, rules.keep_local_every, _series(local, rules.form))


def to_remove_locally(local: list[Info], remote: list[Info], rules: Rules) -> list[Info]:
    """The local checkpoints that retention lets go: of those that have arrived.

    One that the second place would let go at once, by what has arrived there of the own run, counts as arrived.
    """
    names, series = too_many(local, rules), _series(local, rules.form)
    gone = [c for c in local if c.name in names]
    if rules.options.behind == "skip":
        return gone
    # Not `missing`: where a later save of the name is there, of another node perhaps, this one has not arrived.
    arrived = {c.key for c in remote}
    own = _own(local, remote)
    return [
        c for c in gone
        if c.key in arrived or c.name in let_go(_merged(own, [c]), rules.options.keep_last, rules.options.keep_every, series)
    ]  # fmt: skip
