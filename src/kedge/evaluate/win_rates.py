"""Win rates of one model over another on the same prompts, with 95 % intervals.

A tie is half a win for each. A prompt is one observation, however many answers it has, so answers to one prompt are
never taken for independent ones and two models stay paired. Shape letters: P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from kedge.core.stats import BOOTSTRAP_DRAWS, Floats, bootstrap_mean, student_quantile, wilson


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over so many prompts, with its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of the comparisons on one prompt; they sum to 1."""

    win: float
    tie: float
    loss: float

    @property
    def rate(self) -> float:
        return self.win + self.tie / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WinRate:
    """Means over prompts. `rate` is wins + ½ ties; `low` and `high` are its 95 % interval."""

    rate: float
    low: float
    high: float
    wins: float
    ties: float
    losses: float
    prompts: int


def estimate(values: Sequence[float], *, seed: int, draws: int = BOOTSTRAP_DRAWS) -> Estimate | None:
    """The mean of one number a prompt; None without prompts. The same seed draws the same prompts for any values.

    >>> estimate([4.0, 4.0, 4.0], seed=0)
    Estimate(mean=4.0, low=4.0, high=4.0, prompts=3)
    """
    if not values:
        return None
    values_P = np.asarray(values, dtype=np.float64)
    low, high = bootstrap_mean(values_P, seed=seed, draws=draws)
    return Estimate(mean=float(values_P.mean()), low=low, high=high, prompts=len(values))


def outcome_of(model_scores: Sequence[float], baseline_scores: Sequence[float], *, tie: float) -> Outcome:
    """Every answer of one model against every answer of the other. Scores that differ by at most `tie` are equal.

    >>> outcome_of([3.0, 1.0], [1.0], tie=0.0)
    Outcome(win=0.5, tie=0.5, loss=0.0)
    """
    gaps = [score - other for score, other in product(model_scores, baseline_scores)]
    wins, losses = sum(gap > tie for gap in gaps), sum(gap < -tie for gap in gaps)
    return Outcome(wins / len(gaps), (len(gaps) - wins - losses) / len(gaps), losses / len(gaps))


def win_rate(outcomes: Sequence[Outcome]) -> WinRate | None:
    """None without prompts."""
    if not outcomes:
        return None
    rate_P = np.array([outcome.rate for outcome in outcomes])
    count = len(outcomes)
    low, high = share_interval(rate_P)
    return WinRate(
        rate=float(rate_P.mean()),
        low=low,
        high=high,
        wins=sum(outcome.win for outcome in outcomes) / count,
        ties=sum(outcome.tie for outcome in outcomes) / count,
        losses=sum(outcome.loss for outcome in outcomes) / count,
        prompts=count,
    )


def share_interval(rate_P: Floats) -> tuple[float, float]:
    """Wilson's interval of the mean of numbers from 0 to 1, with as many wins and losses as would vary like them.

    Numbers between 0 and 1 (ties, several answers a prompt) vary less than wins and losses of the same mean: they count
    for p(1 − p)/s² of them each, and as s is estimated, the quantile is Student's. A bootstrap of 20 prompts covers
    88 % instead of 95.

    >>> low, high = share_interval(np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.0] * 10))
    >>> round(low, 3), round(high, 3)
    (0.565, 0.755)
    """
    mean, count = float(rate_P.mean()), len(rate_P)
    if count == 1 or not np.ptp(rate_P) or np.isin(rate_P, (0, 1)).all():
        return wilson(mean * count, count)
    effective = count * mean * (1 - mean) / float(rate_P.var(ddof=1))
    return wilson(mean * effective, effective, z=student_quantile(0.975, count - 1))
