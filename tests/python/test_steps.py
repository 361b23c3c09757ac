"""A load of a step gives that step's checkpoint, or none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from test_checkpointer import formats, opened, state, value_of

import holdfast

pytestmark = pytest.mark.filterwarnings("ignore")


@formats
@pytest.mark.parametrize("drained", [False, True])
def test_a_checkpoint_of_another_step_is_not_loaded(format: str, drained: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"drain_to": tmp_path / "far"} if drained else {}
    with opened(run, format=format, **options) as checkpointer:
        checkpointer.save(state(1.0), 1)
        checkpointer.save(state(3.0), 3, name="best")
        checkpointer.save(state(0.0), 0, name="first")
        checkpointer.close()
    shutil.copytree(run / "step-1", run / "step-9")
    if drained:
        for name in ("best", "first"):
            shutil.rmtree(run / name)
    with opened(run, format=format, **options) as checkpointer, opened(run, name="best", format=format, **options) as one:
        for load, there, wanted in (
            (lambda into: checkpointer.load(9, into=into), 1, 9),
            (lambda into: checkpointer.load(99, into=into, name="best"), 3, 99),
            (lambda into: checkpointer.load(7, into=into, name="first"), 0, 7),
            (lambda into: one.load(99, into=into), 3, 99),
        ):
            into = state(-1.0)
            with pytest.raises(FileNotFoundError, match=rf"of step {there}, not of step {wanted}"):
                load(into)
            assert (into["w"] == -1.0).all()
        assert not (drained and (run / "best").exists()), "it was fetched all the same"
        assert value_of(checkpointer, 3, name="best") == value_of(checkpointer, name="best") == value_of(one, 3) == 3.0
        assert value_of(checkpointer, 0, name="first") == 0.0
        assert value_of(checkpointer, 1) == 1.0


def test_a_checkpoint_without_a_recorded_step_is_loaded_by_its_name(tmp_path: Path) -> None:
    holdfast.save(state(4.0), tmp_path / "step-4")
    dcp.save(state(5.0), checkpoint_id=tmp_path / "last", no_dist=True)
    with opened(tmp_path) as plain, opened(tmp_path, format="dcp") as of_dcp:
        assert value_of(plain, 4) == 4.0
        assert value_of(of_dcp, 5, name="last") == 5.0
