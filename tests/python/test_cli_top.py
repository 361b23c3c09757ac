"""``holdfast top``: real saves of other processes, seen from outside."""

from __future__ import annotations

import contextlib
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
from typing import Any

import pytest
from command_line import Run, refused
from command_line import holdfast as command

from holdfast import _recent

MIB = 1 << 20
STATE = 32 * MIB

# For each line of the test: gives the save under way up, and begins one with this launcher and so many ranks.
_TRAINER = f"""
import json, os, sys, torch, holdfast
holdfast.configure(bytes_per_second_max=1 * {MIB})
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


def test_without_a_save_it_says_so(tmp_path: Path) -> None:
    assert command("top", "--once", "--interval", 0.1, tmp_path, torch=False) == Run(0, "no save in flight\n", "")
    refused(command("top", tmp_path / "none", torch=False), "there is no such directory")


def _typed(command_line: list[str], key: bytes, until: str, columns: int) -> tuple[int, str]:
    """Runs a program on a terminal, types a key when `until` is on it: status and all that it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        # Not the C library's environment, in which readline has put the size of the tests' own terminal.
        given = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
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


def test_without_rich_the_screen_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['rich.console'] = None; from holdfast.cli import main; sys.exit(main())"
    status, written = _typed([sys.executable, "-c", program, "top", str(tmp_path)], b"q", "never", 80)
    assert status == 2 and "pip install 'holdfast[top]'" in written


def test_outcomes_that_are_being_written_are_not_read(tmp_path: Path) -> None:
    content = {"pid": 1, "errors": []}
    text = json.dumps(content).encode()
    whole = b"%08x %s\n" % (zlib.crc32(text), text)
    path = tmp_path / "outcomes"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut] + b"x" * (len(whole) - cut))
        with path.open("rb") as file:
            assert _recent.read(file.fileno()) == (content if cut == len(whole) else None), cut
    path.write_bytes(whole + b"the rest of a longer one")
    with path.open("rb") as file:
        assert _recent.read(file.fileno()) == content
