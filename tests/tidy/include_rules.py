#!/usr/bin/env python3
"""Checks that every layer includes only what it may: the layers are listed in runtime/README.md."""

import re

import source_tree

# The public headers that are plain old data and include nothing but the standard library.
POD = "holdfast/pod.h"
# A layer may include itself and the layers listed. "include" is the whole public API.
LAYERS = {
    "include": ("pod",),
    # Below the fork line.
    "sys": ("pod",),
    "layout": ("pod",),
    "digest": ("pod",),
    "io_uring": ("pod", "sys"),
    "worker": ("pod", "sys", "layout", "digest", "io_uring"),
    # Above it.
    "base": ("include", "sys", "layout"),
    "format": ("include", "base", "layout", "digest"),
    "directory": ("include", "base", "sys", "layout", "digest", "format", "worker"),
    "device": ("include", "base"),
    "staging": ("include", "base", "sys"),
    "writer": ("include", "base", "sys", "layout", "digest", "format", "staging", "worker"),
    "load": ("include", "base", "sys", "layout", "digest", "format", "directory", "io_uring"),
    "verify": ("include", "base", "sys", "layout", "digest", "format", "directory", "load"),
    "recovery": ("include", "base", "sys", "layout", "format", "directory", "writer"),
    "doctor": ("include", "base", "sys", "digest", "format", "directory", "io_uring", "staging", "writer"),
    "checkpointer": ("include", "base", "sys", "layout", "format", "directory", "staging", "writer", "worker",
                     "io_uring", "recovery"),
    "watch": ("include", "base", "sys", "layout"),
    "tools": ("include",),
    "python": ("include",),
}
# Single files that are a layer of their own: the main of the spawned helper is the worker's, and the benchmark measures
# the queue itself beside what is built on it.
FILES = {"tools/holdfast_worker.cc": "worker_program", "tools/bench/limits.cc": "bench_limits"}
LAYERS["worker_program"] = ("layout", "worker")
LAYERS["bench_limits"] = ("pod", "base", "io_uring", "sys", "tools")
BELOW = ("sys", "layout", "digest", "io_uring", "worker", "worker_program")

# Standard headers whose contents allocate, lock or throw: not below the fork line.
NOT_BELOW = set("""any condition_variable deque exception filesystem forward_list fstream functional
    future iomanip iostream istream list locale map memory memory_resource mutex ostream queue
    random regex set shared_mutex sstream stack stdexcept stop_token streambuf string string_view
    syncstream system_error thread typeinfo unordered_map unordered_set valarray variant
    vector""".split())
# Not as far as both compilers go (g++ 12, clang 14), or past the table of system calls.
NOT_ANYWHERE = set("coroutine expected format generator print ranges source_location".split())
# condition_variable: base::Condition waits by the monotonic clock in every build.
NOT_IN_LIBRARY = set("condition_variable fstream iostream regex".split())
# Libraries, and the layers that they are for.
LIBRARIES = {
    "liburing": ("sys", "io_uring"),
    "xxhash": ("digest",),
    "xxh_x86dispatch": ("digest",),
    "nlohmann": ("format", "tools", "bench_limits"),
    "zlib": ("format",),
    "isa-l": ("format",),
    # The driver's calls stand in runtime/device/gpu_calls.h: a build needs no toolkit.
    "cuda": (),
    "cuda_runtime_api": (),
    "hip": (),
    "CLI": ("tools",),
    "indicators": ("tools",),
    "benchmark": ("tools",),
    "gtest": (),
    "gmock": (),
}

INCLUDE = re.compile(r'\s*#\s*include\s*(["<])([^">]+)[">]')


def layer_of(relative):
    """The layer that a file of the tree, or an include in quotes, belongs to; None: no layer."""
    parts = relative.split("/")
    if relative == POD or relative == "runtime/include/" + POD:
        return "pod"
    if parts[0] == "holdfast" or relative.startswith("runtime/include/"):
        return "include"
    if parts[0] == "runtime" and len(parts) > 2:
        return parts[1]
    return parts[0] if parts[0] in ("io_uring", "tools", "tests", "fuzz", "python") else None


def complaint_about(layer, quoted, target):
    """What is wrong with `layer` including `target`; None if nothing is."""
    stem = re.split(r"[/.]", target)[0]
    if stem in LIBRARIES and layer_of(target) is None:
        return None if layer in LIBRARIES[stem] else f"<{target}> is not for this layer"
    if target in NOT_ANYWHERE:
        return f"<{target}> is not for this project"
    if layer not in ("tools", "bench_limits") and target in NOT_IN_LIBRARY:
        return f"<{target}> is not for the library"
    if stem == "absl":
        if layer in BELOW or layer == "pod":
            return "absl is not for code below the fork line"
        if "mutex" in target or target.startswith("absl/log"):
            return f"{target}: use runtime/base"
        return None
    if layer in BELOW and target in NOT_BELOW:
        return f"<{target}> is not for code below the fork line"
    if not quoted:
        return None
    used = layer_of(target)
    if layer == "pod":
        return "pod.h includes the standard library alone"
    if used is None:
        return f'"{target}": write the path from the root of the tree'
    if used == layer or used in LAYERS[layer] or (used == "pod" and "include" in LAYERS[layer]):
        return None
    return f"layer {layer} may not use layer {used}"


def check(options):
    for path in source_tree.files(options.root, (".h", ".cc")):
        relative = path.relative_to(options.root).as_posix()
        layer = FILES.get(relative) or layer_of(relative)
        if layer in ("tests", "fuzz", "python"):
            continue
        if layer != "pod" and layer not in LAYERS:
            yield f"{relative}:1: no layer of that name; see tests/tidy/include_rules.py"
            continue
        for number, line in source_tree.lines(path):
            match = INCLUDE.match(line)
            if match:
                complaint = complaint_about(layer, match.group(1) == '"', match.group(2))
                if complaint:
                    yield f"{relative}:{number}: {complaint}"


if __name__ == "__main__":
    source_tree.run(check, __doc__)
