"""Accuracy of a reward model with 95 % intervals: on all held-out pairs, in bins of them, and of each ensemble member.

Pairs of one prompt tend to be right or wrong together, so Wilson's interval, which takes every pair for new
evidence, is too narrow for them; the bootstrap over prompts is not, but has no width at 0 and 100 % and is unreliable
with few prompts. Hence: Wilson where every prompt occurs once, else at each end the wider of the two.

Shape letters: B pairs, A answers, K members, G prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

import numpy as np

from kedge.core import stats
from kedge.core.seeds import seed_for
from kedge.core.stats import Floats, Ints
from kedge.report.reward.scored_pairs import Columns, won

_BINS = 6
_BINS_A_SIDE = 4


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
    total_G = np.bincount(group_B, weights=x_B).astype(np.float64)
    low, high = stats.bootstrap_mean(total_G, size_G=size_G, seed=seed_for(0, "report.reward.bootstrap"))
    return Interval(low=low, high=high)


def share(correct_B: Floats, prompt_B: Ints) -> Share:
    """The share of right pairs; the top of this file says which interval it has."""
    value, n = float(correct_B.mean()), len(correct_B)
    interval = wilson(float(correct_B.sum()), n)
    if len(np.unique(prompt_B)) < n:
        drawn = bootstrap(correct_B, prompt_B)
        interval = Interval(low=min(interval.low, drawn.low), high=max(interval.high, drawn.high))
    return Share(value=value, low=interval.low, high=interval.high, n=n, ties=int((correct_B == 0.5).sum()))


def share_or_none(correct_B: Floats, prompt_B: Ints, rows: Ints) -> Share | None:
    """The share among some of the pairs; None where there is none."""
    return share(correct_B[rows], prompt_B[rows]) if len(rows) else None


def mean_of(x_B: Floats, prompt_B: Ints) -> Estimate:
    """A mean of any numbers, with the bootstrap over prompts."""
    interval = bootstrap(x_B, prompt_B)
    return Estimate(value=float(x_B.mean()), low=interval.low, high=interval.high)


def mean_of_shares(first: Share, second: Share) -> Estimate:
    """The plain mean of two shares of different pairs.

    Its interval is MOVER's (Zou and Donner 2008): the distances to the ends add up as squares.

    >>> half = Share(value=0.5, low=0.2, high=0.8, n=10, ties=0)
    >>> most = Share(value=0.9, low=0.5, high=1.0, n=10, ties=0)
    >>> estimate = mean_of_shares(half, most)
    >>> estimate.value, round(estimate.low, 4), round(estimate.high, 4)
    (0.7, 0.45, 0.8581)
    """
    value = (first.value + second.value) / 2
    below = sqrt((first.value - first.low) ** 2 + (second.value - second.low) ** 2) / 2
    above = sqrt((first.high - first.value) ** 2 + (second.high - second.value) ** 2) / 2
    return Estimate(value=value, low=value - below, high=value + above)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """The pairs from `low` to `high`, both of which occur, and the accuracy on them."""

    low: float
    high: float
    median: float
    accuracy: Share


def quantile_groups(x_B: Floats, count: int) -> list[Ints]:
    """Row numbers in at most `count` groups of about equal size, by rising x; equal numbers stay together.

    >>> [rows.tolist() for rows in quantile_groups(np.array([5.0, 1.0, 5.0, 2.0, 5.0, 4.0]), 2)]
    [[1, 3, 5], [0, 2, 4]]
    >>> [rows.tolist() for rows in quantile_groups(np.array([3.0, 1.0, 3.0, 3.0, 3.0]), 4)]
    [[1], [0, 2, 3, 4]]
    """
    values = np.unique(x_B)
    few = len(values) <= count
    edges = values[:-1] if few else np.unique(np.quantile(x_B, np.linspace(0, 1, count + 1)[1:-1]))
    place_B = np.searchsorted(edges, x_B, side="left")
    return [np.flatnonzero(place_B == place) for place in np.unique(place_B)]


def by_data_margin(data: Columns) -> tuple[Bin, ...]:
    """Accuracy by strength of the preference, over the pairs that have one."""
    given = np.flatnonzero(~np.isnan(data.margin_B))
    return _binned(data, data.margin_B, [given[rows] for rows in quantile_groups(data.margin_B[given], _BINS)])


def by_score_margin(data: Columns) -> tuple[Bin, ...]:
    """Accuracy by distance of the two scores, whichever is higher: it rises where the model knows what it knows."""
    apart_B = np.abs(data.difference_B)
    return _binned(data, apart_B, quantile_groups(apart_B, _BINS))


def by_length_gap(data: Columns) -> tuple[Bin, ...]:
    """Accuracy by tokens of the chosen answer minus those of the rejected one; no bin crosses zero."""
    groups: list[Ints] = []
    for sign in (-1, 0, 1):
        rows = np.flatnonzero(np.sign(data.gap_B) == sign)
        groups += [rows[inner] for inner in quantile_groups(data.gap_B[rows], _BINS_A_SIDE)]
    return _binned(data, data.gap_B, groups)


def by_value(data: Columns, value_B: Sequence[str]) -> dict[str, Share]:
    """Accuracy on the pairs of each value."""
    values = np.asarray(value_B)
    return {
        str(value): share(data.correct_B[values == value], data.prompt_B[values == value])
        for value in np.unique(values)
    }


def _binned(data: Columns, x_B: Floats, groups: list[Ints]) -> tuple[Bin, ...]:
    return tuple(
        Bin(
            low=float(x_B[rows].min()),
            high=float(x_B[rows].max()),
            median=float(np.median(x_B[rows])),
            accuracy=share(data.correct_B[rows], data.prompt_B[rows]),
        )
        for rows in groups
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member on its own: its accuracy, and the mean and spread of its scores over all answers."""

    accuracy: Share
    score_mean: float
    score_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the members of an ensemble agree, and whether their disagreement predicts errors."""

    members: tuple[Member, ...]
    pairwise: tuple[tuple[int, int, float], ...]
    """For members i < j: the share of pairs on which both decide alike; a tie is a decision of its own."""
    agreement: float
    """Mean of the above."""
    disagreement: float | None
    """Spread between members on one answer, as a share of the spread of the mean score over all answers.

    Each member's scores are first centred: a constant that is added to all of them decides no pair."""
    offset_spread: float | None
    """Spread of the members' mean scores in the same unit: what the centring took away."""
    unanimous: Share | None
    """Accuracy of the ensemble where all members prefer the same answer."""
    divided: Share | None
    """Accuracy of the ensemble on the other pairs."""


