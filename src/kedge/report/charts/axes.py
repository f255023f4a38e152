"""Axes: round numbers to put beside them, and from numbers to places, straight or by powers of ten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from statistics import median

_SPREAD_FOR_LOG = 100.0
"""A largest value so many times the median would press all the others into one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From a number to its share of the way between both ends."""

    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        if self.is_log:
            return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return (value - self.low) / (self.high - self.low)

    def marks(self) -> list[float]:
        if not self.is_log:
            return ticks(self.low, self.high)
        powers = range(ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9) + 1)
        every = max(1, len(powers) // 5)
        return [10.0**power for power in powers[::every]]


def whole_axis(values: Iterable[float]) -> Axis:
    """From the least to the greatest, for steps."""
    finite = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    return Axis(low=low, high=high) if high > low else Axis(low=low - 0.5, high=high + 0.5)


def value_axis(values: Iterable[float]) -> Axis:
    """Room above and below; from zero where the values are not far from it; by powers of ten where one towers.

    >>> value_axis([0.2, 1.0]), value_axis([5.0])
    (Axis(low=0.0, high=1.08, is_log=False), Axis(low=4.5, high=5.5, is_log=False))
    >>> value_axis([1.0, 2.0, 3.0, 5000.0])
    Axis(low=1.0, high=10000.0, is_log=True)
    """
    finite = [value for value in values if isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if low > 0 and high > _SPREAD_FOR_LOG * median(finite):
        return Axis(low=10.0 ** floor(log10(low)), high=10.0 ** ceil(log10(high)), is_log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.1 * abs(low) or 1.0
        return Axis(low=low - room, high=high + room)
    room = 0.08 * (high - low)
    if 0 <= low <= 0.5 * high:
        return Axis(low=0.0, high=high + 0.08 * high)
    return Axis(low=low - room, high=high + room)


def ticks(low: float, high: float) -> list[float]:
    """Three to seven round numbers between two.

    >>> ticks(-1.3, 2.2), ticks(0.0, 0.9)
    ([-1.0, 0.0, 1.0, 2.0], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    return [round(at * step, 12) for at in range(ceil(low / step), floor(high / step) + 1)]
