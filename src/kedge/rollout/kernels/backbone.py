"""A decoder of the Llama family, read as tensors: five kernels a layer instead of some thirty, and no matrix copied.
Adapters are added beside their matrices, in the same kernels.

The forward of one token a row, for models that have no `unsupported_reason` in `families`.
Shape letters: R slots, P places, H key heads, G query heads a key head, S columns, D head width, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.rollout.adapters import Adapters, LowRank, base_layer
from kedge.rollout.cache import RowCache
from kedge.rollout.families import head_width
from kedge.rollout.kernels.added import added
from kedge.rollout.kernels.attention import decode_attention
from kedge.rollout.kernels.attention_inputs import attention_inputs
from kedge.rollout.kernels.gated import gated
from kedge.rollout.kernels.stream import embed, normed
from kedge.rollout.steps import Slots
from kedge.rollout.tiles import tiles_for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: Any
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    inner_norm: Any
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    qkv_low: LowRank | None
    o_low: LowRank | None
    gated_low: LowRank | None
    down_low: LowRank | None


class FusedBackbone:
    """The last hidden states of one new token for each of the first slots."""

    def __init__(self, model: PreTrainedModel, cache: RowCache, slots: Slots, *, chained: bool) -> None:
        backbone: Any = model.get_decoder()
        config = backbone.config
        self._cache, self._slots, self._chained = cache, slots, chained
        self._table_VW: Tensor = backbone.embed_tokens.weight
        self._adapters = Adapters()
        self._layers = [_layer(layer, self._adapters) for layer in backbone.layers]
        self._last_norm: Any = backbone.norm
        self._eps: float = config.rms_norm_eps
        self._scale: float = backbone.layers[0].self_attn.scaling
        rows = len(slots.token_R)
        self._arrived = torch.zeros(
            rows * self._table_VW.shape[1] // 16, dtype=torch.int32, device=slots.token_R.device
        )
        columns = cache.columns
        position_1S = torch.arange(columns, device=slots.state_FR.device)[None]
        half = head_width(config) // 2
        cos_1SD, sin_1SD = backbone.rotary_emb(self._table_VW[:1, None], position_1S)
        self._rotation = cos_1SD[0, :, :half].contiguous(), sin_1SD[0, :, :half].contiguous()

    def refresh(self) -> None:
        """Take the adapters as the trainer has them now; all other weights are read where they are."""
        self._adapters.refresh()

    def __call__(self, rows: int) -> Tensor:
        slots, chained, eps = self._slots.first(rows), self._chained, self._eps
        width, inner = self._layers[0].down.weight.shape
        tiles = tiles_for(rows, width=width, inner=inner, attended=self._layers[0].o.weight.shape[1])
        norms = [layer.attention_norm.weight for layer in self._layers[1:]] + [self._last_norm.weight]
        stream = embed(slots.token_R, self._table_VW, self._layers[0].attention_norm.weight)
        for index, (layer, next_norm_W) in enumerate(zip(self._layers, norms, strict=True)):
            keys_PHSD, values_PHSD = self._cache.layer(index)
            q_RHGD = attention_inputs(
                stream,
                (layer.q.weight, layer.k.weight, layer.v.weight),
                (layer.q.bias, layer.k.bias, layer.v.bias),
                self._rotation,
                keys_PHSD,
                values_PHSD,
                slots.place_R,
                slots.column_R,
                low=layer.qkv_low,
                eps=eps,
                tile=tiles.attention_inputs,
                chained=chained,
            )
            mixed_RHGD = decode_attention(
                q_RHGD,
                keys_PHSD,
                values_PHSD,
                slots.place_R,
                slots.column_R,
                scale=self._scale,
                chained=chained,
            )
            mixed_RW = mixed_RHGD.view(rows, -1)
            stream = added(
                stream,
                mixed_RW,
                layer.o.weight,
                layer.o.bias,
                layer.inner_norm.weight,
                low=layer.o_low,
                tile=tiles.o,
                arrived=self._arrived,
                chained=chained,
            )
            inner_RF = gated(
                stream,
                layer.gate.weight,
                layer.up.weight,
                low=layer.gated_low,
                eps=eps,
                tile=tiles.gated,
                chained=chained,
            )
            stream = added(
                stream,
                inner_RF,
                layer.down.weight,
                layer.down.bias,
                next_norm_W,
                low=layer.down_low,
                tile=tiles.down,
                arrived=self._arrived,
                chained=chained,
            )
        return normed(stream, eps, chained=chained)


def _layer(module: Any, adapters: Adapters) -> _Layer:
    attention, mlp = module.self_attn, module.mlp
    return _Layer(
        attention_norm=module.input_layernorm,
        q=base_layer(attention.q_proj),
        k=base_layer(attention.k_proj),
        v=base_layer(attention.v_proj),
        o=base_layer(attention.o_proj),
        inner_norm=module.post_attention_layernorm,
        gate=base_layer(mlp.gate_proj),
        up=base_layer(mlp.up_proj),
        down=base_layer(mlp.down_proj),
        qkv_low=adapters.together((attention.q_proj, attention.k_proj, attention.v_proj)),
        o_low=adapters.together((attention.o_proj,)),
        gated_low=adapters.together((mlp.gate_proj, mlp.up_proj)),
        down_low=adapters.together((mlp.down_proj,)),
    )
