"""What a wheel promises, as far as the installed package shows it; and the scripts that make and rehearse wheels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast import _native

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200, check=False,
                          **options)  # type: ignore[call-overload]


def test_the_extension_module_exports_its_initialization_alone() -> None:
    listed = run("nm", "-D", "-g", "--defined-only", "--format=just-symbols", _native.__file__)
    assert (listed.returncode, listed.stdout.split()) == (0, ["PyInit__native"]), listed.stderr


def test_there_is_one_version(tmp_path: Path) -> None:
    (version,) = re.findall(r"^project\(holdfast VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    told = {importlib.metadata.version("holdfast"), holdfast.__version__}
    for name in ("holdfast", "verify-checkpoint", "holdfast-doctor", "integrity-fuzz"):
        told.add(run(Path(sysconfig.get_path("scripts")) / name, "--version").stdout.split()[-1])
    for name in ("holdfast-worker", "holdfast-demo"):
        said = run(Path(holdfast.__file__).parent / "bin" / name, "--version").stdout
        told.add(said.removeprefix(f"{name} ").split(",")[0].strip())
    holdfast.save({"x": torch.zeros(3)}, tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "rank-00000-of-00001.manifest.json").read_text())
    told.add(manifest["writer"].removeprefix("holdfast "))
    assert told == {version}


_BESIDE_ANOTHER_ABSEIL = """
import ctypes, importlib, sys
for foreign in sys.argv[2:]:
    if foreign.endswith(".so.20220623"):
        ctypes.CDLL(foreign, ctypes.RTLD_GLOBAL)
    else:
        importlib.import_module(foreign)
import torch, holdfast
state = {"w": torch.arange(1000.0)}
holdfast.save_async(state, sys.argv[1]).wait(60)
state["w"].zero_()
holdfast.load(sys.argv[1], into=state)
assert state["w"][-1] == 999 and holdfast.verify(sys.argv[1])["verdict"] == "sound"
try:
    holdfast.load(sys.argv[1] + "-nowhere")
except holdfast.Error as error:
    print(error.code)
