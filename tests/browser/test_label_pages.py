"""The pages of people's labels in a real browser: keys alone, a lost network, three widths, hostile texts, a day."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from sqlalchemy import func, select

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "web"))
sys.path.insert(0, str(Path(__file__).parents[1] / "board"))
from board_files import make_runs
from hostile_texts import CASES
from label_servers import local_pages, team_pages
from team_site import QUIZ, gold_pair, new_shop, pair, ranked, says

from kedge.commands.label_pages import Hosted
from kedge.data.examples import Message
from kedge.label import tables
from kedge.label.accounts import add_person
from kedge.label.audit import tampered
from kedge.label.database import Store, open_store
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.judging import judge
from kedge.label.projects import Settings
from kedge.label.questions import Decision
from kedge.label.status import status
from kedge.label.team.members import add_member
from kedge.label.work import next_task
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe

OpenPage = Callable[..., Page]
pytestmark = pytest.mark.browser
PASSWORD = "correct horse battery"
LONG = "A long text with many words that goes on and on. " * 80
WIDTHS = (360, 768, 1280)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(str(tmp_path / "labels.db"), create=True)
    yield store
    store.close()


@pytest.fixture
def url(store: Store) -> Iterator[str]:
    """A page for one person. Tests fill the store first; pages are closed before the server is gone."""
    with local_pages(store) as address:
        yield address


def rows(store: Store) -> list:
    query = select(tables.judgment).order_by(tables.judgment.c.seq)
    return list(store.read(lambda connection: connection.execute(query).all()))


def at(url: str, path: str) -> str:
    return url.replace("/?", f"/{path}?")


def opened(open_page: OpenPage, url: str, path: str = "work", look: str = "light") -> Page:
    """The desk with its first item. The first page is opened, so that every path of this server counts as its own."""
    page = open_page(url, look)
    page.goto(at(url, path))
    expect(page.locator("#task")).to_be_visible()
    return page


def following(page: Page) -> None:
    """Send by Enter, and wait for the next item or the end."""
    before = page.locator("#task").get_attribute("data-assignment")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "before => !document.querySelector('#task') || document.querySelector('#task').dataset.assignment !== before",
        arg=before,
    )


def test_keys_alone_make_every_kind_of_verdict(store: Store, url: str, open_page: OpenPage) -> None:
    new_shop(store, [pair(n, priority=-n) for n in range(6)])
    page = opened(open_page, url)
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_contain_text("Choose a step first")
    for key in ("1", "7", "t", "b"):
        page.keyboard.press(key)
        following(page)
    page.keyboard.press("6")
    page.keyboard.press("Tab")
    page.keyboard.press("5")
    page.keyboard.press("Tab")
    page.keyboard.press("2")
    page.keyboard.press("f")
    page.keyboard.press("3")
    page.keyboard.press("Enter")
    expect(page.locator("#flags")).to_have_text("1")
    page.keyboard.press("e")
    page.keyboard.type("Better: ")
    page.keyboard.press("Escape")
    following(page)
    page.keyboard.press("s")
    page.keyboard.press("2")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Nothing is left to do")).to_be_visible()
    kept = rows(store)
    assert [row.verdict for row in kept] == ["step", "step", "step", "both_bad", "step", "skip"]
    assert [abs(row.outcome) for row in kept[:3]] == [3, 3, 0]
    assert abs(kept[4].axes["helpful"]) == 1
    assert abs(kept[4].axes["honest"]) == 2
    assert "harmless" not in kept[4].axes
    assert kept[4].edit is not None
    assert kept[5].reason == "I know too little about it"
    assert store.read(lambda connection: connection.execute(select(tables.flag.c.kind)).scalars().all()) == ["broken"]
    expect(page.locator("#mine b")).to_have_text("6")


def test_sides_are_those_that_the_person_saw(store: Store, url: str, open_page: OpenPage) -> None:
    new_shop(store, [pair(n) for n in range(8)])
    page = opened(open_page, url)
    for _ in range(8):
        is_left = "first" in page.locator(".answer.place-1 .text").inner_text()
        page.keyboard.press("2" if is_left else "6")
        following(page)
    assert {row.outcome for row in rows(store)} == {-2}


def test_undo_comes_back_with_what_was_said(store: Store, url: str, open_page: OpenPage) -> None:
    new_shop(store, [pair(n) for n in range(3)])
    page = opened(open_page, url)
    first = page.locator("#task").get_attribute("data-assignment")
    page.keyboard.press("3")
    following(page)
    page.keyboard.press("u")
    expect(page.locator(f'#task[data-assignment="{first}"]')).to_be_visible()
    expect(page.locator('input[name="step"][value="-1"]')).to_be_checked()
    page.keyboard.press("5")
    following(page)
    assert [row.verdict for row in rows(store)] == ["step", "undone", "step"]


def test_an_order_is_typed_or_moved(store: Store, url: str, open_page: OpenPage) -> None:
    new_shop(store, [ranked(n) for n in range(2)])
    page = opened(open_page, url, "rank")
    page.keyboard.type("2 1=3 ")
    expect(page.locator("#order-said")).to_have_text("Still to place: 4.")
    page.keyboard.press("Enter")
    assert rows(store) == []
    page.keyboard.type("4")
    expect(page.locator(".answer.place-1 .place")).to_have_text("tied 2.")
    following(page)
    page.locator(".answer.place-3").focus()
    page.keyboard.press("ArrowUp")
    page.locator(".answer.place-1").focus()
    page.keyboard.press("ArrowUp")
    page.locator(".answer.place-2").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("=")
    page.locator(".answer.place-4").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    expect(page.locator("#order")).to_have_value("3 4 1=2")
    following(page)
    shown = []
    order = select(tables.assignment.c.order).join(tables.judgment).order_by(tables.judgment.c.seq)
    orders = store.read(lambda connection: connection.scalars(order).all())
    for places, row in zip(orders, rows(store), strict=True):
        shown.append([row.ranking[place] for place in places])
    assert shown == [[2, 1, 2, 4], [3, 3, 1, 2]]


def test_a_minute_without_network_loses_and_doubles_nothing(store: Store, url: str, quiet_page) -> None:
    new_shop(store, [pair(n) for n in range(4)])
    page = quiet_page(url)
    replies: list[int] = []

    def lose_the_reply(route) -> None:
        # It arrives, and the acknowledgement does not: the page must send it again.
        if len(replies) < 2:
            replies.append(route.fetch().status)
            route.abort("internetdisconnected")
        else:
            route.continue_()

    page.route("**/work/judge*", lose_the_reply)
    page.keyboard.press("2")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_contain_text("Offline: your judgment is kept here")
    assert len(rows(store)) == 1
    page.wait_for_function("() => !sessionStorage.length", timeout=15000)
    assert replies == [200, 200]
    assert len(rows(store)) == 1
    page.unroute("**/work/judge*")
    # Gone altogether, and the page is loaded again meanwhile.
    page.keyboard.press("6")
    page.route("**/work/judge*", lambda route: route.abort("internetdisconnected"))
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_contain_text("Offline")
    page.unroute("**/work/judge*")
    page.reload()
    page.wait_for_function("() => !sessionStorage.length && document.querySelector('#task')", timeout=15000)
    assert [abs(row.outcome) for row in rows(store)] == [2, 2]


@pytest.fixture
def quiet_page(browser: Browser) -> Iterator[Callable[[str], Page]]:
    """A page whose console may tell of requests that did not come through."""
    contexts: list[BrowserContext] = []

    def make(url: str) -> Page:
        contexts.append(browser.new_context(viewport={"width": 1100, "height": 900}))
        page = contexts[-1].new_page()
        page.goto(at(url, "work"))
        expect(page.locator("#task")).to_be_visible()
        return page

    yield make
    for context in contexts:
        context.close()


def test_views_differ_fold_link_and_pause(store: Store, url: str, open_page: OpenPage) -> None:
    texts = ("**Two** eggs and " + LONG, "**Three** eggs and " + LONG)
    draft = pair(1, texts=texts)
    new_shop(store, [Draft(prompt=says("user", LONG), answers=draft.answers)])
    page = opened(open_page, url)
    expect(page.locator(".prompt.long")).to_be_visible()
    short = page.locator(".prompt").bounding_box()["height"]
    page.keyboard.press("o")
    assert page.locator(".prompt").bounding_box()["height"] > 2 * short
    page.keyboard.press("o")
    page.keyboard.press("d")
    assert sorted(page.locator("mark").all_inner_texts()) == ["Three", "Two"]
    page.keyboard.press("m")
    expect(page.locator(".answer .markdown strong").first).to_be_visible()
    expect(page.locator("mark").first).to_be_hidden()
    page.keyboard.press("m")
    expect(page.locator(".answer .text").first).to_contain_text("**")
    page.keyboard.press("l")
    page.locator(".answer .said").first.evaluate("pane => { pane.scrollTop = 200; }")
    page.wait_for_function("() => document.querySelectorAll('.answer .said')[1].scrollTop === 200")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Prefer what is true")
    page.keyboard.press("1")
    page.keyboard.press("Escape")
    assert page.locator('input[name="step"]:checked').count() == 0
    page.keyboard.press("p")
    expect(page.get_by_role("dialog")).to_contain_text("The clock stands still")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", ["", "work", "rank", "me", "review", "manage"])
def test_no_page_scrolls_sideways(store: Store, url: str, open_page: OpenPage, width: int, path: str) -> None:
    wide = "a_word_without_any_blank_" * 40
    drafts = [pair(n, texts=(f"first {wide}", f"| a | b |\n|---|---|\n| {wide} | {LONG} |")) for n in range(3)]
    new_shop(store, [*drafts, *(ranked(n) for n in range(9, 11))], settings=Settings(wanted=2, gold_share=0.0))
    project = new_shop(store, [], name="other")
    add_member(store, project, add_person(store, "a-very-long-name-of-somebody@department.example.org"))
    page = open_page(url, "phone" if width == 360 else "light")
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(at(url, path) + "&project=shop")
    if path in ("work", "rank"):
        expect(page.locator("#task")).to_be_visible()
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.keyboard.press("m")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, a")].filter((field) => {
          const name = field.labels?.length || field.getAttribute("aria-label") || field.textContent.trim();
          return !name;
        }).map((field) => field.outerHTML)"""
    )
    assert unnamed == []
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1


