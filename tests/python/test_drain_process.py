"""The process beside the trainer of `Checkpointer(drain_to=...)`: one that is stopped, slow, let go, or heard by nobody."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from draining import until

import holdfast
from holdfast.drain import Drain, trainer
from holdfast.drain.following import alone
from holdfast.drain.places import open_place
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")
MIB = 1 << 20
formats = pytest.mark.parametrize("format", ["holdfast", "dcp"])


def test_a_process_that_answers_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_MARGIN", 0.5)
    checkpointer = holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far", drain=Drain(give_up=0.5))
    checkpointer.save({"w": torch.ones(10)}, 1)
    checkpointer._draining._give_up = 60.0  # its start may take long
    checkpointer.wait_drained(60)
    checkpointer._draining._give_up = 0.5
    process = checkpointer._draining._process
    os.kill(process.pid, signal.SIGSTOP)  # as one that waits for a file system
    checkpointer.save({"w": torch.ones(10)}, 2)
    with pytest.raises(TimeoutError):
        checkpointer.wait_drained(0.1)
    for ends in (lambda: checkpointer.wait_drained(60), checkpointer.close):
        with pytest.raises(Error, match="its process has told nothing for 1 s: a file system or server hangs, or the process is stopped") as refused:
            ends()
        assert refused.value.code == "UNAVAILABLE"
    os.kill(process.pid, signal.SIGCONT)
    process.wait(60)
    assert [c.step for c in open_place(str(tmp_path / "far")).complete()[0]] == [1, 2]


def test_a_slow_drain_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "_MARGIN", 2.5)
    options = Drain(give_up=0.0, bytes_per_second=MIB)
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far", drain=options) as checkpointer:
        checkpointer.save({"w": torch.ones(MIB)}, 1)  # what follows the first 4 MiB waits for 4 s


def test_a_checkpointer_that_is_dropped_leaves_no_process(tmp_path: Path) -> None:
    checkpointer = holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far")
    checkpointer.save({"w": torch.ones(10)}, 1)
    process, lock = checkpointer._draining._process, checkpointer._draining.lock
    with ThreadPoolExecutor(1) as another:
        another.submit(lock.acquire).result()
        del checkpointer
        gc.collect()  # it waits for no lock
        another.submit(lock.release).result()
    assert process.wait(60) == 0
    assert [c.step for c in open_place(str(tmp_path / "far")).complete()[0]] == [1]


_FORKING_TRAINER = """
import fcntl, os, signal, sys, time, holdfast
run, far = sys.argv[1:]
c = holdfast.Checkpointer(run, drain_to=far)
c._own_drain().start()
process = c._draining._process
os.kill(process.pid, signal.SIGSTOP)  # until this process has ended
fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
held = os.dup(process.stdout.fileno())
child = os.fork()
if child == 0:
    os.closerange(1, 3)
    time.sleep(100)
    os._exit(0)
