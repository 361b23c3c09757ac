"""The pages in docs/ tell the truth: their examples run, and their tables are complete."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
import holdfast.dcp
from holdfast import _runtime, observe
from holdfast.observe import metrics

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
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


# Pages whose examples run in an environment of their own, by the test that runs them.
ELSEWHERE = {
    "docs/lightning.md": "tests/frameworks/test_lightning_docs.py",
    "docs/megatron.md": "tests/frameworks/test_megatron_documentation.py",
    "docs/nvrx.md": "tests/frameworks/test_nvrx_documentation.py",
    "docs/torchtitan.md": "tests/frameworks/test_torchtitan.py",
}
HERE = ["docs/python.md", "docs/migration.md", "docs/observe.md", "docs/drain.md"]


def pages() -> list[Path]:
    """The Markdown files of the tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else []  # a tree without git's history
    found = [ROOT / name for name in filter(None, names)] or [
        p for p in ROOT.rglob("*.md") if not {"build", ".git"} & set(p.relative_to(ROOT).parts)
    ]
    return [page for page in found if page.is_file()]


def test_every_example_of_the_pages_is_run_by_a_test() -> None:
    with_examples = {p.relative_to(ROOT).as_posix() for p in pages() if program_of(p)}
    assert with_examples - {"README.md", *HERE, *ELSEWHERE} == set()
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(), page


@pytest.mark.parametrize("page", HERE)
def test_the_examples_of_a_page_run_in_their_order(page: str, tmp_path: Path) -> None:
    program = program_of(ROOT / page)
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


def test_every_option_of_a_load_is_documented() -> None:
    text = (DOCS / "python.md").read_text()
    table, _, below = text.partition("| option of a load |")[2].partition("\n\n")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.MULTILINE)
    options = inspect.signature(holdfast.load).parameters
    assert [name for name, _ in rows] == [name for name in options if name != "path"]
    for name, default in rows:
        assert default.startswith("`") <= (default == f"`{options[name].default}`"), name
    of_open = set(inspect.signature(holdfast.loading.Checkpoint).parameters) - {"path"}
    assert of_open <= set(re.findall(r"`(\w+)`", below.partition("\n\n")[0]))


def test_every_metric_is_documented(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    documented = {k.replace("...", "holdfast_staging") for k in keys_of(DOCS / "python.md")}
    with observe.prometheus(registry):
        holdfast.save_async({"w": torch.ones(1)}, tmp_path / "a").wait(60)
        families = {f.name for f in registry.collect()}
    assert len(families) >= 11
    assert not {f for f in families if not {f, f + "_total"} & documented}


_CODE = re.compile(r"^(`{3,}).*?^\1`*$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.*?) *$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title.replace("`", ""))
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = 1
        while anchor in found:
            anchor, count = f"{anchor.removesuffix(f'-{count - 1}')}-{count}", count + 1
        found.add(anchor)
    return found


def broken_links(page: Path) -> list[str]:
    """Targets of a page's relative links that are not there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        if not linked.exists() or anchor and anchor not in anchors_of(linked):
            broken.append(target)
    return broken


def test_links_and_anchors_lead_somewhere() -> None:
    assert len(pages()) > 40
    assert {str(p.relative_to(ROOT)): broken for p in pages() if (broken := broken_links(p))} == {}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A `title` of [two](x)\n```\n# no title\n```\n# A title of two\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md#a-title-of-two) [2](b.md#a-title-of-two-1) [3](b.md) [4](https://x.y) `[5](none)`\n"
                    "[6](none.md) [7](b.md#no-title) [8](#none)\n")  # fmt: skip
    assert broken_links(page) == ["none.md", "b.md#no-title", "#none"]


# ---- The dashboard.


def test_the_dashboard_asks_for_metrics_that_are_exported(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    with observe.prometheus(registry):
        for path in ("a", "a"):
            with contextlib.suppress(FileExistsError):
                holdfast.save_async({"w": torch.ones(1)}, tmp_path / path).wait(60)
        with holdfast.Checkpointer(tmp_path / "run", drain_to=tmp_path / "second") as draining:
            draining.save({"w": torch.ones(1)}, 1)
            draining.wait_drained(60)
            families = list(registry.collect())
    samples = {sample.name for family in families for sample in family.samples}
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [v["query"] for v in dashboard["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\bholdfast_\w+", query)}
    assert asked - samples == set()
    shown = {family.name for family in families if any(family.name in name for name in asked)}
    assert {family.name for family in families} == shown
    labels = {(s.name, k): v for f in families for s in f.samples for k, v in s.labels.items()}
    for query in queries:
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
        for name, inside in re.findall(r"(holdfast_\w+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+) *[!=]", inside):
                assert label in ("job", "instance") or (name, label) in labels, query
    phases = set(re.findall(r'phase="(\w+)"', " ".join(queries)))
    assert phases and phases <= set(metrics.PHASES)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    alerts = re.findall(r"\bholdfast_\w+", (DOCS / "observe.md").read_text().partition("Alerts")[2])
    assert alerts and set(alerts) <= samples
