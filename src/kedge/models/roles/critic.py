"""The critic: the value of every prefix, by a linear head with a bias on a body of its own.

It starts from the reward model where there is one: then the value of a prefix is, at first, the score that the text
would have if it ended there. Without one the head starts at zero, and so do all values.
Shape letters: B sequences, T token positions, D width.
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
from kedge.models.roles.backbones import Backbone
from kedge.models.roles.rows import each, micro_batches
from kedge.models.training.train_step import Objective, Sums, Term, TrainStep


class Critic:
    def __init__(self, body: Backbone, head: nn.Linear, stepper: TrainStep, *, rows: int, still_rows: int) -> None:
        """`rows` sequences are learnt from at once, `still_rows` asked."""
        self._body, self._head, self.stepper = body, head, stepper
        self._rows, self._still_rows = rows, still_rows

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Tensor:
        """`values_BT` on the response as the critic is now, 0 elsewhere; without gradient."""
        with self._body.active(), self.stepper.autocast():
            return each(rollouts, self._still_rows, self._values)

    def update(self, targets: ValueTargets, loss: ValueLoss, *, per: Per) -> dict[str, float]:
        """One optimiser step."""
        width = targets.rollouts.tokens_BT.shape[1]
        objective: Objective[ValueTargets] = Objective(
            weight=lambda part: float(weight_of(part.rollouts.response_mask_BT, per, max_length=width)),
            sums=lambda part: self._sums(part, loss, per),
        )
        with self._body.active():
            return self.stepper.learn(Term(objective=objective, batches=micro_batches(targets, self._rows)))

    def state(self) -> dict[str, Any]:
        return self.stepper.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.stepper.load(state)

    def _values(self, part: Rollouts) -> Tensor:
        wanted_BT = heads.foretold(part.attention_mask_BT, part.response_mask_BT)
        hidden_ND = self._body.hidden(part.tokens_BT, part.attention_mask_BT, heads.one_before(wanted_BT))
        # The head is float32 and so is what it gives, whatever the body and autocast are.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            return heads.values_of(widen(hidden_ND), self._head, wanted_BT)

    def _sums(self, part: ValueTargets, loss: ValueLoss, per: Per) -> Sums:
        mask_BT = part.rollouts.response_mask_BT
        item = loss(self._values(part.rollouts), part)
        return Sums(
            loss=weighted_sum(item.loss_BT, mask_BT, per),
            facts=stat_sums(item, mask_BT),
            items=weight_of(mask_BT, "token"),
        )


class NoCritic:
    """In the place of a critic where a method has none: foresees nothing, learns nothing, keeps nothing."""

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
    """A head that says 0 of everything."""
    head = nn.Linear(width, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@torch.no_grad()
def head_from_scores(weight_KD: Tensor, facts: RewardFacts, objective: str | None) -> nn.Linear:
    """A head whose values are the normalised scores: (w h - mean) / std as one linear map."""
    head = value_head(weight_KD.shape[1], weight_KD.device)
    index = facts.objectives.index(objective) if objective else 0
    mean, std = facts.normaliser.mean[index], facts.normaliser.std[index]
    head.weight.copy_(weight_KD[index : index + 1].float() / std)
    head.bias.fill_(-mean / std)
    return head
