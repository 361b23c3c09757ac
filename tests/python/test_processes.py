"""Interpreters that exit, fork or are interrupted, workers that are killed, and what is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.integrity import processes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh_options() -> Any:
    yield
    holdfast.flush(60)
    holdfast.configure(arena_bytes=0, bytes_per_second_max=0, launcher="spawn")


def run(code: str, *arguments: str, before: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    prefix = before + "import os, sys, signal, torch, holdfast\nMIB = 1 << 20\n"
    return subprocess.run([sys.executable, "-c", prefix + code, *arguments], capture_output=True,
                          text=True, timeout=120, **options)


def test_the_last_save_is_awaited_at_exit(tmp_path: Path) -> None:
    done = run(
        "holdfast.configure(bytes_per_second_max=16 * MIB)\n"
        "holdfast.save_async({'t': torch.ones(2 * MIB)}, sys.argv[1] + '/s')\n",
        str(tmp_path),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


@pytest.mark.parametrize(("ending", "status"), [("", 1), ("sys.exit(3)", 3), ("sys.exit(0)", 1)])
def test_a_failure_that_nobody_saw_shows_in_the_exit_status(
    ending: str, status: int, tmp_path: Path
) -> None:
    done = run(
        "import resource\n"
        "holdfast.configure(arena_bytes=16 * MIB, launcher='thread', bytes_per_second_max=8 * MIB)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "save = holdfast.save_async({'t': torch.ones(3 * MIB)}, sys.argv[1] + '/s')\n"
        # Behind the call, which would raise the error: of three chunks the second waits for the rate.
        "resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))\n" + ending,
        str(tmp_path),
        # Registered before holdfast's own, so it comes after that.
        before="import atexit; atexit.register(print, 'the last handler')\n",
    )
    assert done.returncode == status
    assert "File too large" in done.stderr
    assert done.stdout == "the last handler\n"
    assert os.listdir(tmp_path) == []


_DEVICE = """
import ctypes
from holdfast import _devices, _native
class Device(_native.Device):
    def name(self): return "stand-in"
    def register_memory(self, base, nbytes): pass
    def unregister_memory(self, base, nbytes): pass
    def order_after(self, stream): pass
    def copy_to_host(self, to, source, nbytes): ctypes.memmove(to, source, nbytes); return 0
    def is_done(self, ticket): return True
    def wait(self, ticket, seconds): return True
