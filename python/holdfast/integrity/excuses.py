"""Causes of a failed save: events that reach it, errors of its file system, saves of its name, memory that is held."""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.integrity import schedule

if TYPE_CHECKING:
    from holdfast.integrity.judge import Made

# Of a file system that errs. The runtime says DATA_LOSS for EIO, and the package's Python UNAVAILABLE.
OF_ERRORS = {"DATA_LOSS", "RESOURCE_EXHAUSTED", "UNAVAILABLE"}
# What the first save to a directory makes for all of them, as its messages call it.
_NEEDED = ("staging arena", "the worker's socket", "the socket by which a worker", "start a thread")
# Codes that a save may fail with after an event of a kind.
_CODES = {
    "kill-worker": {"ABORTED"},
    "kill-both": {"ABORTED"},  # of a trainer that saw its worker's end before its own
    "terminate-worker": {"ABORTED"},
    "hang-worker": {"DEADLINE_EXCEEDED", "ABORTED"},
    "oom-worker": {"ABORTED"},
    "limit-memory": {"RESOURCE_EXHAUSTED", "UNAVAILABLE"},  # no memory; no thread
    "cancel": {"CANCELLED"},
    "change-sealed": {"DATA_LOSS"},
    "change-and-restore": {"DATA_LOSS"},
    "lose-copy": {"INTERNAL"},
    "limit-size": {"RESOURCE_EXHAUSTED"},
    "limit-files": {"RESOURCE_EXHAUSTED"},
    "disk": {"RESOURCE_EXHAUSTED"},
    "errs": OF_ERRORS,
    "exit-trainer": {"CANCELLED", "ABORTED"},
    "fault": {  # a system call's error: all that has a reason of the system
        "ABORTED", "ALREADY_EXISTS", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND",
        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNIMPLEMENTED",
    },
}  # fmt: skip
# Codes on the other ranks of a save: one has failed, or gives no sign of life. In DCP they give its codes, or
# say that it is gone.
_OF_RANKS = {"holdfast": {"ABORTED", "DEADLINE_EXCEEDED"}, "dcp": {"ABORTED", "UNAVAILABLE"}}
# Errors of a process group, of an exchange with a rank that has gone.
_OF_GROUPS = ("RuntimeError", "DistBackendError", "DistNetworkError")
# What a system call of others' says there, where this package's errors have the codes above.
_ERRNOS = {
    "disk": {errno.ENOSPC, errno.EDQUOT},
    "errs": {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS},
    "limit-files": {errno.EMFILE},
    "limit-size": {errno.EFBIG},
}
_KEPT = ("persistent", "thread")  # launchers with one worker for all saves
_LATE = 100_000_000  # nanoseconds by which a trainer may tell of an event behind its effect


def has_code(error: dict[str, Any], allowed: set[str], causes: set[str]) -> bool:
    """Whether an error's code is one of those that are allowed. A file system whose disk refuses writes becomes read-only."""
    is_read_only = error["code"] == "PERMISSION_DENIED" and error["errno"] == errno.EROFS
    return error["code"] in allowed or is_read_only and "errs" in causes


def names_object(error: dict[str, Any], name: str) -> bool:
    """Whether an error's message names its object: the save, by its whole name, or what all saves to a directory need."""
    is_named = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", error["message"])
    return is_named is not None or any(needed in error["message"] for needed in _NEEDED)


@dataclasses.dataclass(frozen=True)
class _Event:
    kind: str
    job: int
    rank: int
    at: float
    phase: str


