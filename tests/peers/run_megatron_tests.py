#!/usr/bin/env python3
"""Runs Megatron-LM's own checkpoint tests with Holdfast installed, on eight gloo ranks of this machine.

    build/venv-frameworks/bin/python tests/peers/run_megatron_tests.py CHECKOUT [FILE...]

CHECKOUT is one of Megatron-LM; its tests run against the megatron-core that is installed. Exit status 0 if none
failed on any rank. With HOLDFAST_PEER_STOCK=1 nothing is installed: what the tests do by themselves.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = "tests/unit_tests/dist_checkpointing"
FILES = ("test_async_save.py", "test_torch_dist.py", "test_integrity.py", "test_fully_parallel.py")
# They want an error where nvidia-resiliency-ext is missing. Here it may be.
LEFT_OUT = (
    "test_get_async_strategy_no_nvrx_installed and nvrx",
    "test_get_async_strategy_missing_nvrx_cached_metadata_reader",
)
RANKS = 8


def run(tests, name):
    """The outcomes of one file on all ranks: pytest's last lines."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
               "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{FOLDER}/{name}",
               "-k", " and ".join(f"not ({one})" for one in LEFT_OUT)]  # fmt: skip
    path = [str(HERE / "megatron_no_gpu"), str(tests)]
    done = subprocess.run(
        command, cwd=tests, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ends = re.findall(r"^\d+ (?:passed|failed).* in .*s", done.stdout, re.MULTILINE)
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) \S+", done.stdout, re.MULTILINE)))
    if len(ends) != RANKS:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
    return ends, failed


def main(checkout, *files):
    broken = False
    with tempfile.TemporaryDirectory() as scratch:
        tests = pathlib.Path(scratch)
        shutil.copytree(pathlib.Path(checkout, "tests"), tests / "tests")
        # It downloads data that these tests do not use.
        download = tests / "tests/test_utils/python_scripts/download_unit_tests_dataset.py"
        download.write_text("def download_and_extract_asset(assets_dir):\n    pass\n")
        for name in files or FILES:
            ends, failed = run(tests, name)
            print(f"{name}: {ends[0] if ends else 'no rank has ended'}; {len(ends)} of {RANKS} ranks", flush=True)
            for test in failed:
                print(f"  {test}")
            broken = broken or bool(failed) or len(ends) != RANKS
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    sys.exit(main(*sys.argv[1:]))
