"""What the ranks of a save agree on in the call, through the job's key-value store.

Rank 0 draws a new attempt id for its call and offers it under the checkpoint's path. Every other
rank answers with a token of its own call; rank 0 publishes the tokens that it has seen, and a rank
takes an attempt only if its own token is among them. So calls that were missed, and processes that
were restarted, leave nothing behind that a later call could take for its own. A rank makes a fixed
number of calls of the store, none of them a collective.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from holdfast import _devices, _native, _state
from holdfast._completion import logger
from holdfast._process import PerProcess
from holdfast.errors import Error, reason_of

Check = Callable[[Sequence[int]], None]

REPLICA_BYTES_MIN = 1 << 20  # smaller tensors are written by every rank that has them
_WARNING_AFTER = 5.0  # seconds of waiting for a rank
_MARGIN = 10.0  # seconds that the others wait longer than rank 0
_BUSY = "described its state yet, or is gone"
_AT_ONCE = 0.5  # seconds
_INTERVAL = 0.05  # seconds between two looks
_CHECKS_PER_LIVENESS = 6
_SLICE_BYTES = 64 << 20  # of a tensor, copied from its device at a time
_NAME_BYTES, _CONTENT_BYTES = 8, 16
_FAILED = b"!"  # and rank and reason
_NO_VALUE = "\0"  # of no key
_REMEMBERED_MAX = 16


class Agreement(NamedTuple):
    """Which tensors are replicated.

    Attributes:
        key: of the exchange in which the ranks found out; the same on all ranks.
        replicated: names.
        elsewhere: names that this rank has and some other rank lacks.
        all_alike: whether no rank has any other tensor of at least REPLICA_BYTES_MIN.
    """

    key: str
    replicated: frozenset[str]
    elsewhere: frozenset[str]
    all_alike: bool


    def check(self, path: str, stored: Sequence[_state.Entry], own: Collection[str]) -> None:
        """Refuses tensors of at least REPLICA_BYTES_MIN that not all ranks hold alike.

        Raises:
            Error: INVALID_ARGUMENT naming them, on all ranks.
        """
        if self.all_alike:
            return
        names = [s.name for s in stored if s.nbytes >= REPLICA_BYTES_MIN and s.name not in own
                 and s.name not in self.replicated]
        which = f"{', '.join(names[:20])}: not" if names else "other ranks hold tensors that are not"
        raise Error("INVALID_ARGUMENT", f"save {path}: {which} alike on all ranks, and replicas='refuse'")


NONE = Agreement("", frozenset(), frozenset(), all_alike=False)


class _Agreements(PerProcess):
    """The last agreements, by fingerprint."""

    def clear(self) -> None:
        self.known: OrderedDict[bytes, Agreement] = OrderedDict()


_agreements = _Agreements()


def forget(agreement: Agreement) -> None:
    """Makes the next save find out again which tensors are replicated."""
    with _agreements.lock:
        for fingerprint in [f for f, known in _agreements.known.items() if known == agreement]:
            del _agreements.known[fingerprint]


def _hash(size: int, *parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=size).digest()


class _Connections(PerProcess):
    """Connections to the store of a process group, of which each is one thread's at a time."""

    def clear(self) -> None:
        self.free: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()

    def take(self, world: Any, store: Any) -> Any:
        """A connection for a thread alone: the job's own, or, while a thread has that, another one."""
        with self.lock:
            free = self.free.setdefault(world, [store])
            if free:
                return free.pop()
            return store.clone()  # kept for further calls: connections that came and went would stall the store

    def give_back(self, world: Any, store: Any) -> None:
        with self.lock:
            self.free.setdefault(world, []).append(store)


_connections = _Connections()


