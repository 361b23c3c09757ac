"""integrity-fuzz --bad-disks: real saves on a disk that runs out of room. Those of device-mapper run in the emulator."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_integrity_power_cuts import MIB, drawn

from holdfast.integrity import bad_disks, jobs, places, power_cuts, rounds

RUNS_OUT = "runs out of room"
FILE_SYSTEMS = ("ext4", "ext4-nojournal", "xfs", "btrfs")


@pytest.fixture(scope="module", autouse=True)
def mountable() -> Iterator[None]:
    if reason := places.why_not("quota"):  # a loop device, too
        pytest.skip(reason)
    jobs.start_server()
    yield


def run(kind: str, moment: float, monkeypatch: pytest.MonkeyPatch, plant: str = "") -> rounds.Result:
    """A round of seven saves one after the other, whose disk is full at this time after one of the first six calls."""
    monkeypatch.setattr(bad_disks, "TIME_MOMENT_MAX", moment)
    round_ = bad_disks.prepared(drawn(one_name=False, replace=False), RUNS_OUT)
    (save, _), (last,) = round_["lives"]
    round_["lives"] = [[a for n in range(1, 7) for a in ({**save, "n": n, "step": n}, {"do": "wait"})], [{**last, "n": 7, "step": 7}]]
    return bad_disks.run(round_, kind, RUNS_OUT, power_cuts.scratch_directory(), plant)


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_a_full_pool_fails_writes_and_keeps_what_is_there(kind: str, tmp_path: Path) -> None:
    with bad_disks.ThinDisk(kind, str(tmp_path)) as disk:
        with disk.mounted():
            for name in ("old", "new"):
                with open(os.path.join(disk.directory, name), "wb") as file:
                    if name == "new":
                        disk.go_bad(RUNS_OUT)
                    try:
                        file.write(name.encode() * 4 * MIB)
                        os.fsync(file.fileno())
                        is_refused = False
                    except OSError:
                        is_refused = True
                    assert is_refused == (name == "new")
        disk.be_sound()
        with disk.mounted():
            assert Path(disk.directory, "old").read_bytes() == b"old" * 4 * MIB
            Path(disk.directory, "next").write_bytes(b"next")


def test_a_write_for_which_a_part_has_room_fails(tmp_path: Path) -> None:
    """The kernel's loop driver calls it done (Linux 6.18): the disk would lose what is durable."""
    with bad_disks.ThinDisk("ext4", str(tmp_path)) as disk:
        setting = Path("/sys/block", os.path.basename(disk._device), "queue/max_sectors_kb")
        disk.go_bad(RUNS_OUT)
        os.truncate(disk._ballast, os.path.getsize(disk._ballast) - MIB // 8)
        data = mmap.mmap(-1, MIB // 4)
        data.write(b"x" * len(data))
        with open(disk._device, "r+b", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_DIRECT)) as device:
            device.seek(100 * MIB)
            with pytest.raises(OSError):
                device.write(data)
        assert setting.read_text() == "4\n"
    assert setting.read_text() != "4\n", "the next user of the device has it, too"


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
@pytest.mark.parametrize("moment", [0.0, 0.3])
def test_no_save_is_lost_on_a_disk_that_runs_out_of_room(kind: str, moment: float, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(kind, moment, monkeypatch)
    assert result.problems == []
    assert sum(result.counts[f"{name} {kind}"] for name in ("durable", "failed", "refused")) == 7
    assert result.counts[f"states {kind} {RUNS_OUT}"] == 1 and result.counts["door save_async"] == 1


def test_a_save_that_is_told_durable_although_it_failed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("ext4", 0.0, monkeypatch, "integrity_planted:failures_are_swallowed")
    assert "i" in {p["invariant"] for p in result.problems}
