"""The model of the commit protocol (tests/model): every order of steps and faults keeps the promises."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import order, scenarios, table
from model.checker import explore
from model.protocol import Protocol
from model.state import NAMED, TEMPORARY

import holdfast

LONG = bool(os.environ.get("HOLDFAST_LONG"))


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_the_promises_hold_in_every_state(name: str) -> None:
    result, _ = table.searched(name)
    assert not result.violation, "\n".join([result.violation, *(": ".join(map(str, step)) for step in result.trace)])


@pytest.mark.skipif(not LONG, reason="takes minutes: HOLDFAST_LONG=1")
@pytest.mark.parametrize("name", scenarios.LONG)
def test_the_promises_hold_in_every_state_of_a_large_scenario(name: str) -> None:
    result = explore(Protocol(scenarios.LONG[name]), states_max=20_000_000)
    assert not result.violation, "\n".join([result.violation, *(": ".join(map(str, step)) for step in result.trace)])


@pytest.mark.parametrize("planted", scenarios.PLANTED, ids=lambda planted: planted.bug)
def test_a_planted_bug_has_a_counterexample(planted: scenarios.Planted) -> None:
    config = scenarios.SCENARIOS[planted.scenario]
    result = explore(Protocol(config._replace(bugs=frozenset([planted.bug]))))
    assert planted.violation in result.violation and result.trace


def test_the_table_of_states_is_the_models() -> None:
    text = table.FORMAT.read_text()
    assert table.written(text) == text, "cd tests && python3 -m model.table"


def save(path: Path, seed: int, ranks: int) -> str:
    """A checkpoint of one or two ranks, and its attempt."""
    attempt = f"{seed:032x}"
    saves = [
        holdfast.save_async({"t": torch.full((10,), 10 * seed + rank)}, path, rank=rank, world_size=ranks, attempt=attempt, replace=True)
        for rank in range(ranks)
    ]
    for one in saves:
        one.wait(60)
    holdfast.flush(60)
    return attempt


Checkpoints = dict[tuple[int, str], tuple[str, Path]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Checkpoints of one name, with their attempts: an older one, the one that replaced it, and another."""
    made = {}
    for ranks in (1, 2):
        for key, seed in (("older", 1), ("younger", 2), ("another", 3)):
            path = tmp_path_factory.getbasetemp() / f"of-{ranks}-{key == 'another'}" / "NAME"
            attempt = save(path, 10 * ranks + seed, ranks)
            made[ranks, key] = attempt, Path(shutil.copytree(path, tmp_path_factory.mktemp(key) / "NAME"))
    return made


def test_the_order_of_the_calls_is_the_models() -> None:
    """tests/unit/worker/order_test.cc compares it with the calls of the worker."""
    assert order.HEADER.read_text() == order.written(), "cd tests && python3 -m model.order"


@pytest.mark.parametrize(
    "bug", ["names before data", "data removed first", "votes not kept", "durable early", "no look after the announcement"]
)
def test_another_order_of_the_model_makes_other_calls(bug: str) -> None:
    assert order.written(frozenset([bug])) != order.written()


# Under the name, and the directory in question.
PAIRS = {
    "itself": ("", "older"),
    "nothing": ("", "older"),
    "another": ("another", "older"),
    "one that A replaces": ("older", "younger"),
    "one that replaces A": ("younger", "older"),
}


def words(case: table.Case) -> str:
    manifests, files = ("".join(str(int(value)) for value in values) for values in case[1:])
    return " ".join([case.row[0], f"manifests {manifests} files {files}", *case.row[3:]])


def leave(directory: Path, case: table.Case) -> None:
    """Takes what the case does not have away from a whole checkpoint."""
    for file in directory.iterdir():
        of_rank = re.search(r"-(\d{5})-of-", file.name)
        rank = int(of_rank[1]) if of_rank else 0
        kind = re.split("[-.]", file.name)[0]
        if kind == "holdfast":
            there = case.row[3] == "yes"
        elif kind == "rank":
            there = case.manifests[rank]
        else:
            assert kind in ("model", "state"), file.name
            there = case.files[rank] == NAMED
            if case.files[rank] == TEMPORARY:
                shutil.copy(file, f"{file}.tmp")
        if not there:
            file.unlink()


def test_the_cases_have_directories_of_which_some_ranks_have_their_part() -> None:
    """Of both ranks, each alone."""
    cases = table.cases()
    for parts in ({case.manifests for case in cases}, {tuple(value == NAMED for value in case.files) for case in cases}):
        assert parts == {(False,), (True,), (False, False), (False, True), (True, False), (True, True)}


def test_the_real_recovery_does_what_the_model_says(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """One test of all cases: to know them takes seconds, which each process that collects tests would spend."""
    wrong = {}
    for number, case in enumerate(table.cases()):
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            recover(case, checkpoints, directory)
        except AssertionError as error:
            wrong[words(case)] = str(error)
    assert wrong == {}


def recover(case: table.Case, checkpoints: Checkpoints, parent: Path) -> None:
    """Recovers the directory of a case, and looks at what it leaves."""
    place, _, _, record, under_name, readers, outcome = case.row
    ranks = len(case.manifests)
    standing, own = PAIRS[under_name]
    attempt, source = checkpoints[ranks, own]
    if standing:
        shutil.copytree(checkpoints[ranks, standing][1], parent / "NAME")
    name = place.strip("`").replace("-A", f"-{attempt}")
    if place == table.NAMES[table.ASIDE]:
        name = f"NAME.partial-{checkpoints[ranks, standing][0]}"
    directory = Path(shutil.copytree(source, parent / name))
    leave(directory, case)
    if record == "no" and place in (table.NAMES[table.PARTIAL], table.NAMES[table.FENCED]):
        (directory / "holdfast.commit.json.tmp").touch()  # the mark of a save that has not committed

    def listed() -> list[str]:
        return [found["attempt"] for found in holdfast.list_checkpoints(parent)]

    others = [checkpoints[ranks, standing][0]] if standing else []
    assert listed() == ([attempt] if readers == "checkpoint" else others)
    holdfast.recover(parent, wait_for_orphans=0)
    there = [attempt] if outcome in ("promotes it", "exchanges the two") or readers == "checkpoint" else others
    assert listed() == there
    left = {path.name for path in parent.iterdir()}
    assert left == ({"NAME"} if there else set()) | ({name} if outcome == "leaves it" else set())
    if there:
        assert holdfast.verify(parent / "NAME")["verdict"] == "sound"
