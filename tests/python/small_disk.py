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
    directory.mkdir()
    image = directory.with_suffix(".image")
    commands = [["truncate", "--size=256M", str(image)], ["mkfs.btrfs", "--quiet", str(image)], ["mount", "-o", "loop", str(image), str(directory)]]
    try:
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode != 0:
                pytest.skip(f"{' '.join(command)}: {made.stderr.strip()}")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextmanager
def mounted(directory: Path, mib: int) -> Iterator[Path]:
    """Makes `directory` and mounts a file system of `mib` MiB there; without root the test is skipped."""
    directory.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", str(directory)],
                          capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"mounting a small file system needs root: {made.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
