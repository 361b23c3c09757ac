"""Each planted bug has a row in docs/planted.md, and each row a test that makes the bug."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import test_integrity

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import scenarios

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/planted.md"
Row = dict[str, str]
Function = ast.FunctionDef | ast.AsyncFunctionDef
# These take their bugs from a list, or look at a report of a planted bug.
WITHOUT_MARK = {
    "test_a_planted_bug_is_caught", "test_a_planted_bug_is_caught_in_files", "test_the_same_rounds_without_a_planted_bug_break_nothing",
    "test_a_planted_bug_has_a_counterexample", "test_a_planted_bug_that_is_found_is_no_failure", "test_a_planted_bug_has_to_be_found",
}  # fmt: skip


def rows(section: str) -> dict[str, Row]:
    """The rows of a section of the page, by the name of the bug."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found: dict[str, Row] = {}
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
        if line.startswith("| planted bug |"):
            head = cells
        elif line.startswith("| `"):
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = dict(zip(head, cells, strict=True))
    assert found, section
    for row in found.values():
        assert all(row.values()), row
        assert re.search(r"\d$", row.get("rounds", row.get("found in round", ""))), row
    return found


def text_of(path: str) -> str:
    return (ROOT / path).read_text()


# ---- C++.


def planted() -> set[str]:
    """Of the runtime, by the headers that declare them."""
    bugs = re.findall(r"^  (k\w+),", text_of("runtime/base/planted_bugs.h"), re.MULTILINE)
    flags = re.findall(r"^extern bool (g_\w+);", text_of("runtime/worker/planted_bugs.h"), re.MULTILINE)
    return {*bugs, *flags} - {"kNone"}


def settings() -> set[str]:
    """Of the writer of the tests, by the comments of its settings."""
    return set(re.findall(r"bool (\w+) =\s+true;  ///< False: the planted bug", text_of("tests/crash/campaigns.h")))


def of_other_folders() -> dict[str, str]:
    """The bugs that are linked with a test of another folder, and its name."""
    return dict(re.findall(r"^  ([kg]\w+)=(\w+\.\w+)", text_of("tests/planted/CMakeLists.txt"), re.MULTILINE))


def cpp_test(path: str, name: str) -> str:
    """The text of a test."""
    suite, _, case = name.partition(".")
    found = re.search(rf"^TEST(_F|_P)?\({suite}, {case}\).*?^(?=TEST|INSTANTIATE|\Z)", text_of(path), re.MULTILINE | re.DOTALL)
    assert found, f"{path} has no test {name}"
    return found[0]


def test_each_planted_bug_of_the_runtime_has_a_row() -> None:
    assert rows("In the runtime").keys() == planted() | settings()
    assert len(planted()) >= 25 and settings()


@pytest.mark.parametrize("bug", rows("In the runtime"))
def test_a_row_of_the_runtime_names_a_test_and_its_command(bug: str) -> None:
    row = rows("In the runtime")[bug]
    path, _, test = row["found by"].partition("::")
    text = cpp_test(path, test)
    folder, _, program = row["ctest"].partition("/")
    if folder == "planted":
        assert program == bug and of_other_folders()[bug] == test
        return
    assert re.search(rf"\b{bug}\b", text if bug in text else text_of(path)), f"{path} does not make {bug}"
    assert f"{program}.cc" == Path(path).name
    described = text_of(f"{Path(path).parent}/CMakeLists.txt")
    assert re.search(rf"holdfast_test\({program} LABEL {folder}\b", described), row["ctest"]


def test_what_tests_of_other_folders_find_has_their_command() -> None:
    assert {bug for bug, row in rows("In the runtime").items() if row["ctest"].startswith("planted/")} == of_other_folders().keys()


