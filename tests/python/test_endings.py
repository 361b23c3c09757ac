"""Every save ends: its futures, and `flush`, whatever is raised in the thread that sees it through."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast import events, handle

pytestmark = pytest.mark.filterwarnings("ignore")

MIB = 1 << 20
STATE = {"w": torch.arange(1000.0)}


def plain(path: Path) -> Any:
    return holdfast.save_async(STATE, path).durable


def under_dcp(path: Path) -> Any:
    return holdfast.dcp.async_save(STATE, checkpoint_id=path)


both = pytest.mark.parametrize("begin", [plain, under_dcp])


@pytest.fixture(autouse=True)
def everything_ends() -> Iterator[None]:
    yield
    holdfast.flush(60)
    assert not handle.in_flight()
    assert not events.in_flight()


class Unusual(BaseException):
    """Neither an Exception nor one of Python's own."""


@both
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, Unusual, MemoryError])
def test_an_observer_that_raises_anything_fails_no_save(
    begin: Callable[[Path], Any], kind: type[BaseException], tmp_path: Path
) -> None:
    told = []

    def leaving(*_: Any) -> None:
        raise kind

    with events.Handle(leaving), events.Handle(lambda *what: told.append(what)):
        begin(tmp_path / "s").result(60)
    assert len(told) == 1
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


@both
@pytest.mark.parametrize("kind", [SystemExit, Unusual])
def test_a_done_callback_that_raises_anything_leaves_no_save_in_flight(
    begin: Callable[[Path], Any], kind: type[BaseException], tmp_path: Path
) -> None:
    called = threading.Event()

    def leaving(_: Any) -> None:
        called.set()
        raise kind

    with events.Handle(lambda *_: added.wait(60)):
        added = threading.Event()
        future = begin(tmp_path / "s")
        future.add_done_callback(leaving)
        added.set()
        future.result(60)
    assert called.wait(60)


