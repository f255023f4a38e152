"""The part of an answer that counts: \\boxed{…}, what follows ####, the last line, a fenced block, a pattern, a number.

Patterns have a time limit for each text, which the package `regex` keeps: an engine that backtracks takes exponential
time on texts that are easy to write, for people and for policies.

Numbers in running text may have signs, thousands, decimals, exponents; fractions, mixed numbers, LaTeX fractions and
percent are read too. Values are exact fractions. Left out: decimal commas, number words, and anything that needs
algebra (see `maths`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import regex

from kedge.rewards.settings import Extract, NamedPart, Pattern

_FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,60})\}\{([^{}]{1,60})\}")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]])[-+−]\s?)?\$?"
    rf"(?:(?P<whole>\d{{1,100}})\s(?P<over>\d{{1,100}})/(?P<under>\d{{1,100}})(?!\d)"
    rf"|(?P<top>{_PLAIN})(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\d))?(?:\s?/\s?(?P<bottom>{_PLAIN}))?)"
    rf"\s?(?P<percent>\\?%)?"
)


@dataclass(frozen=True, slots=True)
class Extracted:
    """`text` is None where the answer has no such part; `failure` says why that could not be found out."""

    text: str | None
    failure: str = ""


def extract(text: str, part: NamedPart) -> str | None:
    """The part, without white space around it; None where the answer has no such part.

    >>> extract("So it is \\\\boxed{\\\\frac{1}{2}}.", "boxed")
    '\\\\frac{1}{2}'
    >>> extract("6 x 7 = 42\\n#### 42\\n", "hashes")
    '42'
    >>> extract("No mark", "hashes") is None
    True
    """
    match part:
        case "whole":
            return text.strip()
        case "boxed":
            return _boxed(text)
        case "hashes":
            _, mark, rest = text.rpartition("####")
            return rest.strip().split("\n")[0].strip() if mark else None
        case "last_line":
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else None
        case "fenced":
            blocks = _FENCE.findall(text)
            return blocks[-1].strip("\n") if blocks else None


def extract_all(texts: Sequence[str], part: Extract) -> list[Extracted]:
    """The part of each text."""
    if isinstance(part, Pattern):
        return match_all(part.pattern, texts, group=part.group, timeout_s=1.0)
    return [Extracted(extract(text, part)) for text in texts]


def match_all(
    pattern: str,
    texts: Sequence[str],
    *,
    group: int = 0,
    must: Literal["last", "contain", "be"] = "last",
    timeout_s: float,
) -> list[Extracted]:
    """A group of the last match, of the first one (`contain`), or of the match of a whole text (`be`).

    >>> match_all(r"x=(\\d)", ["x=1, x=2", "none"], group=1, timeout_s=1.0)
    [Extracted(text='2', failure=''), Extracted(text=None, failure='')]
    """
    compiled = regex.compile(pattern)
    return [_matched(compiled, text, group=group, must=must, timeout_s=timeout_s) for text in texts]


def _matched(
    pattern: regex.Pattern[str], text: str, *, group: int, must: Literal["last", "contain", "be"], timeout_s: float
) -> Extracted:
    try:
        match must:
            case "be":
                match = pattern.fullmatch(text, timeout=timeout_s)
            case "contain":
                match = pattern.search(text, timeout=timeout_s)
            case "last":
                match = next(iter(deque(pattern.finditer(text, timeout=timeout_s), maxlen=1)), None)
    except TimeoutError:
        return Extracted(None, f"the pattern took longer than {timeout_s:g} s")
    return Extracted(match and match.group(group))


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for index in range(begin, len(text)):
        if text[index] == "}" and depth == 0:
            return text[begin:index].strip()
        depth += {"{": 1, "}": -1}.get(text[index], 0)
    return None


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    is_percent: bool = False


def last_number(text: str) -> Number | None:
    """The last number in a text, or None.

    >>> last_number("From $1,250 he keeps 3/4, so 937.50")
    Number(value=Fraction(1875, 2), is_percent=False)
    >>> last_number("-\\\\frac{1}{3}").value
    Fraction(-1, 3)
    >>> last_number("7-3 is 12%")
    Number(value=Fraction(12, 1), is_percent=True)
    """
    plain = _LATEX_FRACTION.sub(r"\1/\2", text)
    last: Number | None = None
    for match in _NUMBER.finditer(plain):
        last = _value(match) or last
    return last


def are_equal(answer: Number, solution: Number, *, relative: float, absolute: float) -> bool:
    """12 % equals 0.12, and also 12, because the sign is often left out; 12 alone does not equal 0.12.

    >>> are_equal(Number(Fraction(1, 2)), Number(Fraction(50), is_percent=True), relative=0, absolute=0)
    True
    """
    if answer.is_percent == solution.is_percent:
        pairs = [(answer.value, solution.value)]
    else:
        as_share = tuple(number.value / (100 if number.is_percent else 1) for number in (answer, solution))
        pairs = [(answer.value, solution.value), as_share]
    tolerance = max(Fraction(absolute), Fraction(relative) * abs(solution.value))
    return any(abs(a - b) <= (tolerance if index == 0 else tolerance / 100) for index, (a, b) in enumerate(pairs))


def _value(match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    try:
        if part["whole"]:
            value = int(part["whole"]) + Fraction(int(part["over"]), int(part["under"]))
        else:
            value = _exact(part["top"]) * Fraction(10) ** int(part["power"] or 0) / _exact(part["bottom"] or "1")
    except ZeroDivisionError:
        return None
    is_negative = (part["sign"] or "").strip() in ("-", "−")
    return Number(-value if is_negative else value, is_percent=bool(part["percent"]))


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
