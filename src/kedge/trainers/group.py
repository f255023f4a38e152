"""Critic-free RL (GRPO, RLOO and their relatives): one iteration. The loop around it is `kedge.stages.group.train`.

PPO's without the critic: answers were scored as they were sampled, because dynamic sampling chooses prompts by their
scores, and the method says how scores become advantages. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kedge.algorithms import estimate
from kedge.algorithms.group.method import Credit, GroupMethod, GroupTraits
from kedge.core.loss import ItemLoss, masked
from kedge.core.protocols import Metrics, PolicyRole, ReferenceRole, Runtime
from kedge.core.records import Experience, num_rows, take
from kedge.core.settings import Section
from kedge.trainers.correction import correction_metrics, near_policy, weighted
from kedge.trainers.settings import CorrectionSettings, KLSettings, ScoreSettings
from kedge.trainers.shared import (
    EvaluatedRollouts,
    KLController,
    RewardShaper,
    ScoredRollouts,
    add_kl_and_entropy,
    check_finite,
    check_kl_limit,
    drop_unscored,
    mean_over_steps,
    minibatches,
    prefixed,
    rollout_metrics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """All of it: what `iteration` reads."""

    method: GroupMethod
    method_settings: Section
    """An instance of `method.settings`."""
    kl: KLSettings = field(default_factory=KLSettings)
    scores: ScoreSettings = field(default_factory=ScoreSettings)
    entropy: float = 0.0
    """Bonus for the entropy of the policy."""
    stop_at_kl: float | None = None
    """End the passes over a batch when a step's `approx_kl` passes this."""
    correct: CorrectionSettings | None = None
    """Weights for answers that other weights sampled; None counts all answers alike."""
    epochs: int = 1
    """Passes over the responses of one iteration."""
    minibatches: int = 1
    """Optimiser steps in one pass."""
    max_new_tokens: int = 256
    """The longest answer: what the overlong penalty is about, and the constant that Dr. GRPO divides by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoles:
    policy: PolicyRole
    reference: ReferenceRole


def iteration(
    scored: ScoredRollouts,
    roles: GroupRoles,
    cfg: GroupConfig,
    kl: KLController,
    shaper: RewardShaper,
    runtime: Runtime,
    *,
    seed: int,
    age: int | None = None,
) -> tuple[EvaluatedRollouts, Metrics]:
    """`age` is how many versions of the policy old the answers are; None where they are always new."""
    # 1. evaluate: two independent questions about the same text
    old_logp_BT, ref_logp_BT = runtime.gather(
        lambda: roles.policy.logprobs(scored.rollouts),
        lambda: roles.reference.logprobs(scored.rollouts),
    )
    everything = EvaluatedRollouts(
        rollouts=scored.rollouts,
        scores_B=scored.known_B,
        old_logp_BT=old_logp_BT,
        ref_logp_BT=ref_logp_BT,
        values_BT=torch.zeros_like(old_logp_BT),
    )
    evaluated = weighted(check_finite(drop_unscored(everything)), cfg.correct)
    check_kl_limit(evaluated, cfg.kl)
    is_near_B = near_policy(evaluated, cfg.correct)

    # 2. assign credit
    method, coef = cfg.method, kl.coef
    credit = credit_of(scored, evaluated, cfg, shaper, coef=coef)
    experience = Experience(
        rollouts=evaluated.rollouts,
        old_logp_BT=evaluated.old_logp_BT,
        ref_logp_BT=evaluated.ref_logp_BT,
        advantages_BT=method.advantages(cfg.method_settings, credit),
        weight_BT=evaluated.weight_BT,
    )

    # 3. learn
    if is_near_B is not None:
        experience = take(experience, is_near_B)
    steps = list[Metrics]()
    for rows in minibatches(num_rows(experience), cfg, seed=seed):
        policy = roles.policy.update(take(experience, rows), partial(actor_loss, cfg=cfg, coef=coef), per=method.per)
        steps.append(prefixed("policy", policy))
        if cfg.stop_at_kl is not None and policy["approx_kl"] > cfg.stop_at_kl:
            break

    metrics = rollout_metrics(evaluated, num_sampled=num_rows(everything), age=age)
    shaper.returns.update(credit.returns_B)
    kl.update(metrics["kl/mean"], num_rows(evaluated))
    about = group_metrics(scored, method.traits) | correction_metrics(evaluated, is_near_B, cfg.correct)
    return evaluated, metrics | about | {"kl/coef": coef} | mean_over_steps(steps)


def credit_of(
    scored: ScoredRollouts, evaluated: EvaluatedRollouts, cfg: GroupConfig, shaper: RewardShaper, *, coef: float
) -> Credit:
    """What the method makes advantages from: shaped scores, and the KL penalty where it is part of the reward."""
    scores_B = shaper.shape_scores(evaluated, cfg)
    greedy = take(scored.greedy, ~scored.known_B.isnan())
    kl_BT = estimate(evaluated.old_logp_BT, evaluated.ref_logp_BT, kind=cfg.kl.kind)
    credit = Credit(
        rollouts=evaluated.rollouts,
        scores_B=scores_B,
        greedy_B=shaper.shape(greedy.scores_B, greedy.finished_B, greedy.length_B, cfg),
        penalty_BT=(coef if cfg.kl.where == "reward" else 0.0) * masked(kl_BT, evaluated.rollouts.response_mask_BT),
        baseline=shaper.returns.mean,
    )
    # Before the first batch there is no mean return yet but that of the batch itself.
    return credit if shaper.returns.count else replace(credit, baseline=credit.returns_B.mean().item())


def actor_loss(
    logp_BT: Tensor, entropy_BT: Tensor, experience: Experience, *, cfg: GroupConfig, coef: float
) -> ItemLoss:
    """The method's own loss, the entropy bonus, and the KL penalty where it is part of the loss."""
    item = add_kl_and_entropy(
        cfg.method.loss(cfg.method_settings, logp_BT, experience),
        logp_BT,
        entropy_BT,
        experience,
        kl=cfg.kl,
        coef=coef,
        entropy=cfg.entropy,
    )
    return replace(item, loss_BT=item.loss_BT / cfg.max_new_tokens) if cfg.method.is_per_budget else item


def group_metrics(scored: ScoredRollouts, traits: GroupTraits) -> dict[str, float]:
    """`reward/mean` is over all sampled answers: those that are learnt from are chosen by their scores."""
    equal = {"group/zero_variance": scored.zero_variance} if traits.needs_groups else {}
    return {"reward/mean": scored.mean_score, "group/rounds": float(scored.rounds), **equal}
