"""The work of ``holdfast drain``: copies what is committed, applies retention to both places, and tries again.

One process works on a pair of places at a time. All that it needs after a kill stands in the places.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast import _names
from holdfast._durable import locked
from holdfast.drain import slots, tiers
from holdfast.drain.copying import Copy, is_passing
from holdfast.drain.options import Drain
from holdfast.drain.places import Info, Place, age_of, identity_of, path_of
from holdfast.errors import Error, counted, of_system

POLL_SECONDS = 1.0
_BACKOFF_MAX = 60.0
_PROGRESS_SECONDS = 1.0
_CLEAN_SECONDS = 3600.0
_NAMED = 3  # of files, in a message
_TOLD_MAX = 10_000
_SETTLE_SECONDS = 0.5
_SWEEP_SECONDS = 60.0  # file times have ticks, and a change within one may stay unseen

Tell = Callable[[dict[str, Any]], None]


class Following:
    """A drain from one place to another.

    Args:
        keep_local, keep_local_every, form: as of `tiers.Rules`.
        only: selects from the source's complete checkpoints; None: all.
        tell: called with events: ``arrived``, ``removed``, ``trouble``, ``failed``, ``progress``, ``seen``.

    Attributes:
        failed: errors of checkpoints that are given up until their files change, by name and attempt.
        passed_over: "NAME: why" of those that look damaged, cannot be read, or have no commit record.
        late: why files beside checkpoints, which no manifest names, have not come.
        pending: how many checkpoints have not arrived.
        moved_at: when more of a checkpoint was sent, found or compared than ever before (monotonic).
        retains: whether retention is applied.
        lock: descriptor of the lock's file, whose time says to those who wait for the lock that something has moved.
    """

    def __init__(self, source: Place, target: Place, options: Drain, tell: Tell, *, keep_local: int = 0,
                 keep_local_every: int = 0, form: str = "", only: Callable[[list[Info]], list[Info]] | None = None) -> None:  # fmt: skip
        self._source, self._target, self._options, self._tell = source, target, options, tell
        self._rules = tiers.Rules(options, keep_local, keep_local_every, form)
        self._only = only
        self._bound: tiers.Bound | None = None
        self._coming: set[str] = set()  # entries that were there at the bound; of those that were looked at, where a save is at work
        self._binding = threading.Lock()
        self._listing = threading.Lock()  # of the second place
        self.stop = threading.Event()
        self.failed: dict[tuple[str, str], Error] = {}
        self._failed_as: dict[tuple[str, str], object] = {}  # their files then
        self.passed_over: list[str] = []
        self.late: list[str] = []
        self.pending = 0
        self.moved_at = time.monotonic()
        self.retains = True
        self.lock: int | None = None
        self._copy = Copy(source, target, options, self.stop, self._progress, self._compare)
        self._now: dict[str, Any] = {}
        self._furthest = ("", ""), 0  # a checkpoint, and how much of it has been there
        self._furthest_compared: dict[str, int] = {}  # of this checkpoint: how much of each file was right
        self._counting = threading.Lock()
        self._told_at = 0.0
        self._cleaned_at = -_CLEAN_SECONDS
        self._remote: list[Info] | None = None  # what is complete there; None: to be listed
        self._listed_at = 0.0
        self._there: set[tuple[str, str]] = set()  # what the last listing had
        self._committed: dict[tuple[str, str], dict[str, Any]] = {}  # events of checkpoints, told once a listing has them
        self._replacing: dict[str, Info] = {}  # checkpoints that have arrived, by name, until older saves of the name are gone
        self._trouble = 0  # errors since something has moved
        self._trouble_since: float | None = None  # and since a sweep was at its end
        self._told: dict[str, None] = {}  # what is said once; the latest texts
        self._kept: list[Error] = []  # why checkpoints that retention would remove stay
        self._swept: tuple[object, float] = None, 0.0
        self._over: tuple[set[str], float] = set(), 0.0  # names of what the first place has too much of, and when they were looked for
        self._seen = source.seen, target.seen  # as was told

    def _progress(self, nbytes: int) -> None:
        now = time.monotonic()
        with self._counting:
            self._now["bytes_done"] += nbytes
            if self._now["bytes_done"] > self._furthest[1]:
                self._furthest = self._furthest[0], self._now["bytes_done"]
                self._move(now)
            if now - self._told_at < _PROGRESS_SECONDS:
                return
            self._told_at = now
            event = {"event": "progress", "pending": self.pending, **self._now}
        self._tell(event)

    def _compare(self, name: str, nbytes: int) -> None:
        with self._counting:
            if nbytes > self._furthest_compared.get(name, 0):
                self._furthest_compared[name] = nbytes
                self._move(time.monotonic())

    def _move(self, now: float) -> None:
        if self.lock is not None and int(now) != int(self.moved_at):
            with contextlib.suppress(OSError):
                os.utime(self.lock)
        self.moved_at, self._trouble, self._trouble_since = now, 0, None

    def bind(self) -> None:
        """Ends the following: all further work is for what is there now, see `tiers.Bound`. A second call does nothing.

        Raises:
            Error: of a place.
        """
        with self._binding:
            if self._bound is not None:
                return
            complete, folder = self._source.complete()[0], path_of(self._source.url)
            names = [c.name for c in complete]
            with contextlib.suppress(OSError):
                entries = os.listdir(folder) if folder else []
                self._coming = {e for e in entries if _names.kind_of(e) in ("", "partial")}
                names += [match["name"] if (match := _names.UNCOMMITTED.fullmatch(entry)) else entry for entry in entries]
            if self._only is not None:
                chosen = {c.name for c in self._only(complete)}
                self._only = lambda found: [c for c in found if c.name in chosen]
            with self._listing:
                there = self._there
                if not self._listed_at:
                    # No clock tells what a later listing has of before. Without a listing, nothing of others is removed there.
                    with contextlib.suppress(Error):
                        there = {c.key for c in self._target.complete()[0]}
            self._bound = tiers.Bound(complete, names, there)

    def is_coming(self) -> bool:
        """Whether a save that was on its way when the following was bound is so still."""
        self._coming = {e for e in self._coming if slots.is_under_way(self._source.path(e))}
        return bool(self._coming)

    def sweep(self, *, asked: bool = True) -> Error | None:
        """Copies everything that is complete now and has not arrived; applies retention.

        Args:
            asked: False: for a look at regular times, which a directory without changes makes short.

        Returns:
            What a place lets retention not remove. Everything has arrived all the same.

        Raises:
            Error: of a place. What has arrived until then stays.
        """
        seen, at = self._source.signature(), time.monotonic()
        if not asked and seen is not None and seen == self._swept[0] and at - self._swept[1] < _SWEEP_SECONDS:
            return None
        with self._of_system():
            refused = self._sweep(asked)
        self._trouble_since = None
        if refused is None:
            self._trouble = 0
        # Taken before the listing: what changed behind it is seen next time.
        self._swept = (seen, at) if refused is None else (None, 0.0)
        return refused

    @contextlib.contextmanager
    def _of_system(self) -> Iterator[None]:
        """Whatever the system refuses may be had by a later try."""
        operation = f"drain {self._source.url} to {self._target.url}"
        try:
            with of_system(operation):
                yield
        except MemoryError:
            raise Error("RESOURCE_EXHAUSTED", f"{operation}: no memory") from None
        except RuntimeError as error:  # Python's own where the system has no thread
            if "new thread" not in str(error):
                raise
            raise Error("RESOURCE_EXHAUSTED", f"{operation}: {error}") from None

    def look(self) -> bool:
        """Whether nothing is left to send, where another process has the lock and sends it. What has arrived is let go in the first place.

        Raises:
            Error: of a place.
        """
        with self._of_system():
            local, before = self._local(), self._there
            self._remote = self._listed(local)
            self.pending = len(self._to_send(local))
            for error in _of_each(self._may_go(tiers.to_remove_locally(local, self._remote, self._rules)), self._remove_locally):
                self._tell({"event": "trouble", "code": error.code, "message": error.message, "retry_in": None})
            self._remote = None  # the other process changes it
            if self._there != before:
                self.moved_at = time.monotonic()
            self._tell({"event": "progress", "pending": self.pending, "bytes_done": 0, "bytes_total": 0})
            return not self.pending

    def has_too_much(self) -> bool:
        """Whether retention would let something go in the first place that it has not just looked for in the second one.

        Raises:
            Error: of the first place.
        """
        if not (self.retains and self._rules.keep_local):
            return False
        over, now = tiers.too_many(self._local(), self._rules), time.monotonic()
        if not over or (over == self._over[0] and now - self._over[1] < _SWEEP_SECONDS):
            return False
        self._over = over, now
        return True

    def _sweep(self, asked: bool) -> Error | None:
        local = self._local()
        self.failed = {
            c.key: self.failed[c.key] for c in local
            if c.key in self.failed and self._signature(c) == self._failed_as[c.key]
        }  # fmt: skip
        # What has arrived may be gone by now: nobody is told of it by an old listing.
        is_old = asked or time.monotonic() - self._listed_at > _SWEEP_SECONDS
        if self._remote is None or is_old or tiers.missing(local, self._remote):
            self._remote = self._listed(local)
        self._tell_of_overtaken(self._only(local) if self._only else local)
        self._refuse_let_go(local)
        refused: Error | None = None  # nothing waits for a place that lets nothing be deleted
        is_applied = False
        self._copy.forget({c.key for c in local})
        self.late = []
        # What is committed meanwhile is of the next sweep: a wait ends where saves follow each other faster than they are sent.
        begun = {c.key for c in local}
        while True:
            coming = self._to_send(local)
            wanted = [c for c in coming if c.key in begun]
            if is_applied and not wanted:
                break
            if wanted:
                self.pending = len(coming)
                self._now = {"name": wanted[0].name, "bytes_total": wanted[0].bytes, "bytes_done": 0}
                if self._furthest[0] != wanted[0].key:
                    self._furthest, self._furthest_compared = (wanted[0].key, 0), {}
                self._tell({"event": "progress", "pending": self.pending, **self._now})
                self._tell_of_strangers(wanted[0], local)
                self._send(wanted[0], local)
                local = self._local()
            if not any(c.key in begun for c in self._to_send(local)):
                self._send_beside(local)
            refused = self._apply_retention(local) or refused
            is_applied = True
        if self.pending:
            self.pending = len(self._to_send(local))
            self._tell({"event": "progress", "pending": self.pending, "bytes_done": 0, "bytes_total": 0})
        left = self._clean(local)
        return refused or left

    def _refuse_let_go(self, local: list[Info]) -> None:
        """A checkpoint that was asked for by its name, and that retention would remove at once, is an error. Else it is retention's work."""
        chosen = self._chosen(local)
        if chosen is None:
            return
        assert self._remote is not None
        wanted = {c.key for c in self._to_send(local)}
        for info in tiers.missing(local, self._remote):
            if info.key in chosen - wanted - self.failed.keys():
                raise Error("FAILED_PRECONDITION", f"drain {info.name}: nothing was sent, for retention of {self._target.url} (--keep-last "
                            f"{self._options.keep_last}, --behind {self._options.behind}) would let it go at once; give a larger --keep-last, or "
                            "none")  # fmt: skip

    def _clean(self, local: list[Info]) -> Error | None:
        """As `_apply_retention`, of what interrupted copies have left."""
        if time.monotonic() - self._cleaned_at <= _CLEAN_SECONDS:
            return None
        self._cleaned_at = time.monotonic()
        try:
            for slot in self._target.clean({c.attempt for c in local}):
                self._tell({"event": "removed", "place": "target", "name": slot, "why": "left by an interrupted copy"})
        except Error as error:
            return error
        return None

    def _listed(self, local: list[Info]) -> list[Info]:
        """What is complete there. Where it cannot be listed, what is not known to be there counts as pending."""
        try:
            with self._listing:
                found = self._target.complete()[0]
                there = {c.key for c in found}
                if not there <= self._there:  # a process that was killed may have left the last name in memory
                    self._target.settle()
                self._there, self._listed_at = there, time.monotonic()
        except Error:
            self.pending = sum(c.key not in self._there for c in local)
            self._tell({"event": "progress", "pending": self.pending})
            raise
        self._tell_of_seen()
        for key in there & self._committed.keys():
            self._move(time.monotonic())
            self._tell(self._committed.pop(key))
        if found and age_of(found[-1]) > max(map(age_of, local), default=(0.0, 0, "")):
            # Later saves of the trainer are younger than all that is here.
            self._tell({"event": "progress", "pending": self.pending, "latest": found[-1].saved_at})
        return found

    def _tell_of_overtaken(self, local: list[Info]) -> None:
        """Says once of a checkpoint that it is not sent, for another process has sent a later save of its name."""
        assert self._remote is not None
        for info in tiers.overtaken(local, self._remote):
            self._tell_once("ABORTED", f"drain {info.name}: it is not sent, for {self._target.url} has a later save of this name "
                            f"than {info.attempt}, of another job or node; jobs that share a place need names of their own (name= of the "
                            "Checkpointer), or places of their own")  # fmt: skip

    def _tell_of_strangers(self, info: Info, local: list[Info]) -> None:
        """Says once that the checkpoint that is sent is not the newest there, for a run with a clock that is behind, or begun without a look."""
        assert self._remote is not None
        if tiers.strangers(info, local, self._remote, self._rules):
            self._tell_once("FAILED_PRECONDITION", f"drain {self._source.url}: {self._target.url} has checkpoints of another run with the same "
                            "names and later times; what is sent is kept beside them, but newest() finds theirs first; call newest() or "
                            "load() before the first save to continue that run, or choose names (name= of the Checkpointer) or a place "
                            "of your own; if this node's clock is behind, set it")  # fmt: skip

    def _tell_once(self, code: str, message: str) -> None:
        if message not in self._told:
            self._told[message] = None
            if len(self._told) > _TOLD_MAX:
                del self._told[next(iter(self._told))]
            self._tell({"event": "trouble", "code": code, "message": message, "retry_in": None})

    def _local(self) -> list[Info]:
        found, passed_over = self._source.complete()
        if not set(passed_over) <= set(self.passed_over):
            # A save that replaces or removes a checkpoint leaves a part of it for a moment.
            self.stop.wait(_SETTLE_SECONDS)
            before, (found, passed_over) = set(passed_over), self._source.complete()
            passed_over = [entry for entry in passed_over if entry in before]
        self.passed_over = passed_over
        self._tell_of_seen()
        for error in self._of_passed_over():
            self._tell_once(error.code, error.message)
        return found if self._bound is None else self._bound.of(found)

    def _of_passed_over(self) -> list[Error]:
        return [Error("DATA_LOSS", f"drain {self._source.url}: passed over {entry}") for entry in self.passed_over]

    def first_error(self) -> Error | None:
        """Of a checkpoint that is not sent."""
        return next(iter([*self.failed.values(), *self._of_passed_over()]), None)

    def _tell_of_seen(self) -> None:
        """Before anything is sent: a process that is started again in this one's place looks for no other directories."""
        seen = self._source.seen, self._target.seen
        if seen != self._seen:
            self._seen = seen
            self._tell({"event": "seen", "places": seen})

    def _to_send(self, local: list[Info]) -> list[Info]:
        assert self._remote is not None
        return tiers.to_send(local, self._remote, self._rules, self.failed, self._chosen(local))

    def _chosen(self, local: list[Info]) -> set[tuple[str, str]] | None:
        return {c.key for c in self._only(local)} if self._only else None

    def _signature(self, info: Info) -> tuple[object, object, object]:
        """What may keep a checkpoint from being sent: its files, and the entries of its name and of the copy there."""
        copy = _names.partial(info.name, info.attempt)
        return self._source.signature(info.slot), self._target.signature(info.name), self._target.signature(copy)

    def _send(self, info: Info, local: list[Info]) -> None:
        files = self._signature(info)
        try:
            sent = self._copy.run(info)
        except Error as error:
            if error.code != "CANCELLED" and not any(c.key == info.key for c in self._local()):
                return  # replaced or removed meanwhile
            if error.code == "RESOURCE_EXHAUSTED":
                self._apply_retention(self._local())  # a full place gets room before the next try, where options let something go
            # With an errno it is of the place, as a file in the way of a directory: no checkpoint arrives, and each is tried again.
            if error.code != "DATA_LOSS" and (error.code != "FAILED_PRECONDITION" or error.errno):
                raise
            self._target.let_go()
            # The copy is as this try has left it.
            self.failed[info.key], self._failed_as[info.key] = error, (*files[:2], self._signature(info)[2])
            self._tell({"event": "failed", "name": info.name, "step": info.step, "code": error.code, "message": error.message})
            return
        self._tell_of_left(info, sent.left)
        self._tell_of_late(info, sent.late)
        # It has arrived when a listing has it: until then every sweep may send it again, which is no progress.
        self._committed[info.key] = {
            "event": "arrived", "name": info.name, "step": info.step, "attempt": info.attempt, "bytes": sent.bytes,
            "bytes_sent": sent.bytes_sent, "seconds": sent.seconds, "verified": sent.verified,
        }  # fmt: skip
        self._remote = self._listed(local)
        self._replacing.update({c.name: c for c in self._remote if c.key == info.key})
        if not any(c.key == info.key for c in self._remote):
            raise Error("UNAVAILABLE", f"drain {info.name}: {self._target.url} does not list it after its commit; it is sent again")

    def _tell_of_left(self, info: Info, left: list[str]) -> None:
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            self._tell_once("FAILED_PRECONDITION", f"drain {info.name}: {', '.join(left[:_NAMED])}{more} of "
                            f"{self._source.path(info.slot)} is no file, or has a name that is not sent; copy it yourself")  # fmt: skip

    def _tell_of_late(self, info: Info, why: list[str]) -> None:
        for message in why:
            self._tell_once("DATA_LOSS", f"drain {info.name}: {message}; the checkpoint is sent without this file, which follows once it is "
                            "right, can be read and does not change")  # fmt: skip

    def _send_beside(self, local: list[Info]) -> None:
        """Sends what a framework has written beside a checkpoint after its commit, before retention may remove the checkpoint."""
        assert self._remote is not None
        there = {c.key: c for c in self._remote}
        for info in self._only(local) if self._only else local:
            if info.key not in there:
                continue
            self._now = {"name": info.name, "bytes_total": 0, "bytes_done": 0}
            try:
                count, left, why = self._copy.run_beside(info, there[info.key])
            except Error as error:
                if error.code != "CANCELLED" and not any(c.key == info.key for c in self._local()):
                    continue  # replaced or removed meanwhile
                if error.code == "ABORTED":  # the listing is of before
                    self._remote = self._listed(local)
                    continue
                if error.code not in ("DATA_LOSS", "FAILED_PRECONDITION"):
                    raise
                self.late.append(error.message)
                self._tell_once(error.code, f"drain {info.name}: {error.message}; the checkpoint has arrived, and what is beside it does not follow")
                continue
            self.late += why
            self._tell_of_left(info, left)
            self._tell_of_late(info, why)
            if count:
                self._move(time.monotonic())

    def _apply_retention(self, local: list[Info]) -> Error | None:
        """Returns the first error of a removal: a place that lets nothing be deleted holds up nothing else, nor does one checkpoint there."""
        assert self._remote is not None
        self._kept = []
        # A store that lets nothing be deleted fills no local disk.
        errors = _of_each(self._replacing.values(), self._remove_replaced)
        gone = tiers.to_remove_remotely(local, self._remote, self._rules, self.failed, self._chosen(local))
        errors += _of_each(self._may_go(gone), self._remove_remotely)
        leaving = self._may_go(tiers.to_remove_locally(local, self._remote, self._rules))
        self._send_beside(leaving)
        errors += _of_each(leaving, self._remove_locally)
        # One text of those that stay, however many they are: the next sweep has the same.
        more = f"; likewise {counted(len(self._kept) - 1, 'other checkpoint')}" if len(self._kept) > 1 else ""
        for error in (*self._kept[:1], *errors[1:]):
            self._tell({"event": "trouble", "code": error.code, "message": error.message + more, "retry_in": None})
            more = ""
        return errors[0] if errors else None

    def _may_go(self, gone: list[Info]) -> list[Info]:
        return [c for c in gone if self.retains and (self._bound is None or self._bound.may_go(c))]

    def _remove_replaced(self, info: Info) -> None:
        self._target.remove_replaced(info)
        del self._replacing[info.name]

    def _remove_remotely(self, info: Info) -> None:
        assert self._remote is not None
        self._remove(self._target, "target", info)
        self._remote.remove(info)

    def _remove_locally(self, info: Info) -> None:
        self._remove(self._source, "source", info)

    def _remove(self, place: Place, which: str, info: Info) -> None:
        try:
            place.remove(info)
        except Error as error:
            if error.code in ("NOT_FOUND", "ABORTED"):  # another process was faster, or a save has replaced it
                return
            if error.code != "FAILED_PRECONDITION":
                raise
            self._kept.append(error)
            return
        self._tell({"event": "removed", "place": which, "name": info.name, "why": "retention"})

    def trouble(self, error: Error) -> float:
        """Tells of an error of a sweep; returns after how many seconds to try again."""
        if self._trouble_since is None:
            self._trouble_since = time.monotonic()
        self._trouble += 1
        self._remote = None
        delay = random.uniform(0.5, 1.0) * min(_BACKOFF_MAX, 2.0 ** min(self._trouble, 10))
        self._tell({"event": "trouble", "code": error.code, "message": error.message, "retry_in": round(delay, 1)})
        return delay

    def patience(self) -> float:
        """Seconds until nothing will have moved for as long as `Drain.give_up`, with errors from the beginning.

        A first place that somebody has removed, or renamed, is waited for by no one: there is nothing to send.
        """
        if self._source.is_gone:
            return 0.0
        since = max(self.moved_at, self._trouble_since or 0.0)
        return max(0.0, since + self._options.give_up - time.monotonic())

    def is_stuck(self) -> bool:
        return not self.patience()


