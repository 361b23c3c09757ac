"""Memory of this process and of those that it has started."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from holdfast.integrity.processes import children


def processes() -> list[int]:
    """This process and all that it has started, they too."""
    found = [os.getpid()]
    for pid in found:
        found += children(pid)
    return found


def in_use() -> tuple[int, int]:
    """Shared memory that any of them has mapped, each file once, and anonymous memory of them all."""
    shared: dict[str, int] = {}
    anonymous = 0
    for pid in processes():
        mapped: dict[str, int] = {}
        file = ""
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
                key, _, value = line.partition(":")
                if "-" in key:  # addresses, rights, offset, device, inode, path
                    fields = line.split(maxsplit=5)
                    file = " ".join(fields[3:5]) if fields[1].endswith("s") else ""
                elif key == "Rss" and file:
                    mapped[file] = mapped.get(file, 0) + int(value.split()[0]) * 1024
                elif key == "Anonymous" and not file:
                    anonymous += int(value.split()[0]) * 1024
        for name, nbytes in mapped.items():
            shared[name] = max(nbytes, shared.get(name, 0))
    return sum(shared.values()), anonymous


class Peak:
    """Of `in_use`, from its making on; the anonymous memory above that before."""

    def __init__(self) -> None:
        self.shared, self.anonymous = self.before = in_use()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            shared, anonymous = in_use()
            self.shared = max(self.shared, shared)
            self.anonymous = max(self.anonymous, anonymous)

    def stop(self) -> tuple[int, int]:
        self._stop.set()
        self._thread.join()
        return self.shared, self.anonymous - self.before[1]
