#!/usr/bin/env python3
"""Checks that every header can be included first, alone. One that a source file includes first is proven by that file's
compilation; only the others are compiled here."""

import concurrent.futures
import os
import re
import shutil
import subprocess
import tempfile

import source_tree

ARGUMENTS = (
    ("--compiler", {"required": True}),
)


def compile_alone(options, relative, scratch):
    """The first error of a file that includes nothing else; None if there is none."""
    name = relative.replace("/", "_")
    source = os.path.join(scratch, name + ".cc")
    shown = relative.removeprefix("runtime/include/")
    with open(source, "w", encoding="utf-8") as file:
        file.write(f'#include "{shown}"\n#include "{shown}"\n')
    ccache = shutil.which("ccache")
    command = ([ccache] if ccache else []) + [
        options.compiler, "-std=c++20", "-O0", f"-I{options.root}", f"-I{options.root}/runtime/include",
        "-c", source, "-o", source + ".o"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    errors = [line for line in result.stderr.splitlines() if "error" in line]
    return f"{relative}:1: cannot be included alone: {(errors or ['the compiler failed'])[0]}"


def first_includes(options):
    """What source files include first, as paths of the tree."""
    for path in source_tree.files(options.root, (".cc",)):
        match = re.search(r'^#include (?:"([^"]+)"|<)', path.read_text(encoding="utf-8"), re.MULTILINE)
        if match and match.group(1):
            included = match.group(1)
            yield "runtime/include/" + included if included.startswith("holdfast/") else included


def check(options):
    proven = set(first_includes(options))
    headers = [path.relative_to(options.root).as_posix()
               for path in source_tree.files(options.root, (".h",))]
    # The extension module's need Python's own headers; pip builds it.
    headers = [header for header in headers
               if header not in proven and not header.startswith("python/")]
    with tempfile.TemporaryDirectory() as scratch:
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            for complaint in pool.map(lambda header: compile_alone(options, header, scratch), headers):
                if complaint:
                    yield complaint


if __name__ == "__main__":
    source_tree.run(check, __doc__, ARGUMENTS)
