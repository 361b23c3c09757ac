"""``holdfast top``: real saves of other processes, seen from outside."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_line import Run, refused
from command_line import holdfast as command

from holdfast import _recent
from holdfast.cli import node, watching

MIB = 1 << 20
STATE = 32 * MIB

# For each line of the test: gives the save under way up, and begins one with this launcher and so many ranks.
_TRAINER = f"""
import json, os, sys, torch, holdfast
holdfast.configure(bytes_per_second_max=1 * {MIB}, arena_bytes=3 * {STATE})
holdfast.save_async({{"w": torch.ones(9)}}, "run/step-1", step=1).wait(60)
try:
    holdfast.save_async({{"w": torch.ones(9)}}, "run/step-1", step=2)
except FileExistsError:
    pass
if os.fork() == 0:  # as a DataLoader's worker: it keeps nothing of the trainer's
    os.execvp("sleep", ["sleep", "600"])
state = {{"w": torch.ones({STATE // 4})}}
handles = []
for line in sys.stdin:
    launcher, step, ranks = json.loads(line)
    for handle in handles:
        handle.cancel()
        handle.durable.exception()
    holdfast.configure(launcher=launcher)
    who = [dict(rank=r, world_size=ranks, attempt=f"{{step:032x}}") for r in range(ranks)] if ranks > 1 else [{{}}]
    handles = [holdfast.save_async(state, f"run/step-{{step}}", step=step, **w) for w in who]
    print("begun", flush=True)
"""


class Trainer:
    """A process whose save takes half a minute."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TRAINER], cwd=directory, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def begin(self, launcher: str, step: int, ranks: int = 1) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([launcher, step, ranks]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "begun\n"


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(tmp_path_factory.mktemp("top"))
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()


def look(*arguments: object) -> Any:
    done = command("top", "--json", "--interval", 0.3, *arguments, torch=False)
    assert (done.status, done.error) == (0, ""), done
    return done.json


@pytest.mark.parametrize("launcher", ["spawn", "fork", "persistent", "thread"])
def test_it_shows_phase_rate_time_left_and_memory_of_a_save(launcher: str, trainer: Trainer, tmp_path: Path) -> None:
    trainer.begin(launcher, 10)
    run, pid = trainer.directory / "run", trainer.process.pid
    found = look(run)
    (save,) = found["saves"]
    assert save["path"] == str(run / "step-10")
    assert (save["step"], save["rank"], save["world_size"]) == (10, 0, 1)
    assert save["launcher"] == launcher and save["trainer_pid"] == pid
    assert save["phase"] == "writing" and save["bytes_total"] > STATE
    assert save["bytes_sealed"] == save["bytes_total"] == save["bytes_held"]
    assert 0 < save["bytes_written"] < save["bytes_total"]
    # The limit, and the chunks that the ring takes before it counts.
    assert 0 <= save["bytes_per_second"] <= 32 * MIB
    if save["bytes_per_second"]:
        left = (save["bytes_total"] - save["bytes_written"]) / save["bytes_per_second"]
        assert save["seconds_left"] == pytest.approx(left)
    assert found["time"] - 60 < save["began"] < found["time"]
    if launcher == "thread":
        assert save["worker_pid"] == pid
    else:
        assert Path(f"/proc/{save['worker_pid']}/stat").read_text().rpartition(")")[2].split()[1] == str(pid)
    (process,) = found["processes"]
    assert (process["pid"], process["rank"], process["world_size"]) == (pid, 0, 1)
    assert process["outcomes"]["durable"] == process["outcomes"]["refused"] == 1
    assert process["last"]["path"] == str(run / "step-1") and process["last"]["bytes"] > 0
    refusal = process["errors"][-1]
    assert (refusal["code"], refusal["outcome"], refusal["step"]) == ("ALREADY_EXISTS", "refused", 2)
    other = look(tmp_path)
    assert other["saves"] == [] and other["processes"] == []


def test_it_shows_every_rank(trainer: Trainer) -> None:
    trainer.begin("spawn", 20, ranks=2)
    done = command("top", "--once", "--interval", 0.3, trainer.directory, torch=False)
    assert (done.status, done.error) == (0, ""), done
    first, head, *rows = done.out.splitlines()
    assert first.startswith("2 saves in flight, ") and "of staging memory held" in first
    assert head.split()[:4] == ["RANK", "PID", "STEP", "PHASE"]
    assert [row.split()[0] for row in rows[:2]] == ["0/2", "1/2"]
    assert all(row.endswith(" run/step-20") for row in rows[:2])
    assert "1 durable, 1 refused" in rows[2] and rows[2].endswith(" ago")
    assert "step 2 refused: ALREADY_EXISTS: " in rows[-1]


@pytest.mark.parametrize(("key", "columns"), [(b"q", 150), (b"\x03", 80)], ids=["q", "ctrl-c"])
def test_the_screen_shows_saves_and_gives_the_terminal_back(key: bytes, columns: int, trainer: Trainer) -> None:
    pytest.importorskip("rich")
    trainer.begin("spawn", 30)
    program = [sys.executable, "-m", "holdfast", "top", "--interval", "0.2", str(trainer.directory)]
    status, written = _typed(program, key, "ALREADY_EXISTS", columns)
    assert status == 0, written
    for said in ("1 save in flight", "0/1", "writing", "step-30", "HELD", "32.00 MiB"):
        assert said in written, written
    assert ("WORKER" in written) == (columns >= 120), written
    assert "\x1b[?1049h" in written and written.rindex("\x1b[?1049l") > written.rindex("\x1b[?1049h")


def test_it_shows_the_save_of_a_dead_trainer_and_no_outcomes_of_it(trainer: Trainer) -> None:
    trainer.begin("spawn", 40)
    trainer.process.kill()
    trainer.process.wait()
    found = look(trainer.directory)
    (save,) = found["saves"]
    assert save["trainer_pid"] is None and save["worker_pid"] is not None
    assert save["path"] == str(trainer.directory / "run" / "step-40")
    assert found["processes"] == []
    os.kill(save["worker_pid"], signal.SIGKILL)


_ENDS = f"""
import time, torch, holdfast
holdfast.configure(bytes_per_second_max=8 * {MIB})
save = holdfast.save_async({{"w": torch.ones({MIB})}}, "run/step-1", step=1)
print("begun", flush=True)
time.sleep(600)
"""


def test_a_save_that_has_ended_is_not_in_flight(tmp_path: Path) -> None:
    """A trainer that is stopped closes no table."""
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", _ENDS], cwd=tmp_path, stdout=subprocess.PIPE) as trainer:
        try:
            assert trainer.stdout is not None and trainer.stdout.readline() == b"begun\n"
            trainer.send_signal(signal.SIGSTOP)
            watched, end = node.Node(str(run)), time.monotonic() + 30
            while not (run / "step-1").exists() or ((saves := watched.look().saves) and time.monotonic() < end):
                time.sleep(0.05)
            assert saves == []
        finally:
            trainer.kill()


def test_without_a_save_it_says_so(tmp_path: Path) -> None:
    assert command("top", "--once", "--interval", 0.1, tmp_path, torch=False) == Run(0, "no save in flight\n", "")
    refused(command("top", tmp_path / "none", torch=False), "none: No such file or directory")


def _typed(command_line: list[str], key: bytes, until: str, columns: int, term: str = "xterm-256color") -> tuple[int, str]:
    """Runs a program on a terminal, types a key when `until` is on it: status and all that it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        # Not the C library's environment, in which readline has put the size of the tests' own terminal.
        given = {**os.environ, "TERM": term, "LANG": "C.UTF-8"}
        os.execve(command_line[0], command_line, {k: v for k, v in given.items() if k not in ("COLUMNS", "LINES")})
    written, typed, deadline = b"", False, time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                written += os.read(terminal, 1 << 16)
            except OSError:  # the program has ended
                break
        if not typed and until.encode() in written:
            os.write(terminal, key)
            typed = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def test_a_terminal_that_moves_no_cursor_has_the_state_once(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "holdfast", "top", "--interval", "0.1", str(tmp_path)]
    assert _typed(line, b"q", "never", 80, "dumb") == (0, "no save in flight\r\n")


def test_without_rich_the_screen_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['rich.console'] = None; from holdfast.cli import main; sys.exit(main())"
    status, written = _typed([sys.executable, "-c", program, "top", str(tmp_path)], b"q", "never", 80)
    assert status == 2 and "pip install 'rich>=13'" in written


ENTRY = {"time": 1.5, "outcome": "failed", "path": "/x", "step": 1, "code": "UNKNOWN", "message": "no"}
LAST = {"time": 1.5, "outcome": "durable", "path": "/x", "step": 1, "bytes": 9, "seconds": 0.5}


def outcomes_of(pid: int, **other: object) -> dict[str, Any]:
    return {"pid": pid, "rank": 0, "world_size": 1, "outcomes": {"durable": 1}, "last": LAST, "errors": [ENTRY], **other}


def written(text: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(text), text)


def test_outcomes_that_are_being_written_are_not_read(tmp_path: Path) -> None:
    content = outcomes_of(1)
    whole = written(json.dumps(content).encode())
    path = tmp_path / "outcomes"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut] + b"x" * (len(whole) - cut))
        with path.open("rb") as file:
            assert _recent.read(file.fileno()) == (content if cut == len(whole) else None), cut
    path.write_bytes(whole + b"the rest of a longer one")
    with path.open("rb") as file:
        assert _recent.read(file.fileno()) == content


# As another version of the package may write it, and as an attacker does.
def malformed(pid: int) -> list[bytes]:
    return [
        b"", b"1", b"[]", b"{}", b'"\xff"', b"[" * 30000, b"9" * 9000,
        *(json.dumps(outcomes_of(pid, **{key: value})).encode() for key, value in (
            ("rank", "\x1b[2J"), ("rank", -1), ("outcomes", [1]), ("outcomes", {"durable": {}}), ("last", "x"), ("errors", ["x"]),
            ("last", {**LAST, "seconds": float("nan")}), ("last", {**LAST, "time": float("-inf")}), ("last", {}),
            ("errors", [{**ENTRY, "time": 1e300}]), ("errors", [{**ENTRY, "path": "/x\0y"}]), ("errors", {"message": 1}),
        )),
    ]  # fmt: skip


class Memory(NamedTuple):
    """A process's memory of outcomes, as `top` finds it. This process may have one of its own."""

    fd: int
    pid: int


@pytest.fixture
def memory() -> Iterator[Memory]:
    fd = os.memfd_create(_recent.NAME)
    with subprocess.Popen(["sleep", "600"], pass_fds=[fd]) as process:
        try:
            yield Memory(fd, process.pid)
        finally:
            process.kill()
            os.close(fd)


@pytest.mark.parametrize("directory", [None, "/"])
def test_malformed_outcomes_are_passed_over(directory: str | None, memory: Memory) -> None:
    watched = node.Node(directory)
    for text in malformed(memory.pid):
        os.ftruncate(memory.fd, 0)
        os.pwrite(memory.fd, written(text), 0)
        look = watched.look()
        assert all(process.pid != memory.pid for process in look.processes), text
        watching.errors(look)


def test_outcomes_of_a_later_version_are_read(memory: Memory) -> None:
    content = outcomes_of(memory.pid, more=1, errors=[{**ENTRY, "more": 1}])
    os.pwrite(memory.fd, written(json.dumps(content).encode()), 0)
    (process,) = (p for p in node.Node(None).look().processes if p.pid == memory.pid)
    assert process.errors == [ENTRY] and process.last == LAST


def test_what_moves_the_cursor_is_not_printed(memory: Memory, tmp_path: Path) -> None:
    entry = {**ENTRY, "path": f"{tmp_path}/\x1b[31m", "message": "\x1b]0;title\x07\r\n\x9b2J\u202e\ud800 \u00e9"}
    os.pwrite(memory.fd, written(json.dumps(outcomes_of(memory.pid, errors=[entry])).encode()), 0)
    for encoding in ("utf-8", "ascii"):
        program = [sys.executable, "-m", "holdfast", "top", tmp_path, "--once", "--interval", "0.1"]
        done = subprocess.run(program, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding})
        assert (done.returncode, done.stderr) == (0, b""), done
        said = done.stdout.decode(encoding)
        assert r"\x1b]0;title\x07\r\n\x9b2J\u202e\ud800 " in said, said
        assert all(c.isprintable() or c == "\n" for c in said), said


def test_a_pipe_in_the_place_of_a_memory_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    other = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.close(pipe)  # no writer is left
    program = f"from holdfast.cli import node; node._open({os.getpid()}, {other})"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    os.close(other)


def test_mistakes_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(command("top", tmp_path / "file", torch=False), f"watch {tmp_path}/file: Not a directory")
    refused(command("top", "", torch=False), "watch '': the path is empty")
    said = command("top", "--interval", "soon", torch=False)
    assert said.status == 2 and "from 0.1 to 3600 seconds, not 'soon'" in said.error


def test_a_closed_pipe_ends_it() -> None:
    program = [sys.executable, "-m", "holdfast", "top", "--json", "--interval", "0.1"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def save_of(rank: int, **other: Any) -> node.Save:
    fields: dict[str, Any] = {
        "path": f"/run/step-{rank}", "step": 1, "rank": rank, "world_size": 64, "attempt": "0" * 32, "phase": "writing",
        "waits_for": None, "bytes_total": 1000, "bytes_sealed": 1000, "bytes_written": 900 - rank, "bytes_per_second": None,
        "seconds_left": None, "bytes_held": 1000, "streams": False, "launcher": "spawn", "engine": None, "began": 0.0,
        "trainer_pid": 1, "worker_pid": 2,
    }  # fmt: skip
    return node.Save(**{**fields, **other})


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (150, 40)])
def test_64_ranks_leave_room_for_the_errors(size: tuple[int, int]) -> None:
    console = pytest.importorskip("rich.console").Console(width=size[0], height=size[1], record=True, file=open(os.devnull, "w"))
    process = node.Process(**{**outcomes_of(7), "errors": [{**ENTRY, "message": "disk full " * 50}]})
    look = node.Look(0.0, [save_of(rank) for rank in range(64)], [process] * 64, [], 0)
    console.print(watching.screen(look, None, *size))
    lines = console.export_text().splitlines()
    if size[1] >= 24:
        assert any("disk full" in line for line in lines[: size[1]]), lines
        shown = [line for line in lines if "/64" in line]
        assert len(shown) >= 5 and "63/64" in shown[-1] and any("that have done least" in line for line in lines[:5])


@pytest.mark.parametrize("width", [120, 80, 79, 74, 69, 64, 50, 40])
def test_a_narrow_terminal_has_fewer_columns_and_whole_heads(width: int) -> None:
    console = pytest.importorskip("rich.console").Console(width=width, height=24, record=True, file=open(os.devnull, "w"))
    busy = save_of(7, bytes_total=1 << 34, bytes_written=1 << 33, bytes_held=1 << 34, bytes_per_second=1.5e9, seconds_left=65.0, step=120000)
    console.print(watching.screen(node.Look(0.0, [busy], [], [], 0), None, width, 24))
    lines = console.export_text().splitlines()
    (head,) = (line for line in lines if "PHASE" in line)
    assert {"RANK", "PHASE", "CHECKPOINT"} <= set(head.split()) <= set(watching._HEAD), head
    assert any(line.lstrip().startswith("7/64") and "writing" in line for line in lines), lines


def test_a_phase_names_the_ranks_that_are_waited_for() -> None:
    def phase(ranks: list[int] | None) -> str:
        return watching.phase(save_of(0, phase="waiting for ranks", waits_for=ranks))

    assert phase(None) == phase([]) == "waiting for ranks"
    assert phase([3]) == "waiting for ranks 3"
    assert phase([1, 2, 3, 7, 9, 10]) == "waiting for ranks 1-3, 7, 9-10"
    assert phase([*range(0, 20, 2)]) == "waiting for ranks 0, 2, 4, 6, ..."


def test_it_names_the_ranks_that_a_save_waits_for(trainer: Trainer, tmp_path: Path) -> None:
    program = """
import sys, torch, holdfast
for rank in (0, 2):
    holdfast.save_async({"w": torch.ones(9)}, "step-1", rank=rank, world_size=4, attempt="7" * 32)
print("begun", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, text=True, stdin=-1, stdout=-1, stderr=-3) as ranks:
        assert ranks.stdout is not None and ranks.stdout.readline() == "begun\n"
        deadline = time.monotonic() + 60
        found: Any = None
        while time.monotonic() < deadline:
            found = look(tmp_path)["saves"]
            if [save["waits_for"] for save in found] == [[1, 3], [1, 3]]:
                break
        assert [save["waits_for"] for save in found] == [[1, 3], [1, 3]], found
        ranks.kill()


def test_memory_of_a_dead_worker_is_quarantined(tmp_path: Path) -> None:
    """Its socket is held open here, as a transfer in flight would."""
    program = f"""
import os, sys, torch, holdfast
holdfast.configure(bytes_per_second_max={MIB}, arena_bytes=64 * {MIB})
save = holdfast.save_async({{"w": torch.ones({STATE // 4})}}, "step-1")
print("begun", flush=True)
save.durable.exception()
print(holdfast.staging()["bytes_quarantined"], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, text=True, stdin=-1, stdout=-1, stderr=-3) as run:
        assert run.stdout is not None and run.stdout.readline() == "begun\n"
        (save,) = look(tmp_path)["saves"]
        worker = os.pidfd_open(save["worker_pid"])
        taken = [_descriptor(worker, int(fd)) for fd, target in node._links(save["worker_pid"]) if "socket:" in target]
        os.kill(save["worker_pid"], signal.SIGKILL)
        assert int(run.stdout.readline()) > STATE
        (save,) = look(tmp_path)["saves"]
        assert (save["phase"], save["worker_pid"]) == ("quarantined", None) and save["bytes_held"] >= STATE
        said = command("top", "--once", "--interval", 0.1, tmp_path, torch=False).out.splitlines()[0]
        assert said.startswith("0 saves in flight, ") and said.endswith("of it quarantined"), said
        for fd in (*taken, worker):
            os.close(fd)
        run.kill()


def _descriptor(pidfd: int, fd: int) -> int:
    """A copy of another process's descriptor."""
    got = ctypes.CDLL(None, use_errno=True).syscall(438, pidfd, fd, 0)
    if got < 0:
        pytest.skip(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    return int(got)
