"""The console commands: the programs that are packed with the extension module."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from holdfast import _native


def program(name: str) -> str:
    """Path of a packed program."""
    return str(Path(_native.__file__).parent / "bin" / name)


def _run(name: str) -> None:
    path = program(name)
    os.execv(path, [name, *sys.argv[1:]])


def verify_checkpoint() -> None:
    """``verify-checkpoint PATH...``"""
    _run("verify-checkpoint")


def doctor() -> None:
    """``holdfast-doctor DIR``"""
    _run("holdfast-doctor")
