"""One-sided confidence bounds of a mean, of a ratio of means, and of a win rate at equal length, for any level.

Both bounds hold at the level by themselves: with alpha = 0.05 they are the ends of a 90 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from kedge.core.stats import Z95, clustered_variance, student_cdf, student_quantile, wilson
from kedge.evaluate.win_rates import Estimate

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    value: float
    low: float
    high: float
    spread: float
    """The variance that one item has; infinite where it cannot be told."""
    items: int


def mean_bounds(scores: Sequence[float], *, alpha: float, clusters: Sequence[Hashable] | None = None) -> Bounds:
    """Of a mean. Numbers from 0 to 1 have Wilson's bounds, with as many of them as would vary alike if all were 0 or 1;
    others have Student's.

    >>> bounds = mean_bounds([1] * 2 + [0] * 198, alpha=0.05)
    >>> round(bounds.low, 4), round(bounds.high, 4)
    (0.0033, 0.0298)
    """
    value_N = np.asarray(scores, dtype=np.float64)
    mean, count = float(value_N.mean()), len(value_N)
    is_share = value_N.min() >= 0 and value_N.max() <= 1
    if clusters is None and np.isin(value_N, (0, 1)).all():
        low, high = wilson(mean * count, count, z=_NORMAL.inv_cdf(1 - alpha))
        return Bounds(value=mean, low=low, high=high, spread=mean * (1 - mean), items=count)
    variance, groups = clustered_variance(value_N, clusters)
    if groups < 2:
        return Bounds(value=mean, low=-math.inf, high=math.inf, spread=math.inf, items=count)
    quantile = student_quantile(1 - alpha, groups - 1)
    if is_share:
        effective = mean * (1 - mean) / variance if variance else groups
        low, high = wilson(mean * effective, effective, z=quantile)
    else:
        low, high = mean - quantile * math.sqrt(variance), mean + quantile * math.sqrt(variance)
    return Bounds(value=mean, low=low, high=high, spread=variance * count, items=count)


def share_above(shares: Sequence[float], threshold: float) -> float:
    """The one-sided p-value of a mean of numbers from 0 to 1 being no more than `threshold`, by the score test that
    belongs to the bounds of `mean_bounds`.

    >>> round(share_above([1] * 60 + [0] * 40, 0.5), 4)
    0.0228
    """
    value_N = np.asarray(shares, dtype=np.float64)
    mean, count = float(value_N.mean()), len(value_N)
    unit = math.sqrt(threshold * (1 - threshold))
    if np.isin(value_N, (0, 1)).all():
        return 1 - _NORMAL.cdf((mean - threshold) / unit * math.sqrt(count))
    if count < 2:
        return 0.5
    variance, _ = clustered_variance(value_N, None)
    effective = mean * (1 - mean) / variance if variance else count
    return 1 - student_cdf((mean - threshold) / unit * math.sqrt(effective), count - 1)


def ratio_bounds(numerators: Sequence[float], denominators: Sequence[float], *, alpha: float) -> Bounds:
    """Of the ratio of two means over the same items, on the scale of the logarithm (delta method).

    >>> bounds = ratio_bounds([4.0, 6.0, 5.0, 5.0], [2.0, 3.0, 2.0, 3.0], alpha=0.05)
    >>> bounds.value, round(bounds.low, 3), round(bounds.high, 3)
    (2.0, 1.65, 2.424)
    """
    top_N, bottom_N = (np.asarray(values, dtype=np.float64) for values in (numerators, denominators))
    count, ratio = len(top_N), float(top_N.mean() / bottom_N.mean())
    if count < 2:
        return Bounds(value=ratio, low=0.0, high=math.inf, spread=math.inf, items=count)
    variance, _ = clustered_variance(top_N / top_N.mean() - bottom_N / bottom_N.mean(), None)
    reach = student_quantile(1 - alpha, count - 1) * math.sqrt(variance)
    low, high = ratio * math.exp(-reach), ratio * math.exp(reach)
    return Bounds(value=ratio, low=low, high=high, spread=variance * count * ratio**2, items=count)


def rate_bounds(rate: Estimate, *, over: float, alpha: float) -> tuple[Bounds, float] | None:
    """Bounds of a rate whose 95 % interval is symmetric on the scale of the logit, and the one-sided p-value of its
    being no more than `over`; None where the interval reaches 0 or 1."""
    if not 0 < rate.low <= rate.mean <= rate.high < 1:
        return None
    middle, error = _logit(rate.mean), (_logit(rate.high) - _logit(rate.low)) / (2 * Z95)
    reach = _NORMAL.inv_cdf(1 - alpha) * error
    low, high = (1 / (1 + math.exp(-end)) for end in (middle - reach, middle + reach))
    spread = (error * rate.mean * (1 - rate.mean)) ** 2 * rate.prompts
    p_value = 1 - _NORMAL.cdf((middle - _logit(over)) / error) if error else float(rate.mean <= over)
    return Bounds(value=rate.mean, low=low, high=high, spread=spread, items=rate.prompts), p_value


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
