"""GRPO with the median of a group as its baseline, which a single outlier does not move.

Left out: the division by the std. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kedge.algorithms import policy_loss
from kedge.algorithms.group.method import KL_IN_LOSS, Credit, GroupMethod, GroupTraits
from kedge.core.loss import ItemLoss
from kedge.core.records import Experience
from kedge.core.settings import Section


class MedianSettings(Section):
    kind: Literal["median"] = "median"
    clip: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability of a token counts between 1 - clip and 1 + clip."""


def advantages(settings: MedianSettings, credit: Credit) -> Tensor:
    """The return of an answer less the median of its group."""
    same_BB = credit.rollouts.group_B[:, None] == credit.rollouts.group_B
    returns_BB = credit.returns_B.expand(same_BB.shape).masked_fill(~same_BB, torch.nan)
    return credit.on_tokens(credit.returns_B - returns_BB.nanmedian(dim=1).values)


def loss(settings: MedianSettings, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    """PPO's, and a fact of each token for `metrics.jsonl`, where its mean is `policy/above_median`."""
    item = policy_loss(logp_BT, experience.old_logp_BT, experience.advantages_BT, clip=settings.clip)
    return replace(item, stats_BT={**item.stats_BT, "above_median": (experience.advantages_BT > 0).float()})


MEDIAN = GroupMethod(
    settings=MedianSettings,
    advantages=advantages,
    loss=loss,
    per="token",
    traits=GroupTraits(kl={**KL_IN_LOSS, "start": 0.02}, answers=5),
)
