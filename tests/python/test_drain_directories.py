"""`holdfast drain` to a mounted file system: one that cannot be read or is no longer mounted, and kills at each rename."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from draining import MIB, names, save, swept

import holdfast
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


def in_child(work: Callable[[], None], uid: int | None = None) -> int:
    """Runs `work` in a forked child, as another user where one is given; returns its exit status."""
    child = os.fork()
    if child == 0:
        try:
            if uid is not None:
                os.setgid(uid)
                os.setuid(uid)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- A second place that cannot be read.


def unreadable_loop(at: Path) -> str:
    at.symlink_to(at.name)
    return "Too many levels"


def unreadable_link(at: Path) -> str:
    at.symlink_to(at.with_name("unmounted"))
    return "is a link to .*unmounted, which is not there; mount or make it"


def unreadable_file(at: Path) -> str:
    at.touch()
    return "Not a directory"


@pytest.mark.parametrize("how", [unreadable_loop, unreadable_link, unreadable_file])
def test_a_place_that_cannot_be_looked_at_is_not_empty(how: Callable[[Path], str], tmp_path: Path) -> None:
    said = how(tmp_path / "mnt")
    far = tmp_path / "mnt" / "far"
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=64 * MIB, drain_to=far) as checkpointer:
        for asked in (checkpointer.newest, checkpointer.list, lambda: checkpointer.load(1, into={})):
            with pytest.raises(Error, match=said):  # a run must not begin anew
                asked()
    with pytest.raises(Error, match=said):  # nor has everything of such a source arrived
        swept(open_place(str(far)), open_place(str(tmp_path / "other")))


def test_a_directory_of_another_user_is_not_empty(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("another user's process needs root")
    save(tmp_path / "mnt/far", 1, elements=10)
    (tmp_path / "mnt").chmod(0o700)

    def refused() -> None:
        with pytest.raises(Error, match="Permission denied") as refusal:
            open_place(str(tmp_path / "mnt/far")).complete()
        assert refusal.value.code == "PERMISSION_DENIED"

    assert in_child(refused, uid=65534) == 0


def test_a_directory_that_was_never_there_is_empty(tmp_path: Path) -> None:
    assert names(open_place(str(tmp_path / "a/b"))) == []
    (tmp_path / "link").symlink_to(tmp_path)
    assert names(open_place(str(tmp_path / "link/b"))) == []
