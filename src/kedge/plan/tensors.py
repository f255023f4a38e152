"""Bytes of what a pass keeps and a model holds: activations, logits, caches, frozen weights. Closed formulas.

They follow the code that allocates: the layers of `models/forward`, the tiles of `algorithms/logprobs`, the cache of
`rollout`. Nothing in them is fitted.
Letters: D width, Q width of all queries, K of the keys, F inner width, V vocabulary, N tokens of a pass.
"""

from __future__ import annotations

from typing import Final

from kedge.plan.machines import Kind, Machine
from kedge.plan.passes import bucket
from kedge.plan.shapes import ModelShape

MASTER: Final = 4
"""Bytes of a weight in float32."""
NARROW: Final = 2
"""Of one in bfloat16."""
KEPT_SHARE: Final = 32
"""Logits are kept for the backward pass where they take no more than one part in so many of the GPU's memory."""
CPU_KEPT: Final = 2**28
CPU_TILE: Final = 2**26
TILE_TOKENS: Final = 4096
QUANTISED: Final = {8: 1.02, 4: 0.56, 16: 2.0}
"""Bytes of a weight in so many bits, with its scales."""


def layer_bytes(shape: ModelShape, kind: Kind, *, is_frozen: bool = False) -> int:
    """What one layer keeps of a token for its backward pass; `is_frozen` where adapters alone learn.

    On a GPU: the stream before attention and before the feed-forward part (float32), their norms, queries, keys, values
    and attention's output, gate, up and their product. On a CPU the layers of transformers keep all steps of each norm
    whose weight learns, attention's output twice and the gate before and after, in float32.

    >>> small = ModelShape(source="", layers=30, width=576, inner=1536, heads=9, kv_heads=3, head_dim=64,
    ...     vocabulary=49152, is_tied=True, has_bias=False, window=8192)
    >>> layer_bytes(small, "cuda")  # 12·576 + 4·576 + 4·192 + 6·1536
    19200
    """
    width, query, keys, inner = shape.width, shape.query_width, shape.kv_width, shape.inner
    if kind == "cuda":
        return 12 * width + 4 * query + 4 * keys + 6 * inner
    return MASTER * ((4 if is_frozen else 6) * width + 3 * query + 2 * keys + 4 * inner)


def backward_bytes(shape: ModelShape, kind: Kind) -> int:
    """Of a token, while one layer is computed backwards: gradients of gate, up, their product and the streams."""
    factor = 1 if kind == "cuda" else 2
    return factor * (6 * shape.inner + 14 * shape.width)


def forward_bytes(shape: ModelShape, kind: Kind) -> int:
    """Of a token, while one layer is computed without gradients."""
    factor = 1 if kind == "cuda" else 2
    return factor * (6 * shape.inner + 12 * shape.width + 2 * shape.query_width)


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    layers: int,
    kind: Kind,
    recompute: bool = False,
    captured: bool = False,
    is_frozen: bool = False,
) -> int:
    """Of a pass through `layers` layers; with `recompute` the input of each, and all of one.

    Twice the tokens take twice the memory:

    >>> small = ModelShape(source="", layers=2, width=8, inner=16, heads=2, kv_heads=2, head_dim=4,
    ...     vocabulary=10, is_tied=True, has_bias=False, window=64)
    >>> activation_bytes(small, 200, layers=2, kind="cuda") == 2 * activation_bytes(small, 100, layers=2, kind="cuda")
    True
    """
    padded = bucket(tokens) if captured else tokens
    if recompute:
        inputs = MASTER * shape.width * max(layers - 1, 0)
        return padded * (inputs + one_layer_bytes(shape, kind, is_frozen=is_frozen))
    kept = layer_bytes(shape, kind, is_frozen=is_frozen)
    return padded * (layers * kept + backward_bytes(shape, kind))


def one_layer_bytes(shape: ModelShape, kind: Kind, *, is_frozen: bool = False) -> int:
    """Of a token, of a layer that is computed again and then backwards."""
    return layer_bytes(shape, kind, is_frozen=is_frozen) + backward_bytes(shape, kind)


def logit_bytes(shape: ModelShape, counted: int, *, machine: Machine) -> int:
    """Of the logits of so many predicted tokens: all of them where they are few, else a tile; and their gradient.

    >>> card = Machine(name="x", kind="cuda", memory=64 * 2**30, flops=1, bandwidth=1, watts=1)
    >>> small = ModelShape(source="", layers=1, width=8, inner=8, heads=1, kv_heads=1, head_dim=8,
    ...     vocabulary=1000, is_tied=True, has_bias=False, window=64)
    >>> logit_bytes(small, 100, machine=card)  # 100 · 1000 · (4 + 2)
    600000
    """
    whole = counted * shape.vocabulary * MASTER
    if machine.kind == "cpu":
        return whole if whole <= CPU_KEPT else 2 * CPU_TILE
    limit = machine.memory // KEPT_SHARE
    tile = min(min(counted, TILE_TOKENS) * shape.vocabulary * MASTER, limit)
    return (whole if whole <= limit else tile) + tile // 2


def cache_bytes(shape: ModelShape, kind: Kind) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_width * (NARROW if kind == "cuda" else MASTER)


def weight_bytes(kind: Kind) -> int:
    """Of a weight as it computes."""
    return NARROW if kind == "cuda" else MASTER


def frozen_bytes(shape: ModelShape, weights: int, bits: int, kind: Kind) -> int:
    """Of a frozen model: its layers in so many bits, all else as it computes.

    >>> small = ModelShape(source="", layers=1, width=10, inner=10, heads=1, kv_heads=1, head_dim=10,
    ...     vocabulary=10, is_tied=True, has_bias=False, window=64)
    >>> frozen_bytes(small, small.parameters, 16, "cuda") == 2 * small.parameters
    True
    """
    if bits == 16:
        return weights * weight_bytes(kind)
    in_layers = shape.layers * shape.layer_weights
    return int(in_layers * QUANTISED[bits] + (weights - in_layers) * weight_bytes(kind))
