"""A critic-free method as one object: its settings, advantages, loss and traits.

Stage `group` finds it by the entry point `kedge.algorithms` and trains with it (`kedge.trainers.group`). To write one,
start from `grpo.py` and hold it to `kedge.testing.contracts.group_methods`.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict

from torch import Tensor

from kedge.algorithms.advantages import returns_to_go
from kedge.algorithms.ppo import shape_rewards
from kedge.core.loss import ItemLoss, masked
from kedge.core.optimiser import Per
from kedge.core.records import Experience, Rollouts
from kedge.core.settings import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What advantages are computed from."""

    rollouts: Rollouts
    scores_B: Tensor
    greedy_B: Tensor
    """The score of the greedy answer to the same prompt; read by methods whose traits say `needs_greedy`."""
    penalty_BT: Tensor
    """The KL penalty of each token; 0 where the KL is paid in the loss."""
    baseline: float
    """The mean return of all answers before these."""

    @property
    def returns_B(self) -> Tensor:
        """The return of each answer: its score less the penalties of its tokens."""
        return self.scores_B - masked(self.penalty_BT, self.rollouts.response_mask_BT).sum(dim=1)

    def on_tokens(self, advantages_B: Tensor) -> Tensor:
        """One advantage per answer, repeated on each of its tokens."""
        mask_BT = self.rollouts.response_mask_BT
        return masked(advantages_B[:, None].expand(mask_BT.shape), mask_BT)

    def returns_to_go(self, *, gamma: float) -> Tensor:
        """The discounted return from each token on, its own reward included."""
        mask_BT = self.rollouts.response_mask_BT
        return returns_to_go(shape_rewards(self.scores_B, self.penalty_BT, mask_BT, coef=1.0), mask_BT, gamma=gamma)


class KLDefaults(TypedDict, total=False):
    """What a method says of `kl` where a recipe does not (`kedge.trainers.settings.KLSettings`)."""

    where: Literal["reward", "loss"]
    kind: Literal["k1", "k2", "k3", "abs"]
    start: float


KL_IN_REWARD: Final[KLDefaults] = {"where": "reward", "kind": "k1"}
KL_IN_LOSS: Final[KLDefaults] = {"where": "loss", "kind": "k3"}
NO_KL: Final[KLDefaults] = {**KL_IN_LOSS, "start": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraits:
    """What a method needs, and its published settings of the stage, which a recipe need not repeat."""

    kl: KLDefaults
    answers: int = 8
    minibatches: int = 1
    max_rounds: int | None = None
    clips_often: float | None = None
    """Share of tokens above which clipping is a sign of trouble, for a method that clips many of them by design."""
    overlong_share: float | None = None
    """The last share of `max_new_tokens` that the overlong penalty is about."""
    needs_groups: bool = True
    """An answer is compared with others to the same prompt."""
    needs_greedy: bool = False
    """The greedy answer to each prompt is sampled and scored too."""
    is_on_policy: bool = False
    """The loss has no ratio of new to old probability: it is right for the first step on a batch alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMethod:
    """One critic-free method. The first argument of both functions is an instance of `settings`."""

    settings: type[Section]
    """With a field `kind` whose one value is the name of the entry point."""
    advantages: Callable[[Any, Credit], Tensor]
    """From credit to `advantages_BT`: zero outside the response."""
    loss: Callable[[Any, Tensor, Experience], ItemLoss]
    """From `logp_BT` of the policy as it is now, and the experience, to one loss per token."""
    per: Per
    """What the loss is averaged over."""
    traits: GroupTraits
    is_per_budget: bool = False
    """The loss is divided by `max_new_tokens`, the longest answer allowed, whatever the lengths are."""
