"""The comparison in a real browser: letters of one size, a short legend, answers as turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kedge.commands.compare import compare_runs
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill

OpenPage = Callable[..., Page]
pytestmark = pytest.mark.browser


@pytest.fixture
def url(run: Path, tmp_path: Path) -> str:
    with Run.create(
        tmp_path / "other", manifest=new_manifest(name="other", kind="ppo", seed=2, settings=PPO_SETTINGS)
    ) as other:
        fill(other, 60, every=20, seed=2)
        other.finish("done")
    return compare_runs([run, other.folder]).write_page(tmp_path / "compare.html").resolve().as_uri()


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_letters_have_the_size_of_text_whatever_the_width(open_page: OpenPage, url: str, look: str) -> None:
    page = open_page(url, look)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    heights = page.locator("figure svg text").evaluate_all("texts => texts.map(t => t.getBoundingClientRect().height)")
    assert heights
    assert all(9 <= height <= 18 for height in heights), heights
    ends = page.locator("figure svg").first.evaluate(
        "svg => [...svg.querySelectorAll('text')].every(t => t.getBoundingClientRect().left >= 0)"
    )
    assert ends


def test_every_run_is_named_once(open_page: OpenPage, url: str) -> None:
    page = open_page(url)
    names = page.locator("figure .key").first.locator("b").all_inner_texts()
    assert sorted(names) == sorted(set(names))
    assert [name for name in names if "other" in name] == ["━ other"] or "other" in names


def test_the_same_prompts_are_answered_side_by_side(open_page: OpenPage, url: str) -> None:
    page = open_page(url)
    shared = page.locator("details", has_text="order 4471").first
    expect(shared.locator("pre")).to_have_count(2)
    assert "<|im_" not in page.locator("body").inner_text()
