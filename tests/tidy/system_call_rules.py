#!/usr/bin/env python3
"""Checks that every system call goes through the table in runtime/sys: one that does not cannot be made to fail by a
test."""

import re

import source_tree

TABLE = "runtime/sys/system.h"
# Relatives of what is in the table, which would go around it.
RELATIVES = """access creat dup dup2 dup3 fdatasync fopen freopen getcwd ioctl kill linkat lseek lstat mkdir mkstemp
    mkdtemp open opendir pipe pipe2 preadv pwritev readdir readlink readv realpath remove rename renameat rmdir
    sendfile sleep stat symlink symlinkat syscall sync sync_file_range syncfs truncate umount unlink usleep vfork wait
    wait4 waitpid writev""".split()
# Where the call is not the kernel's business with our files: each with its reason.
ALLOWED = {
    # Text of a dying process; it must work when everything else is broken.
    ("runtime/base/check.cc", "write"),
}


def check(options):
    table = (options.root / TABLE).read_text(encoding="utf-8")
    names = set(re.findall(r"\(\*(\w+)\)\(", table)) - {"thread_create"} | set(RELATIVES)
    # A call by its bare or global name; `Sys().close(`, `x->close(` and `Type::close(` are not.
    call = re.compile(r"(?:(?<![\w.>:])(?:::)?|\bstd::)(" + "|".join(sorted(names)) + r")\(")
    for path in source_tree.files(options.root, (".h", ".cc")):
        relative = path.relative_to(options.root).as_posix()
        if not relative.startswith(("runtime/", "io_uring/")) or relative.startswith("runtime/sys/"):
            continue
        for number, line in source_tree.lines(path):
            code = re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0]
            # Paths are text; the rest of the library asks the kernel.
            for match in re.finditer(r"filesystem::(?!path\b)(\w+)", code):
                yield f"{relative}:{number}: filesystem::{match.group(1)} goes past sys::Sys()"
            if "absl::Now(" in code:
                yield f"{relative}:{number}: absl::Now() follows the machine's clock; base::Now() does not"
            for match in call.finditer(code):
                if (relative, match.group(1)) not in ALLOWED:
                    yield f"{relative}:{number}: {match.group(1)}() goes past sys::Sys()"


if __name__ == "__main__":
    source_tree.run(check, __doc__)
