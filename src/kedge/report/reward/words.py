"""Shares and their intervals as a reader meets them, beside the plain numbers of every report."""

from __future__ import annotations

from kedge.report.reward.intervals import Estimate, Interval, Share
from kedge.report.words import number, short, span

__all__ = ["interval", "number", "percent", "points", "short", "span", "told"]


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
