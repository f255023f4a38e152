"""Methods without a critic on a bandit with a known optimum: E[r] - beta KL is largest at pi* ~ pi_ref e^(r / beta).

With the KL in the reward (k1) and centred advantages the gradient is that of this objective, up to a factor: pi* must
be reached. GRPO's k3 in the loss is another divergence, and GSPO, CISPO, DAPO and Dr. GRPO have no KL: those must earn
more, that is all. So must ReMax. Its gradient is that of the objective too, as is shown with every answer counted; but
at pi* its baseline leaves a constant, and so noise, which more answers even out as 1 / sqrt(n): others have none there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.algorithms.group.method import Credit
from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import Rollouts
from kedge.data.examples import Message, Origin, Prompt
from kedge.models.loading.tiny import tiny_model, tiny_tokenizer
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.separate import separate
from kedge.models.settings import LoraSettings
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.runtime.local import Clock, LocalRuntime
from kedge.stages.group.dynamic_sampling import GroupSampler
from kedge.stages.group.settings import find_method
from kedge.stages.rl.prompts import PromptDataset, RolloutStream
from kedge.trainers.group import GroupConfig, GroupRoles, iteration
from kedge.trainers.settings import CorrectionSettings, KLSettings
from kedge.trainers.shared import RewardShaper, kl_controller

PROMPT, OTHER, BETA, ROWS, STEPS = [72, 105], [81, 40], 0.5, 256, 240


class Payoffs:
    """One number a token: beta times what it takes to answer PROMPT as the model answers OTHER, so that the optimum is
    a distribution that the model can say."""

    def __init__(self, start_V: Tensor, other_V: Tensor) -> None:
        self.payoff_V = BETA * (other_V - start_V)

    def score(self, rollouts: Rollouts) -> Tensor:
        return self.payoff_V[rollouts.tokens_BT[rollouts.response_mask_BT]]


@torch.no_grad()
def answers_of(held: RoleSet, prompt: list[int] = PROMPT) -> Tensor:
    """Log-probabilities of the first token of an answer."""
    return held.model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)


def held_in(folder: Path, *, steps: int) -> RoleSet:
    """A tiny model whose answers are far from uniform and differ from prompt to prompt."""
    model = tiny_model(seed=1, hidden=32, layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12.0)  # and so the head, which is tied to it
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return separate(
        RoleSpec(
            base=str(folder),
            reward=None,
            objective=None,
            critic_from_reward=False,
            device="cpu",
            dtype="float32",
            lora=LoraSettings(),
            trunk_layers=None,
            actor=OptimiserSettings(lr=3e-3, eps=1e-5, schedule="linear", warmup=0.0),
            critic=None,
            actor_steps=steps,
            critic_steps=0,
            temperature=1.0,
            rows=ROWS,
            recompute=False,
            ema=None,
            imitation=None,
            seed=0,
        )
    )


def sampler_of(held: RoleSet, reward: Payoffs, *, answers: int, lag: int = 0) -> GroupSampler:
    """One prompt, answered ROWS times an iteration: as one group, or by groups of one."""

    def generator(**how: Any) -> LocalGenerator:
        sampling = SamplingSettings(max_new_tokens=1, **how)
        return LocalGenerator(held.model, sampling, stop_ids=[258], pad=256, max_rows=ROWS)

    prompt = Prompt(prompt=(Message("user", "Hi"),), origin=Origin("here", 1))
    book = PromptDataset(prompts=[prompt], tokens=[PROMPT], batch=ROWS // answers, answers=answers, seed=0)
    greedy, own = generator(top_k=1), generator()
    ahead = RolloutStream(own, book.prompts_in, lag=lag, seed=0, end=STEPS) if lag else None
    return GroupSampler(book, own, reward, greedy=greedy, max_rounds=None, seed=0, clock=Clock(), ahead=ahead)


def learn(
    held: RoleSet, reward: Payoffs, method: str, *, kl: dict[str, Any], iterations: int, minibatches: int, lag: int = 0
) -> None:
    chosen = find_method(method)
    cfg = GroupConfig(
        method=chosen,
        method_settings=chosen.settings(),
        kl=KLSettings.model_validate({**chosen.traits.kl, **kl}),
        minibatches=minibatches,
        correct=CorrectionSettings() if lag else None,
        max_new_tokens=1,
    )
    sampler = sampler_of(held, reward, answers=ROWS if chosen.traits.needs_groups else 1, lag=lag)
    roles = GroupRoles(policy=held.policy, reference=held.reference)
    kl_coef, shaper, runtime = kl_controller(cfg.kl), RewardShaper(), LocalRuntime(Clock())
    for number in range(iterations):
        iteration(sampler.sample(number), roles, cfg, kl_coef, shaper, runtime, seed=number)


IN_REWARD = {"where": "reward", "kind": "k1", "start": BETA}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lag"),
    [("rloo", 0), ("reinforce", 0), ("reinforce++", 0), ("dr_grpo", 0), ("rloo", 2), ("dr_grpo", 2)],
)
def test_with_the_kl_in_the_reward_the_optimum_is_reached(method: str, lag: int, tmp_path: Path) -> None:
    held = held_in(tmp_path / "model", steps=STEPS)
    start_V = answers_of(held)
    reward = Payoffs(start_V, answers_of(held, OTHER))
    best_V = (start_V + reward.payoff_V / BETA).softmax(-1)

    def distance(log_V: Tensor) -> float:
        return 0.5 * (log_V.exp() - best_V).abs().sum().item()

    learn(held, reward, method, kl=IN_REWARD, iterations=STEPS, minibatches=1, lag=lag)
    assert distance(start_V) > 0.5
    assert distance(answers_of(held)) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "remax", "gspo", "cispo", "dapo"])
def test_as_published_it_earns_more(method: str, tmp_path: Path) -> None:
    held = held_in(tmp_path / "model", steps=80)
    minibatches = 1 if find_method(method).traits.is_on_policy else 4
    start_V = answers_of(held)
    reward = Payoffs(start_V, answers_of(held, OTHER))
    learn(held, reward, method, kl={}, iterations=80 // minibatches, minibatches=minibatches)

    def earned(log_V: Tensor) -> float:
        return (log_V.exp() * reward.payoff_V).sum().item()

    best_V = (start_V + reward.payoff_V / BETA).log_softmax(-1)
    # at least half of what pi* earns above the start
    assert earned(answers_of(held)) - earned(start_V) > 0.5 * (earned(best_V) - earned(start_V)) > 0.1


# Every answer counted: four arms, of which a batch has each one once

BEFORE_A, PAYOFF_A = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.3, -0.2, 1.0, 0.6])
BEST_A = torch.tensor([0.266026, 0.073399, 0.539393, 0.121182])
"""BEFORE e^(PAYOFF / 0.5) = 0.72885, 0.20110, 1.47781, 0.33201; they sum to Z = 2.73977."""
AT_BEST = 0.50394 - 1.0
"""beta ln Z, which each answer of pi* is worth, less the score of its likeliest answer."""


def advantages_of(method: str, policy_A: Tensor) -> Tensor:
    """What each arm is worth to a method, where the KL (k1) is paid in the reward."""
    arms = len(policy_A)
    told_BT = torch.ones(arms, 1, dtype=torch.bool)
    rollouts = Rollouts(
        tokens_BT=torch.arange(arms)[:, None],
        attention_mask_BT=told_BT,
        response_mask_BT=told_BT,
        behaviour_logp_BT=policy_A.log()[:, None],
        group_B=torch.zeros(arms, dtype=torch.long),
        finished_B=told_BT[:, 0],
        version=0,
    )
    credit = Credit(
        rollouts=rollouts,
        scores_B=PAYOFF_A,
        greedy_B=PAYOFF_A[policy_A.argmax()].expand(arms),
        penalty_BT=BETA * (policy_A / BEFORE_A).log()[:, None],
        baseline=0.0,
    )
    chosen = find_method(method)
    return chosen.advantages(chosen.settings(), credit)[:, 0]


def test_at_the_optimum_remax_is_left_with_a_constant_and_rloo_with_nothing() -> None:
    """So a sample of ReMax's gradient at pi* is AT_BEST grad log p: its mean is 0, its variance is not."""
    torch.testing.assert_close(advantages_of("remax", BEST_A), torch.full((4,), AT_BEST), rtol=1e-4, atol=0)
    torch.testing.assert_close(advantages_of("rloo", BEST_A), torch.zeros(4), rtol=0, atol=1e-4)


def test_with_every_answer_counted_remax_follows_the_objective_to_its_optimum() -> None:
    logits_A = BEFORE_A.log().requires_grad_()
    optimiser = torch.optim.SGD([logits_A], lr=2.0)
    for step in range(300):
        policy_A = logits_A.softmax(-1)
        objective = (policy_A * (PAYOFF_A - BETA * (policy_A / BEFORE_A).log())).sum()
        (exact_A,) = torch.autograd.grad(objective, logits_A, retain_graph=True)
        optimiser.zero_grad()
        (policy_A.detach() * advantages_of("remax", policy_A.detach()) * policy_A.log()).sum().neg().backward()
        assert logits_A.grad is not None
        if step < 5:  # where it is large enough to compare
            torch.testing.assert_close(-logits_A.grad, exact_A, rtol=1e-3, atol=1e-5)
        optimiser.step()
    torch.testing.assert_close(logits_A.softmax(-1).detach(), BEST_A, rtol=1e-3, atol=0)
