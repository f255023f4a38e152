"""PPO with four roles: one iteration. The loop around it is `kedge.stages.ppo.train`.

Left out: where rollouts come from, logging, checkpoints, what follows on a broken KL budget.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from kedge.algorithms import estimate, gae, policy_loss, scale, shape_rewards, value_loss, whiten
from kedge.core.loss import ItemLoss, masked
from kedge.core.protocols import CriticRole, Metrics, PolicyRole, ReferenceRole, RewardSource, Runtime
from kedge.core.records import Experience, Rollouts, ValueTargets, num_rows, take
from kedge.trainers.correction import correction_metrics, near_policy, weighted
from kedge.trainers.settings import PolicyLossSettings, PPOConfig
from kedge.trainers.shared import (
    EvaluatedRollouts,
    KLController,
    RewardShaper,
    add_kl_and_entropy,
    check_finite,
    check_kl_limit,
    drop_unscored,
    explained_variance,
    mean_over_steps,
    minibatches,
    prefixed,
    rollout_metrics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPORoles:
    policy: PolicyRole
    critic: CriticRole
    reference: ReferenceRole
    reward: RewardSource


def iteration(
    rollouts: Rollouts,
    roles: PPORoles,
    cfg: PPOConfig,
    kl: KLController,
    shaper: RewardShaper,
    runtime: Runtime,
    *,
    number: int,
    seed: int,
    age: int | None = None,
) -> tuple[EvaluatedRollouts, Metrics]:
    """`age` is how many versions of the policy old the rollouts are; None where they are always new."""
    # 1. evaluate: four independent questions about the same text
    scores_B, old_logp_BT, ref_logp_BT, values_BT = runtime.gather(
        lambda: roles.reward.score(rollouts),
        lambda: old_logprobs(rollouts, roles.policy, cfg.policy),
        lambda: roles.reference.logprobs(rollouts),
        lambda: roles.critic.values(rollouts),
    )
    everything = EvaluatedRollouts(
        rollouts=rollouts, scores_B=scores_B, old_logp_BT=old_logp_BT, ref_logp_BT=ref_logp_BT, values_BT=values_BT
    )
    evaluated = weighted(check_finite(drop_unscored(everything)), cfg.correct)
    check_kl_limit(evaluated, cfg.kl)
    is_near_B = near_policy(evaluated, cfg.correct)

    # 2. assign credit
    coef = kl.coef
    experience, targets = credit(evaluated, cfg, shaper, coef=coef)
    explained = explained_variance(targets)
    if is_near_B is not None:
        experience, targets = take(experience, is_near_B), take(targets, is_near_B)

    # 3. learn
    steps = list[Metrics]()
    for rows in minibatches(num_rows(experience), cfg, seed=seed):
        learning = [partial(roles.critic.update, take(targets, rows), partial(critic_loss, cfg=cfg), per=cfg.value.per)]
        if number >= cfg.critic_warmup:
            loss = partial(actor_loss, cfg=cfg, coef=coef)
            learning.append(partial(roles.policy.update, take(experience, rows), loss, per=cfg.policy.per))
        critic, *policy = runtime.gather(*learning, phase="update")
        steps += [prefixed("value", critic), *(prefixed("policy", learnt) for learnt in policy)]
        if policy and cfg.policy.stop_at_kl is not None and policy[0]["approx_kl"] > cfg.policy.stop_at_kl:
            break

    is_recomputed = cfg.policy.old_logprobs == "recomputed"
    metrics = rollout_metrics(evaluated, num_sampled=num_rows(everything), is_recomputed=is_recomputed, age=age)
    kl.update(metrics["kl/mean"], num_rows(evaluated))
    corrected = correction_metrics(evaluated, is_near_B, cfg.correct)
    return evaluated, metrics | corrected | explained | {"kl/coef": coef} | mean_over_steps(steps)


def credit(
    evaluated: EvaluatedRollouts, cfg: PPOConfig, shaper: RewardShaper, *, coef: float
) -> tuple[Experience, ValueTargets]:
    """Shaped rewards, the KL penalty where it is part of them, and what generalised advantage estimation makes of them
    for the policy and for the critic."""
    mask_BT = evaluated.rollouts.response_mask_BT
    kl_BT = estimate(evaluated.old_logp_BT, evaluated.ref_logp_BT, kind=cfg.kl.kind)
    rewards_BT = shape_rewards(
        shaper.shape_scores(evaluated, cfg), kl_BT, mask_BT, coef=coef if cfg.kl.where == "reward" else 0.0
    )
    if cfg.credit.scale_rewards:
        rewards_BT = scale(rewards_BT, mask_BT)
    advantages_BT, returns_BT = gae(
        rewards_BT, evaluated.values_BT, mask_BT, gamma=cfg.credit.gamma, lam=cfg.credit.lam
    )
    targets = ValueTargets(rollouts=evaluated.rollouts, old_values_BT=evaluated.values_BT, returns_BT=returns_BT)
    experience = Experience(
        rollouts=evaluated.rollouts,
        old_logp_BT=evaluated.old_logp_BT,
        ref_logp_BT=evaluated.ref_logp_BT,
        advantages_BT=whiten(advantages_BT, mask_BT) if cfg.credit.whiten_advantages else advantages_BT,
        weight_BT=evaluated.weight_BT,
    )
    return experience, targets


def old_logprobs(rollouts: Rollouts, policy: PolicyRole, settings: PolicyLossSettings) -> Tensor:
    """`logp_BT` of the policy before its update, on the response, 0 elsewhere."""
    if settings.old_logprobs == "sampled":
        return masked(rollouts.behaviour_logp_BT, rollouts.response_mask_BT)
    return policy.logprobs(rollouts)


def actor_loss(logp_BT: Tensor, entropy_BT: Tensor, experience: Experience, *, cfg: PPOConfig, coef: float) -> ItemLoss:
    """The clipped surrogate, the entropy bonus, and the KL penalty where it is part of the loss."""
    item = policy_loss(
        logp_BT,
        experience.old_logp_BT,
        experience.advantages_BT,
        clip=cfg.policy.clip,
        clip_high=cfg.policy.clip_high,
        dual_clip=cfg.policy.dual_clip,
    )
    return add_kl_and_entropy(item, logp_BT, entropy_BT, experience, kl=cfg.kl, coef=coef, entropy=cfg.policy.entropy)


def critic_loss(values_BT: Tensor, targets: ValueTargets, *, cfg: PPOConfig) -> ItemLoss:
    """The clipped squared error of the values."""
    return value_loss(values_BT, targets.old_values_BT, targets.returns_BT, clip=cfg.value.clip)
