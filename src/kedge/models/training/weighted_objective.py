"""Log-likelihood of whole answers, each with a weight: raised where the weight is above 0, lowered where it is below.

With the advantages of freshly sampled answers as weights, its gradient is the policy gradient of REINFORCE.
Shape letters: B rows, T token positions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.loss import masked
from kedge.models.forward import heads
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

    def to(self, device: torch.device) -> WeightedAnswers:
        moved: dict[str, Any] = {
            field.name: getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)
        }
        return replace(self, **moved)


def weighted_likelihood(model: PreTrainedModel, *, temperature: float) -> Objective[WeightedAnswers]:
    """Minus the weighted sum of the answers' log-probs, over the number of items of the step."""
    return Objective(
        weight=lambda batch: float(batch.item_B.sum()), sums=partial(_sums, model, temperature=temperature)
    )


def _sums(model: PreTrainedModel, batch: WeightedAnswers, *, temperature: float) -> Sums:
    batch = batch.to(model.device)
    hidden_BTD = heads.hidden_states(model, batch.tokens_BT, batch.attention_mask_BT, is_right_padded=True)
    logp_BT = heads.token_logprobs(
        heads.lm_head(model),
        hidden_BTD,
        batch.tokens_BT,
        batch.attention_mask_BT,
        only_BT=batch.response_mask_BT,
        temperature=temperature,
    )
    logp_B = masked(logp_BT, batch.response_mask_BT).sum(dim=1)
    nll = -torch.where(batch.item_B, logp_B, 0.0).sum()
    return Sums(loss=-(batch.weight_B * logp_B).sum(), facts={"nll": nll.detach()})