_devices._stand_ins["cpu"] = Device()
"""


@pytest.mark.parametrize(
    "use", ["holdfast.warm_up(MIB)", "holdfast.save({'t': torch.ones(MIB)}, sys.argv[1] + '/s')"]
)
def test_a_device_of_python_lasts_until_the_end(use: str, tmp_path: Path) -> None:
    done = run(_DEVICE + use, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_the_wait_and_not_the_save(tmp_path: Path) -> None:
    done = run(
        "import threading\n"
        # Whoever started the tests in the background had it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "holdfast.configure(bytes_per_second_max=8 * MIB)\n"
        "save = holdfast.save_async({'t': torch.ones(4 * MIB)}, sys.argv[1] + '/s')\n"
        "threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()\n"
        "try:\n"
        "    save.wait()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "print(save.wait()['bytes'] > 0)\n",
        str(tmp_path),
        start_new_session=True,  # Ctrl-C goes to the trainer's process group
    )
    assert done.stdout.split() == ["interrupted", "True"], done.stderr
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


def test_an_interrupt_in_the_call_gives_the_save_up(tmp_path: Path) -> None:
    done = run(
        "import threading, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "holdfast.configure(bytes_per_second_max=8 * MIB, arena_bytes=32 * MIB)\n"
        "state = {'t': torch.ones(6 * MIB)}\n"
        "optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])\n"
        "first = holdfast.save_async(state, sys.argv[1] + '/first')\n"
        "threading.Timer(0.3, lambda: os.killpg(0, signal.SIGINT)).start()\n"
        "try:\n"
        "    holdfast.save_async(state, sys.argv[1] + '/second')\n"  # waits for the memory
        "except KeyboardInterrupt:\n"
        "    print('interrupted', not first.durable.done())\n"
        "optimizer.step()\n"  # a save that has not begun has no copies to wait for
        "holdfast.flush()\n"
        "print(first.durable.done(), os.listdir(sys.argv[1]))\n",
        str(tmp_path),
        start_new_session=True,
    )
    assert done.stdout.split("\n")[:2] == ["interrupted True", "True ['first']"], done.stdout + done.stderr
    assert done.returncode == 0
    assert holdfast.verify(tmp_path / "first")["verdict"] == "sound"


def test_an_interrupt_that_nobody_catches_awaits_the_save(tmp_path: Path) -> None:
    done = run(
        "import threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "holdfast.configure(bytes_per_second_max=16 * MIB)\n"
        "holdfast.save_async({'t': torch.ones(4 * MIB)}, sys.argv[1] + '/s')\n"
        "threading.Timer(0.1, lambda: os.killpg(0, signal.SIGINT)).start()\n"
        "while True:\n"
        "    torch.ones(10).sum()\n",
        str(tmp_path),
        start_new_session=True,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode != 0 and "holdfast" not in done.stderr
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


def test_a_killed_worker_is_told_at_once_and_the_next_save_works(tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=8 * MIB)
    save = holdfast.save_async({"t": torch.ones(8 * MIB)}, tmp_path / "s")
    while not save._native.worker_pid:
        time.sleep(0.001)
    os.kill(save._native.worker_pid, signal.SIGKILL)
    with pytest.raises(holdfast.Error, match="killed|signal") as error:
        save.wait(60)
    assert error.value.code == "ABORTED"
    holdfast.configure(bytes_per_second_max=0)
    holdfast.save_async({"t": torch.ones(MIB)}, tmp_path / "s").wait(60)
    holdfast.flush(60)
    assert os.listdir(tmp_path) == ["s"]


def test_a_handle_is_of_no_use_in_a_forked_child(tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=16 * MIB)
    save = holdfast.save_async({"t": torch.ones(2 * MIB)}, tmp_path / "s")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for use in (save.wait, save.progress, save.cancel):
                try:
                    use()
                except holdfast.Error as error:
                    assert error.code == "FAILED_PRECONDITION"
                else:
                    raise AssertionError(use)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert save.wait(60)["bytes"] > 0
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


def test_a_lock_that_another_thread_holds_at_a_fork_is_free_in_the_child(tmp_path: Path) -> None:
    from holdfast.dcp import placement

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with placement._known.lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # ends a child that hangs
        placement.choose(tmp_path, "0" * 32, [0], False)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    done.set()
    thread.join()
    assert status == 0


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((16,), float(i))


def test_loader_workers_may_fork_during_saves(tmp_path: Path) -> None:
    holdfast.configure(bytes_per_second_max=32 * MIB)
    state = {"t": torch.randn(4 * MIB)}
    saves = [holdfast.save_async(state, tmp_path / "s0")]
    for epoch in range(1, 4):
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2)
        batches = iter(loader)  # forks
        assert not saves[-1].durable.done()
        assert sum(float(batch.sum()) for batch in batches) == 16 * sum(range(64))
        saves.append(holdfast.save_async(state, tmp_path / f"s{epoch}"))
    for i, save in enumerate(saves):
        save.wait(60)
        assert holdfast.verify(tmp_path / f"s{i}")["verdict"] == "sound"


def save_in_a_child(path: str) -> None:
    holdfast.save_async({"t": torch.ones(1000)}, path).wait(60)
    holdfast.flush(60)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_start_method_save_for_themselves(method: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context(method)
    first = context.Process(target=int)  # "forkserver" starts its server with the first child, and that may take seconds
    first.start()
    first.join()
    holdfast.configure(bytes_per_second_max=8 * MIB)
    mine = holdfast.save_async({"t": torch.zeros(4 * MIB)}, tmp_path / "parent")
    child = context.Process(target=save_in_a_child, args=(str(tmp_path / "child"),))
    child.start()
    assert not mine.durable.done()
    child.join(60)
    assert child.exitcode == 0
    mine.wait(60)
    assert torch.equal(holdfast.load(tmp_path / "child")["t"], torch.ones(1000))
    assert torch.equal(holdfast.load(tmp_path / "parent")["t"], torch.zeros(4 * MIB))


def test_hundreds_of_saves_leave_no_process_descriptor_or_memory(tmp_path: Path) -> None:
    state = {"t": torch.randn(1000), "n": 1}

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(processes.children())

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def many(number: int) -> None:
        for i in range(number):
            holdfast.save_async(state, tmp_path / "s", replace=True, step=i).wait(60)
        holdfast.flush(60)

    many(30)
    before, memory = counts(), resident()
    many(200)
    descriptors, children = counts()
    # What earlier tests left open may be collected meanwhile.
    assert descriptors <= before[0]
    assert children <= before[1]
    assert resident() - memory < 8 * MIB
    assert os.listdir(tmp_path) == ["s"]


_OF_TWO = """
import holdfast.dcp
state = {'t': torch.ones(3)}
for save in (
    lambda path: holdfast.save_async(state, path, replace=True),
    lambda path: holdfast.Checkpointer(sys.argv[1]).save(state, 1),
    lambda path: holdfast.dcp.async_save(state, checkpoint_id=path),
    lambda path: holdfast.dcp.save(state, checkpoint_id=path),
):
    try:
        save(sys.argv[1] + '/refused')
    except holdfast.Error as error:
        assert error.code == 'FAILED_PRECONDITION', error
        assert 'WORLD_SIZE is 2' in str(error) and 'init_process_group' in str(error), error
    else:
        raise AssertionError('it was not refused')
rank = os.environ['RANK']
holdfast.save(state, f'{sys.argv[1]}/plain-{rank}', rank=0, world_size=1)
holdfast.dcp.save(state, checkpoint_id=f'{sys.argv[1]}/dcp-{rank}', no_dist=True)
"""


def test_processes_that_have_not_joined_are_told_what_to_do(tmp_path: Path) -> None:
    for rank in range(2):
        done = run(_OF_TWO, str(tmp_path), env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"})
        assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["dcp-0", "dcp-1", "plain-0", "plain-1"]
