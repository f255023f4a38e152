# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""From hidden states to tokens, without logits in memory: product, temperature, noise and argmax a tile at a time.

The noise is that of `rollout.sampling`, from the same counters, so the tokens are those of its `draw`, except where
two tokens are all but equal: the logits here are not rounded to the weights' type, and a GPU's short logarithm is off
by up to 5e-6 of itself. `top_k` and `top_p` need all logits of a row and are left to `draw`.
Shape letters: R slots, D width, V vocabulary, N tiles of it, K steps since the host last looked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kedge.rollout.kernels.chain import follow
from kedge.rollout.kernels.launch import launch
from kedge.rollout.kernels.product import product, tiled
from kedge.rollout.steps import Slots
from kedge.rollout.tiles import Tile


def draw_and_advance(
    slots: Slots,
    hidden_RD: Tensor,
    head_VD: Tensor,
    stop_V: Tensor,
    *,
    temperature: float,
    least: int,
    most: int,
    tile: Tile,
    chained: bool = False,
) -> None:
    """One token for each slot, and `slots` as they are after it. Answers have `least` to `most` tokens."""
    rows, (vocabulary, width) = len(hidden_RD), head_VD.shape
    tiles = triton.cdiv(vocabulary, tile.columns)
    score_RN, logit_RN, top_RN, sum_RN = hidden_RD.new_empty(4, rows, tiles, dtype=torch.float32)
    token_RN = hidden_RD.new_empty(rows, tiles, dtype=torch.int32)
    tile_bests = (score_RN, token_RN, logit_RN, top_RN, sum_RN)
    units = triton.cdiv(rows, tile.rows) * tiles
    launch(_best_of_tile, (min(units, tile.programs * _processors(head_VD)),))(
        tiled(hidden_RD, tile.rows, tile.depth),
        tiled(head_VD, tile.columns, tile.depth),
        stop_V,
        slots.key_R,
        slots.drawn_R,
        *tile_bests,
        rows,
        1 / temperature,
        LEAST=least,
        FAST=hidden_RD.is_cuda,
        VOCABULARY=vocabulary,
        WIDTH=width,
        BLOCK_R=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        CHAINED=chained,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chained,
    )
    launch(_best_of_row, (rows,))(
        *tile_bests,
        stop_V,
        slots.token_R,
        slots.column_R,
        slots.drawn_R,
        slots.alive_R,
        slots.at_R,
        slots.token_KR,
        slots.logp_KR,
        slots.token_KR.stride(0),
        most,
        VOCABULARY=vocabulary,
        TILES=tiles,
        PADDED=triton.next_power_of_2(tiles),
        CHAINED=chained,
        num_warps=4,
        launch_pdl=chained,
    )


def _processors(like: Tensor) -> int:
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 1


