"""Numbers and texts as a reader meets them: in sentences, tables and charts of every report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NONE = "–"
"""Stands where there is no number."""


class Interval(Protocol):
    """The ends of a 95 % interval."""

    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Measured(Interval, Protocol):
    """A number with its 95 % interval."""

    @property
    def value(self) -> float: ...


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(-0.12345), number(-0.0001), number(None)
    ('−0.123', '0.000', '–')
    """
    if value is None:
        return NONE
    text = f"{abs(value):,.{digits}f}"
    is_zero = not any(digit in text for digit in "123456789")
    return text if value >= 0 or is_zero else f"−{text}"


def short(value: float) -> str:
    """As few digits as distinguish the numbers of a chart; whole numbers stay whole.

    >>> short(-120.0), short(0.125), short(12.34), short(24500.0)
    ('−120', '0.125', '12.3', '24,500')
    """
    if value != value or abs(value) == float("inf"):
        return "not finite"
    text = f"{abs(value):,.0f}" if value == int(value) or abs(value) >= 1000 else f"{abs(value):.3g}"
    return f"−{text}" if value < 0 else text


def span(low: float, high: float) -> str:
    """
    >>> span(3.0, 3.0), span(-8.0, 12.0)
    ('3', '−8 to 12')
    """
    return short(low) if low == high else f"{short(low)} to {short(high)}"


def percent(share: float | None) -> str:
    """
    >>> percent(0.7825), percent(-0.05), percent(None)
    ('78.2 %', '−5.0 %', '–')
    """
    return NONE if share is None else f"{number(share * 100, 1)} %"


def interval(of: Interval) -> str:
    """The interval of a share.

    >>> from types import SimpleNamespace
    >>> interval(SimpleNamespace(low=0.75, high=0.8125))
    '75.0 to 81.2 %'
    """
    return f"{number(of.low * 100, 1)} to {number(of.high * 100, 1)} %"


def with_interval(of: Measured) -> str:
    """A share with its interval, for a sentence.

    >>> from types import SimpleNamespace
    >>> with_interval(SimpleNamespace(value=0.78, low=0.75, high=0.8125))
    '78.0 % (95 % interval 75.0 to 81.2 %)'
    """
    return f"{percent(of.value)} (95 % interval {interval(of)})"


def points(of: Measured) -> str:
    """A difference of two shares, in percentage points.

    >>> from types import SimpleNamespace
    >>> points(SimpleNamespace(value=-0.02, low=-0.05, high=0.01))
    '−2.0 points (95 % interval −5.0 to 1.0)'
    """
    low, high = number(of.low * 100, 1), number(of.high * 100, 1)
    return f"{number(of.value * 100, 1)} points (95 % interval {low} to {high})"


def duration(seconds: float) -> str:
    """
    >>> duration(0.84), duration(75), duration(7_260), duration(190_000)
    ('0.8 s', '1 min 15 s', '2 h 1 min', '2 d 4 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit, smaller_size, smaller in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // smaller_size)} {smaller}"
    return f"{seconds:.0f} s"


def amount(count: float) -> str:
    """
    >>> amount(812), amount(45_300), amount(12_400_000)
    ('812', '45.3 k', '12.4 M')
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def listed(parts: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"]), listed(["a"])
    ('a, b and c', 'a')
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def cut(text: str, most: int) -> str:
    """The beginning and the end of a text of more than `most` characters, with how many are left out between them.

    >>> cut("a" * 10 + "b" * 10, 4)
    'aa\\n… 16 characters left out …\\nbb'
    """
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}\n… {left_out:,} characters left out …\n{text[-(most // 2) :]}"
