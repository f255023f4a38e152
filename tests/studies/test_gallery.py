"""The gallery says what was kept of its runs, every picture is small and has words, and reports open anywhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import gallery_page
import gallery_runs
from common import fill

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURES = sorted(DOCS.glob("pictures/*.webp"))
REPORTS = sorted(DOCS.glob("gallery/**/*.html"))
TEXTS = {page: page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}


def test_no_number_of_the_page_is_typed() -> None:
    page = TEXTS[DOCS / "gallery.md"]
    assert page == fill(page, gallery_page.blocks())
    words = re.sub(
        r"<!-- (\w+): made by the study -->.*?<!-- /\1 -->|\]\([^)]+\)|SmolLM2-135M", "", page, flags=re.DOTALL
    )
    assert re.findall(r"\d+", words) == []


def test_every_recipe_has_a_row_and_its_page_is_there() -> None:
    assert {name for name, *_ in gallery_page.rows({})} == {f"`{file.stem}`" for file in ROOT.glob("recipes/*.yaml")}
    assert gallery_page.page_of("online-dpo") == "preference.md"
    assert gallery_page.page_of("loop") == "ppo.md"


def test_runs_are_those_that_need_nothing() -> None:
    names = gallery_runs.names()
    assert names[:2] == ["demo", "rounds"]
    assert {"loop", "tiny"} <= set(names)
    assert not {"rlaif", "gpu", "hh", "cai"} & set(names)
    assert len(set(names)) == len(names)


def test_what_is_true_of_one_machine_alone_is_cut(tmp_path: Path) -> None:
    page = f"<td>{tmp_path}/demo/data/pairs.jsonl</td><td>{tmp_path}</td><td>{Path.home()}/.cache/kedge</td>"
    cut = gallery_page.anywhere(page, tmp_path)
    assert cut == "<td>demo/data/pairs.jsonl</td><td>.</td><td>~/.cache/kedge</td>"


@pytest.mark.parametrize("report", REPORTS, ids=[str(report.relative_to(DOCS)) for report in REPORTS])
def test_a_report_is_small_and_leads_nowhere_else(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert len(text.encode()) <= 300_000
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|mnt|Users)/[\w./-]*", text) == []
    links = re.findall(r'(?:href|src)="([^"#]+)', text)
    assert [link for link in links if not (report.parent / link).is_file()] == []


def test_there_are_reports_of_a_run_and_of_rounds() -> None:
    assert {"demo/report.html", "rounds/report.html"} <= {str(file.relative_to(DOCS / "gallery")) for file in REPORTS}


def test_pictures_are_small_and_each_is_shown_with_words() -> None:
    sizes = [picture.stat().st_size for picture in PICTURES]
    assert len(sizes) >= 10
    assert max(sizes) <= 120_000
    assert sum(sizes) <= 1_200_000
    shown = {
        name
        for text in TEXTS.values()
        for name in re.findall(r"!\[[^\]]{20,}\]\([\w./]*pictures/([\w-]+\.webp)\)", text)
    }
    assert shown == {picture.name for picture in PICTURES}
