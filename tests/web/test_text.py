"""Texts of models are data, whatever is in them."""

from __future__ import annotations

import pytest
from hostile_texts import CASES, attempt

from kedge.web.text import markdown


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_text_does_nothing(number: int) -> None:
    assert attempt(CASES[number]) is None


def test_there_are_sixty_and_more() -> None:
    assert len(set(CASES)) >= 60


def test_markdown_is_still_markdown() -> None:
    html = str(markdown("# Title\n\n**bold** and `code`\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |"))
    for tag in ("<h4>Title</h4>", "<strong>bold</strong>", "<code>code</code>", "<li>one</li>", "<td>2</td>"):
        assert tag in html
    assert str(markdown("[shop](https://example.org)")) == "<p>shop (https://example.org)</p>\n"


def test_the_check_itself_sees_what_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hostile_texts.markdown", lambda text: f"<p>{text}</p>")
    caught = sum(attempt(case) is not None for case in CASES)
    assert caught > 40
