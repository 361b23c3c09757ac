"""A recovery (runtime/recovery/recovery.cc): promote, fence, sync the parent, clean up, report."""

from __future__ import annotations

from collections.abc import Iterator

from .checker import Step
from .removal import STEPS, removed
from .save import NOT_BEGUN, is_locked
from .state import ALIVE, ASIDE, FENCED, FINAL, PARTIAL, RETIRED, Recovery, Save, State, changed, value_of

IDLE, PROMOTE, FENCE, SYNC, CLEAN, REPORT = range(6)
# Steps of one directory in the hands of a recovery.
LOOK, RECORDED, SYNCED, HIDE, MOVED, REMOVING = range(6)
NOBODY, TRAINER, ORPHAN = range(3)
REPORTS = "syncs the parent and reports"


def owner(save: Save, index: int, bugs: frozenset[str]) -> int:
    """What the two locks of the directory say."""
    if save.keeper[1] == index and "removal without locks" not in bugs:
        return TRAINER  # which removes what its worker has left
    begun = [rank for rank in save.ranks if rank.step != NOT_BEGUN]
    if any(rank.trainer == ALIVE for rank in begun):
        return TRAINER
    return ORPHAN if any(rank.worker == ALIVE for rank in begun) else NOBODY


def start(state: State) -> State:
    ownerless = 0
    for index, save in enumerate(state.saves):
        if all(rank.trainer != ALIVE for rank in save.ranks):
            ownerless |= 1 << index
    left = state.left._replace(recoveries=state.left.recoveries - 1)
    return state._replace(recovery=Recovery(PROMOTE, 0, LOOK, ownerless), left=left)


class Recoverer:
    def __init__(self, state: State, bugs: frozenset[str]) -> None:
        self.state = state
        self.now = state.recovery
        self.bugs = bugs

    def steps(self) -> Iterator[Step]:
        phase, index = self.now.phase, self.now.save
        while phase in (PROMOTE, FENCE, CLEAN):
            while index < len(self.state.saves):
                step = self._directory(phase, index)
                if step is not None:
                    yield step
                    return
                index += 1
                self.now = self.now._replace(save=index, step=LOOK)
            phase, index = phase + 1, 0
            self.now = self.now._replace(phase=phase, save=0, step=LOOK)
        if phase == SYNC:
            state = self.state if "removed before the parent is synced" in self.bugs else self.state.parent_synced()
            yield self._step("syncs the parent", state, Recovery(CLEAN, 0, LOOK, self.now.ownerless))
        elif phase == REPORT:
            yield self._step(REPORTS, self._reported(), Recovery())

    def _step(self, what: str, state: State, then: Recovery) -> Step:
        return Step(("recovery", what), state._replace(recovery=then))

    def _at(self, index: int, step: int) -> Recovery:
        return self.now._replace(save=index, step=step)

    def _next(self, index: int) -> Recovery:
        return self._at(index + 1, LOOK)

    def _owner(self, index: int) -> int:
        return owner(self.state.saves[index], index, self.bugs)

    def _directory(self, phase: int, index: int) -> Step | None:
        """The next step for one directory; None where there is nothing to do."""
        save, place = self.state.saves[index], self.state.place(index)
        if self.now.step == MOVED:
            return self._step("syncs the parent", self.state.parent_synced(), self._next(index))
        if self.now.step >= REMOVING:
            return self._removal(index)
        if phase == FENCE:
            if place != PARTIAL or self._owner(index) != ORPHAN or "no fence" in self.bugs:
                return None
            return self._step(f"fences save {index}", self.state.moved((index, FENCED)), self._at(index, MOVED))
        if "locks ignored" not in self.bugs and self._owner(index) != NOBODY:
            return None
        if place == PARTIAL and save.looks_complete:
            return self._promotion(phase, index)
        if self.now.step == HIDE:
            # Behind an exchange: the old one is called retired.
            old = next(i for i, other in enumerate(self.state.saves)
                       if self.state.place(i) == ASIDE and other.name == save.name)
            return self._step(f"hides save {old}", self.state.moved((old, RETIRED)), self._at(index, MOVED))
        if phase == PROMOTE:
            return None
        successor = self.state.standing(save.name)
        if place in (PARTIAL, FENCED, RETIRED) or (
            place == ASIDE and successor >= 0 and self.state.saves[successor].looks_complete
        ):
            return self._removal(index)
        return None

    def _promotion(self, phase: int, index: int) -> Step | None:
        save = self.state.saves[index]
        standing = self.state.standing(save.name)
        if self.now.step == LOOK:
            if standing >= 0 and not self._replaces(save, standing) and phase == PROMOTE:
                return None  # an older one: for the cleaning up
            if not value_of(save.record) and "promoted without a record" not in self.bugs:
                state = self.state.with_save(index, save._replace(record=changed(save.record, 1)))
                return self._step(f"makes the record of save {index}", state, self._at(index, RECORDED))
        if self.now.step in (LOOK, RECORDED):
            unsynced = "promoted without a sync" in self.bugs
            state = self.state if unsynced else self.state.directory_synced(index)
            return self._step(f"syncs save {index}", state, self._at(index, SYNCED))
        if standing < 0:
            return self._step(f"promotes save {index}", self.state.moved((index, FINAL)), self._at(index, MOVED))
        if self._replaces(save, standing):
            if is_locked(self.state, standing):
                return None
            state = self.state.moved((index, FINAL), (standing, ASIDE))
            return self._step(f"replaces save {standing} by save {index}", state, self._at(index, HIDE))
        if phase == CLEAN and self.state.saves[standing].replaces >> index & 1:
            return self._removal(index)
        return None  # neither may replace the other: kept, and reported

    def _replaces(self, save: Save, standing: int) -> bool:
        return bool(save.replaces >> standing & 1)

    def _removal(self, index: int) -> Step:
        step = max(0, self.now.step - REMOVING)
        last = step == STEPS - 1
        return self._step(f"removes save {index}, step {step + 1} of {STEPS}", removed(self.state, index, step, self.bugs),
                          self._next(index) if last else self._at(index, REMOVING + step + 1))

    def _reported(self) -> State:
        state = self.state if "reported before the parent is synced" in self.bugs else self.state.parent_synced()
        durable, gone = state.durable, state.gone
        for index, place in enumerate(state.parents[-1]):
            if place == FINAL:
                durable |= 1 << index
            elif self.now.ownerless >> index & 1 and (
                self._owner(index) == ORPHAN or place not in (PARTIAL, ASIDE)
            ):
                gone |= 1 << index
        return state._replace(durable=durable, gone=gone)


def recovered(state: State) -> State:
    """The state after one whole recovery, undisturbed."""
    state = start(state)
    while state.recovery.phase != IDLE:
        (step,) = Recoverer(state, frozenset()).steps()
        state = step.state
    return state
