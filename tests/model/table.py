"""Writes the table of states in runtime/layout/FORMAT.md, from the states that the model can reach.

    cd tests && python3 -m model.table
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from .checker import Result, explore
from .protocol import Protocol
from .recovery import IDLE as NO_RECOVERY
from .recovery import recovered
from .scenarios import SCENARIOS
from .state import ASIDE, FENCED, FINAL, IDLE, NAMED, NOWHERE, PARTIAL, RETIRED, State, value_of

FORMAT = Path(__file__).resolve().parents[2] / "runtime" / "layout" / "FORMAT.md"
BEGIN, END = "<!-- table of states: tests/model -->\n", "<!-- end of the table -->\n"
HEAD = ("directory", "manifests", "files", "record", "under `NAME`", "readers", "a recovery")
NAMES = {
    FINAL: "`NAME`",
    PARTIAL: "`NAME.partial-A`",
    FENCED: "`.NAME.fenced-A`",
    RETIRED: "`.NAME.retired-A`",
    ASIDE: "`NAME.partial-B`, holds A",
}
# They reach each kind of directory.
COVERED = ("two ranks, an error, power cut", "two ranks, kills and recovery", "replace", "two jobs, power cut")
# Where the real recovery is tried on each directory, too: tests/python/test_protocol_model.py.
TRIED = (*COVERED, "replace on two ranks")

# Of each column of a directory's content: how many values there are.
VALUES = {1: 3, 2: 3, 3: 2, 4: 4}

Row = tuple[str, ...]  # the columns of HEAD


class Case(NamedTuple):
    """A directory that the model can leave: its row, and what each rank has in it."""

    row: Row
    manifests: tuple[bool, ...]
    files: tuple[int, ...]  # 0, or a value of Rank.data


def _amount(values: list[bool]) -> str:
    return "all" if all(values) else "some" if any(values) else "none"


def _under_name(state: State, index: int) -> str:
    standing = state.standing(state.saves[index].name)
    if state.place(index) == FINAL:
        return "itself"
    if standing < 0:
        return "nothing"
    if state.saves[index].replaces >> standing & 1:
        return "one that A replaces"
    if state.saves[standing].replaces >> index & 1:
        return "one that replaces A"
    return "another"


def _outcome(before: int, after: int, under_name: str) -> str:
    if before == after:
        return "leaves it"
    if after == FINAL:
        return "promotes it" if under_name == "nothing" else "exchanges the two"
    return "removes it"


def cases_of(state: State) -> list[Case]:
    """The one directory, of a state in which no process runs, that is not or not alone under its final name."""
    uncommitted = [i for i, place in enumerate(state.parents[-1]) if place not in (NOWHERE, FINAL)]
    if len(uncommitted) > 1:
        return []
    after = recovered(state._replace(left=state.left._replace(recoveries=1)))
    cases = []
    for index in uncommitted or state.listed():
        save, place, under_name = state.saves[index], state.place(index), _under_name(state, index)
        manifests = tuple(bool(value_of(rank.manifest)) for rank in save.ranks)
        files = tuple(value_of(rank.data) for rank in save.ranks)
        row = (
            NAMES[place],
            _amount(list(manifests)),
            _amount([value == NAMED for value in files]),
            "yes" if value_of(save.record) else "no",
            under_name,
            "checkpoint" if place == FINAL else "pass over",
            _outcome(place, after.place(index), under_name),
        )
        cases.append(Case(row, manifests, files))
    return cases


def merged(rows: set[Row]) -> list[Row]:
    """Rows that differ in one column, of the same outcome, become one row."""
    for name in NAMES.values():
        of_name = {row for row in rows if row[0] == name}
        if len({row[5:] for row in of_name}) == 1:
            # Nothing but the name counts.
            rows = rows - of_name | {(name, *("any" if len({r[c] for r in of_name}) > 1 else row[c]
                                              for row in [next(iter(of_name))] for c in range(1, 5)), *row[5:])
                                     for row in of_name}
    for column in (3, 2, 1, 4):
        groups: dict[Row, set[str]] = {}
        for row in rows:
            groups.setdefault((*row[:column], "", *row[column + 1 :]), set()).add(row[column])
        rows = {
            (*key[:column], "any" if len(values) == VALUES[column] else ", ".join(sorted(values)), *key[column + 1 :])
            for key, values in groups.items()
        }
    return sorted(rows, key=lambda row: (list(NAMES.values()).index(row[0]), row[1:]))


@functools.cache
def searched(name: str) -> tuple[Result, frozenset[Case]]:
    """The result of one scenario, and the directories that it leaves."""
    found: set[Case] = set()

    def visit(state: State) -> None:
        if state.recovery.phase == NO_RECOVERY and not any(s.running or s.keeper != IDLE for s in state.saves):
            found.update(cases_of(state))

    return explore(Protocol(SCENARIOS[name]), visit if name in TRIED else None), frozenset(found)


def cases() -> list[Case]:
    """Each directory that the real recovery is to be tried on."""
    return sorted({case for name in TRIED for case in searched(name)[1]})


def table() -> str:
    found = {case.row for name in COVERED for case in searched(name)[1]}
    lines = [HEAD, tuple("---" for _ in HEAD), *merged(found)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(text: str) -> str:
    """The document with the table of today."""
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + table() + text[end:]


if __name__ == "__main__":
    FORMAT.write_text(written(FORMAT.read_text()))
