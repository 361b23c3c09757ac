"""A checkpoint of a second place that is fetched into a directory for a load."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from draining import PLAIN, save

from holdfast.drain.places import open_place
from holdfast.drain.remote import fetch
from holdfast.errors import Error

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("format", ["holdfast", "dcp"])
def test_a_fetch_that_has_failed_keeps_no_lock(format: str, tmp_path: Path) -> None:
    save(tmp_path / "far", 1, elements=10000, format=format)
    far, run = open_place(str(tmp_path / "far")), open_place(str(tmp_path / "run"))
    (info,) = far.complete()[0]
    data = max((tmp_path / "far/step-1").iterdir(), key=lambda path: path.stat().st_size)
    right = data.read_bytes()
    data.write_bytes(right[:5000] + bytes([right[5000] ^ 1]) + right[5001:])
    with pytest.raises(Error) as refused:
        fetch(far, info, run.url, PLAIN)
    assert refused.value.code == "DATA_LOSS"
    data.write_bytes(right)
    fetch(far, info, run.url, PLAIN)
    run.remove(run.complete()[0][0])  # as retention
    assert os.listdir(run.url) == []
