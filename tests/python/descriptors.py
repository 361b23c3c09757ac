"""The descriptors that this process holds."""

from __future__ import annotations

import os
from pathlib import Path


def of_files_below(directory: Path) -> list[str]:
    """The files below a directory that are open, each as often as it is: others' may be closed at any moment."""
    links = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    return sorted(link for link in links if link.startswith(f"{directory.resolve()}/"))