print(process.pid, child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpointer_that_is_closed_and_dropped_starts_no_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far") as checkpointer:
        checkpointer.save({"w": torch.ones(10)}, 1)
        checkpointer.wait_drained(60)
        draining = checkpointer._draining
        with draining.lock:  # the thread that sees its end waits
            process = draining._process
            draining.let_go()
            assert process.wait(60) == 0
            caplog.clear()
            draining.let_go()
        until(lambda: draining._process is not process or bool(caplog.records))
        assert draining._process is None and not caplog.records


def test_a_forked_process_that_holds_the_pipe_stops_no_drain(tmp_path: Path) -> None:
    steps = list(range(20))  # whose events fill the pipe
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB) as checkpointer:
        for step in steps:
            checkpointer.save({"w": torch.ones(10)}, step)
    done = subprocess.run([sys.executable, "-c", _FORKING_TRAINER, str(tmp_path / "run"), str(tmp_path / "far")],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    drain, child = map(int, done.stdout.split())
    try:
        os.kill(drain, signal.SIGCONT)
        assert until(lambda: not os.path.exists(f"/proc/{drain}"))
        assert [c.step for c in open_place(str(tmp_path / "far")).complete()[0]] == steps
    finally:
        os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(drain, signal.SIGKILL)


@formats
def test_a_reader_removes_nothing(format: str, tmp_path: Path) -> None:
    """Its options are not those of the job that saves."""
    run, far = tmp_path / "run", open_place(str(tmp_path / "far"))
    with holdfast.Checkpointer(run, arena_bytes=16 * MIB, format=format, drain_to=far.url, drain=Drain(keep_last=0)) as training:
        for step in (1, 2, 3):
            training.save({"w": torch.full((10,), float(step))}, step)
    for directory in (run, tmp_path / "another"):
        options = {"arena_bytes": 64 * MIB, "keep_last": 1, "format": format, "drain_to": far.url, "drain": Drain(keep_last=1)}
        with holdfast.Checkpointer(directory, **options) as reader:
            into = {"w": torch.zeros(10)}
            reader.load(into=into)
            reader.wait_drained(60)
            assert into["w"][0] == 3
        assert [c.step for c in far.complete()[0]] == [1, 2, 3] == [c.step for c in open_place(str(run)).complete()[0]]
    with holdfast.Checkpointer(run, **options) as training:
        training.wait_drained(60)
        training.save({"w": torch.zeros(10)}, 4)
    assert [c.step for c in far.complete()[0]] == [4] == [c.step for c in open_place(str(run)).complete()[0]]


_TERMINATED_TRAINER = """
import sys, time, torch, holdfast
run, far, how = sys.argv[1:]
c = holdfast.Checkpointer(run, drain_to=far)
c.save({"w": torch.ones(10)}, 1)
print(c._draining._process.pid, flush=True)
sys.stdin.readline()
time.sleep(0.5)  # of a step that was under way
c.save({"w": torch.ones(10)}, 2)
if how == "closes":
    c.close(drain=False)
"""


@pytest.mark.parametrize("how", ["closes", "exits"])
def test_a_trainer_that_was_terminated_with_its_drain_saves_once_more(how: str, tmp_path: Path) -> None:
    """The drain has a backlog then."""
    run, far = tmp_path / "run", tmp_path / "far"
    run.mkdir()
    with alone(str(run), str(far), lambda: False):
        job = subprocess.Popen([sys.executable, "-c", _TERMINATED_TRAINER, str(run), str(far), how], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
        drain = int(job.stdout.readline())
        # It waits for the lock: by then it obeys signals.
        assert until(lambda: any(path.name.startswith(".holdfast-drain") for path in map(Path, _open_files(drain))))
        os.kill(drain, signal.SIGTERM)
        assert until(lambda: "ShdPnd:\t0000000000000000" in Path(f"/proc/{drain}/status").read_text())
        job.communicate("\n", timeout=60)
        assert job.returncode == 0
    assert until(lambda: not os.path.exists(f"/proc/{drain}"))
    assert [c.step for c in open_place(str(far)).complete()[0]] == [1, 2]


def _open_files(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    return []


def test_a_process_that_is_terminated_while_it_starts_goes_on(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "run", arena_bytes=16 * MIB, drain_to=tmp_path / "far") as checkpointer:
        draining = checkpointer._draining
        draining.start()
        process = draining._process
        process.send_signal(signal.SIGTERM)
        checkpointer.save({"w": torch.ones(10)}, 1)
        checkpointer.wait_drained(60)
        assert draining._process is process and process.poll() is None
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


_SHORT_TRAINER = """
import os, signal, sys, torch, holdfast
run, far = sys.argv[1:]
c = holdfast.Checkpointer(run, keep_last=1, drain_to=far, drain=holdfast.Drain(keep_last=1))
c._own_drain().start()
os.kill(c._draining._process.pid, signal.SIGSTOP)  # until this process has ended
for step in (1, 2, 3):
    c.save({"w": torch.ones(10)}, step)
print(c._draining._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_that_has_ended_before_its_drain_has_begun_gets_retention(tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    done = subprocess.run([sys.executable, "-c", _SHORT_TRAINER, str(run), str(far)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    drain = int(done.stdout)
    os.kill(drain, signal.SIGCONT)
    assert until(lambda: not os.path.exists(f"/proc/{drain}"))
    for place in (run, far):
        assert [c.step for c in open_place(str(place)).complete()[0]] == [3]
