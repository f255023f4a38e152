"""The library of faults: what is planted, how, and the cause that a diagnosis should name; and healthy runs beside it.

A fault is a change of settings where a recipe can say it. Where none can, a role, the generator or the reward is
wrapped while the stage runs: the product has no hook for it. Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kedge.core.loss import ItemLoss
from kedge.core.protocols import CriticRole, Metrics, PolicyLoss, PolicyRole, ReferenceRole, RewardSource
from kedge.core.records import Experience, Rollouts, num_rows
from kedge.rollout.generators import GeneratorParts
from kedge.stages.ppo import train as ppo_training
from kedge.stages.rl import run as rl_run
from kedge.stages.rl.prompts import PromptDataset
from kedge.trainers import ppo as ppo_trainer
from kedge.trainers.ppo import PPORoles

Wrap = Callable[[PPORoles], PPORoles]
Sample = Callable[[GeneratorParts], GeneratorParts]
"""From what the generator should be made from to what it is made from."""
Ask = Callable[[PromptDataset], PromptDataset]
"""From the prompts that should be asked to those that are."""
Shape = Callable[..., Tensor]
"""In the place of `shape_rewards`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run. `cause` is the code of the cause that a diagnosis should rank first; empty for a healthy run."""

    name: str
    cause: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    wrap: Wrap | None = None
    sample: Sample | None = None
    ask: Ask | None = None
    shape: Shape | None = None


@contextmanager
def planted(case: Case) -> Generator[None]:
    """A context in which the stage runs with the fault."""
    make_roles, open_generator, read_prompts = ppo_training.PPORoles, rl_run.open_generator, rl_run.read_prompts

    def wrapped_roles(**parts: Any) -> PPORoles:
        roles = make_roles(**parts)
        return case.wrap(roles) if case.wrap else roles

    def wrapped_generator(settings: Any, parts: GeneratorParts) -> Any:
        return open_generator(settings, case.sample(parts) if case.sample else parts)

    def wrapped_prompts(*parts: Any, **how: Any) -> PromptDataset:
        prompts = read_prompts(*parts, **how)
        return case.ask(prompts) if case.ask else prompts

    with (
        patch.object(ppo_training, "PPORoles", wrapped_roles),
        patch.object(rl_run, "open_generator", wrapped_generator),
        patch.object(rl_run, "read_prompts", wrapped_prompts),
        patch.object(ppo_trainer, "shape_rewards", case.shape or ppo_trainer.shape_rewards),
    ):
        yield


@dataclass(frozen=True, slots=True)
class Rescored:
    """A reward source whose scores are changed by `change`."""

    source: RewardSource
    change: Callable[[Tensor], Tensor]

    def score(self, rollouts: Rollouts) -> Tensor:
        return self.change(self.source.score(rollouts))


@dataclass(slots=True)
class InfiniteScores:
    """One infinite score in every third batch."""

    source: RewardSource
    calls: int = 0

    def score(self, rollouts: Rollouts) -> Tensor:
        self.calls += 1
        scores_B = self.source.score(rollouts).clone()
        if self.calls % 3 == 0:
            scores_B[-1] = torch.inf
        return scores_B


@dataclass(frozen=True, slots=True)
class ShiftedReference:
    """A reference that gives each row the log-probs of the row before."""

    role: ReferenceRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self.role.logprobs(rollouts).roll(1, dims=0)


@dataclass(frozen=True, slots=True)
class WrongSign:
    """A policy that learns from advantages of the wrong sign."""

    role: PolicyRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self.role.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, **how: Any) -> Metrics:
        return self.role.update(replace(experience, advantages_BT=-experience.advantages_BT), loss, **how)


@dataclass(frozen=True, slots=True)
class EntropyPenalty:
    """A policy whose entropy bonus has the wrong sign."""

    role: PolicyRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self.role.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, **how: Any) -> Metrics:
        def costly(logp_BT: Tensor, entropy_BT: Tensor, experience: Experience) -> ItemLoss:
            item = loss(logp_BT, entropy_BT, experience)
            return replace(item, loss_BT=item.loss_BT + 5 * entropy_BT)

        return self.role.update(experience, costly, **how)


@dataclass(frozen=True, slots=True)
class ShuffledCritic:
    """A critic that gives each row the values of another one."""

    role: CriticRole

    def values(self, rollouts: Rollouts) -> Tensor:
        rng = torch.Generator().manual_seed(int(rollouts.tokens_BT.sum()))
        order_B = torch.randperm(num_rows(rollouts), generator=rng)
        return self.role.values(rollouts)[order_B] * rollouts.response_mask_BT

    def update(self, targets: Any, loss: Any, **how: Any) -> Metrics:
        return self.role.update(targets, loss, **how)


@dataclass(frozen=True, slots=True)
class FollowingReference:
    """A reference that is the policy itself, as it is now."""

    role: PolicyRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return self.role.logprobs(rollouts)


@dataclass(frozen=True, slots=True)
class MirroredReference:
    """A reference on the other side of the policy, so that every log-ratio has the wrong sign."""

    role: ReferenceRole
    policy: PolicyRole

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        return 2 * self.policy.logprobs(rollouts) - self.role.logprobs(rollouts)


@dataclass(slots=True)
class Saturated:
    """Scores end at a ceiling that nine in ten of the first answers reach."""

    source: RewardSource
    ceiling: Tensor | None = None

    def score(self, rollouts: Rollouts) -> Tensor:
        scores_B = self.source.score(rollouts)
        if self.ceiling is None:
            self.ceiling = scores_B.quantile(0.1)
        return scores_B.minimum(self.ceiling)


@dataclass(frozen=True, slots=True)
class ScoresOfOtherRows:
    """Each answer gets the score of another one of its batch."""

    source: RewardSource

    def score(self, rollouts: Rollouts) -> Tensor:
        rng = torch.Generator().manual_seed(int(rollouts.tokens_BT.sum()))
        return self.source.score(rollouts)[torch.randperm(num_rows(rollouts), generator=rng)]


@dataclass(frozen=True, slots=True)
class OtherVocabulary:
    """A reward model for which the ids of the policy's tokens mean other words."""

    source: RewardSource

    def score(self, rollouts: Rollouts) -> Tensor:
        first, last = 8, int(rollouts.tokens_BT.max())
        ids_V = torch.arange(last + 1)
        ids_V[first:] = ids_V[first:][torch.randperm(last + 1 - first, generator=torch.Generator().manual_seed(1))]
        return self.source.score(replace(rollouts, tokens_BT=ids_V[rollouts.tokens_BT]))


