#!/usr/bin/env python3
"""Checks that clang-format 14 would change nothing."""

import shutil
import subprocess

import source_tree


def check(options):
    program = shutil.which("clang-format-14")
    if program is None:
        source_tree.skip("clang-format-14 is not installed")
    sources = [str(path) for path in source_tree.files(options.root, (".h", ".cc"))]
    result = subprocess.run([program, "--dry-run", "--Werror", "--style=file", *sources],
                            capture_output=True, text=True, check=False)
    if result.returncode != 0:
        complaints = [line for line in result.stderr.splitlines() if "error:" in line]
        for complaint in complaints or [result.stderr.strip() or "clang-format failed"]:
            yield complaint.replace(str(options.root.resolve()) + "/", "").replace(
                f"{options.root}/", "")


if __name__ == "__main__":
    source_tree.run(check, __doc__)