def _of_each(gone: Iterable[Info], remove: Callable[[Info], None]) -> list[Error]:
    """The errors of removals, of which one holds up no other, unless it is of a whole store."""
    errors: list[Error] = []
    for info in list(gone):
        try:
            remove(info)
        except Error as error:
            errors.append(error)
            if is_passing(error) and not error.errno:
                break
    return errors


def lock_path(source: str, target: str) -> str | None:
    """The file whose lock a drain of a pair of places holds, beside the checkpoints; None where the source is no directory."""
    folder = path_of(source)
    number = hashlib.sha256(_names.bytes_of(identity_of(target))).hexdigest()[:8]
    return os.path.join(folder, f".holdfast-drain-{number}.lock") if folder else None


@contextlib.contextmanager
def kept_open(path: str | None, lock: int | None) -> Iterator[Callable[[], bool]]:
    """Gives a question: whether the directory of a lock's file is another one by now. An open directory's number is given to no other."""
    folder = os.path.dirname(path) if path else ""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # no directory, or not there yet
        yield lambda: False
        return

    is_of_another = False  # as where it was waited for while the directory was moved
    with contextlib.suppress(OSError):
        is_of_another = lock is not None and not os.path.samestat(os.stat(path or ""), os.fstat(lock))

    def is_another() -> bool:
        with contextlib.suppress(OSError):  # gone: it may come back
            return is_of_another or not os.path.samestat(os.stat(folder), os.fstat(fd))
        return False

    try:
        yield is_another
    finally:
        os.close(fd)


def is_held(path: str) -> bool:
    """Whether a process holds a lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


@contextlib.contextmanager
def alone(source: str, target: str, wait: Callable[[], bool]) -> Iterator[int | None]:
    """Holds the lock of a pair of places, and yields its descriptor.

    Args:
        wait: called while another process has the lock, or the source is not there yet; returns false to give up.

    Raises:
        Error: FAILED_PRECONDITION.
    """
    path = lock_path(source, target)
    fd = _opened(path, wait) if path else None
    if fd is None:
        yield None
        return
    try:
        while not locked(fd, fcntl.LOCK_EX):
            if not wait():
                raise Error("FAILED_PRECONDITION", f"drain {source} to {target}: another process does it; see `fuser {path}`")
        yield fd
    finally:
        os.close(fd)


def _opened(path: str, wait: Callable[[], bool]) -> int | None:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # before the first save
            if not wait():
                return None
        except OSError:  # a directory that may only be read: no other process writes there either
            return None
