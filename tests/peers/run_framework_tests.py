"""Runs a framework's own checkpoint tests with Holdfast installed, on gloo ranks of this machine.

    build/venv-frameworks/bin/python tests/peers/run_framework_tests.py CHECKOUT [FILE...] [--report docs/peer-tests.md]

CHECKOUT is one of Megatron-LM (eight ranks), of nvidia-resiliency-ext (two) or of torchtitan (one); its tests run against the
package that is installed; with --source REVISION against that of the checkout. A test has passed if it has on all ranks, and every save in it was proved when it was committed. One that fails
without Holdfast, too, is impossible here. Exit status 0 if none failed. With --stock nothing is installed: what the tests do
by themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
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


@dataclasses.dataclass
class Suite:
    """The tests of one project.

    Attributes:
        title: of its table.
        folder, files: in a checkout.
        ranks: of each test.
        packages: whose versions the table names.
        told: how Holdfast is installed, in lines.
        variables: of the tests' processes.
        plugin: of pytest, which installs Holdfast.
        impossible: parts of names of tests, and why they fail here.
        adapted: parts of names of tests that pass with a change, and the change.
        adapted_saves: the change of each test that saves.
    """

    title: str
    folder: str
    files: tuple[str, ...]
    ranks: int
    packages: tuple[str, ...]
    told: list[str]
    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    plugin: str = ""
    impossible: dict[str, str] = dataclasses.field(default_factory=dict)
    adapted: dict[str, str] = dataclasses.field(default_factory=dict)
    adapted_saves: str = ""

    def change(self, outcome: Outcome) -> str:
        return next((c for part, c in self.adapted.items() if part in outcome.test), self.adapted_saves if outcome.saves else "")


NO_GPU = {"PYTHONPATH": str(pytest_runs.HERE / "ranks")}
SUITES = (
    Suite(
        title="Megatron's own tests",
        folder="tests/unit_tests/dist_checkpointing",
        files=(
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
        ),
        ranks=8,
        packages=("megatron-core", "nvidia-resiliency-ext"),
        told=[
            "Megatron-LM's tests of `dist_checkpointing` with `holdfast.megatron` installed, on eight gloo ranks",
            "with a stand-in for the GPU.",
        ],
        variables=NO_GPU,
        impossible={
            "test_get_async_strategy_no_nvrx_installed": "wants an error where nvidia-resiliency-ext is missing; here it may be",
            "test_get_async_strategy_missing_nvrx_cached_metadata_reader": "looks for stock classes where nvidia-resiliency-ext is missing",
        },
        adapted={
            "test_basic_save_load_scenarios": "two saves of one state are compared but for the id of the save, which is in the file",
            "test_repl_save_and_load": "the hidden manifests of local checkpoints are not listed",
        },
    ),
    Suite(
        title="nvidia-resiliency-ext's own tests",
        folder="tests/checkpointing/unit",
        files=("test_basic_local.py", "test_cleanup.py"),
        ranks=2,
        packages=("nvidia-resiliency-ext",),
        told=[
            "nvidia-resiliency-ext's tests of local checkpoints (its main branch of August 2026) with `holdfast.nvrx`",
            "installed, on two gloo ranks with a stand-in for the GPU. The saves are those of both ranks' files.",
        ],
        variables={**NO_GPU, "HOLDFAST_PEER_LOCAL": "1"},
    ),
    Suite(
        title="torchtitan's own tests",
        folder="tests/unit_tests",
        files=("test_checkpoint.py",),
        ranks=1,
        packages=("torchtitan",),
        told=[
            "torchtitan's tests of its checkpoint manager, with `holdfast.torchtitan.CheckpointManager` in its place.",
            "They need `torchdata`, `tensorboard`, `tokenizers` and `datasets`, too; those of the main branch also `grain`.",
            "`test_torch_checkpointing.py` of the main branch is left out: its manager is another class, which saves nothing there.",
        ],
        plugin="torchtitan_substitutes",
        adapted_saves="the tests' mocks of PyTorch's functions are called behind Holdfast's saves",
    ),
)


def run(suite: Suite, root: Path, name: str, limit: float, stock: bool, tests: Sequence[str] = (), source: str = "") -> list[Outcome]:
    """One file, or some of its tests, against the package in the folder `source`, or the installed one."""
    path = os.pathsep.join(filter(None, [suite.variables.get("PYTHONPATH"), str(root), source]))
    variables = {**suite.variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOLDFAST_PEER_STOCK": str(int(stock))}
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={suite.ranks}") if suite.ranks > 1 else ()
    plugin = ("-p", suite.plugin) if suite.plugin and not stock else ()
    found = pytest_runs.run(
        f"{suite.folder}/{name}", root, launcher=launcher, arguments=plugin, tests=tests, environment=variables, limit=limit,
        ranks=suite.ranks,
    )  # fmt: skip
    for outcome in found:
        change = suite.change(outcome)
        if change and outcome.status == "passed" and not stock:
            outcome.status, outcome.reason = "adapted", change
    failed = {o.test: o for o in found if o.status == "failed" and not stock}
    for test in list(failed):
        if reason := next((why for part, why in suite.impossible.items() if part in test), ""):
            outcome = failed.pop(test)
            outcome.status, outcome.reason = "impossible", reason
    if failed and pytest_runs.WHOLE not in failed:
        for plain in run(suite, root, name, limit, stock=True, tests=list(failed), source=source):
            if plain.status == "failed" and plain.test in failed:
                error = next((line[1:].strip() for line in plain.reason.splitlines() if line.startswith("E ")), "no message")
                failed[plain.test].status, failed[plain.test].reason = "impossible", f"without Holdfast, too: {error}"
    return found


def report(suite: Suite, outcomes: list[Outcome], seconds: float, revision: str) -> list[str]:
    of_source = f"{suite.packages[0]} at {revision}"
    versions = of_source if revision else ", ".join(f"{package} {importlib.metadata.version(package)}" for package in suite.packages)
    return [
        *suite.told,
        "A test counts only if it has passed on all ranks, and if every save in it was proved by its manifests when",
        "it was committed.",
        "",
        f"{versions}: {pytest_runs.said(outcomes)}.",
        f"{sum(o.saves for o in outcomes)} saves, every one proved. {seconds:.0f} s. Made by",
        "",
        f"    python tests/peers/run_framework_tests.py CHECKOUT{f' --source {revision}' * bool(revision)} --report docs/peer-tests.md",
        *pytest_runs.table(outcomes),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="source tree of Megatron-LM, nvidia-resiliency-ext or torchtitan")
    parser.add_argument("files", nargs="*", help="default: all that apply")
    parser.add_argument("--report", type=Path, help="document for the table")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a file")
    parser.add_argument("--source", metavar="REVISION", default="", help="run against the checkout's package, of this revision")
    parser.add_argument("--stock", action="store_true", help="without Holdfast")
    arguments = parser.parse_args()
    checkout = arguments.checkout
    suite = next((suite for suite in SUITES if all((checkout / suite.folder / name).is_file() for name in suite.files)), None)
    if suite is None:
        parser.error(f"{checkout}: it has no tests of Megatron-LM, of nvidia-resiliency-ext or of torchtitan that are known here")
    started = time.monotonic()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copytree(arguments.checkout / "tests", root / "tests")
        # It downloads data that these tests do not use.
        download = root / "tests/test_utils/python_scripts/download_unit_tests_dataset.py"
        if download.exists():
            download.write_text("def download_and_extract_asset(assets_dir):\n    pass\n")
        for name in arguments.files or suite.files:
            source = str(checkout.resolve()) if arguments.source else ""
            found = run(suite, root, name, arguments.limit, arguments.stock, source=source)
            pytest_runs.show(found)
            outcomes += found
    if arguments.report:
        title = f"{suite.title} at {arguments.source}" if arguments.source else suite.title
        pytest_runs.put(arguments.report, title, report(suite, outcomes, time.monotonic() - started, arguments.source))
    print(pytest_runs.said(outcomes))
    return 1 if not outcomes or any(o.status == "failed" for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
