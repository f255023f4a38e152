"""What pages name is there: modules by their dotted names, files by their paths, contracts, and every decision."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from kedge.core import plugins

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/kedge"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("0*.md"))
ENTRY_POINTS = {f"kedge.{kind}" for kind in plugins.KINDS}
PARTS = ("Status", "Context", "Decision", "Rejected", "Consequences")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_module_and_name_of_a_page_can_be_imported(page: Path) -> None:
    named = set(re.findall(r"\bkedge(?:\.\w+)+", page.read_text(encoding="utf-8"))) - ENTRY_POINTS
    assert sorted(name for name in named if not name.endswith(".json") and not can_be_imported(name)) == []


def can_be_imported(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_test_benchmark_and_source_file_of_a_page_is_there(page: Path) -> None:
    paths = re.findall(r"\b((?:tests|benchmarks|src)/[\w./]*\w/?)", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_place_that_a_change_goes_to_is_there() -> None:
    (table,) = re.findall(r"^## Where does my change go\n(.*?)^## ", GUIDE, re.DOTALL | re.MULTILINE)
    paths = [
        path for path in re.findall(r"`([\w./]+(?:\.py|\.md|/))`", table) if "KIND" not in path and "NNNN" not in path
    ]
    assert len(paths) > 60
    bare = {"settings.py", "train.py", "__init__.py"}
    missing = [path for path in paths if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    assert sorted({*missing} - bare) == []


def test_every_kind_of_part_has_its_row_with_a_contract() -> None:
    rows = re.findall(r"^\| `(kedge\.\w+)` \|.*`(kedge\.testing\.contracts\.\w+\.\w+Contract)`", GUIDE, re.MULTILINE)
    assert {entry for entry, _ in rows} == ENTRY_POINTS
    modules = {contract.split(".")[3] for _, contract in rows}
    shipped = {file.stem for file in (SOURCE / "testing/contracts").glob("*.py")} - {"__init__"}
    assert modules == shipped


@pytest.mark.parametrize("page", DECISIONS, ids=[page.stem for page in DECISIONS])
def test_a_decision_has_its_number_and_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(page.stem[:4])}. ")
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)[0] == "Status"
    assert [part for part in PARTS if f"**{part}.**" not in text] == []
    assert len(text.splitlines()) <= 60  # one page


def test_the_list_of_decisions_is_complete() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\((0[^)]+)\)", index) == [page.name for page in DECISIONS]
