"""Runs Lightning's own checkpoint tests with Holdfast's `CheckpointIO` as the default plugin.

    build/venv-frameworks/bin/python tests/peers/run_lightning_tests.py CHECKOUT [--report docs/peer-tests.md]

CHECKOUT is a source tree of Lightning, of the version that is installed (tag 2.6.5); nothing in it is changed. A test that
fails runs again with saves that return when they are durable; one that fails then, too, runs without Holdfast. Every save
is proved by its manifest when it is durable. Exit status 0: no test failed that passes without Holdfast.
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest_runs
from pytest_runs import Outcome

# What needs neither a GPU nor files of older versions, which are downloaded (test_legacy_checkpoints).
FILES = (
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_model_checkpoint.py",
    "checkpointing/test_torch_saving.py",
    "checkpointing/test_trainer_checkpoint.py",
    "callbacks/test_model_checkpoint_additional_cases.py",
    "callbacks/test_model_checkpoint_edge_cases.py",
    "callbacks/test_model_checkpoint_manual_opt.py",
    "callbacks/test_model_checkpoint_step_interval_val_metric.py",
    "plugins/test_async_checkpoint.py",
    "plugins/test_checkpoint_io_plugin.py",
    "trainer/connectors/test_checkpoint_connector.py",
)
CHANGE = (
    "saves return when they are durable, listings show checkpoints alone, a mock of `torch.save` is called for each, "
    "and one of the stock plugin's `save_checkpoint` in the place of ours"
)


def run(root: Path, file: str, limit: float, way: str, tests: Sequence[str] = ()) -> list[Outcome]:
    """One file, or some of its tests, in one way: "asynchronous", "durable", or "stock"."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "tests"), "HOLDFAST_PEERS_DURABLE": str(int(way == "durable"))}
    plugin = () if way == "stock" else ("-p", "lightning_substitutes")
    return pytest_runs.run(f"tests/tests_pytorch/{file}", root, tests=tests, arguments=plugin, environment=variables, limit=limit)


def judged(root: Path, file: str, limit: float) -> list[Outcome]:
    """One file, with what fails in it run again."""
    found = run(root, file, limit, "asynchronous")
    for way in ("durable", "stock"):
        failed = [o.test for o in found if o.status == "failed" and o.test != pytest_runs.WHOLE]
        if not failed:
            break
        for new in run(root, file, limit, way, failed):
            old = next((o for o in found if o.test == new.test), None)
            if old is None:
                continue
            if new.status == "failed":
                old.reason = new.reason
            elif way == "stock":
                old.reason = f"passes without Holdfast: {old.reason}"
            else:
                old.status, old.reason, old.saves = "adapted", "change 1", new.saves
        for old in found:
            fails_too = way == "stock" and old.test in failed and not old.reason.startswith("passes without")
            if old.status == "failed" and fails_too:
                old.status, old.reason = "impossible", f"fails without Holdfast, too: {_last_line(old.reason)}"
    return found


def _last_line(reason: str) -> str:
    lines = [line for line in reason.splitlines() if line.startswith("E ")] or reason.splitlines() or [""]
    return lines[-1].removeprefix("E").strip()


def report(outcomes: list[Outcome], version: str, seconds: float) -> list[str]:
    return [
        "Lightning's tests of checkpoints, of `ModelCheckpoint` and of plugins, with",
        "`holdfast.lightning.CheckpointIO` where Lightning takes `TorchCheckpointIO` by default.",
        "",
        f"Lightning {version}, no GPU: {pytest_runs.said(outcomes)}. {sum(o.saves for o in outcomes)} saves of Holdfast,",
        f"every one proved when it was durable. {seconds:.0f} s. Made by",
        "",
        "    python tests/peers/run_lightning_tests.py CHECKOUT --report docs/peer-tests.md",
        "",
        f"*passed*: as it is. *adapted*, change 1: {CHANGE}.",
        "*impossible*: it fails without Holdfast, too. A test without saves makes none by the default plugin.",
        "`test_legacy_checkpoints.py` is left out: it downloads files of older versions.",
        *pytest_runs.table(outcomes),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="source tree of Lightning")
    parser.add_argument("--report", type=Path, help="document for the table")
    parser.add_argument("--files", default="*", help="pattern of files")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file")
    parser.add_argument("--stock", action="store_true", help="without Holdfast")
    arguments = parser.parse_args()
    import lightning

    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copytree(arguments.checkout / "tests" / "tests_pytorch", root / "tests" / "tests_pytorch")
        shutil.copy(arguments.checkout / "pyproject.toml", root)
        for file in FILES:
            if not fnmatch.fnmatchcase(file, arguments.files):
                continue
            stock = arguments.stock
            found = run(root, file, arguments.limit, "stock") if stock else judged(root, file, arguments.limit)
            pytest_runs.show(found)
            outcomes += found
    if arguments.report:
        lines = report(outcomes, lightning.__version__, time.monotonic() - started)
        pytest_runs.put(arguments.report, "Lightning's own tests", lines)
    print(pytest_runs.said(outcomes))
    return 1 if not outcomes or any(o.status == "failed" for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
