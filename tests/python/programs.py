"""Python programs, forked by a server that has imported PyTorch: an import costs a new interpreter two to three seconds of CPU.

For programs whose start is no part of the test. `subprocess` starts the others.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from multiprocessing.connection import Connection
from subprocess import CompletedProcess
from typing import Any

import dcp_ranks


class Program:
    """A program that runs, with those methods of `subprocess.Popen` that tests use. Its stdout is a pipe."""

    def __init__(
        self, arguments: Sequence[str], env: Mapping[str, str] | None = None, new_session: bool = False, stderr: bool = True,
        cwd: str | None = None,
    ) -> None:  # fmt: skip
        """Starts a program.

        Args:
            arguments: those of the interpreter: ``-c CODE``, ``-m MODULE`` or a file, and the program's own.
            env, cwd: the environment and the directory; default: this process's.
            new_session: a session of its own.
            stderr: as a pipe, too; else that of the tests.
        """
        pipes = [dcp_ranks.context.Pipe(duplex=False) for _ in range(2 if stderr else 1)]
        environment = dict(os.environ if env is None else env)
        self._process = dcp_ranks.context.Process(
            target=_run, args=(list(arguments), environment, cwd or os.getcwd(), new_session, *(end for _, end in pipes))
        )
        self._process.start()
        for _, end in pipes:
            end.close()
        self.pid: int = self._process.pid or 0
        self._pipes = [_as_file(pipe) for pipe, _ in pipes]
        self.stdout = self._pipes[0]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, or minus the signal.

        Raises:
            TimeoutError: it has not ended.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"a program has not ended within {timeout} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[bytes, ...]:
        """Waits for the end; what was written to the pipes."""
        with ThreadPoolExecutor(len(self._pipes)) as readers:
            said = [readers.submit(pipe.readall) for pipe in self._pipes]
            try:
                self.wait(timeout)
            except TimeoutError:
                self.kill()
                raise
            return tuple(each.result() for each in said)


def run(*arguments: object, cwd: str | None = None, timeout: float = 200) -> CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        arguments, cwd: as of `Program`.
        timeout: seconds, after which it is killed and `TimeoutError` is raised.
    """
    command = [str(argument) for argument in arguments]
    program = Program(command, cwd=cwd)
    out, error = program.communicate(timeout)
    return CompletedProcess(command, program.wait(), out.decode(), error.decode())


def _as_file(connection: Connection) -> FileIO:
    file = open(os.dup(connection.fileno()), "rb", buffering=0)
    connection.close()
    return file


def _run(arguments: list[str], env: dict[str, str], directory: str, new_session: bool, *ends: Connection) -> None:
    if new_session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    for fd, end in enumerate(ends, 1):
        os.dup2(end.fileno(), fd)
        end.close()
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    if "OMP_NUM_THREADS" in env:  # read at the import
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    body = _body(arguments)
    try:
        body()
    finally:  # as an interpreter ends, which a forked process does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _body(arguments: list[str]) -> Callable[[], Any]:
    option, *rest = arguments
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"]
        return lambda: exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    if option == "-m":
        sys.argv = rest
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv = [option, *rest]
    sys.path.insert(0, os.path.dirname(option))
    return lambda: runpy.run_path(option, run_name="__main__")
