"""Adds what a campaign has run to the sums of docs/campaigns.json, and writes their table into docs/integrity.md.

    sums.py DIR VERSION SEED

DIR is that of tools/campaign.sh: its parts.tsv has a line for each part, with its seconds, its state and its
verdict, as verdict.py gives them.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.integrity import campaign

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import page_part
import verdict

ROOT = Path(__file__).resolve().parents[2]
SUMS, PAGE = ROOT / "docs/campaigns.json", ROOT / "docs/integrity.md"
BEGIN, END = "<!-- campaigns: written by tools/campaign.sh --write -->", "<!-- campaigns: end -->"
ROUNDS = {"rounds": "rounds of all doors", "megatron": "rounds through Megatron-Core", "program": "rounds of the C++ program"}
PARTS = (*verdict.OF_INTEGRITY_FUZZ, "planted", "coverage")  # also without a report, when they were killed
STEPS = {"steps": "faults and kills at every step", "pairs": "two at a time"}
DISKS = {"power_cuts": "power cuts", "bad_disks": "bad disks"}
NAMES = {**ROUNDS, **STEPS, **DISKS, "tests": "the runtime's long tests", "fuzzers": "fuzzers"}
HOURS_OF_A_REPORT = 4
DOOR = "door "  # of a disk's saves
EDGES = "edges "  # of a fuzzer: the most that a run has reached

Counts = collections.Counter[str]


def gather(directory: Path) -> dict[str, dict[str, Any]]:
    """What each part of a campaign has done: `seconds`, `escapes` and `counts`."""
    found: dict[str, dict[str, Any]] = {}
    for line in (directory / "parts.tsv").read_text().splitlines():
        name, seconds, state, _ = line.split("\t")
        counts, escapes = Counts(), int(state == verdict.FOUND)
        if name.endswith("_fuzz"):
            log = (directory / f"{name}.log").read_text(errors="replace")
            executed = re.search(r"^stat::number_of_executed_units: *(\d+)", log, re.M)
            counts[name] = int(executed[1]) if executed else 0
            counts[EDGES + name.removesuffix("_fuzz")] = max(map(int, re.findall(r" cov: (\d+)", log)), default=0)
            name = "fuzzers"
        elif (report := directory / f"{name}.json").exists():
            told = json.loads(report.read_text())
            counts.update({**told.get("states", {}), **told["counts"], "rounds": told.get("rounds", 0)})
            escapes = max(escapes, told["escapes"] if isinstance(told["escapes"], int) else len(told["escapes"]))
        elif name not in PARTS:  # one of the runtime's long tests
            name = "tests"
        if state in (verdict.NOT_RUN, verdict.LEFT_OUT) and not any(counts.values()):
            continue
        part = found.setdefault(name, {"seconds": 0, "escapes": 0, "counts": Counts()})
        part["seconds"] += int(seconds)
        part["escapes"] += escapes
        part["counts"].update(counts)
    return found


def add(sums: dict[str, Any], run: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Adds a campaign to the sums.

    Raises:
        ValueError: a part of it is in them.
    """
    same = [other for other in sums["runs"] if (run["date"], run["seed"]) == (other["date"], other["seed"])]
    if again := sorted({name for other in same for name in found.keys() & other["parts"].keys()}):
        raise ValueError(f"of the campaign of {run['date']} with seed {run['seed']} {SUMS} has {', '.join(again)} already")
    run["parts"] = {name: [part["seconds"], part["escapes"]] for name, part in found.items()}
    sums["runs"].append(run)
    for counts in (sums["counts"], sums.setdefault("versions", {}).setdefault(run["version"], {})):
        for name, part in found.items():
            before = Counts(counts.get(name, {}))
            most = {key: max(before[key], n) for key, n in part["counts"].items() if key.startswith(EDGES)}
            counts[name] = dict(sorted(((before + part["counts"]) | most).items()))


