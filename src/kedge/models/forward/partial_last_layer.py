"""The last layer of a decoder, computed only where hidden states are read; keys and values come from everywhere.

For decoders of the Llama kind. Whoever uses it compares it with the plain layer first: what a model does beyond is not
known here. Its activations are kept where those of other layers are computed again: backward begins with them.
Shape letters: N tokens of rows laid end to end, M of them in tails, H heads, E width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kedge.models.forward.packed_attention import packed_attention
from kedge.models.forward.packing import Layout

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class PartialLastLayer(nn.Module):
    """Stands for `layer`, whose modules it calls: adapters on them, or other weights, are found there."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], layout: Layout, **_: Any
    ) -> Tensor:
        """(1, N, D) to (1, M, D)."""
        layer: Any = self.layer
        heads: Any = layer.self_attn
        all_ND = layer.input_layernorm(hidden_states)[0]
        tail_MD = all_ND.index_select(0, layout.tail_M)
        cos_N1E, sin_N1E = (x[0, :, None] for x in position_embeddings)
        cos_M1E, sin_M1E = (x.index_select(0, layout.tail_M) for x in (cos_N1E, sin_N1E))
        query_MHE, key_NHE, value_NHE = (
            project(x).unflatten(-1, (-1, heads.head_dim))
            for project, x in ((heads.q_proj, tail_MD), (heads.k_proj, all_ND), (heads.v_proj, all_ND))
        )
        if hasattr(heads, "q_norm"):
            query_MHE, key_NHE = heads.q_norm(query_MHE), heads.k_norm(key_NHE)
        found_MHE = packed_attention(
            _rotated(query_MHE, cos_M1E, sin_M1E),
            _rotated(key_NHE, cos_N1E, sin_N1E),
            value_NHE,
            layout.tails,
            layout.rows,
        )
        hidden_MD = hidden_states[0].index_select(0, layout.tail_M) + heads.o_proj(found_MHE.flatten(-2))
        return (hidden_MD + layer.mlp(layer.post_attention_layernorm(hidden_MD)))[None]


def tail_of(decoder: Any) -> PartialLastLayer | None:
    """For the last layer of `decoder`, compiled if that is; None where the model is not of a kind that is known."""
    if decoder.config.model_type not in _FAMILIES:
        return None
    last = decoder.layers[-1]
    tail = PartialLastLayer(last)
    if last._compiled_call_impl is not None:
        tail.compile(dynamic=None)
    return tail


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
