"""Dr. GRPO (Liu et al. 2025): GRPO without its two divisions, by the std of a group and by the length of an answer.

Sums over the tokens of an answer are divided by `max_new_tokens`, which does not depend on what was sampled.
Left out: nothing of the estimator.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kedge.algorithms.advantages import group_centred
from kedge.algorithms.group.method import NO_KL, Credit, GroupMethod, GroupTraits
from kedge.algorithms.ppo import policy_loss
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.core.settings import Section


class DrGRPOSettings(Section):
    """GRPO done right (Liu et al. 2025): no division by the std of a group nor by the length of an answer."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""


def group_centred_advantages(_: Section, credit: Credit) -> Tensor:
    """The return of an answer less the mean of its group."""
    return credit.on_tokens(group_centred(credit.returns_B, credit.rollouts.group_B, scale=False))


def clipped_loss(settings: DrGRPOSettings, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return policy_loss(logp_BT, experience.old_logp_BT, experience.advantages_BT, clip=settings.clip)


DR_GRPO = GroupMethod(
    settings=DrGRPOSettings,
    advantages=group_centred_advantages,
    loss=clipped_loss,
    per="sequence_sum",
    traits=GroupTraits(kl=NO_KL),
    is_per_budget=True,
)
