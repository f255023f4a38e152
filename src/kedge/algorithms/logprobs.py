"""Log-probs and entropy of tokens from hidden states and LM-head weights, in little memory beside them.

Exact: tiles of tokens × vocabulary, an online log-sum-exp over the vocabulary. Backward computes the tiles again, and
only where all of them are small are they kept for it. The caller aligns hidden states with targets.
Shape letters: N token positions (any leading shape), D width, V vocabulary, R tokens and C entries of one tile.
Left out: logit soft-capping, second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from kedge.algorithms.logit_tiles import Upstream, kernels_for, target_gradients, tile_gradients, tile_sums
from kedge.core.errors import ShapeError

CHUNK_TOKENS: Final = 4096
TILE_ELEMENTS: Final = 2**24
"""Logits in one tile: 64 MiB in float32."""

GPU_TILE_FACTOR: Final = 4
"""A tile is so many times larger on a GPU: of 64 MiB, an H200 waits for launches (20 ms where 15 will do)."""

TILE_COLUMNS: Final = 2**14
"""At most so many vocabulary entries in one tile, however few the tokens: bounds the weight gradient's float32 sum."""

KEPT_BYTES: Final = 2**28
"""Where all logits of a call take no more, they are kept for backward: one product in four is saved. 256 MiB are 16
answers of 80 tokens over 49 thousand entries, and less than what the layers of such a batch keep."""

KEPT_GPU_SHARE: Final = 32
"""On a GPU they may take one part in so many of its memory: 4 GiB of 141, and not more than a small card can spare."""

COMPILED_GPU_SHARE: Final = 32
"""On a GPU a tile of compiled kernels may take so much, since nothing is held beside it: the whole vocabulary for most
models. An H200 took 16 ms instead of 21 for a step of 8,192 tokens, and the host 4 instead of 17."""


def token_logprobs(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    compiled: bool = False,
) -> Tensor:
    """log softmax((hidden · headᵀ + bias) / temperature) at the targets; float32 whatever the weights are.

    A target outside the vocabulary gives NaN, since to look for one would wait for the device. `compiled` makes one
    kernel of the work on a tile: faster on a GPU.

    >>> head_VD = torch.tensor([[1.0], [2.0], [4.0]]).log()  # hidden 1: probabilities 1/7, 2/7, 4/7
    >>> token_logprobs(torch.ones(1, 1), head_VD, torch.tensor([2])).exp()
    tensor([0.5714])
    """
    options = _Options(temperature, chunk_tokens, want_entropy=False, compiled=compiled)
    return _apply(hidden_ND, head_VD, bias_V, target_N, options)[0]


def entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    compiled: bool = False,
) -> Tensor:
    """-Σ_v p_v log p_v of the next-token distribution at each position, in nats; p as in `token_logprobs`.

    >>> entropy(torch.ones(1, 1), torch.zeros(4, 1))  # four equal probabilities: log 4
    tensor([1.3863])
    """
    options = _Options(temperature, chunk_tokens, want_entropy=True, compiled=compiled)
    return _apply(hidden_ND, head_VD, bias_V, None, options)[1]


