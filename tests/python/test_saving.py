"""`save_async`, its handle and its policies; `load` into what is there."""

from __future__ import annotations

import builtins
import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import _durable, _runtime

MIB = 1 << 20
BENCHMARKS = str(Path(__file__).resolve().parents[2] / "python/benchmarks")


@pytest.fixture(autouse=True)
def fresh_options() -> Any:
    yield
    holdfast.flush(60)
    holdfast.configure(arena_bytes=0, bytes_per_second_max=0, launcher="spawn", on_sealed=lambda *_: None,
                       read_back=False, time_memory_max=600.0)


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_cpu_tensors_are_captured_when_the_call_returns(tmp_path: Path) -> None:
    tensor = some(64 * MIB)
    before = tensor.clone()
    holdfast.configure(bytes_per_second_max=64 * MIB)  # the worker is still at it when we go on
    save = holdfast.save_async({"t": tensor, "list": [1]}, tmp_path / "s")
    tensor.zero_()
    assert save.staged.result(60) is None
    report = save.durable.result(60)
    assert report["bytes"] >= 64 * MIB
    assert save.report == report
    assert torch.equal(holdfast.load(tmp_path / "s")["t"], before)


def test_progress_counts_up_to_the_end(tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=32 * MIB)
    save = holdfast.save_async({"t": some(16 * MIB)}, tmp_path / "s")
    progress = save.progress()
    assert 0 <= progress["bytes_written"] <= progress["bytes_sealed"] <= progress["bytes_total"]
    save.wait(60)
    done = save.progress()
    assert done["phase"] == "done"
    assert done["bytes_written"] == done["bytes_total"] >= 16 * MIB


def test_a_cancelled_save_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=4 * MIB)
    save = holdfast.save_async({"t": some(32 * MIB)}, tmp_path / "s")
    save.cancel()
    with pytest.raises(holdfast.Error) as error:
        save.wait(60)
    assert error.value.code == "CANCELLED"
    assert os.listdir(tmp_path) == []
    holdfast.configure(bytes_per_second_max=0)
    holdfast.save_async({"t": some(MIB)}, tmp_path / "s").wait(60)


def test_waits_time_out_and_the_save_goes_on(tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=16 * MIB)
    save = holdfast.save_async({"t": some(16 * MIB)}, tmp_path / "s")
    with pytest.raises(TimeoutError):
        save.wait(0.01)
    with pytest.raises(holdfast.TimeoutError):
        holdfast.flush(0.01)
    assert save.wait(60)["bytes"] >= 16 * MIB


def test_flush_has_one_deadline_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Door:
        """Deletes for ever."""

        def flush(self, timeout: float) -> None:
            given.append(timeout)
            raise holdfast.TimeoutError("DEADLINE_EXCEEDED", "wait for background deletion: not done yet")

    holdfast.flush(60)
    holdfast.configure(bytes_per_second_max=16 * MIB)
    holdfast.save_async({"t": some(8 * MIB)}, tmp_path / "s")
    doors = {(_runtime.default._number, "door"): Door()}
    monkeypatch.setattr(_runtime.default._memory, "doors", doors)
    with pytest.raises(holdfast.TimeoutError, match="deletion"):
        holdfast.flush(60)
    assert given[0] < 59.9, "what the save took is not counted"


def test_a_save_that_waited_in_vain_has_failed_and_is_no_time_out(tmp_path: Path) -> None:
    holdfast.configure(arena_bytes=16 * MIB, bytes_per_second_max=MIB, time_memory_max=0.2)
    first = holdfast.save_async({"t": some(12 * MIB)}, tmp_path / "first")  # held to its end, after eight seconds
    with pytest.raises(holdfast.Error, match="staging memory") as error:
        holdfast.save_async({"t": some(16 * MIB)}, tmp_path / "second")
    assert error.value.code == "DEADLINE_EXCEEDED"
    assert not isinstance(error.value, TimeoutError)
    first.cancel()
    assert first.durable.exception(60) is not None


