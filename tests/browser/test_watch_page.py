"""The live page in a real browser: it follows a run, shows several side by side, and searches samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from kedge.commands import watch as watching
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest

OpenPage = Callable[..., Page]
pytestmark = pytest.mark.browser


@pytest.fixture
def live(tmp_path: Path) -> Generator[Run]:
    """A pipeline's second stage, being written."""
    stages = {"sft": {"kind": "sft"}, "ppo": {"kind": "ppo", "iterations": 8}}
    manifest = new_manifest(name="loop", kind="pipeline", seed=1, settings={"model": "tiny", "stages": stages})
    with Run.create(tmp_path / "loop", manifest=manifest):
        for name in stages:
            own = new_manifest(name="loop", stage=name, kind=name, seed=1, settings=stages[name])
            stage = Run.create(tmp_path / "loop" / name, manifest=own)
            if name == "sft":
                stage.log({"train/loss": 2.5}, 1)
                stage.log({"train/loss": 1.5}, 2)
                stage.finish("done")
                stage.close()
        stage.log({"reward/mean": 1.0, "kl/mean": 0.1}, 1)
        stage.log({"reward/mean": 1.5, "kl/mean": 0.2}, 2)
        yield stage
        stage.close()


@pytest.fixture
def url(run: Path, live: Run, monkeypatch: pytest.MonkeyPatch) -> Generator[str]:
    """Serve both runs from a thread; it is told to stop at the end.

    Tests name it before `open_page`, so that pages are closed before the server is gone: they ask it once a second.
    """
    import uvicorn

    servers, said = list[uvicorn.Server](), list[str]()
    ready, start = threading.Event(), uvicorn.Server.startup

    async def startup(self: uvicorn.Server, sockets: object = None) -> None:
        await start(self, sockets)  # type: ignore[arg-type]
        servers.append(self)
        ready.set()

    monkeypatch.setattr(uvicorn.Server, "startup", startup)
    feeds = watching.open_feeds([live.folder.parent, run])
    server = threading.Thread(target=watching.serve, args=(feeds,), kwargs={"port": 0, "say": said.append})
    server.start()
    assert ready.wait(10)
    yield said[0]
    servers[0].should_exit = True
    server.join(10)
    assert not server.is_alive()


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_it_fits_and_draws(url: str, open_page: OpenPage, look: str) -> None:
    page = open_page(url, look)
    expect(page.locator(".run")).to_have_count(2)
    expect(page.locator(".run").nth(1).locator("svg")).to_have_count(6)
    expect(page.locator("#overlay-chart svg")).to_be_visible()  # it comes last, and moves what is below it
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tops = page.locator(".run").evaluate_all("runs => runs.map(run => run.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (look != "phone")


def test_it_follows_a_run(url: str, open_page: OpenPage, live: Run) -> None:
    page = open_page(url)
    mine = page.locator(".run").first
    expect(mine).to_contain_text("step 2 of 8")
    expect(page.locator("#state")).to_have_text("live")
    live.log({"reward/mean": 1234.0, "kl/mean": 0.3}, 3)
    live.event("warning", "x", "careful <now>", 3)
    expect(mine).to_contain_text("step 3 of 8")
    expect(mine).to_contain_text("1,234")
    expect(mine.locator(".finding")).to_contain_text("careful <now>")


def test_another_stage_can_be_looked_at(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    mine = page.locator(".run").first
    expect(mine.locator("figure").first).to_contain_text("Reward")
    mine.get_by_role("button", name="sft").click()
    expect(mine.locator("figure").first).to_contain_text("Loss")
    expect(mine.get_by_role("button", name="sft")).to_have_attribute("aria-pressed", "true")


def test_samples_are_found(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.locator("select[name=run]").select_option("1")
    expect(page.locator("#samples .sample")).to_have_count(17)
    page.get_by_label("Search").fill("kettle KIND-OF-NOTHING")
    expect(page.locator("#samples")).to_contain_text("0 found")
    page.get_by_label("Search").fill("KETTLE leaks")
    expect(page.locator("#samples .sample")).to_have_count(4)
    expect(page.locator("#samples .sample").first).to_contain_text("step 60")


def test_values_show_under_the_pointer(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    chart = page.locator(".run").nth(1).locator("figure").first
    chart.locator("svg").hover()
    expect(chart.locator("output")).to_contain_text("step")


def test_metrics_are_picked_overlaid_and_smoothed(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    chart = page.locator("#overlay-chart")
    expect(chart.locator("path.curve")).to_have_count(3)  # reward of both runs, gold of the second
    page.locator("select[name=metric]").select_option(["kl/mean", "entropy/mean"])
    expect(chart.locator("h3")).to_have_text("kl/mean, entropy/mean")
    expect(chart.locator("path.curve")).to_have_count(3)  # the first run logs no entropy
    before = chart.locator("path.curve").last.get_attribute("d")
    page.get_by_label("Smoothing").fill("20")
    expect(page.locator("#overlay output")).to_have_text("mean of 20 steps")
    expect(page.locator(".run").nth(1).locator("path.faint").first).to_be_attached()
    expect(chart.locator("path.curve").last).not_to_have_attribute("d", before or "")
    page.get_by_label("each line on its own scale").check()
    expect(chart.locator(".key")).to_contain_text(" to ")


def test_what_was_picked_stays_while_a_run_goes_on(url: str, open_page: OpenPage, live: Run) -> None:
    page = open_page(url)
    picker = page.locator("select[name=metric]")
    picker.select_option(["kl/mean"])
    live.log({"reward/mean": 2.0, "kl/mean": 0.4, "brand/new": 1.0}, 3)
    expect(picker.locator("option", has_text="brand/new")).to_be_attached()
    expect(page.locator("#overlay-chart h3")).to_have_text("kl/mean")
    page.locator("#overlay-chart svg").hover()
    expect(page.locator("#overlay-chart output")).to_contain_text("step")


def test_conversations_are_turns(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.locator("select[name=run]").select_option("1")
    page.get_by_label("Search").fill("how much is it")
    expect(page.locator("#samples .turn.user")).to_contain_text("How much is it?")
    assert "<|im_" not in page.locator("body").inner_text()


def test_tiles_are_in_one_row_and_whole(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    tiles = page.locator(".run").nth(1).locator(".tiles div")
    expect(tiles.first).to_be_visible()
    # all at once: the page is live, and what is drawn above them meanwhile moves them together
    tops = tiles.evaluate_all("tiles => tiles.map(tile => tile.getBoundingClientRect().top)")
    assert len(tops) > 1
    assert len(set(tops)) == 1
    assert all(tile.evaluate("tile => tile.scrollWidth <= tile.clientWidth") for tile in tiles.all())
