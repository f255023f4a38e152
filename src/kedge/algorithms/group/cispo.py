"""CISPO (MiniMax-M1 2025): GRPO's advantages with a clipped importance weight, through which no gradient flows.

Left out: the optional token mask (eq. 6).
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kedge.algorithms.group.grpo import group_relative_advantages
from kedge.algorithms.group.method import NO_KL, GroupMethod, GroupTraits
from kedge.algorithms.policy import cispo_loss
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.core.settings import Section


class CISPOSettings(Section):
    """CISPO (MiniMax-M1 2025): the weight of a token is clipped, its gradient never is."""

    kind: Literal["cispo"] = "cispo"
    clip: float = Field(default=1.0, gt=0, le=1)
    """The weight of a token is at least 1 - clip; 1 is no bound, as in the paper."""
    clip_high: float = Field(default=5.0, gt=0)
    """And at most 1 + clip_high."""


def clipped_weight_loss(settings: CISPOSettings, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return cispo_loss(
        logp_BT,
        experience.old_logp_BT,
        experience.advantages_BT,
        clip=settings.clip,
        clip_high=settings.clip_high,
    )


CISPO = GroupMethod(
    settings=CISPOSettings,
    advantages=group_relative_advantages,
    loss=clipped_weight_loss,
    per="token",
    traits=GroupTraits(kl=NO_KL, minibatches=4),
)
