"""The sums of campaigns in docs/integrity.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import clone
import pytest

RUN = {"date": "2026-01-02", "version": "abc", "seed": 7, "machine": "Linux 6.1 x86_64, 2 CPUs, ext4"}
ROUNDS = {
    "rounds": 40, "escapes": [{"round": 3}],
    "counts": {"calls": 300, "durable": 200, "bytes": 3 << 29, "event kill-worker": 5, "event cancel": 2, "in flight kill-worker": 4,
               "in flight kill-worker x spawn x pwrite": 4, "reads": 900, "verifications": 80, "damage flip": 6,
               "damage refused by a load": 5},
}  # fmt: skip
CUTS = {"rounds": 2, "escapes": 0, "counts": {"durable ext4": 9, "door dcp": 1200, "door plan": 39}, "states": {"states ext4 flush": 1200, "states ext4 torn": 34, "states xfs flush": 5}}
BAD = {"rounds": 2, "escapes": 0, "counts": {}, "states": {"states xfs loses writes": 6}}
LOG = "#2 INITED cov: 7 ft: 8 corp: 1/1b\n#9 DONE cov: 1210 ft: 8 corp: 1/1b\nDone\nstat::number_of_executed_units: 1500000\nstat::average_exec_per_sec: 3\n"


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = clone.script("tools/campaign/sums.py")
    page = tmp_path / "integrity.md"
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nbehind\n")
    monkeypatch.setattr(module, "PAGE", page)
    monkeypatch.setattr(module, "SUMS", tmp_path / "campaigns.json")
    return module


def campaign(directory: Path, *parts: str, state: str = "nothing found") -> Path:
    directory.mkdir()
    (directory / "parts.tsv").write_text("".join(f"{part}\t1800\t{state}\tverdict\n" for part in parts))
    for name, report in (("rounds", ROUNDS), ("power_cuts", CUTS), ("bad_disks", BAD)):
        (directory / f"{name}.json").write_text(json.dumps(report))
    (directory / "json_fuzz.log").write_text(LOG)
    return directory


def added(sums: ModuleType, given: dict[str, Any], directory: Path, *parts: str) -> str:
    total = json.loads(sums.SUMS.read_text()) if sums.SUMS.exists() else {"runs": [], "counts": {}}
    sums.add(total, dict(given), sums.gather(campaign(directory, *parts)))
    sums.SUMS.write_text(json.dumps(total))
    return sums.table(total)


def test_two_campaigns_add_up(sums: ModuleType, tmp_path: Path) -> None:
    added(sums, RUN, tmp_path / "a", "rounds", "json_fuzz", "dead_writes")
    told = added(sums, {**RUN, "seed": 8, "version": "def"}, tmp_path / "b", "rounds", "power_cuts", "json_fuzz", "bad_disks", "planted")
    assert "2 runs, 3.5 hours in all, of abc, def on Linux 6.1" in told
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if line.startswith("|")}
    assert "80 rounds; 600 calls of save by the ranks, 400 durable (3 GiB in the runs that count them); 14 events, 8 while I/O was in flight, 10 kills; " in rows["rounds of all doors"]
    assert "1,800 reads compared bit for bit, 160 verifications, 12 damages" in rows["rounds of all doors"]
    assert rows["rounds of all doors"].endswith("| 2 |") and "| 1.0 |" in rows["rounds of all doors"]
    assert "disks: 1,234 of ext4, 5 of xfs; in the runs that count them: 1,200 of dcp, 39 of plan |" in rows["power cuts"]
    assert rows["bad disks"].endswith("| 2 rounds; disks: 6 of xfs | 0 |")
    assert "3.0 million executions of 1 parsers and models; edges reached: json 1,210 |" in rows["fuzzers"]
    assert "| 0.5 |" in rows["the runtime's long tests"]
    assert re.search(r"kill-worker +8 ", told)


def test_a_version_with_hours_of_its_own_has_its_own_table(sums: ModuleType, tmp_path: Path) -> None:
    added(sums, RUN, tmp_path / "a", "rounds")
    for n in range(8):
        told = added(sums, {**RUN, "version": "def", "seed": 10 + n}, tmp_path / f"b{n}", "rounds")
        whole, _, own = told.partition("\n\nOf these, the runs of def:\n\n")
        assert f"{n + 2} runs, {(n + 2) / 2:.1f} hours" in whole and f"| {40 * (n + 2)} rounds; " in whole
        assert bool(own) == (n == 7)
    assert own.startswith("8 runs, 4.0 hours in all, of def on") and "| 320 rounds; " in own and re.search(r"kill-worker +32 ", own)


def test_a_campaign_counts_once(sums: ModuleType, tmp_path: Path) -> None:
    added(sums, RUN, tmp_path / "a", "rounds")
    before = sums.SUMS.read_text()
    with pytest.raises(ValueError, match="seed 7 .* has rounds already"):
        added(sums, RUN, tmp_path / "b", "rounds", "power_cuts")
    assert sums.SUMS.read_text() == before
    assert "2 runs, 1.0 hours" in added(sums, RUN, tmp_path / "c", "power_cuts")


def test_a_part_that_found_something_has_an_escape(sums: ModuleType, tmp_path: Path) -> None:
    parts = sums.gather(campaign(tmp_path / "a", "dead_writes", "json_fuzz", state="found"))
    assert {name: part["escapes"] for name, part in parts.items()} == {"tests": 1, "fuzzers": 1}


@pytest.mark.parametrize("state", ["not run", "left out"])
def test_a_part_that_did_not_run_has_no_time(sums: ModuleType, tmp_path: Path, state: str) -> None:
    parts = sums.gather(campaign(tmp_path / "a", "rounds", "steps", "dead_writes", "fuzzers", state=state))
    assert {name: part["counts"]["rounds"] for name, part in parts.items()} == {"rounds": 40}  # which could not go on


def test_a_crash_of_the_program_is_an_escape_beside_its_report(sums: ModuleType, tmp_path: Path) -> None:
    directory = campaign(tmp_path / "a", "power_cuts", state="found")
    assert sums.gather(directory)["power_cuts"]["escapes"] == 1


def test_a_part_that_was_killed_before_its_report_keeps_its_name(sums: ModuleType, tmp_path: Path) -> None:
    parts = sums.gather(campaign(tmp_path / "a", "program", "coverage", "dead_writes"))
    assert {name: part["seconds"] for name, part in parts.items()} == {"program": 1800, "coverage": 1800, "tests": 1800}
    sums.add(total := {"runs": [], "counts": {}}, dict(RUN), parts)
    assert "| rounds of the C++ program | 0.5 | 0 rounds; " in sums.table(total)


def test_the_table_replaces_the_former_one(sums: ModuleType, tmp_path: Path) -> None:
    sums.main([str(campaign(tmp_path / "a", "rounds")), "abc", "7"])
    page = sums.PAGE.read_text()
    assert page.startswith(f"before\n{sums.BEGIN}\n") and page.endswith(f"{sums.END}\nbehind\n")
    assert "40 rounds" in page and "old" not in page
