"""Win rates of one model over another on the same prompts, with 95 % intervals: plain, and at equal length.

A tie is half a win for each. A prompt is one observation, however many answers it has: intervals are bootstraps over
prompts, so answers to one prompt are never taken for independent ones and two models stay paired.

The length-controlled rate (Dubois et al. 2024, "Length-Controlled AlpacaEval", eq. 2), for one pair of models, fits

    P(model beats baseline) = σ(θ + φ · tanh(Δ / s))        Δ: how many tokens longer, s: the standard deviation of Δ

by maximum likelihood; the rate is σ(θ), at Δ = 0. Left out: the difficulty of each prompt, which the paper learns from
many models at once. Shape letters: N comparisons, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from kedge.core.stats import BOOTSTRAP_DRAWS, bootstrap_mean, bootstrap_rows, logistic_fit, percentile_interval, wilson

LENGTH_FITS = 300
"""Bootstrap samples of the length-controlled rate: each of them is a regression."""
PRIOR_PRECISION = 1e-2
"""Of the normal prior of θ and φ (std 10): it decides only what no data could, such as θ where all answers win."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComparison:
    """An answer of the model against one of the baseline, to the same prompt."""

    prompt: int
    outcome: float
    """1 won, ½ tied, 0 lost."""
    longer: float
    """How many tokens longer the model's answer is."""
    weight: float
    """Its share of its prompt: those of one prompt sum to 1."""


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


def win_rate(outcomes: Sequence[Outcome], *, seed: int, draws: int = BOOTSTRAP_DRAWS) -> WinRate | None:
    """None without prompts. Where all prompts agree a bootstrap has no width: then Wilson's interval is given."""
    rates = [outcome.rate for outcome in outcomes]
    mean = estimate(rates, seed=seed, draws=draws)
    if mean is None:
        return None
    count = mean.prompts
    low, high = wilson(sum(rates), count) if min(rates) == max(rates) else (mean.low, mean.high)
    return WinRate(
        rate=mean.mean,
        low=low,
        high=high,
        wins=sum(outcome.win for outcome in outcomes) / count,
        ties=sum(outcome.tie for outcome in outcomes) / count,
        losses=sum(outcome.loss for outcome in outcomes) / count,
        prompts=count,
    )


def length_controlled(
    comparisons: Sequence[AnswerComparison], *, seed: int, draws: int = LENGTH_FITS
) -> Estimate | None:
    """The win rate at equal length.

    None without comparisons, or where every answer is longer by the same: the effects of length and model cannot then
    be separated.
    """
    if not comparisons:
        return None
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(item.prompt for item in comparisons))}
    prompt_N = np.array([places[item.prompt] for item in comparisons])
    outcome_N = np.array([item.outcome for item in comparisons], dtype=np.float64)
    longer_N = np.array([item.longer for item in comparisons], dtype=np.float64)
    weight_N = np.array([item.weight for item in comparisons], dtype=np.float64)
    mean = np.average(longer_N, weights=weight_N)
    spread = math.sqrt(np.average((longer_N - mean) ** 2, weights=weight_N))
    if spread == 0 and mean != 0:
        return None
    length_N = np.tanh(longer_N / spread) if spread else longer_N
    inputs_N2 = np.stack([np.ones_like(length_N), length_N], axis=1)
    drawn: list[float] = []
    for rows in bootstrap_rows(len(places), seed=seed, draws=draws):
        for row in rows:
            times_P = np.bincount(row, minlength=len(places))
            fitted_2 = logistic_fit(outcome_N, inputs_N2, weight_N * times_P[prompt_N], precision=PRIOR_PRECISION)
            drawn.append(_sigmoid(fitted_2[0]))
    low, high = percentile_interval(np.array(drawn))
    rate = _sigmoid(logistic_fit(outcome_N, inputs_N2, weight_N, precision=PRIOR_PRECISION)[0])
    return Estimate(mean=rate, low=low, high=high, prompts=len(places))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))