def test_what_is_shown_is_reached_by_tab_in_its_order(store: Store, url: str, open_page: OpenPage) -> None:
    new_shop(store, [pair(1)])
    page = opened(open_page, url)
    seen = []
    name = "(field => field.name || field.dataset.do || field.type)(document.activeElement)"
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(name))
    kept = [name for name in dict.fromkeys(seen) if name]
    assert kept[:3] == ["axis-helpful", "axis-honest", "axis-harmless"]
    assert kept[3:8] == ["step", "edit", "flag", "skip", "submit"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_hostile_texts_do_nothing(store: Store, url: str, open_page: OpenPage) -> None:
    texts = [(Message("assistant", case),) for case in CASES]
    drafts = [
        Draft(prompt=text, answers=(DraftAnswer(text=text), DraftAnswer(text=(Message("assistant", f"n {number}"),))))
        for number, text in enumerate(texts)
    ]
    new_shop(store, drafts)
    page = opened(open_page, url)
    page.on("dialog", lambda dialog: pytest.fail(f"a text opened a dialog: {dialog.message}"))
    for number in range(len(CASES)):
        page.keyboard.press("m")
        page.keyboard.press("d")
        page.keyboard.press("m")
        page.keyboard.press("e")
        page.keyboard.press("Escape")
        assert page.evaluate("window.acted") is None, number
        assert page.locator("#task").count() == 1
        assert page.locator("#task :is(script, iframe, img, svg, style, link, meta, base, object, embed)").count() == 0
        assert page.locator("#task a").count() == 0
        page.keyboard.press("4")
        following(page)
    assert page.evaluate("window.acted") is None
    assert len(rows(store)) == len(CASES)


def test_board_and_runs_are_hosted_and_lost_items_go_to_people(
    store: Store, open_page: OpenPage, tmp_path: Path, run: Path
) -> None:
    project = new_shop(store, questions=("pair",))
    hosted = Hosted(board=make_runs(tmp_path / "board", {}), watch=[run])
    with local_pages(store, hosted) as url:
        page = open_page(url)
        page.goto(at(url, "board"))
        page.keyboard.press("j")
        page.keyboard.press("l")
        expect(page.locator("#said")).to_have_text("sent to shop")
        assert status(store, project).items == 1
        page.goto(at(url, "watch/"))
        expect(page.locator(".run svg")).to_have_count(6)
        page.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate is made with openssl")
def test_a_whole_day(store: Store, browser: Browser, tmp_path: Path) -> None:
    settings = Settings(wanted=2, overlap_share=0.0, gold_share=0.0, practice=2)
    project = new_shop(store, [*(pair(n) for n in range(100)), *(gold_pair(n) for n in range(200, 206))],
                       guide=QUIZ, settings=settings)  # fmt: skip
    boss = add_person(store, "boss@example.org", "manager", password=PASSWORD)
    ann = add_person(store, "ann@example.org")
    for person in (boss, ann):
        add_member(store, project, person)
    while (task := next_task(store, project, ann)) is not None:
        outcome = -2 if task.answers[0][0].content.startswith("first") else 2
        judge(store, project, ann, task.assignment, Decision(verdict="step", outcome=outcome, seconds=5.0))
    with team_pages(store, tmp_path) as url:
        troubles: list[str] = []

        def person() -> Page:
            context = browser.new_context(ignore_https_errors=True, viewport={"width": 1280, "height": 800})
            page = context.new_page()
            page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: troubles.append(str(error)))
            return page

        lead = person()
        lead.goto(url)
        lead.get_by_label("E-mail address").fill("boss@example.org")
        lead.get_by_label("Password").fill(PASSWORD)
        lead.keyboard.press("Enter")
        lead.wait_for_url("**/manage*", wait_until="networkidle")  # parts that come later move what is below them
        lead.get_by_label("Invite").fill("dora@example.org")
        lead.get_by_role("button", name="Make a link").click()
        link = lead.locator(".link-out").inner_text()
        dora = person()
        begin(dora, link)
        label_by_keys(dora, 100, wrong={7, 31})
        review(lead, url)
        with lead.expect_download() as download:
            lead.goto(f"{url}/manage")
            lead.get_by_role("button", name="Download").click()
        pairs = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
        assert troubles == []
    assert len(pairs) == 99  # the one that went to the guideline is a tie
    assert {row["chosen"][0]["content"].split()[0] for row in pairs} == {"first"}
    assert sum(row.get("decided", False) for row in pairs) == 1
    now = status(store, project)
    assert (now.given, now.people[-1].labels) == (200, 100)
    assert tampered(store) == []
    count = store.read(lambda connection: connection.scalar(select(func.count()).select_from(tables.judgment)))
    assert count == 202
    train_on(tmp_path, pairs)


