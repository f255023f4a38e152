"""Critic-free RL (GRPO, RLOO and their relatives): one iteration. The loop around it is `loop.train`.

The same as PPO's but for the critic: answers were scored as they were drawn, because some methods draw again by their
scores, and `group_methods` says how scores become advantages. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kedge.algorithms import estimate
from kedge.core.loss import ItemLoss, masked
from kedge.core.protocols import Metrics, PolicyRole, ReferenceRole, Runtime
from kedge.core.records import Experience, num_rows, take
from kedge.trainers.controllers import Steering, hold_to_budget
from kedge.trainers.evaluated import Judged, Scored, check_finite, with_scores
from kedge.trainers.group_methods import METHODS, Credit
from kedge.trainers.group_settings import TRAITS, GroupConfig, Traits
from kedge.trainers.loop import minibatches
from kedge.trainers.metrics import facts_of, mean_of, prefixed
from kedge.trainers.terms import add_kl_and_entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoles:
    policy: PolicyRole
    reference: ReferenceRole


def iteration(
    scored: Scored,
    roles: GroupRoles,
    cfg: GroupConfig,
    steering: Steering,
    runtime: Runtime,
    *,
    seed: int,
) -> tuple[Judged, Metrics]:
    # 1. judge: two independent questions about the same text
    old_logp_BT, ref_logp_BT = runtime.gather(
        lambda: roles.policy.logprobs(scored.rollouts),
        lambda: roles.reference.logprobs(scored.rollouts),
    )
    asked = Judged(
        rollouts=scored.rollouts,
        scores_B=scored.known_B,
        old_logp_BT=old_logp_BT,
        ref_logp_BT=ref_logp_BT,
        values_BT=torch.zeros_like(old_logp_BT),
    )
    judged = check_finite(with_scores(asked))
    hold_to_budget(judged, cfg.kl)

    # 2. assign credit
    method, coef = METHODS[cfg.method.kind], steering.kl.coef
    credit = credit_of(scored, judged, cfg, steering)
    experience = Experience(
        rollouts=judged.rollouts,
        old_logp_BT=judged.old_logp_BT,
        ref_logp_BT=judged.ref_logp_BT,
        advantages_BT=method.advantages(cfg.method, credit),
    )

    # 3. learn
    steps = list[Metrics]()
    for rows in minibatches(num_rows(experience), cfg, seed=seed):
        policy = roles.policy.update(take(experience, rows), partial(actor_loss, cfg=cfg, coef=coef), per=method.per)
        steps.append(prefixed("policy", policy))
        if cfg.stop_at_kl is not None and policy["approx_kl"] > cfg.stop_at_kl:
            break

    facts = facts_of(asked, judged) | group_facts(scored, TRAITS[cfg.method.kind]) | {"kl/coef": coef}
    steering.returns.update(credit.returns_B)
    steering.note(facts["kl/mean"], num_rows(judged))
    return judged, facts | mean_of(steps)


def credit_of(scored: Scored, judged: Judged, cfg: GroupConfig, steering: Steering) -> Credit:
    """What the method makes advantages from: shaped scores, and the KL where it is paid in the reward."""
    scores_B = steering.shaped(judged, cfg)
    greedy = take(scored.greedy, ~scored.known_B.isnan())
    coef = steering.kl.coef if cfg.kl.where == "reward" else 0.0
    kl_BT = estimate(judged.old_logp_BT, judged.ref_logp_BT, kind=cfg.kl.kind)
    credit = Credit(
        rollouts=judged.rollouts,
        scores_B=scores_B,
        greedy_B=steering.shape(greedy.scores_B, greedy.finished_B, greedy.length_B, cfg),
        penalty_BT=coef * masked(kl_BT, judged.rollouts.response_mask_BT),
        baseline=steering.returns.mean,
    )
    # Before the first batch there is nothing to expect but what it earns itself.
    return credit if steering.returns.count else replace(credit, baseline=credit.returns_B.mean().item())


def actor_loss(
    logp_BT: Tensor, entropy_BT: Tensor, experience: Experience, *, cfg: GroupConfig, coef: float
) -> ItemLoss:
    """The policy's loss: the method's own, the entropy bonus, and the KL where it is paid in the loss."""
    method = METHODS[cfg.method.kind]
    item = add_kl_and_entropy(
        method.loss(cfg.method, logp_BT, experience),
        logp_BT,
        entropy_BT,
        experience,
        kl=cfg.kl,
        coef=coef,
        entropy=cfg.entropy,
    )
    return replace(item, loss_BT=item.loss_BT / cfg.max_new_tokens) if method.is_per_budget else item


def group_facts(scored: Scored, traits: Traits) -> dict[str, float]:
    """`reward/mean` is of all answers that were drawn: those that are learnt from are chosen by their scores."""
    equal = {"group/zero_variance": scored.zero_variance} if traits.needs_groups else {}
    return {"reward/mean": scored.mean_score, "group/rounds": float(scored.rounds), **equal}
