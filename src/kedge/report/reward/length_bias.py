"""Length bias of a reward model: the rule "the longer wins" on the same pairs, and correlations of score and length.

A model that only counts tokens is as accurate as the data are biased, but fails on the pairs where the rule is wrong,
so the mean of the accuracies on both kinds of pairs (balanced accuracy) is blind to length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kedge.core.stats import Floats, pearson, spearman
from kedge.report.reward.accuracy import (
    Estimate,
    Share,
    mean_of,
    mean_of_shares,
    quantile_groups,
    share,
    share_or_none,
)
from kedge.report.reward.scored_pairs import Columns, won

_BINS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """The model and the rule "the longer wins" on some of the pairs."""

    model: Share
    rule: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """Answers, chosen and rejected alike, of `low` to `high` tokens, and their scores."""

    low: float
    high: float
    median: float
    score_mean: float
    score_std: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """A part without pairs, or a correlation with something constant, is None."""

    rule: Share
    """Accuracy of "the longer wins" on all pairs; that of "the shorter wins" is one minus this."""
    longer_chosen: Contest | None
    longer_rejected: Contest | None
    equal: Contest | None
    balanced: Estimate | None
    """Mean of the model's accuracies where the longer was chosen and where it was rejected."""
    gain_over_longer: Estimate
    """Accuracy of the model minus that of "the longer wins", pair by pair."""
    gain_over_shorter: Estimate
    score_pearson: float | None
    """Of score and length, over all answers."""
    score_spearman: float | None
    difference_pearson: float | None
    """Of score difference and length difference, over pairs."""
    difference_spearman: float | None
    bins: tuple[LengthBin, ...]


def length_bias(data: Columns) -> LengthBias:
    """Differences are chosen minus rejected, and their correlation is taken around their means.

    So what the labels explain is taken out: a model that knows which answer is better, on data where that one tends to
    be longer, does not correlate for this reason alone.
    """
    longer_B = won(data.gap_B)
    score_A = np.concatenate([data.chosen_B, data.rejected_B])
    length_A = np.concatenate([data.chosen_length_B, data.rejected_length_B])
    chosen, rejected = _contest(data, longer_B, 1.0), _contest(data, longer_B, 0.0)
    return LengthBias(
        rule=share(longer_B, data.prompt_B),
        longer_chosen=chosen,
        longer_rejected=rejected,
        equal=_contest(data, longer_B, 0.5),
        balanced=mean_of_shares(chosen.model, rejected.model) if chosen and rejected else None,
        gain_over_longer=mean_of(data.correct_B - longer_B, data.prompt_B),
        gain_over_shorter=mean_of(data.correct_B - (1 - longer_B), data.prompt_B),
        score_pearson=pearson(score_A, length_A),
        score_spearman=spearman(score_A, length_A),
        difference_pearson=pearson(data.difference_B, data.gap_B),
        difference_spearman=spearman(data.difference_B, data.gap_B),
        bins=tuple(_bins(score_A, length_A)),
    )


def _contest(data: Columns, longer_B: Floats, rule: float) -> Contest | None:
    model = share_or_none(data.correct_B, data.prompt_B, np.flatnonzero(longer_B == rule))
    return Contest(model=model, rule=rule) if model else None


def _bins(score_A: Floats, length_A: Floats) -> list[LengthBin]:
    return [
        LengthBin(
            low=float(length_A[rows].min()),
            high=float(length_A[rows].max()),
            median=float(np.median(length_A[rows])),
            score_mean=float(score_A[rows].mean()),
            score_std=float(score_A[rows].std()),
            n=len(rows),
        )
        for rows in quantile_groups(length_A, _BINS)
    ]
