"""The page, the terminal text and the JSON of a reward report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from kedge.report.charts.svg import figure
from kedge.report.reward import ScoredPair, render_html, render_terminal, reward_report
from kedge.report.reward.accuracy import Bin, Share
from kedge.report.reward.page import accuracy, histogram, reliability

World = Callable[..., list[ScoredPair]]
Make = Callable[..., ScoredPair]

VOID = {"meta", "line"}


class Page(HTMLParser):
    """Checks that every tag is closed in its place, and collects text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open = list[str]()
        self.tags = list[str]()
        self.attributes = list[tuple[str, str | None]]()
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def hostile(world: World) -> list[ScoredPair]:
    """A length model, with markup in every text that comes from outside; the first pair is its worst error."""
    pairs = world(300, length=1.0, noise=0.3, longer=0.7)
    first = replace(
        pairs[0],
        chosen=(0.0,),
        rejected=(50.0,),
        where="<i>file</i>:1",
        prompt="<script>alert(1)</script>",
        chosen_text="</pre><b>&amp; [red]",
        rejected_text="x" * 900 + "\"'<img src=x>" + "y" * 900,
        margin=2.0,
    )
    return [first, *pairs[1:]]


def test_page_is_balanced_escaped_and_stands_alone(hostile: list[ScoredPair]) -> None:
    source = render_html(reward_report(hostile, facts={"model <b>": "<u>me</u>"}))
    page = Page(source)
    assert not {"script", "img", "link", "iframe", "i", "u"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "onclick", "onload"} & names
    assert "url(" not in source
    assert "@import" not in source
    for text in ("<script>alert(1)</script>", "</pre><b>&amp; [red]", "<i>file</i>:1", "model <b>", "<u>me</u>"):
        assert text in page.text
    assert "<script>" not in source


def test_page_says_the_verdict_first_and_shows_the_numbers(hostile: list[ScoredPair]) -> None:
    report = reward_report(hostile)
    page = Page(render_html(report))
    body = page.text[page.text.index("Reward model report", page.text.index("}")) :]
    assert body.index(report.verdict) < body.index("Findings") < body.index("Numbers") < body.index("Charts")
    assert body.index("Charts") < body.index("Worst errors")
    for finding in report.findings:
        assert finding.message in body
        assert finding.code in body
    for value in (report.accuracy.value, report.accuracy.low, report.accuracy.high, report.length.rule.value):
        assert f"{value * 100:.1f}" in body
    assert report.length.longer_rejected
    assert f"{report.length.longer_rejected.model.value * 100:.1f} %" in body
    assert page.tags.count("svg") == 6
    assert "prefers-color-scheme: dark" in page.text


def test_worst_errors_show_their_text_cut(hostile: list[ScoredPair]) -> None:
    text = Page(render_html(reward_report(hostile))).text
    assert "Rejected scored 50.00 higher" in text
    assert "… 213 characters left out …" in text  # 900 + 13 + 900 - 1600
    assert re.search(r"x{800}\n… 213", text)


def test_page_of_an_ensemble_without_errors(make: Make) -> None:
    pairs = [make((2.0, 3.0 + at), (0.0, 1.0), lengths=(5, 5), prompt=str(at)) for at in range(5)]
    page = Page(render_html(reward_report(pairs, combine="worst")))
    assert "2 members, combined by worst" in page.text
    assert "0 and 1" in page.text
    assert "No held-out pair is scored the wrong way round." in page.text
    assert page.tags.count("svg") == 5  # no margins in the data


def test_page_of_a_constant_and_of_a_single_pair(make: Make) -> None:
    assert "collapsed to a constant" in Page(render_html(reward_report([make(3, 3), make(3, 3)]))).text
    assert "Only 1 pairs" in Page(render_html(reward_report([make(1e-12, 0)]))).text


