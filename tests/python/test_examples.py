"""The examples run as their README says, go on where they were, and save what can be loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import torch
from test_dcp_ranks import equal
from torch.distributed import TCPStore
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
import holdfast.dcp

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "python" / "examples"
LIMIT = 120.0


def command(example: str, directory: Path, steps: int, every: int) -> list[str]:
    return [str(EXAMPLES / example), "--dir", str(directory), "--steps", str(steps), "--every", str(every)]


def run(example: str, directory: Path, steps: int, every: int, ranks: int = 0) -> str:
    """What an example prints, started as its README says: under torchrun where it is told a number of ranks."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, *command(example, directory, steps, every)], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_again(example: str, directory: Path, steps: int, every: int, ranks: int = 0) -> str:
    """As `run`, in processes that have imported PyTorch. They meet as under torchrun: in a store of another process."""
    environment, count = dict(os.environ), max(1, ranks)
    if ranks:
        store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        environment = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
                       "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    started = [programs.Program(command(example, directory, steps, every), {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
               for rank in range(count)]  # fmt: skip
    said = [[text.decode() for text in one.communicate(LIMIT)] for one in started]
    assert [one.returncode for one in started] == [0] * count, said
    return "".join(out for out, _ in said)


def losses(output: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([0-9.]+)", output)}


def test_the_plain_example_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    straight = losses(run("train_plain.py", tmp_path / "straight", 12, 2))
    assert sorted(straight) == [2, 4, 6, 8, 10, 12]
    kept = holdfast.list_checkpoints(tmp_path / "straight")
    assert [(c["step"], holdfast.verify(c["path"])["verdict"]) for c in kept] == [(10, "sound"), (12, "sound")]
    run_again("train_plain.py", tmp_path / "halves", 6, 2)
    output = run_again("train_plain.py", tmp_path / "halves", 12, 2)
    assert f"resumed from {tmp_path / 'halves' / 'step-6'}" in output
    assert losses(output) == {step: loss for step, loss in straight.items() if step > 6}
    # Every entry, not only what the loss depends on: EMA weights, loader, random state, moments.
    ends = [holdfast.load(tmp_path / run_ / "step-12") for run_ in ("straight", "halves")]
    assert set(ends[0]) == {"model", "optimizer", "ema", "loader", "rng", "step"}
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_the_model_learns(tmp_path: Path) -> None:
    learned = losses(run_again("train_plain.py", tmp_path, 150, 50))
    # Guessing among 256 bytes costs 5.5; the first steps reach about 5.
    assert float(learned[150]) < 4.0, learned


def go_on(directory: Path, step: int, ranks: int) -> None:
    """Four more steps of the DCP example, from this step on."""
    output = run_again("train_dcp.py", directory, step + 4, 2, ranks)
    assert ("resumed from" in output) == (step > 0)
    assert step == 0 or f"resumed from {directory / f'step-{step}'}" in output
    assert sorted(p.name for p in directory.iterdir()) == sorted([f"step-{step + 2}", f"step-{step + 4}"])
    assert holdfast.dcp.verify(directory / f"step-{step + 4}")["verdict"] == "sound"


def test_the_dcp_example_goes_on_as_if_it_had_never_stopped_and_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Every entry, not only what the loss depends on: EMA weights, loaders, random state, moments."""
    run("train_dcp.py", tmp_path / "straight", 8, 2, ranks=2)
    go_on(tmp_path / "halves", 0, ranks=2)
    go_on(tmp_path / "halves", 4, ranks=2)
    whole = []
    for directory in ("straight", "halves"):
        dcp_to_torch_save(tmp_path / directory / "step-8", tmp_path / f"{directory}.pt")
        whole.append(torch.load(tmp_path / f"{directory}.pt"))
    assert {"model", "optimizer", "ema", "step", "loader.0", "loader.1", "rng.0", "rng.1"} == set(whole[0])
    assert whole[0]["ema"].keys() == whole[0]["model"].keys() - {"head.weight"}  # it is tokens.weight
    assert whole[0]["loader.1"]["step"] == 8
    equal(whole[0], whole[1])
    go_on(tmp_path / "halves", 8, ranks=1)
    go_on(tmp_path / "halves", 12, ranks=3)


@pytest.mark.parametrize("name", ["train_plain.py", "train_dcp.py", "gpt.py"])
def test_every_example_is_in_the_readme(name: str) -> None:
    assert f"`{name}`" in (EXAMPLES / "README.md").read_text()


def test_the_readme_names_no_other_file() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (EXAMPLES / "README.md").read_text()))
    assert named == {p.name for p in EXAMPLES.glob("*.py")}
