"""`tools/gpu-check.sh` where there is no GPU: every step rehearses or says why not, and no figure is shown as one of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = "rehearsal (CPU)"
pytestmark = [pytest.mark.long, pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tools/gpu-check.sh itself")]


def check(out: Path, *options: str, **environment: str) -> tuple[int, list[dict[str, Any]], str]:
    """Its exit status, rows and table."""
    scratch = out / "scratch"
    scratch.mkdir(parents=True)
    command = [ROOT / "tools/gpu-check.sh", "--python", sys.executable, "--out", out, "--scratch", scratch, "--rehearse", *options]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=1200, env={**os.environ, **environment})
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert json.loads((out / "results.json").read_text())["rows"] == rows
    assert list(scratch.iterdir()) == []
    log = (out / "log.txt").read_text()
    print(done.stdout, log, done.stderr)
    return done.returncode, rows, (out / "table.md").read_text()


def test_each_step_rehearses_or_says_why_not(tmp_path: Path) -> None:
    status, rows, table = check(tmp_path)
    assert status == 0
    assert {row["step"] for row in rows} == {
        "C++ tests", "late copies", "dirty data", "callers", "forks", "lightning", "load", "sharded",
    }  # fmt: skip
    assert {row["device"] for row in rows} == {REHEARSAL}
    assert all(row["result"] in ("ok", "ran", "measured") or row["result"].startswith("skipped: ") for row in rows)
    assert not any(row["unit"] for row in rows)
    assert "## Rehearsal on the CPU: no figure of a GPU" in table
    outcomes = {row["what"]: row for row in rows}
    assert outcomes["elements of the next step, queued right behind the call"]["value"] == 0
    assert outcomes["holdfast.load: all values are those saved"]["value"] is True
    assert outcomes["pinned memory in a forked child: bytes changed by a later copy"]["value"] == "2097152 of 2097152"


def test_a_step_that_fails_ends_no_other(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "holdfast.py").write_text("raise RuntimeError('broken on purpose')\n")
    status, rows, table = check(tmp_path / "out", "--only", "late_copies,forks", PYTHONPATH=str(broken))
    assert status == 1
    assert [row["result"] for row in rows if row["step"] == "late_copies"] == ["FAILED: exit status 1; see log.txt"]
    killed = [row for row in rows if "trainer killed in a copy" in row["what"]]
    assert killed and all(row["result"].startswith("FAILED") for row in killed)
    assert [row["result"] for row in rows if row["what"].startswith("end of a forked child")] == ["measured", "measured"]
    assert "broken" not in table.splitlines()[0]


def test_a_python_without_pytorch_is_told_what_it_lacks(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    venv.create(plain, with_pip=False)
    status, rows, table = check(tmp_path / "out", "--python", str(plain / "bin/python"))
    assert status == 0
    lacking = [row["step"] for row in rows if row["result"] == "skipped: no torch"]
    assert lacking[:2] == ["late_copies", "dirty_data"] and lacking.count("forks") == 4
    assert not any(row["result"].startswith("FAILED") for row in rows)
    assert "torch none" in table.splitlines()[0]
    assert [row["result"] for row in rows if row["what"].startswith("end of a forked child")] == ["measured", "measured"]


PEERS = """
import importlib.util, sys
from pathlib import Path
sys.path.insert(0, "{gpu_check}")
import report, sharded
here = Path("{here}")
sharded.PEER_TESTS = here / "peers"
of = report.Report("sharded", here / "rows", True, "a GPU", here)
def part(what):
    with of.part(what):
        sharded.peer_tests(of)
part("two tests")
(sharded.PEER_TESTS / "test_two.py").write_text("import no_such_package")
part("broken")
(sharded.PEER_TESTS / "test_two.py").unlink()
part("none")
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *of: None if name == "pytest" else find(name, *of)
part("no pytest")
"""


def test_tests_that_cannot_run_are_told_apart_from_those_that_fail(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "test_two.py").write_text("def test_one(): pass\ndef test_other(): assert False\n")
    program = PEERS.format(gpu_check=ROOT / "tools/gpu_check", here=tmp_path)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=300)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["value"], row["result"]) for row in rows] == [
        ("1 of 2", "measured"),
        ("0 of 1", "measured"),
        ("", "FAILED: RuntimeError: pytest has run no test; it ended with 5"),
        ("", "skipped: no pytest (gpu-check.sh --pack takes it along)"),
    ]