class SamePrompts(PromptDataset):
    """Prompts of which only the first batch is ever asked."""

    def item(self, group: int) -> int:
        return super().item(group % self.batch)


def only_the_first_batch(prompts: PromptDataset) -> PromptDataset:
    parts = {part.name: getattr(prompts, part.name) for part in fields(prompts)}
    return SamePrompts(**parts)


def rescored(change: Callable[[Tensor], Tensor]) -> Wrap:
    return lambda roles: replace(roles, reward=Rescored(roles.reward, change))


def hotter(parts: GeneratorParts) -> GeneratorParts:
    """Samples at another temperature than the trainer uses."""
    return replace(parts, sampling=parts.sampling.model_copy(update={"temperature": 1.4}))


def stale(parts: GeneratorParts) -> GeneratorParts:
    """Samples with the first weights throughout the run."""
    return replace(parts, model=copy.deepcopy(parts.model))


def endless(parts: GeneratorParts) -> GeneratorParts:
    """Stops at another end-of-turn token than the one that the policy has learnt."""
    return replace(parts, stop_ids=frozenset({parts.pad}))


def function_reward(name: str) -> dict[str, str]:
    return {"kind": "function", "path": f"rewards.py:{name}"}


REWARDS = '''
"""Rewards with a fault each."""

from kedge.demo.world import score as true


def longer(answer):
    return 0.2 * len(answer.text.split()) + 0.2 * true(answer)


def fails(answer):
    if len(answer.text) % 3 == 0:
        raise TimeoutError("no answer within 30 s")
    return true(answer)


def constant(answer):
    return 1.0


def shorter(answer):
    return -0.3 * len(answer.text.split()) + 0.2 * true(answer)


def polite(answer):
    return true(answer) + 3.0 * answer.text.lower().count("sorry")
'''

