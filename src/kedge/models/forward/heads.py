"""From hidden states to log-probs, entropies, values and KL of tokens. The only place that shifts by one.

The output at position t predicts token t+1; in every result of this module, index t is about token t, and the first
token of a sequence has 0. `segment_BT` is 0 at padding and 1, 2, … on the sequences that share a row (an attention mask
is the case of one sequence a row); left, right, no padding and packing give the same numbers.
Shape letters: B rows, T token positions, D width, V vocabulary, N predicted tokens.
"""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kedge.algorithms import logprobs
from kedge.core.errors import ModelError
from kedge.core.loss import widen

CHUNK_TOKENS: Final = 512
"""Tokens whose logits `token_kl` holds in memory at once: 300 MiB a model for 150 thousand entries in float32."""
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Settings of models that change the logits after the head, and the value at which each does nothing."""


def hidden_states(
    model: PreTrainedModel, tokens_BT: Tensor, segment_BT: Tensor, *, is_right_padded: bool = False
) -> Tensor:
    """The last hidden states (B, T, D). Sequences that share a row do not attend to each other or to padding.

    `is_right_padded` promises one sequence a row, from its first position on: causal attention then never reaches the
    padding, and needs no mask, which is much faster.
    """
    # Without a mask, transformers tells sequences apart by position ids that restart; padding counts as one of them.
    positions_BT = None if is_right_padded else _positions(segment_BT)
    backbone = model.get_decoder()
    output = backbone(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
    return output.last_hidden_state


def lm_head(model: PreTrainedModel) -> Tensor:
    """The output matrix (V, D), for models whose logits are hidden states times it and nothing more."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__}: expected a linear output head without bias, found {head}")
    for setting, neutral in _LOGIT_CHANGES.items():
        value = getattr(model.config, setting, neutral)
        if value != neutral:
            raise ModelError(
                f"{type(model).__name__} changes its logits after the head ({setting} = {value}), which Kedge does not "
                "compute; log-probs would be wrong. Use a model without it"
            )
    return head.weight


