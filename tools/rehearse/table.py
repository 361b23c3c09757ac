"""The results of tools/rehearse.sh as a table.

    table.py [--write] RESULTS.jsonl

`--write` puts it into docs/install.md, where the rows of other systems stay.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import page_part

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"
BEGIN, END = "<!-- rehearsals: written by tools/rehearse.sh --write -->", "<!-- rehearsals: end -->"
# What a fallback is called in the log, and what the table says of it.
FALLBACKS = {
    "io_uring cannot be used": "pwrite",
    "small pages": "small pages",
    "takes no direct I/O": "page cache",
    "did not fit into the free staging memory": "streamed",
}


def row(result: dict[str, object]) -> str:
    told = [word for text, word in FALLBACKS.items() if any(text in line for line in result["told"])]  # type: ignore[attr-defined]
    install = f"{result['install']:.1f} s" if result["install"] else ""
    return (
        f"| {result['system']}, {result['libc']}, Python {result['python']} | `{result['situation']}` | {result['engine']} | {result['pages']} | "
        f"{result['direct_io']} | {', '.join(told) or 'nothing'} | {install} | {result['seconds']:.1f} s |"
    )


def table(results: list[dict[str, object]], kept: list[str]) -> str:
    return "\n".join([
        "| system | situation | engine | staging memory | direct I/O | the log says once | pip install | first save, verified and loaded |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |", *kept, *(row(r) for r in results)])


def written(page: str, results: list[dict[str, object]]) -> str:
    """The page with these rows in the place of the former ones for the same system and situation."""
    new = {(result["system"], result["situation"]) for result in results}
    cells = re.compile(r"\| ([^,|]*),[^|]*\| `([^`]*)` \|")
    kept = [line for line in page_part.read(page, BEGIN, END).strip().splitlines()[2:] if not ((found := cells.match(line)) and found.groups() in new)]
    return page_part.replaced(page, BEGIN, END, table(results, kept))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", action="store_true", help="put the rows into docs/install.md")
    arguments = parser.parse_args()
    results = [json.loads(line) for line in arguments.results.read_text().splitlines()]
    if not results:
        print(f"{arguments.results}: no rehearsal has ended well", file=sys.stderr)
        return 1
    print(table(results, []))
    if arguments.write:
        PAGE.write_text(written(PAGE.read_text(), results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
