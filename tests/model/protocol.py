"""The protocol of a directory: jobs that save, recover, retain and roll back, and what must hold in every state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .checker import Step
from .recovery import IDLE as NO_RECOVERY
from .recovery import REPORTS, Recoverer, recovered, start
from .retention import Housekeeper
from .save import NOT_BEGUN, Worker, silent
from .state import (
    ABSENT,
    ALIVE,
    DEAD,
    FINAL,
    GONE,
    IDLE,
    NAMED,
    NOWHERE,
    PARTIAL,
    REPORTED_DURABLE,
    REPORTED_FAILED,
    UNDECIDED,
    WHOLE,
    Left,
    Rank,
    Save,
    State,
    entry,
    power_cuts,
)

RESTART = -2  # State.at: the job has died


class Config(NamedTuple):
    """What one search covers."""

    ranks: int = 1
    saves: int = 1  # at most
    standing: bool = False  # a checkpoint stands at the beginning
    replace: bool = False  # all saves have one name
    together: int = 1  # saves under way at the same time
    keep_last: int = 0
    left: Left = Left()
    bugs: frozenset[str] = frozenset()


class Protocol:
    """A model for checker.explore."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._cut: set[tuple[object, ...]] = set()
        self._canonical: dict[tuple[Save, bool], Save] = {}

    def initial(self) -> State:
        state = State((), ((),), self.config.left)
        if not self.config.standing:
            return state
        rank = GONE._replace(data=entry(NAMED), content=WHOLE, manifest=entry(1))
        save = Save(name=0, ranks=(rank,) * self.config.ranks, record=entry(1))
        return State((save,), ((FINAL,),), self.config.left, durable=1, at=0)

    def steps(self, state: State) -> Iterator[Step]:
        bugs = self.config.bugs
        for index, save in enumerate(state.saves):
            for rank in range(len(save.ranks)):
                if save.ranks[rank].running or save.keeper != IDLE:
                    worker = Worker(state, index, rank, bugs)
                    yield from worker.steps()
                    yield from worker.faults()
            if save.keeper != IDLE:
                yield from Housekeeper(state, index, self.config.keep_last, bugs).steps()
        yield from self._job(state)
        if state.recovery.phase != NO_RECOVERY:
            yield from Recoverer(state, bugs).steps()
            if state.left.kills:
                left = state.left._replace(kills=state.left.kills - 1)
                yield Step(("recovery", "is killed"), state._replace(recovery=type(state.recovery)(), left=left), True)
        elif state.left.recoveries and state.saves:
            yield Step(("recovery", "begins"), start(state), True)
        if state.left.cuts:
            yield from self._power_cuts(state)

    def _power_cuts(self, state: State) -> Iterator[Step]:
        # States of one disk have the same cuts.
        disk = (
            tuple((s.name, s.replaces, s.parent, s.record, tuple((r.data, r.content, r.manifest) for r in s.ranks))
                  for s in state.saves),
            frozenset(state.parents), state.left, state.durable, state.aborted, state.gone,
        )
        if disk in self._cut:
            return
        self._cut.add(disk)
        for after in power_cuts(state):
            yield Step(("power", "is cut"), after, True)

    # The job that calls.

    def _job(self, state: State) -> Iterator[Step]:
        retains = self.config.keep_last != 0
        if retains and state.at == RESTART and not any(save.running for save in state.saves):
            newest = max(state.listed(), default=-1)
            yield Step(("job", f"restarts from save {newest}"), state._replace(at=newest), True)
            return
        if retains and state.left.rollbacks and not any(save.running for save in state.saves):
            left = state.left._replace(rollbacks=state.left.rollbacks - 1)
            for index in state.listed():
                if index != state.at:
                    yield Step(("job", f"goes back to save {index}"), state._replace(at=index, left=left), True)
        live = sum(any(rank.trainer == ALIVE for rank in save.ranks) for save in state.saves)
        if len(state.saves) < self.config.saves and live < self.config.together and not (retains and state.at == RESTART):
            yield Step(("job", f"calls save {len(state.saves)}"), self._call(state), bool(state.saves))

    def _call(self, state: State) -> State:
        index = len(state.saves)
        name = 0 if self.config.replace else index
        parent = -1
        if self.config.keep_last:
            parent = state.at
            # The step. After a rollback the run saves at other steps than before.
            name = 0 if parent < 0 else state.saves[parent].name + (2 if parent == index - 1 else 1)
        replaces = 0
        for other, save in enumerate(state.saves):
            if save.name == name and state.place(other) in (PARTIAL, FINAL):
                replaces |= 1 << other
        save = Save(name, (Rank(),) * self.config.ranks, replaces, parent)
        parents = tuple((*places, NOWHERE) for places in state.parents)
        return state._replace(saves=(*state.saves, save), parents=parents)

    # What must hold.

    def broken(self, before: State, step: Step) -> str:
        state = step.state
        if state is before:
            return ""
        if step.label[0] == "recovery" and (taken := self._taken(before, state)):
            return taken
        for index in state.listed():
            if not state.saves[index].whole:
                return f"save {index} is listed and not whole"
            if state.aborted >> index & 1:
                return f"save {index} is listed, and a rank has reported that it was given up"
            if state.gone >> index & 1:
                return f"save {index} is listed, and a recovery has reported that it is not there"
        if lost := self._lost(state):
            return lost
        if step.label[1] in ("misses a rank", "misses rank 0"):
            number = int(str(step.label[0]).split(",")[0].split()[1])
            if missed := self._missed(before.saves[number]):
                return missed
        for index, save in enumerate(state.saves):
            outcomes = {rank.outcome for rank in save.ranks}
            if {REPORTED_DURABLE, REPORTED_FAILED} <= outcomes:
                return f"save {index} is durable for one rank and has failed for another"
        if step.label[1] == REPORTS:
            return self._not_settled(state)
        return ""

    def _lost(self, state: State) -> str:
        """Every checkpoint that was reported durable is there, or its successor, or retention let it go."""
        listed = state.listed()
        for index in range(len(state.saves)):
            if not state.durable >> index & 1 or index in listed:
                continue
            name = state.saves[index].name
            if any(other > index and state.saves[other].name == name for other in listed):
                continue
            if self.config.keep_last and listed and listed[-1] > index:
                continue
            return f"save {index} was reported durable and is lost"
        newest = state.durable.bit_length() - 1
        before = state.saves[newest].parent if newest >= 0 else -1
        if self.config.keep_last > 1 and before >= 0 and state.durable >> before & 1 and before not in listed:
            return f"save {before} is removed, from which the newest descends"
        names = {save.name for index, save in enumerate(state.saves) if state.durable >> index & 1}
        if self.config.keep_last and len(listed) < min(self.config.keep_last, len(names)):
            return f"{len(listed)} checkpoints are left of {len(names)}"
        return ""

    @staticmethod
    def _taken(before: State, state: State) -> str:
        for index, save in enumerate(before.saves):
            moved = before.place(index) != state.place(index)
            if moved and any(rank.trainer == ALIVE and rank.step != NOT_BEGUN for rank in save.ranks):
                return f"a recovery takes the directory of save {index}, which is running"
        return ""

    @staticmethod
    def _missed(save: Save) -> str:
        """A deadline may end the wait for a rank that was killed, and for no other."""
        for rank in save.ranks:
            if silent(rank) and DEAD not in (rank.trainer, rank.worker):
                return "a rank is missed that was not killed: it has left no mark"
        return ""

    def _not_settled(self, state: State) -> str:
        """After a recovery without company another one changes nothing."""
        if any(save.running or save.keeper != IDLE for save in state.saves):
            return ""
        again = recovered(state)
        if again.listed() != state.listed():
            return "a second recovery finds other checkpoints"
        if recovered(again)[:2] != again[:2]:
            return "a third recovery still changes the directory"
        return ""

    def stuck(self, state: State) -> str:
        for index, save in enumerate(state.saves):
            for number, rank in enumerate(save.ranks):
                if rank.running:
                    return f"rank {number} of save {index} waits for ever"
        return "a recovery waits for ever" if state.recovery.phase != NO_RECOVERY else ""

    def canonical(self, state: State) -> State:
        saves = []
        for index, save in enumerate(state.saves):
            there = any(places[index] for places in state.parents)
            known = self._canonical.get((save, there))
            if known is None:
                known = self._canonical[save, there] = _canonical(save, there)
            saves.append(known)
        return state._replace(saves=tuple(saves), at=state.at if self.config.keep_last else -1)


def _canonical(save: Save, there: bool) -> Save:
    """The same directory without the past of its processes, and with ranks in order."""
    if not save.running:
        ranks = tuple(
            GONE._replace(data=r.data, content=r.content, manifest=r.manifest) if there else GONE
            for r in save.ranks
        )
        save = save._replace(ranks=ranks, decision=UNDECIDED, record=save.record if there else ABSENT)
    return save._replace(ranks=(save.ranks[0], *sorted(save.ranks[1:])))
