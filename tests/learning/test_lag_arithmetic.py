"""What the correction of stale answers is worth, with every answer counted so that nothing is noise.

A bandit of one token, a policy of free logits, steps of plain gradient on PPO's loss. Where the sampler is the policy
of two versions before, corrected steps are those that the policy's own answers would lead to, and uncorrected ones are
not. Nor are those of an engine that samples more sharply than the policy does, and they end further from the optimum.

What a lag does not change is where learning ends: at pi* = pi_ref e^(r / beta) / Z every token has the same return, so
that no answer, whoever sampled it, moves the policy. So both reach the optimum of `test_ppo_oracle` under a lag: with a
lag of 2 they are equally near, 0.007 to 0.009 in total variation over three seeds, with and without the correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kedge.core.records import Experience, Rollouts
from kedge.trainers.correction import weighted
from kedge.trainers.ppo import actor_loss
from kedge.trainers.settings import CorrectionSettings, PPOConfig
from kedge.trainers.shared import EvaluatedRollouts

VOCABULARY, BETA, RATE, STEPS = 20, 0.5, 0.3, 200
UNCAPPED = CorrectionSettings(cap=1e9)
Sampler = Callable[[Sequence[Tensor]], Tensor]
"""From the logits of all versions so far to the log-probs of whoever samples."""


def ahead(lag: int) -> Sampler:
    return lambda versions: versions[max(0, len(versions) - 1 - lag)].log_softmax(0)


def sharp(temperature: float) -> Sampler:
    """An engine that samples at another temperature than the policy is asked at."""
    return lambda versions: (versions[-1] / temperature).log_softmax(0)


def every_answer(sampler_V: Tensor) -> Rollouts:
    """A row for each token behind a prompt of one."""
    count = len(sampler_V)
    yes_BT = torch.ones(count, 2, dtype=torch.bool)
    return Rollouts(
        tokens_BT=torch.stack([torch.zeros(count), torch.arange(count)], dim=1).long(),
        attention_mask_BT=yes_BT,
        response_mask_BT=yes_BT & torch.tensor([False, True]),
        behaviour_logp_BT=on_answers(sampler_V),
        group_B=torch.arange(count),
        finished_B=yes_BT[:, 0],
        version=0,
    )


def on_answers(values_V: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(values_V), values_V], dim=1)


def problem() -> tuple[Tensor, Tensor]:
    """Log-probs of the reference, and payoffs."""
    rng = torch.Generator().manual_seed(0)
    ref_V, payoff_V = torch.randn(2, VOCABULARY, dtype=torch.float64, generator=rng)
    return (1.5 * ref_V).log_softmax(0), payoff_V


def learn(sampler: Sampler, correct: CorrectionSettings | None) -> list[Tensor]:
    """The probabilities of the policy after each step."""
    (ref_V, payoff_V), cfg = problem(), PPOConfig(correct=correct)
    versions = [ref_V.clone()]
    for _ in range(STEPS):
        logits_V = versions[-1].clone().requires_grad_()
        logp_V, sampler_V = logits_V.log_softmax(0), sampler(versions)
        return_V = payoff_V - BETA * (logp_V.detach() - ref_V)
        share_V = sampler_V.exp()
        evaluated = EvaluatedRollouts(
            rollouts=every_answer(sampler_V),
            scores_B=payoff_V,
            old_logp_BT=on_answers(logp_V.detach()),
            ref_logp_BT=on_answers(ref_V),
            values_BT=on_answers(torch.zeros_like(ref_V)),
        )
        experience = Experience(
            rollouts=evaluated.rollouts,
            old_logp_BT=evaluated.old_logp_BT,
            ref_logp_BT=evaluated.ref_logp_BT,
            advantages_BT=on_answers(return_V - (share_V * return_V).sum()),
            weight_BT=weighted(evaluated, correct).weight_BT,
        )
        nothing_BT = torch.zeros(VOCABULARY, 2, dtype=torch.float64)
        item = actor_loss(on_answers(logp_V), nothing_BT, experience, cfg=cfg, coef=BETA)
        (gradient_V,) = torch.autograd.grad((share_V * item.loss_BT[:, 1]).sum(), logits_V)
        versions.append((logits_V - RATE * gradient_V).detach())
    return [logits_V.softmax(0) for logits_V in versions]


def total_variation(one_V: Tensor, other_V: Tensor) -> float:
    return 0.5 * (one_V - other_V).abs().sum().item()


def furthest(path: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(map(total_variation, path, other))


def test_corrected_answers_of_older_weights_teach_what_the_policys_own_would() -> None:
    own = learn(ahead(0), None)
    for lag in (1, 2):
        assert furthest(learn(ahead(lag), CorrectionSettings()), own) < 1e-12  # no ratio comes to the cap
        assert furthest(learn(ahead(lag), None), own) > 5e-3 * lag


def test_answers_of_a_sharper_engine_lead_astray_unless_they_are_corrected() -> None:
    ref_V, payoff_V = problem()
    best_V = (ref_V + payoff_V / BETA).softmax(0)

    def distance(sampler: Sampler, correct: CorrectionSettings | None) -> float:
        return total_variation(learn(sampler, correct)[-1], best_V)

    own, engine = distance(ahead(0), None), sharp(0.7)
    assert math.isclose(distance(engine, UNCAPPED), own, rel_tol=1e-9)
    assert own < distance(engine, CorrectionSettings()) < 0.95 * distance(engine, None)
