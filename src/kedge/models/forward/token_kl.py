"""KL(reference || policy) of the next-token distributions along a text, with its gradient; no N×V logits are kept.

Index t speaks about the distribution that token t was one outcome of, as in `heads`.
Shape letters: B rows, T token positions, D width, V vocabulary, N selected tokens.
"""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax
from torch.utils.checkpoint import checkpoint

from kedge.core.loss import widen

CHUNK_TOKENS: Final = 512
"""Tokens whose logits are in memory at once: 300 MiB a model for 150 thousand entries in float32."""


def token_kl(
    head_VD: Tensor, hidden_BTD: Tensor, ref_head_VD: Tensor, ref_hidden_BTD: Tensor, wanted_BT: Tensor
) -> Tensor:
    """`kl_BT[b, t]` = Σ_v p_ref(v) (log p_ref(v) − log p(v)) where `wanted_BT`, 0 elsewhere; in float32 at least.

    `wanted_BT` is False on first tokens of sequences, which nothing predicts. No gradient goes to the reference.
    """
    before_BT = wanted_BT.roll(-1, dims=1)  # the output at t−1 speaks about token t
    hidden_ND, ref_hidden_ND = hidden_BTD[before_BT], ref_hidden_BTD[before_BT].detach()
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
    kl_N = torch.cat(parts)
    return torch.zeros(wanted_BT.shape, dtype=kl_N.dtype, device=kl_N.device).masked_scatter(wanted_BT, kl_N)


def _kl(hidden_ND: Tensor, head_VD: Tensor, ref_hidden_ND: Tensor, ref_head_VD: Tensor) -> Tensor:
    logp_NV = log_softmax(widen(linear(hidden_ND, head_VD)), dim=-1)
    ref_logp_NV = log_softmax(widen(linear(ref_hidden_ND, ref_head_VD)), dim=-1)
    return (ref_logp_NV.exp() * (ref_logp_NV - logp_NV)).sum(dim=-1)
