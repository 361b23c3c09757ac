"""Runs the tests of one file of a PyTorch checkout with Holdfast in the place of PyTorch's classes.

Called by run_pytorch_tests.py, in a process of its own. Prints a JSON line for each test; what the
saves were is in the journal.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import importlib
import inspect
import json
import os
import sys
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import journal
import pytorch_adaptations as adaptations


class _Result(unittest.TestResult):
    """What became of one test."""

    def __init__(self) -> None:
        super().__init__()
        self.status = "passed"
        self.reason = ""

    def _is(self, status: str, reason: str) -> None:
        if self.status == "passed":
            self.status, self.reason = status, reason

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._is("skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._is("failed", self._exc_info_to_string(err, test))

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._is("failed", self._exc_info_to_string(err, test))


def _flat(suite: Any) -> Iterator[Any]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from _flat(item)
        else:
            yield item


def _id(test: Any) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


def _matching(table: dict[str, Any], name: str) -> Any:
    return next((v for pattern, v in table.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _lacking(name: str) -> str | None:
    """What a test needs of PyTorch that the installed one does not have."""
    needs = _matching(adaptations.NEEDS, name)
    if needs is None:
        return None
    module, _, attribute = needs[0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if needs[1] in inspect.signature(found).parameters:
        return None
    return f"needs a newer PyTorch: {attribute} has no {needs[1]}"


def _tests_in(file: Path) -> list[str]:
    """CLASS.TEST, of a file that is not imported; without what a decorator makes of them."""
    if not file.exists():
        return []
    classes = [n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef)]
    return [f"{c.name}.{f.name}" for c in classes for f in c.body
            if isinstance(f, ast.FunctionDef) and f.name.startswith("test")]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("name", help="of the file, as the tables of adaptations have it")
    parser.add_argument("--only", default="*", help="pattern of CLASS.TEST")
    parser.add_argument("--own-async-save", action="store_true")
    arguments = parser.parse_args()

    def tell(test: str, status: str, reason: str = "", seconds: float = 0.0) -> None:
        line = {"test": test, "status": status, "reason": reason, "seconds": round(seconds, 1)}
        print("RESULT " + json.dumps(line), flush=True)

    whole = adaptations.IMPOSSIBLE.get(f"{arguments.name}::*")
    if whole is not None:
        for test in _tests_in(arguments.file) or ["(all of the file)"]:
            tell(test, "impossible", whole)
        return

    import pytorch_substitutes as substitutes

    substitutes.install(arguments.own_async_save)
    sys.path.insert(0, str(arguments.file.parent))
    # The tests' base classes look at the arguments of the program.
    sys.argv = [str(arguments.file)]
    module = importlib.import_module(arguments.file.stem)
    substitutes.AFTER_IMPORT.get(arguments.file.name, lambda module: None)(module)

    tests = list(_flat(unittest.defaultTestLoader.loadTestsFromModule(module)))
    tests = [t for t in tests if fnmatch.fnmatchcase(_id(t), arguments.only)]
    # Those that start ranks come first: ranks are forked, and the others start threads here.
    tests.sort(key=lambda t: not hasattr(t, "world_size"))
    before: Any = None
    for test in tests:
        if before is not None and type(before) is not type(test):
            type(before).tearDownClass()
        if type(before) is not type(test):
            type(test).setUpClass()
        before = test
        name = f"{arguments.name}::{_id(test)}"
        reason = _matching(adaptations.IMPOSSIBLE, name) or _lacking(name)
        if reason is not None:
            tell(_id(test), "impossible", reason)
            continue
        os.environ[journal.TEST] = _id(test)
        result = _Result()
        started = time.monotonic()
        test.run(result)
        substitutes.settle()
        tell(_id(test), result.status, result.reason, time.monotonic() - started)
    if before is not None:
        type(before).tearDownClass()


if __name__ == "__main__":
    main()
