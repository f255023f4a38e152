"""PPO on a bandit whose optimum is known: E[r] - beta KL is largest at pi* = pi_ref e^(r / beta) / Z."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import Rollouts, repeated
from kedge.models.loading.tiny import tiny_model, tiny_tokenizer
from kedge.models.roles.actor_critic import RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.roles.lora import lora
from kedge.models.roles.separate import separate
from kedge.models.roles.trunk import trunk
from kedge.models.settings import LoraSettings
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings
from kedge.runtime.local import Clock, LocalRuntime
from kedge.stages.rl.prompts import RolloutStream
from kedge.trainers.ppo import PPORoles, iteration
from kedge.trainers.settings import CorrectionSettings, CreditSettings, KLSettings, PPOConfig
from kedge.trainers.shared import RewardShaper, kl_controller

PROMPT, OTHER, BETA = [72, 105], [81, 40], 0.5
STEPS, ANSWERS = 240, 256


class Payoffs:
    """One number a token: beta times what it takes to answer PROMPT as the model answers OTHER.

    The optimum is then a distribution that the model can say exactly, whichever of its weights may learn.
    """

    def __init__(self, start_V: Tensor, other_V: Tensor) -> None:
        self.payoff_V = BETA * (other_V - start_V)

    def score(self, rollouts: Rollouts) -> Tensor:
        return self.payoff_V[rollouts.tokens_BT[rollouts.response_mask_BT]]


@torch.no_grad()
def answers_of(held: RoleSet, prompt: Sequence[int] = PROMPT) -> Tensor:
    model = held.model
    return model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)


def opinionated(folder: Path) -> Path:
    """A tiny model whose answers are far from uniform and differ from prompt to prompt."""
    model = tiny_model(seed=1, hidden=32, layers=2)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(12.0)  # and so the head, which is tied to it
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "lr", "lag"),
    [(separate, 3e-3, 0), (lora, 1e-2, 0), (trunk, 3e-3, 0), (separate, 3e-3, 2), (lora, 1e-2, 2)],
)
def test_ppo_reaches_the_optimum_of_reward_minus_kl(
    hold: Callable[[RoleSpec], RoleSet], lr: float, lag: int, tmp_path: Path
) -> None:
    """Also with answers that are two versions old. What their correction is worth: `test_lag_arithmetic`."""
    optimiser = OptimiserSettings(lr=lr, eps=1e-5, schedule="linear", warmup=0.0)
    held = hold(
        RoleSpec(
            base=str(opinionated(tmp_path / "model")),
            reward=None,
            objective=None,
            critic_from_reward=False,
            device="cpu",
            dtype="float32",
            lora=LoraSettings(rank=16),
            trunk_layers=1,
            actor=optimiser,
            critic=optimiser.model_copy(update={"lr": 1e-2}),
            actor_steps=STEPS,
            critic_steps=STEPS,
            temperature=1.0,
            rows=ANSWERS,
            recompute=False,
            ema=None,
            imitation=None,
            seed=0,
        )
    )
    start_V = answers_of(held)
    reward = Payoffs(start_V, answers_of(held, OTHER))
    best_V = (start_V + reward.payoff_V / BETA).softmax(-1)
    cfg = PPOConfig(
        kl=KLSettings(start=BETA),
        epochs=2,
        minibatches=2,
        credit=CreditSettings(lam=1.0),
        correct=CorrectionSettings() if lag else None,
        max_new_tokens=1,
    )
    generator = LocalGenerator(
        held.model, SamplingSettings(max_new_tokens=1), stop_ids=[258], pad=256, max_rows=ANSWERS
    )
    iterations = STEPS // 4
    stream = RolloutStream(
        generator, lambda number: repeated([PROMPT], ids=[number], answers=ANSWERS), lag=lag, seed=0, end=iterations
    )
    roles = PPORoles(policy=held.policy, critic=held.critic, reference=held.reference, reward=reward)
    kl_coef, shaper, runtime = kl_controller(cfg.kl), RewardShaper(), LocalRuntime(Clock())
    for number in range(iterations):
        iteration(stream.take(number), roles, cfg, kl_coef, shaper, runtime, number=number, seed=number)

    def distance(log_V: Tensor) -> float:
        return 0.5 * (log_V.exp() - best_V).abs().sum().item()

    assert distance(start_V) > 0.5
    assert distance(answers_of(held)) < 0.05
