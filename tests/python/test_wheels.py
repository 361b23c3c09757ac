"""What a wheel promises, as far as the installed package shows it; and the scripts that make and rehearse wheels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import holdfast
from holdfast import _native

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=200, check=False,
                          **options)  # type: ignore[call-overload]


def test_the_extension_module_exports_its_initialization_alone() -> None:
    listed = run("nm", "-D", "--defined-only", "--format=just-symbols", _native.__file__)
    assert (listed.returncode, listed.stdout.split()) == (0, ["PyInit__native"]), listed.stderr


def test_there_is_one_version() -> None:
    (version,) = re.findall(r"^project\(holdfast VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)
    told = {importlib.metadata.version("holdfast"), holdfast.__version__}
    for name in ("holdfast", "verify-checkpoint", "holdfast-doctor"):
        told.add(run(Path(sysconfig.get_path("scripts")) / name, "--version").stdout.split()[-1])
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


@pytest.mark.parametrize("script", ["build-wheels.sh", "rehearse.sh"])
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


@pytest.mark.skipif("HOLDFAST_LONG" not in os.environ, reason="builds a wheel: set HOLDFAST_LONG=1")
def test_wheels_are_made_and_pass_their_audit(tmp_path: Path) -> None:
    done = subprocess.run([TOOLS / "build-wheels.sh", "--arch", "x86_64", "--python", sys.executable, "--out", tmp_path],
                          capture_output=True, text=True, timeout=7200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = tmp_path.glob("holdfast-*-manylinux_2_28_x86_64.whl")
    assert f"`{wheel.name}`" in done.stdout and "`PyInit__native`" in done.stdout
