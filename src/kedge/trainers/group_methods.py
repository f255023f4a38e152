"""The critic-free methods: how each one gets from scores to advantages, and which loss it takes of them.

A method is an entry here, and its section and traits in `group_settings`. The mathematics is `kedge.algorithms`.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kedge.algorithms import (
    cispo_loss,
    estimate,
    greedy_baseline,
    group_centred,
    gspo_loss,
    leave_one_out,
    policy_loss,
    reinforce_loss,
    returns_to_go,
    shape_rewards,
    whiten,
)
from kedge.core.loss import ItemLoss, masked
from kedge.core.per import Per
from kedge.core.records import Experience, Rollouts
from kedge.trainers.group_settings import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    AnyMethod,
    DrGRPO,
    Reinforce,
    ReinforcePlusPlus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What advantages are made from."""

    rollouts: Rollouts
    scores_B: Tensor
    greedy_B: Tensor
    """The score of the likeliest answer to the same prompt."""
    penalty_BT: Tensor
    """What each token pays for its KL; 0 where the KL is paid in the loss."""
    baseline: float
    """The mean return of all answers before these."""

    @property
    def returns_B(self) -> Tensor:
        """What whole answers earned: the score less all penalties."""
        return self.scores_B - masked(self.penalty_BT, self.rollouts.response_mask_BT).sum(dim=1)

    def spread(self, advantages_B: Tensor) -> Tensor:
        """One number an answer, on each of its tokens."""
        mask_BT = self.rollouts.response_mask_BT
        return masked(advantages_B[:, None].expand(mask_BT.shape), mask_BT)

    def to_go(self, *, gamma: float) -> Tensor:
        """What is still to come at each token, its own reward included."""
        mask_BT = self.rollouts.response_mask_BT
        return returns_to_go(shape_rewards(self.scores_B, self.penalty_BT, mask_BT, coef=1.0), mask_BT, gamma=gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMethod:
    """The first argument of both functions is the method's own section of settings."""

    advantages: Callable[[Any, Credit], Tensor]
    loss: Callable[[Any, Tensor, Experience], ItemLoss]
    per: Per
    is_per_budget: bool = False
    """The loss is divided by the longest answer that was allowed, whatever the lengths are."""


def compared(_: AnyMethod, credit: Credit) -> Tensor:
    return credit.spread(group_centred(credit.returns_B, credit.rollouts.group_B, scale=True))


def centred(_: AnyMethod, credit: Credit) -> Tensor:
    return credit.spread(group_centred(credit.returns_B, credit.rollouts.group_B, scale=False))


def without_own(_: AnyMethod, credit: Credit) -> Tensor:
    return credit.spread(leave_one_out(credit.returns_B, credit.rollouts.group_B))


def over_average(cfg: Reinforce, credit: Credit) -> Tensor:
    return masked(credit.to_go(gamma=cfg.gamma) - credit.baseline, credit.rollouts.response_mask_BT)


def whitened(cfg: ReinforcePlusPlus, credit: Credit) -> Tensor:
    return whiten(credit.to_go(gamma=cfg.gamma), credit.rollouts.response_mask_BT)


def over_greedy(_: AnyMethod, credit: Credit) -> Tensor:
    """The baseline is about scores; the KL penalty of a token is, as ever, what it and those after it pay."""
    mask_BT = credit.rollouts.response_mask_BT
    paid_BT = returns_to_go(credit.penalty_BT, mask_BT, gamma=1.0)
    return greedy_baseline(credit.scores_B, credit.greedy_B, mask_BT) - paid_BT


def clipped(cfg: GRPO | DrGRPO | ReinforcePlusPlus | DAPO, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    high = cfg.clip_high if isinstance(cfg, GRPO | DAPO) else None
    return policy_loss(logp_BT, experience.old_logp_BT, experience.advantages_BT, clip=cfg.clip, clip_high=high)


def clipped_as_one(cfg: GSPO, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    mask_BT = experience.rollouts.response_mask_BT
    old_BT, advantages_BT = experience.old_logp_BT, experience.advantages_BT
    return gspo_loss(logp_BT, old_BT, advantages_BT, mask_BT, clip=cfg.clip, clip_high=cfg.clip_high)


def weighted(cfg: CISPO, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    old_BT, advantages_BT = experience.old_logp_BT, experience.advantages_BT
    return cispo_loss(logp_BT, old_BT, advantages_BT, clip=cfg.clip, clip_high=cfg.clip_high)


def plain(_: AnyMethod, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    """Without a ratio; how far the policy moved is written down all the same."""
    item = reinforce_loss(logp_BT, experience.advantages_BT)
    facts = {
        "ratio": (logp_BT - experience.old_logp_BT).exp().detach(),
        "approx_kl": estimate(experience.old_logp_BT, logp_BT, kind="k3").detach(),
    }
    return ItemLoss(loss_BT=item.loss_BT, stats_BT=facts)


METHODS: Mapping[str, GroupMethod] = {
    "grpo": GroupMethod(advantages=compared, loss=clipped, per="sequence"),
    "dr_grpo": GroupMethod(advantages=centred, loss=clipped, per="sequence_sum", is_per_budget=True),
    "rloo": GroupMethod(advantages=without_own, loss=plain, per="sequence_sum"),
    "reinforce": GroupMethod(advantages=over_average, loss=plain, per="sequence_sum"),
    "reinforce++": GroupMethod(advantages=whitened, loss=clipped, per="token"),
    "remax": GroupMethod(advantages=over_greedy, loss=plain, per="sequence_sum"),
    "gspo": GroupMethod(advantages=compared, loss=clipped_as_one, per="sequence"),
    "cispo": GroupMethod(advantages=compared, loss=weighted, per="token"),
    "dapo": GroupMethod(advantages=compared, loss=clipped, per="token"),
}
