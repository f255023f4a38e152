"""REINFORCE (Williams 1992) by token, with the mean return of all earlier answers as the baseline.

The first batch is its own baseline. Left out: a baseline that is learnt.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kedge.algorithms.group.method import KL_IN_REWARD, Credit, GroupMethod, GroupTraits
from kedge.algorithms.kl import estimate
from kedge.algorithms.policy import reinforce_loss
from kedge.core.loss import ItemLoss, masked
from kedge.core.records import Experience
from kedge.core.settings import Section


class ReinforceSettings(Section):
    """REINFORCE (Williams 1992) with the mean return of all answers so far as the baseline."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards."""


def returns_over_baseline(settings: ReinforceSettings, credit: Credit) -> Tensor:
    """The return from each token on, less the mean return of all answers before this batch."""
    return masked(credit.returns_to_go(gamma=settings.gamma) - credit.baseline, credit.rollouts.response_mask_BT)


def policy_gradient_loss(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    """-A logp, without a ratio; the stats still say how far the policy has moved from the one that was sampled."""
    item = reinforce_loss(logp_BT, experience.advantages_BT)
    stats_BT = {
        "ratio": (logp_BT - experience.old_logp_BT).exp().detach(),
        "approx_kl": estimate(experience.old_logp_BT, logp_BT, kind="k3").detach(),
    }
    return ItemLoss(loss_BT=item.loss_BT, stats_BT=stats_BT)


REINFORCE = GroupMethod(
    settings=ReinforceSettings,
    advantages=returns_over_baseline,
    loss=policy_gradient_loss,
    per="sequence_sum",
    traits=GroupTraits(kl=KL_IN_REWARD, answers=1, needs_groups=False, is_on_policy=True),
)
