"""One save: the steps of every rank's worker, and what its trainer does about the worker's end.

The steps are those of runtime/worker (save_job.cc, manifest.cc, commit.cc, ranks.cc, directory.cc) and
runtime/checkpointer (rank_presence.cc). Each step that another process or a power cut can tell from the next
is one transition here.
"""

from __future__ import annotations

from collections.abc import Iterator

from .checker import Step
from .retention import CHOOSE, SYNC
from .state import (
    ALIVE,
    ASIDE,
    COMMITTED,
    COMMITTING,
    DEAD,
    ENDED,
    FAILED,
    FINAL,
    IDLE,
    JOINED,
    MISSING,
    NAMED,
    NOWHERE,
    PARTIAL,
    REPORTED_DURABLE,
    REPORTED_FAILED,
    RETIRED,
    TEMPORARY,
    TORN,
    VOTED,
    WHOLE,
    WITHDRAWN,
    Rank,
    Save,
    State,
    changed,
    value_of,
)

# The worker has done, in this order:
(
    NOT_BEGUN,  # nothing: the trainer has not called
    BEGUN,  # the trainer: made and locked the directory, joined the board
    OPEN,  # opened the directory, synced the parent
    FILES_NAMED,  # written, synced and named the files: no other process sees the difference
    NAMES_SYNCED,
    MANIFEST_NAMED,
    PROVEN,  # synced the directory. From here on the rank waits
    RECORD_NAMED,  # rank 0 alone
    VOTES_KEPT,
    ANNOUNCED,
    READY,  # looked at the board once more, and locked the own manifest
    TARGET_LOCKED,  # found a checkpoint that may be replaced, and locked its manifest
    EXCHANGED,
    RENAMED,
    TOLD,  # rank 0: published the commit. Others: seen it
    DONE,
    FAILING,
    LEFT,  # published the failure
    UNPROVEN,  # removed record and manifest
    UNPROVEN_SYNCED,
    REMOVED,  # the end of a failed worker
    GIVEN_UP,  # the end of a voted worker without an answer: its files stay
) = range(22)


def silent(rank: Rank) -> bool:
    """No process of the rank gives a sign of life, and neither the board nor a vote says why."""
    return not rank.running and (rank.board in (MISSING, JOINED) or (rank.board == VOTED and not value_of(rank.manifest)))


def holds_lock(save: Save) -> bool:
    """From before the rename until the name was checked again, rank 0 holds the lock of its own manifest."""
    return save.ranks[0].worker == ALIVE and READY <= save.ranks[0].step <= TOLD


def is_locked(state: State, index: int) -> bool:
    """Whether a save holds the manifest of this checkpoint: its own save, or one that replaces it."""
    return holds_lock(state.saves[index]) or any(
        save.ranks[0].worker == ALIVE and save.ranks[0].step == TARGET_LOCKED
        for save in state.saves
        if save.name == state.saves[index].name
    )


