"""integrity-fuzz --power-cuts: real saves on a recorded disk, and what a power cut at any moment leaves of them."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.integrity import campaign, jobs, power_cuts, rounds, schedule, served_disk
from holdfast.integrity.block_recorder import Log, Recorder

MIB = 1 << 20
LONG = bool(os.environ.get("HOLDFAST_LONG"))
FILE_SYSTEMS = ("ext4", "ext4-nojournal", "xfs", "btrfs") if LONG else ("ext4",)
DOORS = ("save_async", "save_file", "checkpointer-dcp") if LONG else ("save_async", "save_file")


@pytest.fixture(scope="module", autouse=True)
def recordable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("mounting a recorded disk needs root")
    try:
        with Recorder("ext4", power_cuts.SIZES["ext4"], str(tmp_path_factory.mktemp("probe"))):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no recorded disk can be mounted here: {error}")
    jobs.start_server()
    yield


def drawn(**given: Any) -> dict[str, Any]:
    """Two saves of one name and one of another, by the plain door."""
    made = schedule.draw(3, 0, schedule.Limits(ranks_max=1, mounts=()))
    spec = {"tensors": 4, "bytes": MIB, "wide": False, "objects": False}
    save = {"do": "save", "mutate": True, "rate": 0, "spec": spec}
    made |= {
        "door": "save_async", "launcher": "spawn", "engine": "auto", "device": "cpu", "jobs": 1, "same_names": False,
        "replace": True, "one_name": True, "keep_last": 0, "kill_recover": None, "when_full": "wait", **given,
    }  # fmt: skip
    made["lives"] = [[{**save, "n": n, "step": n} for n in (1, 2)], [{**save, "n": 3, "step": 3}]]
    return power_cuts.quiet(made)


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("door", DOORS)
def test_no_power_cut_loses_what_was_durable(kind: str, door: str, tmp_path: Path) -> None:
    result = power_cuts.run(drawn(door=door), kind, str(tmp_path), 6)
    assert result.problems == []
    assert sum(result.counts.values()) > 20
    assert result.counts[f"states {kind} flush"] > 10
    assert result.counts[f"door {door}"] == campaign.total(result.counts, "states ")


@pytest.mark.parametrize("bug", ["durable_too_early", "syncs_nothing"])
def test_a_save_that_is_reported_before_it_is_durable_is_found(bug: str, tmp_path: Path) -> None:
    result = power_cuts.run(drawn(), "ext4", str(tmp_path), 4, f"integrity_planted:{bug}")
    assert "i" in {p["invariant"] for p in result.problems}


def test_a_disk_that_cannot_be_mounted_comes_with_what_the_kernel_said(tmp_path: Path) -> None:
    cut: Any = None  # is not asked
    with served_disk.attached(served_disk.sparse(str(tmp_path / "image"), 64 * MIB)) as device:
        (problem,) = power_cuts.look(drawn(), cut, cut, device, str(tmp_path / "mounted"), "ext4")
    assert problem["invariant"] == "i" and "cannot be mounted: mount: " in problem["what"]
    if served_disk.kernel_log():
        assert os.path.basename(device) in problem["what"].partition("\n")[2]


def other_namespace() -> subprocess.Popen[bytes]:
    """A process with the mounts that there are now, which it keeps."""
    holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo; exec cat"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == b"\n"
    return holder


def test_a_disk_is_mounted_again_when_no_mount_namespace_holds_it(tmp_path: Path) -> None:
    """Else its file system would be the former one, with what that knew."""
    target = str(tmp_path / "mounted")
    with served_disk.attached(served_disk.sparse(str(tmp_path / "image"), 16 * MIB)) as device:
        served_disk.make("ext4", device)
        with served_disk.mounted(device, target, "ext4"):
            holder = other_namespace()
        timer = threading.Timer(0.5, holder.communicate)
        timer.start()
        with served_disk.mounted(device, target, "ext4"):
            assert holder.wait(0) == 0
        timer.join()


def test_a_disk_that_another_mount_namespace_holds_changes_no_later_one(tmp_path: Path) -> None:
    """As that of a round beside it, or of a container. It writes when it is mounted no more, and when its last holder ends."""
    log = Log(16 * MIB)
    log.operations += [(0, b"x" * MIB), None]
    disk, target = power_cuts.Disk(log, str(tmp_path)), str(tmp_path / "mounted")
    cut = power_cuts.Cut(0, "flush", [])
    with served_disk.attached(disk.make(0, cut)) as device:
        served_disk.make("ext4", device)
        with served_disk.mounted(device, target, "ext4"):
            Path(target, "file").write_bytes(b"y" * MIB)
            holder = other_namespace()
    later = Path(disk.make(2, cut))
    holder.communicate(timeout=60)
    os.sync()
    assert later.read_bytes() == b"x" * MIB + bytes(15 * MIB)


@pytest.mark.parametrize(("said", "is_made"), [("ERROR: cannot check mount status of x: No such device", True), ("ERROR: x is mounted", False)])
def test_a_file_system_is_made_beside_unmounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_made: bool) -> None:
    """mkfs.btrfs fails where another loop device that it asks is unmounted meanwhile."""
    program = shutil.which("mkfs.btrfs") or pytest.skip("there is no mkfs.btrfs")
    first = tmp_path / "mkfs.btrfs"
    first.write_text(f'#!/bin/sh\n[ -e {tmp_path}/again ] && exec {program} "$@"\ntouch {tmp_path}/again\necho "{said}" >&2\nexit 1\n')
    first.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with contextlib.nullcontext() if is_made else pytest.raises(subprocess.CalledProcessError):
        served_disk.make("btrfs", served_disk.sparse(str(tmp_path / "image"), 256 * MIB))


def test_before_each_flush_are_three_cuts() -> None:
    log = Log(16 * MIB)
    log.operations += ["begin", (0, b"a" * 4096), (4096, b"b" * 8192), None, None, "{}", (0, b"c" * 8192), None, (8192, b"d" * 4096)]
    for seed in range(20):
        made = list(power_cuts.cuts(log, 0, None, random.Random(seed)))
        assert [(flushed, cut.at) for flushed, cut in made] == sorted((flushed, cut.at) for flushed, cut in made)
        kinds = ("prefix", "subset", "torn")
        flushes = [(4, "flush"), (5, "flush"), (8, "flush")]
        assert collections.Counter((f, c.kind) for f, c in made) == collections.Counter([*itertools.product((0, 5), kinds), *flushes])
        for _, cut in made:
            of = log.operations[6:7] if cut.at > 5 else log.operations[1:3]
            assert cut.writes == [] if cut.kind == "flush" else {at for at, _ in cut.writes} <= {w[0] for w in of if isinstance(w, tuple)}


@pytest.mark.planted("ignores_flushes")
def test_a_disk_that_ignores_flushes_is_found(tmp_path: Path) -> None:
    class Lying(Recorder):
        def _stop(self) -> None:
            super()._stop()
            operations = self.log.operations
            begin = operations.index("begin")
            self.log.operations = operations[:begin] + [o for o in operations[begin:] if o is not None]

    result = power_cuts.run(drawn(), "ext4", str(tmp_path), 30, recorded_by=Lying)
    assert result.problems


@pytest.mark.skipif(not LONG, reason="two rounds; set HOLDFAST_LONG=1")
def test_the_program_cuts_power(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.integrity", "--power-cuts", "ext4", "--rounds", "2", "--first", "2", "--seed", "1",
         "--ranks", "1", "--cuts", "3", "--jobs", "2", "--json"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.partition("\n")[2])
    assert (report["rounds"], report["escapes"]) == (2, 0)
    assert sum(report["states"].values()) > 10


def numbered(number: int, kind: str) -> rounds.Result:
    return rounds.Result([], collections.Counter({f"{number} of {kind} in {os.getpid()}": 1}), "", 0.0)


@pytest.mark.parametrize("at_once", [1, 2])
def test_every_round_runs_on_every_file_system(at_once: int) -> None:
    """Where several run at once, in processes of their own."""
    make = functools.partial(power_cuts.Bench, numbered, ())
    made = list(power_cuts.campaign(make, ["ext4", "xfs"], range(3, 6), None, at_once))
    assert {(number, kind) for number, kind, _ in made} == {(n, k) for n in range(3, 6) for k in ("ext4", "xfs")}
    assert len(made) == 6
    for number, kind, result in made:
        (told,) = result.counts
        assert told.startswith(f"{number} of {kind} in ") and told.endswith(str(os.getpid())) == (at_once == 1)


def test_no_round_begins_after_the_time() -> None:
    make = functools.partial(power_cuts.Bench, numbered, ())
    made = power_cuts.campaign(make, ["ext4"], itertools.count(), time.monotonic() + 0.2, 1)
    assert next(made)[0] == 0
    time.sleep(0.3)
    assert list(made) == []


def test_an_unknown_file_system_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.integrity", "--power-cuts", "fat"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "there is no fat" in done.stderr
