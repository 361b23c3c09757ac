"""Copies one checkpoint from a place to another: data, manifests, commit record, in this order."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from holdfast._names import BESIDE_RECORD
from holdfast.drain.beside import record_of, recorded
from holdfast.drain.contents import contents_of, proven
from holdfast.drain.options import Drain
from holdfast.drain.places import File, Info, Place, Read, pieces
from holdfast.errors import Error

_FILES_AT_ONCE = 4
_READ_BACK_BYTES = 16 << 20
# Errors that a second try may not have.
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN", "INTERNAL")
_TRIES = 3
_ALIVE_SECONDS = 1.0  # between two signs of life while the limit of the rate is waited for
# What the system says of one file of the source, and not of the place.
_OF_A_FILE = (errno.EIO, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)


class Rate:
    """A limit of bytes per second over all threads."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the bytes that were taken have been paid for

    def take(self, nbytes: int, stop: threading.Event, alive: Callable[[], None]) -> None:
        """Waits until so many bytes may be sent, and calls `alive` meanwhile."""
        if self._per_second is None:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + nbytes / self._per_second
        while (left := begin - time.monotonic()) > 0 and not stop.wait(min(left, _ALIVE_SECONDS)):
            alive()


class Sent(NamedTuple):
    """What was copied: bytes in all, those that were sent now, seconds, how arrival was proven, names of what no copy takes, and why files
    that no manifest names did not come."""

    bytes: int
    bytes_sent: int
    seconds: float
    verified: str
    left: list[str]
    late: list[str]


def is_passing(error: Error) -> bool:
    """Whether the same operation may succeed later without a change of the command."""
    return error.code in _PASSING


@contextlib.contextmanager
def _of_source() -> Iterator[None]:
    """A file that is missing or cannot be read is damage: it is reported, and holds no other checkpoint up."""
    try:
        yield
    except Error as error:
        if error.code == "NOT_FOUND" or error.errno in _OF_A_FILE:
            raise Error("DATA_LOSS", error.message, error.errno) from error
        raise


