"""`.metadata` comes last: the calls that commit it, in their order, and ranks that are slow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import holdfast
import holdfast.dcp
from holdfast.dcp import metadata

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20


class Calls:
    """What this process makes durable, renames and deletes, by name, in the order of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.at_fsync: dict[str, bytes] = {}
        for name in ("fsync", "fdatasync", "rename", "replace", "unlink", "remove"):
            monkeypatch.setattr(os, name, self._recorded(name, getattr(os, name)))

    def _recorded(self, name: str, real: Any) -> Any:
        def call(*what: Any, **options: Any) -> Any:
            paths = [os.readlink(f"/proc/self/fd/{w}") if isinstance(w, int) else os.fspath(w) for w in what]
            if name == "fsync" and os.path.isfile(paths[0]):
                self.at_fsync[os.path.basename(paths[0])] = Path(paths[0]).read_bytes()
            result = real(*what, **options)
            self.seen.append((name, *(os.path.basename(p) for p in paths)))
            return result

        return call


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "step": int(value)}


def test_metadata_is_synced_renamed_and_synced_again_before_anything_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    # The names above and its own first: else all of it could vanish in a crash.
    before, deleted = [("fsync", tmp_path.parent.name), ("fsync", tmp_path.name)], []
    for step, way in enumerate(("save", "async_save", "save"), 1):
        with monkeypatch.context() as patch:
            calls = Calls(patch)
            if way == "save":
                dcp.save(_state(step), storage_writer=holdfast.dcp.StorageWriter(path))
            else:
                holdfast.dcp.async_save(_state(step), checkpoint_id=path).result(60)
        (record,) = (p.name for p in path.glob("holdfast.commit-*.json"))
        # The proof first: metadata without it could be damaged and nobody would know.
        commit = [
            (("fsync", f"{name}.tmp"), ("rename", f"{name}.tmp", name), ("fsync", "run"))
            for name in (record, ".metadata")
        ]
        assert calls.seen == [*before, *commit[0], *commit[1], *deleted], way
        # All of it was in the file when that was synced, not in a buffer.
        assert calls.at_fsync[".metadata.tmp"] == (path / ".metadata").read_bytes()
        assert set(metadata.read(path / ".metadata").state_dict_metadata) == {"w", "step"}
        (manifest,) = path.glob("rank-*.manifest.json")
        # A file without its manifest is known to be incomplete, not corrupt.
        before = [("fsync", tmp_path.name)] if step == 1 else []  # once more for a directory that stands there
        deleted = [("unlink", n) for n in (record, manifest.name, f"__0_{step - 1}.distcp")]


class Watch:
    """What is in a directory while a save goes on, as any other process sees it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._older = set(os.listdir(path)) if os.path.isdir(path) else set()
        self._metadata = self._inode()
        self.too_early: list[list[str]] = []
        self.first_alone = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _inode(self) -> int:
        try:
            return os.stat(os.path.join(self.path, ".metadata")).st_ino
        except FileNotFoundError:
            return 0

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            committed = self._inode() != self._metadata  # looked at before the names are
            new = sorted(set(os.listdir(self.path)) - self._older) if os.path.isdir(self.path) else []
            first, second = (any(n.startswith(f"rank-0000{r}") and n.endswith(".json") for n in new) for r in (0, 1))
            if committed and not second:
                self.too_early.append(new)
            self.first_alone += first and not second and not committed

    def stop(self) -> tuple[int, list[list[str]]]:
        self._stop.set()
        self._thread.join()
        return self.first_alone, self.too_early


def _slow_second(rank: int, path: str) -> list[tuple[int, list[list[str]]]]:
    seen = []
    commit = metadata.commit

    def look(directory: Path, name: str, data: Any, *of: Any) -> None:
        # Either all is there but the metadata, or the older save's.
        assert {f["file"] for f in holdfast.verify(directory)["faults"]} <= {".metadata"}
        for info in data.storage_data.values():
            assert (directory / info.relative_path).stat().st_size >= info.offset + info.length
        commit(directory, name, data, *of)

    metadata.commit = look
    if rank == 1:  # its second chunk waits for the rate
        holdfast.configure(bytes_per_second_max=8 * MIB)
    state = {f"r{rank}": torch.full((2 * MIB if rank else 1000,), 1.0), "step": 1}
    for way in ("async_save", "save"):
        watch = Watch(path)
        dist.barrier()
        if way == "async_save":
            holdfast.dcp.async_save(state, checkpoint_id=path).result(60)
        else:
            dcp.save({**state, "step": 2}, storage_writer=holdfast.dcp.StorageWriter(path))
        seen.append(watch.stop())
        dist.barrier()
    return seen


def test_metadata_waits_for_the_slowest_rank(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for seen in dcp_ranks.run_ranks(2, tmp_path, _slow_second, str(path)):
        for first_alone, too_early in seen:
            assert first_alone, "the second rank was not the slower one"
            assert not too_early
    assert holdfast.dcp.verify(path)["verdict"] == "sound"
    assert metadata.read(path / ".metadata").state_dict_metadata.keys() == {"r0", "r1", "step"}
