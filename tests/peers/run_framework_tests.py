#!/usr/bin/env python3
"""Runs a framework's own checkpoint tests with Holdfast installed, on gloo ranks of this machine.

    build/venv-frameworks/bin/python tests/peers/run_framework_tests.py CHECKOUT [FILE...]

CHECKOUT is one of Megatron-LM (eight ranks) or of nvidia-resiliency-ext (two); its tests run against the package that is
installed. Exit status 0 if none failed on any rank. With HOLDFAST_PEER_STOCK=1 nothing is installed: what the tests do by
themselves.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
# Folder, files and ranks of each framework.
SUITES = (
    ("tests/unit_tests/dist_checkpointing",
     ("test_async_save.py", "test_torch_dist.py", "test_integrity.py", "test_fully_parallel.py"), 8),
    ("tests/checkpointing/unit", ("test_basic_local.py", "test_cleanup.py"), 2),
)  # fmt: skip
# They want an error where nvidia-resiliency-ext is missing. Here it may be.
LEFT_OUT = (
    "test_get_async_strategy_no_nvrx_installed and nvrx",
    "test_get_async_strategy_missing_nvrx_cached_metadata_reader",
)


def run(tests, folder, name, ranks):
    """The outcomes of one file on all ranks: pytest's last lines."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{folder}/{name}",
               "-k", " and ".join(f"not ({one})" for one in LEFT_OUT)]  # fmt: skip
    path = [str(HERE / "megatron_no_gpu"), str(tests)]
    done = subprocess.run(
        command, cwd=tests, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ends = re.findall(r"^\d+ (?:passed|failed).* in .*s", done.stdout, re.MULTILINE)
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) \S+", done.stdout, re.MULTILINE)))
    if len(ends) != ranks:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
    return ends, failed


def main(checkout, *files):
    broken = False
    found = [suite for suite in SUITES if pathlib.Path(checkout, suite[0]).is_dir()]
    if not found:
        print(f"{checkout}: neither Megatron-LM nor nvidia-resiliency-ext: no {' and no '.join(s[0] for s in SUITES)}", file=sys.stderr)
        return 2
    folder, of_suite, ranks = found[0]
    with tempfile.TemporaryDirectory() as scratch:
        tests = pathlib.Path(scratch)
        shutil.copytree(pathlib.Path(checkout, "tests"), tests / "tests")
        # It downloads data that these tests do not use.
        download = tests / "tests/test_utils/python_scripts/download_unit_tests_dataset.py"
        if download.exists():
            download.write_text("def download_and_extract_asset(assets_dir):\n    pass\n")
        for name in files or of_suite:
            ends, failed = run(tests, folder, name, ranks)
            print(f"{name}: {ends[0] if ends else 'no rank has ended'}; {len(ends)} of {ranks} ranks", flush=True)
            for test in failed:
                print(f"  {test}")
            broken = broken or bool(failed) or len(ends) != ranks
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    sys.exit(main(*sys.argv[1:]))
