"""Two models on the same items: which is better, and whether one is worse by more than a margin.

Items are paired, so that what makes an item hard for both does not count as chance. All of it is exact or closed, up to
the root of a monotone function. Letters: b and c are items that only the first, or only the second of two models got
right, n all items.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from kedge.core.stats import Floats, clustered_variance, falling_root, student_cdf, student_quantile

Verdict = Literal["pass", "fail", "undecided"]
POWER = 0.8
"""The share of equal models that should pass, for which `needed` is computed."""
_NORMAL = NormalDist()


def mcnemar(b: int, c: int) -> float:
    """The exact two-sided p-value of McNemar's test: were b and c drawn as heads and tails of a fair coin?

    >>> mcnemar(1, 5), mcnemar(0, 0)
    (0.21875, 1.0)
    """
    _refuse_negative(b=b, c=c)
    tosses, fewer = b + c, min(b, c)
    below = sum(math.comb(tosses, heads) for heads in range(fewer + 1))
    return min(1.0, 2 * below / 2**tosses)


def tango(b: int, c: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """The score interval of (b − c)/n (Tango 1998), which holds its level where few items differ.

    >>> low, high = tango(9, 2, 50)
    >>> round(low, 4), round(high, 4)
    (0.0117, 0.2779)
    """
    _refuse_negative(b=b, c=c)
    if n < 1 or b + c > n:
        raise ValueError(f"n must be the number of items, b + c = {b + c} at least: found {n}")
    z = _NORMAL.inv_cdf((1 + level) / 2)
    observed = (b - c) / n
    return (
        falling_root(lambda difference: _tango_score(b, c, n, difference) - z, -1.0, observed),
        falling_root(lambda difference: _tango_score(b, c, n, difference) + z, observed, 1.0),
    )


def _tango_score(b: int, c: int, n: int, difference: float) -> float:
    """How many standard deviations b − c is above what a difference would give; it falls as the difference rises."""
    # The likeliest probability of c, given the difference, is the root of a quadratic.
    first = 2 * n
    second = -b - c + (2 * n - b + c) * difference
    third = -c * difference * (1 - difference)
    q = (math.sqrt(max(0.0, second * second - 4 * first * third)) - second) / (2 * first)
    variance = n * (2 * q + difference * (1 - difference))
    gap = b - c - n * difference
    if variance <= 0:
        return 0.0 if gap == 0 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for there being several (Holm 1979), in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if not 0 <= p_values[index] <= 1:
            raise ValueError(f"p-values are from 0 to 1: found {p_values[index]}")
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def rogan_gladen(observed: float, sensitivity: float, specificity: float) -> float:
    """The true share of what a detector finds in a share of the items, corrected for its errors; from 0 to 1.

    >>> round(rogan_gladen(0.3, 0.9, 0.8), 6)
    0.142857
    """
    informedness = sensitivity + specificity - 1
    if informedness <= 0:
        raise ValueError(
            f"a detector with sensitivity {sensitivity:g} and specificity {specificity:g} is no better than chance: "
            "nothing can be corrected with it"
        )
    return min(1.0, max(0.0, (observed + specificity - 1) / informedness))


@dataclass(frozen=True, slots=True, kw_only=True)
class NonInferiority:
    """`difference` is the candidate's mean minus the baseline's; `low` and `high` are its one-sided bounds."""

    verdict: Verdict
    difference: float
    low: float
    high: float
    needed: int
    """Items with which equal models would pass in 80 % of trials, if items differ as often as these."""
    spread: float
    """The variance of one item's difference; infinite for a single cluster."""


