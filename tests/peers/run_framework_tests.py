"""Runs a framework's own checkpoint tests with Holdfast installed, on gloo ranks of this machine.

    build/venv-frameworks/bin/python tests/peers/run_framework_tests.py CHECKOUT [FILE...] [--report docs/peer-tests.md]

CHECKOUT is one of Megatron-LM (eight ranks) or of nvidia-resiliency-ext (two); its tests run against the package that is
installed. A test has passed if it has on all ranks, and every save in it was proved when it was committed. One that fails
without Holdfast, too, is impossible here. Exit status 0 if none failed. With --stock nothing is installed: what the tests do
by themselves.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest_runs
from pytest_runs import Outcome

# Of Megatron-LM.
FOLDER = "tests/unit_tests/dist_checkpointing"
FILES = (
    "test_async_save.py",
    "test_torch_dist.py",
    "test_integrity.py",
    "test_fully_parallel.py",
    "test_serialization.py",
    "test_nonpersistent.py",
    "test_global_metadata_reuse.py",
    "test_local.py",
    "test_strict.py",
    "test_replication.py",
)
# Of nvidia-resiliency-ext: local checkpoints, for which no manifest of a directory counts.
NVRX_FOLDER = "tests/checkpointing/unit"
NVRX_FILES = ("test_basic_local.py", "test_cleanup.py")
# Parts of names of tests, and why they fail here.
IMPOSSIBLE = {
    "test_get_async_strategy_no_nvrx_installed": "wants an error where nvidia-resiliency-ext is missing; here it may be",
    "test_get_async_strategy_missing_nvrx_cached_metadata_reader": "looks for stock classes where nvidia-resiliency-ext is missing",
}
# Parts of names of tests that pass with a change (megatron_no_gpu), and the change.
ADAPTED = {
    "test_basic_save_load_scenarios": "two saves of one state are compared but for the id of the save, which is in the file",
    "test_repl_save_and_load": "the hidden manifests of local checkpoints are not listed",
}


def run(root: Path, folder: str, name: str, ranks: int, limit: float, stock: bool, tests: Sequence[str] = ()) -> list[Outcome]:
    path = os.pathsep.join([str(pytest_runs.HERE / "megatron_no_gpu"), str(root)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOLDFAST_PEER_STOCK": str(int(stock))}
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    found = pytest_runs.run(f"{folder}/{name}", root, launcher=launcher, tests=tests, environment=variables, limit=limit, ranks=ranks)
    for outcome in found:
        change = next((change for part, change in ADAPTED.items() if part in outcome.test), "")
        if change and outcome.status == "passed" and not stock:
            outcome.status, outcome.reason = "adapted", change
    failed = {o.test: o for o in found if o.status == "failed" and not stock}
    for test in list(failed):
        if reason := next((why for part, why in IMPOSSIBLE.items() if part in test), ""):
            outcome = failed.pop(test)
            outcome.status, outcome.reason = "impossible", reason
    if failed and pytest_runs.WHOLE not in failed:
        for plain in run(root, folder, name, ranks, limit, stock=True, tests=list(failed)):
            if plain.status == "failed" and plain.test in failed:
                error = next((line[1:].strip() for line in plain.reason.splitlines() if line.startswith("E ")), "no message")
                failed[plain.test].status, failed[plain.test].reason = "impossible", f"without Holdfast, too: {error}"
    return found


def report(outcomes: list[Outcome], seconds: float) -> list[str]:
    return [
        "Megatron-LM's tests of `dist_checkpointing` with `holdfast.megatron` installed, on eight gloo ranks",
        "with a stand-in for the GPU. A test counts only if it has passed on all ranks, and if every save in",
        "it was proved by its manifests when it was committed.",
        "",
        f"Megatron-Core {importlib.metadata.version('megatron-core')}, nvidia-resiliency-ext "
        f"{importlib.metadata.version('nvidia-resiliency-ext')}: {pytest_runs.said(outcomes)}.",
        f"{sum(o.saves for o in outcomes)} saves, every one proved. {seconds:.0f} s. Made by",
        "",
        "    python tests/peers/run_framework_tests.py CHECKOUT --report docs/peer-tests.md",
        *pytest_runs.table(outcomes),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="source tree of Megatron-LM or nvidia-resiliency-ext")
    parser.add_argument("files", nargs="*", help="default: all that apply")
    parser.add_argument("--report", type=Path, help="document for the table")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file")
    parser.add_argument("--stock", action="store_true", help="without Holdfast")
    arguments = parser.parse_args()
    suites = ((FOLDER, FILES, 8), (NVRX_FOLDER, NVRX_FILES, 2))
    of_checkout = [suite for suite in suites if (arguments.checkout / suite[0]).is_dir()]
    if not of_checkout:
        parser.error(f"{arguments.checkout}: neither Megatron-LM nor nvidia-resiliency-ext: it has no {FOLDER} and no {NVRX_FOLDER}")
    folder, files, ranks = of_checkout[0]
    if arguments.report and folder != FOLDER:
        parser.error("--report is for Megatron-LM's tests")
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copytree(arguments.checkout / "tests", root / "tests")
        # It downloads data that these tests do not use.
        download = root / "tests/test_utils/python_scripts/download_unit_tests_dataset.py"
        if download.exists():
            download.write_text("def download_and_extract_asset(assets_dir):\n    pass\n")
        for name in arguments.files or files:
            found = run(root, folder, name, ranks, arguments.limit, arguments.stock)
            pytest_runs.show(found)
            outcomes += found
    if arguments.report:
        lines = report(outcomes, time.monotonic() - started)
        pytest_runs.put(arguments.report, "Megatron's own tests", lines)
    print(pytest_runs.said(outcomes))
    return 1 if not outcomes or any(o.status == "failed" for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
