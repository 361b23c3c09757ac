"""What a drain counts as arrived in a directory is on the disk, and was read from there."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draining import save, swept

from holdfast.drain import copying, direct_io
from holdfast.drain.places import open_place
from holdfast.errors import Error
from holdfast.integrity import jobs, places, processes

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[places.Place]:
    """A file system of which a power cut takes all that no sync has made durable."""
    if reason := places.why_not():
        pytest.skip(reason)
    jobs.start_server()
    with processes.adopting(), places.made({"fuse": {"kind": "forgets", "key": 1}}, str(tmp_path)) as place:
        yield place


def test_without_memory_a_sweep_fails_and_may_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))

    def raises(error: BaseException) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            raise error

        return call

    monkeypatch.setattr(copying, "_TRIES", 1)
    for place, name, error, said in (
        (direct_io.mmap, "mmap", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "run/step-1/.*: Cannot allocate memory"),
        (os, "preadv", MemoryError(), "drain .* to .*: no memory"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, raises(error))
            with pytest.raises(Error, match=said) as refused:
                swept(source, far)
            assert refused.value.code == "RESOURCE_EXHAUSTED"
    assert [e["event"] for e in swept(source, far)] == ["arrived"]


def test_a_link_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "slot").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "slot/link").symlink_to(tmp_path / "file")
    with pytest.raises(Error, match="symbolic links"), open_place(str(tmp_path)).opened_past_cache("slot", "link"):
        pass


def test_without_direct_io_the_cache_is_not_read(tmp_path: Path, cut: places.Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system opens a file so, and refuses the read."""
    path, real = os.path.join(cut.directory, "file"), os.preadv
    Path(path).write_bytes(b"a" * 4096)

    def read(fd: int, *further: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, *further)

    with open_place(cut.directory).opened_past_cache("", "file") as past_cache, open(path, "rb") as cached:
        assert cached.read() == b"a" * 4096
        (tmp_path / "served/file").write_bytes(b"b" * 4096)
        monkeypatch.setattr(os, "preadv", read)
        assert bytes(past_cache(0, 4096)) == b"b" * 4096
