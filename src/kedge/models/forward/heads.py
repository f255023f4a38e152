"""From hidden states to numbers about tokens. The only place that shifts by one.

A model's output at position t speaks about token t+1; from here on, index t speaks about token t, and the first token
of a sequence has 0. `segment_BT` is 0 at padding and 1, 2, … on the sequences that share a row (an attention mask is
the case of one a row); left, right, no padding and packing give the same numbers.
Shape letters: B sequences, T token positions, D width, V vocabulary, N selected tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from kedge.algorithms import logprobs
from kedge.core.errors import ModelError

_CHANGED_LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Settings that change logits after the head, with the value at which they do nothing."""


def hidden_states(
    model: PreTrainedModel, tokens_BT: Tensor, segment_BT: Tensor, *, is_right_padded: bool = False
) -> Tensor:
    """The last hidden states (B, T, D). Sequences that share a row do not see each other; padding means nothing.

    `is_right_padded` promises one sequence a row, from its first position on: then nothing sees the padding behind it,
    and attention needs no mask, which is much faster.
    """
    # Without a mask, transformers tells sequences apart by positions that start again; padding is one of them.
    positions_BT = None if is_right_padded else _positions(segment_BT)
    backbone = model.get_decoder()
    output = backbone(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
    return output.last_hidden_state


def lm_head(model: PreTrainedModel) -> Tensor:
    """The output matrix (V, D), for models whose logits are hidden states times it and nothing more."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise ModelError(f"{type(model).__name__}: expected a linear output head without bias, found {head}")
    for setting, neutral in _CHANGED_LOGITS.items():
        found = getattr(model.config, setting, neutral)
        if found != neutral:
            raise ModelError(
                f"{type(model).__name__} changes its logits after the head ({setting} = {found}), which Kedge does not "
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

    `only_BT` names the tokens that are wanted: the others cost nothing and are 0.
    """
    wanted_BT = foretold(segment_BT, only_BT)
    return logprobs_of(head_VD, hidden_BTD[one_before(wanted_BT)], tokens_BT, wanted_BT, temperature=temperature)


def foretold(segment_BT: Tensor, only_BT: Tensor | None = None) -> Tensor:
    """True on real tokens that have a token of their own sequence before them; of those, the ones in `only_BT`."""
    before_BT = F.pad(segment_BT.long()[:, :-1], (1, 0))
    preceded_BT = (segment_BT != 0) & (segment_BT == before_BT)
    return preceded_BT if only_BT is None else preceded_BT & only_BT


def one_before(wanted_BT: Tensor) -> Tensor:
    """Where to read about wanted tokens: at t−1 for a token t. Nothing precedes position 0, so nothing wraps around.

    >>> one_before(torch.tensor([[0, 0, 1, 1]]).bool()).int().tolist()
    [[0, 1, 1, 0]]
    """
    return wanted_BT.roll(-1, dims=1)


def logprobs_of(
    head_VD: Tensor,
    hidden_ND: Tensor,
    tokens_BT: Tensor,
    wanted_BT: Tensor,
    *,
    temperature: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """`token_logprobs` of the tokens that are `foretold` and wanted, from the hidden states `one_before` them."""
    target_N = tokens_BT[wanted_BT]
    logp_N = logprobs.token_logprobs(hidden_ND, head_VD, target_N, temperature=temperature, compiled=compiled)
    return _spread(logp_N, wanted_BT)


def logprobs_and_entropy_of(
    head_VD: Tensor,
    hidden_ND: Tensor,
    tokens_BT: Tensor,
    wanted_BT: Tensor,
    *,
    temperature: float = 1.0,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`logprobs_of`, and the entropy (nats) of the distribution that each token was one outcome of."""
    target_N = tokens_BT[wanted_BT]
    logp_N, entropy_N = logprobs.logprobs_and_entropy(
        hidden_ND, head_VD, target_N, temperature=temperature, compiled=compiled
    )
    return _spread(logp_N, wanted_BT), _spread(entropy_N, wanted_BT)


def values_of(hidden_ND: Tensor, head: nn.Linear, wanted_BT: Tensor) -> Tensor:
    """`values_BT[b, t]` = value of the prefix that ends just before token t, in float32; 0 where it is not wanted.

    From the hidden states `one_before` the wanted tokens.
    """
    return _spread(head(hidden_ND).squeeze(-1).float(), wanted_BT)


def _spread(x_N: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.zeros(mask_BT.shape, dtype=x_N.dtype, device=x_N.device).masked_scatter(mask_BT, x_N)


def _positions(segment_BT: Tensor) -> Tensor:
    """Counted from the start of each run of equal segments.

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
