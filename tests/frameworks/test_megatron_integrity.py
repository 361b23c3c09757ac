"""integrity-fuzz through Megatron-Core: rounds of this door, and the proof that its judge can find a mistake."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_integrity import FLIP, WAIT, event, made, save
from test_integrity_savers import round_of_two

from holdfast.integrity import jobs, native, peers, places, power_cuts, processes, queues, rounds, schedule

SMALL = {"bytes": 4096, "tensors": 3, "objects": True}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[rounds.Bench]:
    made = rounds.Bench(str(tmp_path), [schedule.MEGATRON])
    with processes.adopting():
        yield made
        made.close()


def of_megatron(*actions: dict[str, Any], **given: Any) -> dict[str, Any]:
    return made(*actions, door=schedule.MEGATRON, **given)


@pytest.mark.every_version
def test_every_reader_finds_what_two_ranks_have_saved(bench: rounds.Bench) -> None:
    """In both dialects, over two lives; the second one loads by Megatron's own load."""
    first, load = [save(1, spec=SMALL), WAIT, save(2, spec=SMALL)], {"do": "load", "back": 1}
    for number in range(len(queues.DIALECTS)):
        given = of_megatron(ranks=2, number=number, corruptions=FLIP)
        done = bench.run({**given, "lives": [first, [load, save(3, spec=SMALL)]]})
        assert done.problems == []
        assert done.counts["durable"] == 6 and done.counts["loads by trainers"] == 2
        assert done.counts["reads"] >= 3 * 3  # three checkpoints, three readers


@pytest.mark.parametrize("kind", ["kill-worker", "cancel", "kill-trainer"])
def test_a_save_of_two_ranks_under_attack(kind: str, bench: rounds.Bench) -> None:
    attack = save(2, **event(kind, rank=1))
    done = bench.run(of_megatron(save(1, spec=SMALL), WAIT, attack, ranks=2))
    assert done.problems == []
    assert done.counts[f"in flight {kind}"] == 1


def test_a_save_that_fails_costs_no_later_one(bench: rounds.Bench) -> None:
    done = bench.run(of_megatron(save(1, **event("limit-size", bytes=4096)), save(2, spec=SMALL), store="server"))
    assert done.problems == []
    assert (done.counts["failed"], done.counts["durable"]) == (1, 1)


NO_FUSE = pytest.mark.skipif(bool(places.why_not("fuse")), reason=places.why_not("fuse"))


@NO_FUSE
@pytest.mark.parametrize("operation", ["MKDIR", "LOOKUP"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_errors_of_calls_that_megatron_and_its_caller_make_are_told_as_theirs(ranks: int, operation: str, tmp_path: Path) -> None:
    """Of the directory, and of a look whether it is there. The other rank ends, too."""
    jobs.start_server([schedule.MEGATRON])
    saves = [action for step in range(1, 4) for action in (save(step, spec=SMALL), WAIT)]
    with processes.adopting():
        done = [rounds.run(of_megatron(*saves, ranks=ranks, fuse={"kind": "errs", "key": key, "operations": [operation], "share": 0.3}),
                           str(tmp_path)) for key in range(2)]  # fmt: skip
    assert [p for one in done for p in one.problems] == []
    assert sum(one.counts["refused"] for one in done) > 0


@NO_FUSE
@pytest.mark.parametrize(("plant", "found"), [("", False), ("megatron_planted:megatron_syncs_nothing", True)])
def test_what_megatron_has_written_survives_a_power_cut(plant: str, found: bool, tmp_path: Path) -> None:
    """Each file by its own fsync; and on a disk, whose flush makes everything durable."""
    jobs.start_server([schedule.MEGATRON])
    with processes.adopting():
        forgetful = [rounds.run(of_megatron(save(1, spec=SMALL), ranks=2, fuse={"kind": "forgets", "key": key}), str(tmp_path),
                                plant) for key in range(2)]  # fmt: skip
        on_disk = power_cuts.run(of_megatron(save(1, spec=SMALL)), "ext4", str(tmp_path), 0, plant)
    assert on_disk.counts["states ext4 flush"] > 10
    for problems in ([p for done in forgetful for p in done.problems], on_disk.problems):
        assert {p["invariant"] for p in problems} == ({"i"} if found else set()), problems
        assert any("has no metadata.json" in p["what"] for p in problems) is found, problems


@pytest.mark.parametrize(("plant", "invariant"), [
    ("megatron_saves_late", "ii"), ("megatron_forgets_its_file", "i"), ("megatron_fails_silently", "i"),
])  # fmt: skip
def test_a_mistake_is_found(plant: str, invariant: str, tmp_path: Path) -> None:
    jobs.start_server([schedule.MEGATRON])
    attack = event("kill-worker") if "fails" in plant else {"spec": SMALL}
    with processes.adopting():
        done = rounds.run(of_megatron(save(1, **attack), store="server"), str(tmp_path), f"megatron_planted:{plant}")
    assert invariant in {p["invariant"] for p in done.problems}, done.problems


@pytest.mark.parametrize("saver", peers.OF_MEGATRON)
def test_a_saver_of_the_table_survives_two_saves_without_an_event(saver: str, tmp_path: Path) -> None:
    if reason := peers.why_not(saver):
        pytest.skip(reason)
    jobs.start_server([schedule.MEGATRON])
    with processes.adopting():
        done = rounds.run(round_of_two(saver), str(tmp_path))
    assert done.problems == []
    assert (done.counts["calls"], done.counts["durable"]) == (2, 2)


def test_the_door_is_drawn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert schedule.MEGATRON in native.doors()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert schedule.MEGATRON not in native.doors()