class Worker:
    """The transitions of one rank of one save in one state."""

    def __init__(self, state: State, index: int, rank: int, bugs: frozenset[str]) -> None:
        self.state = state
        self.index = index
        self.number = rank
        self.save = state.saves[index]
        self.rank = self.save.ranks[rank]
        self.place = state.place(index)
        self.bugs = bugs

    def _to(self, step: int, state: State | None = None, **changes: int) -> State:
        """The state after this rank's step; `state` has what the step changed elsewhere."""
        state = state or self.state
        rank = state.saves[self.index].ranks[self.number]
        if step in (DONE, REMOVED, GIVEN_UP):
            changes["worker"] = ENDED
        return state.with_rank(self.index, self.number, rank._replace(step=step, **changes))

    def _label(self, *what: object) -> tuple[object, ...]:
        return (f"save {self.index}, rank {self.number}", *what)

    def steps(self) -> Iterator[Step]:
        rank = self.rank
        if rank.trainer == ALIVE and rank.step == NOT_BEGUN:
            yield from self._begin()
        elif rank.worker == ALIVE:
            yield from self._work()
        elif rank.trainer == ALIVE:
            yield from self._conclude()

    def _begin(self) -> Iterator[Step]:
        holder = self.state.recovery
        if holder.phase in (1, 4) and holder.step > 0 and holder.save == self.index:
            return  # the recovery holds the directory's lock
        begun = any(rank.step != NOT_BEGUN for rank in self.save.ranks)
        if self.place != PARTIAL and begun:
            # A recovery took the directory away. The one that is made anew lacks the votes of the others, so
            # that this rank ends by a deadline and leaves nothing.
            yield Step(self._label("comes too late"), self._late())
            return
        state = self.state if self.place == PARTIAL else self.state.moved((self.index, PARTIAL))
        yield Step(self._label("joins"), self._to(BEGUN, state, worker=ALIVE, board=JOINED))

    def _late(self) -> State:
        return self._to(REMOVED, trainer=DEAD, outcome=REPORTED_FAILED)

    def _work(self) -> Iterator[Step]:
        step, voted = self.rank.step, self.number != 0 and self.rank.step >= MANIFEST_NAMED
        if step >= FAILING:
            yield self._abort()
            return
        decided = READY if len(self.save.ranks) == 1 else ANNOUNCED
        if len(self.save.ranks) > 1 and BEGUN < step and not voted and (step < decided):
            if any(r.board in (FAILED, WITHDRAWN) for r in self.save.ranks):
                yield Step(self._label("sees the failure of another rank"), self._to(FAILING))
        if step < PROVEN:
            yield from self._write()
        elif self.number != 0:
            yield from self._wait_for_decision()
        elif step == PROVEN:
            yield from self._wait_for_votes()
        else:
            yield from self._commit()

    def _write(self) -> Iterator[Step]:
        step, rank = self.rank.step, self.rank
        if step == BEGUN:
            if self.place != PARTIAL:
                yield Step(self._label("finds the directory taken away"), self._to(FAILING))
                return
            state = self.state.parent_synced()
            yield Step(self._label("opens the directory"),
                       self._to(OPEN, state, data=changed(rank.data, TEMPORARY)))
        elif step == OPEN:
            content = rank.content if "names before data" in self.bugs else WHOLE
            yield Step(self._label("writes, syncs and names its files"),
                       self._to(FILES_NAMED, data=changed(rank.data, NAMED), content=content))
        elif step == FILES_NAMED:
            yield Step(self._label("syncs the names"),
                       self._to(NAMES_SYNCED, self.state.directory_synced(self.index)))
        elif step == NAMES_SYNCED:
            yield Step(self._label("names its manifest"),
                       self._to(MANIFEST_NAMED, manifest=changed(rank.manifest, 1)))
        elif step == MANIFEST_NAMED:
            board = VOTED if self.number != 0 else rank.board
            state = self.state.directory_synced(self.index)
            yield Step(self._label("syncs its manifest"), self._to(PROVEN, state, board=board, content=WHOLE))

    # Rank 0.

    def _wait_for_votes(self) -> Iterator[Step]:
        others = self.save.ranks[1:]
        if self.place == FINAL:
            yield Step(self._label("finds itself promoted"), self._to(VOTES_KEPT))
            return
        if self.place != PARTIAL and "fence ignored" not in self.bugs:
            yield Step(self._label("finds the directory taken away"), self._to(FAILING))
            return
        if self.place == PARTIAL or "fence ignored" in self.bugs:
            for rank in others:
                if silent(rank) and not value_of(rank.manifest):
                    yield Step(self._label("misses a rank"), self._to(FAILING))
                    break
        if "record before a manifest" in self.bugs or all(
            value_of(rank.manifest) and (rank.board == VOTED or silent(rank)) for rank in others
        ):
            yield Step(self._label("has all votes and names the record"), self._record())

    def _record(self) -> State:
        state = self.state.with_save(self.index, self.save._replace(record=changed(self.save.record, 1)))
        return self._to(RECORD_NAMED, state)

    def _commit(self) -> Iterator[Step]:
        step = self.rank.step
        if step == RECORD_NAMED:
            state = self.state if "votes not kept" in self.bugs else self.state.directory_synced(self.index)
            yield Step(self._label("syncs votes and record"), self._to(VOTES_KEPT, state))
        elif step == VOTES_KEPT and len(self.save.ranks) > 1:
            state = self.state.with_save(self.index, self.save._replace(decision=COMMITTING))
            yield Step(self._label("announces the commit"), self._to(ANNOUNCED, state))
        elif step in (VOTES_KEPT, ANNOUNCED):
            failed = any(rank.board in (FAILED, WITHDRAWN) for rank in self.save.ranks)
            stops = failed and "no look after the announcement" not in self.bugs
            yield Step(self._label("looks at the board once more"), self._to(FAILING if stops else READY))
        elif step == READY:
            yield self._take_name()
        elif step == TARGET_LOCKED:
            yield self._exchange()
        elif step == EXCHANGED:
            old = self._aside()
            state = self.state if old < 0 else self.state.moved((old, RETIRED))
            yield Step(self._label("hides the old checkpoint"), self._to(RENAMED, state))
        elif step == RENAMED:
            if self.place != FINAL:
                # Retired or replaced already; the lock keeps other saves from it.
                yield Step(self._label("does not find its checkpoint"), self._to(GIVEN_UP, board=FAILED))
                return
            state = self.state.with_save(self.index, self.save._replace(decision=COMMITTED))
            yield Step(self._label("publishes the commit"), self._to(TOLD, state))
        elif step == TOLD:
            yield Step(self._label("syncs the parent and ends"), self._ended())

    def _ended(self) -> State:
        return self._to(DONE, self.state if "durable early" in self.bugs else self.state.parent_synced())

    def _aside(self) -> int:
        for other, save in enumerate(self.state.saves):
            if save.name == self.save.name and self.state.place(other) == ASIDE:
                return other
        return -1

    def _take_name(self) -> Step:
        if self.place == FINAL:
            return Step(self._label("finds itself promoted"), self._to(RENAMED))
        if self.place != PARTIAL and "fence ignored" not in self.bugs:
            return Step(self._label("finds the directory taken away"), self._to(FAILING))
        standing = self.state.standing(self.save.name)
        if standing < 0:
            return Step(self._label("renames the directory"),
                        self._to(RENAMED, self.state.moved((self.index, FINAL))))
        older = self.save.replaces >> standing & 1 or "older replaces newer" in self.bugs
        if not older:
            return Step(self._label(f"finds save {standing} under the name"), self._to(FAILING))
        if is_locked(self.state, standing):
            return Step(self._label("waits for the lock"), self.state, fault=True)
        return Step(self._label(f"locks save {standing}"), self._to(TARGET_LOCKED))

    def _exchange(self) -> Step:
        standing = self.state.standing(self.save.name)
        if self.place != PARTIAL or standing < 0:
            return Step(self._label("has nothing to exchange"), self._to(FAILING))
        state = self.state.moved((self.index, FINAL), (standing, ASIDE))
        return Step(self._label(f"exchanges the names with save {standing}"), self._to(EXCHANGED, state))

    # The other ranks.

    def _wait_for_decision(self) -> Iterator[Step]:
        rank, first = self.rank, self.save.ranks[0]
        if rank.step == TOLD:
            yield Step(self._label("syncs the parent and ends"), self._ended())
        elif self.save.decision == COMMITTED:
            yield Step(self._label("sees the commit"), self._to(TOLD))
        elif first.board == FAILED:
            # Rank 0 will never commit: the files are this rank's again.
            yield Step(self._label("sees the failure of rank 0"), self._to(FAILING))
        elif silent(first):
            if self.place == FINAL:
                yield Step(self._label("misses rank 0 and finds the checkpoint"), self._to(TOLD))
            else:
                yield Step(self._label("misses rank 0"), self._to(GIVEN_UP, board=WITHDRAWN))

    # Failures.

    def _abort(self) -> Step:
        step, state = self.rank.step, self.state
        if step == FAILING:
            if "failure not published" in self.bugs:
                return Step(self._label("publishes nothing"), self._to(LEFT))
            return Step(self._label("publishes its failure"), self._to(LEFT, board=FAILED))
        if step == LEFT:
            if self.place != PARTIAL:
                return Step(self._label("leaves the directory to the recovery"), self._to(REMOVED))
            if "data removed first" in self.bugs:
                return self._remove_files(UNPROVEN_SYNCED)
            record = changed(self.save.record, 0) if value_of(self.save.record) and self.number == 0 else None
            if record is not None:
                state = state.with_save(self.index, self.save._replace(record=record))
            manifest = changed(self.rank.manifest, 0) if value_of(self.rank.manifest) else self.rank.manifest
            return Step(self._label("removes its manifest"), self._to(UNPROVEN, state, manifest=manifest))
        if step == UNPROVEN:
            return Step(self._label("syncs the removal"),
                        self._to(UNPROVEN_SYNCED, state.directory_synced(self.index)))
        return self._remove_files(REMOVED)

    def _remove_files(self, step: int) -> Step:
        """Shortens and removes the files; the last rank to fail removes the directory."""
        if step == UNPROVEN_SYNCED:
            return Step(self._label("removes its files first"),
                        self._to(UNPROVEN_SYNCED, content=TORN))
        data = changed(self.rank.data, 0) if value_of(self.rank.data) else self.rank.data
        after = self._to(step, data=data, content=TORN if value_of(self.rank.data) else self.rank.content,
                         manifest=changed(self.rank.manifest, 0))
        ranks = after.saves[self.index].ranks
        empty = all(not value_of(r.data) and not value_of(r.manifest) and r.board == FAILED for r in ranks)
        if empty and self.place == PARTIAL:
            after = after.moved((self.index, NOWHERE))
        return Step(self._label("removes its files"), after)

    # The trainer, whose worker has ended or is gone.

    def _conclude(self) -> Iterator[Step]:
        rank, committed = self.rank, self.place == FINAL
        if rank.worker == ENDED:
            outcome = REPORTED_DURABLE if rank.step == DONE else REPORTED_FAILED
            yield Step(self._label("reports"), self._report(self.state, outcome))
        elif committed:
            state = self.state
            if self.number == 0:
                state = state.with_save(self.index, self.save._replace(decision=COMMITTED))
            yield Step(self._label("finds the checkpoint of its dead worker"),
                       self._report(state.parent_synced(), REPORTED_DURABLE))
        elif rank.board in (FAILED, WITHDRAWN):
            # Published, by the worker or below. A voted rank waits while rank 0 may be about to rename.
            first = self.save.ranks[0]
            undecided = self.save.decision == COMMITTING and first.running and first.board != FAILED
            if rank.board == FAILED or not undecided:
                yield Step(self._label("reports the death of its worker"),
                           self._report(self.state, REPORTED_FAILED))
        else:
            board = WITHDRAWN if self.number != 0 and value_of(rank.manifest) else FAILED
            yield Step(self._label("publishes the death of its worker"),
                       self.state.with_rank(self.index, self.number, rank._replace(board=board)))

    def _report(self, state: State, outcome: int) -> State:
        rank = state.saves[self.index].ranks[self.number]._replace(trainer=ENDED, outcome=outcome)
        state = state.with_rank(self.index, self.number, rank)
        save = state.saves[self.index]
        if outcome == REPORTED_DURABLE:
            if self.number == 0:
                state = state.with_save(self.index, save._replace(keeper=(CHOOSE, -1)))
            return state._replace(durable=state.durable | 1 << self.index)
        if self.rank.step == REMOVED:
            state = state._replace(aborted=state.aborted | 1 << self.index)
        if len(save.ranks) == 1 and self.rank.worker == DEAD and self.place == PARTIAL:
            # The only rank: its trainer removes what the worker has left.
            state = state.with_save(self.index, save._replace(keeper=(SYNC, self.index)))
        return state

    # Faults.

    def faults(self) -> Iterator[Step]:
        rank, left = self.rank, self.state.left
        if left.kills:
            state = self.state._replace(left=left._replace(kills=left.kills - 1))
            if rank.worker == ALIVE:
                yield Step(self._label("loses its worker"),
                           state.with_rank(self.index, self.number, rank._replace(worker=DEAD)), True)
            if rank.trainer == ALIVE or (self.number == 0 and self.save.keeper != IDLE):
                dead = rank._replace(trainer=DEAD)
                after = state.with_rank(self.index, self.number, dead)
                if self.number == 0:
                    after = after.with_save(self.index, after.saves[self.index]._replace(keeper=IDLE))
                yield Step(self._label("loses its trainer"), after._replace(at=-2), True)
        if left.failures and rank.worker == ALIVE and rank.step <= TARGET_LOCKED:
            yield from self._failures(self.state._replace(left=left._replace(failures=left.failures - 1)))

    def _failures(self, state: State) -> Iterator[Step]:
        rank = self.rank
        if self.number == 0 or rank.step < MANIFEST_NAMED:
            yield Step(self._label("fails"), self._to(FAILING, state), True)
        elif rank.step == MANIFEST_NAMED:
            # The vote may have been seen: the files stay.
            yield Step(self._label("fails after its vote"), self._to(GIVEN_UP, state, board=WITHDRAWN), True)
        elif rank.step == PROVEN and rank.board == VOTED:
            yield Step(self._label("withdraws its vote"), self._to(PROVEN, state, board=WITHDRAWN), True)