def train_on(folder: Path, pairs: list[dict]) -> None:
    """The reward stage takes the export as it is."""
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    reward = {"kind": "reward", "data": "pairs.jsonl", "batch": 8, "max_length": 96, "if_unfit": "go_on"}
    stage = {**reward, "loss": {"margin": True}, "labels": "soft"}
    recipe = {"kedge": 1, "name": "day", "model": "tiny", "device": "cpu", "stages": {"reward": stage}}
    (folder / "day.yaml").write_text(json.dumps(recipe))
    run_recipe(load_recipe(folder / "day.yaml"), folder / "runs", is_resumed=False, say=lambda line: None)
    assert (folder / "runs/day/reward/model").is_dir()


def begin(page: Page, link: str) -> None:
    """From the link to the queue, practice included."""
    page.goto(link)
    page.get_by_label("A new password").fill(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/start*")
    for answer in ("the true one", "flag it"):
        page.get_by_label(answer).check()
    page.get_by_role("button", name="Send my answers").click()
    for number in range(2):
        expect(page.locator("#practice")).to_have_text(f"{number + 1} of 2")
        page.keyboard.press("2")
        page.keyboard.press("Enter")
        expect(page.locator("#feedback")).to_be_visible()
        expect(page.locator("#feedback")).to_contain_text("the first is true")
        page.keyboard.press("Enter")
    page.wait_for_url("**/work*")


def label_by_keys(page: Page, count: int, wrong: set[int]) -> None:
    expect(page.locator("#task")).to_be_visible()
    for number in range(count):
        is_left = page.locator(".answer.place-1 .text").inner_text().startswith("first")
        page.keyboard.press("2" if is_left != (number in wrong) else "6")
        following(page)
    expect(page.get_by_text("Nothing is left to do")).to_be_visible()


def review(page: Page, url: str) -> None:
    """Decide the first disagreement, and ask the guideline about the second, by keys alone."""
    page.goto(f"{url}/review")
    expect(page.locator("article")).to_have_count(2)
    better = page.locator("article").first.locator(".answer.place-1").inner_text().count("first of")
    page.keyboard.press("j")
    expect(page.locator("article").nth(1)).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("2" if better else "6")
    chosen = page.locator("article").first.get_by_role("radio", checked=True)
    expect(chosen).to_have_accessible_name("A is better" if better else "B is better")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(1)
    page.keyboard.press("g")
    expect(page.locator("#state")).to_have_text("Say first what the guideline leaves open.")
    page.keyboard.type("Twenty-one big sides: what if both are right?")  # letters that are keys elsewhere
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    expect(page.get_by_text("Nothing to decide")).to_be_visible()