class Copy:
    """Copies checkpoints between two places.

    Args:
        stop: ends a copy soon, with CANCELLED.
        progress: called with the bytes of a piece that was sent or found; less than 0: they are to be sent again; 0: a sign of life.
        compared: called with a file's name, and how much of it was found to be right until now.
    """

    def __init__(self, source: Place, target: Place, options: Drain, stop: threading.Event,
                 progress: Callable[[int], None] = lambda _: None, compared: Callable[[str, int], None] = lambda *_: None) -> None:  # fmt: skip
        self._source, self._target = source, target
        self._rate = Rate(options.bytes_per_second)
        self._reads_back = options.verify == "read" or not target.proves_arrival
        self._stop = stop
        self._progress, self._compared = progress, compared
        self._lock = threading.Lock()
        self._sent = 0
        self._arrived: set[tuple[str, str]] = set()  # files proven by this process: slot and name
        self._own: dict[tuple[str, str], set[str]] = {}  # names of a checkpoint's own files, by its name and attempt
        self._beside: dict[tuple[str, str], list[File]] = {}  # what the target has beside a checkpoint

    def run(self, info: Info) -> Sent:
        """Copies a checkpoint. What an earlier run has left there is used, where its digests are right.

        Raises:
            Error: DATA_LOSS where the source is damaged, or the target gives back other bytes; what the places say.
        """
        begin, self._sent = time.monotonic(), 0
        with ThreadPoolExecutor(_FILES_AT_ONCE, "holdfast-drain-file") as pool:
            with _of_source():
                contents = contents_of(self._source, info, pool)
                self._own[info.key] = contents.names()
                beside, left = self._source.beside(info, contents.names, self._pace)
            slot = self._target.begin(info, contents.names())
            there = self._target.sizes(slot)

            def send(file: File) -> None:
                self._send(info, slot, file, there.get(file.name))

            for group in (contents.data, contents.manifests, contents.proofs[:-1]):
                # All calls end before the first error is raised: nothing is written behind it.
                for future in [pool.submit(send, file) for file in group]:
                    error = future.exception()
                    if error is not None:
                        self._stop_others(pool)
                        raise error
        arrived, why = self._send_beside(info, slot, beside, [])
        # Without such files no record of them stays, as one that an earlier run has left.
        with_record = {BESIDE_RECORD, *(f.name for f in arrived)} if arrived else set()
        self._target.commit(slot, info, contents.proofs[-1], contents.names() | with_record)
        self._arrived.clear()
        self._beside[info.key] = arrived
        return Sent(info.bytes, self._sent, time.monotonic() - begin, "read" if self._reads_back else "store", left, why)

    def run_beside(self, info: Info, there: Info) -> tuple[int, list[str], list[str]]:
        """Copies what has come or changed beside a checkpoint since it arrived, as what a framework writes last.

        Args:
            there: the checkpoint in the target.

        Returns:
            How many files came, names of what no copy takes, and why others did not come.

        Raises:
            Error: as `run`.
        """

        def own() -> set[str]:
            if info.key not in self._own:
                self._own[info.key] = contents_of(self._source, info).names()
            return self._own[info.key]

        with _of_source():
            beside, left = self._source.beside(info, own, self._pace)
        if not beside:
            return 0, left, []
        if info.key not in self._beside:
            self._beside[info.key] = recorded(self._target, there)
            self._target.settle(there.slot)
        has = self._beside[info.key]
        late = [file for file in beside if file not in has]
        if not late:
            return 0, left, []
        with self._target.late(there) as ask_again:
            self._beside[info.key], why = self._send_beside(info, there.slot, late, has, ask_again)
        return len(late) - len(why), left, why

    def _send_beside(self, info: Info, slot: str, files: list[File], has: list[File],
                     ask_again: Callable[[], None] = lambda: None) -> tuple[list[File], list[str]]:  # fmt: skip
        """Sends files, then the record of them and of those that are there. One that changes meanwhile comes with a later sweep.

        Args:
            ask_again: called before the record is sent.

        Returns:
            What is there now, and why others are not.
        """
        arrived: dict[str, File] = {file.name: file for file in has}
        why: list[str] = []
        for file in files:
            try:
                self._send(info, slot, file, None)
                arrived[file.name] = file
            except Error as error:
                # It changes, or cannot be read, or its name cannot be had there: the checkpoint does not wait for it.
                if error.code not in ("DATA_LOSS", "FAILED_PRECONDITION"):
                    raise
                why.append(error.message)
        if list(arrived.values()) != has:
            ask_again()
            self._send(info, slot, record_of(info, list(arrived.values())), None)
        return list(arrived.values()), why

    def forget(self, kept: set[tuple[str, str]]) -> None:
        """Drops what is known of all other checkpoints."""
        self._own = {key: names for key, names in self._own.items() if key in kept}
        self._beside = {key: files for key, files in self._beside.items() if key in kept}

    @staticmethod
    def _stop_others(pool: ThreadPoolExecutor) -> None:
        pool.shutdown(wait=True, cancel_futures=True)

    def _send(self, info: Info, slot: str, file: File, there: int | None) -> None:
        if there == file.bytes and (slot, file.name) in self._arrived:
            self._progress(file.bytes)
            return
        if there == file.bytes and not self._fault(slot, file, is_left=True):
            self._progress(file.bytes)
        else:
            for tries in range(1, _TRIES + 1):
                try:
                    self._write(info, slot, file, is_resumed=there is not None or tries > 1)
                    break
                except Error as error:
                    if tries == _TRIES or not is_passing(error):
                        raise
                    self._stop.wait(random.uniform(0.5, 1.0) * tries)
        self._arrived.add((slot, file.name))

    def _write(self, info: Info, slot: str, file: File, is_resumed: bool) -> None:
        sent = 0
        with contextlib.ExitStack() as stack:
            source: Read = lambda begin, end: b""  # noqa: E731  # not asked for a file that is in memory
            if file.content is None:
                with _of_source():
                    opened = self._source.opened_past_cache if self._target.copies_at_once else self._source.opened
                    source = stack.enter_context(opened(info.slot, file.name))
            proven_read = proven(source, file, f"{self._source.path(info.slot)}/{file.name}")

            def read(begin: int, end: int) -> bytes | memoryview:
                nonlocal sent
                self._pace(end - begin)
                with _of_source():
                    data = proven_read(begin, end)
                with self._lock:
                    self._sent += end - begin
                    sent += end - begin
                self._progress(end - begin)
                return data

            try:
                self._target.write(slot, file, read, is_resumed)
                if self._reads_back and (fault := self._fault(slot, file)):
                    raise Error("UNAVAILABLE", f"write {self._target.path(slot)}/{file.name}: it does not read back as it was sent: {fault}")
            except BaseException:
                self._progress(-sent)
                raise

    def _fault(self, slot: str, file: File, *, is_left: bool = False) -> str:
        """What is wrong with a file of the target, as of `fault_of`. One that the system cannot read is removed.

        Args:
            is_left: an earlier run has left it, perhaps in memory alone.
        """

        def between(begin: int) -> None:
            self._go_on()
            self._compared(file.name, begin)

        try:
            if is_left:
                self._target.settle(slot, file.name)
            return fault_of(self._target, slot, file, between)
        except Error as error:
            if error.code != "UNAVAILABLE" or not error.errno:
                raise
            self._target.discard(slot, file.name)
            return error.message

    def _pace(self, nbytes: int) -> None:
        """Waits until so many bytes may be read; ends a copy that was asked to end."""
        self._go_on()
        self._rate.take(nbytes, self._stop, self._go_on)

    def _go_on(self) -> None:
        """Gives a sign of life, unless the copy was asked to end."""
        if self._stop.is_set():
            raise Error("CANCELLED", f"drain to {self._target.url}: it was asked to end")
        self._progress(0)


def fault_of(place: Place, slot: str, file: File, between: Callable[[int], None] = lambda _: None) -> str:
    """Reads a file again, past the cache, and compares it: what is wrong with it; empty when it is right.

    Args:
        between: called before each piece with where it begins: what lies before is right.
    """
    try:
        with place.opened_past_cache(slot, file.name) as read:
            have: Read = proven(read, file._replace(content=None), f"{place.path(slot)}/{file.name}")
            for begin, end in pieces(file, _READ_BACK_BYTES):
                between(begin)
                have(begin, end)
    except Error as error:
        if error.code in ("DATA_LOSS", "NOT_FOUND"):
            return error.message
        raise
    return ""


def verify(place: Place, info: Info) -> tuple[list[str], int, int]:
    """Reads a checkpoint again: its faults, and how many files and bytes were compared.

    Raises:
        Error: of the place.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE, "holdfast-verify") as pool:
        try:
            contents, beside = contents_of(place, info, pool), recorded(place, info)
        except Error as error:
            if error.code not in ("DATA_LOSS", "NOT_FOUND"):
                raise
            return [error.message], 0, 0
        files = [*contents.data, *contents.manifests, *contents.proofs, *beside]
        faults = list(pool.map(lambda file: fault_of(place, info.slot, file), files))
    return [f for f in faults if f], len(files), sum(f.bytes for f in files)
