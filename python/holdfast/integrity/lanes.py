"""Rounds beside each other: most of a round's time is waiting, for slow disks, dead trainers and deadlines."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any, Protocol

from holdfast.integrity import jobs, processes

# A lane has what this process has imported: PyTorch takes seconds.
_context: Any = multiprocessing.get_context("fork")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # of the terminal, and of the other side
_OF_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


class Bench(Protocol):
    """What a lane runs."""

    def run(self, *arguments: Any) -> Any: ...
    def close(self) -> None: ...


class Lanes:
    """Processes, each of which adopts the orphans of its own trainers. A context manager.

    They are forked: this process has no thread at work, and has used nothing of PyTorch but on one thread.

    Args:
        count: of processes.
        make: called in each process.
    """

    def __init__(self, count: int, make: Callable[[], Bench]) -> None:
        self._lanes: dict[Any, Any] = {}
        for _ in range(count):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, make, [mine, *self._lanes]))
            process.start()
            theirs.close()
            self._lanes[mine] = process

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for lane, process in self._lanes.items():
            lane.close()
            if kind is not None:
                processes.send(process.pid, signal.SIGTERM)
        for process in self._lanes.values():
            process.join()
            process.close()

    def run(self, each: Iterator[tuple[Any, ...]],
            of_crash: Callable[[str], Any] | None = None) -> Iterator[tuple[tuple[Any, ...], Any]]:  # fmt: skip
        """Yields arguments of `Bench.run` with what it returned, in the order in which they end.

        Args:
            each: the arguments, drawn when a lane is free.
            of_crash: makes the result of a lane that has crashed; the error is raised after it.

        Raises:
            ChildProcessError: a lane has ended.
        """
        free, busy = list(self._lanes), dict[Any, tuple[Any, ...]]()
        while True:
            while free and (arguments := next(each, None)) is not None:
                lane = free.pop()
                lane.send(arguments)
                busy[lane] = arguments
            if not busy:
                return
            ended: list[Any] = connection.wait(list(busy))
            for lane in ended:
                arguments = busy.pop(lane)
                try:
                    result, error = lane.recv()
                except EOFError:
                    process = self._lanes[lane]
                    process.join()
                    status = process.exitcode
                    if of_crash and -status in _OF_CRASHES:
                        yield arguments, of_crash(f"the process that ran it has ended with status {status}")
                    raise ChildProcessError(f"the process that ran {arguments} has ended with status {status}") from None
                if error is not None:
                    raise error
                free.append(lane)
                yield arguments, result


def _serve(channel: Any, make: Callable[[], Bench], others: list[Any]) -> None:
    """The life of a lane: runs what comes until the other side is closed, or until a signal.

    Args:
        others: the other side's ends, this lane's and those of lanes before it.
    """
    for end in others:
        end.close()
    jobs.enter_lane()
    processes.prepare_process()
    processes.interrupts.take(*_SIGNALS)
    with contextlib.suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        with processes.adopting(), contextlib.closing(make()) as bench:
            while True:
                arguments = channel.recv()
                try:
                    channel.send((bench.run(*arguments), None))
                except Exception as error:  # the other side raises it
                    channel.send((None, error))
