"""Names of files and directories of checkpoints: what is made is recognized, and one module spells them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import _names

PACKAGE = Path(_names.__file__).parent
ATTEMPT = "0123456789abcdef" * 2


def test_what_is_made_is_recognized() -> None:
    assert _names.MANIFEST.fullmatch(_names.manifest(3, 8))
    assert _names.dcp_attempt_of(_names.manifest(3, 8, ATTEMPT)) == ATTEMPT
    assert _names.dcp_attempt_of(_names.dcp_record(ATTEMPT)) == ATTEMPT
    data = _names.DCP_DATA.fullmatch(_names.dcp_data(12, 7))
    assert data and (data["rank"], data["generation"]) == ("12", "7")
    metadata = _names.DCP_METADATA.fullmatch(_names.dcp_metadata(12))
    assert metadata and metadata["rank"] == "12"
    assert _names.kind_of(_names.partial("step-7", ATTEMPT)) == "partial"
    assert _names.retired_name(_names.retired("step-7", ATTEMPT)) == "step-7"
    assert _names.is_retired_hidden(_names.retired(_names.hidden("last.ckpt")[1:], ATTEMPT))


@pytest.mark.parametrize(
    ("name", "is_record", "format"),
    [
        (_names.manifest(0, 1), True, "holdfast"),
        (_names.RECORD, True, "holdfast"),
        (_names.REPLICAS, False, "holdfast"),
        ("model-00000-of-00001.safetensors", False, "holdfast"),
        (_names.manifest(0, 1, ATTEMPT), True, "dcp"),
        (_names.dcp_record(ATTEMPT), True, "dcp"),
        (_names.METADATA, True, "dcp"),
        ("__0.metadata", False, "dcp"),
        ("__0_0.distcp", False, "dcp"),
        ("rank-notes.manifest.json", False, ""),
        ("model.safetensors", False, ""),
        ("__0_0.distcp.tmp", False, ""),
    ],
)
def test_files(name: str, is_record: bool, format: str) -> None:
    assert (_names.is_record(name), _names.format_of(name)) == (is_record, format)


@pytest.mark.parametrize("name", ["step-7", "step-7.partial-1", ".step-7.retired-" + "g" * 32, "retired-" + ATTEMPT])
def test_names_of_checkpoints(name: str) -> None:
    assert _names.kind_of(name) == _names.retired_name(name) == ""


def test_a_retired_directory_of_a_user_is_not_hidden() -> None:
    assert not _names.is_retired_hidden(_names.retired("step-7", ATTEMPT))
    assert not _names.is_retired_hidden(_names.retired(_names.hidden("a")[1:], ATTEMPT)[1:])


def test_no_other_module_spells_them() -> None:
    spelled = re.compile(r"""["'][^"'` ]*(\.distcp|\.metadata|\.manifest\\?\.json|\.(partial|retired|fenced)-|holdfast\\?\.commit[-.\\])""")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(_names.__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if spelled.search(line.partition("#")[0]) and "torch.distributed" not in line
    ]
    assert found == []
