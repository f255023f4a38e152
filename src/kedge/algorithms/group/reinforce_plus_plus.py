"""REINFORCE++ (Hu 2025): returns by token, whitened over the whole batch, under PPO's clip.

Left out: the variant that subtracts the mean of a group first (REINFORCE++-baseline).
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kedge.algorithms.advantages import whiten
from kedge.algorithms.group.method import KL_IN_REWARD, Credit, GroupMethod, GroupTraits
from kedge.algorithms.ppo import policy_loss
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.core.settings import Section


class ReinforcePlusPlusSettings(Section):
    """REINFORCE++ (Hu 2025): returns by token, whitened over the whole batch, under PPO's clip."""

    kind: Literal["reinforce++"] = "reinforce++"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards."""


def whitened_returns(settings: ReinforcePlusPlusSettings, credit: Credit) -> Tensor:
    """The return from each token on, whitened over all tokens of the batch."""
    return whiten(credit.returns_to_go(gamma=settings.gamma), credit.rollouts.response_mask_BT)


def clipped_loss(settings: ReinforcePlusPlusSettings, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return policy_loss(logp_BT, experience.old_logp_BT, experience.advantages_BT, clip=settings.clip)


REINFORCE_PLUS_PLUS = GroupMethod(
    settings=ReinforcePlusPlusSettings,
    advantages=whitened_returns,
    loss=clipped_loss,
    per="token",
    traits=GroupTraits(kl=KL_IN_REWARD, answers=1, needs_groups=False),
)