"""


@pytest.mark.parametrize("foreign", [["grpc"], ["libabsl_status.so.20220623", "libabsl_time.so.20220623"]], ids=["grpc", "shared"])
def test_a_process_may_have_another_abseil(foreign: list[str], tmp_path: Path) -> None:
    for one in foreign:
        if one == "grpc" and importlib.util.find_spec(one) is None:
            pytest.skip("grpcio is not installed")
        elif one != "grpc":
            try:
                ctypes.CDLL(one)
            except OSError as error:
                pytest.skip(f"no shared Abseil here: {error}")
    done = run(sys.executable, "-c", _BESIDE_ANOTHER_ABSEIL, tmp_path / "s", *foreign)
    assert (done.returncode, done.stdout) == (0, "NOT_FOUND\n"), done.stderr


@pytest.mark.parametrize("script", ["build-wheels.sh", "rehearse.sh", "test-aarch64.sh", "test-wheels.sh"])
def test_a_script_says_what_it_does_and_refuses_a_wrong_line(script: str) -> None:
    told = run(TOOLS / script, "--help")
    assert told.returncode == 0 and f"tools/{script} [--" in told.stdout
    assert "set -euo" not in told.stdout
    wrong = run(TOOLS / script, "--no-such-option", "x")
    assert wrong.returncode == 1 and "--help" in wrong.stderr


def test_wheels_are_refused_for_what_is_not_there(tmp_path: Path) -> None:
    assert "x86_64 and aarch64" in run(TOOLS / "build-wheels.sh", "--arch", "sparc").stderr
    assert "no such interpreter" in run(TOOLS / "build-wheels.sh", "--python", tmp_path / "python").stderr
    if os.geteuid() == 0:
        assert "no wheels of holdfast" in run(TOOLS / "rehearse.sh", "--wheels", tmp_path).stderr


def test_the_demo_is_packed_and_runs(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    demo = [Path(sysconfig.get_path("scripts")) / "holdfast", "demo", tmp_path / "model.safetensors", "--dir", tmp_path / "run", "--saves", 2]
    done = run(*demo)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(holdfast.list_checkpoints(tmp_path / "run")) == 2
    caught = run(*demo, "--replace", "--mutate-sealed")
    assert caught.returncode == 1, caught.stdout + caught.stderr


def test_the_quickstart_leaves_folders_of_others_alone(tmp_path: Path) -> None:
    own = tmp_path / "run.202611"
    own.mkdir()
    safetensors.torch.save_file({"w": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    # It takes the demo of the package that is installed here, in the place of one from a wheel.
    where = tmp_path / "holdfast" / "tools"
    shutil.copytree(TOOLS, where)
    python = where.parent / "build" / "venv-quickstart" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for _ in range(2):
        done = run(where / "quickstart.sh", tmp_path / "model.safetensors", "--saves", 1,
                   env={**os.environ, "HOLDFAST_WHEELS": str(tmp_path), "HOLDFAST_DEMO_DIR": str(tmp_path)})
        assert done.returncode == 0, done.stdout + done.stderr
        assert own.exists() and len(list(tmp_path.glob("run.*"))) == 2


def test_the_table_of_aarch64_counts_and_tells_why_tests_were_skipped(tmp_path: Path) -> None:
    output = "[       OK ] A.B (1 ms)\na.cc:1: Skipped\nno io_uring here: Operation not permitted\n[  SKIPPED ] A.C (1 ms)\n"
    case = f'<testsuite><testcase name="contract/a_test" status="run"><system-out>{output}</system-out></testcase></testsuite>'
    (tmp_path / "65536.xml").write_text(case)
    command = [sys.executable, "-B", TOOLS / "wheels" / "aarch64_table.py", "--labels", "contract", tmp_path, 65536]
    (tmp_path / "saves").write_text("65536 spawn aarch64 sound\n65536 spawn x86_64 sound\n")
    told = run(*command)
    assert told.returncode == 0, told.stderr
    assert "| 64 KiB | `contract` | 1 | 0 | 1 | 1 of 1 |" in told.stdout
    assert "| 1 | no io_uring here: Operation not permitted |" in told.stdout
    (tmp_path / "saves").write_text("65536 spawn aarch64 sound\n65536 spawn x86_64 unsound\n")
    assert run(*command).returncode == 1


def test_the_first_save_of_the_rehearsal_runs(tmp_path: Path) -> None:
    done = run(sys.executable, TOOLS / "rehearse" / "first_save.py", tmp_path, 2, 1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ranks"] == 2 and result["holdfast"] == holdfast.__version__
    told = ["io_uring cannot be used, files are written by pwrite (io_uring_setup: EPERM): allow it"]
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps({"system": "here", "situation": "user", "install": 1.5, **result, "told": told}) + "\n")
    table = run(sys.executable, "-B", TOOLS / "rehearse" / "table.py", results).stdout
    assert "| `user` |" in table and "| pwrite | 1.5 s |" in table


def test_the_table_of_rehearsals_keeps_the_rows_of_other_systems_and_situations() -> None:
    table = runpy.run_path(str(TOOLS / "rehearse" / "table.py"))
    result = {"system": "old", "libc": "glibc 2.31", "python": "3.11.2", "situation": "user", "engine": "pwrite", "pages": "small",
              "direct_io": "proven", "told": [], "install": 0, "seconds": 1.0}
    former = [f"| {name}, Python 3.9 | `{how}` | former |" for name, how in (("old", "user"), ("old", "one_gib"), ("older", "user"))]
    page = "\n".join(["before", table["BEGIN"], "| head |", "| --- |", *former, table["END"], "after"])
    lines = table["written"](page, [result]).splitlines()
    assert lines[4:7] == [*former[1:], table["row"](result)] and "| old, glibc 2.31, Python 3.11.2 | `user` |" in lines[6]
    assert [lines[0], *lines[7:]] == ["before", table["END"], "after"]


def test_an_interpreter_that_is_not_there_is_not_replaced_by_another(tmp_path: Path) -> None:
    done = run(TOOLS / "venv.sh", env={**os.environ, "HOLDFAST_PYTHON": "python3.99", "HOLDFAST_VENV": str(tmp_path / "venv"),
                                       "HOLDFAST_WHEELS": str(tmp_path)})  # fmt: skip
    assert done.returncode != 0 and "python3.99" in done.stderr and not (tmp_path / "venv").exists()


@pytest.mark.skipif("HOLDFAST_LONG" not in os.environ, reason="builds a wheel: set HOLDFAST_LONG=1")
def test_wheels_are_made_and_pass_their_audit(tmp_path: Path) -> None:
    done = subprocess.run([TOOLS / "build-wheels.sh", "--arch", "x86_64", "--python", sys.executable, "--out", tmp_path],
                          capture_output=True, text=True, timeout=7200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = tmp_path.glob("holdfast-*-manylinux_2_28_x86_64.whl")
    assert f"`{wheel.name}`" in done.stdout and "`PyInit__native`" in done.stdout
