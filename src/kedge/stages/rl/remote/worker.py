"""What a process of a group holds of an RL stage: the roles that live there, built from the stage's settings.

Parts are asked by name and verb (`kedge.runtime.worker`); records come on the device, and results go to the CPU.
Shape letters: B sequences.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor

from kedge.core import plugins
from kedge.core.errors import ConfigError
from kedge.core.protocols import Generator, Metrics, Tracker
from kedge.core.records import Prompts, Rollouts
from kedge.core.world import World
from kedge.models.forward.parts import gathered, is_part
from kedge.models.forward.sharding import compute_dtype
from kedge.models.loading.load import load_causal
from kedge.models.roles.actor_critic import Critic, NoCritic, Policy, Reference, RoleSet, published
from kedge.models.roles.build import RoleSpec, prepare
from kedge.models.roles.memory import RoleMemory, of_role, parameters_of
from kedge.models.roles.separate import (
    policy_memory,
    separate_critic,
    separate_policy,
    separate_reference,
)
from kedge.rewards.failures import Reward
from kedge.rollout.generators import close_generator, max_mismatch, with_sampling
from kedge.rollout.settings import SamplingSettings
from kedge.runs.state import capture_rng, restore_rng
from kedge.runtime.worker import Note
from kedge.stages.rl.generator import make_generator
from kedge.stages.rl.looks import PolicySpeaker
from kedge.stages.rl.prompts import PromptDataset, run_prompts
from kedge.stages.rl.reward import TrustedSource
from kedge.stages.rl.roles import CriticSpec, open_run_reward, role_spec
from kedge.stages.rl.settings import RLSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.policy import save_policy
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kedge.runs.folder import Run

SHARING: Final = frozenset({"policy", "critic", "reference", "generator"})
"""Roles that live together, except as models of their own (`roles: separate`)."""

_JUDGING: Final = ("base", "trunk", "reward")
"""Rows of the memory table that a reward model needs which shares weights with a policy elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """A stage as its workers build it."""

    name: str
    seed: int
    settings: Any
    critic: CriticSpec | None
    chat_template: str | None
    recipe_folder: Path
    folder: Path
    round: int
    sources: Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the driver has to know of the parts of a group."""

    memory: Sequence[RoleMemory]
    remarks: Sequence[str]
    """What a user should know about what could not be shared."""
    precision: str | None
    """The type that the policy computes in; None where it is elsewhere."""
    reference_hash: str | None
    counters: Mapping[str, Sequence[str]]
    """The names of the failure counters of each reward source."""
    max_mismatch: float | None


@dataclass(kw_only=True)
class Held:
    """The roles of a stage that live in this process; what lives elsewhere is None."""

    model: PreTrainedModel | None = None
    """The policy with all its weights, or the copy of it that samples."""
    policy: Policy | None = None
    critic: Critic | NoCritic | None = None
    reference: Reference | None = None
    reference_hash: str | None = None
    role_set: RoleSet | None = None
    """Where all of the roles that may share weights are here."""
    judge_set: RoleSet | None = None
    """Where a reward model that shares weights with the policy is here and the policy is not: the same roles once more,
    of which the reward model alone is asked, so that it computes as it does beside the policy."""
    memory: list[RoleMemory] = field(default_factory=list[RoleMemory])


def make_parts(
    order: StageOrder, *, roles: frozenset[str], world: World, device: str, notes: list[Note]
) -> Mapping[str, Any]:
    """The parts of this process by name: the roles of the stage that its group has, and `stage` for all of them."""
    if not order.folder.is_dir():
        raise ConfigError(
            f"{order.folder}: {socket.gethostname()} does not see this run folder; put it on a disk that all machines "
            "of the cluster share (kedge run --runs)"
        )
    torch.manual_seed(order.seed)
    context, settings = _context(order, world, device, notes), cast(RLSettings, order.settings)
    tokenizer = tokenizer_for(context.input("from"), context.chat_template)
    prompts = run_prompts(context, settings, tokenizer)
    held = _held(role_spec(context, settings, tokenizer, order.critic), settings.roles, roles)
    judging = held.role_set or held.judge_set
    learning: dict[str, Any] = {"policy": held.policy, "critic": held.critic}
    parts: dict[str, Any] = {name: LearningPart(role) for name, role in learning.items() if role is not None}
    parts |= {"reference": held.reference} if held.reference is not None else {}
    sources = {"reward": settings.reward, "gold": settings.gold}
    for name, source in sources.items():
        if name in roles and source is not None:
            reward = open_run_reward(context, settings, prompts, tokenizer, source, name, roles=judging)
            parts[name] = RewardPart(reward)
    if "generator" in roles:
        assert held.model is not None
        parts["generator"] = GeneratorPart(context, settings, held, prompts, tokenizer)
    if held.policy is not None:
        assert held.model is not None
        parts["speaker"] = SpeakerPart(PolicySpeaker(context=context, model=held.model, tokenizer=tokenizer))
    parts["stage"] = StagePart(context, settings, held, tokenizer, parts)
    return parts


def _context(order: StageOrder, world: World, device: str, notes: list[Note]) -> Context:
    return Context(
        name=order.name,
        seed=order.seed,
        run=cast("Run", _Folder(order.folder)),
        tracker=_NoteTracker(notes),
        device=device,
        chat_template=order.chat_template,
        recipe_folder=order.recipe_folder,
        round=order.round,
        sources=order.sources,
        say=lambda _: None,
        world=world,
    )


@dataclass(frozen=True, slots=True)
class _Folder:
    """In the place of a run, whose journal is the driver's alone."""

    folder: Path


