"""integrity-fuzz in its places: file systems that err, lie about locks, answer from old knowledge, are slow, or forget."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import random
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_integrity import event, made, save

import holdfast
from holdfast import integrity
from holdfast.integrity import fuse_files, jobs, native, places, processes, rounds, schedule, served_disk, slow_disk

MIB = 1 << 20
WAIT = {"do": "wait"}
OF_PROGRAM = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
SLOW = {"rate": 16 * MIB, "spec": {"bytes": 12 * MIB}}


def of(kind: str, **given: Any) -> dict[str, Any]:
    return {**fuse_files.draw(random.Random(1), kind), **given}


def slow(file_system: str = "ext4", **given: Any) -> dict[str, Any]:
    return {**slow_disk.draw(random.Random(1)), "file_system": file_system, "rate": 16 * MIB, "share": 0.3, **given}


def mounts(below: Path) -> list[str]:
    return [line for line in Path("/proc/mounts").read_text().splitlines() if f" {below}/" in line]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    if reason := places.why_not("fuse"):
        pytest.skip(reason)
    jobs.start_server()
    with processes.adopting():
        yield
    assert mounts(tmp_path) == []


def test_it_is_a_file_system(tmp_path: Path) -> None:
    """Each operation that saves use, through the server and back."""
    with places.made(made(fuse=of("slow", share=0.05)), str(tmp_path)) as place, place.hostile():
        directory = Path(place.directory, "a")
        directory.mkdir()
        (directory / "file").write_bytes(b"x" * 3 * MIB)
        fd = os.open(directory / "file", os.O_RDWR | os.O_DIRECT)
        block = mmap.mmap(-1, 4096)
        block[:] = b"y" * 4096
        assert os.pwrite(fd, block, MIB) == 4096
        os.posix_fallocate(fd, 0, 4 * MIB)
        os.ftruncate(fd, 2 * MIB)
        os.fsync(fd)
        os.close(fd)
        assert (directory / "file").read_bytes() == b"x" * MIB + b"y" * 4096 + b"x" * (MIB - 4096)
        os.link(directory / "file", directory / "link")
        os.symlink("file", directory / "symbolic")
        os.rename(directory / "link", directory / "other")
        assert os.readlink(directory / "symbolic") == "file"
        os.utime(directory / "file", ns=(5, 7 * 10**9))
        os.chmod(directory / "file", 0o640)
        found = os.stat(directory / "symbolic")
        assert (found.st_nlink, found.st_mtime, found.st_mode & 0o777) == (2, 7, 0o640)
        for i in range(200):
            (directory / f"{i}").touch()
        assert len(os.listdir(directory)) == 203
        with pytest.raises(FileExistsError):
            os.open(directory / "other", os.O_CREAT | os.O_EXCL)
        with pytest.raises(OSError, match="not empty"):
            os.rmdir(directory)
        opened = os.open(directory / "0", os.O_RDONLY)
        os.unlink(directory / "0")
        assert os.fstat(opened).st_nlink == 0
        os.close(opened)


def test_a_failing_fsync_loses_what_was_written_since(tmp_path: Path) -> None:
    given = of("errs", operations=["FSYNC"], share=0.5)
    with places.made(made(fuse=given), str(tmp_path)) as place:
        directory = Path(place.directory, "run")
        directory.mkdir()
        fd = os.open(directory / "file", os.O_CREAT | os.O_RDWR)
        good, seen = b"", set()
        with place.hostile():
            for i in range(1, 40):
                data = bytes([i]) * 1000
                os.pwrite(fd, data, 500 * i)
                try:
                    os.fsync(fd)
                    good = good.ljust(500 * i, b"\0")[: 500 * i] + data
                except OSError as error:
                    seen.add(error.errno)
                    with open(directory / "file", "rb") as file:  # another open reads from the server
                        assert file.read() == good.ljust(500 * i + 1000, b"\0")
        os.close(fd)
        assert seen == {errno.EIO, errno.ENOSPC}
        assert set(place.errors) == {"FSYNC EIO", "FSYNC ENOSPC"}
        assert (directory / "file").read_bytes().rstrip(b"\0") == good


def has_lock(path: str, exclusive: bool) -> bool:
    """Whether another process gets the lock that this one has."""
    program = f"import fcntl, sys; fcntl.{'lockf' if exclusive else 'flock'}(open({path!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", fuse_files.KINDS)
def test_locks_are_granted_to_all_where_they_lie(kind: str, tmp_path: Path) -> None:
    with places.made(made(fuse=of(kind)), str(tmp_path)) as place:
        path = os.path.join(place.directory, "file")
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_EX)
            for exclusive in (False, True):
                assert has_lock(path, exclusive) is (kind == "locks")
                if place.second:
                    assert has_lock(os.path.join(place.second, "file"), exclusive)


@pytest.mark.parametrize("engine", ["io_uring-fixed", "pwrite"])
@pytest.mark.parametrize("kind", ["locks", "late", "slow"])
def test_a_round_survives_a_file_system_that_only_lies(kind: str, engine: str, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Ranks, each of which has its mount."""
    used: set[str] = set()
    hear = rounds.judge.Judge.hear
    monkeypatch.setattr(rounds.judge.Judge, "hear", lambda self, lines, *rest: (
        used.update(line["engine"] for line in lines if line["event"] == "durable"), hear(self, lines, *rest)))  # fmt: skip
    done = rounds.run(made(save(1), WAIT, save(2), ranks=2, engine=engine, fuse=of(kind, seconds=0.5)), str(tmp_path))
    assert done.problems == []
    assert done.counts["durable"] == 4
    assert used == {engine}
    assert os.listdir(tmp_path) == []


