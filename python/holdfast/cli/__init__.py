"""The command ``holdfast``: its subcommands, its errors and its exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast import _native, _programs, directories
from holdfast.cli import text
from holdfast.errors import Error

TROUBLE = 2
INTERRUPTED = 130  # as a shell reports a program that SIGINT has ended
PIPE_CLOSED = 141  # the same for SIGPIPE

_DESCRIPTION = """\
Lists, shows, compares, verifies, repairs, converts and watches checkpoints.

commands:
  ls DIR              list the checkpoints of a directory
  show PATH           list the tensors of a checkpoint or a file
  diff A B            compare two checkpoints
  verify PATH...      read every byte again and compare it with its digest
  doctor DIR          report the abilities of the machine and the directory
  recover DIR         clean a directory after a crash
  drain SRC DST       copy complete checkpoints to a second place: a file system or an object store
  convert SRC DST     convert between Holdfast, DCP, torch.save and safetensors
  top [DIR]           show the saves in flight on this node, of all ranks
  demo                train a made-up model, save it meanwhile, and verify what was saved

`holdfast COMMAND --help` explains a command, with examples.
"""
_EPILOG = """\
exit status:
  0    success (diff: the same; verify: sound; doctor: saves work)
  1    a negative answer (diff: different; verify: corrupt; doctor: saves do not work;
       drain: a checkpoint has not arrived)
  2    trouble: the error is on stderr
  130  interrupted by Ctrl-C
  141  the reader of the output (a pipe) was closed
  verify exits as verify-checkpoint: 2 incomplete, 3 unreadable, 64 wrong command line;
  doctor has 64, too; demo --help has its own
"""

# Each module has `declare(parser)`, and `run(arguments)`, which returns the exit status.
_MODULES = {
    "ls": "listing",
    "show": "showing",
    "diff": "comparing",
    "drain": "draining",
    "recover": "recovering",
    "convert": "converting",
    "top": "watching",
}
_PROGRAMS = {"verify": "verify-checkpoint", "doctor": "holdfast-doctor", "demo": "holdfast-demo"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # An error is printed once, and advice for callers of a library is left out.
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    warnings.simplefilter("ignore")
    if sys.stderr is None:  # closed; `print` would take the standard output
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if sys.stdout is None:  # the next file that is opened would be the standard output
        return _complain("standard output: Bad file descriptor")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Output(sys.stdout)
    # The library's calls return to Python when they are done: the signal has to end the process.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        try:
            status = _run(arguments)
        except SystemExit as end:  # of the parser of command lines
            status = int(end.code or 0)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:  # of the output: `_run` has told of others
        return PIPE_CLOSED if isinstance(error, BrokenPipeError) else _complain(f"standard output: {error.strerror}")


class _Output(io.TextIOWrapper):
    """The standard output. Its errors name it, and a terminal that is not UTF-8 shows escapes of what it lacks."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        how = text.encoding, text.line_buffering, text.write_through
        super().__init__(text.detach(), how[0], "backslashreplace", None, how[1], how[2])

    def write(self, text: str) -> int:
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _drop(self)
            error.filename = "standard output"
            raise


def _drop(stream: Any) -> None:
    """Drops what a stream still holds: it is flushed again, and by the interpreter at the exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(message: str, name: str = "") -> int:
    """Prints an error, where that is possible."""
    try:
        print(" ".join(filter(None, ("holdfast", name))) + f": {text.printable(message)}", file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)
    return TROUBLE


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name == "verify" and any("://" in argument for argument in arguments):
        from holdfast.cli import second_place

        return second_place.verify(arguments[1:])
    if name in _PROGRAMS:
        try:
            for argument in arguments[1:] if name == "doctor" else ():
                directories.local_path(argument, "probe")
            _programs.run(_PROGRAMS[name], f"holdfast {name}", arguments[1:])
        except Error as error:
            return _complain(error.message, name)
        except OSError as error:
            return _complain(f"run {_programs.program(_PROGRAMS[name])}: {error.strerror}", name)
    parser = argparse.ArgumentParser(
        "holdfast",
        usage="holdfast COMMAND ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version: str = _native.__version__  # type: ignore[attr-defined]  # its types leave it out
    parser.add_argument("--version", action="version", version=f"holdfast {version}")
    if not arguments:
        parser.print_help(sys.stderr)
        return TROUBLE
    if name not in _MODULES:
        parser.add_argument("command", metavar="COMMAND", choices=[*_MODULES, *_PROGRAMS], help=argparse.SUPPRESS)
        parser.parse_args(arguments[:1])
    module = importlib.import_module(f"holdfast.cli.{_MODULES[name]}")
    parser = argparse.ArgumentParser(
        f"holdfast {name}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    module.declare(parser)
    parsed = parser.parse_args(arguments[1:])
    try:
        return module.run(parsed)
    except Error as error:
        message = error.message
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "this needs PyTorch; install torch"
    except MemoryError:
        message = "out of memory"
    except RecursionError:
        message = "the state is nested too deeply"
    try:
        sys.stdout.flush()
    finally:
        _complain(message, name)
    return TROUBLE