def test_policies_for_a_save_while_the_memory_is_held(tmp_path: Path) -> None:
    holdfast.configure(arena_bytes=32 * MIB, bytes_per_second_max=16 * MIB)
    state = {"t": some(24 * MIB)}
    first = holdfast.save_async(state, tmp_path / "first")
    skipped = holdfast.save_async(state, tmp_path / "skip", when_full="skip")
    assert skipped.skipped and not first.skipped
    assert skipped.staged.result(60) is None
    assert skipped.progress()["phase"] == "skipped"
    skipped.cancel()
    with pytest.raises(holdfast.Error, match="skipped") as left_out:
        skipped.wait(60)
    assert left_out.value.code == "UNAVAILABLE"
    with pytest.raises(holdfast.Error, match="arena_bytes") as failed:
        holdfast.save_async(state, tmp_path / "fail", when_full="fail")
    assert failed.value.code == "RESOURCE_EXHAUSTED"
    second = holdfast.save_async(state, tmp_path / "wait")
    assert first.wait(60)["bytes"] == second.wait(60)["bytes"]
    assert sorted(os.listdir(tmp_path)) == ["first", "wait"]


def test_a_skipped_save_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.configure(arena_bytes=32 * MIB, bytes_per_second_max=16 * MIB)
    state = {"t": some(24 * MIB)}
    outcomes = []
    with holdfast.events.Handle(lambda save, _, error: outcomes.append(holdfast.events.outcome(save, error))):
        first = holdfast.save_async(state, tmp_path / "first")
        holdfast.save_async(state, tmp_path / "second", when_full="skip")
        holdfast.flush(60)
    assert first.report is not None
    assert outcomes == ["skipped", "durable"]
    (line,) = [r for r in caplog.records if "second" in r.getMessage()]
    assert line.levelname == "WARNING" and "skipped" in line.getMessage()


