"""The critic: the value of every prefix, from a linear head with a bias on a backbone of its own.

It may start from the reward model: then the initial value of a prefix is the score that the text would have if it ended
there. Without one the head, and with it every value, starts at zero.
Shape letters: B sequences, T token positions, N response tokens, D width, K objectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge.core.loss import stat_sums, weight_of, weighted_sum, widen
from kedge.core.per import Per
from kedge.core.protocols import ValueLoss
from kedge.core.records import Rollouts, ValueTargets
from kedge.models.forward import heads
from kedge.models.reward.reward_model import RewardFacts
from kedge.models.roles.backbones import Backbone, by_micro_batch, micro_batches
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep


class Critic:
    """Values of prefixes. `update` is one optimiser step on the loss that it is given."""

    def __init__(
        self, backbone: Backbone, head: nn.Linear, train_step: TrainStep, *, rows: int, inference_rows: int
    ) -> None:
        """`rows` sequences are computed at once in an update, `inference_rows` without gradients."""
        self._backbone, self._head, self.train_step = backbone, head, train_step
        self._rows, self._inference_rows = rows, inference_rows

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Tensor:
        """`values_BT` on the response as the critic is now, 0 elsewhere; without gradient."""
        with self._backbone.active(), self.train_step.autocast():
            return by_micro_batch(rollouts, self._inference_rows, self._values)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> dict[str, float]:
        width = targets.rollouts.tokens_BT.shape[1]
        objective: Objective[ValueTargets] = Objective(
            weight=lambda part: float(weight_of(part.rollouts.response_mask_BT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        with self._backbone.active():
            return self.train_step.learn(Term(objective=objective, batches=micro_batches(targets, self._rows)))

    def state(self) -> dict[str, Any]:
        return self.train_step.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.train_step.load(state)

    def _values(self, part: Rollouts) -> Tensor:
        predicted_BT = heads.predicted(part.attention_mask_BT, part.response_mask_BT)
        positions_BT = heads.predicting_positions(predicted_BT)
        hidden_ND = self._backbone.hidden(part.tokens_BT, part.attention_mask_BT, positions_BT)
        # The head computes in float32, whatever the types of the backbone and of autocast are.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return heads.values_of(widen(hidden_ND), self._head, predicted_BT)

    def _sums(self, part: ValueTargets, loss: ValueLoss, per: Per) -> Sums:
        mask_BT = part.rollouts.response_mask_BT
        item = loss(self._values(part.rollouts), part)
        return Sums(
            loss=weighted_sum(item.loss_BT, mask_BT, per),
            facts=stat_sums(item, mask_BT),
            items=weight_of(mask_BT, "token"),
        )


class NoCritic:
    """In the place of a critic for methods without one: all values are 0, updates do nothing, the state is empty."""

    def values(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(rollouts.tokens_BT.shape, device=rollouts.tokens_BT.device)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> dict[str, float]:
        del targets, loss, per
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        del state


def value_head(width: int, device: torch.device) -> nn.Linear:
    """A head whose values are all 0."""
    head = nn.Linear(width, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def head_from_scores(weight_KD: Tensor, facts: RewardFacts, objective: str | None) -> nn.Linear:
    """A head whose values are the normalised scores of one objective: (w h - mean) / std as one linear map."""
    head = value_head(weight_KD.shape[1], weight_KD.device)
    index = facts.objectives.index(objective) if objective else 0
    mean, std = facts.normaliser.mean[index], facts.normaliser.std[index]
    head.weight.copy_(weight_KD[index : index + 1].float() / std)
    head.bias.fill_(-mean / std)
    return head
