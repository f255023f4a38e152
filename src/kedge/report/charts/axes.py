"""Axes of a chart: their range, scale and tick labels, and the plane that turns numbers into places. No markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log1p, log10
from statistics import median
from typing import Literal

from kedge.report.words import short

Scale = Literal["linear", "log", "log1p"]
"""`log1p` is the logarithm of 1 + value, so that zero has a place too."""

_SPREAD_FOR_LOG = 100.0
"""A largest value so many times the median would press all the others into one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From a number to its share of the way between both ends."""

    low: float
    high: float
    scale: Scale = "linear"
    is_whole: bool = False
    """Ticks between whole numbers are left out."""
    labels: Sequence[tuple[float, str]] | None = None
    """Ticks and their texts; round numbers where absent."""

    def share(self, value: float) -> float:
        match self.scale:
            case "linear":
                return (value - self.low) / (self.high - self.low)
            case "log":
                return (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
            case "log1p":
                return (log1p(value) - log1p(self.low)) / (log1p(self.high) - log1p(self.low))

    def ticks(self) -> list[tuple[float, str]]:
        """Places with their texts."""
        if self.labels is not None:
            return list(self.labels)
        values = powers_of_ten(self.low, self.high) if self.scale == "log" else round_numbers(self.low, self.high)
        return [(value, short(value)) for value in values if not self.is_whole or value.is_integer()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The size of a drawing, and the edges of its plane in it. y grows downwards, as in SVG."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """From numbers to places in a frame."""

    frame: Frame
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return round(self.frame.left + (self.frame.right - self.frame.left) * self.across.share(value), 1)

    def y(self, value: float) -> float:
        return round(self.frame.bottom - (self.frame.bottom - self.frame.top) * self.up.share(value), 1)

    def has(self, value: float) -> bool:
        """Whether a number has a height."""
        return isfinite(value) and (value > 0 or self.up.scale != "log")


def tight_axis(values: Iterable[float]) -> Axis:
    """From the least to the greatest, for steps and distances.

    >>> tight_axis([1.0, 50.0]), tight_axis([0.5])
    (Axis(low=1.0, high=50.0, scale='linear', is_whole=True, labels=None), Axis(low=0.0, high=1.0, scale='linear', \
is_whole=False, labels=None))
    """
    finite = [value for value in values if isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    is_whole = all(float(value).is_integer() for value in finite)
    if high > low:
        return Axis(low=low, high=high, is_whole=is_whole)
    return Axis(low=low - 0.5, high=high + 0.5, is_whole=is_whole)


def value_axis(values: Iterable[float]) -> Axis:
    """Room above and below; from zero where the values are not far from it; by powers of ten where one towers.

    >>> [(axis.low, axis.high, axis.scale) for axis in (value_axis([0.2, 1.0]), value_axis([5.0]))]
    [(0.0, 1.08, 'linear'), (4.5, 5.5, 'linear')]
    >>> axis = value_axis([1.0, 2.0, 3.0, 5000.0])
    >>> axis.low, axis.high, axis.scale
    (1.0, 10000.0, 'log')
    """
    finite = [value for value in values if isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if low > 0 and high > _SPREAD_FOR_LOG * median(finite):
        return Axis(low=10.0 ** floor(log10(low)), high=10.0 ** ceil(log10(high)), scale="log")
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.1 * abs(low) or 1.0
        return Axis(low=low - room, high=high + room)
    room = 0.08 * (high - low)
    if 0 <= low <= 0.5 * high:
        return Axis(low=0.0, high=high + 0.08 * high)
    return Axis(low=low - room, high=high + room)


def round_numbers(low: float, high: float) -> list[float]:
    """Three to seven round numbers between two.

    >>> round_numbers(-1.3, 2.2), round_numbers(0.0, 0.9)
    ([-1.0, 0.0, 1.0, 2.0], [0.0, 0.2, 0.4, 0.6, 0.8])
    """
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    return [round(at * step, 12) for at in range(ceil(low / step), floor(high / step) + 1)]


def powers_of_ten(low: float, high: float) -> list[float]:
    """At most nine powers of ten between two.

    >>> powers_of_ten(0.1, 1000.0)
    [0.1, 1.0, 10.0, 100.0, 1000.0]
    """
    powers = range(ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9) + 1)
    every = max(1, len(powers) // 5)
    return [10.0**power for power in powers[::every]]
