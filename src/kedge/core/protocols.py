"""Who answers: the roles and parts as protocols of two or three verbs each. No base classes.

Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from kedge.core.loss import ItemLoss
    from kedge.core.optimiser import Per
    from kedge.core.records import Experience, Prompts, Rollouts, ValueTargets

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Where metrics and events go while a run goes on. A tracker never decides anything."""

    def log(self, metrics: Metrics, *, step: int) -> None: ...
    def event(self, event: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Generator(Protocol):
    """Samples answers to prompts. Calls are served in order: new weights wait for the batches submitted before them."""

    def submit(self, prompts: Prompts, seed: int) -> Future[Rollouts]: ...
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...


class RewardSource(Protocol):
    """Scores rollouts, one number a row; NaN marks a row that it could not score."""

    def score(self, rollouts: Rollouts) -> Tensor: ...


class ReferenceRole(Protocol):
    """Holds still: `logp_BT` at the temperature of sampling, 0 outside the response."""

    def logprobs(self, rollouts: Rollouts) -> Tensor: ...


PolicyLoss = Callable[["Tensor", "Tensor", "Experience"], "ItemLoss"]
"""From `logp_BT` and `entropy_BT` of the policy as it is now, and the experience, to one loss a token."""
ValueLoss = Callable[["Tensor", "ValueTargets"], "ItemLoss"]
"""From `values_BT` of the critic as it is now, and its targets, to one loss a token."""


class PolicyRole(ReferenceRole, Protocol):
    """Learns to answer. `update` is one optimiser step; it knows nothing of the algorithm behind the loss."""

    def update(self, experience: Experience, loss: PolicyLoss, *, per: Per) -> Metrics: ...


class CriticRole(Protocol):
    """Learns to foresee. `values_BT` is 0 outside the response; `update` is one optimiser step."""

    def values(self, rollouts: Rollouts) -> Tensor: ...
    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> Metrics: ...


Phase = Literal["judge", "update"]
"""What calls are gathered for: to judge rollouts, or to learn from them."""


class Runtime(Protocol):
    """Where roles live. Independent calls are made together; where one fails, those behind it may not be made."""

    def gather(self, *calls: Callable[[], Any], phase: Phase = "judge") -> list[Any]: ...