def token_logprobs(
    head_VD: Tensor,
    hidden_BTD: Tensor,
    tokens_BT: Tensor,
    segment_BT: Tensor,
    *,
    only_BT: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """`logp_BT[b, t]` = log p(token t | tokens before t) in float32; 0 at padding and at first tokens.

    `only_BT` restricts it to the tokens where it is True: the others cost nothing and are 0.
    """
    predicted_BT = predicted(segment_BT, only_BT)
    hidden_ND = hidden_BTD[predicting_positions(predicted_BT)]
    return logprobs_of(head_VD, hidden_ND, tokens_BT, predicted_BT, temperature=temperature)


def predicted(segment_BT: Tensor, only_BT: Tensor | None = None) -> Tensor:
    """`predicted_BT`: True on tokens that follow a token of their own sequence; of those, the ones in `only_BT`."""
    before_BT = F.pad(segment_BT.long()[:, :-1], (1, 0))
    follows_BT = (segment_BT != 0) & (segment_BT == before_BT)
    return follows_BT if only_BT is None else follows_BT & only_BT


def predicting_positions(predicted_BT: Tensor) -> Tensor:
    """The positions whose outputs predict these tokens: t−1 for token t. Position 0 is never predicted: no wrap-around.

    >>> predicting_positions(torch.tensor([[0, 0, 1, 1]]).bool()).int().tolist()
    [[0, 1, 1, 0]]
    """
    return predicted_BT.roll(-1, dims=1)


def logprobs_of(
    head_VD: Tensor,
    hidden_ND: Tensor,
    tokens_BT: Tensor,
    predicted_BT: Tensor,
    *,
    temperature: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """`token_logprobs` where `predicted_BT`, from the hidden states at its `predicting_positions`."""
    target_N = tokens_BT[predicted_BT]
    logp_N = logprobs.token_logprobs(hidden_ND, head_VD, target_N, temperature=temperature, compiled=compiled)
    return _spread(logp_N, predicted_BT)


def logprobs_and_entropy_of(
    head_VD: Tensor,
    hidden_ND: Tensor,
    tokens_BT: Tensor,
    predicted_BT: Tensor,
    *,
    temperature: float = 1.0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`logprobs_of`, and the entropy (nats) of the distribution that each token was drawn from."""
    target_N = tokens_BT[predicted_BT]
    logp_N, entropy_N = logprobs.logprobs_and_entropy(
        hidden_ND, head_VD, target_N, temperature=temperature, compiled=compiled
    )
    return _spread(logp_N, predicted_BT), _spread(entropy_N, predicted_BT)


def values_of(hidden_ND: Tensor, head: nn.Linear, predicted_BT: Tensor) -> Tensor:
    """`values_BT[b, t]` = value of the prefix that ends just before token t, in float32; 0 outside `predicted_BT`.

    `hidden_ND` are the hidden states at its `predicting_positions`.
    """
    return _spread(head(hidden_ND).squeeze(-1).float(), predicted_BT)


def token_kl(
    head_VD: Tensor, hidden_BTD: Tensor, ref_head_VD: Tensor, ref_hidden_BTD: Tensor, predicted_BT: Tensor
) -> Tensor:
    """`kl_BT[b, t]` = Σ_v p_ref(v) (log p_ref(v) − log p(v)) of the distributions of token t, 0 outside `predicted_BT`.

    In float32 at least. `predicted_BT` must be False on the first tokens of sequences. Gradients flow to the policy and
    not to the reference; the N×V logits are computed again in the backward pass instead of being kept.
    """
    positions_BT = predicting_positions(predicted_BT)
    hidden_ND, ref_hidden_ND = hidden_BTD[positions_BT], ref_hidden_BTD[positions_BT].detach()
    parts = [
        cast(
            Tensor,
            checkpoint(
                _kl, hidden_ND[at], head_VD, ref_hidden_ND[at], ref_head_VD.detach(),
                use_reentrant=False, preserve_rng_state=False,
            ),
        )
        for at in (slice(start, start + CHUNK_TOKENS) for start in range(0, len(hidden_ND), CHUNK_TOKENS))
    ]  # fmt: skip
    return _spread(torch.cat(parts), predicted_BT)


def _kl(hidden_ND: Tensor, head_VD: Tensor, ref_hidden_ND: Tensor, ref_head_VD: Tensor) -> Tensor:
    logp_NV = F.log_softmax(widen(F.linear(hidden_ND, head_VD)), dim=-1)
    ref_logp_NV = F.log_softmax(widen(F.linear(ref_hidden_ND, ref_head_VD)), dim=-1)
    return (ref_logp_NV.exp() * (ref_logp_NV - logp_NV)).sum(dim=-1)


def _spread(x_N: Tensor, mask_BT: Tensor) -> Tensor:
    """The numbers at their tokens, row by row, and 0 elsewhere."""
    return torch.zeros(mask_BT.shape, dtype=x_N.dtype, device=x_N.device).masked_scatter(mask_BT, x_N)


def _positions(segment_BT: Tensor) -> Tensor:
    """Position ids: counted from the start of each run of equal segments.

    >>> _positions(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    index_T = torch.arange(segment_BT.shape[1], device=segment_BT.device)
    starts_BT = F.pad(segment_BT[:, 1:] != segment_BT[:, :-1], (1, 0), value=True)
    return index_T - (index_T * starts_BT).cummax(-1).values


def last_token(attention_mask_BT: Tensor) -> Tensor:
    """True on the last token of each row. Rows are right-padded."""
    return attention_mask_BT & ~F.pad(attention_mask_BT[:, 1:], (0, 1))


def at_last(hidden_BTD: Tensor, attention_mask_BT: Tensor) -> Tensor:
    """The hidden state of the last real token of each row (B, D)."""
    last_B = attention_mask_BT.shape[1] - 1 - attention_mask_BT.long().flip(-1).argmax(-1)
    return hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
