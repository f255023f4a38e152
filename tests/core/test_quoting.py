"""Text of others is shown, never obeyed."""

from __future__ import annotations

import json
import sys
import unicodedata

import pytest

from kedge.core.errors import ConfigError
from kedge.core.findings import Finding
from kedge.core.quoting import escaped, escaped_json, one_line, quoted

TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u200e\u200f\u061c"
EVIL = "a\x1b[31m\u202eb\x07"


def steers(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(letter) in TURNING


def test_no_character_that_steers_a_terminal_or_a_line_is_left() -> None:
    letters = [letter for letter in map(chr, range(sys.maxunicode + 1)) if steers(letter) and letter not in "\n\t"]
    assert len(letters) > 2000
    assert not set(letters + list(MARKS)) & set(escaped("".join(letters) + MARKS))


@pytest.mark.parametrize("text", ["naïve – 你好", "👩‍👩‍👧 ❤️", "می‌خواهم", "שלום", "two\nlines\tof it", "[bold]:smile:"])
def test_what_people_write_stays(text: str) -> None:
    assert escaped(text) == text


def test_json_stays_json_of_the_same_value() -> None:
    value = {"name": EVIL + "\U000e0041\ud800"}
    shown = escaped_json(json.dumps(value, ensure_ascii=False))
    assert escaped(shown) == shown
    assert json.loads(shown) == value


def test_a_name_stays_on_its_line_and_short() -> None:
    assert one_line("a\nline 3: fine") == "a\\nline 3: fine"
    assert len(one_line("x" * 10**6)) < 300
    assert len(quoted({"a": ["x"] * 10**5})) < 300
    assert quoted([10**5000]) == "a list that cannot be shown"


def test_errors_and_findings_escape_what_they_quote() -> None:
    assert str(ConfigError(f"{EVIL}: no such thing")) == "a\\x1b[31m\\u202eb\\x07: no such thing"
    finding = Finding(level="info", code="x", message=EVIL, where=EVIL, fix=EVIL)
    assert {finding.message, finding.where, finding.fix} == {"a\\x1b[31m\\u202eb\\x07"}
