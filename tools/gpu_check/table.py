"""The table of a GPU check, in Markdown and as JSON, of the rows that its steps have written. Needs no PyTorch.

    table.py ROWS.jsonl --table DIR     writes DIR/table.md and DIR/results.json; exits with 1 if something has failed or was missed
    table.py ROWS.jsonl --add STEP RESULT
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from report import REHEARSAL

PACKAGES = ("holdfast", "torch", "megatron-core", "nvidia-resiliency-ext", "lightning", "deepspeed")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release(), "cores": str(os.cpu_count())}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| step | what | result | value | aim |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        value = f"{row['value']} {row['unit']}".strip()
        cells = (row["step"], row["what"], row["result"], value, row["aim"])
        lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def page(rows: list[dict[str, Any]], about: dict[str, str]) -> str:
    """GPU figures and a rehearsal's outcomes stand in tables of their own."""
    rehearsed = [row for row in rows if row["device"] == REHEARSAL]
    real = [row for row in rows if row["device"] != REHEARSAL]
    parts = [", ".join(f"{name} {version}" for name, version in about.items())]
    if real:
        devices = sorted({row["device"] for row in real} - {""})
        parts += [f"## {', '.join(devices) or 'The script'}", markdown(real)]
    if rehearsed:
        parts += ["## Rehearsal on the CPU: no figure of a GPU", markdown(rehearsed)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--table", type=Path, metavar="DIR")
    parser.add_argument("--add", nargs=2, metavar=("STEP", "RESULT"))
    given = parser.parse_args()
    if given.add:
        step, result = given.add
        row = {"step": step, "what": "all of it", "value": "", "unit": "", "aim": "", "result": result, "device": ""}
        with given.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{step}: {result}")
        return 0
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    about = versions()
    result = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "versions": about, "rows": rows}
    (given.table / "results.json").write_text(json.dumps(result, indent=1))
    (given.table / "table.md").write_text(page(rows, about))
    print(page(rows, about))
    bad = [row for row in rows if row["result"].startswith(("FAILED", "MISSED"))]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
