"""A small file system, for tests of a full one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def btrfs(directory: Path) -> Iterator[Path]:
    """Makes `directory` and mounts a Btrfs there; without root, its programs or a loop device the test is skipped."""
    image = str(directory.with_suffix(".image"))
    with _mounted(directory, ["truncate", "--size=256M", image], ["mkfs.btrfs", "--quiet", image], ["mount", "-o", "loop", image]):
        yield directory


@contextmanager
def mounted(directory: Path, mib: int) -> Iterator[Path]:
    """Makes `directory` and mounts a file system of `mib` MiB there; without root the test is skipped."""
    with _mounted(directory, ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none"]):
        yield directory


@contextmanager
def _mounted(directory: Path, *commands: list[str]) -> Iterator[None]:
    """Makes `directory`, and mounts there by the last command, whose last argument is left out."""
    directory.mkdir()
    commands[-1].append(str(directory))
    for command in commands:
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            pytest.skip(str(error))
        if made.returncode != 0:
            pytest.skip(f"{' '.join(command)}: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