def test_the_name_of_a_directory_that_another_process_has_made_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one may have been killed before its fsync of the directory above."""
    synced: list[str] = []
    sync, run = _durable.sync_directory, tmp_path / "run"
    failing: list[str] = []

    def noted(path: str) -> None:
        synced.append(str(path))
        sync(failing.pop() if failing else path)

    monkeypatch.setattr(_durable, "sync_directory", noted)
    run.mkdir()
    for step in (1, 2):  # the second save knows it
        holdfast.save({"a": 1}, run / f"step-{step}")
    assert synced == [str(tmp_path)]
    shutil.rmtree(run)
    run.mkdir()
    failing.append(str(tmp_path / "nothing"))  # as where the directory above is another user's
    for step in (3, 4):
        holdfast.save({"a": 1}, run / f"step-{step}")
    assert synced == [str(tmp_path)] * 2


def test_missing_directories_above_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "step-1"
    assert holdfast.save({"x": 1}, path)["path"] == str(path)
    assert holdfast.load(path) == {"x": 1}


def test_names_of_new_directories_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync

    def recording(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", recording)
    holdfast.save({"x": 1}, tmp_path / "a" / "b" / "step-1")
    assert synced == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]
    for step in (2, 3):
        holdfast.save({"x": 1}, tmp_path / "a" / "b" / f"step-{step}")
    assert synced[3:] == [str(tmp_path / "a")], "a directory that was there is synced once more"


def test_a_star_import_shadows_no_builtin() -> None:
    names: dict[str, object] = {}
    exec("from holdfast import *", names)
    assert not set(names) & set(dir(builtins)) - {"__builtins__", "__doc__", "__loader__", "__name__"}
    assert {"save_async", "save", "load", "Error"} <= set(names)
    assert {"dcp", "observe", "events", "open", "TimeoutError"} <= set(dir(holdfast))


def test_a_state_larger_than_the_memory_streams_through_it(tmp_path: Path) -> None:
    holdfast.configure(arena_bytes=16 * MIB)
    state = {f"t{i}": some(8 * MIB, i) for i in range(12)}
    report = holdfast.save_async(state, tmp_path / "s").wait(60)
    assert report["streamed"]
    assert holdfast.staging()["bytes_held_peak"] <= 16 * MIB
    loaded = holdfast.load(tmp_path / "s")
    assert all(torch.equal(loaded[k], state[k]) for k in state)


def test_an_existing_checkpoint_is_refused_or_replaced(tmp_path: Path) -> None:
    holdfast.save_async({"x": 1}, tmp_path / "s").wait(60)
    with pytest.raises(holdfast.Error) as error:
        holdfast.save_async({"x": 2}, tmp_path / "s")
    assert error.value.code == "ALREADY_EXISTS"
    holdfast.save_async({"x": 3}, tmp_path / "s", replace=True).wait(60)
    holdfast.flush(60)
    assert holdfast.load(tmp_path / "s") == {"x": 3}
    assert os.listdir(tmp_path) == ["s"]


def test_the_newest_are_kept_and_every_kth(tmp_path: Path) -> None:
    for step in range(1, 9):
        holdfast.save_async({"step": step}, tmp_path / f"step-{step}", step=step, keep_last=2,
                            keep_every=3).wait(60)
    holdfast.flush(60)
    kept = [c["step"] for c in holdfast.list_checkpoints(tmp_path)]
    assert kept == [3, 6, 7, 8]
    assert holdfast.find_newest(tmp_path)["step"] == 8


def test_the_newest_is_the_last_saved_whatever_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = time.time()
    for name in ("best", "step-8", "step-9", "step-10"):
        holdfast.save_async({"x": 1}, tmp_path / name, keep_last=2 if "-" in name else 0).wait(60)
    holdfast.flush(60)
    listed = holdfast.list_checkpoints(tmp_path)
    assert [c["name"] for c in listed] == ["best", "step-9", "step-10"]
    assert before < listed[0]["saved_at"] < listed[-1]["saved_at"] < time.time()
    assert listed[0]["parent"] is None and listed[2]["parent"] == listed[1]["attempt"]
    record = tmp_path / "best" / "holdfast.commit.json"
    record.write_bytes(record.read_bytes()[:200])
    assert not caplog.records
    assert holdfast.find_newest(tmp_path) == listed[-1]
    assert "passed over best: " in caplog.text


@pytest.mark.parametrize("launcher", ["spawn", "persistent", "thread", "fork"])
def test_every_launcher_works_from_python(launcher: str, tmp_path: Path) -> None:
    holdfast.configure(launcher=launcher)
    state = {"t": some(5 * MIB)}
    for i in range(2):
        report = holdfast.save_async(state, tmp_path / f"s{i}").wait(60)
        assert report["launcher"] == launcher
    assert torch.equal(holdfast.load(tmp_path / "s1")["t"], state["t"])


def test_memory_that_changes_under_the_writer_fails_the_save(tmp_path: Path) -> None:
    """What a framework's allocator does when it hands a block out again too early."""
    import ctypes

    holdfast.configure(on_sealed=lambda memory, *_: ctypes.memset(memory, 0x55, 64))
    save = holdfast.save_async({"weight": some(5 * MIB)}, tmp_path / "s")
    with pytest.raises(holdfast.Error, match="are not what was sealed") as error:
        save.wait(60)
    assert error.value.code == "DATA_LOSS"
    assert not (tmp_path / "s").exists()
    holdfast.configure(on_sealed=lambda *_: None)


def test_unknown_options_are_named() -> None:
    with pytest.raises(holdfast.Error, match="arena_size.*arena_bytes"):
        holdfast.configure(arena_size=1)


# ---- Loading.


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    state = {"a": some(3 * MIB), "nested": [torch.randn(5, 7), {"b": torch.randn(4).t()}], "n": 5}
    holdfast.save_async(state, tmp_path / "s").wait(60)
    target = {"a": torch.zeros(3 * MIB, dtype=torch.uint8),
              "nested": [torch.zeros(7, 5).t(), {"b": torch.zeros(4)}], "n": 0}
    places = [target["a"].data_ptr(), target["nested"][0].data_ptr()]
    assert holdfast.load(tmp_path / "s", into=target) is target
    assert [target["a"].data_ptr(), target["nested"][0].data_ptr()] == places
    assert torch.equal(target["a"], state["a"])
    assert torch.equal(target["nested"][0], state["nested"][0])  # of another stride
    assert target["n"] == 5