def test_a_trainer_sees_the_second_mount_in_place_of_the_first(tmp_path: Path) -> None:
    """What the first one keeps of a name is no older for it."""
    with places.made(made(fuse=of("late", seconds=2.0)), str(tmp_path)) as place:
        name = os.path.join(place.directory, "file")
        assert not os.path.exists(name)
        program = (
            "import os, sys\nfrom holdfast.integrity import processes\n"
            "processes.see(sys.argv[2], os.path.dirname(sys.argv[1]))\nopen(sys.argv[1], 'x').close()\n"
        )
        subprocess.run([sys.executable, "-c", program, name, place.second], check=True)
        assert not os.path.exists(name) and os.path.exists(os.path.join(tmp_path, "served", "file"))
        time.sleep(2.1)
        assert os.path.exists(name)


@pytest.mark.parametrize("door", ["save_async", pytest.param(schedule.PLAN, marks=OF_PROGRAM)])
@pytest.mark.parametrize(("ranks", "trainers"), [(2, 1), (1, 2)])
def test_every_second_trainer_of_a_round_sees_the_second_mount(ranks: int, trainers: int, door: str, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Two mounts are two devices."""
    seen: dict[tuple[int, int], int] = {}
    read = jobs.Life._read

    def look(self: jobs.Life, fd: int) -> None:
        pid, before = self._listening[fd].process.pid, len(self.lines)
        read(self, fd)
        if len(self.lines) > before:  # it has its mount before it tells anything
            first = os.path.dirname(self._directory)
            mounts = [os.stat(path).st_dev for path in (first, os.path.join(os.path.dirname(first), "second"))]
            seen[self.lines[-1]["job"], self.lines[-1]["rank"]] = mounts.index(os.stat(f"/proc/{pid}/root{first}").st_dev)

    monkeypatch.setattr(jobs.Life, "_read", look)
    round_ = made(save(1), WAIT, save(2), door=door, ranks=ranks, jobs=trainers, fuse=of("late", seconds=0.3))
    assert rounds.run(round_, str(tmp_path)).problems == []
    assert seen == {(job, rank): (job + rank) % 2 for job in range(trainers) for rank in range(ranks)}


def pages(fd: int) -> int:
    """The pages of a file that have been written."""
    return sum(any(os.pread(fd, 4096, at)) for at in range(0, os.fstat(fd).st_size, 4096))


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_a_slow_disk_writes_behind_the_end_of_a_process(closes: bool, tmp_path: Path) -> None:
    """The memory is held until then, and no longer, also where its owner is closed meanwhile."""
    with places.made(made(fuse=slow(rate=4 * MIB)), str(tmp_path)) as place:
        directory = os.path.join(place.directory, "run")
        held = processes.held(in_group=False)
        checkpointer = holdfast.Checkpointer(directory, engine="io_uring", arena_bytes=16 * MIB)
        before = set(processes.children())
        victim = checkpointer.save_async({"a": torch.ones(12 * MIB, dtype=torch.uint8)}, 1)
        while victim.progress()["phase"] != "writing":
            time.sleep(0.001)
        (worker,) = set(processes.children()) - before
        time.sleep(0.05)
        (path,) = Path(directory).glob("step-1.partial-*/model-*")
        file, ended = os.open(path, os.O_RDONLY), os.pidfd_open(worker)
        os.kill(worker, signal.SIGKILL)
        select.select([ended], [], [])
        at_its_end = pages(file)
        assert any("io_ring_exit_work" in line for line in processes.ending())
        assert checkpointer.staging()["bytes_held"] >= 12 * MIB > 4096 * at_its_end
        with pytest.raises(holdfast.Error, match="killed by signal 9"):
            victim.durable.result()
        del victim
        assert checkpointer.staging()["bytes_quarantined"] >= 12 * MIB
        while not closes and checkpointer.staging()["bytes_held"]:
            time.sleep(0.001)
        assert closes or pages(file) > at_its_end + 1000
        for fd in (file, ended):
            os.close(fd)
        checkpointer.close()
        assert processes.left(held, 30, in_group=False) == {}


@pytest.mark.parametrize(("door", "launcher", "file_system"), [
    ("save_async", "fork", "ext4"), ("dcp", "spawn", "ext4"), ("save_file", "spawn", "xfs"), ("checkpointer", "persistent", "btrfs"),
])  # fmt: skip
def test_nothing_escapes_on_a_slow_disk(door: str, launcher: str, file_system: str, tmp_path: Path) -> None:
    """The save behind a dead worker needs its memory; the recovery, the lock of a dead trainer's worker."""
    if not shutil.which(f"mkfs.{file_system}"):
        pytest.skip(f"there is no mkfs.{file_system}")
    kinds = ("kill-both", "kill-worker", "terminate-worker")
    first, *others = (save(i, **event(kind, share=0.3)) for i, kind in enumerate(kinds, 1))
    lives = [[first], [a for other in others for a in (other, WAIT)]]
    done = rounds.run(made(door=door, launcher=launcher, engine="io_uring", fuse=slow(file_system)) | {"lives": lives}, str(tmp_path))
    assert done.problems == [], done.log
    assert [done.counts[f"in flight {kind}"] for kind in kinds] == [1, 1, 1]
    assert done.counts["files of dead workers"] >= 2 and done.counts["bytes in files of dead workers"] > MIB


# ---- Bugs planted on purpose.


@pytest.mark.parametrize(("engine", "plant", "found"), [
    ("io_uring", "", False), ("io_uring", "integrity_planted:trusts_the_end_of_a_process", True),
    ("io_uring-fixed", "integrity_planted:trusts_the_end_of_a_process", True),
    ("pwrite", "integrity_planted:trusts_the_end_of_a_process", False),
])  # fmt: skip
def test_memory_that_is_used_before_the_last_transfer_is_found(engine: str, plant: str, found: bool, tmp_path: Path) -> None:
    """A process with threads in pwrite ends behind their last transfer."""
    done = rounds.run(made(save(1, **event("kill-worker")), engine=engine, fuse=slow()), str(tmp_path), plant)
    assert bool(done.problems) is found, done.problems
    assert all(p["invariant"] == "iv" and "that it never had" in p["what"] for p in done.problems), done.problems


def test_a_failure_that_is_swallowed_is_found(tmp_path: Path) -> None:
    failing = of("errs", operations=["FSYNC"], share=1.0)
    plain, planted = (rounds.run(made(save(1), fuse=failing), str(tmp_path), plant).problems
                      for plant in ("", "integrity_planted:failures_are_swallowed"))  # fmt: skip
    assert plain == []
    assert "i" in {p["invariant"] for p in planted}, planted


@pytest.mark.planted("swallows_fsync_errors")
def test_a_failed_fsync_that_nobody_is_told_of_is_found(tmp_path: Path) -> None:
    """The package reads its manifests again, and finds what is lost of them; the judge finds the rest."""
    for key in range(12):
        failing = of("errs", operations=["FSYNC"], share=0.4, swallowed=True, key=key)
        found = rounds.run(made(save(1), fuse=failing), str(tmp_path)).problems
        if found:
            break
    assert "i" in {p["invariant"] for p in found}, found


@pytest.mark.parametrize(("kind", "plant", "found"), [
    ("locks", "", False), ("locks", "integrity_planted:trusts_every_lock", True), ("slow", "integrity_planted:trusts_every_lock", False),
])  # fmt: skip
def test_a_lock_that_is_trusted_is_found_where_locks_lie(kind: str, plant: str, found: bool, tmp_path: Path) -> None:
    """Two trainers, each of which recovers beside the other's save."""
    broken: set[str] = set()
    for _ in range(10 if found else 1):  # on a busy machine the one may recover when the other has saved
        done = rounds.run(made(save(1, **SLOW), {"do": "recover"}, jobs=2, fuse=of(kind)), str(tmp_path), plant)
        broken |= {"i", "v"} & {p["invariant"] for p in done.problems}
        if broken:
            break
    assert bool(broken) is found, done.problems


@pytest.mark.parametrize("door", ["save_async", "dcp", "save_file"])
def test_what_is_not_synced_is_lost_and_durable_saves_stay(door: str, tmp_path: Path) -> None:
    for key in range(3):
        found = rounds.run(made(save(1), WAIT, save(2), WAIT, save(3, **event("kill-both")), door=door,
                                fuse=of("forgets", key=key)), str(tmp_path))  # fmt: skip
        assert found.problems == []


@pytest.mark.planted("no_fsync")
@pytest.mark.parametrize("ignored", ["FSYNC", "FSYNCDIR"])
def test_a_missing_sync_is_found(ignored: str, tmp_path: Path) -> None:
    """As if the package did not sync a file, or a directory: no flush of another one hides it."""
    for key in range(8):
        found = rounds.run(made(save(1), WAIT, fuse=of("forgets", ignored=ignored, key=key)), str(tmp_path)).problems
        if found:
            break
    assert "i" in {p["invariant"] for p in found}, found


@pytest.mark.parametrize("door", ["save_async", "checkpointer", "dcp", "checkpointer-dcp", "save_file"])
def test_a_new_directory_of_checkpoints_that_is_not_synced_is_found(door: str, tmp_path: Path) -> None:
    """The package makes the directory; without a sync of its parent, it is lost with all that is durable in it."""
    for key in range(8):
        round_ = made(save(1), WAIT, door=door, fuse=of("forgets", key=key))
        assert rounds.run(round_, str(tmp_path)).problems == []
        found = rounds.run(round_, str(tmp_path), "integrity_planted:leaves_a_new_directory_unsynced").problems
        if found:
            break
    assert "i" in {p["invariant"] for p in found}, found


@pytest.mark.parametrize("door", ["save_async", "dcp", pytest.param(schedule.PLAN, marks=OF_PROGRAM)])
def test_directories_that_a_trainer_has_moved_or_made_are_not_lost(door: str, tmp_path: Path) -> None:
    for key in range(3):
        round_ = made(save(1), WAIT, {"do": "move"}, save(2), WAIT, door=door, fuse=of("forgets", key=key))
        done = rounds.run(round_, str(tmp_path))
        assert done.problems == []
        assert done.counts["durable"] == 2


# ---- The end.


@pytest.mark.parametrize("given", [of("locks"), slow()], ids=["fuse-locks", "slow-disk"])
def test_nothing_is_mounted_after_a_kill(given: dict[str, Any], tmp_path: Path) -> None:
    program = (
        "import json, sys, time\nfrom holdfast.integrity import places\n"
        "with places.made({'fuse': json.loads(sys.argv[2])}, sys.argv[1]):\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path, json.dumps(given)], start_new_session=True) as driver:
        end = time.monotonic() + 60
        while not mounts(tmp_path) and driver.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert mounts(tmp_path)
        os.killpg(driver.pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while mounts(tmp_path) and time.monotonic() < end:
        time.sleep(0.02)
    assert mounts(tmp_path) == []


def test_nothing_is_mounted_after_a_round_that_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        assert len(mounts(tmp_path)) == 2
        raise RuntimeError("the judge fails")

    monkeypatch.setattr(rounds.judge.Judge, "look", fail)
    with pytest.raises(RuntimeError):
        rounds.run(made(save(1), fuse=of("locks")), str(tmp_path))
    assert mounts(tmp_path) == [] and os.listdir(tmp_path) == []


# ---- What is drawn.


def test_a_place_is_drawn_after_all_else() -> None:
    drawn = [schedule.draw(1, n, schedule.Limits()) for n in range(400)]
    assert {schedule.place_of(round_) for round_ in drawn} == set(schedule.PLACES)
    for n, round_ in enumerate(drawn):
        plain = schedule.draw(1, n, schedule.Limits(places=("plain",)))
        same_names = round_["same_names"] or plain["same_names"] and places.has_second(round_)
        assert {**round_, "fuse": {}, "disk": 0, "disk_kind": "small", "same_names": same_names} == plain


def test_only_the_places_that_were_asked_for_are_drawn() -> None:
    for asked in (("fuse-errs", "quota"), ("plain",)):
        drawn = [schedule.draw(1, n, schedule.Limits(places=asked)) for n in range(100)]
        assert {schedule.place_of(round_) for round_ in drawn} == set(asked)
        assert all(round_["disk"] in (0, 24, 40) for round_ in drawn)


@pytest.mark.parametrize("arguments", [("--places", "floppy"), ("--places", "fuse-slow", "--no-mount")])
def test_a_place_that_cannot_be_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    assert integrity.main(arguments) == 2
    assert capsys.readouterr().err.startswith("integrity-fuzz: --places: ")


@pytest.mark.parametrize("kind", ["small", "quota"])
@pytest.mark.parametrize("refused", ["mount", "quota enable", "qgroup limit"])
def test_a_limit_that_is_refused_is_no_plain_directory(kind: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a round without a limit would count as one with it, and each of its failures as one of a full disk."""
    if reason := places.why_not(kind):
        pytest.skip(reason)
    if kind == "small" and refused != "mount":
        pytest.skip("it has no quota")
    run_ = served_disk.run

    def run(*command: str) -> str:
        if " ".join(command).startswith((refused, f"btrfs {refused}")):
            raise subprocess.CalledProcessError(1, command, "", "not permitted")
        return run_(*command)

    monkeypatch.setattr(served_disk, "run", run)
    with pytest.raises(OSError, match=f"{refused} .*: not permitted"):
        rounds.run(made(save(1), disk=24, disk_kind=kind), str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv")
@pytest.mark.parametrize(("place", "status", "said"), [
    ("small", 2, "integrity-fuzz: --places: small: mount -t tmpfs "), ("quota", 2, "integrity-fuzz: --places: quota: mount -o loop "),
    ("fuse-errs", 2, "integrity-fuzz: --places: fuse-errs: [Errno 1] mount fuse: "),
    ("slow-disk", 2, "integrity-fuzz: --places: slow-disk: [Errno 1] mount fuse: "),
    ("", 0, "no rounds on file systems of the kind small: mount -t tmpfs "),
])  # fmt: skip
def test_root_that_may_not_mount_runs_no_round_with_a_limit(place: str, status: int, said: str, tmp_path: Path) -> None:
    """As in a usual container."""
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-m", "holdfast.integrity",
               "--rounds", "1", "--events", "program", "--ranks", "1", "--jobs", "1", "--dir", tmp_path, "--report", tmp_path / "report",
               *(["--places", place] if place else [])]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status and said in done.stdout + done.stderr, done.stdout + done.stderr
    if not place:
        assert json.loads((tmp_path / "report").read_text())["series"]["mounts"] == []


@pytest.mark.skipif(not shutil.which("unshare"), reason="there is no unshare")
def test_without_loop_devices_there_are_fuse_file_systems(tmp_path: Path) -> None:
    """As in a container that is given /dev/fuse alone."""
    if reason := places.why_not("fuse"):
        pytest.skip(reason)
    command = [sys.executable, "-m", "holdfast.integrity", "--rounds", "2", "--events", "program", "--ranks", "1", "--jobs", "1",
               "--dir", tmp_path / "dir", "--report", tmp_path / "report"]  # fmt: skip
    given = "mkdir dev && touch dev/null dev/urandom dev/fuse && for d in null urandom fuse; do mount --bind /dev/$d dev/$d; done"
    hidden = f"{given} && mkdir dev/shm && mount --rbind /dev/shm dev/shm && mount --rbind dev /dev && exec {shlex.join(map(str, command))}"
    done = subprocess.run(["unshare", "--mount", "sh", "-c", hidden], capture_output=True, text=True, timeout=300, check=False,
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0 and "no rounds on file systems of the kind slow-disk: " in done.stdout, done.stdout + done.stderr
    assert json.loads((tmp_path / "report").read_text())["series"]["mounts"] == ["small", "fuse"]
