"""Numbers in running text: signs, thousands, decimals, exponents, fractions, mixed numbers, LaTeX fractions, percent.

Values are exact fractions. Left out: decimal commas, number words, and anything that needs algebra (see `maths`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,60})\}\{([^{}]{1,60})\}")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,400})(?:\.\d{1,400})?|\.\d{1,400}"
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]])[-+−]\s?)?\$?"
    rf"(?:(?P<whole>\d{{1,100}})\s(?P<over>\d{{1,100}})/(?P<under>\d{{1,100}})(?!\d)"
    rf"|(?P<top>{_PLAIN})(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\d))?(?:\s?/\s?(?P<bottom>{_PLAIN}))?)"
    rf"\s?(?P<percent>\\?%)?"
)


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
