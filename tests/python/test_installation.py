"""What the installed package brings besides its functions: commands, a use without PyTorch, and the benchmarks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import dcp_ranks
import pytest
import torch

import holdfast

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "python" / "benchmarks"


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200, check=False,
                          **options)  # type: ignore[call-overload]


def command(name: str) -> Path:
    """A command as the installation made it, of this interpreter's environment."""
    return Path(sysconfig.get_path("scripts")) / name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("installed") / "step-3"
    holdfast.save_async({"w": torch.ones(1000)}, path, step=3).wait(60)
    return path


def test_the_installation_names_its_commands() -> None:
    scripts = {e.name for e in importlib.metadata.distribution("holdfast").entry_points if e.group == "console_scripts"}
    assert scripts == {"holdfast", "verify-checkpoint", "holdfast-doctor", "integrity-fuzz"}


@pytest.mark.parametrize("name", ["verify-checkpoint", "holdfast-doctor"])
def test_a_command_says_what_it_does_and_refuses_a_wrong_line(name: str) -> None:
    told = run(command(name), "--help")
    assert told.returncode == 0, told.stderr
    assert f"Usage: {name} " in told.stdout and "Exit status:" in told.stdout
    assert run(command(name), "--version").stdout.split()[-1] == holdfast.__version__
    wrong = run(command(name), "--no-such-option")
    assert (wrong.returncode, wrong.stdout) == (64, ""), wrong


def test_verify_checkpoint_tells_sound_from_corrupt_and_incomplete(checkpoint: Path, tmp_path: Path) -> None:
    assert run(command("verify-checkpoint"), checkpoint).returncode == 0
    data = (checkpoint / "model-00000-of-00001.safetensors").read_bytes()
    broken = tmp_path / "broken"
    holdfast.save_async({"w": torch.ones(1000)}, broken).wait(60)
    file = broken / "model-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    corrupt = run(command("verify-checkpoint"), "--json", broken)
    assert corrupt.returncode == 1, corrupt
    (told,) = json.loads(corrupt.stdout)["paths"]
    assert (told["verdict"], told["faults"][0]["tensor"]) == ("corrupt", "w")
    file.unlink()
    assert run(command("verify-checkpoint"), broken).returncode == 2
    assert run(command("verify-checkpoint"), tmp_path / "nowhere").returncode == 3
    assert (checkpoint / "model-00000-of-00001.safetensors").read_bytes() == data


def test_holdfast_doctor_finds_the_worker_that_was_installed(tmp_path: Path) -> None:
    told = run(command("holdfast-doctor"), "--quick", "--json", tmp_path)
    assert told.returncode == 0, told.stdout
    found = json.loads(told.stdout)
    assert found["worker_program_found"]
    assert Path(found["worker_program"]) == Path(holdfast.__file__).parent / "bin" / "holdfast-worker"
    assert run(command("holdfast-doctor"), "--quick", tmp_path / "nowhere").returncode == 1


_WITHOUT_TORCH = """
import importlib.abc, json, sys

class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
import holdfast

said = {}
for name in (*holdfast.__all__, "open", "dcp", "megatron", "nvrx", "observe", "snapshots", "torchtitan"):
    try:
        getattr(holdfast, name)
    except ModuleNotFoundError as error:
        said[name] = str(error)
try:
    holdfast.lightning.CheckpointIO
except ModuleNotFoundError as error:
    said["lightning.CheckpointIO"] = str(error)
report = holdfast.verify(sys.argv[1])
found = holdfast.find_newest(sys.argv[1] + "/..")
print(json.dumps([said, report["verdict"], found["step"], len(holdfast.recover(sys.argv[1] + "/..")["complete"])]))
"""


def test_without_torch_it_is_imported_and_says_what_needs_it(checkpoint: Path) -> None:
    done = run(sys.executable, "-c", _WITHOUT_TORCH, checkpoint)
    assert done.returncode == 0, done.stderr
    said, *rest = json.loads(done.stdout)
    assert rest == ["sound", 3, 1]
    needs = {
        "Checkpoint", "Checkpointer", "Save", "dcp", "flush", "lightning.CheckpointIO", "load", "megatron", "nvrx", "open", "remove_file", "save",
        "save_async", "save_file", "torchtitan",
    }  # fmt: skip
    assert said == {name: f"holdfast.{name} needs PyTorch: install torch" for name in needs}


_MODULES = """
import inspect, sys
import holdfast

for name in ("dcp", "events", "lightning", "megatron", "nvrx", "observe", "snapshots"):
    assert getattr(holdfast, name) is sys.modules[f"holdfast.{name}"], name
assert callable(holdfast.nvrx.install) and callable(holdfast.megatron.install)
try:
    assert holdfast.torchtitan.CheckpointManager
except ModuleNotFoundError as error:
    assert "holdfast.torchtitan needs torchtitan" in str(error), error
assert {"megatron", "nvrx"} <= {name for name, _ in inspect.getmembers(holdfast)}
"""


def test_after_an_import_of_the_package_its_modules_are_attributes() -> None:
    done = run(sys.executable, "-c", _MODULES)
    assert done.returncode == 0, done.stderr


def _main(program: str, arguments: list[str], output: str) -> None:
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(BENCHMARKS))
    os.environ.update(OMP_NUM_THREADS="1", MASTER_PORT="0")  # any that is free
    with open(output, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        runpy.run_path(program, run_name="__main__")


def benchmark(name: str, output: Path, *arguments: object) -> str:
    """What a benchmark prints, in a process that need not import PyTorch first."""
    told = [str(a) for a in arguments]
    process = dcp_ranks.context.Process(target=_main, args=(str(BENCHMARKS / name), told, str(output)))
    process.start()
    process.join(200)
    assert process.exitcode == 0, (process.exitcode, output.read_text())
    return output.read_text()


def test_the_benchmark_of_the_trainers_cost_runs_and_finds_the_bytes_right(tmp_path: Path) -> None:
    figures, disk = tmp_path / "figures.json", tmp_path / "disk"
    disk.mkdir()
    printed = benchmark("trainer_cost.py", tmp_path / "printed", "--dir", disk, "--bytes", "16MiB", "--rounds", 1,
                        "--window", 0.2, "--ways", "holdfast;holdfast.dcp", "--json", figures)
    ways = json.loads(figures.read_text())["ways"]
    assert set(ways) == {"holdfast", "holdfast.dcp"}
    for way, row in ways.items():
        assert row["sound"], way
        assert row["durable"]["median"] > 0, way
        assert f"| {way} |" in printed
    assert os.listdir(disk) == []


def test_the_benchmark_of_loading_runs(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    printed = benchmark("load_memory.py", tmp_path / "printed", "--dir", disk, "--bytes", "16MiB", "--rounds", 1)
    figures = json.loads(printed)
    assert figures["bytes"] == 16 * MIB
    assert figures["load.ratio_to_raw"] > 0 and figures["load.seconds"] > 0
    assert os.listdir(disk) == []
