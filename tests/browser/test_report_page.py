"""The report in a real browser: nothing sticks out, charts are drawn, values show under pointer and keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kedge.report.writing import write_report
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS

OpenPage = Callable[..., Page]
pytestmark = pytest.mark.browser


@pytest.fixture
def url(run: Path) -> str:
    return write_report(run, None).resolve().as_uri()


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_it_fits_and_draws(open_page: OpenPage, url: str, look: str) -> None:
    page = open_page(url, look)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for more in page.locator("details").all():
        more.evaluate("one => one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    first = page.locator("figure svg").first
    box = first.bounding_box()
    assert box is not None
    assert box["width"] > 250
    assert box["height"] > 100
    assert page.locator("svg .event").count() >= 2
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in re.findall(r"\d+", paper)[:3]) > 380
    assert light == (look != "dark")


def test_on_a_phone_it_is_short_and_its_tiles_are_lines(open_page: OpenPage, url: str) -> None:
    """Less than half as high as with everything under each other; nothing of it is lost, and no tile is cut."""
    page = open_page(url, "phone")
    folded = page.evaluate("document.documentElement.scrollHeight")
    for more in page.locator("details").all():
        more.evaluate("one => one.open = true")
    assert folded <= page.evaluate("document.documentElement.scrollHeight") / 2
    for tile in page.locator(".counts div").all():
        assert tile.evaluate("tile => tile.scrollWidth <= tile.clientWidth")
        assert tile.locator("b").evaluate("b => b.getClientRects().length") == 1
    tops = {box["y"] for tile in page.locator(".counts div").all() if (box := tile.bounding_box())}
    assert len(tops) == 1
    last = page.locator(".counts div").last.bounding_box()
    assert last is not None
    assert last["x"] + last["width"] <= 360


def test_charts_have_no_blank_band(open_page: OpenPage, url: str) -> None:
    """Between title and axis there is no room for anything that is not there: the drawing fills its card."""
    page = open_page(url)
    for figure in page.locator(".charts figure").all()[:4]:
        card, drawing = figure.bounding_box(), figure.locator("svg").bounding_box()
        assert card is not None
        assert drawing is not None
        assert drawing["y"] - card["y"] < 70
    first = page.locator(".charts figure").first
    card, drawing = first.bounding_box(), first.locator("svg").bounding_box()
    assert card is not None
    assert drawing is not None
    assert card["y"] + card["height"] - drawing["y"] - drawing["height"] < 30


def test_conversations_are_turns(open_page: OpenPage, url: str) -> None:
    page = open_page(url)
    for more in page.locator("details").all():
        more.evaluate("one => one.open = true")
    assert "<|im_" not in page.locator("body").inner_text()
    expect(page.locator(".turn.system")).to_contain_text("Be brief.")
    expect(page.locator(".turn.user").first).to_contain_text("How much is it?")
    expect(page.locator("pre", has_text="Ten euro.")).to_have_text("Ten euro.")


def test_a_link_to_a_folded_stage_unfolds_it(open_page: OpenPage, run: Path, tmp_path: Path) -> None:
    stages = {"sft": {"kind": "sft"}, "ppo": dict(PPO_SETTINGS)}
    manifest = new_manifest(name="loop", kind="pipeline", seed=1, settings={"model": "tiny", "stages": stages})
    with Run.create(tmp_path / "loop", manifest=manifest) as whole:
        for name, settings in stages.items():
            own = new_manifest(name="loop", stage=name, kind=name, seed=1, settings=settings)
            with Run.create(whole.folder / name, manifest=own) as stage:
                for step in range(1, 31):
                    stage.log({"train/loss": 2.0 - step / 30} if name == "sft" else {"kl/mean": 1.0}, step)
                stage.finish("done")
        whole.finish("done")
    page = open_page(write_report(whole.folder, None).resolve().as_uri())
    sft = page.locator("#stage-sft")
    expect(sft.locator("svg").first).not_to_be_visible()
    page.get_by_label("Stages").get_by_role("link", name="sft").click()
    expect(sft.locator("svg").first).to_be_visible()


def test_text_can_be_read_in_both_schemes(open_page: OpenPage, url: str) -> None:
    """WCAG AA: a contrast of 4.5 between every text and what lies behind it."""
    script = """() => {
      const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
      const rgb = (text) => text.startsWith("color") ? numbers(text).map((v, i) => i < 3 ? v * 255 : v) : numbers(text);
      const part = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
      const light = ([r, g, b]) => .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
      const behind = (one) => {
        const colour = rgb(getComputedStyle(one).backgroundColor);
        return (colour[3] ?? 1) === 1 ? colour : behind(one.parentElement); };
      return [...document.querySelectorAll("p, h1, h2, h3, td, th, figcaption, b, code, summary, li")]
        .filter((one) => one.textContent.trim() && one.checkVisibility())
        .map((one) => { const [a, b] = [light(rgb(getComputedStyle(one).color)), light(behind(one))];
          return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), one.tagName + " " + one.textContent.slice(0, 40)]; })
        .filter(([contrast]) => contrast < 4.5); }"""
    for look in ("light", "dark"):
        assert open_page(url, look).evaluate(script) == []


def test_values_show_under_the_pointer_and_with_the_arrow_keys(open_page: OpenPage, url: str) -> None:
    page = open_page(url)
    chart = page.locator("figure", has_text="KL from the reference").first
    svg, reading = chart.locator("svg"), chart.locator("output")
    expect(reading).to_have_text("")
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 348 / 360, box["y"] + box["height"] / 2)  # the right end of the axis
    expect(reading).to_have_text(re.compile(r"^step 60: \d"))
    page.mouse.move(1, 1)
    expect(reading).to_have_text("")
    svg.focus()
    page.keyboard.press("ArrowRight")
    expect(reading).to_have_text(re.compile(r"^step 1: "))
    page.keyboard.press("ArrowRight")
    expect(reading).to_have_text(re.compile(r"^step 2: "))
    page.keyboard.press("End")
    expect(reading).to_have_text(re.compile(r"^step 60: "))


def test_it_is_complete_without_its_script(open_page: OpenPage, url: str, run: Path) -> None:
    text = (run / "report.html").read_text(encoding="utf-8")
    plain = run / "plain.html"
    plain.write_text(re.sub(r"<script>.*?</script>", "", text, flags=re.S), encoding="utf-8")
    page = open_page(plain.as_uri())
    assert page.locator("figure svg path.curve").count() > 5
    page.get_by_text("The same as a table").click()
    expect(page.get_by_role("cell", name="kl/mean", exact=True)).to_be_visible()
