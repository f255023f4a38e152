"""The roles of an RL run, wherever they live, as the run and its iterations see them: `RoleHost`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kedge.core.protocols import CriticRole, Generator, Metrics, PolicyRole, ReferenceRole, Runtime
from kedge.models.forward.sharding import compute_dtype
from kedge.models.roles.actor_critic import published
from kedge.rewards.failures import Reward
from kedge.rollout.settings import SamplingSettings
from kedge.runtime.local import Clock, LocalRuntime
from kedge.stages.rl.generator import make_generator
from kedge.stages.rl.looks import LookedAt, PolicySpeaker
from kedge.stages.rl.prompts import PromptDataset
from kedge.stages.rl.roles import CriticSpec, build_roles, open_run_reward
from kedge.stages.rl.settings import RLSettings
from kedge.stages.shared.context import Context
from kedge.stages.shared.policy import save_policy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainedPolicy(PolicyRole, Protocol):
    """A policy whose weights a generator can load."""

    def weights(self) -> Mapping[str, Tensor]: ...


class RoleHost(Protocol):
    """Holds the roles of a run, and does for the run what needs their weights."""

    @property
    def policy(self) -> TrainedPolicy: ...
    @property
    def critic(self) -> CriticRole: ...
    @property
    def reference(self) -> ReferenceRole: ...
    @property
    def reward(self) -> Reward: ...
    @property
    def gold(self) -> Reward | None: ...
    @property
    def speaker(self) -> LookedAt: ...
    @property
    def device(self) -> torch.device:
        """Where rollouts are."""
        ...

    @property
    def precision(self) -> str:
        """The type that the policy computes in."""
        ...

    def generator(self, sampling: SamplingSettings) -> Generator:
        """The generator that the recipe names, over the policy."""
        ...

    def publish(self, generator: Generator, *, version: int) -> None:
        """Have the generator sample with the policy as it is now."""
        ...

    def clock(self) -> Clock: ...
    def runtime(self, clock: Clock) -> Runtime: ...
    @property
    def idle(self) -> Callable[[float], Metrics] | None:
        """What is measured of where roles live, after an iteration of so many seconds; None where it is here."""
        ...

    def save_policy(self) -> Path:
        """Save the policy as a whole model, its adapter beside it; with `ema`, the moving average of its weights."""
        ...

    def forget(self) -> None:
        """After each batch of rollouts: frees what was cached for it."""
        ...

    def state(self) -> dict[str, Any]:
        """Of policy and critic, and the hash of the reference: the same wherever they live."""
        ...

    def parts(self) -> Mapping[str, Any]:
        """A state of which a checkpoint is read in parts, as those here are; empty where all of it is read."""
        ...

    def load(self, state: Mapping[str, Any]) -> None: ...


class RolesHere:
    """All roles in this process, one of `context.world`."""

    def __init__(
        self,
        context: Context,
        settings: RLSettings,
        prompts: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
        critic: CriticSpec | None,
    ) -> None:
        self._context, self._settings, self._prompts, self._tokenizer = context, settings, prompts, tokenizer
        self._roles = roles = build_roles(context, settings, tokenizer, critic)
        self.policy, self.critic, self.reference = roles.policy, roles.critic, roles.reference
        self.device: torch.device = roles.model.device
        self.precision = str(compute_dtype(roles.model)).removeprefix("torch.")
        self.forget, self.load = roles.forget, roles.load
        self.state = self.parts = roles.state
        self.idle = None
        open_source = partial(open_run_reward, context, settings, prompts, tokenizer, roles=roles)
        self.reward = open_source(settings.reward, "reward")
        self.gold = open_source(settings.gold, "gold") if settings.gold else None

    @property
    def speaker(self) -> PolicySpeaker:
        return PolicySpeaker(context=self._context, model=self._roles.model, tokenizer=self._tokenizer)

    def generator(self, sampling: SamplingSettings) -> Generator:
        return make_generator(
            self._context,
            self._settings,
            sampling,
            policy=self._roles.model,
            prompts=self._prompts,
            tokenizer=self._tokenizer,
        )

    def publish(self, generator: Generator, *, version: int) -> None:
        generator.load_weights(published(self._roles.model, self.policy), version=version)

    def clock(self) -> Clock:
        return Clock(on_gpu=self.device.type == "cuda")

    def runtime(self, clock: Clock) -> Runtime:
        return LocalRuntime(clock)

    def save_policy(self) -> Path:
        weights, dtype = self.policy.final_weights(), self._settings.memory.save_dtype
        return save_policy(self._context, self._roles.model, self._tokenizer, weights=weights, dtype=dtype)
