#!/usr/bin/env python3
"""Every tidy check is run over a small tree with one planted violation and has to find it, and over the same tree without
and has to find nothing."""

import argparse
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parent.parent
COMPILER = "c++"

POD = "// Plain data.\n#ifndef HOLDFAST_POD_H_\n#define HOLDFAST_POD_H_\n\n#include <cstdint>\n\n#endif  // HOLDFAST_POD_H_\n"
TABLE = "// The table.\n#ifndef HOLDFAST_RUNTIME_SYS_SYSTEM_H_\n#define HOLDFAST_RUNTIME_SYS_SYSTEM_H_\n\nstruct SystemCalls {\n  int (*fsync)(int fd);\n};\n\n#endif  // HOLDFAST_RUNTIME_SYS_SYSTEM_H_\n"
EXAMPLE = "int main() { return 0; }\n"


class TidyTest(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.scratch.name)
        shutil.copy(REPOSITORY / ".clang-format", self.root)
        self.put("runtime/include/holdfast/pod.h", POD)
        self.put("runtime/sys/system.h", TABLE)
        self.put("tests/consumer/example.cc", EXAMPLE)
        self.put("README.md", "# Holdfast\n")
        self.put("docs/cpp.md", f"# C++\n\n```cpp\n{EXAMPLE}```\n")

    def tearDown(self):
        self.scratch.cleanup()

    def put(self, relative, text):
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def complaints(self, check, *arguments):
        result = subprocess.run([sys.executable, str(HERE / check), "--root", str(self.root), *arguments],
                                capture_output=True, text=True, check=False)
        if result.returncode == 77:
            self.skipTest(result.stdout.strip())
        self.assertIn(result.returncode, (0, 1), result.stdout + result.stderr)
        complaints = result.stdout.splitlines()[:-1]
        self.assertEqual(result.returncode, 1 if complaints else 0)
        return complaints

    def finds(self, check, expected, relative, text, *arguments):
        """Nothing before the file is there, `expected` in the one complaint once it is."""
        self.assertEqual(self.complaints(check, *arguments), [])
        self.put(relative, text)
        complaints = self.complaints(check, *arguments)
        self.assertEqual(len(complaints), 1, complaints)
        self.assertIn(expected, complaints[0])
        self.assertIn(pathlib.Path(relative).name, complaints[0])

    # ---- include_rules

    def test_layers_must_not_look_up(self):
        self.finds("include_rules.py", "sys may not use layer base", "runtime/sys/a.cc",
                   '#include "runtime/base/status.h"\n')

    def test_layers_must_not_look_sideways(self):
        self.finds("include_rules.py", "staging may not use layer writer", "runtime/staging/a.cc",
                   '#include "runtime/writer/supervisor.h"\n')

    def test_tools_see_the_public_interface_only(self):
        self.finds("include_rules.py", "tools may not use layer verify", "tools/a.cc",
                   '#include "holdfast/pod.h"\n#include "runtime/verify/a.h"\n')

    def test_the_public_interface_knows_no_layer(self):
        self.finds("include_rules.py", "include may not use layer base", "runtime/include/holdfast/save.h",
                   '#include "holdfast/pod.h"\n#include "runtime/base/mutex.h"\n')

    def test_pod_knows_nothing(self):
        self.finds("include_rules.py", "pod.h includes the standard library alone",
                   "runtime/include/holdfast/pod.h", POD + '#include "holdfast/save.h"\n')

    def test_below_the_fork_line_sees_only_plain_old_data(self):
        self.finds("include_rules.py", "worker may not use layer include", "runtime/worker/a.cc",
                   '#include "holdfast/pod.h"\n#include "holdfast/save.h"\n')

    def test_below_the_fork_line_there_is_no_heap(self):
        self.finds("include_rules.py", "<vector> is not for code below the fork line", "io_uring/a.cc",
                   "#include <cstdint>\n#include <vector>\n")

    def test_below_the_fork_line_there_is_no_absl(self):
        self.finds("include_rules.py", "absl is not for code below the fork line", "runtime/digest/a.cc",
                   '#include "absl/status/status.h"\n')

    def test_absl_mutex_is_not_used(self):
        self.finds("include_rules.py", "use runtime/base", "runtime/writer/a.cc",
                   '#include "absl/synchronization/mutex.h"\n')

    def test_headers_that_a_compiler_lacks(self):
        self.finds("include_rules.py", "<format> is not for this project", "tools/a.cc", "#include <format>\n")

    def test_headers_that_go_past_the_table_of_system_calls(self):
        self.finds("include_rules.py", "<fstream> is not for the library", "runtime/load/a.cc",
                   "#include <fstream>\n")

    def test_libraries_have_one_home(self):
        self.finds("include_rules.py", "not for this layer", "runtime/writer/a.cc",
                   "#include <nlohmann/json.hpp>\n")

    def test_paths_are_written_from_the_root(self):
        self.finds("include_rules.py", "from the root of the tree", "runtime/load/a.cc", '#include "load.h"\n')

    def test_a_folder_that_is_no_layer(self):
        self.finds("include_rules.py", "no layer of that name", "runtime/misc/a.cc", "\n")

    # ---- import_rules

    def test_files_of_the_package_must_not_look_up(self):
        self.finds("import_rules.py", "capture may not import saving", "python/holdfast/capture.py",
                   "from holdfast import saving\n")

    def test_files_of_the_package_are_in_the_table(self):
        self.finds("import_rules.py", "not in the table", "python/holdfast/misc.py", "\n")

    def test_private_attributes_stay_in_their_file(self):
        self.put("python/holdfast/handle.py", "class Save:\n    def __init__(self):\n        self._native = 1\n")
        self.finds("import_rules.py", "_native is private to another file", "python/holdfast/saving.py",
                   "def f(save):\n    return save._native\n")

    def test_imports_in_any_scope_name_what_there_is(self):
        self.put("python/holdfast/drain/slots.py", "try:\n    import os\nexcept ImportError:\n    os = None\n")
        self.put("tests/python/test_a.py", "def test_a():\n    from holdfast.drain.slots import os\n")
        self.finds("import_rules.py", "there is no holdfast.drain.slots.in_use", "tests/python/test_b.py",
                   "def test_b():\n    from holdfast.drain.slots import in_use\n")

    def test_private_names_are_not_imported(self):
        self.put("python/holdfast/saving.py", "def _split():\n    pass\n")
        self.finds("import_rules.py", "_split is private to saving", "python/holdfast/dcp/writer.py",
                   "from holdfast.saving import _split\n")

    # ---- system_call_rules

    def test_system_calls_go_through_the_table(self):
        self.put("runtime/load/b.cc", '  Sys().fsync(fd); call->fsync(fd); File::fsync(fd); Log("fsync(fd)");\n')
        self.finds("system_call_rules.py", "fsync() goes past", "runtime/load/a.cc", "  if (::fsync(fd) != 0) {}\n")

    def test_descriptors_are_made_and_owned_at_once(self):
        self.put("runtime/sys/owned_fds.cc", "  return Own(Sys().openat(directory, path, flags, mode));\n")
        self.finds("system_call_rules.py", "openat goes past runtime/sys/owned_fds.h", "runtime/load/a.cc",
                   "  const int fd = sys::Sys().openat(directory, name, flags, 0);\n")

    def test_descriptors_are_not_duplicated_elsewhere(self):
        self.finds("system_call_rules.py", "F_DUPFD_CLOEXEC goes past", "io_uring/a.cc",
                   "  fd = sys::Sys().fcntl(fd, F_DUPFD_CLOEXEC, 0);\n")

    def test_relatives_of_the_table_do_not_help(self):
        self.finds("system_call_rules.py", "syncfs() goes past", "io_uring/a.cc", "  syncfs(fd);\n")

    def test_the_standard_library_does_not_help_either(self):
        self.finds("system_call_rules.py", "fopen() goes past", "runtime/load/a.cc", '  std::fopen(name, "re");\n')

    def test_signals_of_tests_go_to_one_process(self):
        self.put("tests/fault/b.cc", "  thread_kill(a); handle.kill(b); SendSignal(pid, 9);  // as kill() does\n")
        self.finds("system_call_rules.py", "kill() of process 0", "tests/fault/a.cc", "  ::kill(pid, SIGKILL);\n")

    def test_deadlines_are_on_the_monotonic_clock(self):
        self.finds("system_call_rules.py", "absl::Now()", "runtime/load/a.cc", "  const auto end = absl::Now();\n")

    def test_retries_have_a_clock(self):
        self.finds("system_call_rules.py", "a retry without a clock", "runtime/load/a.cc",
                   "  } while (got < 0 && errno == EINTR);\n")

    def test_the_file_system_library_is_for_paths(self):
        self.put("runtime/load/b.cc", "  std::filesystem::path path(name);\n")
        self.finds("system_call_rules.py", "filesystem::absolute goes past", "runtime/load/a.cc",
                   "  std::filesystem::absolute(name);\n")

    # ---- text_rules

    def test_unfinished_work(self):
        self.finds("text_rules.py", "unfinished", "runtime/load/a.cc", "// TO" "DO: finish\n")

    def test_long_files(self):
        self.finds("text_rules.py", "longer than", "runtime/load/a.cc", "int a;\n" * 601)

    def test_the_first_page_stays_short(self):
        self.finds("text_rules.py", "belong to docs/", "README.md", "a\n" * 111)

    def test_the_first_page_stays_narrow(self):
        self.finds("text_rules.py", "wider than", "README.md", "a" * 101 + "\n")

    def test_header_guards(self):
        self.finds("text_rules.py", "the header guard is HOLDFAST_RUNTIME_LOAD_A_H_", "runtime/load/a.h",
                   "// A.\n#pragma once\n")

    def test_headers_begin_with_a_comment(self):
        self.finds("text_rules.py", "begins with a comment", "runtime/load/a.h",
                   "#ifndef HOLDFAST_RUNTIME_LOAD_A_H_\n#define HOLDFAST_RUNTIME_LOAD_A_H_\n#endif\n")

    def test_blanks_at_the_end(self):
        self.finds("text_rules.py", "blanks at the end", "tools/a.sh", "true \n")

    def test_subjects_of_comments_are_nouns(self):
        self.finds("text_rules.py", "C++ comments have 1.89 indefinite words", "runtime/load/a.cc", "// " + "extent " * 40 + "what\n")

    def test_subjects_of_the_packages_comments_are_nouns(self):
        self.finds("text_rules.py", "comments have 9.09 indefinite words", "python/holdfast/a.py",
                   '"""' + "extent " * 20 + 'what."""\n\na = None  # who\n')

    def test_subjects_of_pages_are_nouns(self):
        self.finds("text_rules.py", "pages have 4.35 indefinite words", "docs/a.md", "extent " * 20 + "what `who`\n")

    def test_the_worker_has_assertions(self):
        self.put("io_uring/a.cc", "HOLDFAST_ASSERT(x);\n" + "y();\n" * 50)
        self.finds("text_rules.py", "fewer than one assertion", "runtime/worker/b.cc", "y();\n" * 60)

    def test_comments_name_their_subjects(self):
        self.finds("text_rules.py", "pronouns", "runtime/load/a.cc", "int a;  ///< This is it.\n")

    # ---- format_rules

    def test_formatting(self):
        self.finds("format_rules.py", "clang-formatted", "runtime/load/a.cc", "int  a;\n")

    # ---- header_rules

    def test_headers_can_be_included_alone(self):
        self.finds("header_rules.py", "cannot be included alone", "runtime/load/a.h",
                   "#ifndef A_H_\n#define A_H_\ninline uint32_t A() { return 0; }\n#endif\n",
                   "--compiler", COMPILER)

    def test_a_header_that_its_source_includes_first_is_proven_there(self):
        self.put("runtime/load/a.h", "uint32_t A();\n")
        self.put("runtime/load/a.cc", '// A.\n#include "runtime/load/a.h"\n')
        self.assertEqual(self.complaints("header_rules.py", "--compiler", COMPILER), [])

    # ---- example_rules

    def test_the_readme_shows_the_tested_example(self):
        self.finds("example_rules.py", "differs", "docs/cpp.md", "```cpp\nint main() { return 1; }\n```\n")

    def test_the_readme_shows_an_example(self):
        self.finds("example_rules.py", "shows no program", "docs/cpp.md", "```sh\nmake\n```\n")

    # ---- fork_line_rules

    def objects(self, source):
        path = self.put("scratch/object.cc", source)
        subprocess.run([COMPILER, "-std=c++20", "-O2", "-c", str(path), "-o", str(path) + ".o"], check=True)
        return self.put("scratch/objects", f"{path}.o\n")

    def check_fork_line(self, source):
        return "\n".join(self.complaints("fork_line_rules.py", "--objects", str(self.objects(source))))

    def test_system_calls_are_allowed_below_the_fork_line(self):
        self.assertEqual(self.check_fork_line(
            '#include <string.h>\n#include <unistd.h>\nint F(int fd, char* p) { memset(p, 0, 99); '
            'return read(fd, p, 9) < 0 ? 1 : 0; }'), "")

    def test_the_heap_is_found(self):
        self.assertIn("imports operator new", self.check_fork_line("int* F() { return new int(1); }"))
        self.assertIn("imports malloc", self.check_fork_line("#include <stdlib.h>\nvoid* F() { return malloc(1); }"))

    def test_virtual_destructors_are_found(self):
        self.assertIn("operator delete", self.check_fork_line("struct A { virtual ~A(); };\nA::~A() {}"))

    def test_exceptions_are_found(self):
        self.assertIn("__cxa_", self.check_fork_line("void F() { throw 1; }"))

    def test_static_constructors_are_found(self):
        self.assertIn(".init_array", self.check_fork_line("int F();\nint g = F();"))

    def test_initialization_at_first_use_is_found(self):
        self.assertIn("first use", self.check_fork_line(
            "__attribute__((noinline)) static int F(int x) { return x * 3; }\n"
            "int* G(int x) { static int y = F(x); return &y; }"))

    def test_upper_layers_are_found(self):
        self.assertIn("imports holdfast::base::F()",
                      self.check_fork_line("namespace holdfast::base { void F(); }\nvoid G() { holdfast::base::F(); }"))

    def test_no_objects_is_no_proof(self):
        self.assertIn("lists no objects", "\n".join(
            self.complaints("fork_line_rules.py", "--objects", str(self.put("scratch/objects", "\n")))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", default=COMPILER)
    options, rest = parser.parse_known_args()
    COMPILER = options.compiler
    unittest.main(argv=sys.argv[:1] + rest)
