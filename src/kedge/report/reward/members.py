"""How far the members of an ensemble agree, and whether their disagreement says anything."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from kedge.report.reward.intervals import Share, share, share_or_none
from kedge.report.reward.records import Columns, won


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member on its own: its accuracy, and the mean and spread of its scores over all answers."""

    accuracy: Share
    score_mean: float
    score_std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
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
        (one, other, float((sign_BK[:, one] == sign_BK[:, other]).mean()))
        for one, other in combinations(range(members), 2)
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
