"""The trainers' processes, seen from the driver: started, listened to, continued when they stop."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
import time
from multiprocessing import forkserver
from typing import Any

from holdfast.integrity import injection, peers, processes, trainer

TIME_SILENT_MAX = 400.0  # seconds without a line from any trainer of a life
# Trainers are forked by a server that has imported PyTorch and used nothing of it.
_context: Any = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Starts the process that forks trainers."""
    _context.set_forkserver_preload([
        "torch._dynamo", "torch.distributed.checkpoint.state_dict", "holdfast.dcp", "holdfast.observe",
        "holdfast.integrity.trainer", "holdfast.integrity.frozen",
    ])  # fmt: skip
    forkserver.ensure_running()


class Life:
    """One life of all jobs of a round: every process that a launcher would start.

    Args:
        round_, life: what the trainers do.
        directory, scratch, plant: as of `trainer.main`.
        injector: answers system calls of the trainers and of what they start.
    """

    def __init__(self, round_: dict[str, Any], life: int, directory: str, scratch: str, plant: str = "",
                 injector: injection.Injector | None = None) -> None:  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        self.problem = ""
        self._processes = []
        self._pipes: dict[int, tuple[Any, Any, bytearray]] = {}
        self._continue: list[tuple[float, Any]] = []
        waiting: list[Any] = []
        for job in range(round_["jobs"]):
            for rank in range(round_["ranks"]):
                read, write = _context.Pipe(duplex=False)
                made = (peers if "saver" in round_ else trainer).Trainer
                theirs = None
                if injector:
                    mine, theirs = socket.socketpair()
                process = _context.Process(
                    target=trainer.main, args=(made, rank, round_, life, job, directory, scratch, write, plant, theirs)
                )
                process.start()
                write.close()
                if theirs is not None:
                    theirs.close()
                    waiting.append((mine, process.pid, f"trainer {rank}"))
                self._processes.append(process)
                self._pipes[read.fileno()] = (read, process, bytearray())

        for channel, pid, role in waiting:
            assert injector is not None
            injector.accept(channel, pid, role)

    def run(self) -> None:
        """Listens until all have ended; kills what is silent for too long, and says so in `problem`."""
        heard = time.monotonic()
        while self._pipes:
            now = time.monotonic()
            for due in [c for c in self._continue if c[0] <= now]:
                self._continue.remove(due)
                processes.send(due[1].pid, signal.SIGCONT)
            wait = min([1.0, *(max(0.0, c[0] - now) for c in self._continue)])
            ready = select.select(list(self._pipes), [], [], wait)[0]
            for fd in ready:
                self._read(fd)
            if ready:
                heard = time.monotonic()
            elif time.monotonic() - heard > TIME_SILENT_MAX:
                self.problem = f"a trainer told nothing for {TIME_SILENT_MAX:g} s"
                for process in self._processes:
                    processes.send(process.pid, signal.SIGCONT)
                    processes.send(process.pid, signal.SIGUSR2)  # its stacks go to its log
                time.sleep(1.0)
                self.kill()
        for process in self._processes:
            process.join(30)
            if process.exitcode is None:
                self.problem = self.problem or "a trainer has closed its pipe and goes on"
                processes.send(process.pid, signal.SIGKILL)
                process.join()
            elif process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM):
                self.problem = self.problem or f"a trainer ended with status {process.exitcode}"
            process.close()

    def _read(self, fd: int) -> None:
        connection, process, buffer = self._pipes[fd]
        data = os.read(fd, 1 << 16)
        if not data:
            connection.close()
            del self._pipes[fd]
            return
        buffer += data
        *lines, rest = bytes(buffer).split(b"\n")
        buffer[:] = rest
        for text in lines:
            line = json.loads(text)
            if line["event"] == "stopping":
                self._continue.append((time.monotonic() + 0.01 + line["seconds"], process))
            self.lines.append(line)

    def kill(self) -> None:
        """Kills all trainers that are left."""
        for process in self._processes:
            processes.send(process.pid, signal.SIGKILL)
        for connection, _, _ in self._pipes.values():
            connection.close()
        self._pipes.clear()


def run_and_kill(body: Any, arguments: tuple[Any, ...], seconds: float) -> None:
    """Runs `body` in a process of its own, which is killed after some seconds."""
    process = _context.Process(target=body, args=arguments)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    process.close()


def run_injected(body: Any, arguments: tuple[Any, ...], injector: injection.Injector, role: str) -> tuple[Any, int]:
    """Runs `body` in a process of its own, whose system calls the injector answers.

    Args:
        body, arguments: a function of a module, and what it is called with.
        injector: of this run.
        role: of the process.

    Returns:
        What it returned, None where it did not; and its exit status.
    """
    read, write = _context.Pipe(duplex=False)
    mine, theirs = socket.socketpair()
    process = _context.Process(target=_injected, args=(body, arguments, theirs, write))
    process.start()
    write.close()
    theirs.close()
    injector.accept(mine, process.pid or 0, role)
    result = None
    with read:
        try:
            if read.poll(TIME_SILENT_MAX):
                result = read.recv()
            else:
                process.kill()
        except EOFError:
            pass
    process.join()
    status = process.exitcode
    process.close()
    injector.close()
    return result, status or 0


def _injected(body: Any, arguments: tuple[Any, ...], channel: socket.socket, out: Any) -> None:
    trainer.prepare()
    injection.install(channel)
    result = body(*arguments)
    injection.mark("end")
    out.send(result)
    os._exit(0)
