"""How far a model has moved from another, by the answers that it sampled.

Shape letters: B sequences, R sequences of one pass, T token positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kedge.core.records import Rollouts, take, to_device, trimmed
from kedge.models.forward import heads
from kedge.stages.shared.chunks import token_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS_AT_ONCE = 16_384
"""Tokens, padding counted, in one forward pass."""


@torch.no_grad()
def log_ratios(other: PreTrainedModel, rollouts: Rollouts, *, temperature: float) -> Tensor:
    """`ratio_B` = Σ_t log p(token t) − log p_other(token t) over the response, in nats; p is whoever sampled.

    Over samples of p, its mean is KL(p ‖ p_other) of a whole answer (the estimator k1: no bias, single ones may be
    negative). Both log-probs are taken at the temperature of sampling.
    """
    lengths: list[int] = rollouts.attention_mask_BT.sum(dim=1).tolist()
    ratio_B = torch.zeros(len(lengths))
    for rows in token_chunks(lengths, max_tokens=_TOKENS_AT_ONCE):
        index_R = torch.tensor(rows)
        part = to_device(trimmed(take(rollouts, index_R), lengths[rows[0]]), other.device)
        logp_BT = heads.token_logprobs(
            heads.lm_head(other),
            heads.hidden_states(other, part.tokens_BT, part.attention_mask_BT, is_right_padded=True),
            part.tokens_BT,
            part.attention_mask_BT,
            only_BT=part.response_mask_BT,
            temperature=temperature,
        )
        gap_BT = (part.behaviour_logp_BT - logp_BT).masked_fill(~part.response_mask_BT, 0.0)
        ratio_B[index_R] = gap_BT.sum(dim=1).cpu()
    return ratio_B
