"""What a drain counts as arrived in a directory is on the disk, and was read from there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from draining import in_child, names, save, swept, verdicts

from holdfast import _names
from holdfast.drain import copying, direct_io
from holdfast.drain.contents import contents_of
from holdfast.drain.places import Info, open_place
from holdfast.errors import Error
from holdfast.integrity import jobs, places, processes

pytestmark = pytest.mark.filterwarnings("ignore")


def path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[places.Place]:
    """A file system of which a power cut takes all that no sync has made durable."""
    if reason := places.why_not("fuse"):
        pytest.skip(reason)
    jobs.start_server()
    with processes.adopting(), places.made({"fuse": {"kind": "forgets", "key": 1}}, str(tmp_path)) as place:
        yield place


# The process is killed before it syncs a file of the copy, the name of the checkpoint, the name of a record beside it.
MOMENTS: dict[str, Callable[[str, str], bool]] = {
    "file": lambda far, synced: "/model-" in synced,
    "name": lambda far, synced: synced == far and os.path.exists(f"{far}/step-1"),
    "record": lambda far, synced: synced == f"{far}/step-1" and _names.BESIDE_RECORD in os.listdir(synced),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_power_cut_behind_a_kill_takes_nothing_that_has_arrived(moment: str, tmp_path: Path, cut: places.Place) -> None:
    run, far = tmp_path / "run", os.path.join(cut.directory, "far")
    save(run, 1, elements=10000)
    if moment == "record":
        swept(open_place(str(run)), open_place(far))
        (run / "step-1/common.pt").write_bytes(b"late")

    def killed() -> None:
        sync = os.fsync

        def or_killed(fd: int) -> None:
            if MOMENTS[moment](far, path_of(fd)):
                os.kill(os.getpid(), signal.SIGKILL)
            sync(fd)

        os.fsync = or_killed
        swept(open_place(str(run)), open_place(far))

    assert in_child(killed) == -signal.SIGKILL
    swept(open_place(str(run)), open_place(far))  # what the first one has left counts as arrived
    cut.cut()
    there = tmp_path / "served/far"  # past what the kernel has in its cache
    assert names(open_place(str(there))) == ["step-1"] and verdicts(there) == ["sound"]
    assert moment != "record" or {_names.BESIDE_RECORD, "common.pt"} <= set(os.listdir(there / "step-1"))


@pytest.mark.parametrize("call, number", [("fsync", errno.EIO), ("fsync", errno.ENOSPC), ("close", errno.EIO), ("pwrite", errno.EIO)])
def test_a_file_that_could_not_be_written_is_sent_from_its_beginning(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has its bytes, and gives them back."""
    save(tmp_path / "run", 1, elements=10000)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    data = max(contents_of(source, source.complete()[0][0]).data, key=lambda file: file.bytes)
    real = getattr(os, call)

    def fails(fd: int, *further: Any) -> Any:
        is_of_copy = ".partial-" in path_of(fd) and path_of(fd).endswith(data.name)
        result = real(fd, *further)
        if is_of_copy:
            raise OSError(number, os.strerror(number))
        return result

    monkeypatch.setattr(copying, "_TRIES", 1)
    monkeypatch.setattr(os, call, fails)
    for _ in range(3):
        with pytest.raises(Error, match=f"{data.name}: {os.strerror(number)}"):
            swept(source, open_place(str(tmp_path / "far")))
        assert names(far) == []
    monkeypatch.undo()
    (arrived,) = swept(source, open_place(str(tmp_path / "far")))
    assert arrived["bytes_sent"] >= data.bytes and verdicts(tmp_path / "far") == ["sound"]


@pytest.mark.parametrize("length", [1.0, 0.5])
def test_a_copy_that_cannot_be_read_is_written_anew(length: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    (info,) = source.complete()[0]
    data = max(contents_of(source, info).data, key=lambda file: file.bytes)
    left = Path(far.path(far.begin(info)), data.name)
    left.write_bytes((tmp_path / "run/step-1" / data.name).read_bytes()[: int(data.bytes * length)])
    with left.open("rb") as kept:  # so that no other file gets its number

        def refused(read: Callable[..., Any]) -> Callable[..., Any]:
            def call(fd: int, *further: Any) -> Any:
                if os.path.samestat(os.fstat(fd), os.fstat(kept.fileno())):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return read(fd, *further)

            return call

        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, refused(getattr(os, name)))
        assert [e["event"] for e in swept(source, far)] == ["arrived"]
    monkeypatch.undo()
    assert verdicts(tmp_path / "far") == ["sound"]


@pytest.mark.parametrize("step", ["write", "commit"])
def test_a_copy_that_another_process_removes_is_made_again(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    real = getattr(far, step)

    def removed(slot: str, *further: Any) -> None:
        shutil.rmtree(far.path(slot), ignore_errors=True)
        real(slot, *further)

    monkeypatch.setattr(copying, "_TRIES", 1)
    monkeypatch.setattr(far, step, removed)
    with pytest.raises(Error, match="another process has removed or completed the copy") as refused:
        swept(source, far)
    assert refused.value.code == "ABORTED"  # so that the command tries again
    monkeypatch.undo()
    assert [e["event"] for e in swept(source, far)] == ["arrived"]


def test_nothing_is_written_into_a_copy_that_another_process_has_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is not whole would be a user's file for a third process."""
    save(tmp_path / "run", 1, elements=10)
    source, far = open_place(str(tmp_path / "run")), open_place(str(tmp_path / "far"))
    begin, changed = far.begin, list[int]()

    def and_completed(info: Info, files: Iterable[str]) -> str:
        slot = begin(info, files)
        swept(source, open_place(str(tmp_path / "far")))
        changed.append(os.stat(tmp_path / "far/step-1").st_mtime_ns)
        return slot

    monkeypatch.setattr(far, "begin", and_completed)
    with pytest.raises(Error, match="another process has removed or completed the copy"):
        swept(source, far)
    assert changed == [os.stat(tmp_path / "far/step-1").st_mtime_ns]
    monkeypatch.undo()
    assert swept(source, far) == [] and verdicts(tmp_path / "far") == ["sound"]


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