def non_inferiority(
    candidate: Sequence[float],
    baseline: Sequence[float],
    *,
    margin: float,
    alpha: float = 0.05,
    clusters: Sequence[Hashable] | None = None,
) -> NonInferiority:
    """Whether the candidate is at most `margin` worse: `pass` if that is shown, `fail` if the opposite is.

    Scores are paired by item. `clusters` names what items belong together by (a prompt, a passage); items of 0 and 1
    without clusters are compared by Tango's interval, everything else by Student's with a variance of clusters.
    """
    if margin <= 0 or not 0 < alpha < 0.5:
        raise ValueError(f"margin must be above 0 and alpha between 0 and 0.5: found {margin} and {alpha}")
    gap_N, is_binary = _gaps(candidate, baseline, clusters)
    difference = float(gap_N.mean())
    if is_binary and clusters is None:
        low, high = tango(int((gap_N > 0).sum()), int((gap_N < 0).sum()), len(gap_N), level=1 - 2 * alpha)
        spread = float((gap_N**2).mean())
    else:
        variance, groups = clustered_variance(gap_N, clusters)
        reach = student_quantile(1 - alpha, groups - 1) * math.sqrt(variance) if groups > 1 else math.inf
        low, high = difference - reach, difference + reach
        spread = variance * len(gap_N)
    verdict: Verdict = "pass" if low > -margin else "fail" if high < -margin else "undecided"
    return NonInferiority(
        verdict=verdict,
        difference=difference,
        low=low,
        high=high,
        needed=max(1, items_needed(spread, margin, alpha=alpha)),
        spread=spread,
    )


def superiority(
    candidate: Sequence[float],
    baseline: Sequence[float],
    *,
    over: float = 0.0,
    clusters: Sequence[Hashable] | None = None,
) -> float:
    """The one-sided p-value of the candidate being better by no more than `over`; small where more is shown.

    By the same statistics as `non_inferiority`: Tango's score, or Student's t with a variance of clusters.

    >>> round(superiority([1] * 14 + [0] * 86, [0] * 9 + [1] * 5 + [0] * 86), 4)
    0.0013
    """
    gap_N, is_binary = _gaps(candidate, baseline, clusters)
    if is_binary and clusters is None:
        score = _tango_score(int((gap_N > 0).sum()), int((gap_N < 0).sum()), len(gap_N), over)
        return 1 - _NORMAL.cdf(score)
    variance, groups = clustered_variance(gap_N, clusters)
    gain = float(gap_N.mean()) - over
    if groups < 2 or variance == 0:
        return 0.5 if groups < 2 or gain == 0 else float(gain < 0)
    return 1 - student_cdf(gain / math.sqrt(variance), groups - 1)


def items_needed(spread: float, distance: float, *, alpha: float) -> int:
    """Items with which a difference of `distance` is told in 80 % of trials, where one item has the variance `spread`.

    >>> items_needed(0.1, 0.01, alpha=0.05)
    6183
    """
    return math.ceil(_deviations(alpha) ** 2 * spread / distance**2)


def smallest_margin(spread: float, items: int, *, alpha: float) -> float:
    """The margin by which equal models pass in 80 % of trials, where one item has the variance `spread`.

    >>> round(smallest_margin(0.1, 14_042, alpha=0.05), 4)
    0.0066
    """
    return _deviations(alpha) * math.sqrt(spread / items)


def _deviations(alpha: float) -> float:
    return _NORMAL.inv_cdf(1 - alpha) + _NORMAL.inv_cdf(POWER)


def _gaps(
    candidate: Sequence[float], baseline: Sequence[float], clusters: Sequence[Hashable] | None
) -> tuple[Floats, bool]:
    """The difference of each item, and whether all scores are 0 or 1."""
    if len(candidate) != len(baseline) or not len(candidate):
        raise ValueError(f"one score an item of each model: found {len(candidate)} and {len(baseline)}")
    if clusters is not None and len(clusters) != len(candidate):
        raise ValueError(f"one cluster an item: found {len(clusters)} for {len(candidate)} items")
    first_N, second_N = (np.asarray(scores, dtype=np.float64) for scores in (candidate, baseline))
    if not (np.isfinite(first_N).all() and np.isfinite(second_N).all()):
        raise ValueError("a score is not finite")
    return first_N - second_N, bool(np.isin(first_N, (0, 1)).all() and np.isin(second_N, (0, 1)).all())


def _refuse_negative(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name} counts items: found {count}")
