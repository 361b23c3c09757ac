"""The programs that are packed with the extension module, and the console commands that run them."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from holdfast import _native


@functools.cache
def program(name: str) -> str:
    """Path of a packed program."""
    return str(Path(_native.__file__).parent / "bin" / name)


def run(name: str, called: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by a packed program, which names itself `called`."""
    # Python ignores the signal, and a new program inherits that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(program(name), [called, *arguments])


def verify_checkpoint() -> None:
    """``verify-checkpoint PATH...``"""
    run("verify-checkpoint", "verify-checkpoint", sys.argv[1:])


def doctor() -> None:
    """``holdfast-doctor DIR``"""
    run("holdfast-doctor", "holdfast-doctor", sys.argv[1:])
