"""The pages cannot drift: links lead somewhere, and the reference says what the docstrings say."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import kedge.algorithms as algorithms

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", page.read_text(encoding="utf-8"))
    own = [(page.parent / link, place) for link, place in links if "://" not in link]
    assert [str(file) for file, _ in own if not file.exists()] == []
    assert [f"{file}#{place}" for file, place in own if place and place not in headings_of(file)] == []


def headings_of(page: Path) -> set[str]:
    """The places of a page, as they are written in links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_the_index_has_every_page_once() -> None:
    index = ROOT / "docs/README.md"
    linked = re.findall(r"\]\((\w[^)#]*\.md)\)", index.read_text(encoding="utf-8"))
    pages = [*index.parent.glob("*.md"), *index.parent.glob("results/*.md")]
    assert sorted(linked) == sorted(str(page.relative_to(index.parent)) for page in pages if page != index)


def test_the_first_page_leads_to_the_index() -> None:
    assert "](docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in algorithms.__all__ if callable(getattr(algorithms, name))])
def test_the_reference_of_the_mathematics_repeats_the_docstring(name: str) -> None:
    first = " ".join((inspect.getdoc(getattr(algorithms, name)) or "").split("\n\n")[0].split()).replace("|", r"\|")
    assert f"| `{name}` | {first} |" in (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
