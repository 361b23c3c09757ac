"""The program that compares what callers say of a fault: with one that hangs, and with ours, which does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


def test_a_fault_that_a_stock_caller_hangs_at_and_ours_reports(tmp_path: Path) -> None:
    pytest.importorskip("nvidia_resiliency_ext")
    command = [sys.executable, ROOT / "python/benchmarks/caller_faults.py", "--dir", tmp_path, "--callers",
               "mcore persistent;holdfast.megatron;holdfast.megatron synchronous", "--faults", "limit;foreign", "--wait", "5",
               "--json", tmp_path / "found.json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for fault in ("limit", "foreign"):
        assert ["ended" in rank for rank in found[fault]["mcore persistent"]] == [False, False], done.stdout
    assert done.stdout.count("hangs: nothing in 5 s") == 4
    for rank in found["limit"]["holdfast.megatron"] + found["limit"]["holdfast.megatron synchronous"]:
        error = rank["ended"]["error"]
        assert (error["ranks"], error["errno"], error["path"]) == ([1], "EFBIG", True), error
        assert "second/__1_0.distcp: File too large" in error["text"]
    assert "holdfast.megatron synchronous" not in found["foreign"]
    for rank in found["foreign"]["holdfast.megatron"]:
        assert (rank["ended"]["error"], rank["ended"]["note"]) == (None, "run")
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
