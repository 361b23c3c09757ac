"""The state of the model: saves with their directories, ranks with their processes, and what is durable of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

# An entry of a directory, or a small file: its value, and a bit for every value that a power cut may leave.
# Entries are independent of each other: a cut may keep any set of the changes since the last fsync.
Entry = int


def entry(value: int) -> Entry:
    """Returns a durable entry."""
    return value | 1 << (value + 2)


def value_of(e: Entry) -> int:
    return e & 3


def changed(e: Entry, value: int) -> Entry:
    return e & ~3 | value | 1 << (value + 2)


def synced(e: Entry) -> Entry:
    return entry(e & 3)


def after_cut(e: Entry) -> list[Entry]:
    return [entry(v) for v in range(3) if e >> (v + 2) & 1]


ABSENT = entry(0)
# Values of Rank.data.
TEMPORARY, NAMED = 1, 2
# Values of Rank.content: in the page cache alone, durable, lost or shortened.
CACHED, WHOLE, TORN = range(3)
# Where a save's directory stands in the parent.
NOWHERE, PARTIAL, FINAL, RETIRED, FENCED, ASIDE = range(6)  # ASIDE: under the partial name of its successor
PLACES = ("nowhere", "partial", "final", "retired", "fenced", "aside")
# A process.
DEAD, ALIVE, ENDED = range(3)
# A rank on the board. WITHDRAWN: failed, but the vote is in rank 0's hands.
MISSING, JOINED, VOTED, FAILED, WITHDRAWN = range(5)
# What rank 0 announces on the board.
UNDECIDED, COMMITTING, COMMITTED = range(3)
# What a trainer reports.
NOTHING, REPORTED_DURABLE, REPORTED_FAILED = range(3)


# Save.keeper without work.
IDLE = (0, -1)


class Rank(NamedTuple):
    """A rank of one save: trainer, worker, and the rank's files."""

    step: int = 0  # of the worker: save.py
    trainer: int = ALIVE
    worker: int = ENDED
    board: int = MISSING
    outcome: int = NOTHING
    data: Entry = ABSENT
    content: int = CACHED
    manifest: Entry = ABSENT

    @property
    def running(self) -> bool:
        return self.trainer == ALIVE or self.worker == ALIVE


class Save(NamedTuple):
    """A save and its directory. Saves are numbered in the order of their calls."""

    name: int
    ranks: tuple[Rank, ...]
    replaces: int = 0  # a bit for each save that this one may replace
    parent: int = -1  # the save that the state descends from
    record: Entry = ABSENT
    decision: int = UNDECIDED
    keeper: tuple[int, int] = IDLE  # background removal in rank 0's trainer: retention.py

    @property
    def running(self) -> bool:
        return any(rank.running for rank in self.ranks)

    @property
    def whole(self) -> bool:
        """Every byte of every rank is there, with the proof."""
        return bool(value_of(self.record)) and all(
            value_of(r.manifest) and value_of(r.data) == NAMED and r.content != TORN for r in self.ranks
        )

    @property
    def looks_complete(self) -> bool:
        """As a recovery judges: all manifests, and files of the recorded sizes. It makes a missing record."""
        return all(value_of(r.manifest) and value_of(r.data) == NAMED for r in self.ranks)


class Left(NamedTuple):
    """How often each fault may still happen."""

    kills: int = 0
    failures: int = 0
    cuts: int = 0
    recoveries: int = 0
    rollbacks: int = 0


class Recovery(NamedTuple):
    """A running recovery: its phase, the directory in its hands, and the step there. See recovery.py."""

    phase: int = 0
    save: int = 0
    step: int = 0
    ownerless: int = 0  # the saves without a living trainer when the recovery began


class State(NamedTuple):
    saves: tuple[Save, ...]
    parents: tuple[tuple[int, ...], ...]  # the places of all saves that a power cut may leave; the last is now
    left: Left
    recovery: Recovery = Recovery()
    durable: int = 0  # saves that a rank or a recovery has reported as durable
    aborted: int = 0  # saves of which a rank has reported that they will never be there
    gone: int = 0  # saves that a recovery has reported as not there
    at: int = -1  # the save that the training descends from; -2: the job must start anew

    def place(self, save: int) -> int:
        return self.parents[-1][save]

    def standing(self, name: int) -> int:
        """Returns the save under a final name, or -1."""
        for index, place in enumerate(self.parents[-1]):
            if place == FINAL and self.saves[index].name == name:
                return index
        return -1

    def listed(self) -> list[int]:
        return [i for i, place in enumerate(self.parents[-1]) if place == FINAL]

    def moved(self, *moves: tuple[int, int]) -> State:
        """One rename: the new places of one save or, in an exchange, of two."""
        places = list(self.parents[-1])
        for save, place in moves:
            places[save] = place
        after = tuple(places)
        # Returning to an older state adds nothing that a cut could leave.
        parents = self.parents if after == self.parents[-1] else (*self.parents, after)
        return self._replace(parents=parents)

    def parent_synced(self) -> State:
        return self._replace(parents=self.parents[-1:])

    def with_save(self, index: int, save: Save) -> State:
        return self._replace(saves=(*self.saves[:index], save, *self.saves[index + 1 :]))

    def with_rank(self, index: int, rank: int, new: Rank) -> State:
        save = self.saves[index]
        return self.with_save(index, save._replace(ranks=(*save.ranks[:rank], new, *save.ranks[rank + 1 :])))

    def directory_synced(self, index: int) -> State:
        save = self.saves[index]
        ranks = tuple(
            rank._replace(data=synced(rank.data), manifest=synced(rank.manifest)) for rank in save.ranks
        )
        return self.with_save(index, save._replace(ranks=ranks, record=synced(save.record)))


GONE = Rank(trainer=DEAD, worker=DEAD)


def empty_of(save: Save) -> Save:
    """A directory that is not there."""
    return save._replace(ranks=(GONE,) * len(save.ranks), record=ABSENT, decision=UNDECIDED, keeper=IDLE)


def power_cuts(state: State) -> Iterator[State]:
    """Every state that a power cut may leave. No process survives it, and the board is gone."""
    contents = []
    for save in state.saves:
        alternatives = []
        for record, *entries in product(
            after_cut(save.record),
            *(after_cut(e) for rank in save.ranks for e in (rank.data, rank.manifest)),
        ):
            ranks = tuple(
                GONE._replace(
                    data=entries[2 * r],
                    manifest=entries[2 * r + 1],
                    content=WHOLE if rank.content == WHOLE else TORN,
                )
                for r, rank in enumerate(save.ranks)
            )
            alternatives.append(empty_of(save)._replace(ranks=ranks, record=record))
        contents.append(alternatives)
    for places in set(state.parents):
        # Of a directory without a name nothing is left.
        there = [c if place != NOWHERE else c[:1] for c, place in zip(contents, places, strict=True)]
        for saves in product(*there):
            kept = tuple(
                s if place != NOWHERE else empty_of(s) for s, place in zip(saves, places, strict=True)
            )
            left = state.left._replace(cuts=state.left.cuts - 1)
            yield State(kept, (places,), left, Recovery(), state.durable, state.aborted, state.gone, -2)