@dataclass(frozen=True, slots=True)
class _NoteTracker(Tracker):
    """Events become notes to the driver."""

    notes: list[Note]

    def log(self, metrics: Metrics, *, step: int) -> None:
        del metrics, step

    def event(self, event: Mapping[str, Any]) -> None:
        evidence = {**event["evidence"], **({} if event["step"] is None else {"step": event["step"]})}
        self.notes.append(Note(level=event["level"], code=event["code"], message=event["message"], evidence=evidence))

    def close(self) -> None:
        pass


def _held(spec: RoleSpec, kind: str, roles: frozenset[str]) -> Held:
    """The roles that live here. All of those that may share weights are built as they are without groups."""
    if roles.issuperset(SHARING - ({"critic"} if spec.critic is None else frozenset())):
        role_set: RoleSet = plugins.find("roles", kind)(spec)
        return Held(
            model=role_set.model,
            policy=role_set.policy,
            critic=role_set.critic,
            reference=role_set.reference,
            reference_hash=role_set.reference_hash,
            role_set=role_set,
            memory=list(role_set.memory),
        )
    held = Held()
    if kind != "separate":
        held.judge_set = _judge_set(spec, kind) if roles & {"reward", "gold"} and spec.reward else None
        held.memory = [row for row in held.judge_set.memory if row.role in _JUDGING] if held.judge_set else []
        return held
    if "policy" in roles:
        held.model, held.policy = separate_policy(spec)
        held.memory.append(policy_memory(held.model, held.policy))
    elif "generator" in roles:
        held.model = load_causal(spec.base, dtype=spec.dtype, device=spec.device)
        prepare(spec, held.model, learns=False)
        held.memory.append(of_role("generator", own=parameters_of(held.model)))
    if "critic" in roles and spec.critic is not None:
        held.critic, critic_memory = separate_critic(spec)
        held.memory += critic_memory
    if "reference" in roles:
        held.reference, memory, held.reference_hash = separate_reference(spec)
        held.memory.append(memory)
    return held


def _judge_set(spec: RoleSpec, kind: str) -> RoleSet | None:
    role_set: RoleSet = plugins.find("roles", kind)(replace(spec, critic=None, imitation=None, ema=None))
    return role_set if role_set.shared_judge else None


class LearningPart:
    """Policy or critic; what it gives of its weights is whole, also where this process holds a part of them."""

    def __init__(self, role: Any) -> None:
        self._role = role

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._role, verb)

    def state(self) -> Any:
        return _gathered(self._role.state())

    def weights(self) -> Any:
        return _gathered(self._role.weights())


def _gathered(state: Any) -> Any:
    """A state with whole tensors, on the host, in the place of those of which this process has a part."""
    if isinstance(state, Mapping):
        return {key: _gathered(value) for key, value in cast("Mapping[Any, Any]", state).items()}
    if type(state) in (list, tuple):
        return type(state)(map(_gathered, state))
    return gathered(state.detach()).cpu() if isinstance(state, Tensor) and is_part(state) else state