def test_reliability_chart_places_its_points(make: Make) -> None:
    # Confidence 3/4 lies in the middle of 50 … 100 %, which is drawn from x = 44 to 348; 3 of 4 right lies three
    # quarters of the way up from y = 172 to 14.
    pairs = [make(score, 0, prompt=str(score)) for score in (1.0986122886681098,) * 3 + (-1.0986122886681098,)]
    calibration = reward_report(pairs).calibration
    page = figure(reliability(calibration))
    assert re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page) == [("196.0", "53.5")]
    assert "<title>75.0 % sure, right in 75.0 % of 4 (" in page
    (low, high) = (calibration.bins[0].observed.low, calibration.bins[0].observed.high)
    ends = [round(172 - 158 * share, 1) for share in (low, high)]
    assert f'<line class="interval" x1="196.0" y1="{ends[0]}" x2="196.0" y2="{ends[1]}"/>' in page
    assert '<line class="guide" x1="44.0" y1="93.0" x2="348.0" y2="14.0"/>' in page  # the diagonal
    assert re.findall(r'text-anchor="end">([^<]*)<', page) == [
        "0 %",
        "25 %",
        "50 %",
        "75 %",
        "100 %",
    ]


def test_histogram_chart_scales_to_the_highest_bar(make: Make) -> None:
    page = figure(histogram(reward_report([make(0, 3), make(3, 3)]).histogram))
    groups = dict(re.findall(r'<g class="bars (\w+) overlaid">(.*?)</g>', page))
    bars = {
        colour: [
            (round(float(x)), float(height))
            for x, height in re.findall(r'<rect x="([\d.]+)".*? height="([\d.]+)"', group)
        ]
        for colour, group in groups.items()
    }
    assert bars == {"first": [(44, 79.0), (338, 79.0)], "second": [(338, 158.0)]}
    assert '<b class="first boxes">chosen</b><b class="second boxes">rejected</b>' in page
    assert "<title>rejected, 2.9 to 3: 2</title>" in page


def test_labels_that_would_run_into_each_other_are_left_out() -> None:
    half = Share(value=0.5, low=0.4, high=0.6, n=9, ties=0)
    bins = [Bin(low=at, high=at, median=at, accuracy=half) for at in (-24500.0, -13500.0, -7.0, 0.0, 5.0, 12.0, 80.0)]
    page = figure(accuracy(bins, title="", note="", x_name="tokens"))
    below = re.findall(r'text-anchor="middle">([^<]*)<', page)
    assert below == ["−24,500", "−7", "0", "5", "12", "80", "tokens"]
    assert page.count("<circle") == 7


def test_terminal_says_the_same(hostile: list[ScoredPair]) -> None:
    report = reward_report(hostile)
    console = Console(width=110, file=StringIO())
    with console.capture() as capture:
        console.print(render_terminal(report))
    text = " ".join(capture.get().split())
    assert " ".join(report.verdict.split()) in text
    assert f"accuracy {report.accuracy.value * 100:.1f} %" in text
    for finding in report.findings:
        assert finding.code in text


def test_json_keeps_every_number(hostile: list[ScoredPair]) -> None:
    report = reward_report(hostile, train_accuracy=0.9, facts={"model": "m"})
    back = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert back["is_fit"] is False
    assert back["verdict"] == report.verdict
    assert back["accuracy"] == {
        "value": report.accuracy.value,
        "low": report.accuracy.low,
        "high": report.accuracy.high,
        "n": 300,
        "ties": 0,
    }
    assert back["findings"][0]["code"] == "length.disguise"
    assert back["worst_errors"][0]["pair"]["prompt"] == "<script>alert(1)</script>"
    assert (back["train_accuracy"], back["facts"]) == (0.9, {"model": "m"})
    assert len(back["histogram"]["edges"]) == 31


def test_prompts_and_answers_are_shown_as_turns_without_marks(hostile: list[ScoredPair]) -> None:
    prompt = "system: Be kind.\nuser: <|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n"
    pair = replace(hostile[0], prompt=prompt, chosen_text="assistant: Ten.<|im_end|>", rejected_text="No<|im_end|>So")
    source = render_html(reward_report([pair, *hostile[1:]]))
    assert (
        '<div class="turns"><p class="turn system"><b>system</b> Be kind.</p>'
        '<p class="turn user"><b>user</b> How much?</p></div>'
    ) in source
    assert "<pre>assistant: Ten.</pre>" in source
    assert "<pre>No⟨im_end⟩So</pre>" in source  # a mark in the middle was written by somebody, and is shown as one
    assert "im_start" not in Page(source).text