def test_each_planted_bug_of_a_fuzz_target_has_a_row() -> None:
    described = text_of("fuzz/CMakeLists.txt")
    found = re.search(r"^set\(planted ([\w ]+)\)", described, re.MULTILINE)
    assert found
    targets = set(found[1].split())
    assert targets == {path.stem[: -len("_fuzz")] for path in (ROOT / "fuzz").glob("*_fuzz.cc") if "fuzz::Planted()" in path.read_text()}
    canaries = set(re.findall(r"^holdfast_canary\((\w+) ", described, re.MULTILINE))
    named = {bug: (row["found by"], row["ctest"]) for bug, row in rows("In the fuzz targets").items()}
    assert named == {
        **{bug: (f"fuzz/{bug}_fuzz.cc", f"fuzz/{bug}_planted") for bug in targets},
        **{bug: ("fuzz/canary.cc", f"fuzz/canary_{bug}") for bug in canaries},
    }


# ---- The model.


def test_each_planted_bug_of_the_model_has_a_row() -> None:
    named = [scenarios.Planted(bug, row["found in the scenario"], row["by"]) for bug, row in rows("In the model of the protocol").items()]
    assert named == scenarios.PLANTED


def test_each_planted_bug_of_the_model_has_a_scenario() -> None:
    sources = [path.read_text() for path in (ROOT / "tests/model").glob("*.py")]
    made = {bug for text in sources for bug in re.findall(r'"([\w ]+)" (?:not )?in (?:self\.)?bugs', text)}
    assert made == {planted.bug for planted in scenarios.PLANTED}


# ---- Python.


def functions_of(path: Path) -> list[Function]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, Function) and node.name.startswith("test_")]


def marks_of(test: Function) -> list[str]:
    calls = [mark for mark in test.decorator_list if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.planted"]
    return [ast.literal_eval(argument) for call in calls for argument in call.args]


PYTHON_TESTS = {
    f"{path.relative_to(ROOT)}::{test.name}": (path, test)
    for folder in ("python", "frameworks") for path in sorted((ROOT / "tests" / folder).glob("test_*.py")) for test in functions_of(path)
}  # fmt: skip
MARKED = {(bug, name) for name, (_, test) in PYTHON_TESTS.items() for bug in marks_of(test)}
OF_TESTS = {**rows("In the Python package"), **rows("In rounds of their own")}


def functions() -> set[str]:
    """What can be planted in a trainer: the functions, but those that only stand for a machine."""
    found = set()
    for path in ("tests/python/integrity_planted.py", "tests/frameworks/megatron_planted.py"):
        for node in ast.parse(text_of(path)).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                said = ast.get_docstring(node)
                assert said, node.name
                found |= {node.name} if "This is no planted bug." not in said else set()
    return found


def test_each_planted_bug_of_the_campaign_has_a_row() -> None:
    assert rows("In the campaign").keys() == test_integrity.PLANTED.keys()


def test_each_bug_that_can_be_planted_in_a_trainer_has_a_row() -> None:
    assert functions() - OF_TESTS.keys() == {bug for bug in test_integrity.PLANTED if not bug.isupper()}
    assert not OF_TESTS.keys() & test_integrity.PLANTED.keys()


def test_each_marked_test_has_a_row() -> None:
    named = {(bug, row["found by"]) for bug, row in OF_TESTS.items() if bug not in functions()}
    assert named == MARKED
    assert len(MARKED) >= 25


@pytest.mark.parametrize("bug", OF_TESTS)
def test_a_row_names_a_test_that_makes_the_bug(bug: str) -> None:
    path, test = PYTHON_TESTS[OF_TESTS[bug]["found by"]]
    begin = min(node.lineno for node in (test, *test.decorator_list))
    assert re.search(rf"\b{bug}\b", "\n".join(path.read_text().splitlines()[begin - 1 : test.end_lineno]))


def test_a_test_that_speaks_of_a_planted_bug_is_marked() -> None:
    unmarked = {
        test.name for path, test in PYTHON_TESTS.values() if path != Path(__file__) and not marks_of(test)
        and re.search(r"planted (bug|mistake)", f"{test.name.replace('_', ' ')} {ast.get_docstring(test)}")
    }  # fmt: skip
    assert unmarked == WITHOUT_MARK
