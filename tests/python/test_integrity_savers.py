"""integrity-fuzz --savers: other savers run the rounds of Holdfast's, reduced to what every saver offers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest

from holdfast import integrity
from holdfast.integrity import campaign, jobs, megatron, peers, processes, rounds, schedule

MIB = 1 << 20


@pytest.fixture
def adopting() -> Iterator[None]:
    jobs.start_server()
    with processes.adopting():
        yield


def round_of_two(saver: str, **given: Any) -> dict[str, Any]:
    """Two saves of one path, the second over the first."""
    drawn = schedule.draw(3, 0, schedule.Limits(ranks_max=1, mounts=()))
    spec = {"tensors": 4, "bytes": MIB, "wide": False, "objects": False}
    save = {"do": "save", "step": 1, "mutate": True, "rate": 0, "spec": spec}
    drawn |= {"disk": 0, "replace": True, "one_name": True, "corruptions": []}
    drawn["lives"] = [[{**save, "n": 1}, {"do": "wait"}, {**save, "n": 2, **given}]]
    return peers.reduce(drawn, saver)


def test_savers_are_compared_by_the_same_rounds(tmp_path: Path) -> None:
    done = programs.run("-m", "holdfast.integrity", "--savers", "holdfast.dcp,dcp-thread", "--rounds", "3", "--seed", "5", "--ranks", "1",
                        "--jobs", "1", "--no-mount", "--dir", tmp_path, "--json", timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ours, stock = json.loads(done.stdout)
    assert (ours["saver"], stock["saver"]) == ("holdfast.dcp", "dcp-thread")
    assert ours["rounds"] == ours["survived"] == stock["rounds"] == 3
    assert ours["saves"] == stock["saves"] > 0
    assert ours["damages"] > 0 and ours["accepted"] == 0


def test_each_saver_has_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow one would need many times that of a fast one for as many rounds."""
    given: list[tuple[Any, ...]] = []

    def run(self: campaign.Campaign, *of: Any) -> None:
        given.append(of[:2])
        self.done = 100 // len(given)

    monkeypatch.setattr(processes, "prepare_program", lambda: None)
    monkeypatch.setattr(campaign.Campaign, "run", run)
    assert integrity.main(["--savers", "holdfast.dcp,dcp-thread,dcp-process", "--time", "9", "--dir", str(tmp_path), "--json"]) == 0
    assert given == 3 * [(None, 9.0)]
    assert [row["rounds"] for row in json.loads(capsys.readouterr().out)] == [100, 50, 33]


def test_a_saver_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron, "why_not", lambda: "it is not there")
    assert [peers.why_not(name) for name in ("dcp-thread", "megatron-persistent")] == ["", "megatron-persistent: it is not there"]


def test_an_unknown_saver_is_refused(tmp_path: Path) -> None:
    done = programs.run("-m", "holdfast.integrity", "--savers", "dcp-fiber", "--dir", tmp_path)
    assert done.returncode == 2
    assert "there is no dcp-fiber" in done.stderr


@pytest.mark.parametrize("saver", peers.NAMES)
def test_no_saver_has_two_saves_at_once(saver: str) -> None:
    for number in range(20):
        made = peers.reduce(schedule.draw(1, number, schedule.Limits(mounts=())), saver)
        for actions in made["lives"]:
            kinds = [action["do"] for action in actions]
            assert all(before == "wait" for before, kind in zip(["", *kinds], kinds, strict=False) if kind == "save"), kinds


@pytest.mark.parametrize("saver", ["holdfast.dcp", "dcp-thread"])
def test_a_saver_survives_two_saves_without_an_event(saver: str, tmp_path: Path, adopting: None) -> None:
    assert rounds.run(round_of_two(saver), str(tmp_path)).problems == []


def test_a_saver_that_reads_its_state_late_is_found(tmp_path: Path, adopting: None) -> None:
    result = rounds.run(round_of_two("holdfast.dcp"), str(tmp_path), "integrity_planted:captures_late")
    assert "ii" in {p["invariant"] for p in result.problems}


def test_a_save_that_replaces_and_fails_costs_the_stock_saver_the_checkpoint(tmp_path: Path, adopting: None) -> None:
    """The stock saver writes over the files of the checkpoint that it replaces; ours keeps it."""
    limit = {"kind": "limit-size", "rank": 0, "phase": "writing", "share": 0.0, "seconds": 0.0, "bytes": 4096}
    assert rounds.run(round_of_two("holdfast.dcp", event=limit), str(tmp_path)).problems == []
    for _ in range(10):  # on a busy machine its thread may begin to write behind the limit
        stock = rounds.run(round_of_two("dcp-thread", event=limit), str(tmp_path))
        if {p["invariant"] for p in stock.problems} & {"i", "ii"}:
            return
    pytest.fail(f"the stock saver kept the checkpoint: {stock.counts}")