class _Store:
    """The store of the default process group, with waits that warn and end.

    A wait keeps a connection from all other threads, so that each call has one of its own.
    """

    def __init__(self, path: str) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        self._world: Any = dist.group.WORLD
        self._path = path
        with self.reached():
            self._store: Any = _connections.take(self._world, c10d._get_default_store())

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Raises what the store says, whose host is gone, as UNAVAILABLE."""
        try:
            yield
        except RuntimeError as error:
            raise Error("UNAVAILABLE", f"save {self._path}: agree with the other ranks: {error}") from error

    def close(self) -> None:
        """Leaves the connection to other calls. A second time does nothing."""
        world, self._world = self._world, None
        if world is not None:
            _connections.give_back(world, self._store)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value if isinstance(value, bytes) else json.dumps(value).encode())

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def get_if_there(self, key: str) -> bytes | None:
        """The value of a key that another rank may take away; `get` would wait for it until the store's time-out."""
        found = bytes(self._store.compare_set(key, _NO_VALUE, _NO_VALUE))  # gives this back where there is no key
        return None if found == _NO_VALUE.encode() else found

    def get_all(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return [bytes(value) for value in self._store.multi_get(keys)]
        return [self.get(key) for key in keys]

    def has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def drop(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)

    def count(self, key: str) -> int:
        return int(self._store.add(key, 1))

    def wait(self, keys: list[str], ranks: Sequence[int], missing: str, time_max: float,
             until: Callable[[], bool] = bool, check: Check | None = None,
             check_every: float = 0.0) -> None:
        """Waits until all keys are there, or `until` returns True.

        Args:
            keys: of `ranks`, one for each.
            missing: what a rank without its key has not done.
            time_max: seconds.
            check: is called for the ranks without a key, and raises when one is gone.
            check_every: seconds.

        Raises:
            Error: DEADLINE_EXCEEDED, naming the ranks without a key; what `check` raises.
        """
        begin, warned = time.monotonic(), False
        next_check = begin
        # One wait ends at once when the keys come. Further ones would each log a warning of the
        # store and keep other threads from it, so that long waits ask.
        try:
            self._store.wait(keys, timedelta(seconds=min(_AT_ONCE, time_max)))
            return
        except RuntimeError:
            pass  # not the keys' turn yet: a FileStore has no class for that. Of a store that is gone `check` raises, too
        while not until() and not self._store.check(keys):
            waited = time.monotonic() - begin
            if check is not None and time.monotonic() >= next_check:
                check([r for r, key in zip(ranks, keys, strict=True) if not self.has(key)])
                next_check = time.monotonic() + check_every
            if waited < min(_WARNING_AFTER, time_max) or (warned and waited < time_max):
                time.sleep(_INTERVAL)
                continue
            late = [r for r, key in zip(ranks, keys, strict=True) if not self.has(key)]
            if late and waited >= time_max:
                raise Error("DEADLINE_EXCEEDED", f"save {self._path}: {_these(late)} not {missing}; "
                            f"waited {time_max:g} s")
            if late:
                warned = True
                logger.warning("save %s: %s not %s; waiting", self._path, _these(late), missing)


class Call:
    """One call of `save_async` by all ranks of the default process group.

    Attributes:
        attempt: id of the save.
    """

    def __init__(self, path: str, step: int, rank: int, world_size: int,
                 time_liveness_max: float, time_ranks_max: float, resumed_from: str) -> None:
        self._resumed_from = resumed_from
        self._rank, self._world = rank, world_size
        self._path, self._step = path, step
        self._time_come_max, self._time_ranks_max = time_liveness_max, time_ranks_max
        self._store = _Store(path)
        self._uncalled = (
            f"called save_async({path!r}); all ranks must call it with the same path, or pass "
            "rank=0, world_size=1 to save on one rank alone"
        )
        self._offer = "holdfast/" + hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()
        self._others = range(1, world_size)
        self._stage = 0
        self._check: Check | None = None
        self._said: list[str] = []  # keys of this rank's posts, which it removes at the end
        self.attempt = ""
        try:
            with self._store.reached():
                self._meet()
        except BaseException:
            self._store.close()
            raise

    # ---- The attempt.

    def _meet(self) -> None:
        token = _native.new_attempt()
        answer = json.dumps([token, self._step, self._resumed_from]).encode()
        if self._rank == 0:
            self._lead(token)
            return
        while not self.attempt:
            self._store.wait([self._offer], [0], self._uncalled, self._time_come_max)
            attempt = self._take_offer()
            if attempt is not None and self._follow(attempt, token, answer):
                self.attempt = attempt

    def _take_offer(self) -> str | None:
        offer = self._store.get_if_there(self._offer)
        return None if offer is None else offer.decode()

    def _lead(self, attempt: str) -> None:
        keys = [f"{attempt}/call/{r}" for r in self._others]
        self._store.set(self._offer, attempt.encode())
        try:
            self._store.wait(keys, self._others, self._uncalled, self._time_come_max)
        except Error as absent:
            here = [r for r, key in zip(self._others, keys, strict=True) if self._store.has(key)]
            if here:
                self._store.set(f"{attempt}/go", {"error": absent.message})
            raise
        finally:
            self._store.drop(self._offer)
        calls = [json.loads(value) for value in self._store.get_all(keys)]
        others = [r for r, (_, step, _) in zip(self._others, calls, strict=True) if step != self._step]
        error = ""
        if others:
            error = (f"save {self._path}: rank 0 saves step {self._step}, rank {others[0]} step "
                     f"{calls[others[0] - 1][1]}; all ranks must save the same step")
        self._store.set(f"{attempt}/go", {"error": error, "tokens": [token for token, _, _ in calls]})
        self.attempt = attempt
        if error:
            raise Error("FAILED_PRECONDITION", error)
        self._warn_of_resumes([self._resumed_from, *(resumed for _, _, resumed in calls)])

    def _warn_of_resumes(self, resumed: list[str]) -> None:
        """Warns where ranks have loaded different checkpoints: a save that ends between two looks gives two newest ones."""
        known = [(rank, said) for rank, said in enumerate(resumed) if said]
        other = next((each for each in known if each[1] != known[0][1]), None)
        if other is not None:
            logger.warning(
                "save %s: rank %d has loaded %s, rank %d %s: the ranks train from different checkpoints. Before newest() "
                "and load() rank 0 calls recover(), then a barrier", self._path, *known[0], *other,
            )  # fmt: skip

    def _follow(self, attempt: str, token: str, answer: bytes) -> bool:
        """False when the offer was of another call of rank 0."""
        call, go = f"{attempt}/call/{self._rank}", f"{attempt}/go"
        self._store.set(call, answer)
        try:
            # Longer than rank 0 waits, which names the ranks that have not come.
            self._store.wait(
                [go], [0], "said that all ranks have called", self._time_come_max + _MARGIN,
                until=lambda: self._take_offer() not in (None, attempt),
            )
            found = self._store.get_if_there(go)
            if found is None:
                return False
            said = json.loads(found)
        finally:
            self._store.drop(call)
        if "tokens" not in said:
            raise Error("DEADLINE_EXCEEDED", said["error"])
        if token not in said["tokens"]:
            time.sleep(0.01)  # of an earlier call of this rank; rank 0 is about to take it back
            return False
        if said["error"]:
            raise Error("FAILED_PRECONDITION", said["error"])
        return True

    def watch(self, check: Check) -> None:
        """Sets what is asked from now on whether the ranks that are waited for are alive."""
        self._check = check

    # ---- What every rank says, and what rank 0 makes of it.

    def _exchange(self, said: bytes, judge: Callable[[list[bytes]], bytes]) -> bytes:
        """What rank 0's `judge` makes of what all ranks say, by rank; the same on all of them."""
        self._stage += 1
        base = f"{self.attempt}/{self._stage}"
        wait = functools.partial(
            self._store.wait, check=self._check, check_every=self._time_come_max / _CHECKS_PER_LIVENESS
        )
        try:
            with self._store.reached():
                if self._rank == 0:
                    keys = [f"{base}/{r}" for r in self._others]
                    wait(keys, self._others, _BUSY, self._time_ranks_max)
                    answer = judge([said, *self._store.get_all(keys)])
                    self._store.set(f"{base}/all", answer)
                    return answer
                self._store.set(f"{base}/{self._rank}", said)
                self._said.append(f"{base}/{self._rank}")
                wait([f"{base}/all"], [0], _BUSY, self._time_ranks_max + _MARGIN)
                return self._store.get(f"{base}/all")
        except Error as error:
            raise self._named(error) from None

    def _named(self, error: Error) -> Error:
        said = f"save {self._path}: "
        if error.message.startswith(said):
            return error
        return Error(error.code, said + error.message, error.errno)

    def close(self) -> None:
        """Removes this rank's keys; the last rank removes those of all. Never raises."""
        with contextlib.suppress(RuntimeError):
            self._remove_keys()
        self._store.close()

    def _remove_keys(self) -> None:
        if self._rank == 0 or not self.attempt:
            return
        self._store.drop(*self._said)
        left = f"{self.attempt}/left"
        if self._store.count(left) == self._world - 1:
            stages = [f"{self.attempt}/{stage + 1}/all" for stage in range(self._stage)]
            self._store.drop(f"{self.attempt}/go", *stages, left)

    def refuse(self, reason: str) -> None:
        """Ends the call on the other ranks, which wait in `agree`. Never raises."""
        with contextlib.suppress(Error):
            self._agree("", reason)

    def agree(self, stored: Sequence[_state.Entry], own: Collection[str],
              refuse: bool = False) -> Agreement:
        """Finds which tensors all ranks have alike.

        Args:
            stored: this rank's tensors.
            own: names of what is each rank's own, whatever the others have: shards.
            refuse: find out anew where some tensor was not alike.

        Raises:
            Error: ABORTED with rank and reason when another rank's call has failed.
        """
        large = sorted(
            (s for s in stored if s.nbytes >= REPLICA_BYTES_MIN and s.name not in own),
            key=lambda s: s.name,
        )
        fingerprint = _hash(
            _CONTENT_BYTES, [_layout(s) for s in large], sorted(s.name for s in stored), self._world
        )
        with _agreements.lock:
            known = _agreements.known.get(fingerprint)
        if refuse and known is not None and not known.all_alike:
            known = None
        if self._agree(known.key if known is not None else "", ""):
            assert known is not None
            return known
        agreement = self._find_out(stored, large)
        with _agreements.lock:
            _agreements.known[fingerprint] = agreement
            _agreements.known.move_to_end(fingerprint)
            while len(_agreements.known) > _REMEMBERED_MAX:
                _agreements.known.popitem(last=False)
        return agreement

    def _agree(self, key: str, error: str) -> bool:
        """Whether all ranks know of one exchange already."""

        def judge(said: list[bytes]) -> bytes:
            ranks = [json.loads(s) for s in said]
            failed = next(([r, why] for r, (_, why) in enumerate(ranks) if why), None)
            alike = bool(key) and all(k == key for k, _ in ranks)
            return json.dumps([alike, failed]).encode()

        alike, failed = json.loads(self._exchange(json.dumps([key, error]).encode(), judge))
        if failed is not None and not error:
            raise Error("ABORTED", f"save {self._path}: rank {failed[0]} failed: {failed[1]}")
        return bool(alike)

    def _find_out(self, stored: Sequence[_state.Entry], large: list[_state.Entry]) -> Agreement:
        try:
            contents = {s.name: _hash(_CONTENT_BYTES, _layout(s), _digest_of(s)) for s in large}
        except BaseException as error:
            # The other ranks wait for an answer.
            with contextlib.suppress(Error):
                self._exchange(_FAILED + f"{self._rank} {reason_of(error)}".encode(errors="replace"), _first_failed)
            raise
        # Without content a tensor is no candidate, and only its name counts.
        rows = {s.name: _hash(_NAME_BYTES, s.name) + contents.get(s.name, bytes(_CONTENT_BYTES))
                for s in stored}

        def judge(said: list[bytes]) -> bytes:
            if failed := _first_failed(said):
                return failed
            ranks = [set(_cut(s[1:], _NAME_BYTES + _CONTENT_BYTES)) for s in said]
            alike = set.intersection(*ranks)
            everywhere = set.intersection(*({r[:_NAME_BYTES] for r in rank} for rank in ranks))
            none = bytes(_CONTENT_BYTES)
            same = sorted(r for r in alike if r[_NAME_BYTES:] != none)
            all_alike = all(r in alike or r[_NAME_BYTES:] == none for rank in ranks for r in rank)
            key = bytes.fromhex(_native.new_attempt())
            return b"".join([b"+", key, bytes([all_alike]), len(same).to_bytes(8, "little"),
                             *same, *sorted(everywhere)])

        answer = self._exchange(b"+" + b"".join(rows.values()), judge)
        if answer.startswith(_FAILED):
            rank, _, why = answer[1:].decode().partition(" ")
            raise Error("ABORTED", f"save {self._path}: rank {rank} failed: {why}")
        key, all_alike, count = answer[1:17].hex(), bool(answer[17]), answer[18:26]
        middle = 26 + int.from_bytes(count, "little") * (_NAME_BYTES + _CONTENT_BYTES)
        same = set(_cut(answer[26:middle], _NAME_BYTES + _CONTENT_BYTES))
        everywhere = set(_cut(answer[middle:], _NAME_BYTES))
        return Agreement(
            key,
            frozenset(name for name, row in rows.items() if row in same),
            frozenset(name for name, row in rows.items() if row[:_NAME_BYTES] not in everywhere),
            all_alike,
        )


def _these(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names} has" if len(ranks) == 1 else f"ranks {names} have"


def _cut(text: bytes, size: int) -> Iterable[bytes]:
    return (text[i : i + size] for i in range(0, len(text), size))


def _layout(stored: _state.Entry) -> tuple[Any, ...]:
    return stored.name, stored.dtype, tuple(stored.shape), stored.nbytes, stored.device.type


def _first_failed(said: list[bytes]) -> bytes:
    return next((s for s in said if s.startswith(_FAILED)), b"")


def _digest_of(stored: _state.Entry) -> bytes:
    """A digest of a tensor's bytes, wherever they are."""
    if _devices.device_of(stored.device) is None:
        cuts = range(0, stored.nbytes, _SLICE_BYTES)
        digests = [
            _native.digest(stored.address + at, min(_SLICE_BYTES, stored.nbytes - at)) for at in cuts
        ]
    else:
        whole = stored.memory()
        digests = []
        for at in range(0, stored.nbytes, _SLICE_BYTES):
            part = whole[at : at + _SLICE_BYTES].cpu()
            digests.append(_native.digest(part.data_ptr(), part.numel()))
    return b"".join(digests)


