"""Fifteen faults that no rule, threshold or weight was set by: written down before the rules met them.

They say how far the doctor can be trusted with a fault that nobody thought of. Do not tune rules on them: a fault that
is missed here stays missed until others have been written in its place. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kedge.algorithms import shape_rewards
from kedge.core.loss import ItemLoss
from kedge.core.protocols import CriticRole, Metrics, PolicyLoss, PolicyRole, ReferenceRole, RewardSource, ValueLoss
from kedge.core.records import Experience, Rollouts, ValueTargets, num_rows
from kedge.rollout.generators import GeneratorParts
from kedge.stages.rl.prompts import PromptDataset
from planted_faults import Case, function_reward


@dataclass(frozen=True, slots=True)
class ClimbingCritic:
    """A critic that climbs its loss."""

    role: CriticRole

    def values(self, rollouts: Rollouts) -> Tensor:
        return self.role.values(rollouts)

    def update(self, targets: ValueTargets, loss: ValueLoss, **how: Any) -> Metrics:
        def climbed(values_BT: Tensor, targets: ValueTargets) -> ItemLoss:
            item = loss(values_BT, targets)
            return replace(item, loss_BT=-item.loss_BT)

        return self.role.update(targets, climbed, **how)


@dataclass(frozen=True, slots=True)
class LateLogprobs:
    """A policy whose log-probs are each those of the token before."""

    role: PolicyRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self.role.logprobs(rollouts).roll(1, dims=1) * rollouts.response_mask_BT

    def update(self, experience: Experience, loss: PolicyLoss, **how: Any) -> Metrics:
        return self.role.update(experience, loss, **how)


@dataclass(frozen=True, slots=True)
class OtherReference:
    """A reference that is less sure than the policy's start: another checkpoint of the same model."""

    role: ReferenceRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return 1.15 * self.role.logprobs(rollouts)


@dataclass(frozen=True, slots=True)
class AdvantagesOfOtherRows:
    """A policy that learns of each answer what another one deserved."""

    role: PolicyRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self.role.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, **how: Any) -> Metrics:
        mean_B = experience.advantages_BT.sum(dim=1) / experience.rollouts.response_mask_BT.sum(dim=1)
        shifted_BT = mean_B.roll(1)[:, None] * experience.rollouts.response_mask_BT
        return self.role.update(replace(experience, advantages_BT=shifted_BT), loss, **how)


@dataclass(frozen=True, slots=True)
class RandomScores:
    """Scores that are drawn, not given."""

    source: RewardSource

    def score(self, rollouts: Rollouts) -> Tensor:
        rng = torch.Generator().manual_seed(int(rollouts.tokens_BT.sum()))
        return torch.randn(num_rows(rollouts), generator=rng)


@dataclass(slots=True)
class LateScores:
    """Each batch gets the scores of the batch before."""

    source: RewardSource
    before_B: Tensor | None = None

    def score(self, rollouts: Rollouts) -> Tensor:
        scores_B = self.source.score(rollouts)
        late_B, self.before_B = self.before_B, scores_B
        return scores_B if late_B is None else late_B


@dataclass(slots=True)
class ConstantFrom:
    """A source that answers from some call on with the same number."""

    source: RewardSource
    calls: int = 0

    def score(self, rollouts: Rollouts) -> Tensor:
        self.calls += 1
        scores_B = self.source.score(rollouts)
        return scores_B if self.calls <= 12 else torch.full_like(scores_B, 0.5)


@dataclass(frozen=True, slots=True)
class FirstTokensOnly:
    """A reward that reads the first four tokens of an answer."""

    source: RewardSource

    def score(self, rollouts: Rollouts) -> Tensor:
        is_late_BT = rollouts.response_mask_BT & (rollouts.response_mask_BT.cumsum(dim=1) > 4)
        return self.source.score(
            replace(
                rollouts,
                attention_mask_BT=rollouts.attention_mask_BT & ~is_late_BT,
                response_mask_BT=rollouts.response_mask_BT & ~is_late_BT,
            )
        )


class OnePromptABatch(PromptDataset):
    """Prompts of which each batch asks one, in all of its rows."""

    def item(self, group: int) -> int:
        return super().item(group - group % self.batch)


def one_prompt_a_batch(prompts: PromptDataset) -> PromptDataset:
    return OnePromptABatch(**{part.name: getattr(prompts, part.name) for part in fields(prompts)})


def among_two(parts: GeneratorParts) -> GeneratorParts:
    """Samples among the two likeliest tokens, which the trainer does not know."""
    return replace(parts, sampling=parts.sampling.model_copy(update={"top_k": 2}))


def paid_for_distance(scores_B: Tensor, kl_BT: Tensor, mask_BT: Tensor, *, coef: float) -> Tensor:
    """The penalty as a bonus."""
    return shape_rewards(scores_B, kl_BT, mask_BT, coef=-coef)


UNSEEN = (
    Case(
        name="critic climbs its loss",
        cause="critic",
        wrap=lambda roles: replace(roles, critic=ClimbingCritic(roles.critic)),
    ),
    Case(
        name="log-probs one token late",
        cause="mismatch",
        wrap=lambda roles: replace(roles, policy=LateLogprobs(roles.policy)),
    ),
    Case(
        name="another reference",
        cause="mismatch",
        wrap=lambda roles: replace(roles, reference=OtherReference(roles.reference)),
    ),
    Case(
        name="scores at random",
        cause="unrelated_scores",
        wrap=lambda roles: replace(roles, reward=RandomScores(roles.reward)),
    ),
    Case(name="reward pays for brevity", cause="length", settings={"reward": function_reward("shorter")}),
    Case(name="actor.lr / 1e6", cause="does_not_learn", settings={"actor": {"lr": 4e-10}}),
    Case(name="twenty passes over each batch", cause="steps_too_large", settings={"epochs": 20, "iterations": 20}),
    Case(name="sampled among two tokens", cause="mismatch", sample=among_two),
    Case(
        name="advantages of other rows",
        cause="unrelated_scores",
        wrap=lambda roles: replace(roles, policy=AdvantagesOfOtherRows(roles.policy)),
    ),
    Case(
        name="reward reads four tokens",
        cause="misread",
        wrap=lambda roles: replace(roles, reward=FirstTokensOnly(roles.reward)),
    ),
    Case(name="one prompt a batch", cause="same_prompts", ask=one_prompt_a_batch),
    Case(
        name="scores of the batch before",
        cause="unrelated_scores",
        wrap=lambda roles: replace(roles, reward=LateScores(roles.reward)),
    ),
    Case(name="the KL penalty as a bonus", cause="kl_sign", shape=paid_for_distance),
    Case(name="reward pays for a phrase", cause="hacking", settings={"reward": function_reward("polite")}),
    Case(
        name="constant scores from step 13 on",
        cause="no_signal",
        wrap=lambda roles: replace(roles, reward=ConstantFrom(roles.reward)),
    ),
)
