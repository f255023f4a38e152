"""Pictures of the pages that Kedge makes and serves, taken in Chromium of the gallery's runs, for docs/pictures.

1280 pixels wide and light, and one as a phone shows it. Each is a WebP file of at most 120 KB. Pages that are served
run in processes of their own, on this machine alone. Left out: the pages of a team, which need certificates.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from playwright.sync_api import Browser, Page, sync_playwright

import gallery_runs
from kedge.core.errors import RunError
from kedge.demo.truth import true_preference
from kedge.label.accounts import add_person
from kedge.label.database import open_store
from kedge.label.judging import judge
from kedge.label.projects import find_project
from kedge.label.questions import Decision
from kedge.label.work import Task, next_task

PICTURES = Path(__file__).parents[2] / "docs/pictures"
MOST_BYTES, QUALITY = 120_000, 82
RULES = """\
improve: {win_rate: {judge: gold, at_equal_length: true, over: 0.5}}
limit: {length.ratio: 1.5, length.shrinkage: 1.5, kl: 6}
alpha: 0.05
"""
GUIDE = "A good reply repeats the facts right, is polite without fawning, and is short.\n"
Prepare = Callable[[Page], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    width: int = 1280
    height: int = 860


DESKTOP, PHONE = Look(), Look(width=390, height=780)
VERDICT, DESK = Look(height=400), Look(height=640)


def take(work: Path) -> None:
    """All of them, of runs that are in the work folder."""
    with browser() as chromium:
        shots = Shots(chromium)
        for part in (take_reports, take_board, take_watch, take_studio, take_labels):
            part(shots, work)


def take_reports(shots: Shots, work: Path) -> None:
    demo, rounds = (address(gallery_runs.folder(work, name) / "report.html") for name in gallery_runs.FIRST)
    shots.take("report", demo)
    shots.take("report-phone", demo, PHONE)
    shots.take("report-curves", demo, prepare=at_curves)
    shots.take("rounds", rounds)


def take_board(shots: Shots, work: Path) -> None:
    board = address(make_board(gallery_runs.folder(work, "demo").resolve(), work / "board"))
    shots.take("board", board)
    shots.take("gate", board, VERDICT, prepare=at_verdict)


def take_watch(shots: Shots, work: Path) -> None:
    with served(["watch", "demo/runs/demo/ppo", "rounds/runs/rounds/round-2/ppo", "--web"], work) as url:
        shots.take("watch", url, prepare=drawn)


def take_studio(shots: Shots, work: Path) -> None:
    with served(["studio", "demo"], work) as url:
        shots.take("studio-recipe", path(url, "recipe?file=demo.yaml"), prepare=checked)
        shots.take("studio-run", path(url, "run?name=demo"), prepare=drawn)


def take_labels(shots: Shots, work: Path) -> None:
    make_labels(gallery_runs.folder(work, "demo").resolve(), work / "labels")
    with served(["label", "serve", "--db", "labels/labels.db"], work) as url:
        shots.take("label", path(url, "work"), DESK, prepare=at_desk)
        shots.take("label-manage", path(url, "manage"), prepare=loaded)


@contextmanager
def browser() -> Generator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        # Its sandbox needs rights that a container does not give; the pages are our own.
        made = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield made
        made.close()


class Shots:
    """Takes pictures in one browser."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium

    def take(self, name: str, url: str, look: Look = DESKTOP, *, prepare: Prepare | None = None) -> None:
        context = self._chromium.new_context(
            viewport={"width": look.width, "height": look.height},
            color_scheme="light",
            locale="en-GB",
            timezone_id="UTC",
        )
        page = context.new_page()
        page.goto(url)
        if prepare is not None:
            prepare(page)
        page.wait_for_timeout(500)
        keep(name, picture_of(page))
        context.close()


def picture_of(page: Page) -> bytes:
    """What is in sight, as WebP, which Chromium writes by its own protocol alone."""
    session = page.context.new_cdp_session(page)
    shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
    return base64.b64decode(shot["data"])


def keep(name: str, picture: bytes) -> None:
    if len(picture) > MOST_BYTES:
        raise RunError(
            f"{name}.webp has {len(picture):,} bytes, at most {MOST_BYTES:,} are kept: show less of the page"
        )
    (PICTURES / f"{name}.webp").write_bytes(picture)
    print(f"docs/pictures/{name}.webp: {len(picture):,} bytes")


def address(page: Path) -> str:
    return page.resolve().as_uri()


def path(url: str, place: str) -> str:
    """Another page of a server whose address has a token."""
    base, _, token = url.partition("/?")
    return f"{base}/{place}{'&' if '?' in place else '?'}{token}"


@contextmanager
def served(arguments: list[str], work: Path) -> Generator[str]:
    """The address that a command of `kedge` prints; it is ended with the block."""
    command = [sys.executable, "-m", "kedge.cli", *arguments]
    server = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, text=True, env=gallery_runs.environment())
    try:
        assert server.stdout is not None
        yield next(word for line in server.stdout for word in line.split() if word.startswith("http"))
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)


def at_curves(page: Page) -> None:
    stage = page.locator("#stage-ppo")
    stage.evaluate("stage => { stage.open = true; }")
    stage.locator("figure").first.evaluate("chart => scrollBy(0, chart.getBoundingClientRect().top - 12)")


def at_verdict(page: Page) -> None:
    page.get_by_role("heading", name="Verdicts").evaluate("title => title.scrollIntoView()")


def drawn(page: Page) -> None:
    page.locator("svg").first.wait_for()
    page.wait_for_timeout(1500)


def loaded(page: Page) -> None:
    page.wait_for_timeout(4000)


def checked(page: Page) -> None:
    page.locator("#verdict").filter(has_text="fit to run").wait_for(timeout=120_000)


def at_desk(page: Page) -> None:
    page.locator("#task").wait_for()
    page.keyboard.press("2")


def make_board(demo: Path, to: Path) -> Path:
    """The demo's policy under rules, and the board that shows the verdict."""
    to.mkdir(parents=True, exist_ok=True)
    (to / "gate.yaml").write_text(RULES)
    gallery_runs.kedge(["gate", str(demo / "ppo"), str(demo / "sft"), "--from", str(demo / "eval"), "--force"], to)
    gallery_runs.kedge(["board", str(demo), "verdict.json", "--force"], to)
    return to / "board.html"


def make_labels(demo: Path, to: Path) -> None:
    """A project whose people compare what the demo's models said; three of them have begun."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    (to / "guide.md").write_text(GUIDE)
    new = ["label", "new", "shop", "--questions", "pair,axes", "--guideline", "guide.md", "--overlap", "0.5"]
    gallery_runs.kedge(new, to)
    gallery_runs.kedge(["label", "add", "shop", str(demo / "eval/answers.jsonl")], to)
    label(to / "labels.db")


def label(file: Path) -> None:
    """Labels of three people who see the truth through a little noise."""
    store = open_store(str(file))
    project = find_project(store, "shop")
    for number, name in enumerate(("ann", "ben", "eve")):
        person, noise = add_person(store, f"{name}@example.org"), Random(number)
        for _ in range(40):
            if (task := next_task(store, project, person)) is not None:
                judge(store, project, person, task.assignment, decision(task, noise))
    store.close()


def decision(task: Task, noise: Random) -> Decision:
    prompt = task.prompt[-1].content
    left, right = (true_preference(prompt, answer[-1].content) + noise.gauss(0, 0.5) for answer in task.answers)
    outcome = max(-3, min(3, round(right - left)))
    return Decision(verdict="step", outcome=outcome, seconds=round(noise.uniform(6, 30), 1))
