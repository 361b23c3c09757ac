"""The example `train_megatron.py`: Megatron's GPT on two ranks, saved by `megatron.training`, killed and resumed."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import holdfast.dcp

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "python" / "examples"
TRACKER = "latest_checkpointed_iteration.txt"
STEPS, EVERY = 10, 2
INTERRUPTED = 6


def newest(directory: Path) -> Path | None:
    """The checkpoint that the tracker file names."""
    tracker = directory / TRACKER
    named = tracker.read_text() if tracker.exists() else ""
    return directory / f"iter_{int(named):07d}" if named else None


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("iter_*"))


def verdict(checkpoint: Path) -> str:
    return holdfast.dcp.verify(checkpoint)["verdict"]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of all parameters, whole, as PyTorch reads them."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


class Training:
    """A run of the example.

    Attributes:
        losses: by step, with all digits.
        verdicts: of the checkpoints that the tracker named, each at the moment when it did.
        output: all lines.
    """

    def __init__(self, directory: Path, *, ranks: int = 2, kill_at: str = "") -> None:
        self.losses: dict[int, str] = {}
        self.verdicts: dict[str, str] = {}
        self.output = ""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        example = [str(EXAMPLES / "train_megatron.py"), f"--dir={directory}", f"--steps={STEPS}", f"--every={EVERY}"]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        with subprocess.Popen([*launch, *example], stdout=pipe, stderr=both, text=True) as launcher:
            for line in launcher.stdout or ():
                self.output += line
                if kill_at and kill_at in line:
                    kill_all(launcher)
                    break
                self._read(line, newest(directory))
        assert kill_at or launcher.returncode == 0, self.output
        assert kill_at in self.output

    def _read(self, line: str, named: Path | None) -> None:
        if found := re.search(r"step (\d+): loss ([0-9.]+)", line):
            self.losses[int(found[1])] = found[2]
        if named is not None and named.name not in self.verdicts:
            self.verdicts[named.name] = verdict(named)

    def loaded(self, directory: Path, step: int) -> bool:
        """Whether Megatron loaded the checkpoint of that step."""
        said = rf"successfully loaded checkpoint from {re.escape(str(directory))} .* at iteration {step}\b"
        return re.search(said, self.output) is not None


def kill_all(launcher: subprocess.Popen[str]) -> None:
    """Ends the launcher, the ranks and their workers by SIGKILL."""
    process = psutil.Process(launcher.pid)
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a worker of a save that has ended
            each.kill()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Training]]:
    """A training that nothing interrupts."""
    directory = tmp_path_factory.mktemp("straight")
    yield directory, Training(directory)


def test_the_tracker_names_only_checkpoints_that_are_sound(straight: tuple[Path, Training]) -> None:
    directory, training = straight
    assert sorted(training.losses) == list(range(1, STEPS + 1))
    assert checkpoints(directory) == [f"iter_{step:07d}" for step in range(EVERY, STEPS + 1, EVERY)]
    # A busy machine looks too late at some.
    assert set(training.verdicts.values()) == {"sound"}
    assert {verdict(directory / name) for name in checkpoints(directory)} == {"sound"}


def test_a_killed_training_goes_on_as_if_it_had_never_stopped(straight: tuple[Path, Training], tmp_path: Path) -> None:
    """SIGKILL when a save is under way; a tokenizer lies where the resumed training saves again."""
    directory, uninterrupted = straight
    Training(tmp_path, kill_at=f"scheduled an async checkpoint save at iteration {INTERRUPTED:7d}")
    resumed_from = newest(tmp_path)
    assert resumed_from is not None and resumed_from.name in checkpoints(directory)
    assert verdict(resumed_from) == "sound"
    others = [place / "tokenizer.json" for place in (tmp_path, tmp_path / f"iter_{INTERRUPTED:07d}")]
    for other in others:
        other.write_text("{}")

    resumed = Training(tmp_path)
    first = int(resumed_from.name.removeprefix("iter_"))
    assert resumed.loaded(tmp_path, first)
    assert resumed.losses == {step: loss for step, loss in uninterrupted.losses.items() if step > first}
    assert checkpoints(tmp_path) == checkpoints(directory)
    assert {verdict(tmp_path / name) for name in checkpoints(tmp_path)} == {"sound"}
    ends = [tensors(place / checkpoints(directory)[-1]) for place in (directory, tmp_path)]
    assert any("exp_avg_sq" in name for name in ends[0])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
    assert [other.read_text() for other in others] == ["{}", "{}"]
    assert all((tmp_path / name / "metadata.json").exists() for name in checkpoints(tmp_path))


def test_another_number_of_ranks_goes_on(straight: tuple[Path, Training], tmp_path: Path) -> None:
    directory, uninterrupted = straight
    shutil.copytree(directory / f"iter_{INTERRUPTED:07d}", tmp_path / f"iter_{INTERRUPTED:07d}")
    (tmp_path / TRACKER).write_text(str(INTERRUPTED))
    alone = Training(tmp_path, ranks=1)
    assert alone.loaded(tmp_path, INTERRUPTED)
    assert sorted(alone.losses) == list(range(INTERRUPTED + 1, STEPS + 1))
    # Megatron leaves the random state of other ranks, so that dropout differs. The first loss of a model is 5.6.
    for step, loss in alone.losses.items():
        assert float(loss) == pytest.approx(float(uninterrupted.losses[step]), abs=0.05)
    assert {verdict(tmp_path / name) for name in checkpoints(tmp_path)} == {"sound"}
