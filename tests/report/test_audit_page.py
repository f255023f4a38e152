"""The page of a data audit: complete, escaped, self-contained, with its charts to scale."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kedge.core.findings import Finding
from kedge.data.auditing import Audit, audit
from kedge.data.auditing.result import Histogram
from kedge.data.auditing.rules import RULES
from kedge.report.audit import length_plot, render_audit
from kedge.report.charts.svg import SMALL, figure

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)> [bold]not markup[/bold]"
REASONS = {code: rule.reason for code, rule in RULES.items()}


@pytest.fixture
def result(tmp_path: Path) -> Audit:
    rows = [{"prompt": f"prompt {n} {'a' * n}", "chosen": f"answer {'b' * n}", "rejected": "no"} for n in range(20)]
    rows.append({"prompt": EVIL, "chosen": EVIL, "rejected": EVIL + " "})
    path = tmp_path / "a <b> & c.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken <i>\n")
    return audit([path], max_broken=0.2)


class Tags(HTMLParser):
    """Every tag opened and closed, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open = list[str]()
        self.seen = set[str]()
        self.links = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect"):
            assert self.open.pop() == tag


def test_page_escapes_data_and_loads_nothing(result: Audit) -> None:
    page = render_audit(result, reasons=REASONS)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.isdisjoint({"script", "img", "link", "i"})
    assert tags.links == []
    assert "&lt;script&gt;alert(" in page
    assert "http" not in page.lower()
    assert "url(" not in page


def test_page_says_what_was_found(result: Audit) -> None:
    page = render_audit(result, reasons=REASONS)
    assert "1 of 21 pairs (4.76 %) have the same text on both sides." in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert len(re.findall(r"<figure", page)) == 3
    assert "a &lt;b&gt; &amp; c.jsonl:21" in page
    assert REASONS["pairs.identical"] in page
    # 20 of 20 wins of the longer answer: the interval begins at 20 / (20 + 3.8415)
    assert '<rect x="268.44" y="4" width="52.56"' in page


def test_nothing_found_is_said(tmp_path: Path) -> None:
    path = tmp_path / "fine.jsonl"
    path.write_text('{"prompt": "one thing"}\n{"prompt": "quite another"}\n')
    page = render_audit(audit([path]), reasons=REASONS)
    assert "Nothing to object to." in page


def test_chart_is_logarithmic_and_to_scale() -> None:
    page = figure(length_plot(Histogram(side="prompt", edges=(0, 1, 9, 99), counts=(2, 0, 8))), SMALL)
    # log(1 + 9) / log(1 + 99) is a half of the 320 wide axis, which begins at 4; the tallest bar fills the 72
    assert re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="[\d.]+" height="([\d.]+)"', page) == [
        ("4.0", "18.0"),
        ("164.0", "72.0"),
    ]
    assert "<title>9 to 98 characters: 8</title>" in page
    assert re.findall(r'text-anchor="middle">([^<]*)<', page) == ["1", "10"]
    assert '<g class="bars third">' in page


def test_findings_of_others_are_shown(result: Audit) -> None:
    more = Finding(level="fatal", code="tokenizer.eos", message="No <eos> in the targets.")
    assert "No &lt;eos&gt; in the targets." in render_audit(result.with_findings([more]), reasons=REASONS)


def test_items_with_marks_of_a_template_are_shown_as_turns_unless_the_marks_are_the_fault(tmp_path: Path) -> None:
    row = {"prompt": "<|im_start|>user\nHow much?<|im_end|>\n", "chosen": "", "rejected": "<|im_start|>assistant\nTen"}
    path = tmp_path / "marks.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({"prompt": "Plain?", "chosen": "", "rejected": "Yes"}) + "\n")
    page = render_audit(audit([path]), reasons=REASONS)
    sections = {code: section for section in page.split("<section") if (code := _code_of(section))}
    turns = (
        '<div class="turns"><p class="turn prompt"><b>prompt</b> </p><p class="turn user"><b>user</b> How much?</p>'
        '<p class="turn chosen"><b>chosen</b> </p><p class="turn rejected"><b>rejected</b> </p>'
        '<p class="turn assistant"><b>assistant</b> Ten</p></div>'
    )
    assert turns in sections["empty.chosen"]
    assert "<pre>prompt: Plain?\nchosen: \nrejected: Yes</pre>" in sections["empty.chosen"]
    assert "<pre>prompt: &lt;|im_start|&gt;user" in sections["tokens.special"]


def _code_of(section: str) -> str | None:
    code = re.search(r"<code>([a-z_.]+)</code>", section)
    return code and code[1]
