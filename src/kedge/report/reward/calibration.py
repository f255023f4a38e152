"""Calibration of a reward model: by Bradley and Terry, P(chosen is better) = sigmoid(score difference).

Which answer is called chosen is a matter of naming, so confidence is sigmoid(|difference|), between 50 and 100 %, and
is compared with how often the higher score is right. Left out: any other map than one temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kedge.core.stats import Floats
from kedge.report.reward.accuracy import Estimate, Share, mean_of, quantile_groups, share
from kedge.report.reward.scored_pairs import Columns

_MOST_BINS = 10
_PAIRS_A_BIN = 30
"""Fewer pairs a bin make the calibration error of even a perfect model large: by chance it is about 0.4 / √pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBin:
    """`confidence` is the mean one in the bin, `observed` how often the model was right there."""

    low: float
    high: float
    confidence: float
    observed: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    bins: tuple[CalibrationBin, ...]
    error: float
    """Expected calibration error: mean distance between confidence and accuracy of a bin, weighted by its pairs."""
    excess: Estimate
    """Mean confidence minus accuracy; above zero is overconfident."""
    log_loss: float
    """Mean of -log sigmoid(difference) in nats; a coin has log 2 = 0.693."""
    temperature: float | None
    """The scores divided by this have the least log-loss; None where no finite one above zero is best."""
    log_loss_at_temperature: float | None


def calibration(data: Columns) -> Calibration:
    confidence_B = sigmoid(np.abs(data.difference_B))
    count = min(_MOST_BINS, max(1, len(confidence_B) // _PAIRS_A_BIN))
    bins = tuple(
        CalibrationBin(
            low=float(confidence_B[rows].min()),
            high=float(confidence_B[rows].max()),
            confidence=float(confidence_B[rows].mean()),
            observed=share(data.correct_B[rows], data.prompt_B[rows]),
        )
        for rows in quantile_groups(confidence_B, count)
    )
    best = temperature(data.difference_B)
    return Calibration(
        bins=bins,
        error=sum(bin.observed.n * abs(bin.confidence - bin.observed.value) for bin in bins) / len(confidence_B),
        excess=mean_of(confidence_B - data.correct_B, data.prompt_B),
        log_loss=log_loss(data.difference_B),
        temperature=best,
        log_loss_at_temperature=None if best is None else log_loss(data.difference_B / best),
    )


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow on either side.

    >>> sigmoid(np.array([0.0, -1e4])).tolist()
    [0.5, 0.0]
    """
    return np.exp(-np.logaddexp(0.0, -x))


def log_loss(difference_B: Floats) -> float:
    """
    >>> round(log_loss(np.array([0.0])), 4)
    0.6931
    """
    return float(np.logaddexp(0.0, -difference_B).mean())


def temperature(difference_B: Floats) -> float | None:
    """The T > 0 with the least mean of -log sigmoid(d / T): a logistic fit of one slope, a = 1 / T.

    In a the loss is convex, with slope -mean(d sigmoid(-a d)): it falls at a = 0 when the mean difference is positive,
    and rises for large a when some difference is negative; the slope is then bisected, which no scale of scores upsets.
    Without the first, no temperature helps; without the second, the smaller the better.
    """
    scale = float(np.abs(difference_B).max())
    if difference_B.mean() <= 0 or difference_B.min() >= 0:
        return None
    d_B = difference_B / scale

    def falls(a: float) -> bool:
        return bool((d_B * sigmoid(-a * d_B)).mean() > 0)

    low, high = 0.0, 1.0
    while falls(high):
        low, high = high, 2 * high
    for _ in range(100):
        inverse = (low + high) / 2
        low, high = (inverse, high) if falls(inverse) else (low, inverse)
    return scale / high
