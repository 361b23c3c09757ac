"""Line coverage: processes that are forked, leave by _exit or are killed count, and the table adds up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
int Forked(int x) { return x + 1; }
int Killed(int x) { return x + 2; }
int Never(int x) { return x + 3; }
int main(int argc, char**) {
  if (fork() == 0) { Forked(argc); _exit(0); }
  if (fork() == 0) { Killed(argc); kill(getpid(), SIGKILL); }
  wait(nullptr);
  wait(nullptr);
  return argc > 5 ? Never(argc) : 0;
}
"""


def _flags() -> list[str]:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    made = next(p for p in presets if p["name"] == "coverage")
    flags: str = made["cacheVariables"]["CMAKE_CXX_FLAGS_DEBUG"]
    assert flags in (ROOT / "tools/coverage.sh").read_text()
    return flags.split()


@pytest.mark.skipif(not all(map(shutil.which, ("clang++-14", "llvm-cov-14", "llvm-profdata-14"))), reason="no clang 14")
def test_forked_and_killed_processes_count(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, env=env).stdout

    env = {**os.environ, "LLVM_PROFILE_FILE": str(tmp_path / "%m%c.profraw")}
    (tmp_path / "a.cc").write_text(PROGRAM)
    run("clang++-14", *_flags(), "a.cc", "-o", "a")
    for _ in range(2):
        run("./a")
    (raw,) = tmp_path.glob("*.profraw")  # both runs count in one file
    run("llvm-profdata-14", "merge", "-o", "all", str(raw))
    text = run("llvm-cov-14", "show", "a", "-instr-profile=all")
    counts = {line.split("|")[2].split("(")[0].split()[-1]: line.split("|")[1].strip()
              for line in text.splitlines() if "(int x)" in line}  # fmt: skip
    assert counts == {"Forked": "2", "Killed": "2", "Never": "0"}


@pytest.mark.parametrize(("least", "status"), [("0", 0), ("70", 0), ("80", 1)])
def test_the_table_counts_the_runtime_alone(least: str, status: int, tmp_path: Path) -> None:
    def file(name: str, count: int, covered: int) -> dict[str, object]:
        return {"filename": str(tmp_path / name), "summary": {"lines": {"count": count, "covered": covered}}}

    files = [file("runtime/sys/a.cc", 10, 9), file("runtime/sys/b.cc", 10, 5), file("build/coverage/../../io_uring/q.cc", 20, 16), file("tests/t.cc", 99, 0)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/coverage_table.py"), str(tmp_path), least],
        input=json.dumps({"data": [{"files": files}]}), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status
    assert done.stdout.splitlines()[2:] == [
        "| io_uring | 20 | 16 | 80.0 |", "| runtime/sys | 20 | 14 | 70.0 |", "| all | 40 | 30 | 75.0 |"
    ]  # fmt: skip
