"""What a killed Lightning trainer resumes from is exact: twenty kills with HOLDFAST_LONG=1."""

from __future__ import annotations

from pathlib import Path

from lightning_jobs import names, number
from resume_campaign import LONG, SIZE, STEPS, Way, campaign, check


def newest(directory: str) -> int:
    return max(map(number, names(Path(directory))), default=0)


LIGHTNING = Way("lightning", newest, first=1, trainer=Path(__file__).with_name("resume_lightning.py"))


def test_a_killed_trainer_resumes_exactly(tmp_path: Path) -> None:
    kills = 20 if LONG else 2
    rows = campaign(LIGHTNING, str(tmp_path), kills, seed=7, steps=STEPS, size=SIZE)
    assert len(rows) == kills
    check(rows)