NO_KL_PENALTY = {"kl": {"start": 0.0}, "iterations": 40, "actor": {"lr": 4e-4}}
FAULTS = (
    Case(name="no KL penalty, hackable reward", cause="no_anchor", settings=NO_KL_PENALTY),
    Case(name="reward pays for length", cause="length", settings={"reward": function_reward("longer")}),
    Case(name="actor.lr x 100", cause="steps_too_large", settings={"actor": {"lr": 4e-2}}),
    Case(name="critic.lr x 100", cause="critic", settings={"critic": {"lr": 1e-1}}),
    Case(
        name="critic learns nothing",
        cause="critic",
        settings={"critic": {"lr": 1e-9}, "memory": {"critic_from_reward": False}},
    ),
    Case(
        name="critic of other rows",
        cause="critic",
        wrap=lambda roles: replace(roles, critic=ShuffledCritic(roles.critic)),
    ),
    Case(name="scores x 50", cause="reward_scale", wrap=rescored(lambda scores_B: 50 * scores_B)),
    Case(
        name="entropy bonus of the wrong sign",
        cause="collapse",
        wrap=lambda roles: replace(roles, policy=EntropyPenalty(roles.policy)),
    ),
    Case(
        name="reference log-probs of other rows",
        cause="mismatch",
        wrap=lambda roles: replace(roles, reference=ShiftedReference(roles.reference)),
    ),
    Case(name="generator keeps old weights", cause="mismatch", sample=stale),
    Case(name="sampled at another temperature", cause="mismatch", sample=hotter),
    Case(name="another end-of-turn token", cause="no_ends", sample=endless),
    Case(name="kl.start x 200", cause="does_not_learn", settings={"kl": {"start": 100.0}}),
    Case(
        name="a third of the rows unscored",
        cause="reward_source",
        settings={"reward": function_reward("fails"), "failures": {"max_share": 0.9}},
    ),
    Case(name="reward source that breaks", cause="reward_source", settings={"reward": function_reward("fails")}),
    Case(name="constant reward", cause="no_signal", settings={"reward": function_reward("constant")}),
    Case(
        name="infinite scores",
        cause="reward_source",
        wrap=lambda roles: replace(roles, reward=InfiniteScores(roles.reward)),
    ),
    Case(name="reward of the wrong sign", cause="wrong_sign", wrap=rescored(lambda scores_B: -scores_B)),
    Case(name="labels at random", cause="train.coin", settings={"kind": "reward"}),
    Case(
        name="advantages of the wrong sign",
        cause="wrong_sign",
        wrap=lambda roles: replace(roles, policy=WrongSign(roles.policy)),
    ),
)

TRIED = (
    Case(
        name="reference follows the policy",
        cause="reference_moves",
        wrap=lambda roles: replace(roles, reference=FollowingReference(roles.policy)),
    ),
    Case(
        name="KL of the wrong sign",
        cause="kl_sign",
        wrap=lambda roles: replace(roles, reference=MirroredReference(roles.reference, roles.policy)),
    ),
    Case(
        name="saturated reward",
        cause="saturated",
        wrap=lambda roles: replace(roles, reward=Saturated(roles.reward)),
    ),
    Case(
        name="scores of other rows",
        cause="unrelated_scores",
        wrap=lambda roles: replace(roles, reward=ScoresOfOtherRows(roles.reward)),
    ),
    Case(
        name="reward model with another tokenizer",
        cause="misread",
        wrap=lambda roles: replace(roles, reward=OtherVocabulary(roles.reward)),
    ),
    Case(name="the same prompts in every batch", cause="same_prompts", ask=only_the_first_batch),
    Case(name="end of turn never sampled", cause="no_ends", settings={"sampling": {"min_new_tokens": 60}}),
)
"""Faults that outside trials planted and that were missed or misnamed; the rules were then made to see them."""

GROUP: dict[str, Any] = {"kind": "group", "batch": 8, "answers": 4, "minibatches": 1}
HEALTHY = (
    Case(name="separate, fixed KL"),
    Case(name="separate, adaptive KL", settings={"kl": {"target": 3.0, "horizon": 2000}}),
    Case(name="lora", settings={"roles": "lora", "actor": {"lr": 2e-3}, "critic": {"lr": 3e-3}}),
    Case(name="trunk", settings={"roles": "trunk"}),
    Case(name="grpo", settings={**GROUP, "method": "grpo", "kl": {"start": 0.1}}),
    Case(name="rloo", settings={**GROUP, "method": "rloo"}),
    Case(name="true reward", settings={"reward": {"kind": "function", "path": "gold.py:score"}}),
    Case(name="normalised scores", settings={"scores": {"normalise": "standard"}, "kl": {"start": 0.3}}),
    Case(name="one pass, clipped scores", settings={"epochs": 1, "scores": {"clip": 5.0}}),
    Case(
        name="temperature 0.8, falling rate",
        settings={"sampling": {"temperature": 0.8}, "actor": {"schedule": "linear"}},
    ),
    Case(name="four minibatches, entropy bonus", settings={"minibatches": 4, "loss": {"policy": {"entropy": 0.01}}}),
    Case(name="penalty for length", settings={"scores": {"overlong_buffer": 30, "overlong_penalty": 4.0}}),
)
