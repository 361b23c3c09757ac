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

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
}


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=300 if LONG else 25, deadline=None, derandomize=not LONG)
@given(seed=st.integers(0, 1 << 40))
def test_a_program_ends_with_a_status_and_a_reason(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    options, statuses = PROGRAMS[name]
    line = [text for text in _line(random.Random(seed), (), options) if "\0" not in text]
    done = subprocess.run(
        [program(name), *(os.fsencode(text) for text in line)], cwd=tmp_path_factory.mktemp("here"), capture_output=True,
        timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode in statuses, (line, done)
    assert done.returncode == 0 or done.stderr or done.stdout, line
    assert b"terminate called" not in done.stderr, (line, done.stderr)


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
