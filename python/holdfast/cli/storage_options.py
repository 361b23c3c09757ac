"""The options of commands that read or write a store: ``--storage`` and ``--storage-file``."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from typing import Any

from holdfast.cli import text
from holdfast.errors import Error, of_system

_SECRET = re.compile(
    r"secret|token|password|credential|(account|master|encryption|customer|access)_key(?!_id)|sas|client_options", re.IGNORECASE
)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storage", action="append", default=[], metavar="KEY=VALUE", help="option of the store, as endpoint=http://host:9000")
    parser.add_argument("--storage-file", metavar="FILE", help="such options, one KEY=VALUE a line: for secrets; client_options={...} is JSON")


def given(arguments: argparse.Namespace, command: str) -> dict[str, Any]:
    """The options of the store. Messages have no values: they may be secret."""
    storage: dict[str, Any] = {}
    for number, entry in enumerate(arguments.storage, 1):
        key, sign, value = entry.partition("=")
        if not sign:
            raise Error("INVALID_ARGUMENT", f"--storage number {number}: KEY=VALUE is expected")
        if _SECRET.search(key):
            print(text.printable(f"holdfast {command}: --storage {key}=...: every user of this machine sees it in the list of processes; "
                                 "use the environment or --storage-file"), file=sys.stderr)  # fmt: skip
        storage[key] = _value(key, value)
    if arguments.storage_file is not None:
        path = arguments.storage_file
        with of_system(f"read {path}"), open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
        for number, line in enumerate(lines, 1):
            key, sign, value = line.partition("=")
            if line.strip() and not line.startswith("#"):
                if not sign:
                    raise Error("INVALID_ARGUMENT", f"read {path}: line {number}: KEY=VALUE is expected")
                storage[key.strip()] = _value(key.strip(), value.strip())
    return storage


def _value(key: str, value: str) -> Any:
    """JSON for an option that has options itself. Others may be a text of JSON, as the key of an account."""
    if key not in ("client_options", "retry_config") or not value.startswith("{"):
        return value
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value)
    raise Error("INVALID_ARGUMENT", f"option {key}: its value is no JSON")
