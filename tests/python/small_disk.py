"""A small file system, for tests of a full one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.integrity import served_disk


@contextmanager
def btrfs(directory: Path) -> Iterator[Path]:
    """Makes `directory` and mounts a Btrfs there; without root, its programs or a loop device the test is skipped."""
    image = served_disk.sparse(str(directory.with_suffix(".image")), 256 << 20)
    try:
        served_disk.make("btrfs", image)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{error} {getattr(error, 'stderr', '')}")
    with _mounted(directory, ["mount", "-o", "loop", image]):
        yield directory


@contextmanager
def mounted(directory: Path, mib: int) -> Iterator[Path]:
    """Makes `directory` and mounts a file system of `mib` MiB there; without root the test is skipped."""
    with _mounted(directory, ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none"]):
        yield directory


@contextmanager
def _mounted(directory: Path, command: list[str]) -> Iterator[None]:
    """Makes `directory`, and mounts there by a command without its last argument."""
    directory.mkdir()
    made = subprocess.run([*command, str(directory)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
