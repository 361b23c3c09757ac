"""Devices that refuse what a save asks of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from test_late_copies import SlowDevice, slow  # noqa: F401  # a fixture

import holdfast
from holdfast import _devices, _late


def test_the_call_waits_where_a_stream_cannot_be_made_to(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    def failed(*_: object) -> None:
        raise holdfast.Error("INTERNAL", "no event can be recorded")

    monkeypatch.setattr(_late, "CLONE_MAX", 0)
    monkeypatch.setattr(_devices, "wait_staged_on", failed)
    weight = torch.ones(1 << 16)
    changed = threading.Event()

    def copy_late() -> None:
        slow.await_copy()
        changed.wait(2)
        slow.open.set()

    copying = threading.Thread(target=copy_late)
    copying.start()
    save = holdfast.save_async({"w": weight}, tmp_path / "s")
    weight.zero_()
    changed.set()
    copying.join()
    save.wait(60)
    assert torch.equal(holdfast.load(tmp_path / "s")["w"], torch.ones(1 << 16))


def test_a_device_that_refuses_the_memory_is_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(SlowDevice):
        def register_memory(self, address: int, nbytes: int) -> None:
            raise RuntimeError("no pins left")

    holdfast.flush(60)
    device = Refusing()
    device.open.set()
    with _devices.stand_in("cpu", device):
        holdfast.configure(arena_bytes=16 << 20)
        holdfast.warm_up()
        holdfast.warm_up()
        report = holdfast.save_async({"w": torch.ones(4)}, tmp_path / "a").wait(60)
    holdfast.configure(arena_bytes=0)  # lets go of the device
    (warning,) = [r.getMessage() for r in caplog.records if "copies from the GPU are slow" in r.getMessage()]
    assert "no pins left" in warning and report["unregistered"] in warning
