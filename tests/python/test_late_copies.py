"""What may be copied behind the training, and what may not: on a device whose copies end when told."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow_device import SlowDevice

import holdfast
from holdfast import _devices, _late, _state


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


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """A model after one step, with the gradients of the next."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def copies_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor of a state by its path, as it is now."""
    described = _state.describe(state)
    owners = [described.tensors[m[0]] for m in described.outline.members]
    return {name: owner.clone() for name, owner in zip(described.outline.names, owners, strict=True)}


def differing(path: Path, before: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors of a checkpoint that are not as they were."""
    checkpoint = holdfast.open(path)
    return [name for name, value in before.items() if not torch.equal(checkpoint[name], value)]


@pytest.mark.parametrize("clone_max", [64 << 20, 0], ids=["cloned", "the stream waits"])
def test_by_default_a_checkpoint_holds_the_values_at_the_call(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clone_max: int
) -> None:
    monkeypatch.setattr(_late, "CLONE_MAX", clone_max)
    net, optimizer = trained()
    state = {"net": net, "optimizer": optimizer}
    before = copies_of(state)
    save = holdfast.save_async(state, tmp_path / "s")
    net(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()  # and nothing of ours before it
    slow.open.set()
    save.wait(60)
    assert len(before) > 8
    assert differing(tmp_path / "s", before) == []


class Frozen(Net):
    """With a codebook that forward changes: a parameter that no optimizer does."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = torch.nn.Parameter(torch.zeros(16), requires_grad=False)
        self.average = torch.optim.swa_utils.AveragedModel(self.linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.codebook += 1
        return super().forward(x)


def test_only_what_an_optimizers_step_changes_is_copied_late(slow: SlowDevice, tmp_path: Path) -> None:
    net = Frozen()
    optimizer = torch.optim.Adam([*net.linear.parameters(), net.codebook])
    net(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    state = {"net": net, "optimizer": optimizer}
    before = copies_of(state)
    save = holdfast.save_async(state, tmp_path / "s", late=True)
    net(torch.randn(8, 64)).sum().backward()
    net.average.update_parameters(torch.nn.Linear(64, 64))
    optimizer.step()
    slow.open.set()
    save.wait(60)
    assert differing(tmp_path / "s", before) == []

    slow.open.clear()
    save = holdfast.save_async(state, tmp_path / "t", late=[optimizer])
    with torch.no_grad():
        for tensor in _tensors_of(state):
            tensor.fill_(1)
    slow.open.set()
    with pytest.raises(holdfast.Error, match="6 of the tensors that late= names changed") as error:
        save.wait(60)
    assert error.value.code == "DATA_LOSS"
    own = [f"net.linear.{n}" for n, _ in net.linear.named_parameters()]
    moments = [n for n in before if "exp_avg" in n]
    assert len(moments) == 4
    for name in [*own, *moments]:
        assert name in error.value.message
    assert not (tmp_path / "t").exists()


def _tensors_of(state: Any) -> list[torch.Tensor]:
    return _state.describe(state).tensors


def test_without_an_optimizer_late_true_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Error, match="late=True: the state holds no optimizer"):
        holdfast.save_async({"net": Net()}, tmp_path / "s", late=True)


def test_an_optimizer_whose_steps_may_be_replayed_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.Adam(Net().parameters(), capturable=True)
    with pytest.raises(holdfast.Error, match="capturable=True.*no hook"):
        holdfast.save_async({"optimizer": optimizer}, tmp_path / "s", late=True)


def test_a_module_says_nothing_of_when_it_changes(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(holdfast.Error, match="late=.*Net.*optimizer") as error:
        holdfast.save_async({"net": net}, tmp_path / "s", late=[net])
    assert error.value.code == "INVALID_ARGUMENT"


def test_statistics_that_the_next_forward_changes_are_those_of_the_call(
    slow: SlowDevice, tmp_path: Path
) -> None:
    net = Net()
    net(torch.randn(8, 64))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    save = holdfast.save_async({"net": net}, tmp_path / "s", late=[torch.optim.SGD(net.parameters())])
    net(100 * torch.randn(8, 64))  # the copies are still under way
    assert not save.staged.done()
    assert not torch.equal(net.norm.running_var, before["norm.running_var"])
    slow.open.set()
    save.wait(60)
    with_host = holdfast.load(tmp_path / "s")["net"]
    for name, tensor in before.items():
        assert torch.equal(with_host[name], tensor), name


@pytest.mark.planted("copies_statistics_late")
def test_the_planted_bug_copies_statistics_late_and_is_found(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_late.Late, "of", lambda _, entries: [True] * len(entries))
    net = Net()
    before = net.amax.clone()
    save = holdfast.save_async({"net": net}, tmp_path / "s")
    net(100 * torch.randn(8, 64))
    slow.open.set()
    with pytest.raises(holdfast.Error, match="amax") as error:
        save.wait(60)
    assert error.value.code == "DATA_LOSS"
    assert not torch.equal(net.amax, before)


@pytest.mark.planted("no_hook", "compares_no_versions")
@pytest.mark.parametrize("checked", [True, False])
def test_the_planted_bug_leaves_out_the_hook_and_is_found(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    monkeypatch.setattr(holdfast.Save, "hold_back_training", lambda _: None)
    if not checked:
        monkeypatch.setattr(_late.Watch, "end", lambda _: "")
    net, optimizer = trained()
    before = copies_of({"net": net})
    save = holdfast.save_async({"net": net}, tmp_path / "s", late=[optimizer])
    optimizer.step()
    slow.open.set()
    if checked:
        with pytest.raises(holdfast.Error, match="changed before their copies ended"):
            save.wait(60)
    else:
        save.wait(60)
        assert "net.linear.weight" in differing(tmp_path / "s", before)


def test_parameters_are_copied_late_without_a_copy_on_the_device(
    slow: SlowDevice, tmp_path: Path
) -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    save = holdfast.save_async(
        {"net": net, "optimizer": optimizer}, tmp_path / "s", late=[optimizer]
    )

    average = optimizer.state[net.linear.weight]["exp_avg"]
    slow.await_copy(average.data_ptr())  # the device's thread starts all copies of a chunk together
    assert slow.reads(net.linear.weight.data_ptr())
    assert slow.reads(average.data_ptr())
    assert not slow.reads(net.norm.running_mean.data_ptr())
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


def test_a_parameter_in_the_storage_of_a_buffer_is_captured_with_it(
    slow: SlowDevice, tmp_path: Path
) -> None:
    net = Flat()
    optimizer = torch.optim.SGD(net.parameters())
    before = net.weight.detach().clone()
    save = holdfast.save_async({"net": net}, tmp_path / "s", late=[optimizer])
    net.amax.fill_(7.0)  # counts as a change of the weight, of which it is no part
    optimizer.step()
    slow.open.set()
    save.wait(60)
    loaded = holdfast.load(tmp_path / "s")["net"]
    assert not loaded["amax"].any()
    assert torch.equal(loaded["weight"], before)


def test_what_has_no_elements_is_never_late(slow: SlowDevice, tmp_path: Path) -> None:
    """It does not change, and its version counter is that of the tensor that it is a part of."""
    buffer = torch.ones(64)
    state = {"none": buffer[:0], "some": torch.ones(2)}
    file = holdfast.save_file(state, tmp_path / "f")
    save = holdfast.dcp.async_save(state, checkpoint_id=tmp_path / "d")
    buffer.add_(1)
    slow.open.set()
    file.wait(60)
    save.result(60)
    weight = torch.nn.Parameter(buffer)
    assert _late.Late([weight]).of([[weight], [buffer[:0]], [buffer, buffer[:0]]]) == [True, False, True]


def test_tensors_of_two_storages_that_overlap_are_refused_by_name(slow: SlowDevice, tmp_path: Path) -> None:
    """As arrays of another framework over a tensor's memory. One whose storage has all of it is enough."""
    slow.open.set()
    whole = torch.arange(8.0)
    part = torch.from_dlpack(torch.utils.dlpack.to_dlpack(whole[4:]))
    outer = torch.from_dlpack(torch.utils.dlpack.to_dlpack(whole[:6]))
    holdfast.save({"part": part, "whole": whole}, tmp_path / "s")
    assert torch.equal(holdfast.load(tmp_path / "s")["part"], whole[4:])
    with pytest.raises(holdfast.Error, match="save part#storage: tensors with storages of their own overlap"):
        holdfast.save({"part": part, "outer": outer}, tmp_path / "t")


def test_a_stream_that_was_made_to_wait_may_change_late_tensors(
    slow: SlowDevice, tmp_path: Path
) -> None:
    net, optimizer = trained()
    before = copies_of({"net": net})
    save = holdfast.save_async({"net": net}, tmp_path / "s", late=[optimizer])
    save.wait_staged_on()
    with torch.no_grad():
        net.linear.weight.fill_(3.0)
    slow.open.set()
    save.wait(60)
    assert differing(tmp_path / "s", before) == []


def test_a_save_that_fails_in_staging_does_not_end_the_step(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object) -> None:
        raise holdfast.Error("ABORTED", "staging stopped: the save has failed")

    monkeypatch.setattr(_devices, "wait_staged_on", failed)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(8, 64)).sum().backward()
    save = holdfast.save_async({"net": net}, tmp_path / "s", late=[optimizer])
    save.cancel()
    timer = threading.Timer(0.2, slow.open.set)  # what the device has begun is read until then
    timer.start()
    optimizer.step()
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
    save = holdfast.save_async({"net": net}, tmp_path / "s", late=[optimizer])
    net(torch.randn(8, 64)).sum().backward()
    waits = len(slow.waits)
    stepped = threading.Thread(target=optimizer.step)
    stepped.start()
    stepped.join(30)
    assert not stepped.is_alive(), "the CPU waited for the copies"
    assert optimizer.waits_before is not None
    assert optimizer.waits_before > waits, "the stream does not wait for the copies"
    slow.open.set()
    save.wait(60)


def test_whether_memory_is_late_takes_no_longer_the_more_of_it_there_is() -> None:
    """Counted, not timed: comparisons per question."""
    compared = 0

    class Address(int):
        def __lt__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) < int(other)

        def __le__(self, other: int) -> bool:
            nonlocal compared
            compared += 1
            return int(self) <= int(other)

        __gt__, __ge__ = None, None  # type: ignore[assignment]

    tensors = [torch.zeros(64) for _ in range(4096)]
    late = _late.Late(tensors)
    for tensor in tensors:
        begin = tensor.data_ptr()
        assert late._is_late(Address(begin), Address(begin + tensor.nbytes))
    assert not late._is_late(Address(1), Address(2))
    assert compared <= 20 * len(tensors)


def test_a_step_waits_for_copies_that_wait_for_staging_memory(
    slow: SlowDevice, tmp_path: Path
) -> None:
    holdfast.configure(arena_bytes=64 << 20)
    weight = torch.nn.Parameter(torch.zeros(10 << 20))  # 40 MiB: two saves have no room
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones_like(weight)
    saves = []
    timer = threading.Timer(0.5, slow.open.set)
    for step in range(3):
        saves.append(
            holdfast.save_async({"w": weight}, tmp_path / f"{step}", step=step, late=[optimizer])
        )
        if step == 1:
            timer.start()
        optimizer.step()
    timer.join()
    for step, save in enumerate(saves):
        save.wait(60)
        assert (holdfast.load(save.path)["w"] == -float(step)).all(), step


def test_warming_up_registers_the_memory_ahead_of_the_first_save(tmp_path: Path) -> None:
    registered = []

    class Registering(SlowDevice):
        def register_memory(self, address: int, nbytes: int) -> None:
            registered.append(nbytes)

    holdfast.flush(60)
    device = Registering()
    device.open.set()
    with _devices.stand_in("cpu", device):
        holdfast.configure(arena_bytes=16 << 20)
        holdfast.warm_up()
        assert registered == [16 << 20]
        holdfast.save({"w": torch.ones(4)}, tmp_path / "a")
        assert registered == [16 << 20]
        holdfast.flush(60)
    holdfast.configure(arena_bytes=0)  # lets go of the device
    holdfast.warm_up(1)


# ---- Random training loops: what is saved is the state at the call, or the save fails.


class _Loop:
    """One model with its optimizers, as training loops put them together."""

    def __init__(self, choose: st.DataObject) -> None:
        draw = choose.draw
        self.net = Frozen() if draw(st.booleans()) else Net()
        if draw(st.booleans()):
            self.net.tied = torch.nn.Linear(64, 64)
            self.net.tied.weight = self.net.linear.weight
        kind, options = draw(st.sampled_from(_OPTIMIZERS))
        parts = [list(self.net.linear.parameters()), list(self.net.norm.parameters())]
        groups = parts if draw(st.booleans()) else [sum(parts, [])]
        self.optimizers = [kind(group, lr=0.1, **options) for group in groups]
        if draw(st.booleans()):
            self.optimizers[0].register_step_pre_hook(lambda optimizer, *_: None)
        self.closure = draw(st.booleans())
        self.accumulate = draw(st.integers(1, 2))
        self.ema = torch.optim.swa_utils.AveragedModel(self.net) if draw(st.booleans()) else None

    def backward(self) -> torch.Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(self.accumulate):
            loss = self.net(torch.randn(4, 64)).square().mean()
            loss.backward()
        return loss

    def step(self) -> None:
        if not self.closure:
            self.backward()
        for optimizer in self.optimizers:
            if self.closure:
                optimizer.step(self.backward)
            else:
                optimizer.step()
        if self.ema is not None:
            self.ema.update_parameters(self.net)

    def state(self, as_dicts: bool) -> dict[str, Any]:
        parts: dict[str, Any] = {"net": self.net, "optimizers": self.optimizers}
        if self.ema is not None:
            parts["ema"] = self.ema
        if as_dicts:
            parts["net"] = self.net.state_dict()
            parts["optimizers"] = [o.state_dict() for o in self.optimizers]
        return parts


_OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.LBFGS, {"max_iter": 2}),
]


