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
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("name", [name for name in algorithms.__all__ if callable(getattr(algorithms, name))])
def test_the_reference_of_the_mathematics_repeats_the_docstring(name: str) -> None:
    first = " ".join((inspect.getdoc(getattr(algorithms, name)) or "").split("\n\n")[0].split()).replace("|", r"\|")
    assert f"| `{name}` | {first} |" in (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