def logprobs_and_entropy(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` and `entropy` in a single pass over the logits."""
    options = _Options(temperature, chunk_tokens, want_entropy=True, compiled=compiled)
    return _apply(hidden_ND, head_VD, bias_V, target_N, options)


@dataclass(frozen=True, slots=True)
class _Options:
    temperature: float
    chunk_tokens: int
    want_entropy: bool
    compiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The linear layer, and the type in which it multiplies."""

    weight_VD: Tensor
    bias_V: Tensor | None
    dtype: torch.dtype

    @property
    def logit_dtype(self) -> torch.dtype:
        """See `logits_of`."""
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Tiles of logits that wait for backward, which takes each of them once, by its first row and column."""

    is_wanted: bool
    tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])

    def put(self, rows: slice, cols: slice, logits_RC: Tensor) -> None:
        if self.is_wanted:
            self.tiles[rows.start, cols.start] = logits_RC

    def take(self, rows: slice, cols: slice) -> Tensor | None:
        return self.tiles.pop((rows.start, cols.start), None)


def _apply(
    hidden_ND: Tensor, head_VD: Tensor, bias_V: Tensor | None, target_N: Tensor | None, options: _Options
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy; NaN what the options do not ask for."""
    shape = hidden_ND.shape[:-1]
    if target_N is not None and target_N.shape != shape:
        raise ShapeError(
            f"targets have shape {tuple(target_N.shape)}, hidden states {tuple(hidden_ND.shape)}: "
            f"one target a position was expected, {tuple(shape)}"
        )
    flat_N = None if target_N is None else target_N.reshape(-1)
    flat_ND = hidden_ND.reshape(-1, hidden_ND.shape[-1])
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden_ND, head_VD, bias_V))
    logp_N, entropy_N = _Tiled.apply(flat_ND, head_VD, bias_V, flat_N, options, learns)
    return logp_N.view(shape), entropy_N.view(shape)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]: torch declares *args
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor | None,
        options: _Options,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight_VD=head_VD, bias_V=bias_V, dtype=_matmul_dtype(head_VD))
        kept_bytes = len(hidden_ND) * len(head_VD) * head.logit_dtype.itemsize
        kept = _Kept(is_wanted=learns and kept_bytes <= _kept_bytes(head_VD))
        logp_N, entropy_N, norm_N = _forward(hidden_ND, head, target_N, options, kept)
        ctx.save_for_backward(hidden_ND, head_VD, bias_V, target_N, norm_N, logp_N, entropy_N)
        ctx.dtype, ctx.options, ctx.kept = head.dtype, options, kept
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]: torch declares *args
        ctx: Any, grad_logp_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, bias_V, target_N, norm_N, logp_N, entropy_N = ctx.saved_tensors
        head = _Head(weight_VD=head_VD, bias_V=bias_V, dtype=ctx.dtype)
        upstream = Upstream(
            norm_R=norm_N,
            logp_R=logp_N,
            entropy_R=entropy_N,
            g_R=torch.zeros_like(norm_N) if grad_logp_N is None else grad_logp_N,
            h_R=grad_entropy_N,
        )
        grads = _backward(hidden_ND, head, target_N, upstream, ctx.options, ctx.kept, ctx.needs_input_grad)
        return *grads, None, None, None


def _kept_bytes(like: Tensor) -> int:
    """How much of the logits may be kept on this device."""
    return _memory(like.device) // KEPT_GPU_SHARE if like.is_cuda else KEPT_BYTES


def _memory(gpu: torch.device) -> int:
    return torch.cuda.get_device_properties(gpu).total_memory


def _matmul_dtype(head_VD: Tensor) -> torch.dtype:
    device = head_VD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head_VD.dtype


def _spans(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _tile_columns(rows: int, head: _Head, options: _Options) -> int:
    rows, weight_VD = max(1, min(rows, options.chunk_tokens)), head.weight_VD
    if options.compiled and weight_VD.is_cuda:
        most = _memory(weight_VD.device) // COMPILED_GPU_SHARE
        # All of it for a tile of logits, and half of it for the weight gradient's float32 sum.
        columns = min(most // (rows * head.logit_dtype.itemsize), most // 2 // (4 * weight_VD.shape[1]))
    else:
        columns = min(TILE_COLUMNS, TILE_ELEMENTS * (GPU_TILE_FACTOR if weight_VD.is_cuda else 1) // rows)
    return max(1, min(columns, len(weight_VD)))


def _logits(hidden_RD: Tensor, head: _Head, cols: slice) -> Tensor:
    """A fresh tile that the caller may overwrite, before the temperature."""
    bias_C = None if head.bias_V is None else head.bias_V[cols].to(head.dtype)
    return logits_of(hidden_RD.to(head.dtype), head.weight_VD[cols].to(head.dtype), bias_C)


def logits_of(hidden_RD: Tensor, weight_CD: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """hidden · weightᵀ + bias in float32 at least, and never rounded to a two-byte type, in which a logit of 20 is off
    by up to 0.06: the numbers of a generator and of a trainer would differ by that. Without gradients.

    >>> logits_of(torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    dtype = torch.promote_types(weight_CD.dtype, torch.float32)
    if weight_CD.dtype == dtype:
        return linear(hidden_RD, weight_CD, bias_C)
    if weight_CD.is_cuda:
        logits_RC = cast(Any, torch.mm)(hidden_RD, weight_CD.T, out_dtype=dtype)
    else:
        with torch.autocast("cpu", enabled=False):
            logits_RC = linear(hidden_RD.to(dtype), weight_CD.to(dtype))
    return logits_RC if bias_C is None else logits_RC.add_(bias_C)


def _place(target_R: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """The targets' columns within a tile, as an index (R, 1) that is always valid, and which of them are in it."""
    column_R = target_R - cols.start
    width = cols.stop - cols.start
    return column_R.clamp(0, width - 1)[:, None], (column_R >= 0) & (column_R < width)


def _forward(
    hidden_ND: Tensor, head: _Head, target_N: Tensor | None, options: _Options, kept: _Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and norm (see Upstream) of each position; NaN what is not asked for."""
    rows_count, dtype = len(hidden_ND), head.logit_dtype
    # Below any logit, and not -inf: 0 · -inf would be NaN when the first tile is folded in.
    top_N = hidden_ND.new_full((rows_count,), -1e30, dtype=dtype)
    sum_N, picked_N = torch.zeros_like(top_N), torch.full_like(top_N, torch.nan)
    dot_N = torch.zeros_like(top_N) if options.want_entropy else None
    columns = _tile_columns(rows_count, head, options)
    for rows in _spans(rows_count, options.chunk_tokens):
        for cols in _spans(len(head.weight_VD), columns):
            logits_RC = _logits(hidden_ND[rows], head, cols)
            if target_N is not None:
                index_R1, inside_R = _place(target_N[rows], cols)
                picked_N[rows] = torch.where(inside_R, logits_RC.gather(1, index_R1)[:, 0], picked_N[rows])
            kept.put(rows, cols, logits_RC)
            dot_R = None if dot_N is None else dot_N[rows]
            _fold(logits_RC, top_N[rows], sum_N[rows], dot_R, options, is_kept=kept.is_wanted)
    log_sum_N, temperature = sum_N.log(), options.temperature
    entropy_N = torch.full_like(top_N, torch.nan) if dot_N is None else log_sum_N - dot_N / sum_N
    # Not picked - norm: where logits are large, norm has lost the digits that tell them apart.
    return (picked_N - top_N) / temperature - log_sum_N, entropy_N, top_N + temperature * log_sum_N


def _fold(
    logits_RC: Tensor, top_R: Tensor, sum_R: Tensor, dot_R: Tensor | None, options: _Options, *, is_kept: bool
) -> None:
    """Take a tile into the running sums (see TileSums), which are in place; the tile is overwritten or kept."""
    temperature, kernels = options.temperature, kernels_for(logits_RC, compiled=options.compiled)
    # A compiled kernel holds nothing in between: to overwrite the tile would only be one more pass.
    is_kept = is_kept or options.compiled
    tile = tile_sums(kernels, logits_RC, temperature, with_dot=dot_R is not None, is_kept=is_kept)
    new_top_R = torch.maximum(top_R, tile.top_R)
    shift_R, tile_shift_R = (top_R - new_top_R) / temperature, (tile.top_R - new_top_R) / temperature
    scale_R, tile_scale_R = shift_R.exp(), tile_shift_R.exp()
    if dot_R is not None and tile.dot_R is not None:
        dot_R.add_(sum_R * shift_R).mul_(scale_R).add_(tile_scale_R * (tile.dot_R + tile.sum_R * tile_shift_R))
    sum_R.mul_(scale_R).add_(tile_scale_R * tile.sum_R)
    top_R.copy_(new_top_R)


def _backward(
    hidden_ND: Tensor,
    head: _Head,
    target_N: Tensor | None,
    upstream: Upstream,
    options: _Options,
    kept: _Kept,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias, summed in float32; autograd casts them to their tensors' types."""
    rows_count, dtype = len(hidden_ND), upstream.norm_R.dtype
    grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=dtype) if needs[0] else None
    grad_weight_VD = torch.zeros_like(head.weight_VD) if needs[1] else None
    grad_bias_V = torch.zeros_like(head.bias_V) if needs[2] and head.bias_V is not None else None
    # Columns outside: the weight's float32 sum is then one tile wide, and not a second copy of the head.
    for cols in _spans(len(head.weight_VD), _tile_columns(rows_count, head, options)):
        weight_CD = head.weight_VD[cols].to(head.dtype)
        sum_CD: Tensor | None = None
        sum_C = None if grad_bias_V is None else torch.zeros_like(grad_bias_V[cols], dtype=dtype)
        for rows in _spans(rows_count, options.chunk_tokens):
            hidden_RD = hidden_ND[rows].to(head.dtype)
            found_RC = kept.take(rows, cols)
            logits_RC = _logits(hidden_RD, head, cols) if found_RC is None else found_RC
            target_R = None if target_N is None else target_N[rows]
            grad_RC = _logit_gradients(logits_RC, target_R, _rows_of(upstream, rows), cols, options, head.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[rows] += grad_RC @ weight_CD
            if grad_weight_VD is not None:
                product_CD = grad_RC.T @ hidden_RD
                sum_CD = product_CD if sum_CD is None else sum_CD.to(dtype) + product_CD
            if sum_C is not None:
                sum_C += grad_RC.sum(0, dtype=dtype)
        if grad_weight_VD is not None and sum_CD is not None:
            grad_weight_VD[cols] = sum_CD
        if grad_bias_V is not None and sum_C is not None:
            grad_bias_V[cols] = sum_C
    return grad_hidden_ND, grad_weight_VD, grad_bias_V


def _rows_of(upstream: Upstream, rows: slice) -> Upstream:
    return Upstream(
        norm_R=upstream.norm_R[rows],
        logp_R=upstream.logp_R[rows],
        entropy_R=upstream.entropy_R[rows],
        g_R=upstream.g_R[rows],
        h_R=None if upstream.h_R is None else upstream.h_R[rows],
    )


def _logit_gradients(
    logits_RC: Tensor,
    target_R: Tensor | None,
    upstream: Upstream,
    cols: slice,
    options: _Options,
    dtype: torch.dtype,
) -> Tensor:
    """In the type of the products. The logits are overwritten."""
    kernels = kernels_for(logits_RC, compiled=options.compiled)
    grad_RC = tile_gradients(kernels, logits_RC, upstream, options.temperature, dtype)
    if target_R is not None:
        index_R1, inside_R = _place(target_R, cols)
        own_R1 = target_gradients(upstream, options.temperature)[:, None].to(grad_RC.dtype)
        grad_RC.scatter_(1, index_R1, torch.where(inside_R[:, None], own_R1, grad_RC.gather(1, index_R1)))
    return grad_RC
