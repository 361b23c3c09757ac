"""Writes the calls of one save in the order of the model, for the worker's tests: tests/unit/worker/model_order.h.

    cd tests && python3 -m model.order

A call is what a step changes in the state: a name, or what is durable of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .checker import Step
from .protocol import Config, Protocol
from .save import Worker
from .state import (
    ASIDE,
    FINAL,
    NAMED,
    NOWHERE,
    PARTIAL,
    RETIRED,
    WHOLE,
    Entry,
    Left,
    Save,
    State,
    synced,
    value_of,
)

HEADER = Path(__file__).resolve().parents[1] / "unit" / "worker" / "model_order.h"
FIRST_LINES = """\
// The calls of one save, in the order of the model of the protocol (tests/model). Written by
// `cd tests && python3 -m model.order`: not by hand.
#ifndef HOLDFAST_TESTS_UNIT_WORKER_MODEL_ORDER_H_
#define HOLDFAST_TESTS_UNIT_WORKER_MODEL_ORDER_H_

namespace holdfast::worker::model {

// One call in each line. MANIFEST, RECORD and HIDDEN stand for names of the save.
"""
LAST_LINES = """\
}  // namespace holdfast::worker::model

#endif  // HOLDFAST_TESTS_UNIT_WORKER_MODEL_ORDER_H_
"""

Bugs = frozenset[str]


def _entries(save: Save) -> list[Entry]:
    return [save.record, *(entry for rank in save.ranks for entry in (rank.data, rank.manifest))]


def _is_synced(before: Save, after: Save) -> bool:
    """An entry is what it was, and no cut can change it any more."""
    pairs = zip(_entries(before), _entries(after), strict=True)
    return any(was != now and now == synced(was) for was, now in pairs)


def calls(before: State, step: Step, index: int, number: int) -> list[str]:
    """The calls of one step of a worker of the save `index`."""
    after, what = step.state, str(step.label[1])
    was, now = before.saves[index], after.saves[index]
    made: list[str] = []
    if what.startswith(("locks save", "finds save")):
        made.append("rename partial step-7")  # refused: the name is taken
    moves = {i: move for i, move in enumerate(zip(before.parents[-1], after.parents[-1], strict=True)) if move[0] != move[1]}
    if moves.get(index) == (NOWHERE, PARTIAL):
        made.append("fsync partial")  # the mark of a save's directory
    if len(after.parents) == 1 < len(before.parents):
        made.append("fsync parent")
    if value_of(was.record) != value_of(now.record):
        to = value_of(now.record)
        made += ["fsync RECORD.tmp", "rename RECORD.tmp RECORD"] if to else ["rename RECORD RECORD.tmp"]
    own_was, own_now = was.ranks[number], now.ranks[number]
    if value_of(own_was.manifest) != value_of(own_now.manifest):
        to = value_of(own_now.manifest)
        made += ["fsync MANIFEST.tmp", "rename MANIFEST.tmp MANIFEST"] if to else ["remove MANIFEST"]
    if value_of(own_was.data) != NAMED == value_of(own_now.data):
        made += ["write a.bin.tmp", "truncate a.bin.tmp"]
        made += ["fsync a.bin.tmp"] if own_now.content == WHOLE else []
        made.append("rename a.bin.tmp a.bin")
    elif value_of(own_was.data) and not value_of(own_now.data):
        made.append("remove a.bin")
    if _is_synced(was, now):
        made.append("fsync partial")
    for moved, move in moves.items():
        if move == (PARTIAL, FINAL):
            made.append("rename partial step-7")  # also of the exchange
        elif move == (ASIDE, RETIRED):
            made.append("rename partial HIDDEN")
        elif move == (PARTIAL, NOWHERE):
            made += ["fsync partial", "remove RECORD.tmp", "remove partial"]  # the mark goes last
        else:
            assert move in ((NOWHERE, PARTIAL), (FINAL, ASIDE)), (moved, move)
    return made


class Walk:
    """One save, of which the caller chooses whose step is next."""

    def __init__(self, config: Config, bugs: Bugs, standing: bool = False) -> None:
        protocol = Protocol(config)
        state = protocol.initial()
        self.index = len(state.saves)
        (self.state,) = [step.state for step in protocol.steps(state) if step.label[0] == "job"]
        if standing:  # what is under the name is none of those that it may replace
            self.state = self.state.with_save(self.index, self.state.saves[self.index]._replace(replaces=0))
        self.bugs = bugs

    def until(self, number: int, what: str) -> list[list[str]]:
        """Steps of one rank, up to the one that is named, or to the end: the calls of each."""
        made = []
        while steps := list(Worker(self.state, self.index, number, self.bugs).steps()):
            made.append(calls(self.state, steps[-1], self.index, number))
            self.state = steps[-1].state
            if str(steps[-1].label[1]).startswith(what):
                break
        return made

    def fault(self, number: int, what: str) -> None:
        (self.state,) = [step.state for step in Worker(self.state, self.index, number, self.bugs).faults() if step.label[1] == what]


PROVEN, ENDS = "syncs its manifest", "syncs the parent and ends"


def _flat(steps: list[list[str]]) -> list[str]:
    return [call for step in steps for call in step]


def _one_rank(bugs: Bugs) -> list[str]:
    return _flat(Walk(Config(), bugs).until(0, ENDS))


def _replacing(bugs: Bugs) -> list[str]:
    walk = Walk(Config(saves=2, standing=True, replace=True), bugs)
    walk.until(0, "looks at the board once more")
    return _flat(walk.until(0, ENDS))


def _giving_up(bugs: Bugs) -> list[str]:
    walk = Walk(Config(saves=2, standing=True, replace=True), bugs, standing=True)
    walk.until(0, "has all votes")
    return _flat(walk.until(0, "removes its files"))


def _voted(bugs: Bugs) -> Walk:
    walk = Walk(Config(ranks=2, left=Left(failures=1)), bugs)
    walk.until(1, PROVEN)
    return walk


def _rank_zero(bugs: Bugs) -> list[str]:
    walk = _voted(bugs)
    *_, proof = walk.until(0, PROVEN)
    return proof + _flat(walk.until(0, ENDS))


def _vote_taken_back(bugs: Bugs) -> list[str]:
    walk = _voted(bugs)
    walk.until(0, PROVEN)
    record = walk.until(0, "has all votes")
    walk.fault(1, "withdraws its vote")
    return _flat(record + walk.until(0, "removes its files"))


def _rank_one(bugs: Bugs) -> list[str]:
    walk = Walk(Config(ranks=2), bugs)
    walk.until(0, PROVEN)
    *_, proof = walk.until(1, PROVEN)
    walk.until(0, "publishes the commit")
    return proof + _flat(walk.until(1, ENDS))


ORDERS: dict[str, Callable[[Bugs], list[str]]] = {
    "kOneRank": _one_rank,
    "kReplacing": _replacing,
    "kRankZeroOfTwo": _rank_zero,
    "kVoteTakenBack": _vote_taken_back,
    "kRankOneOfTwo": _rank_one,
    "kGivingUp": _giving_up,
}


def written(bugs: Bugs = frozenset()) -> str:
    """The header of today."""
    lists = []
    for name, order in ORDERS.items():
        lines = "".join(f"{call}\n" for call in order(bugs))
        lists.append(f'inline constexpr char {name}[] = R"(\n{lines})";\n')
    return FIRST_LINES + "\n".join(lists) + "\n" + LAST_LINES


if __name__ == "__main__":
    HEADER.write_text(written())