@both
@pytest.mark.parametrize("where", ["begin", "publish"])
def test_what_fails_in_the_saves_thread_fails_the_save(
    begin: Callable[[Path], Any], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("broken on purpose")

    monkeypatch.setattr(events, where, broken)
    future = begin(tmp_path / "s")
    outcome = future.exception(60)
    with contextlib.suppress(MemoryError, holdfast.Error):
        holdfast.flush(60)
    events._running.saves.clear()  # the broken functions count nothing
    assert outcome is None or "MemoryError" in repr(outcome)


@both
def test_a_wait_inside_of_an_observer_is_refused(begin: Callable[[Path], Any], tmp_path: Path) -> None:
    refused = []

    def waiting(save: Any, *_: Any) -> None:
        for wait in (save.durable.result, holdfast.flush):
            with pytest.raises(holdfast.Error, match="observer") as error:
                wait()
            refused.append(error.value.code)

    with events.Handle(waiting):
        begin(tmp_path / "s").result(60)
    assert refused == ["FAILED_PRECONDITION"] * 2


@both
def test_a_flush_inside_of_a_done_callback_is_refused(begin: Callable[[Path], Any], tmp_path: Path) -> None:
    refused = []
    called, added = threading.Event(), threading.Event()

    def flushing(future: Any) -> None:
        future.result()  # which has ended
        with pytest.raises(holdfast.Error, match="done-callback") as error:
            holdfast.flush()
        refused.append(error.value.code)
        called.set()

    with events.Handle(lambda *_: added.wait(60)):
        future = begin(tmp_path / "s")
        future.add_done_callback(flushing)
        added.set()
        assert called.wait(60)
    assert refused == ["FAILED_PRECONDITION"]


def test_the_call_waits_once_for_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain(tmp_path / "first").result(60)
    waited, wait = set(), threading.Condition.wait

    def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            waited.add(id(condition))
        return wait(condition, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "wait", counted)
        future = plain(tmp_path / "s")
    assert len(waited) <= 1
    future.result(60)


@both
def test_without_a_thread_to_be_had_the_call_sees_the_save_through(
    begin: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_the_limit(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", at_the_limit)
        future = begin(tmp_path / "s")
    assert future.done()
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


_STILLBORN = """
import sys, threading, torch, holdfast, holdfast.dcp, holdfast.handle
signal_native = threading.Thread._set_native_id

def without_memory(self):
    if self.name.startswith("holdfast"):
        raise MemoryError
    signal_native(self)

threading.Thread._set_native_id = without_memory
sys.unraisablehook = lambda _: None
print(holdfast.save_async({"w": torch.ones(9)}, sys.argv[1] + "/s").durable.result(60)["tensors"])
holdfast.dcp.async_save({"w": torch.ones(9)}, checkpoint_id=sys.argv[1] + "/d").result(60)
holdfast.flush(60)
"""


def test_a_thread_that_ends_before_it_runs_holds_up_no_save(tmp_path: Path) -> None:
    done = run(_STILLBORN, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("s", "d"):
        assert holdfast.verify(tmp_path / name)["verdict"] == "sound"


# ---- In interpreters of their own.


def run(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True,
                          timeout=120, check=False, **options)  # fmt: skip


_WITHOUT_DESCRIPTORS = """
import os, resource, sys, threading, torch, holdfast
holdfast.configure(bytes_per_second_max=8 << 20)
save = holdfast.save_async({"w": torch.ones(2 << 20)}, sys.argv[1])
while save.progress()["phase"] != "writing":
    pass
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken, over = [], threading.Event()

def take_all():
    while not over.is_set():
        try:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass

taker = threading.Thread(target=take_all)
taker.start()
try:
    print(save.durable.result(30)["bytes"] > 0, flush=True)
except holdfast.Error as error:
    print(error)
except BaseException as error:
    print(repr(error), flush=True)
    os._exit(2)
over.set()
taker.join()
for fd in taken:
    os.close(fd)
holdfast.flush(60)
"""


def test_a_save_ends_where_no_file_can_be_opened_any_more(tmp_path: Path) -> None:
    done = run(_WITHOUT_DESCRIPTORS, str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


_AT_EXIT = """
import atexit, sys

def last(path):
    {save}

if sys.argv[2] == "before":
    atexit.register(last, sys.argv[1])
import torch, holdfast, holdfast.dcp
import holdfast.handle
if sys.argv[2] == "after":
    atexit.register(last, sys.argv[1])
"""


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize(
    "save",
    [
        "holdfast.save_async({'w': torch.ones(1000)}, path)",
        "holdfast.dcp.async_save({'w': torch.ones(1000)}, checkpoint_id=path)",
    ],
    ids=["plain", "dcp"],
)
def test_a_save_of_an_exit_handler_is_durable_when_the_call_returns(
    save: str, registered: str, tmp_path: Path
) -> None:
    done = run(_AT_EXIT.format(save=save), str(tmp_path / "s"), registered)
    assert done.returncode == 0, done.stderr
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


_INTERRUPTED_AT_EXIT = """
import os, signal, sys, threading, time, torch, holdfast
seen = threading.Event()

def once(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    seen.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, once)
%s
main = threading.main_thread()

class Slow:  # takes its time when the interpreter ends, while other threads run on
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

slow = Slow()

def interrupt():
    main.join()  # ends when the interpreter begins to wait for its threads
    while not seen.wait(0.1):  # one that comes just before the wait interrupts nothing
        os.killpg(0, signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
"""

_WRITING = """
holdfast.configure(bytes_per_second_max=1 << 20)
save = holdfast.save_async({"w": torch.ones(3 << 20)}, sys.argv[1])
while save.progress()["phase"] != "writing":
    pass
"""

# Threads of the runtime are in Python when the interpreter ends; then the save's thread drops its tensors.
_IN_A_HOOK = """
holdfast.configure(on_sealed=lambda *_: time.sleep(0.4), fused_copy=False, threads=2)
save = holdfast.save_async({f"w{i}": torch.ones(1 << 17) for i in range(100)}, sys.argv[1])
del save
"""


def test_an_interrupt_at_exit_ends_the_interpreter_and_says_which_save_went_on(tmp_path: Path) -> None:
    done = run(_INTERRUPTED_AT_EXIT % _WRITING, str(tmp_path / "s"), start_new_session=True)
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert f"holdfast: save {tmp_path / 's'}" in done.stderr
    # The worker finishes what is staged.
    deadline = threading.Event()
    for _ in range(600):
        if (tmp_path / "s").exists():
            break
        deadline.wait(0.1)
    assert holdfast.verify(tmp_path / "s")["verdict"] == "sound"


def test_an_interrupt_at_exit_waits_for_hooks_of_the_runtime(tmp_path: Path) -> None:
    done = run(_INTERRUPTED_AT_EXIT % _IN_A_HOOK, str(tmp_path / "s"), start_new_session=True)
    assert done.returncode == 1, (done.returncode, done.stderr)


_FEW_DESCRIPTORS = """
import gc, logging, os, resource, sys, warnings
warnings.simplefilter("ignore")
logging.disable()
import torch, torch.distributed.checkpoint as dcp, holdfast, holdfast.dcp
from holdfast.dcp import staging
from torch.distributed.checkpoint.api import CheckpointException

def state():
    return {"w": torch.ones(1000), "note": {"a"}}

def plain(path):
    holdfast.save_async({"w": torch.ones(1000)}, path, replace=True).durable.result(60)

def own_dcp(path):
    holdfast.dcp.async_save(state(), checkpoint_id=path + "-own").result(60)

def stock_dcp(path):
    dcp.async_save(state(), storage_writer=holdfast.dcp.StorageWriter(path + "-stock")).result(60)

def load(path):
    holdfast.load(sys.argv[1] + "/before")

def load_dcp(path):
    # Of dcp.load the framework makes an AssertionError with the reason in its text.
    holdfast.dcp.StorageReader(sys.argv[1] + "/before-own").read_metadata()

def causes(error):
    if isinstance(error, CheckpointException):
        return [cause for cause, _ in error.failures.values()]
    return [error]

ways = (plain, own_dcp, stock_dcp, load, load_dcp)
for way in ways:
    way(sys.argv[1] + "/before")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
raw = []
for free in range(int(sys.argv[2]), int(sys.argv[3])):
    for way in ways:
        holdfast.flush(60)
        holdfast.configure(arena_bytes=16 << 20)  # lets go of the directories that are held open
        gc.collect()
        staging.trim()
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        for _ in range(free):
            os.close(taken.pop())
        try:
            way(f"{sys.argv[1]}/{free}")
        except BaseException as error:
            name = "/before" if way in (load, load_dcp) else f"/{free}"
            raw += [(way.__name__, free, repr(c)) for c in causes(error) if not isinstance(c, holdfast.Error) or name not in c.message]
            del error
        finally:
            for fd in taken:
                os.close(fd)
            try:
                holdfast.flush(60)
            except Exception:
                pass
print(raw)
"""


def test_with_few_descriptors_left_every_failure_is_an_error_of_holdfasts_own_and_names_the_checkpoint(tmp_path: Path) -> None:
    done = run(_FEW_DESCRIPTORS, str(tmp_path), "0", "12")
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_a_relative_path_in_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    done = run(
        "import os, sys, torch, holdfast, holdfast.dcp\n"
        "os.mkdir(sys.argv[1]); os.chdir(sys.argv[1]); os.rmdir(sys.argv[1])\n"
        "for call in (lambda: holdfast.save_async({'w': torch.ones(1)}, 's'),\n"
        "             lambda: holdfast.load('s'), lambda: holdfast.dcp.StorageWriter('s')):\n"
        "    try:\n"
        "        call()\n"
        "    except holdfast.Error as error:\n"
        "        print(error.code)\n",
        str(tmp_path / "gone"),
    )
    assert done.stdout.split() == ["NOT_FOUND"] * 3, done.stdout + done.stderr