def _late_of(choose: st.DataObject, loop: _Loop, as_dicts: bool) -> Any:
    named = [(), loop.optimizers, loop.optimizers[:1]]
    return choose.draw(st.sampled_from(named if as_dicts else [*named, True]))


def _train_and_save(choose: st.DataObject, slow: SlowDevice, path: Path) -> list[str]:
    """Saves between the steps of a random loop; returns the names of torn tensors."""
    loop = _Loop(choose)
    if any(isinstance(o, torch.optim.LBFGS) for o in loop.optimizers):
        loop.closure = True  # its step takes nothing else
    for _ in range(choose.draw(st.integers(0, 2))):
        loop.step()
    taken = []
    slow.open.clear()
    for i in range(choose.draw(st.integers(1, 2))):
        as_dicts = choose.draw(st.booleans())
        state = loop.state(as_dicts)
        before = copies_of(state)
        late = _late_of(choose, loop, as_dicts)
        taken.append((before, holdfast.save_async(state, path / f"{i}", step=i, late=late)))
        for _ in range(choose.draw(st.integers(0, 2))):
            loop.step()
    slow.open.set()
    torn = []
    for before, save in taken:
        save.wait(60)
        torn += differing(Path(save.path), before)
    return torn


def _loops(slow: SlowDevice, root: Path, count: int) -> list[str]:
    torn: list[str] = []
    number = itertools.count()

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(choose: st.DataObject) -> None:
        path = root / f"{next(number)}"
        path.mkdir()
        torn.extend(_train_and_save(choose, slow, path))
        holdfast.flush(60)
        shutil.rmtree(path)

    run()
    return torn


@pytest.mark.parametrize("clone_max", [64 << 20, 0], ids=["cloned", "the stream waits"])
def test_random_training_loops_tear_no_checkpoint(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clone_max: int
) -> None:
    monkeypatch.setattr(_late, "CLONE_MAX", clone_max)
    count = 500 if os.environ.get("HOLDFAST_LONG") else 30
    assert _loops(slow, tmp_path, count) == []


@pytest.mark.planted("no_hook_in_random_loops")
def test_random_training_loops_find_the_planted_bug(
    slow: SlowDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdfast.Save, "hold_back_training", lambda _: None)
    monkeypatch.setattr(_late.Watch, "end", lambda _: "")
    assert _loops(slow, tmp_path, 30) != []
