"""The board in a real browser: light, dark and on a phone; keys, search, copying; text of others that stays text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

sys.path.insert(0, str(Path(__file__).parents[1] / "board"))
from board_attacks import CASES, hostile_page
from board_files import gated, make_runs

from kedge.commands.board.command import BoardRequest, make_board, write_board
from kedge.gate.registry import promote

OpenPage = Callable[..., Page]
pytestmark = pytest.mark.browser
LOOKS = ("light", "dark", "phone")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("board")
    registry = home / "registry.jsonl"
    promote(registry, alias="prod", model=gated("dpo"), verdicts=[], by="ada", override="the shop needs it today")
    long = {f"prompt mmlu-{number}": "a long question with many words " * 60 for number in (60, 61)}
    long["answer dpo mmlu-62"] = "an answer without any blank: " + "x" * 4000
    request = BoardRequest(paths=make_runs(home, long), registry=registry, badcases=home / "badcases")
    return write_board(make_board(request), home / "board.html").resolve().as_uri()


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_fits_its_screen(open_page: OpenPage, url: str, look: str) -> None:
    page = open_page(url, look)
    page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    heights = page.locator("figure svg text").evaluate_all("texts => texts.map(t => t.getBoundingClientRect().height)")
    assert heights
    assert all(9 <= height <= 18 for height in heights), heights
    assert page.locator("table.models").first.locator("tbody tr").count() == 3


@pytest.mark.parametrize("look", LOOKS)
def test_letters_stand_out_from_what_is_behind_them(open_page: OpenPage, url: str, look: str) -> None:
    page = open_page(url, look)
    faint = page.evaluate(
        """() => {
          const part = (v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
          const light = (c) => .2126 * part(c[0]) + .7152 * part(c[1]) + .0722 * part(c[2]);
          const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
          const rgb = (css, under) => {
            canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
            return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
          };
          const behind = (e) => {
            const own = e ? getComputedStyle(e).backgroundColor : 'white';
            return !e || !/(, 0\\)|transparent)$/.test(own) ? own : behind(e.parentElement);
          };
          const faint = [], shown = '.change, .soft, .metric, .alias, .override, .level, kbd, button';
          for (const e of document.querySelectorAll(shown)) {
            const back = rgb(behind(e), 'white'), front = rgb(getComputedStyle(e).color, `rgb(${back})`);
            const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
            if (e.textContent.trim() && (a + .05) / (b + .05) < 4.5) faint.push([e.className, (a + .05) / (b + .05)]);
          }
          return faint;
        }"""
    )
    assert faint == []


def test_arrows_have_words_and_titles(open_page: OpenPage, url: str) -> None:
    page = open_page(url)
    cell = page.locator("table.models").first.locator("tbody tr").nth(1).locator("td").nth(2)
    expect(cell.locator(".change")).to_have_text("▼ worse")
    assert "100 items, items_hash abc" in str(cell.get_attribute("title"))
    expect(page.locator(".override")).to_have_text("OVERRIDE by ada: the shop needs it today")


def test_keys_walk_search_and_copy(open_page: OpenPage, url: str) -> None:
    page = open_page(url)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.keyboard.press("j")
    page.keyboard.press("j")
    second = page.locator("article.lost").nth(1)
    expect(second).to_be_focused()
    expect(second).to_be_in_viewport()
    page.keyboard.press("k")
    first = page.locator("article.lost").first
    expect(first).to_be_focused()
    page.keyboard.press("b")
    expect(page.locator("#said")).to_contain_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == first.locator(".command code").inner_text()
    page.keyboard.press("/")
    expect(page.locator("input[name=q]")).to_be_focused()
    page.keyboard.type("mmlu-63")
    expect(page.locator("article.lost:visible")).to_have_count(1)
    expect(page.locator("#said")).to_have_text("1 of 15")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    expect(page.locator("article.lost", has_text="mmlu-63")).to_be_focused()
    page.locator("input[name=q]").fill("")
    page.locator("select[name=column]").select_option("safety.complied")
    expect(page.locator("article.lost:visible")).to_have_count(1)


def test_every_part_can_be_reached_and_scrolled_by_keys(open_page: OpenPage, url: str) -> None:
    page = open_page(url, "phone")
    wide = page.locator(".scroll").evaluate_all(
        "all => all.filter(one => one.scrollWidth > one.clientWidth + 1)"
        ".map(one => [one.tabIndex, one.getAttribute('aria-label') || one.getAttribute('aria-labelledby')])"
    )
    assert wide
    assert all(place == 0 and name for place, name in wide)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_text_of_others_runs_nothing(open_page: OpenPage, tmp_path: Path, case: int) -> None:
    page = open_page(hostile_page(tmp_path, CASES[case]).resolve().as_uri())
    page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    page.keyboard.press("j")
    page.keyboard.press("Tab")
    assert page.evaluate("window.pwned") is None
    assert page.locator("article.lost").count() == 2
