"""GRPO (Shao et al. 2024, DeepSeekMath): advantages relative to the group, PPO's clipped loss, k3 KL in the loss.

Left out: process supervision (section 4.1.3) and iterative training of the reward model (section 4.1.4).
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import Field
from torch import Tensor

from kedge.algorithms.advantages import group_centred
from kedge.algorithms.group.method import KL_IN_LOSS, Credit, GroupMethod, GroupTraits
from kedge.algorithms.ppo import policy_loss
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.core.settings import Section


class GRPOSettings(Section):
    """Group-relative policy optimisation (Shao et al. 2024): answers to a prompt are compared with each other."""

    kind: Literal["grpo"] = "grpo"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""
    clip_high: float | None = Field(default=None, gt=0)
    """Another bound above; null is the same as below."""


class ClipSettings(Protocol):
    """The bounds of a ratio, of any method that has both."""

    @property
    def clip(self) -> float: ...
    @property
    def clip_high(self) -> float | None: ...


def group_relative_advantages(_: Section, credit: Credit) -> Tensor:
    """The return of an answer less the mean of its group, over the std of the group."""
    return credit.on_tokens(group_centred(credit.returns_B, credit.rollouts.group_B, scale=True))


def clipped_loss(settings: ClipSettings, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return policy_loss(
        logp_BT,
        experience.old_logp_BT,
        experience.advantages_BT,
        clip=settings.clip,
        clip_high=settings.clip_high,
    )


GRPO = GroupMethod(
    settings=GRPOSettings,
    advantages=group_relative_advantages,
    loss=clipped_loss,
    per="sequence",
    traits=GroupTraits(kl={**KL_IN_LOSS, "start": 0.04}),
)
