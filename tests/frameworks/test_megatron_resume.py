"""What a killed job resumes from with Megatron's `dist_checkpointing` is exact: twenty kills with HOLDFAST_LONG=1."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_campaign import LONG, SIZE, STEPS, Way, campaign, chain, check, newest_with

pytestmark = pytest.mark.long

MEGATRON = Way("megatron", newest_with("metadata.json"), ranks=2, first=1, trainer=Path(__file__).with_name("resume_megatron.py"))


def test_a_killed_job_resumes_exactly(tmp_path: Path) -> None:
    kills = 20 if LONG else 2
    rows = campaign(MEGATRON, str(tmp_path), kills, seed=7, steps=STEPS, size=SIZE)
    assert len(rows) == kills
    check(rows)


def test_a_state_is_loaded_as_it_was_saved_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    chain(MEGATRON, str(tmp_path), (2, 1, 3, 2) if LONG else (2, 1), "tiny")