class RewardPart:
    """A reward source. What it has counted so far comes with each call and goes back with its result."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def score(self, rollouts: Rollouts, counted: Sequence[Mapping[str, Any]]) -> tuple[Tensor, list[dict[str, Any]]]:
        counters = self.reward.failure_counters
        for counter, state in zip(counters, counted, strict=True):
            counter.load(state)
        return self.reward.score(rollouts), [counter.state() for counter in counters]

    def trust_metrics(self, scores_B: Tensor) -> dict[str, float]:
        source = self.reward.source
        return source.trust_metrics(scores_B) if isinstance(source, TrustedSource) else {}


class GeneratorPart:
    """Generators over the policy here, or over a copy of it, by how they sample."""

    def __init__(
        self,
        context: Context,
        settings: RLSettings,
        held: Held,
        prompts: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._context, self._settings, self._held = context, settings, held
        self._prompts, self._tokenizer = prompts, tokenizer
        self._generators: dict[str, Generator] = {}

    @property
    def first(self) -> Generator:
        """The one that the run samples with; it has the weights that others sample with too."""
        return self._generator(self._settings.sampling)

    def generate(self, prompts: Prompts, seed: int, sampling: SamplingSettings) -> Rollouts:
        return self._generator(sampling).submit(prompts, seed).result()

    def load_own(self, version: int) -> None:
        """The weights of the policy, which lives here too."""
        assert self._held.model is not None
        assert self._held.policy is not None
        self.first.load_weights(published(self._held.model, self._held.policy), version=version)

    @torch.no_grad()
    def load_sent(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Weights of a policy that lives elsewhere, into the places of the copy's."""
        assert self._held.model is not None
        own = dict(self._held.model.named_parameters())
        for name, weight in weights.items():
            own[name].copy_(weight)
        self.first.load_weights(weights, version)

    def _generator(self, sampling: SamplingSettings) -> Generator:
        key = sampling.model_dump_json()
        if key not in self._generators:
            first = None if sampling == self._settings.sampling else self.first
            self._generators[key] = (first and with_sampling(first, sampling)) or self._make(sampling)
        return self._generators[key]

    def _make(self, sampling: SamplingSettings) -> Generator:
        assert self._held.model is not None
        return make_generator(
            self._context,
            self._settings,
            sampling,
            policy=self._held.model,
            prompts=self._prompts,
            tokenizer=self._tokenizer,
        )

    def close(self) -> None:
        for generator in self._generators.values():
            close_generator(generator)
        self._generators.clear()


class SpeakerPart:
    """The policy as looks ask it; it leaves no trace in the random numbers of this process."""

    def __init__(self, speaker: PolicySpeaker) -> None:
        self._speaker = speaker

    def ask(self, questions: Sequence[Any]) -> list[Any]:
        return self._without_a_trace(lambda: self._speaker.ask(questions))

    def write(self, prompts: Sequence[Any], sampling: SamplingSettings, answers: int) -> Rollouts:
        return self._without_a_trace(lambda: self._speaker.write(prompts, sampling, answers))

    def _without_a_trace(self, look: Any) -> Any:
        state = capture_rng()
        try:
            return look()
        finally:
            restore_rng(state)


class StagePart:
    """What the driver asks of a group as a whole."""

    def __init__(
        self,
        context: Context,
        settings: RLSettings,
        held: Held,
        tokenizer: PreTrainedTokenizerBase,
        parts: Mapping[str, Any],
    ) -> None:
        self._context, self._settings, self._held, self._tokenizer = context, settings, held, tokenizer
        self._parts = parts

    def about(self) -> About:
        held, generator = self._held, self._parts.get("generator")
        rewards = {name: part for name, part in self._parts.items() if isinstance(part, RewardPart)}
        is_policy_here = held.policy is not None and held.model is not None
        return About(
            memory=held.memory,
            remarks=held.role_set.notes if held.role_set else (),
            precision=str(compute_dtype(held.model)).removeprefix("torch.") if is_policy_here and held.model else None,
            reference_hash=held.reference_hash,
            counters={
                name: [counter.source for counter in part.reward.failure_counters] for name, part in rewards.items()
            },
            max_mismatch=max_mismatch(generator.first) if generator else None,
        )

    def forget(self) -> None:
        for role_set in (self._held.role_set, self._held.judge_set):
            if role_set:
                role_set.forget()

    def save_policy(self) -> str:
        """Process 0 of this group writes it into the run folder."""
        assert self._held.policy is not None
        assert self._held.model is not None
        weights, dtype = self._held.policy.final_weights(), self._settings.memory.save_dtype
        folder = save_policy(self._context, self._held.model, self._tokenizer, weights=weights, dtype=dtype)
        return str(folder)
