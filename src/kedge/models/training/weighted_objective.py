"""Log-likelihood of whole answers, each with a weight: raised where the weight is above 0, lowered where it is below.

With the advantages of freshly sampled answers as weights, its gradient is the policy gradient of REINFORCE.
Shape letters: B rows, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kedge.core.records import send
from kedge.models.forward.heads import LanguageModel
from kedge.models.training.learner import Objective, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedAnswers:
    """One answer a row, padded on the right. `weight_B` multiplies its log-prob; the loss is a mean over items."""

    tokens_BT: Tensor
    attention_mask_BT: Tensor
    response_mask_BT: Tensor
    weight_B: Tensor
    item_B: Tensor
    """bool: True on the rows that count as items; their log-prob is logged."""

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.attention_mask_BT.sum())


def weighted_likelihood(model: LanguageModel, *, temperature: float) -> Objective[WeightedAnswers]:
    """Minus the weighted sum of the answers' log-probs, over the number of items of the step."""
    return Objective(
        weight=lambda batch: float(batch.item_B.sum()), sums=partial(_sums, model, temperature=temperature)
    )


def _sums(model: LanguageModel, batch: WeightedAnswers, *, temperature: float) -> Sums:
    logp_B = model.logprobs(
        batch.tokens_BT, batch.attention_mask_BT, batch.response_mask_BT, temperature=temperature
    ).sum(dim=1)
    weight_B, item_B = (send(x, logp_B.device) for x in (batch.weight_B, batch.item_B))
    nll = -torch.where(item_B, logp_B, 0.0).sum()
    return Sums(loss=-(weight_B * logp_B).sum(), facts={"nll": nll.detach()})
