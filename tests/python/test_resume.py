"""What a killed job resumes from is exact: three kills here, twenty with HOLDFAST_LONG=1."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_campaign import DCP, LONG, PLAIN, SIZE, STEPS, Way, campaign, chain, check

pytestmark = pytest.mark.long

KILLS = 20 if LONG else 3


@pytest.mark.parametrize("way", [PLAIN, DCP], ids=lambda way: way.name)
def test_a_killed_job_resumes_exactly(way: Way, tmp_path: Path) -> None:
    rows = campaign(way, str(tmp_path), KILLS, seed=7, steps=STEPS, size=SIZE)
    assert len(rows) == KILLS
    check(rows)


def test_a_state_is_loaded_as_it_was_saved_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    chain(DCP, str(tmp_path), (2, 1, 3, 2), "tiny")


@pytest.mark.planted("forgets_random_state")
def test_a_resume_that_is_not_exact_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign itself can fail: a trainer that forgets its random state is found out."""
    monkeypatch.setenv("HOLDFAST_TEST_FORGET_RNG", "1")
    with pytest.raises(AssertionError, match="differ from the run straight through|ended differently"):
        campaign(PLAIN, str(tmp_path), 3, seed=7, steps=60, size="tiny")
