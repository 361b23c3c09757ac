"""Lays out build/docs for mkdocs: the pages of the tree at their own paths, and mkdocs.yml.

The links of the pages are those of the tree, so that they work in a clone, too. What a page links to is
copied beside it; a link to a folder leads to the folder's README.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "docs"
# Sections of the navigation; every other page of docs/ comes at the end of the second one.
NAVIGATION = {
    "Start": ["README.md", "docs/install.md", "docs/python.md", "docs/migration.md", "docs/troubleshooting.md"],
    "Use": ["docs/cli.md", "docs/observe.md", "docs/integrity.md", "docs/campaign.md"],
    "Frameworks": ["python/holdfast/dcp/README.md", "docs/megatron.md", "docs/lightning.md", "docs/torchtitan.md",
                   "docs/nvrx.md"],
    "Evidence": ["docs/guarantees.md", "docs/compared.md", "docs/cost.md", "docs/gpu.md",
                 "docs/performance.md", "docs/peer-tests.md"],
    "Inside": ["runtime/README.md", "runtime/layout/FORMAT.md", "python/README.md", "tests/README.md",
               "tools/README.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}  # fmt: skip
CONFIGURATION = {
    "site_name": "Holdfast",
    "site_description": "A fork-safe asynchronous writer runtime for training checkpoints",
    "docs_dir": "pages",
    "site_dir": "site",
    "use_directory_urls": False,
    "strict": True,
    "theme": {
        "name": "material",
        "font": False,  # no request leaves the site
        "features": ["navigation.sections", "navigation.top", "content.code.copy", "search.highlight"],
        "palette": [
            {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "indigo"},
            {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "indigo"},
        ],
    },
    "plugins": ["search"],
    "markdown_extensions": [
        "tables", "attr_list", "pymdownx.superfences", "pymdownx.highlight",
        {"toc": {"permalink": True, "slugify": "!SLUG"}},
    ],
    "validation": {
        "nav": {"omitted_files": "ignore", "not_found": "warn"},
        "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
    },
}  # fmt: skip
# Of pages in the tree: [text](target) and ![text](target), outside of code.
LINK = re.compile(r"(\]\()([^)\s#]*)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def tracked() -> list[str]:
    """The files of the tree that git would commit."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def navigation(pages: set[str]) -> list[dict[str, list[str]]]:
    """The sections, with every page of docs/."""
    placed = {page for section in NAVIGATION.values() for page in section}
    rest = sorted(page for page in pages if page.startswith("docs/") and page not in placed)
    sections = {name: [page for page in section if page in pages] for name, section in NAVIGATION.items()}
    sections["Use"] += rest
    return [{name: section} for name, section in sections.items()]


def _place(text: str, page: Path, out: Path) -> str:
    """Copies what a page links to, and returns the page with its links to folders resolved."""

    def resolved(found: re.Match[str]) -> str:
        opening, target, anchor, closing = found.groups()
        if not target or ":" in target:
            return found.group(0)
        linked = (page.parent / target).resolve()
        if linked.is_dir():
            readme = next(folder / "README.md" for folder in (linked, *linked.parents) if (folder / "README.md").is_file())
            target = Path(*[".."] * len(page.parent.relative_to(ROOT).parts), readme.relative_to(ROOT)).as_posix()
        elif linked.suffix != ".md" and linked.is_file():
            copy = out / linked.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, copy)
        return f"{opening}{target}{anchor or ''}{closing}"

    parts = CODE.split(text)
    return "".join(part if i % 2 else LINK.sub(resolved, part) for i, part in enumerate(parts))


def main() -> None:
    shutil.rmtree(SITE, ignore_errors=True)
    out = SITE / "pages"
    pages = {name for name in tracked() if name.endswith(".md") and (ROOT / name).is_file()}
    for name in sorted(pages):
        page = out / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_place((ROOT / name).read_text(), ROOT / name, out))
    configuration = {**CONFIGURATION, "nav": navigation(pages)}
    # JSON is YAML; only a Python function has no JSON.
    slug = "!!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}"
    (SITE / "mkdocs.yml").write_text(json.dumps(configuration, indent=1).replace('"!SLUG"', slug))
    print(f"{len(pages)} pages in {out}")


if __name__ == "__main__":
    sys.exit(main())