def agreement(data: Columns) -> Agreement | None:
    """None for a single model."""
    members = data.chosen_BK.shape[1]
    if members == 1:
        return None
    sign_BK = np.sign(data.chosen_BK - data.rejected_BK)
    scores_AK = np.concatenate([data.chosen_BK, data.rejected_BK])
    mean_K, std_K = scores_AK.mean(axis=0), scores_AK.std(axis=0)
    centred_AK = scores_AK - mean_K
    score_A = scores_AK.mean(axis=1)
    spread = float(score_A.std()) if np.ptp(score_A) else 0.0  # the mean of equal numbers may be off by a rounding
    pairwise = tuple(
        (first, second, float((sign_BK[:, first] == sign_BK[:, second]).mean()))
        for first, second in combinations(range(members), 2)
    )
    is_unanimous_B = np.abs(sign_BK.sum(axis=1)) == members
    return Agreement(
        members=tuple(
            Member(
                accuracy=share(won(sign_BK[:, member]), data.prompt_B),
                score_mean=float(mean_K[member]),
                score_std=float(std_K[member]),
            )
            for member in range(members)
        ),
        pairwise=pairwise,
        agreement=sum(alike for _, _, alike in pairwise) / len(pairwise),
        disagreement=float(centred_AK.std(axis=1).mean()) / spread if spread > 0 else None,
        offset_spread=float(mean_K.std()) / spread if spread > 0 else None,
        unanimous=share_or_none(data.correct_B, data.prompt_B, np.flatnonzero(is_unanimous_B)),
        divided=share_or_none(data.correct_B, data.prompt_B, np.flatnonzero(~is_unanimous_B)),
    )
