# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""A product that is added to the residual stream, ready for the next norm. Shape letters: R slots, W width, K depth."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kedge.rollout.adapters import LowRank
from kedge.rollout.kernels.chain import fetch_rows, follow
from kedge.rollout.kernels.launch import launch
from kedge.rollout.kernels.low_rank import load_up, product_beside, with_low_rank
from kedge.rollout.kernels.product import product, tiled
from kedge.rollout.kernels.stream import Stream
from kedge.rollout.tiles import Tile, beside


def added(
    stream: Stream,
    input_RK: Tensor,
    weight_WK: Tensor,
    bias_W: Tensor | None,
    norm_W: Tensor,
    *,
    low: LowRank | None = None,
    tile: Tile,
    arrived: Tensor,
    chained: bool = False,
) -> Stream:
    """The stream plus weight · input + bias, ready for the norm whose weight is given. The old one is overwritten.

    `low` are the adapters of the weight. `arrived` are zeros (int32), one for each tile at least, which are zeros again
    afterwards.
    """
    rows, width = stream.plain_RW.shape
    if low is not None:
        tile = beside(tile, columns=tile.columns, ranks=low.block)
    tiles = width // tile.columns
    squares_RN = stream.squares_RN.new_empty(rows, tiles)
    parts = squares_RN.new_empty(tile.splits, rows, width) if tile.splits > 1 else None
    launch(_added, (triton.cdiv(rows, tile.rows), tiles, tile.splits))(
        tiled(input_RK, tile.rows, tile.depth),
        tiled(weight_WK, tile.columns, tile.depth),
        weight_WK,
        bias_W,
        None if low is None else tiled(low.a_MZK[0], low.block, tile.depth),
        None if low is None else low.b_NZ,
        None if low is None else low.scale_MZ,
        norm_W,
        stream.plain_RW,
        stream.weighted_RW,
        squares_RN,
        parts,
        arrived,
        rows,
        DEPTH=weight_WK.shape[1],
        WIDTH=width,
        SPLITS=tile.splits,
        BLOCK_R=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        RANKS=0 if low is None else low.b_NZ.shape[1],
        BLOCK_Z=0 if low is None else low.block,
        CHAINED=chained,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chained,
    )
    return Stream(plain_RW=stream.plain_RW, weighted_RW=stream.weighted_RW, squares_RN=squares_RN)


@triton.jit
def _added(
    x_tiles,
    w_tiles,
    w_ptr,
    b_ptr,
    a_tiles,
    up_ptr,
    scale_ptr,
    norm_ptr,
    plain_ptr,
    weighted_ptr,
    squares_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Of programs that share a depth, the one that comes last adds all parts, in their order: always the same sum."""
    unclamped_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_R, inside_R = tl.minimum(unclamped_R, rows - 1), unclamped_R < rows
    tile, split = tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    BLOCKS: tl.constexpr = DEPTH // BLOCK_K
    start, stop = split * BLOCKS // SPLITS * BLOCK_K, (split + 1) * BLOCKS // SPLITS * BLOCK_K
    fetch_rows(
        w_ptr + tile * BLOCK_N * DEPTH, BLOCK_N, DEPTH, start, (BLOCKS + SPLITS - 1) // SPLITS * BLOCK_K, CHAINED
    )
    norm_N = tl.load(norm_ptr + n)
    if RANKS > 0:
        up_NZ, scale_Z = load_up(up_ptr, scale_ptr, n, 0, RANKS, BLOCK_Z)
    follow(CHAINED)
    at_RN = row_R[:, None] * WIDTH + n
    old_RN = tl.load(plain_ptr + at_RN)
    row = tl.program_id(0) * BLOCK_R
    if RANKS > 0:
        # Programs that share a depth each add the low-rank part of theirs.
        sum_RN, low_RZ = product_beside(
            x_tiles, w_tiles, a_tiles, row, tile * BLOCK_N, start, stop, BLOCK_R, BLOCK_N, BLOCK_K, BLOCK_Z
        )
        sum_RN = with_low_rank(sum_RN, low_RZ, up_NZ, scale_Z)
        for at in range(BLOCK_Z, RANKS, BLOCK_Z):
            low_RZ = product(x_tiles, a_tiles, row, at, start, stop, BLOCK_R, BLOCK_Z, BLOCK_K)
            up_NZ, scale_Z = load_up(up_ptr, scale_ptr, n, at, RANKS, BLOCK_Z)
            sum_RN = with_low_rank(sum_RN, low_RZ, up_NZ, scale_Z)
    else:
        sum_RN = product(x_tiles, w_tiles, row, tile * BLOCK_N, start, stop, BLOCK_R, BLOCK_N, BLOCK_K)
    is_last = True
    if SPLITS > 1:
        tl.store(parts_ptr + split * rows * WIDTH + at_RN, sum_RN, mask=inside_R[:, None])
        tl.debug_barrier()  # all of this program's part is written before it says so
        counter_ptr = arrived_ptr + tl.program_id(0) * tl.num_programs(1) + tile
        is_last = tl.atomic_add(counter_ptr, 1) == SPLITS - 1
        if is_last:
            tl.store(counter_ptr, 0)
            sum_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
            for part in range(SPLITS):
                sum_RN += tl.load(parts_ptr + part * rows * WIDTH + at_RN, cache_modifier=".cg")
    if is_last:
        if b_ptr is not None:
            sum_RN += tl.load(b_ptr + n).to(tl.float32)[None, :]
        plain_RN = old_RN + sum_RN
        tl.store(plain_ptr + at_RN, plain_RN, mask=inside_R[:, None])
        weighted_RN = (plain_RN * norm_N[None, :].to(tl.float32)).to(weighted_ptr.dtype.element_ty)
        tl.store(weighted_ptr + at_RN, weighted_RN, mask=inside_R[:, None])
        tl.store(squares_ptr + row_R * (WIDTH // BLOCK_N) + tile, tl.sum(plain_RN * plain_RN, 1), mask=inside_R)