@triton.jit
def _mixed(x):
    """The output function of SplitMix64, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:  # one instruction, of absolute error 2^-22: enough where log2 x is not near 0
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _inverse(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1 / x


@triton.jit
def _wait(bits, FAST: tl.constexpr):
    """E = -log(1 - u) of `rollout.sampling.log_waits`. A series where u is small: there 1 - u has lost its digits."""
    u = tl.minimum(
        ((bits >> 11).to(tl.int64).to(tl.float32) + 0.5) * 1.1102230246251565e-16, 1 - 5.9604644775390625e-08
    )
    small = u * (1 + u * (0.5 + u * (0.3333333333 + u * (0.25 + u * (0.2 + u * 0.1666666667)))))
    return tl.where(u < 0.03125, small, -0.6931471805599453 * _log2(1 - u, FAST))


@triton.jit
def _best_of_tile(
    x_tiles,
    w_tiles,
    stop_ptr,
    key_ptr,
    drawn_ptr,
    score_ptr,
    token_ptr,
    logit_ptr,
    top_ptr,
    sum_ptr,
    rows,
    inverse_temperature,
    LEAST: tl.constexpr,
    FAST: tl.constexpr,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Every program takes tile after tile, and loads the next one while it draws from the last."""
    follow(CHAINED)
    TILES: tl.constexpr = (VOCABULARY + BLOCK_N - 1) // BLOCK_N
    blocks = tl.cdiv(rows, BLOCK_R)
    for unit in tl.range(tl.program_id(0), TILES * blocks, tl.num_programs(0), flatten=True):
        block, tile = unit % blocks, unit // blocks
        unclamped_R = block * BLOCK_R + tl.arange(0, BLOCK_R)
        row_R = tl.minimum(unclamped_R, rows - 1)
        v_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        logit_RN = product(x_tiles, w_tiles, block * BLOCK_R, tile * BLOCK_N, 0, WIDTH, BLOCK_R, BLOCK_N, BLOCK_K)
        logit_RN = logit_RN * inverse_temperature
        if VOCABULARY % BLOCK_N:
            logit_RN = tl.where((v_N < VOCABULARY)[None, :], logit_RN, float("-inf"))
        top_R = tl.max(logit_RN, 1)
        weight_RN = _exp2((logit_RN - top_R[:, None]) * 1.4426950408889634, FAST)
        sum_R = tl.sum(weight_RN, 1)

        drawn_R = tl.load(drawn_ptr + row_R)
        key_R = _mixed(
            (tl.load(key_ptr + row_R) + (drawn_R + 1) * (0x9E3779B97F4A7C15 - 0x10000000000000000)).to(tl.uint64)
        )
        counter_N = (v_N + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
        bits_RN = _mixed(key_R[:, None] + counter_N[None, :])
        # The largest weight / E is the largest logit - log E, and needs no logarithm but one for the tile.
        race_RN = weight_RN * _inverse(_wait(bits_RN, FAST), FAST)
        if LEAST > 0:
            stops_N = tl.load(stop_ptr + v_N, mask=v_N < VOCABULARY, other=0) != 0
            race_RN = tl.where(stops_N[None, :] & (drawn_R < LEAST)[:, None], 0.0, race_RN)
        best_R, index_R = tl.max(race_RN, 1, return_indices=True)
        chosen_RN = tl.arange(0, BLOCK_N)[None, :] == index_R[:, None]
        at_R, inside_R = row_R * TILES + tile, unclamped_R < rows
        tl.store(score_ptr + at_R, top_R + tl.log(best_R), mask=inside_R)
        tl.store(token_ptr + at_R, tile * BLOCK_N + index_R, mask=inside_R)
        tl.store(logit_ptr + at_R, tl.sum(tl.where(chosen_RN, logit_RN, 0.0), 1), mask=inside_R)
        tl.store(top_ptr + at_R, top_R, mask=inside_R)
        tl.store(sum_ptr + at_R, sum_R, mask=inside_R)


@triton.jit
def _best_of_row(
    score_ptr,
    found_ptr,
    logit_ptr,
    top_ptr,
    sum_ptr,
    stop_ptr,
    token_ptr,
    column_ptr,
    drawn_ptr,
    alive_ptr,
    at_ptr,
    tokens_ptr,
    logps_ptr,
    step_stride,
    most,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The best of all tiles, and the row's next state; `rollout.slots.advance` says the same in torch."""
    follow(CHAINED)
    row = tl.program_id(0)
    n = tl.arange(0, PADDED)
    inside = n < TILES
    at_N = row * TILES + n
    _, best = tl.max(tl.load(score_ptr + at_N, mask=inside, other=float("-inf")), 0, return_indices=True)
    best = row * TILES + tl.minimum(best, TILES - 1)
    top_N = tl.load(top_ptr + at_N, mask=inside, other=float("-inf"))
    top = tl.max(top_N, 0)
    total = tl.sum(tl.load(sum_ptr + at_N, mask=inside, other=0.0) * tl.exp(top_N - top), 0)
    # A row of NaN has no best token; its log-prob says so, and its token must only be one that can be looked up.
    token = tl.minimum(tl.load(found_ptr + best), VOCABULARY - 1).to(tl.int64)
    logp = tl.load(logit_ptr + best) - top - tl.log(total)

    at, alive, drawn = tl.load(at_ptr + row), tl.load(alive_ptr + row), tl.load(drawn_ptr + row) + 1
    tl.store(tokens_ptr + at * step_stride + row, token)
    tl.store(logps_ptr + at * step_stride + row, logp)
    tl.store(at_ptr + row, at + 1)
    ended = (tl.load(stop_ptr + token) != 0) | (drawn >= most)
    if alive != 0:
        tl.store(token_ptr + row, token)
        tl.store(column_ptr + row, tl.load(column_ptr + row) + 1)
        tl.store(drawn_ptr + row, drawn)
        tl.store(alive_ptr + row, tl.where(ended, 0, 1).to(tl.int64))