def done(name: str, counts: Counts) -> str:
    """What a part has done, in one line."""
    if name in ROUNDS:
        in_flight = campaign.total(counts, "in flight ") - sum(n for key, n in counts.items() if " x " in key)
        saved = f" ({counts['bytes'] / (1 << 30):,.0f} GiB in the runs that count them)" if counts["bytes"] else ""
        return (f"{counts['rounds']:,} rounds; {counts['calls']:,} calls of save by the ranks, {counts['durable']:,} durable{saved}; "
                f"{campaign.total(counts, 'event '):,} events, {in_flight:,} while I/O was in flight, "
                f"{campaign.total(counts, 'event kill-'):,} kills; "
                f"{counts['reads']:,} reads compared bit for bit, {counts['verifications']:,} verifications, "
                f"{campaign.damages(counts):,} damages")  # fmt: skip
    if name in STEPS:
        return (f"{counts['runs']:,} of {counts['to run']:,}: {counts['errors']:,} errors, {counts['short results']:,} short "
                f"results, {counts['kills']:,} kills; {counts['reads']:,} reads compared")  # fmt: skip
    if name in DISKS:
        disks = collections.Counter[str]()
        for key, number in counts.items():
            if key.startswith("states "):
                disks[key.split()[1]] += number
        doors = [f"{n:,} of {key.removeprefix(DOOR)}" for key, n in sorted(counts.items()) if key.startswith(DOOR)]
        return (f"{counts['rounds']:,} rounds; disks: " + ", ".join(f"{n:,} of {kind}" for kind, n in sorted(disks.items()))
                + (f"; in the runs that count them: {', '.join(doors)}" if doors else ""))  # fmt: skip
    if name == "fuzzers":
        targets = {key: n for key, n in counts.items() if not key.startswith(EDGES)}
        reached = ", ".join(f"{key.removeprefix(EDGES)} {n:,}" for key, n in counts.items() if key.startswith(EDGES))
        return (f"{sum(targets.values()) / 1e6:,.1f} million executions of {len(targets)} parsers and models"
                + (f"; edges reached: {reached}" if reached else ""))  # fmt: skip
    return ""


def table(sums: dict[str, Any]) -> str:
    """The sums as text: of all runs, and of the version with most hours, from four hours on."""
    text = _table(sums["runs"], sums["counts"])
    versions = {version: [run for run in sums["runs"] if run["version"] == version] for version in sums.get("versions", ())}
    longest = max(versions, key=lambda version: _hours(versions[version]), default="")
    if longest and len(versions[longest]) < len(sums["runs"]) and _hours(versions[longest]) >= HOURS_OF_A_REPORT:
        text += f"\n\nOf these, the runs of {longest}:\n\n{_table(versions[longest], sums['versions'][longest])}"
    return text


def _hours(runs: list[dict[str, Any]]) -> float:
    return float(sum(part[0] for run in runs for name, part in run["parts"].items() if name in NAMES) / 3600)


def _table(runs: list[dict[str, Any]], counts: dict[str, dict[str, int]]) -> str:
    hours = _hours(runs)
    lines = [f"{len(runs)} run{'s' * (len(runs) > 1)}, {hours:.1f} hours in all, of {', '.join(dict.fromkeys(run['version'] for run in runs))} on "
             f"{', '.join(dict.fromkeys(run['machine'] for run in runs))}:", "",
             "| part | hours | done | escapes |", "| --- | ---: | --- | ---: |"]  # fmt: skip
    for name, title in NAMES.items():
        parts = [run["parts"][name] for run in runs if name in run["parts"]]
        if parts:
            lines.append(f"| {title} | {sum(p[0] for p in parts) / 3600:.1f} | {done(name, Counts(counts[name]))} "
                         f"| {sum(p[1] for p in parts)} |")  # fmt: skip
    together = Counts()
    for name in ROUNDS:
        together.update(counts.get(name, {}))
    lines += ["", "```", *campaign.table_of_events(together), "```"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    directory, version, seed = Path(argv[0]), argv[1], int(argv[2])
    sums = json.loads(SUMS.read_text()) if SUMS.exists() else {"runs": [], "counts": {}}
    system = platform.uname()
    machine = (f"{system.system} {'.'.join(system.release.split('.')[:2])} {system.machine}, "
               f"{os.cpu_count()} CPUs, {campaign.file_system_of(str(directory)).split()[0]}")  # fmt: skip
    add(sums, {"date": time.strftime("%F", time.gmtime()), "version": version, "seed": seed, "machine": machine}, gather(directory))
    SUMS.write_text(json.dumps(sums, indent=1) + "\n")
    PAGE.write_text(page_part.replaced(PAGE.read_text(), BEGIN, END, f"\n{table(sums)}\n"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