class Excuses:
    """Of the saves of one life.

    Args:
        round_: the round.
        lines: of its trainers, in the order of their times.
        actions: of its trainers.
        made: all saves of the round by number, with their ends.
        has_errors: whether the file system has returned errors.
        standing: generations and names of the checkpoints before the life; None: not known.
    """

    def __init__(self, round_: dict[str, Any], lines: list[dict[str, Any]], actions: list[dict[str, Any]], made: dict[int, Made],
                 has_errors: bool, standing: set[tuple[int, str]] | None) -> None:  # fmt: skip
        self.round = round_
        self._standing = standing
        self._made = made
        called = {line["n"] for line in lines if line["event"] == "call"}
        self._saves = [made[number] for number in sorted(called)]
        self._events = [_Event(e["kind"], e["job"], e["rank"], e["at"], e.get("phase", "")) for e in lines if e["event"] == "fired"]
        self._reached = {event: self._reach(event) for event in self._events}
        # Of errors that a save may give as its reason, where a fault alone is the cause; 0: it has none of the system.
        self.errnos = {0, *(e.get("errno", 0) for e in lines if e["event"] == "fired")}
        if errno.ENOMEM in self.errnos:
            self.errnos.add(errno.EAGAIN)  # what the C library makes of it where a thread cannot start
        if errno.EEXIST in self.errnos:
            self.errnos.add(errno.ENOENT)  # what was said to be there is not
        self._always = {"disk"} if round_["disk"] else set()
        if has_errors:
            self._always.add("errs")
        # Their deadlines are short in the whole life. A busy machine may miss them without the event.
        self._planned = {a["event"]["kind"] for a in actions if "event" in a} & {"hang-worker", *schedule.DEADLY}

    @property
    def kinds(self) -> set[str]:
        """All that can fail a save in the life, whichever."""
        return self._always | self._planned | {event.kind for event in self._events}

    def causes(self, made: Made, at: float) -> set[str]:
        """Kinds of causes of a save's failure that a rank tells at a time."""
        reaching = (e for e in self._events if e.at <= at + _LATE and made.number in self._reached[e])
        return self._always | {event.kind for event in reaching}

    def _reach(self, event: _Event) -> set[int]:
        """Numbers of the saves of an event's job that it can fail, if they end behind it.

        Those are the saves that had been called. Where one worker serves all saves, also those that are called before one
        of them has ended. A worker that was started under a limit keeps it. Of several ranks one that is gone fails all
        further saves; and until all ranks have ended a failed save, they may be in different calls.
        """
        saves = [m for m in self._saves if m.job == event.job]
        ranks = self.round["ranks"]
        has_limit = event.kind in schedule.LIMITS and event.phase == "call" and self.round["launcher"] == "persistent"
        if has_limit or event.kind in schedule.DEADLY and ranks > 1:
            return {m.number for m in saves}
        reached = {m.number for m in saves if m.began <= event.at}
        is_kept = event.kind in schedule.OF_WORKERS and self.round["launcher"] in _KEPT
        if is_kept or event.kind == "fault":  # whose place may be between two saves
            reached |= {m.number for m in saves
                        if not any(event.at < o.began and o.ended.get(event.rank, float("inf")) < m.began for o in saves)}  # fmt: skip
        known = -1
        while len(reached) > known and (ranks > 1 or self.round["door"] == schedule.MEGATRON):  # whose queue fails as a whole
            known = len(reached)
            until = max((m.last(ranks) for m in saves if m.number in reached and not m.is_durable_on(ranks)), default=event.at)
            reached |= {m.number for m in saves if m.began <= until}
        return reached

    def count(self, kind: str) -> int:
        """How many events of a kind there were."""
        return sum(event.kind == kind for event in self._events)

    def in_flight(self, event: dict[str, Any]) -> set[int]:
        """Numbers of the saves that were under way when an event fired."""
        ranks = self.round["ranks"]
        return {m.number for m in self._saves if m.job == event["job"] and m.began <= event["at"] <= m.last(ranks)}

    def codes(self, made: Made, at: float) -> set[str]:
        """Right codes of a save's failure that a rank tells at a time."""
        round_, causes = self.round, self.causes(made, at)
        of_ranks = _OF_RANKS["dcp" if schedule.format_of(round_) == "dcp" else "holdfast"] if round_["ranks"] > 1 else set()
        allowed: set[str] = set()
        for cause in causes - set(schedule.HARMLESS):
            allowed |= _CODES.get(cause, set()) | of_ranks
        if self.may_be_taken(made, at):
            allowed |= {"ALREADY_EXISTS"} | of_ranks
        if round_["when_full"] == "fail" and schedule.format_of(round_) != "dcp" and self.may_wait(made, at):
            allowed |= {"RESOURCE_EXHAUSTED"} | of_ranks
        if "limit-files" in causes and round_["ranks"] > 1 and round_["door"] != schedule.PLAN:
            allowed |= {"FAILED_PRECONDITION", "UNAVAILABLE"}  # of a rank that could not meet the others in their group
        if "hang-worker" in self._planned:
            allowed |= {"DEADLINE_EXCEEDED"} | ({"ABORTED"} if round_["launcher"] in _KEPT else set())
        return allowed | (of_ranks if self._planned else set())

    def is_of_megatron(self, error: dict[str, Any], causes: set[str]) -> bool:
        """Whether it is an error of Megatron's own, or of its caller's: of a file, or of an exchange with a rank that has gone.

        A rank whose own call has failed closes its connections.
        """
        if self.round["door"] != schedule.MEGATRON:
            return False
        if error.get("type") in _OF_GROUPS:
            return self.round["ranks"] > 1 and bool(causes & {*schedule.DEADLY, *_ERRNOS})
        right = set().union(*(_ERRNOS.get(cause, set()) for cause in causes))
        return bool(error.get("apart")) and error.get("errno") in right

    # ---- Other saves.

    def may_be_overtaken(self, made: Made, at: float) -> bool:
        """Whether a save of the same name was called later, and was under way beside it.

        DCP's saves share a directory: of one job those that overlap, of two jobs all, whose retention may remove it.
        """
        round_, is_dcp = self.round, schedule.format_of(self.round) == "dcp"
        if not (round_["replace"] or round_["same_names"] or is_dcp):
            return False
        return any(o.returned > made.began or is_dcp and (round_["same_names"] or o.last(round_["ranks"]) > made.began)
                   for o in self._of_name(made, at) if o.may_be_there)  # fmt: skip

    def may_be_taken(self, made: Made, at: float) -> bool:
        """Whether its name may be that of another save."""
        if self.round["replace"]:
            return False
        if any(o.may_be_there for o in self._of_name(made, at)):
            return True
        if self._standing is not None:
            return (made.generation, made.name) in self._standing
        return any(m.name == made.name and m is not made for m in self._made.values())

    def _of_name(self, made: Made, at: float) -> Iterator[Made]:
        for other in self._saves:
            if other is not made and (other.generation, other.name) == (made.generation, made.name) and other.began <= at:
                yield other

    def may_wait(self, made: Made, at: float) -> bool:
        """Whether another save of its trainers may hold staging memory. A durable save holds none, nor one that was not begun."""
        ranks = self.round["ranks"]
        is_limited = any(event.kind in schedule.LIMITS for event in self._events)  # a call may then fail behind its save's begin

        def is_free(other: Made) -> bool:
            told = set(other.outcomes.values())
            is_begun = not told <= {"skipped"} and not (ranks == 1 and not is_limited and told <= {"skipped", "refused"})
            return bool(told) and not is_begun or other.is_durable_on(ranks) and other.last(ranks) < made.began

        return any(o is not made and o.job == made.job and o.began <= at and not is_free(o) for o in self._saves)
