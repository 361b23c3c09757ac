"""`holdfast drain`: what counts as progress, and when a drain gives up."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
from draining import MIB, PLAIN, names, save, until

from holdfast.drain import Drain, object_store
from holdfast.drain.file_system import Directory
from holdfast.drain.following import Following, is_held, kept_open, lock_path
from holdfast.drain.places import open_place
from holdfast.drain.running import Running
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


def test_an_error_behind_a_long_work_is_tried_again(server: s3_server.Server, tmp_path: Path, bucket: tuple[str, dict[str, str]]) -> None:
    save(tmp_path / "run", 1, elements=10)
    url, storage = bucket
    events: list[dict[str, Any]] = []
    following = Following(open_place(str(tmp_path / "run")), open_place(url, storage), Drain(give_up=60.0), events.append)
    running = Running(following, events.append, watch=True)
    running.finish()
    following.moved_at -= 100.0  # as behind a large file's comparison
    server.faults.refuse = 403
    thread = threading.Thread(target=running.run, args=(str(tmp_path / "run"), url), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not [e for e in events if e["event"] == "trouble"] and time.monotonic() < end:
        time.sleep(0.01)
    server.faults.refuse = 0
    thread.join(20)
    assert not thread.is_alive() and names(open_place(url, storage)) == ["step-1"]


def test_a_refused_part_of_a_large_file_is_sent_again(server: s3_server.Server, tmp_path: Path,
                                                      bucket: tuple[str, dict[str, str]],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The library ends the reading of the parts that it has not asked for: that is no reason of its own."""
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 * MIB)
    save(tmp_path / "run", 1, elements=20 * MIB)  # 16 parts, of which 8 are on their way at a time
    far = open_place(*bucket)
    server.faults.breaks = [("PUT", "partNumber=1&", "refused")]
    Following(open_place(str(tmp_path / "run")), far, Drain(), lambda event: None).sweep()
    assert not server.faults.breaks and names(far) == ["step-1"]


class _Compared(Directory):
    """A directory that says when its large file is compared, and gives back other bytes than the last ones when it is told to."""

    def __init__(self, path: str, compared: Callable[[], None]) -> None:
        super().__init__(path)
        self._told, self.lies = compared, False

    @contextlib.contextmanager
    def opened_past_cache(self, slot: str, name: str) -> Iterator[Any]:
        with super().opened_past_cache(slot, name) as read:

            def told(begin: int, end: int) -> bytes:
                if name.endswith(".safetensors"):
                    self._told()
                return bytes(end - begin) if self.lies and begin >= 16 * MIB else read(begin, end)

            yield told


def test_a_comparison_is_progress_the_first_time(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, elements=5 * MIB)  # 20 MiB: two pieces to compare
    far = _Compared(str(tmp_path / "far"), lambda: moved.append(following.moved_at))
    following = Following(open_place(str(tmp_path / "run")), far, PLAIN, lambda event: None)
    moved: list[float] = []
    far.lies = True
    with pytest.raises(Error, match="it does not read back as it was sent: .* have another digest"):
        following.sweep()
    assert moved[1] > moved[0] and set(moved[1:]) == {moved[1]}  # three tries
    far.lies = False
    following.sweep()
    assert following.moved_at > moved[1] and names(far) == ["step-1"]


def test_a_wait_is_for_what_was_there_at_its_call(tmp_path: Path) -> None:
    """Saves that follow each other faster than they are sent hold it up for no longer."""
    run = tmp_path / "run"
    save(run, 1, 2, elements=10)
    arrived: list[str] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "arrived":
            arrived.append(event["name"])
            if len(arrived) < 6:
                save(run, len(arrived) + 2, elements=10)

    following = Following(open_place(str(run)), open_place(str(tmp_path / "far")), PLAIN, hear)
    following.sweep()
    assert arrived == ["step-1", "step-2"] and following.pending == 2
    following.sweep()
    assert arrived == ["step-1", "step-2", "step-3", "step-4"]


def test_the_newest_is_that_of_the_call(tmp_path: Path) -> None:
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    save(run, 1, 2, elements=10)

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "arrived":
            save(run, 3, elements=10)

    Following(open_place(str(run)), far, PLAIN, hear, only=lambda complete: complete[-1:]).sweep()
    assert names(far) == ["step-2"]


def test_a_lock_of_a_directory_that_was_moved_is_of_another_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run/lock"
    with open(lock, "w") as file, kept_open(str(lock), file.fileno()) as is_another:
        assert not is_another()
        (tmp_path / "run").rename(tmp_path / "old")
        assert not is_another()  # it may come back
        (tmp_path / "run").mkdir()
        lock.touch()
        assert is_another()
        with kept_open(str(lock), file.fileno()) as is_another:
            assert is_another()


def test_a_directory_that_comes_back_ends_no_wait_with_an_error(tmp_path: Path) -> None:
    """A wait for less time than between two looks for the directory."""
    run, far = str(tmp_path / "run"), str(tmp_path / "far")
    told: list[dict[str, Any]] = []
    running = Running(Following(open_place(run), open_place(far), Drain(give_up=0.3), told.append), told.append, watch=True)
    thread = threading.Thread(target=running.run, args=(run, far), daemon=True)
    thread.start()
    time.sleep(0.2)
    save(tmp_path / "run", 1, elements=10)
    running.ring(ticket=7)
    assert until(lambda: any(e["event"] == "synced" for e in told))
    assert [e["error"] for e in told if e["event"] == "synced"] == [None] and names(open_place(far)) == ["step-1"]
    running.finish()
    thread.join(60)
    assert not thread.is_alive()


def test_a_directory_that_is_made_anew_is_locked_anew(tmp_path: Path) -> None:
    run, far = str(tmp_path / "run"), str(tmp_path / "far")
    save(tmp_path / "run", 1, elements=10)
    running = Running(Following(open_place(run), open_place(far), PLAIN, lambda event: None), lambda event: None, watch=True)
    thread = threading.Thread(target=running.run, args=(run, far), daemon=True)
    thread.start()
    lock = lock_path(run, far)
    assert lock is not None and until(lambda: is_held(lock) and names(open_place(far)) == ["step-1"])
    shutil.rmtree(run)
    save(tmp_path / "run", 2, elements=10)
    assert until(lambda: is_held(lock) and names(open_place(far)) == ["step-1", "step-2"])
    running.finish()
    thread.join(60)
    assert not thread.is_alive() and not is_held(lock)
