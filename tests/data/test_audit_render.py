"""The page and the terminal output: complete, escaped, self-contained."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from kedge.core.findings import Finding
from kedge.data.audit import Audit, audit, render_html, render_terminal
from kedge.data.audit.html import chart
from kedge.data.audit.result import Histogram

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)> [bold]not markup[/bold]"


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
    page = render_html(result)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.isdisjoint({"script", "img", "link", "i"})
    assert tags.links == []
    assert "&lt;script&gt;alert(" in page
    assert "http" not in page.lower()
    assert "url(" not in page


def test_page_says_what_was_found(result: Audit) -> None:
    page = render_html(result)
    assert "1 of 21 pairs (4.76 %) have the same text on both sides." in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert len(re.findall(r"<figure", page)) == 3
    assert "a &lt;b&gt; &amp; c.jsonl:21" in page


def test_terminal_shows_findings_as_plain_text(result: Audit) -> None:
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(render_terminal(result))
    text = capture.get()
    assert "fatal   1 of 21 pairs (4.76 %) have the same text on both sides." in text
    assert "a <b> & c.jsonl:21" in text
    assert "rejected" in text
    # the identical pair is a tie although white space makes one side longer: 20 of 20, low end 20 / (20 + 3.8415)
    assert re.search(r"100\.0 % \(83\.9–100\.0\)", text)


def test_nothing_found_is_said(tmp_path: Path) -> None:
    path = tmp_path / "fine.jsonl"
    path.write_text('{"prompt": "one thing"}\n{"prompt": "quite another"}\n')
    page = render_html(audit([path]))
    assert "Nothing to object to." in page


def test_chart_is_logarithmic_and_to_scale() -> None:
    drawn = chart(Histogram(side="prompt", edges=(0, 1, 9, 99), counts=(2, 0, 8)))
    # log(1 + 9) / log(1 + 99) is a half of the 320 wide axis; the tallest bar fills the 72
    assert [(bar.x, bar.height) for bar in drawn.bars] == [(0.0, 18.0), (160.0, 72.0)]
    assert drawn.bars[1].title == "9 to 98 characters: 8"
    assert [label for _, label in drawn.ticks] == ["1", "10"]


def test_folder_is_said_once(tmp_path: Path) -> None:
    files = [tmp_path / "one" / "a.jsonl", tmp_path / "two" / "b.jsonl"]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"prompt": "x"}\n')
    result = audit(files)
    assert result.folder == str(tmp_path)
    assert result.shortened(f"see {files[0]}:3") == "see one/a.jsonl:3"


def test_findings_of_others_join_in_order(result: Audit) -> None:
    more = Finding(level="fatal", code="tokenizer.eos", message="No <eos> in the targets.")
    joined = result.with_findings([more])
    assert [finding.code for finding in joined.findings[:2]] == ["pairs.identical", "tokenizer.eos"]
    assert "No &lt;eos&gt; in the targets." in render_html(joined)