def test_what_does_not_fit_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    holdfast.save_async({"m": {"w": torch.ones(2, 3), "v": torch.ones(2)}}, tmp_path / "s").wait(60)

    def target(**other: Any) -> dict[str, Any]:
        return {"m": {"w": torch.zeros(2, 3), "v": torch.zeros(2), **other}}

    for into, message in (
        (target(w=torch.zeros(3, 2)), r"m\.w: it has shape \[2, 3\], the target \[3, 2\]"),
        (target(w=torch.zeros(2, 3, dtype=torch.float64)), r"m\.w: it is float32, the target float64"),
        (target(extra=torch.zeros(1)), r"not in the checkpoint: extra"),
    ):
        with pytest.raises(holdfast.Error, match=message):
            holdfast.load(tmp_path / "s", into=into)
        assert not into["m"]["v"].any()
    into = target(extra=torch.zeros(1))
    holdfast.load(tmp_path / "s", into=into, strict=False)
    assert into["m"]["v"].all()


def test_single_tensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    state = {"small": torch.arange(10), "large": some(32 * MIB)}
    holdfast.save_async(state, tmp_path / "s", step=4).wait(60)
    checkpoint = holdfast.open(tmp_path / "s")
    assert list(checkpoint) == ["small", "large"]
    assert checkpoint.step == 4
    assert torch.equal(checkpoint["small"], state["small"])
    assert checkpoint.report["bytes_read"] < MIB
    with pytest.raises(KeyError):
        checkpoint["none"]


def test_a_device_map_is_followed(tmp_path: Path) -> None:
    holdfast.save_async({"t": torch.ones(3)}, tmp_path / "s").wait(60)
    for where in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda saved: saved):
        assert holdfast.load(tmp_path / "s", map_location=where)["t"].device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(holdfast.Error, match="CUDA"):
            holdfast.load(tmp_path / "s", map_location="cuda:0")


def test_a_byte_that_rots_on_disk_is_named(tmp_path: Path) -> None:
    holdfast.save_async({"first": some(6 * MIB), "second": some(6 * MIB, 1)}, tmp_path / "s").wait(60)
    file = tmp_path / "s" / "model-00000-of-00001.safetensors"
    with file.open("r+b") as f:
        f.seek(9 * MIB)
        byte = f.read(1)
        f.seek(9 * MIB)
        f.write(bytes([byte[0] ^ 1]))
    with pytest.raises(holdfast.Error, match=r'tensor "second".*bytes \[\d+, \d+\)') as error:
        holdfast.load(tmp_path / "s")
    assert error.value.code == "DATA_LOSS"
    assert holdfast.verify(tmp_path / "s")["verdict"] == "corrupt"
    assert holdfast.open(tmp_path / "s")["first"].shape == (6 * MIB,)  # the rest can be read


MEMORY = """
import gc, sys, torch, holdfast, holdfast.loading
sys.path.append(sys.argv[2])
import resident_memory
state = {f"t{i}": torch.ones(4 << 20) for i in range(32)}
gc.collect()
memory = resident_memory.Since()
holdfast.load(sys.argv[1], into=state)
peak = memory.peak()
gc.collect()
assert all(int(state[f"t{i}"][0]) == i for i in range(32))
print(peak, memory.now(), sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
"""


def test_loading_takes_a_bounded_buffer_and_leaves_nothing(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((4 << 20,), float(i)) for i in range(32)}  # 512 MiB
    holdfast.save_async(state, tmp_path / "s").wait(60)
    del state
    gc.collect()
    out = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path / "s"), BENCHMARKS], check=True,
                         capture_output=True, text=True, timeout=120).stdout
    peak, retained, tensors = map(int, out.split())
    assert peak <= 128 * MIB
    assert retained <= 16 * MIB
    assert tensors <= 33
