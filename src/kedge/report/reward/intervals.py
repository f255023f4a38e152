"""Shares and mean differences with 95 % intervals, for pairs that may share their prompts.

Pairs of one prompt tend to be right or wrong together, so Wilson's interval, which takes every pair for new
evidence, is too narrow for them; the bootstrap over prompts is not, but has no width at 0 and 100 % and is unsure with
few prompts. Hence: Wilson where every prompt occurs once, else at each end the wider of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from kedge.core import stats
from kedge.core.seeds import seed_for
from kedge.report.reward.records import Floats, Ints

RESAMPLES = 2000
"""Another seed would then move the ends by about 2 % of the interval's width."""

_BLOCK_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share of `n` pairs with its 95 % interval; the `ties` among them count half."""

    value: float
    low: float
    high: float
    n: int
    ties: int


def wilson(right: float, n: int) -> Interval:
    low, high = stats.wilson(right, n)
    return Interval(low=low, high=high)


def bootstrap(x_B: Floats, prompt_B: Ints) -> Interval:
    """Percentile interval of the mean when whole prompts, with all their pairs, are drawn again; the seed is fixed."""
    _, group_B = np.unique(prompt_B, return_inverse=True)
    size_G = np.bincount(group_B).astype(np.float64)
    total_G = np.bincount(group_B, weights=x_B)
    groups = len(size_G)
    generator = np.random.default_rng(seed_for(0, "report.reward.bootstrap"))
    means = np.empty(RESAMPLES)
    rows = max(1, _BLOCK_NUMBERS // groups)
    for start in range(0, RESAMPLES, rows):
        drawn = generator.integers(0, groups, size=(min(rows, RESAMPLES - start), groups))
        means[start : start + rows] = total_G[drawn].sum(axis=1) / size_G[drawn].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(low=float(low), high=float(high))


def share(correct_B: Floats, prompt_B: Ints) -> Share:
    """The share of right pairs; which interval is given is said at the top of this file."""
    value, n = float(correct_B.mean()), len(correct_B)
    interval = wilson(float(correct_B.sum()), n)
    if len(np.unique(prompt_B)) < n:
        interval = wider(interval, bootstrap(correct_B, prompt_B))
    return Share(value=value, low=interval.low, high=interval.high, n=n, ties=int((correct_B == 0.5).sum()))


def share_or_none(correct_B: Floats, prompt_B: Ints, rows_B: Ints) -> Share | None:
    """The share among some rows; None where there is none."""
    return share(correct_B[rows_B], prompt_B[rows_B]) if len(rows_B) else None


def mean_of(x_B: Floats, prompt_B: Ints) -> Estimate:
    """A mean of any numbers, with the bootstrap over prompts."""
    interval = bootstrap(x_B, prompt_B)
    return Estimate(value=float(x_B.mean()), low=interval.low, high=interval.high)


def wider(one: Interval, other: Interval) -> Interval:
    return Interval(low=min(one.low, other.low), high=max(one.high, other.high))


def middle(one: Share, other: Share) -> Estimate:
    """The plain mean of two shares of different pairs.

    Its interval is MOVER's (Zou and Donner 2008): the distances to the ends add up as squares.

    >>> half = Share(value=0.5, low=0.2, high=0.8, n=10, ties=0)
    >>> most = Share(value=0.9, low=0.5, high=1.0, n=10, ties=0)
    >>> estimate = middle(half, most)
    >>> estimate.value, round(estimate.low, 4), round(estimate.high, 4)
    (0.7, 0.45, 0.8581)
    """
    value = (one.value + other.value) / 2
    below = sqrt((one.value - one.low) ** 2 + (other.value - other.low) ** 2) / 2
    above = sqrt((one.high - one.value) ** 2 + (other.high - other.value) ** 2) / 2
    return Estimate(value=value, low=value - below, high=value + above)
