"""The troubleshooting page shows what is really said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from provocations import PROVOCATIONS

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_SHOWN = dict(re.findall(r"<!-- provoke: (\S+) -->\n```\n(.*?)\n```", PAGE.read_text(), re.DOTALL))


def plain(message: str) -> str:
    """What depends on the machine is left out."""
    return re.sub(r"threads: \d+", "threads: N", message)


@pytest.mark.parametrize("name", sorted(PROVOCATIONS))
def test_a_message_is_what_the_page_shows(name: str, tmp_path: Path) -> None:
    message = PROVOCATIONS[name](tmp_path)
    assert plain(message.replace(str(tmp_path), "/run")) == plain(_SHOWN.get(name, ""))


def test_every_message_of_the_page_is_provoked() -> None:
    marks = re.findall(r"<!-- provoke: (\S+) -->", PAGE.read_text())
    assert sorted(marks) == sorted(PROVOCATIONS)
    assert len(_SHOWN) == len(marks)
