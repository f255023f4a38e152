"""Roles and reward sources whose calls are timed, each by its own name: `time/<role>_<verb>` among the metrics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kedge.core.optimiser import Per
from kedge.core.protocols import (
    CriticRole,
    Metrics,
    PolicyLoss,
    PolicyRole,
    ReferenceRole,
    RewardSource,
    ValueLoss,
)
from kedge.core.records import Experience, Rollouts, ValueTargets
from kedge.runtime.local import Clock


@dataclass(frozen=True, slots=True)
class TimedReward:
    source: RewardSource
    clock: Clock
    name: str = "reward"

    def score(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap(f"{self.name}_score"):
            return self.source.score(rollouts)


@dataclass(frozen=True, slots=True)
class TimedReference:
    role: ReferenceRole
    clock: Clock

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap("reference_logprobs"):
            return self.role.logprobs(rollouts)


@dataclass(frozen=True, slots=True)
class TimedPolicy:
    role: PolicyRole
    clock: Clock

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap("policy_logprobs"):
            return self.role.logprobs(rollouts)

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> Metrics:
        with self.clock.lap("policy_update"):
            return self.role.update(experience, loss, per=per)


@dataclass(frozen=True, slots=True)
class TimedCritic:
    role: CriticRole
    clock: Clock

    def values(self, rollouts: Rollouts) -> Tensor:
        with self.clock.lap("critic_values"):
            return self.role.values(rollouts)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> Metrics:
        with self.clock.lap("critic_update"):
            return self.role.update(targets, loss, per=per)
