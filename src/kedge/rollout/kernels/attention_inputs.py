# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""Queries, keys and values of one new token a row: norm, products, biases, rotation, and the write to the cache.

Shape letters: R slots, P places, H key heads, G query heads a key head, S columns, D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kedge.rollout.adapters import LowRank
from kedge.rollout.kernels.chain import fetch_rows, follow
from kedge.rollout.kernels.launch import launch
from kedge.rollout.kernels.low_rank import load_up, with_low_rank
from kedge.rollout.kernels.stream import Stream, inverse_root, load_squares
from kedge.rollout.tiles import Tile, beside


def attention_inputs(
    stream: Stream,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    rotation: tuple[Tensor, Tensor],
    keys_PHSD: Tensor,
    values_PHSD: Tensor,
    place_R: Tensor,
    column_R: Tensor,
    *,
    low: LowRank | None = None,
    eps: float,
    tile: Tile,
    chained: bool = False,
) -> Tensor:
    """The rotated queries (R, H, G, D); keys and values go to column `column_R[r]` of place `place_R[r]`. `low` are
    the adapters of the three weights."""
    rows, width = stream.weighted_RW.shape
    heads, head_width = keys_PHSD.shape[1], keys_PHSD.shape[3]
    if low is not None:
        tile = beside(tile, columns=head_width, ranks=low.block)
    query_heads = weights[0].shape[0] // head_width
    q_RHGD = stream.weighted_RW.new_empty(rows, heads, query_heads // heads, head_width)
    tiles = stream.squares_RN.shape[1]
    launch(_attention_inputs, (triton.cdiv(rows, tile.rows), query_heads + 2 * heads))(
        stream.weighted_RW,
        stream.squares_RN,
        *weights,
        *biases,
        None if low is None else low.a_MZK,
        None if low is None else low.b_NZ,
        None if low is None else low.scale_MZ,
        *rotation,
        place_R,
        column_R,
        q_RHGD,
        keys_PHSD,
        values_PHSD,
        rows,
        eps,
        keys_PHSD.stride(0),
        keys_PHSD.stride(1),
        WIDTH=width,
        QUERY_HEADS=query_heads,
        HEADS=heads,
        HALF=head_width // 2,
        TILES=tiles,
        TILES_PADDED=triton.next_power_of_2(tiles),
        BLOCK_R=tile.rows,
        BLOCK_K=tile.depth,
        RANKS=0 if low is None else low.b_NZ.shape[1],
        BLOCK_Z=0 if low is None else low.block,
        CHAINED=chained,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chained,
    )
    return q_RHGD


@triton.jit
def _attention_inputs(
    x_ptr,
    squares_ptr,
    wq_ptr,
    wk_ptr,
    wv_ptr,
    bq_ptr,
    bk_ptr,
    bv_ptr,
    down_ptr,
    up_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    place_ptr,
    column_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    rows,
    eps,
    place_stride,
    head_stride,
    WIDTH: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One head, of queries, keys or values, whose two halves the rotation mixes."""
    unclamped_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_R = tl.minimum(unclamped_R, rows - 1)
    head = tl.program_id(1)
    w_ptr, b_ptr = wq_ptr, bq_ptr
    local = head
    if head >= QUERY_HEADS + HEADS:
        w_ptr, b_ptr = wv_ptr, bv_ptr
        local = head - QUERY_HEADS - HEADS
    elif head >= QUERY_HEADS:
        w_ptr, b_ptr = wk_ptr, bk_ptr
        local = head - QUERY_HEADS
    w_ptr += local * 2 * HALF * WIDTH
    fetch_rows(w_ptr, 2 * HALF, WIDTH, 0, WIDTH, CHAINED)
    # What the kernel before has no part in is read while it ends, and all of it before the product.
    d = tl.arange(0, HALF)
    column_R = tl.load(column_ptr + row_R)
    at_RD = tl.load(place_ptr + row_R)[:, None] * place_stride + local * head_stride + column_R[:, None] * 2 * HALF + d
    cos_RD = tl.load(cos_ptr + column_R[:, None] * HALF + d)
    sin_RD = tl.load(sin_ptr + column_R[:, None] * HALF + d)
    first_bias_D, second_bias_D = _load_biases(b_ptr, local * 2 * HALF, HALF)
    if RANKS > 0:  # the rows of B are those of the heads in their order
        member = (head >= QUERY_HEADS).to(tl.int32) + (head >= QUERY_HEADS + HEADS).to(tl.int32)
        down_ptr, up_ptr = down_ptr + member * RANKS * WIDTH, up_ptr + head * 2 * HALF * RANKS
        scale_ptr += member * RANKS
    follow(CHAINED)
    squares_RN = load_squares(squares_ptr, row_R, TILES, TILES_PADDED)
    a_RD, b_RD = _halves(
        x_ptr, w_ptr, down_ptr, up_ptr, scale_ptr, row_R, WIDTH, BLOCK_R, HALF, BLOCK_K, RANKS, BLOCK_Z
    )
    scale_R1 = inverse_root(squares_RN, eps, WIDTH)[:, None]
    a_RD, b_RD = a_RD * scale_R1 + first_bias_D[None, :], b_RD * scale_R1 + second_bias_D[None, :]
    inside = (unclamped_R < rows)[:, None]
    q_ptrs = q_ptr + (row_R[:, None] * QUERY_HEADS + local) * (2 * HALF) + d
    if head >= QUERY_HEADS + HEADS:
        _store_halves(values_ptr + at_RD, a_RD, b_RD, inside, HALF)
    elif head >= QUERY_HEADS:
        _store_halves(keys_ptr + at_RD, a_RD * cos_RD - b_RD * sin_RD, b_RD * cos_RD + a_RD * sin_RD, inside, HALF)
    else:
        _store_halves(q_ptrs, a_RD * cos_RD - b_RD * sin_RD, b_RD * cos_RD + a_RD * sin_RD, inside, HALF)


@triton.jit
def _load_biases(b_ptr, start, HALF: tl.constexpr):
    """Of both halves of a head; zeros where there are none."""
    d = tl.arange(0, HALF)
    first_D, second_D = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    if b_ptr is not None:
        first_D = tl.load(b_ptr + start + d).to(tl.float32)
        second_D = tl.load(b_ptr + start + HALF + d).to(tl.float32)
    return first_D, second_D


@triton.jit
def _store_halves(ptrs_RD, first_RD, second_RD, inside, HALF: tl.constexpr):
    dtype: tl.constexpr = ptrs_RD.dtype.element_ty
    tl.store(ptrs_RD, first_RD.to(dtype), mask=inside)
    tl.store(ptrs_RD + HALF, second_RD.to(dtype), mask=inside)


@triton.jit
def _halves(
    x_ptr,
    w_ptr,
    down_ptr,
    up_ptr,
    scale_ptr,
    row_R,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """The products of the same rows with N rows from an address and with the N after them, adapters included. By
    address, since heads of queries, keys and values are of three matrices, and a program cannot choose between tiled
    ones."""
    n, k = tl.arange(0, N), tl.arange(0, BLOCK_K)
    x_ptrs, w_ptrs = x_ptr + row_R[:, None] * DEPTH + k, w_ptr + n[None, :] * DEPTH + k[:, None]
    a_RN = tl.zeros([BLOCK_R, N], tl.float32)
    b_RN = tl.zeros([BLOCK_R, N], tl.float32)
    if RANKS > 0:
        first_NZ, scale_Z = load_up(up_ptr, scale_ptr, n, 0, RANKS, BLOCK_Z)
        second_NZ, _ = load_up(up_ptr, scale_ptr, N + n, 0, RANKS, BLOCK_Z)
        down_ptrs = down_ptr + tl.arange(0, BLOCK_Z)[None, :] * DEPTH + k[:, None]
        low_RZ = tl.zeros([BLOCK_R, BLOCK_Z], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        x_RK = tl.load(x_ptrs + at)
        a_RN = tl.dot(x_RK, tl.load(w_ptrs + at), a_RN, input_precision="ieee")
        b_RN = tl.dot(x_RK, tl.load(w_ptrs + N * DEPTH + at), b_RN, input_precision="ieee")
        if RANKS > 0:
            low_RZ = tl.dot(x_RK, tl.load(down_ptrs + at), low_RZ, input_precision="ieee")
    if RANKS > 0:
        a_RN, b_RN = with_low_rank(a_RN, low_RZ, first_NZ, scale_Z), with_low_rank(b_RN, low_RZ, second_NZ, scale_Z)
        for rank in range(BLOCK_Z, RANKS, BLOCK_Z):
            low_RZ = _rows(x_ptrs, down_ptrs + rank * DEPTH, DEPTH, BLOCK_R, BLOCK_Z, BLOCK_K)
            first_NZ, scale_Z = load_up(up_ptr, scale_ptr, n, rank, RANKS, BLOCK_Z)
            second_NZ, _ = load_up(up_ptr, scale_ptr, N + n, rank, RANKS, BLOCK_Z)
            a_RN = with_low_rank(a_RN, low_RZ, first_NZ, scale_Z)
            b_RN = with_low_rank(b_RN, low_RZ, second_NZ, scale_Z)
    return a_RN, b_RN


@triton.jit
def _rows(x_ptrs, w_ptrs, DEPTH: tl.constexpr, BLOCK_R: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The product of some rows with N others."""
    out_RN = tl.zeros([BLOCK_R, N], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        out_RN = tl.dot(tl.load(x_ptrs + at), tl.load(w_ptrs + at), out_RN, input_precision="ieee")
    return out_RN
