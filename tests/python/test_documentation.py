"""The pages in docs/ tell the truth: their examples run, and their tables are complete."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast import _runtime, observe

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"(?:<!-- (needs|not run): ([^\n]*) -->\n)?```python\n(.*?)```", re.DOTALL)


def program_of(page: Path) -> str:
    """A page's examples one after the other, at their own lines."""
    text = page.read_text()
    parts = []
    for found in _BLOCK.finditer(text):
        mark, what, block = found.groups()
        if mark == "not run":
            continue
        if mark == "needs" and importlib.util.find_spec(what) is None:
            continue
        above = "\n" * text.count("\n", 0, found.start(3))
        parts.append(f"exec(compile({above + block!r}, {page.name!r}, 'exec'))")
    return "\n".join(parts)


@pytest.mark.parametrize("page", ["python.md", "migration.md"])
def test_the_examples_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
    program = program_of(DOCS / page)
    assert program
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_the_examples_of_the_first_page_run_as_they_are(tmp_path: Path) -> None:
    program = program_of(DOCS.parent / "README.md")
    assert "save_async" in program and "StorageReader" in program
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "step-10").is_dir()


def keys_of(page: Path) -> set[str]:
    """What stands in backticks in the first cell of any table."""
    rows = re.findall(r"^\| (`[^|]*) \|", page.read_text(), re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def test_every_key_of_a_report_and_a_line_is_documented(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    with observe.jsonl(lines):
        for step in (1, 2):
            state = {"w": torch.randn(100)}
            report = holdfast.save_async(state, tmp_path / f"s{step}", step=step).wait(60)
        holdfast.dcp.async_save({"w": torch.randn(100)}, checkpoint_id=tmp_path / "s3").result()
    (_, line, of_dcp) = observe.read_jsonl(lines)
    documented = keys_of(DOCS / "python.md")
    assert set(report) | set(line) | set(of_dcp) <= documented
    for key in documented - _runtime.OPTIONS:  # and the other way round
        if re.match(r"(time|at|cpu|tensors|identical|previous|bytes)_", key):
            assert key in report or key in of_dcp, key


def test_every_option_is_documented() -> None:
    of_save = set(inspect.signature(holdfast.save_async).parameters)
    of_object = set(inspect.signature(holdfast.Checkpointer).parameters)
    internal = {"state", "path", "step", "attempt", "runtime", "directory", "options", "on_sealed"}
    options = of_save | of_object | _runtime.OPTIONS | {"stale_warning"}
    assert options - internal <= keys_of(DOCS / "python.md")


def test_every_metric_is_documented(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    documented = {k.replace("...", "holdfast_staging") for k in keys_of(DOCS / "python.md")}
    with observe.prometheus(registry):
        holdfast.save_async({"w": torch.ones(1)}, tmp_path / "a").wait(60)
        families = {f.name for f in registry.collect()}
    assert len(families) >= 11
    assert not {f for f in families if not {f, f + "_total"} & documented}


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
