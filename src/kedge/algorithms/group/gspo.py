"""GSPO (Zheng et al. 2025): GRPO's advantages with one ratio per answer, clipped tightly.

Left out: GSPO-token (eq. 13), with an advantage per token.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from kedge.algorithms.group.grpo import group_relative_advantages
from kedge.algorithms.group.method import NO_KL, GroupMethod, GroupTraits
from kedge.algorithms.policy import gspo_loss
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.core.settings import Section


class GSPOSettings(Section):
    """Group sequence policy optimisation (Zheng et al. 2025): one ratio an answer, clipped tightly."""

    kind: Literal["gspo"] = "gspo"
    clip: float = Field(default=3e-4, gt=0, lt=1)
    """The ratio of an answer, by the mean of its tokens, counts from 1 - clip."""
    clip_high: float = Field(default=4e-4, gt=0)
    """And up to 1 + clip_high."""


def sequence_clipped_loss(settings: GSPOSettings, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return gspo_loss(
        logp_BT,
        experience.old_logp_BT,
        experience.advantages_BT,
        experience.rollouts.response_mask_BT,
        clip=settings.clip,
        clip_high=settings.clip_high,
    )


GSPO = GroupMethod(
    settings=GSPOSettings,
    advantages=group_relative_advantages,
    loss=sequence_clipped_loss,
    per="sequence",
    # Its range is a thousandth of PPO's: a third of the tokens is clipped where nothing is wrong.
    traits=GroupTraits(kl=NO_KL, minibatches=4, clips_often=0.8),
)
