"""Numbers as a reader meets them: in messages, tables and charts alike."""

from __future__ import annotations

from kedge.report.reward.intervals import Estimate, Interval, Share


def percent(share: float) -> str:
    """
    >>> percent(0.7825), percent(-0.05)
    ('78.2 %', '−5.0 %')
    """
    return f"{number(share * 100, 1)} %"


def interval(of: Share | Estimate | Interval) -> str:
    """
    >>> interval(Interval(low=0.75, high=0.8125))
    '75.0 to 81.2 %'
    """
    return f"{number(of.low * 100, 1)} to {number(of.high * 100, 1)} %"


def told(of: Share | Estimate) -> str:
    """A share with its interval, for a sentence."""
    return f"{percent(of.value)} (95 % interval {interval(of)})"


def points(of: Estimate) -> str:
    """A difference of two shares, in percentage points.

    >>> points(Estimate(value=-0.02, low=-0.05, high=0.01))
    '−2.0 points (95 % interval −5.0 to 1.0)'
    """
    low, high = number(of.low * 100, 1), number(of.high * 100, 1)
    return f"{number(of.value * 100, 1)} points (95 % interval {low} to {high})"


def number(value: float | None, digits: int = 3) -> str:
    """
    >>> number(-0.12345), number(-0.0001), number(None)
    ('−0.123', '0.000', '–')
    """
    if value is None:
        return "–"
    text = f"{abs(value):,.{digits}f}"
    is_zero = not any(digit in text for digit in "123456789")
    return text if value >= 0 or is_zero else f"−{text}"


def short(value: float) -> str:
    """As few digits as tell numbers of a chart apart; whole numbers stay whole.

    >>> short(-120.0), short(0.125), short(12.34), short(24500.0)
    ('−120', '0.125', '12.3', '24,500')
    """
    text = f"{abs(value):,.0f}" if value == int(value) or abs(value) >= 1000 else f"{abs(value):.3g}"
    return f"−{text}" if value < 0 else text


def span(low: float, high: float) -> str:
    """
    >>> span(3.0, 3.0), span(-8.0, 12.0)
    ('3', '−8 to 12')
    """
    return short(low) if low == high else f"{short(low)} to {short(high)}"
