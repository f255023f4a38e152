"""Intervals where items share a prompt: shares, functions of sums, logistic slopes. All are 95 %.

Whole clusters are independent of each other, the items in one are not. Shape letters: N items, G clusters,
E sums, D bootstrap draws, K inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.core.errors import DataError
from kedge.core.stats import (
    BOOTSTRAP_DRAWS,
    Z95,
    Floats,
    clustered_variance,
    logistic_fit,
    percentile_interval,
    places_of,
    sigmoid,
    student_quantile,
    wilson,
)  # fmt: skip

_PRIOR = 1e-3
"""Precision of the slopes, a prior of sd 32: keeps them finite where an input alone decides the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A figure with its interval, and how many observations it comes from."""

    value: float
    low: float
    high: float
    count: int


def clustered_share(hits: Sequence[bool], clusters: Sequence[Hashable], *, less: float = 0.0) -> Measured | None:
    """A share, less a constant; None without observations.

    Wilson's interval (1927), with as many observations as would vary alike if all of them were independent. Where
    nothing varies, there are as many as there are clusters.

    >>> measured = clustered_share([True] * 8 + [False] * 2, list(range(10)))
    >>> round(measured.low, 4), round(measured.high, 4)
    (0.427, 0.9555)
    """
    if not hits:
        return None
    hit_N = np.array(hits, dtype=np.float64)
    mean, (variance, groups) = float(hit_N.mean()), clustered_variance(hit_N, clusters)
    if groups < 2:
        return Measured(value=mean - less, low=-less, high=1 - less, count=len(hits))
    effective = mean * (1 - mean) / variance if variance else groups
    low, high = wilson(mean * effective, effective, z=student_quantile(0.975, groups - 1))
    return Measured(value=mean - less, low=low - less, high=high - less, count=len(hits))


def of_sums(
    part_NE: Floats,
    clusters: Sequence[Hashable],
    figure: Callable[[Floats], Floats],
    *,
    limits: tuple[float, float],
    count: int | None = None,
    seed: int = 0,
) -> Measured | None:
    """A function of sums over items, with its percentile interval when clusters are drawn again, with replacement.

    `figure` takes the sums of several draws (D, E) and gives a number each, NaN where there is none. With a single
    cluster the interval is the `limits` of the figure. Clusters with the same sums are drawn together, so that many
    items take no longer than few.

    >>> of_sums(np.array([[1.0, 2.0], [1.0, 2.0]]), ["p", "q"], lambda sums_DE: sums_DE[:, 0] / sums_DE[:, 1],
    ...         limits=(0, 1))
    Measured(value=0.5, low=0.5, high=0.5, count=2)
    """
    if not len(part_NE):
        return None
    group_N = places_of(clusters)
    groups = int(group_N.max()) + 1
    total_GE = np.zeros((groups, part_NE.shape[1]))
    np.add.at(total_GE, group_N, part_NE)
    value = float(figure(total_GE.sum(axis=0, keepdims=True))[0])
    if math.isnan(value):
        return None
    low, high = limits
    if groups > 1:
        different_UE, count_U = np.unique(total_GE, axis=0, return_counts=True)
        drawn_DU = np.random.default_rng(seed).multinomial(groups, count_U / groups, size=BOOTSTRAP_DRAWS)
        drawn_D = figure(drawn_DU @ different_UE)
        low, high = percentile_interval(drawn_D[~np.isnan(drawn_D)])
    return Measured(value=value, low=low, high=high, count=len(part_NE) if count is None else count)


def first_slope(outcome_N: Floats, inputs_NK: Floats, clusters: Sequence[Hashable]) -> Measured | None:
    """The weight of the first input in P(outcome) = σ(inputs · weights); None where nothing can be told.

    The variance is the larger of the sandwich over clusters (Liang and Zeger 1986) and that of the model: where an
    input all but decides the outcome, the first alone would be too sure of the others.

    >>> outcomes, inputs = np.array([1.0] * 30 + [0.0] * 10), np.ones((40, 1))
    >>> slope = first_slope(outcomes, inputs, list(range(40)))
    >>> round(slope.value, 2), round(math.log(3), 2), slope.low > 0
    (1.1, 1.1, True)
    """
    if len(outcome_N) != len(inputs_NK) or len(outcome_N) != len(clusters):
        raise DataError(f"a fit needs as many outcomes as inputs: {len(outcome_N)} and {len(inputs_NK)}")
    group_N = places_of(clusters)
    groups = int(group_N.max()) + 1 if len(group_N) else 0
    num_inputs = inputs_NK.shape[1]
    if groups <= num_inputs or not np.ptp(outcome_N) or np.linalg.matrix_rank(inputs_NK) < num_inputs:
        return None
    theta_K = logistic_fit(outcome_N, inputs_NK, np.ones(len(outcome_N)), precision=_PRIOR)
    p_N = sigmoid(inputs_NK @ theta_K)
    information_KK = inputs_NK.T @ (inputs_NK * (p_N * (1 - p_N))[:, None]) + _PRIOR * np.eye(num_inputs)
    bread_KK = np.linalg.inv(information_KK)
    score_GK = np.zeros((groups, num_inputs))
    np.add.at(score_GK, group_N, inputs_NK * (outcome_N - p_N)[:, None])
    sandwich_KK = bread_KK @ (score_GK.T @ score_GK) @ bread_KK * groups / (groups - 1)
    error = math.sqrt(max(sandwich_KK[0, 0], bread_KK[0, 0]))
    slope = float(theta_K[0])
    return Measured(value=slope, low=slope - Z95 * error, high=slope + Z95 * error, count=len(p_N))
