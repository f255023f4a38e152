"""ReMax (Li et al. 2023): the score of the greedy answer to the same prompt is the baseline.

The greedy answer is sampled with `top_k: 1` and shaped as the others are. Left out: nothing of algorithm 1.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kedge.algorithms.advantages import greedy_baseline, returns_to_go
from kedge.algorithms.group.method import KL_IN_REWARD, Credit, GroupMethod, GroupTraits
from kedge.algorithms.group.reinforce import policy_gradient_loss
from kedge.core.settings import Section


class ReMaxSettings(Section):
    """ReMax (Li et al. 2023): the score of the likeliest answer to the same prompt is the baseline."""

    kind: Literal["remax"] = "remax"


def greedy_baseline_advantages(_: Section, credit: Credit) -> Tensor:
    """The score less that of the greedy answer. The baseline is about scores; the KL penalty of a token is that of
    itself and those after it."""
    mask_BT = credit.rollouts.response_mask_BT
    penalty_to_go_BT = returns_to_go(credit.penalty_BT, mask_BT, gamma=1.0)
    return greedy_baseline(credit.scores_B, credit.greedy_B, mask_BT) - penalty_to_go_BT


REMAX = GroupMethod(
    settings=ReMaxSettings,
    advantages=greedy_baseline_advantages,
    loss=policy_gradient_loss,
    per="sequence_sum",
    traits=GroupTraits(kl=KL_IN_REWARD, answers=1, needs_groups=False, needs_greedy=True, is_on_policy=True),
)
