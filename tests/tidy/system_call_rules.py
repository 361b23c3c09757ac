#!/usr/bin/env python3
"""Checks that every system call goes through the table in runtime/sys: one that does not cannot be made to fail by a
test. Those that make or close an fd are made by runtime/sys/owned_fds alone: elsewhere a fork of another thread could
come between the call and the table of owned fds. Tests send signals by SendSignal alone, which knows that process 0 is
the whole group of the test."""

import re

import source_tree

TABLE = "runtime/sys/system.h"
SIGNALS = "tests/testing/child_process.cc"
# Relatives of what is in the table, which would go around it.
RELATIVES = """access creat dup dup2 dup3 fdatasync fopen freopen getcwd ioctl kill linkat lseek lstat mkdir mkstemp
    mkdtemp open opendir pipe pipe2 preadv pwritev readdir readlink readv realpath remove rename renameat rmdir
    sendfile sleep stat symlink symlinkat syscall sync sync_file_range syncfs truncate umount unlink usleep vfork wait
    wait4 waitpid writev""".split()
# Of the table, and of the libraries around it.
FD_CALLS = """close eventfd fsmount fsopen memfd_create openat pidfd_open recvmsg socketpair uring_queue_init_params
    """.split()
MAKES_FD = re.compile(r"(?:\.|->)(" + "|".join(FD_CALLS) + r")\(|\b(io_uring_queue_exit|F_DUPFD\w*)\b")
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
        if relative.startswith("tests/") and relative != SIGNALS:
            for number, line in source_tree.lines(path):
                if re.search(r"(?<![\w.>:])(?:::)?kill\((?!\))", line):
                    yield f"{relative}:{number}: kill() of process 0 ends the whole test; SendSignal does not"
        if not relative.startswith(("runtime/", "io_uring/")) or relative.startswith("runtime/sys/"):
            continue
        for number, line in source_tree.lines(path):
            code = re.sub(r'"(\\.|[^"\\])*"', '""', line).split("//")[0]
            # Paths are text; the rest of the library asks the kernel.
            for match in re.finditer(r"filesystem::(?!path\b)(\w+)", code):
                yield f"{relative}:{number}: filesystem::{match.group(1)} goes past sys::Sys()"
            if re.search(r"errno [!=]= EINTR", code) and re.search(r"\b(continue|while|for)\b", code):
                yield f"{relative}:{number}: a retry without a clock; sys::Uninterrupted has one"
            if "absl::Now(" in code:
                yield f"{relative}:{number}: absl::Now() follows the machine's clock; base::Now() does not"
            for match in call.finditer(code):
                if (relative, match.group(1)) not in ALLOWED:
                    yield f"{relative}:{number}: {match.group(1)}() goes past sys::Sys()"
            for match in MAKES_FD.finditer(code):
                yield f"{relative}:{number}: {match.group(1) or match.group(2)} goes past runtime/sys/owned_fds.h"


if __name__ == "__main__":
    source_tree.run(check, __doc__)
