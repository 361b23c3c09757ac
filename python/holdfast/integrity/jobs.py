"""The trainers' processes, seen from the driver: started, listened to, continued when they stop."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

import torch

from holdfast.integrity import callers, injection, memory_groups, native, processes, queues, schedule, trainer

TIME_SILENT_MAX = 400.0  # seconds without a line from any trainer of a life
NO_THREAD_DATA = 127  # status by which the C library ends a process that gets no memory for a thread's own data
# The status with which an event may end its trainer.
_ENDS = {
    **dict.fromkeys(("kill-trainer", "kill-both", "kill-in-call", "oom-trainer"), -signal.SIGKILL),
    "terminate-trainer": -signal.SIGTERM, "limit-memory": NO_THREAD_DATA,
}  # fmt: skip
# Trainers are forked by a server that has imported PyTorch and used nothing of it.
context: Any = multiprocessing.get_context("forkserver")


def preload(doors: Collection[str] = ()) -> None:
    """Imports what trainers need. Lanes that the program forks afterwards, and their trainers, share its memory.

    Args:
        doors: as of `start_server`.
    """
    if processes.is_program and set(doors) != {schedule.PLAN}:
        for module in _modules(doors):
            importlib.import_module(module)


def enter_lane() -> None:
    """In a new lane: its trainers are forked by a server of its own."""
    forkserver._forkserver.__init__()  # type: ignore[attr-defined,misc]


def start_server(doors: Collection[str] = ()) -> None:
    """Starts the process that forks trainers, unless it runs. This one reads with one thread: others run rounds beside it.

    The program and its lanes fork it from themselves. Another process, as of a test, may have used PyTorch and this package.

    Args:
        doors: of the trainers; of some it imports more. Without a trainer in Python it starts when it is needed.
    """
    torch.set_num_threads(1)
    context.set_forkserver_preload([*_modules(doors), "holdfast.integrity.frozen"])
    if set(doors) != {schedule.PLAN}:
        if processes.is_program and forkserver._forkserver._forkserver_pid is None:  # type: ignore[attr-defined]
            _fork_server()
        else:
            forkserver.ensure_running()


def ensure_server() -> None:
    """Starts the process now, where it is not running, and waits until it has imported what it forks."""
    first = context.Process(target=int)
    first.start()
    first.join()
    first.close()


def _modules(doors: Collection[str]) -> list[str]:
    return [
        "torch._dynamo", "torch.distributed.checkpoint.state_dict", "holdfast.dcp", "holdfast.observe",
        "holdfast.integrity.trainer", *["holdfast.integrity.preloaded"] * (schedule.MEGATRON in doors),
    ]  # fmt: skip


def _fork_server() -> None:
    """Makes a fork of this process the server, as `multiprocessing` makes a new process one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    resource_tracker.ensure_running()
    server._forkserver_address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(server._forkserver_address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()
        server._forkserver_pid = os.fork()
        if server._forkserver_pid == 0:
            try:
                _serve_forks(listener.fileno(), alive, server._preload_modules)
            finally:
                os._exit(0)
        os.close(alive)


def _serve_forks(listener: int, alive: int, modules: list[str]) -> None:
    """The life of a server that is a fork: it keeps nothing of the lane but what is imported."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes.release_memory()
    kept = {0, 1, 2, listener, alive, resource_tracker.getfd()}  # type: ignore[attr-defined]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)
    forkserver.main(listener, alive, modules)


@functools.cache
def _server() -> Any:
    """The store of all process groups, as a launcher has one outside of its trainers."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Member:
    """A trainer's process, seen from the driver."""

    def __init__(self, kind: type[trainer.Trainer], rank: int, ranks: int, store: str, plant: str, is_injected: bool) -> None:
        tasks, self.tasks = context.Pipe(duplex=False)
        self.out, out = context.Pipe(duplex=False)
        self.channel: socket.socket | None = None
        theirs: socket.socket | None = None
        if is_injected:
            self.channel, theirs = socket.socketpair()
        self.process = context.Process(target=trainer.serve, args=(kind, rank, ranks, store, tasks, out, plant, theirs))
        self.process.start()
        for end in (tasks, out, theirs):
            if end is not None:
                end.close()
        self.buffer = bytearray()
        self.rests = False  # its life has ended, and it waits for another

    def give(self, task: trainer.Task) -> None:
        """Begins a life."""
        self.tasks.send(task)

    def left(self) -> dict[str, int]:
        """What the process holds more than before its life; it tells that itself."""
        return {}

    def send(self, number: signal.Signals) -> None:
        processes.send(self.process.pid, number)

    def dismiss(self, fine: Collection[int] = (0,)) -> str:
        """Ends the process, which has ended or rests; returns what is wrong with its end.

        Args:
            fine: statuses that are right.
        """
        self.tasks.close()
        self.out.close()
        self.process.join(trainer.TIME_END_MAX)
        problem = processes.wrong_end(self.process.pid, self.process.exitcode, fine)
        if self.process.exitcode is None:
            self.send(signal.SIGKILL)
            self.process.join()
        self.process.close()
        return problem


class Crew:
    """The trainers of one job, with their process group. They may run several lives.

    Args:
        kind: of the trainers; None: the C++ program.
        ranks: how many.
        store: of their process group: ``"server"``, ``"file"``, or "" where they have none.
        plant: as of `trainer.serve`.
        is_injected: whether the driver answers their system calls.
        forbidden: system calls of the C++ program; other trainers forbid themselves theirs.
    """

    _made = 0

    def __init__(self, kind: type[trainer.Trainer] | None, ranks: int, store: str, plant: str = "",
                 is_injected: bool = False, forbidden: dict[str, str] | None = None) -> None:  # fmt: skip
        self.kind, self.ranks, self.store = kind, ranks, store
        self.rounds: list[int] = []  # that it has run
        self._directory = ""
        if store == "file":
            self._directory = tempfile.mkdtemp(prefix="integrity-store-")
            store = os.path.join(self._directory, "store")
        elif store:
            Crew._made += 1
            store = f"{_server().port}/{Crew._made}"
        self.members: list[Member | native.Member] = [
            Member(kind, rank, ranks, store, plant, is_injected) if kind else native.Member(rank, forbidden or {})
            for rank in range(ranks)
        ]

    def dismiss(self, fine: Callable[[int], Collection[int]] = lambda rank: (0,)) -> str:
        """Ends the trainers; returns what is wrong with the end of one. `fine` gives that of `Member.dismiss` for a rank."""
        problems = [member.dismiss(fine(rank)) for rank, member in enumerate(self.members)]
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
        return next(filter(None, problems), "")


class Pool:
    """Crews that rest. Most of a small round's cost is starting and ending processes that have PyTorch in memory."""

    ROUNDS_MAX = 40  # of a crew

    def __init__(self) -> None:
        self._resting: list[Crew] = []

    def take(self, kind: type[trainer.Trainer] | None, ranks: int, store: str) -> Crew:
        """A crew that rests, or a new one."""
        for crew in self._resting:
            if (crew.kind, crew.ranks, crew.store) == (kind, ranks, store):
                self._resting.remove(crew)
                return crew
        return Crew(kind, ranks, store)

    def give_back(self, crew: Crew) -> str:
        """Keeps a crew that rests, or dismisses it; returns what is wrong with its end."""
        if len(crew.rounds) >= self.ROUNDS_MAX:
            return crew.dismiss()
        self._resting.append(crew)
        # The oldest ends where many sizes rest: each member holds memory.
        return self._resting.pop(0).dismiss() if sum(c.ranks for c in self._resting) > 12 else ""

    def close(self) -> None:
        """Ends all crews."""
        while self._resting:
            self._resting.pop().dismiss()


def _kind_of(round_: dict[str, Any]) -> type[trainer.Trainer] | None:
    if round_["door"] == schedule.PLAN:
        return None
    if "saver" in round_:
        return callers.kind_of(round_["saver"])
    return queues.Trainer if round_["door"] == schedule.MEGATRON else trainer.Trainer


class Life:
    """One life of all jobs of a round: every process that a launcher would start.

    Args:
        round_, life: what the trainers do.
        directory, scratch: as of `trainer.Task`.
        plant: as of `trainer.serve`.
        injector: answers system calls of the trainers and of what they start.
        pool: of trainers that have run lives of other rounds; without one each life has processes of its own.
        second: as of `places.Place`; it needs processes of the life's own.
    """

    def __init__(self, round_: dict[str, Any], life: int, directory: str, scratch: str, plant: str = "",
                 injector: injection.Injector | None = None, pool: Pool | None = None, second: str = "") -> None:  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self.problem = ""
        self._continue: list[tuple[float, Member | native.Member]] = []
        self.scratch = scratch
        self._directory, self._number = directory, round_["number"]
        self._killing: list[threading.Thread] = []
        self._missed: list[dict[str, Any]] = []
        self._pool, self._injector = pool, injector
        kind, ranks = _kind_of(round_), round_["ranks"]
        store = round_["store"] if ranks > 1 or "saver" in round_ or kind and kind.has_group else ""
        self._crews = [
            pool.take(kind, ranks, store) if pool else Crew(kind, ranks, store, plant, injector is not None, round_["forbidden"])
            for _ in range(round_["jobs"])
        ]
        self.before = [list(crew.rounds) for crew in self._crews]
        self._listening: dict[int, Member | native.Member] = {}
        for job, crew in enumerate(self._crews):
            crew.rounds.append(round_["number"])
            for rank, member in enumerate(crew.members):
                member.rests = False
                self._listening[member.out.fileno()] = member
                with contextlib.suppress(BrokenPipeError):  # it has ended, as its pipe says, too
                    member.give(trainer.Task(round_, life, job, directory, scratch, second if (job + rank) % 2 else ""))
        for rank, member in enumerate(self._crews[0].members):
            if injector is not None and member.channel is not None:
                injector.accept(member.channel, member.process.pid, f"trainer {rank}")

    def run(self) -> None:
        """Listens until all have ended, and tells a wrong end in `problem`.

        Raises:
            OSError: a trainer could not do a step before its life, as the filter of a container.
        """
        try:
            self._listen()
        except BaseException:
            self.abandon()
            raise
        for killing in self._killing:
            killing.join()
        while self._missed:
            self.lines.append(self._missed.pop())
        for job, crew in enumerate(self._crews):
            goes_on = self._pool and self._may_go_on(crew)
            ended = self._pool.give_back(crew) if self._pool and goes_on else crew.dismiss(functools.partial(self._ends, job))
            self.problem = self.problem or ended

    def _ends(self, job: int, rank: int) -> set[int]:
        """The statuses with which a trainer may end: after its last line, or by an event of its own."""
        own = [line for line in self.lines if (line["job"], line["rank"]) == (job, rank)]
        told = {line["event"] for line in own}
        is_program = self._crews[job].kind is None
        found = {_ENDS[line["kind"]] for line in own if line["event"] == "fired" and line["kind"] in _ENDS}
        for fired in self._injector.fired if self._injector else ():
            if fired["act"] == "kill-all" or (fired["act"], fired["step"].role) == ("kill", f"trainer {rank}"):
                found.add(-signal.SIGKILL)
        if told & {"end", *(["exiting"] if is_program else [])}:
            found.add(0)
        return found | ({0, 1} if told & {"crashed", "not joined"} else set())

    def _listen(self) -> None:
        """Listens, and kills trainers that are silent for too long."""
        heard = time.monotonic()
        while self._listening:
            now = time.monotonic()
            for due in [c for c in self._continue if c[0] <= now]:
                self._continue.remove(due)
                due[1].send(signal.SIGCONT)
            wait = min([1.0, *(max(0.0, c[0] - now) for c in self._continue)])
            ready = select.select(list(self._listening), [], [], wait)[0]
            for fd in ready:
                self._read(fd)
            if ready:
                heard = time.monotonic()
            elif time.monotonic() - heard > TIME_SILENT_MAX:
                self.problem = f"a trainer told nothing for {TIME_SILENT_MAX:g} s"
                for member in self._listening.values():
                    member.send(signal.SIGCONT)
                    member.send(signal.SIGUSR2)  # its stacks go to its log
                time.sleep(1.0)
                self.kill()

    def _may_go_on(self, crew: Crew) -> bool:
        """Whether the next life of a crew begins as one of new processes does."""
        if self.problem or not all(member.rests for member in crew.members):
            return False
        # Where something has failed, the ranks may have left the calls of their process group in different places.
        fired = {line["kind"] for line in self.lines if line["event"] == "fired"}
        return crew.ranks == 1 or crew.kind is None or fired <= set(schedule.HARMLESS)

    def _read(self, fd: int) -> None:
        member = self._listening[fd]
        data = os.read(fd, 1 << 16)
        if not data:
            del self._listening[fd]
            return
        *lines, rest = bytes(member.buffer + data).split(b"\n")
        member.buffer[:] = rest
        for text in lines:
            line = json.loads(text)
            if line["event"] == "stopping":
                self._continue.append((time.monotonic() + 0.01 + line["seconds"], member))
            if line["event"] == "unable":
                raise OSError(f"a trainer of round {self._number}: {line['errors'][0]['message']}")
            if line["event"] == "out of memory":  # the C++ program leaves the control group to the driver
                self._killing.append(threading.Thread(target=self._run_out_of_memory, args=(line,)))
                self._killing[-1].start()
            elif line["event"] == "rest":
                member.rests = True
                with contextlib.suppress(OSError):  # it has ended
                    if more := member.left():
                        self.lines.append({**line, "event": "leak", "more": more})
                del self._listening[fd]
            else:
                self.lines.append(line)
            if self.lines and self.lines[-1]["event"] == "leak":
                self.lines[-1].setdefault("ending", processes.ending())

    def _run_out_of_memory(self, line: dict[str, Any]) -> None:
        if not memory_groups.kill(line["pid"], self._directory):
            self._missed.append({**line, "event": "missed"})

    def kill(self) -> None:
        """Kills all trainers that are left."""
        for crew in self._crews:
            for member in crew.members:
                member.send(signal.SIGKILL)
        self._listening.clear()

    def abandon(self) -> None:
        """Ends the life in the middle."""
        self.kill()
        while self._crews:
            self._crews.pop().dismiss()


@contextlib.contextmanager
def _running(target: Any, arguments: tuple[Any, ...]) -> Iterator[Any]:
    """A process, which ends with the block, also when the campaign is interrupted."""
    process = context.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def run_and_kill(body: Any, arguments: tuple[Any, ...], seconds: float) -> int:
    """Runs `body` in a process of its own, which is killed some seconds after its beginning.

    Returns:
        The exit status: -SIGKILL where it had not ended before.
    """
    read, write = context.Pipe(duplex=False)
    with read, _running(_beginning, (body, arguments, write)) as process:
        write.close()
        read.poll(TIME_SILENT_MAX)
        process.join(seconds)
        process.kill()
        process.join()
        return int(process.exitcode)


def _beginning(body: Any, arguments: tuple[Any, ...], out: Any) -> None:
    out.send(None)
    body(*arguments)


def run_injected(body: Any, arguments: tuple[Any, ...], injector: injection.Injector, role: str) -> tuple[Any, int]:
    """Runs `body` in a process of its own, whose system calls the injector answers.

    Args:
        body, arguments: a function of a module, and what it is called with.
        injector: of this run.
        role: of the process.

    Returns:
        What it returned, None where it did not; and its exit status.
    """
    read, write = context.Pipe(duplex=False)
    mine, theirs = socket.socketpair()
    result = None
    with read, _running(_injected, (body, arguments, theirs, write)) as process:
        write.close()
        theirs.close()
        injector.accept(mine, process.pid or 0, role)
        try:
            if read.poll(TIME_SILENT_MAX):
                result = read.recv()
            else:
                process.kill()
        except EOFError:
            pass
        process.join()
        status = process.exitcode
    injector.close()
    return result, status or 0


def _injected(body: Any, arguments: tuple[Any, ...], channel: socket.socket, out: Any) -> None:
    trainer.prepare()
    injection.install(channel)
    result = body(*arguments)
    injection.mark("end")
    out.send(result)
    os._exit(0)
