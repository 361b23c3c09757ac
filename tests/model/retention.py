"""What retention removes (runtime/recovery/find_abandoned.cc, select_for_removal.cc), and the housekeeper."""

from __future__ import annotations

from collections.abc import Iterator

from .checker import Step
from .removal import STEPS, removed
from .state import ASIDE, IDLE, PARTIAL, RETIRED, State

CHOOSE, SYNC, OPEN, REMOVE = range(1, 5)  # stages of Save.keeper; and REMOVE + 1, REMOVE + 2


def abandoned(state: State, listed: list[int]) -> set[int]:
    """The checkpoints of branches that a rollback has left. `listed` is ordered by the calls; a name is a step."""
    if not listed:
        return set()
    line, at = set(), listed[-1]
    while at >= 0 and at not in line:
        line.add(at)
        # The record of a checkpoint that was removed tells no parent.
        at = state.saves[at].parent if at in listed else -1
    found: set[int] = set()
    lowest = None
    for index in reversed(listed):
        step = state.saves[index].name
        if lowest is not None and step > lowest:
            found.add(index)
        elif index in line:
            lowest = step
    for index in listed:
        parent = state.saves[index].parent
        if index not in line and (parent in line or parent in found):
            found.add(index)
    return found


def to_remove(state: State, saved: int, keep_last: int, bugs: frozenset[str]) -> list[int]:
    listed = state.listed()
    if "retention by step" in bugs:
        order = sorted(listed, key=lambda index: state.saves[index].name)
    else:
        gone = abandoned(state, listed)
        order = sorted(listed, key=lambda index: (index not in gone, index))
    return [index for index in order[: max(0, len(listed) - keep_last)] if index != saved]


class Housekeeper:
    """Background removal in rank 0's trainer, behind a save that is reported."""

    def __init__(self, state: State, index: int, keep_last: int, bugs: frozenset[str]) -> None:
        self.state = state
        self.index = index
        self.keep_last = keep_last
        self.bugs = bugs

    def steps(self) -> Iterator[Step]:
        stage, target = self.state.saves[self.index].keeper
        if stage == CHOOSE:
            yield self._choose()
        elif stage == SYNC:
            unsynced = "removed before the parent is synced" in self.bugs
            state = self.state if unsynced else self.state.parent_synced()
            yield self._step("syncs the parent", state, (OPEN, target))
        elif stage == OPEN:
            # By its name: a partial one of this save, or a former checkpoint.
            places = (PARTIAL,) if target == self.index else (ASIDE, RETIRED)
            there = self.state.place(target) in places
            done = IDLE if target == self.index else (CHOOSE, -1)
            yield self._step(f"opens save {target}", self.state, (REMOVE, target) if there else done)
        else:
            yield self._remove(stage - REMOVE, target)

    def _step(self, what: str, state: State, keeper: tuple[int, int]) -> Step:
        save = state.saves[self.index]._replace(keeper=keeper)
        return Step((f"housekeeper of save {self.index}", what), state.with_save(self.index, save))

    def _choose(self) -> Step:
        state, save = self.state, self.state.saves[self.index]
        for target, place in enumerate(state.parents[-1]):
            # The replaced checkpoint, under either name.
            if place in (ASIDE, RETIRED) and save.replaces >> target & 1:
                return self._step(f"takes save {target}", state, (SYNC, target))
        if self.keep_last:
            for target in to_remove(state, self.index, self.keep_last, self.bugs):
                return self._step(f"retires save {target}", state.moved((target, RETIRED)), (SYNC, target))
        return self._step("has nothing to do", state, IDLE)

    def _remove(self, step: int, target: int) -> Step:
        then = (CHOOSE, -1) if step == STEPS - 1 else (REMOVE + step + 1, target)
        if step == STEPS - 1 and target == self.index:
            then = IDLE
        return self._step(f"removes save {target}, step {step + 1} of {STEPS}",
                          removed(self.state, target, step, self.bugs), then)
