"""The studio in a real browser: from an empty folder to a finished run, its report and a chat, without a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(1500)]
LONG = 300_000
"""Milliseconds for what trains or loads: these machines are busy."""
SHOTS = os.environ.get("STUDIO_SHOTS")
"""A folder to keep screenshots in, for people to look at."""
LOOKS = {
    "desktop-light": (1440, 900, "light"),
    "desktop-dark": (1440, 900, "dark"),
    "phone-light": (390, 844, "light"),
    "phone-dark": (390, 844, "dark"),
}
PAIR = {"prompt": "How much is it?", "chosen": "Ten euro, and thank you for asking.", "rejected": "No."}


@dataclass
class Server:
    """`kedge studio` as a process of its own, which can be killed and started again."""

    folder: Path
    process: subprocess.Popen[str] | None = None
    url: str = ""
    troubles: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kedge.cli", "studio", str(self.folder)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def at(self, path: str) -> str:
        base, _, token = self.url.partition("/?token=")
        return f"{base}{path}{'&' if '?' in path else '?'}token={token}"

    def jobs(self) -> list[dict[str, object]]:
        return [json.loads(file.read_bytes()) for file in (self.folder / ".kedge-studio" / "jobs").glob("*.json")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    made = Server(tmp_path_factory.mktemp("studio") / "help-desk")
    made.start()
    yield made
    made.kill()
    for job in made.jobs():
        if job["code"] is None and job["pid"]:
            with suppress(ProcessLookupError):
                os.killpg(int(str(job["pid"])), signal.SIGKILL)


@pytest.fixture
def tab(browser: Browser, server: Server) -> Generator[Callable[..., Page]]:
    """A tab of the studio; at its end no page may have had an error that the server did not mean."""
    contexts, troubles = [], list[str]()

    def make(path: str = "/", look: str = "desktop-light") -> Page:
        width, height, scheme = LOOKS[look]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        home = server.url.partition("/?")[0]
        page.on(
            "request", lambda sent: None if sent.url.startswith((home, "data:", "blob:")) else troubles.append(sent.url)
        )
        page.goto(server.at(path))
        return page

    yield make
    for context in contexts:
        context.close()
    assert troubles == []


def setting(page: Page, *path: str) -> Locator:
    return page.locator(f"[data-path='{json.dumps(list(path))}']")


def put(page: Page, path: tuple[str, ...], text: str) -> Locator:
    """Type into the field of a setting, and leave it."""
    place = setting(page, *path)
    for group in range(1, len(path)):
        around = page.locator(f"details[data-path='{json.dumps(list(path[:group]))}']")
        if around.count() and around.get_attribute("open") is None:
            around.locator(":scope > summary").click()
    control = place.locator("[data-set]").first
    if control.evaluate("control => control.tagName") == "SELECT":
        control.select_option(text)
    else:
        control.fill(text)
        control.blur()
    return place.locator(":scope > .problem")


def keep_shots(tab: Callable[..., Page], name: str, path: str) -> None:
    """The page in all looks: nothing is wider than the screen."""
    for look in LOOKS:
        page = tab(path, look)
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} {look}"
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            page.screenshot(path=f"{SHOTS}/{name}-{look}.png")
        page.close()


def test_1_a_new_run_from_an_empty_folder(server: Server, tab: Callable[..., Page], tmp_path: Path) -> None:
    page = tab()
    expect(page.locator("main")).to_contain_text("No run yet")
    page.get_by_role("link", name="Start the first one").click()
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({**PAIR, "prompt": f"How much is number {n}?"}) + "\n" for n in range(60)))
    page.locator("#files").set_input_files(file)
    expect(page.locator(".audit")).to_contain_text("60 pairs", timeout=LONG)
    bad = tmp_path / "CON.jsonl"
    bad.write_text("{}")
    page.locator("#files").set_input_files(bad)
    expect(page.locator("#audits .problem")).to_contain_text("not every system can call a file so")
    page.get_by_label("Name of the run").fill("no/way")
    page.locator("#model").fill("/etc")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("[data-problem=name]")).to_contain_text("letters, digits")
    expect(page.locator("[data-problem=model]")).to_contain_text("not inside of the project folder")
    page.get_by_label("Name of the run").fill("first")
    page.locator("#model").fill("tiny")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#verdict")).to_have_text("fit to run", timeout=LONG)
    expect(page.locator("#plan")).to_contain_text("246,528 parameters")
    assert (server.folder / "first.yaml").is_file()


FIELDS = (
    (("name",), "two words", "must match"),
    (("seed",), "-1", "at least 0"),
    (("model",), "no-such-model", "no-such-model"),
    (("stages", "sft", "batch"), "many", "whole number"),
    (("stages", "sft", "epochs"), "0", "greater than 0"),
    (("stages", "sft", "data"), "data/none.jsonl", "there is no file"),
    (("stages", "sft", "data"), "../../etc/passwd", "leads out of the project"),
    (("stages", "prepare", "files"), "data/pairs.jsonl, data/nothing.jsonl", "there is no file"),
    (("stages", "sft", "optimiser", "lr"), "fast", "must be a number"),
    (("stages", "prepare", "drop"), "empty, odd", "must be"),
    (("trackers",), "{tensorbord: {}}", "did you mean 'tensorboard'"),
)  # fmt: skip


def test_2_bad_input_is_answered_at_its_field(server: Server, tab: Callable[..., Page]) -> None:
    page = tab("/recipe?file=first.yaml")
    expect(page.locator("#verdict")).to_have_text("fit to run", timeout=LONG)
    before = (server.folder / "first.yaml").read_text()
    for path, typed, words in FIELDS:
        problem = put(page, path, typed)
        expect(problem).to_contain_text(words, timeout=LONG)
        page.locator("#yaml").fill(before)
        page.locator("#yaml").blur()
        expect(problem).to_be_hidden(timeout=LONG)
    put(page, ("stages", "sft", "too_long"), "refuse")
    expect(page.locator("#yaml")).to_have_value(re.compile("too_long: refuse"))
    page.locator("#yaml").fill("a: [1")
    expect(page.locator("#top-problems")).to_contain_text("line")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#top-problems")).to_be_visible()
    page.locator("#yaml").fill(before.replace("batch: 16 #", "batch: 8 #"))
    expect(setting(page, "stages", "sft", "batch").locator("input")).to_have_value("8")
    page.locator("#yaml").fill(before)
    page.locator("#yaml").blur()
    expect(page.locator("#verdict")).to_have_text("fit to run", timeout=LONG)
    assert not [job for job in server.jobs() if job["kind"] == "run"]
    keep_shots(tab, "recipe", "/recipe?file=first.yaml")


def test_3_a_second_tab_is_told(server: Server, tab: Callable[..., Page]) -> None:
    one, two = tab("/recipe?file=first.yaml"), tab("/recipe?file=first.yaml")
    put(one, ("seed",), "11")
    expect(one.locator("#yaml")).to_have_value(re.compile("seed: 11"))
    put(two, ("seed",), "12")
    expect(two.locator("#state")).to_contain_text("changed elsewhere")
    assert "seed: 11" in (server.folder / "first.yaml").read_text()
    one.close()
    two.reload()
    expect(setting(two, "seed").locator("input")).to_have_value("11")


def test_4_a_run_outlives_its_tab_and_its_server(server: Server, tab: Callable[..., Page]) -> None:
    page = tab("/recipe?file=first.yaml")
    for path, text in {("stages", "sft", "epochs"): "400", ("stages", "sft", "checkpoints", "every"): "5"}.items():
        put(page, path, text)
    expect(page.locator("#yaml")).to_have_value(re.compile("every: 5"))
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#status")).to_have_text("running", timeout=LONG)
    expect(page.locator("#live")).to_contain_text("tokens/s", timeout=LONG)
    page.close()
    address, (job,) = server.url, [job for job in server.jobs() if job["kind"] == "run"]
    server.kill()
    time.sleep(1)
    os.kill(int(str(job["pid"])), 0)  # it goes on
    server.start()
    assert server.url == address
    page = tab("/")
    expect(page.locator(".runs-list")).to_contain_text("running")
    page.get_by_role("link", name="first", exact=True).click()
    expect(page.locator("#log")).to_contain_text("conversations")
    second = tab("/recipe?file=first.yaml")
    put(second, ("name",), "second")
    expect(second.locator("#yaml")).to_have_value(re.compile("name: second"))
    second.get_by_role("button", name="Start").click()
    expect(second.locator("#state")).to_contain_text("first is running", timeout=LONG)
    put(second, ("name",), "first")
    expect(second.locator("#yaml")).to_have_value(re.compile("name: first"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("interrupted", timeout=LONG)
    expect(page.get_by_role("button", name="Resume")).to_be_visible()


def test_5_it_is_resumed_and_ends(server: Server, tab: Callable[..., Page]) -> None:
    page = tab("/run?name=first")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#status")).to_have_text("running", timeout=LONG)
    expect(page.locator("#log")).to_contain_text("done before, kept", timeout=LONG)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("interrupted", timeout=LONG)
    page = tab("/recipe?file=first.yaml")
    put(page, ("name",), "short")
    put(page, ("stages", "sft", "epochs"), "1")
    expect(page.locator("#yaml")).to_have_value(re.compile("epochs: 1 *\n"))
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#status")).to_have_text("done", timeout=LONG)
    page.locator("#doctor summary").click()
    expect(page.locator("#verdict")).to_contain_text("Healthy", timeout=LONG)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Report").click()
    expect(opened.value.locator("h1")).to_have_text("short")
    keep_shots(tab, "run", "/run?name=short")
    keep_shots(tab, "home", "/")


def test_6_curves_are_overlaid_zoomed_and_exported(tab: Callable[..., Page]) -> None:
    page = tab("/curves?run=first&run=short")
    chart = page.locator("#chart")
    expect(chart.locator(".key")).to_contain_text("short/sft train/loss")
    expect(chart.locator(".key")).to_contain_text("first/sft train/loss")
    page.get_by_label("Smoothing").fill("10")
    expect(page.locator("output").first).to_have_text("mean of 10 steps")
    page.wait_for_timeout(1500)  # it is drawn again
    chart.locator("svg").hover()
    box = chart.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60, steps=5)
    page.mouse.up()
    expect(page.get_by_role("button", name="Whole length")).to_be_visible()
    for kind, begins in (("CSV", "run,step,"), ("SVG", "<svg")):
        with page.expect_download() as download:
            page.get_by_role("button", name=kind).click()
        assert Path(download.value.path()).read_text().startswith(begins)
    page.get_by_role("button", name="Whole length").click()
    expect(page.get_by_role("button", name="Whole length")).to_be_hidden()
    keep_shots(tab, "curves", "/curves?run=first&run=short")


def test_7_two_models_are_talked_with(server: Server, tab: Callable[..., Page]) -> None:
    page = tab("/chat")
    page.get_by_label("Model", exact=True).fill("runs/short/sft")
    page.get_by_label("and beside it").fill("/etc")
    page.get_by_role("button", name="Begin").click()
    expect(page.locator("#state")).to_contain_text("not inside of the project folder")
    page.get_by_label("and beside it").fill("tiny")
    page.get_by_role("button", name="Begin").click()
    expect(page.locator("[data-state=ready]")).to_have_count(2, timeout=LONG)
    page.locator("#say").fill("How much is the kettle?")
    page.locator("#say").press("Enter")
    expect(page.locator(".answer")).to_have_count(2, timeout=LONG)
    page.locator(".answer").first.get_by_role("button", name="A good answer").click()
    expect(page.locator("#talk")).to_contain_text("data/chat-thumbs.jsonl")
    page.locator(".answer").nth(1).get_by_role("button", name="Better").click()
    expect(page.locator("#talk")).to_contain_text("data/chat-pairs.jsonl")
    page.locator(".answer").first.get_by_role("button", name="Ask people").click()
    expect(page.locator("#talk")).to_contain_text("which answer is better: project studio", timeout=LONG)
    page.locator(".answer").nth(1).get_by_role("button", name="Badcase").click()
    page.locator("#case [name=why]").fill("it is noise")
    page.locator("#case select").select_option("contains")
    page.locator("#case [name=value]").fill("euro, I promise")
    page.get_by_role("button", name="Keep it").click()
    expect(page.locator("#talk")).to_contain_text("which every gate replays", timeout=LONG)
    older = tab("/chat")
    page.locator("#say").fill("And the lamp?")
    page.locator("#say").press("Enter")
    expect(page.locator(".answer")).to_have_count(4, timeout=LONG)
    older.locator("#say").fill("is this heard?")
    older.locator("#say").press("Enter")
    expect(older.locator("#state")).to_contain_text("gone on in another tab")
    expect(older.locator("#say")).to_have_value("is this heard?")
    older.locator(".answer").first.get_by_role("button", name="A bad answer").click()  # it is in the chat still
    expect(older.locator("#state")).to_be_empty()
    older.close()
    page.close()
    server.kill()
    server.start()
    again = tab("/chat")
    expect(again.locator(".answer")).to_have_count(4)
    expect(again.locator("[data-state=ready]")).to_have_count(2)
    keep_shots(tab, "chat", "/chat")
    again.get_by_role("button", name="End, and free").click()
    expect(again.locator("#talk")).to_contain_text("Talk with your models")


def test_8_pages_fit_every_screen(tab: Callable[..., Page]) -> None:
    keep_shots(tab, "new", "/new")
    keep_shots(tab, "data", "/data")
