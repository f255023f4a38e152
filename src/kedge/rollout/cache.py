"""Keys and values of the rows being decoded: allocated once, written in place, attended to as far as they are filled.

Every row starts at column 0, whatever its length, so nothing is padded on the left and a place can be given to another
row at any time. Transformers' own static cache has one length for all rows and attends to all of its columns.
Shape letters: R slots, P places, U distinct prompts, H key heads, G query heads a key head, S columns, D head width.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward.reader import evaluating, uncompiled

_ATTENTION = "kedge_grouped"
_ATTENDING_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers, in transformers' words, whose state is keys and values of earlier tokens."""
_UNSUPPORTED = {"softcap": "soft-capped attention", "s_aux": "attention sinks", "position_bias": "a position bias"}


class RowCache:
    """What transformers calls `past_key_values`. An `at_` method is called before each forward: it says which prompts
    or tokens the forward brings, and where they go."""

    def __init__(self, places: int, columns: int) -> None:
        self.places, self.columns = places, columns
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._place_R = self._source_R = self._column_R = torch.empty(0, dtype=torch.int64)
        self._filled, self._is_whole = 0, False

    def at_prompts(self, place_R: Tensor, source_R: Tensor) -> None:
        """The next forward brings whole prompts: place `place_R[r]` takes the prompt of its row `source_R[r]`."""
        self._place_R, self._source_R = place_R, source_R
        self._filled, self._is_whole = 0, False

    def at_tokens(self, column_R: Tensor, filled: int) -> None:
        """The next forward brings one token for each of the first R places; attention reads `filled` columns."""
        self._place_R = torch.arange(len(column_R), device=column_R.device)
        self._column_R, self._filled, self._is_whole = column_R, filled, False

    def at_places(self, place_R: Tensor, column_R: Tensor) -> None:
        """The next forward brings one token for each of R places; attention is given all places and columns."""
        self._place_R, self._column_R = place_R, column_R
        self._filled, self._is_whole = self.columns, True

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy the rows of some places over those of others."""
        for keys_PHSD, values_PHSD in self._layers:
            keys_PHSD[target] = keys_PHSD[source]
            values_PHSD[target] = values_PHSD[source]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values (P, H, S, D)."""
        return self._layers[index]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each attention layer with its new keys and values; gives those to attend to."""
        if layer_idx == len(self._layers):
            self._layers.append((self._zeros(key), self._zeros(value)))
        keys_PHSD, values_PHSD = self._layers[layer_idx]
        if not self._filled:
            keys_PHSD[self._place_R, :, : key.shape[2]] = key[self._source_R]
            values_PHSD[self._place_R, :, : key.shape[2]] = value[self._source_R]
            return key, value
        keys_PHSD[self._place_R, :, self._column_R] = key[:, :, 0]
        values_PHSD[self._place_R, :, self._column_R] = value[:, :, 0]
        if self._is_whole:
            return keys_PHSD, values_PHSD
        return keys_PHSD[: len(key), :, : self._filled], values_PHSD[: len(key), :, : self._filled]

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Columns filled before this forward, in the longest row."""
        return max(self._filled - 1, 0)

    def _zeros(self, like: Tensor) -> Tensor:
        """Zeros, not whatever is in memory: a column that attention gives no weight must still be a number."""
        return like.new_zeros(self.places, like.shape[1], self.columns, like.shape[3])


@contextmanager
def for_decoding(model: PreTrainedModel) -> Generator[None]:
    """Within, `model` is in evaluation mode and attends with `grouped_attention`; afterwards it is as it was."""
    config = cast(Any, model.get_decoder()).config
    before = config._attn_implementation
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(model).__name__} does not let its attention be chosen, which generation here needs; "
            "use a model of transformers that does (Llama, Qwen, Mistral, GPT-2, …), or let vLLM sample (docs/vllm.md)"
        )
    other_kinds = sorted({*(getattr(config, "layer_types", None) or ())} - _ATTENDING_KINDS)
    if other_kinds:
        raise ModelError(
            f"{type(model).__name__} has layers that are no attention ({', '.join(other_kinds)}), whose state "
            "generation here does not keep; use a model of attention alone, or let vLLM sample (docs/vllm.md)"
        )
    AttentionInterface.register(_ATTENTION, grouped_attention)
    config._attn_implementation = _ATTENTION
    try:
        with evaluating(model), uncompiled(model):
            yield
    finally:
        config._attn_implementation = before


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention of prompts (causal, no mask), or of one token a row with a mask of the columns that are its own.

    Query heads that share a key head stand as so many queries of it, so keys and values are never repeated in memory.
    After `RowCache.at_places`, the mask is not one of columns: it is `placed(place_R, column_R)`.
    """
    for name, meaning in _UNSUPPORTED.items():
        if settings.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {meaning}, which generation here does not compute")
    rows, heads, length, width = query.shape
    if length > 1:
        gqa = heads != key.shape[1]
        mixed_RHTD = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return mixed_RHTD.transpose(1, 2).contiguous(), None
    grouped_RHGD = query.reshape(rows, key.shape[1], -1, width)
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        mixed_RHGD = _at_places(grouped_RHGD, key, value, attention_mask, width**-0.5 if scaling is None else scaling)
        return mixed_RHGD.reshape(rows, 1, heads, -1), None
    mixed_RHGD = scaled_dot_product_attention(grouped_RHGD, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed_RHGD.reshape(rows, 1, heads, -1), None


def placed(place_R: Tensor, column_R: Tensor) -> Tensor:
    """Each row's place and last column, in the four dimensions that transformers hands through to attention as is."""
    return torch.stack((place_R, column_R))[:, None, None]


def _at_places(query_RHGD: Tensor, keys_PHSD: Tensor, values_PHSD: Tensor, placed_211R: Tensor, scale: float) -> Tensor:
    """By the Triton kernel, which takes heads of 16, 32, 64, … numbers, else over copies of the keys and values."""
    place_R, column_R = placed_211R[:, 0, 0]
    width = query_RHGD.shape[3]
    if query_RHGD.is_cuda and width >= 16 and not width & (width - 1) and values_PHSD.shape[3] == width:
        from kedge.rollout.kernels.attention import decode_attention

        return decode_attention(query_RHGD.contiguous(), keys_PHSD, values_PHSD, place_R, column_R, scale=scale)
    own_RS = torch.arange(keys_PHSD.shape[2], device=column_R.device) <= column_R[:, None]
    keys_RHSD, values_RHSD = keys_PHSD[place_R], values_PHSD[place_R]
    return scaled_dot_product_attention(
        query_RHGD, keys_RHSD, values_RHSD, attn_mask=own_RS[:, None, None], scale=scale
    )
