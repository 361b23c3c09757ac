"""The model of the commit protocol (tests/model): every order of steps and faults keeps the promises."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import scenarios, table
from model.checker import explore
from model.protocol import Protocol

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


def attempt_of(path: Path) -> str:
    (found,) = holdfast.list_checkpoints(path.parent)
    return found["attempt"]


def save(path: Path, seed: int, **options: object) -> Path:
    holdfast.save({"t": torch.full((10,), seed)}, path, **options)
    holdfast.flush(60)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    """Checkpoints of one name, with their attempts: an older one, the one that replaced it, and another."""
    made = {}
    for key, seed in (("older", 1), ("younger", 2), ("another", 3)):
        path = save(tmp_path_factory.getbasetemp() / f"of-{key == 'another'}" / "NAME", seed, replace=True)
        copy = tmp_path_factory.mktemp(key) / "NAME"
        made[key] = (attempt_of(path), Path(shutil.copytree(path, copy)))
    return made


# Under the name, and the directory in question.
PAIRS = {
    "itself": ("", "older"),
    "nothing": ("", "older"),
    "another": ("another", "older"),
    "one that A replaces": ("older", "younger"),
    "one that replaces A": ("younger", "older"),
}
ROWS = sorted({row for name in ("replace", "two jobs, power cut") for row in table.searched(name)[1]})


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_the_real_recovery_does_what_the_model_says(
    row: table.Row, checkpoints: dict[str, tuple[str, Path]], tmp_path: Path
) -> None:
    place, manifests, files, record, under_name, readers, outcome = row
    standing, own = PAIRS[under_name]
    attempt, source = checkpoints[own]
    if standing:
        shutil.copytree(checkpoints[standing][1], tmp_path / "NAME")
    name = place.strip("`").replace("-A", f"-{attempt}")
    if place == table.NAMES[table.ASIDE]:
        name = f"NAME.partial-{checkpoints[standing][0]}"
    directory = Path(shutil.copytree(source, tmp_path / name))
    kinds = {"rank": manifests, "holdfast": record, "model": files, "state": files}  # how the names begin
    for file in directory.iterdir():
        if kinds[file.name.replace(".", "-").split("-")[0]] in ("none", "no"):
            file.unlink()

    if record == "no" and place in (table.NAMES[table.PARTIAL], table.NAMES[table.FENCED]):
        (directory / "holdfast.commit.json.tmp").touch()  # the mark of a save that has not committed

    def listed() -> list[str]:
        return [found["attempt"] for found in holdfast.list_checkpoints(tmp_path)]

    others = [checkpoints[standing][0]] if standing else []
    assert listed() == ([attempt] if readers == "checkpoint" else others)
    holdfast.recover(tmp_path, wait_for_orphans=0)
    there = [attempt] if outcome in ("promotes it", "exchanges the two") or readers == "checkpoint" else others
    assert listed() == there
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"NAME"} if there else set()) | ({name} if outcome == "leaves it" else set())
    if there:
        assert holdfast.verify(tmp_path / "NAME")["verdict"] == "sound"
