"""Random command lines: each ends with a documented status and says why, without a trace, a signal or a hang."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import subprocess
from collections.abc import Iterator

import programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from holdfast import cli
from holdfast._programs import program
from holdfast.cli import draining, watching

LONG = bool(os.environ.get("HOLDFAST_LONG"))

NUMBERS = ("0", "1", "-1", "3", "0.5", "1e3", "nan", "inf", "-inf", "1_0", "٣", "0x10", "1" * 30, "9" * 5000, "", " ", "+2", "2K", "1G")
TEXTS = ("", "no-such-directory", ".", "x/../y", "--", "-", "-x", "\n", "\x1b[2J", "é", "\udcff", "a" * 5000, "%s%n", "--json=1")

COMMANDS = ("ls", "show", "diff", "recover", "convert", "top", "drain", "", "no-command", "--version", "--help")
OPTIONS = ("--json", "--help", "--rank", "--step", "--to", "--keep-last", "--keep-every", "--keep-source", "--rate",
           "--give-up", "--interval", "--behind", "--tensors-only", "-q", "--all", "--no-such-option")  # fmt: skip
# Neither runs until it is ended, nor uses the machine for long.
ENDING = {"top": ("--once", "--interval", "0.1")}


@pytest.fixture(autouse=True, scope="module")
def interrupts() -> Iterator[None]:
    """The command gives Ctrl-C back to the system."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def _line(choose: random.Random, commands: tuple[str, ...], options: tuple[str, ...]) -> list[str]:
    line = [choose.choice(commands)] if commands else []
    for _ in range(choose.randrange(5)):
        kind = choose.randrange(3)
        line.append(choose.choice((options, NUMBERS, TEXTS)[kind]))
        if kind == 0 and choose.random() < 0.5:
            line.append(choose.choice(NUMBERS))
    return line


@settings(max_examples=2000 if LONG else 60, deadline=None, derandomize=not LONG)
@given(seed=st.integers(0, 1 << 40))
def test_the_command_ends_with_a_status_and_a_reason(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    line = _line(random.Random(seed), COMMANDS, OPTIONS)
    line += ENDING.get(line[0], ())
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        patch.chdir(tmp_path_factory.mktemp("here"))
        status = cli.main(line)
    assert status in (0, 1, 2), (line, status)
    assert status != 2 or error.getvalue().strip(), line
    assert "Traceback" not in error.getvalue(), (line, error.getvalue())


# The options of each program that takes no long time, and its statuses for a wrong command line and for trouble.
PROGRAMS = {
    "verify-checkpoint": (("--json", "-q", "--threads", "--faults-max", "--engine", "--buffered", "--adopt", "--help"), (0, 1, 2, 3, 64)),
    "holdfast-doctor": (("--json", "--help", "--quick", "--bytes", "--no-such"), (0, 1, 2, 64)),
    "holdfast-worker": (("--version", "--help", "3"), (0, 64)),
    "holdfast-demo": (("--saves", "--steps-between", "--launcher", "--engine", "--arena-bytes", "--threads", "--keep-last", "--read-back",
                       "--replace", "--json", "--mutate-sealed", "--dir", "--help"), (0, 1, 3, 64)),
}  # fmt: skip
SMALL = {"holdfast-demo": ("state.safetensors",)}  # without it, there are 1.4 GiB


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=300 if LONG else 25, deadline=None, derandomize=not LONG)
@given(seed=st.integers(0, 1 << 40))
def test_a_program_ends_with_a_status_and_a_reason(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    options, statuses = PROGRAMS[name]
    line = [*_line(random.Random(seed), (), options), *SMALL.get(name, ())]
    here = tmp_path_factory.mktemp("here")
    save_file({"t": torch.ones(1000)}, here / "state.safetensors")
    done = subprocess.run(
        [program(name), *(os.fsencode(text) for text in line)], cwd=here, capture_output=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode in statuses, (line, done)
    assert done.returncode == 0 or done.stderr or done.stdout, line
    assert b"terminate called" not in done.stderr, (line, done.stderr)


FUZZ = ("--json", "--help", "--dir", "--rounds", "--time", "--seed", "--first", "--report", "--resume", "--jobs", "--ranks",
        "--tensors", "--bytes", "--doors", "--events", "--engines", "--places", "--no-mount", "--replay", "--repeat", "--shrink", "--savers",
        "--power-cuts", "--cuts", "--recorder", "--bad-disks", "--resets", "--disk", "--witness", "--after", "--scripts",
        "--per-script", "--pairs")  # fmt: skip
ONE_ROUND = ("--rounds", "1", "--jobs", "1", "--tensors", "10", "--bytes", "1", "--no-mount", "--doors", "save_file")


@settings(max_examples=500 if LONG else 15, deadline=None, derandomize=not LONG)
@given(seed=st.integers(0, 1 << 40))
def test_integrity_fuzz_ends_with_a_status_and_a_reason(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    line = [*_line(random.Random(seed), (), FUZZ), *ONE_ROUND]
    done = programs.run("-m", "holdfast.integrity", *line, cwd=str(tmp_path_factory.mktemp("here")), timeout=60)
    assert done.returncode in (0, 2), (line, done)
    assert done.returncode == 0 or done.stderr.strip(), line
    assert "Traceback" not in done.stderr, (line, done.stderr)


@settings(max_examples=2000 if LONG else 200, deadline=None)
@given(text=st.one_of(st.sampled_from(NUMBERS), st.text(max_size=12), st.floats().map(repr), st.integers().map(str)))
def test_numbers_are_in_their_range(text: str) -> None:
    # `Drain` compares the rate with its range.
    for parse, holds in (
        (draining._rate, lambda rate: isinstance(rate, float)),
        (draining._count, lambda count: 0 <= count < 1 << 64),
        (watching._seconds, lambda seconds: 0.1 <= seconds <= 3600),
    ):
        with contextlib.suppress(argparse.ArgumentTypeError):
            assert holds(parse(text)), (parse.__name__, text)


@pytest.mark.planted("divides_by_zero")
def test_a_command_that_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_seconds", lambda given: 1 / 0)
    with contextlib.redirect_stdout(io.StringIO()), pytest.raises(ZeroDivisionError):
        cli.main(["top", "--once", "--interval", "1"])
