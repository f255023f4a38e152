"""The site of docs/ in a real browser, opened from a disk: every page fits its screen, and search finds words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from playwright.sync_api import Page, expect

OpenPage = Callable[..., Page]
pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_every_page_fits_its_screen(site: Path, open_page: OpenPage, look: str) -> None:
    page = open_page((site / "index.html").as_uri(), look)
    for file in sorted({*site.rglob("*.html")} - {site / "404.html"}):  # that one is for servers alone
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), file
        broken = page.locator("img").evaluate_all("all => all.filter(i => !i.naturalWidth).map(i => i.src)")
        assert broken == []


def test_search_works_from_a_disk(site: Path, open_page: OpenPage) -> None:
    page = open_page((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("overoptimisation")
    found = page.locator(".md-search-result__item a").first
    expect(found).to_be_visible(timeout=20_000)
    found.click()
    expect(page.locator("article mark").first).to_be_visible()


def test_the_ground_can_be_changed_and_stays(site: Path, open_page: OpenPage) -> None:
    page = open_page((site / "index.html").as_uri())
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "default")
    page.locator("label[title=Dark]").click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    page.goto((site / "ppo.html").as_uri())
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
