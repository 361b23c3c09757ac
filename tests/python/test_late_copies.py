"""What may be copied behind the training, and what may not: on a device whose copies end when told."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import _devices, _native, saving


class SlowDevice(_native.Device):
    """Copies read their source only when `finish` is called: DMA at its latest."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: dict[int, tuple[int, int, int]] = {}
        self.done: set[int] = set()
        self.waits: list[int] = []  # streams that were made to wait
        self.open = threading.Event()
        self._next = 0
        self._lock = threading.Lock()

    def name(self) -> str:
        return "slow:0"

    def register_memory(self, address: int, nbytes: int) -> None:
        pass

    def unregister_memory(self, address: int, nbytes: int) -> None:
        pass

    def order_after(self, stream: int) -> None:
        pass

    def copy_to_host(self, destination: int, source: int, nbytes: int) -> int:
        with self._lock:
            self._next += 1
            self.pending[self._next] = (destination, source, nbytes)
            return self._next

    def copy_from_host(self, destination: int, source: int, nbytes: int) -> int:
        ctypes.memmove(destination, source, nbytes)
        with self._lock:
            self._next += 1
            self.done.add(self._next)
            return self._next

    def is_done(self, ticket: int) -> bool:
        if not self.open.is_set():
            return ticket in self.done
        with self._lock:
            if ticket in self.pending:
                destination, source, nbytes = self.pending.pop(ticket)
                ctypes.memmove(destination, source, nbytes)
                self.done.add(ticket)
        return True

    def wait(self, ticket: int, seconds: float) -> bool:
        self.open.wait(seconds)
        return self.is_done(ticket)

    def make_stream_wait(self, stream: int) -> None:
        self.waits.append(stream)


@pytest.fixture
def slow() -> Iterator[SlowDevice]:
    holdfast.flush(60)
    device = SlowDevice()
    with _devices.stand_in("cpu", device):
        yield device
        device.open.set()
        holdfast.flush(60)
    holdfast.configure(arena_bytes=0)  # lets go of the device
    holdfast.warm_up(1)


class Net(torch.nn.Module):
    """A layer with parameters, statistics that every forward pass changes, and a router bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.register_buffer("amax", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x))
        self.amax.copy_(torch.maximum(self.amax, x.abs().max()))
        return x


def test_statistics_that_the_next_forward_changes_are_those_of_the_call(
    slow: SlowDevice, tmp_path: Path
) -> None:
    net = Net()
    net(torch.randn(8, 64))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    save = holdfast.save_async({"net": net}, tmp_path / "s")
    net(100 * torch.randn(8, 64))  # the copies are still under way
    assert not save.staged.done()
    assert not torch.equal(net.norm.running_var, before["norm.running_var"])
    slow.open.set()
    save.wait(60)
    with_host = holdfast.load(tmp_path / "s")["net"]
    for name, tensor in before.items():
        assert torch.equal(with_host[name], tensor), name


def test_the_planted_bug_copies_statistics_late_and_is_found(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_is_late", lambda *_: True)
    net = Net()
    before = net.amax.clone()
    save = holdfast.save_async({"net": net}, tmp_path / "s")
    net(100 * torch.randn(8, 64))
    slow.open.set()
    save.wait(60)
    assert not torch.equal(holdfast.load(tmp_path / "s")["net"]["amax"], before)


def test_parameters_are_copied_late_without_a_copy_on_the_device(
    slow: SlowDevice, tmp_path: Path
) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    save = holdfast.save_async({"net": net, "optimizer": optimizer}, tmp_path / "s")

    def is_source(tensor: torch.Tensor) -> bool:
        return any(s <= tensor.data_ptr() < s + n for _, s, n in list(slow.pending.values()))

    for _ in range(2000):  # the device's thread starts all copies of a chunk together
        if is_source(optimizer.state[net.linear.weight]["exp_avg"]):
            break
        threading.Event().wait(0.005)
    assert is_source(net.linear.weight)
    assert is_source(optimizer.state[net.linear.weight]["exp_avg"])
    assert not is_source(net.norm.running_mean)
    slow.open.set()
    save.wait(60)


class Flat(torch.nn.Module):
    """A parameter and a buffer in one storage, and a parameter without memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(80)
        self.weight = torch.nn.Parameter(flat[:64])
        self.register_buffer("amax", flat[64:])
        self.sparse = torch.nn.Parameter(torch.eye(64).to_sparse())


def test_only_what_a_parameter_consists_of_is_copied_late(slow: SlowDevice, tmp_path: Path) -> None:
    net = Flat()
    save = holdfast.save_async({"net": net}, tmp_path / "s")
    net.amax.fill_(7.0)
    with torch.no_grad():
        net.weight.fill_(8.0)  # against the rule: shows that it is copied now
        net.sparse._values().fill_(9.0)
    slow.open.set()
    save.wait(60)
    loaded = holdfast.load(tmp_path / "s")["net"]
    assert not loaded["amax"].any()
    assert (loaded["weight"] == 8.0).all()
    assert (loaded["sparse"].detach()._values() == 9.0).all()


def test_a_save_that_fails_in_staging_does_not_end_the_step(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object) -> None:
        raise holdfast.Error("ABORTED", "staging stopped: the save has failed")

    monkeypatch.setattr(_devices, "wait_staged_on", failed)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(8, 64)).sum().backward()
    hook = holdfast.wait_before_step(optimizer)
    save = holdfast.save_async({"net": net}, tmp_path / "s")
    save.cancel()
    timer = threading.Timer(0.2, slow.open.set)  # what the device has begun is read until then
    timer.start()
    optimizer.step()
    hook.remove()
    timer.join()
    assert save.staged.done()  # nothing is copied any more from what the step has changed
    with pytest.raises(holdfast.Error) as error:
        save.durable.result(60)
    assert error.value.code == "CANCELLED"


def test_the_stream_waits_for_the_copies_before_the_optimizers_step(
    slow: SlowDevice, tmp_path: Path
) -> None:
    class Looking(torch.optim.SGD):
        waits_before: int | None = None

        def step(self, *arguments: Any) -> Any:
            self.waits_before = len(slow.waits)  # what comes afterwards comes too late
            return super().step(*arguments)

    net = Net()
    optimizer = Looking(net.parameters(), lr=0.1)
    hook = holdfast.wait_before_step(optimizer)
    save = holdfast.save_async({"net": net}, tmp_path / "s")
    net(torch.randn(8, 64)).sum().backward()
    waits = len(slow.waits)
    stepped = threading.Thread(target=optimizer.step)
    stepped.start()
    stepped.join(30)
    assert not stepped.is_alive(), "the CPU waited for the copies"
    assert optimizer.waits_before is not None
    assert optimizer.waits_before > waits, "the stream does not wait for the copies"
    hook.remove()
    slow.open.set()
    save.wait(60)
