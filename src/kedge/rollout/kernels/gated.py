# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""The first half of a gated layer: norm, two products, silu. Shape letters: R slots, W width, F inner width."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kedge.rollout.adapters import LowRank
from kedge.rollout.kernels.chain import follow
from kedge.rollout.kernels.launch import launch
from kedge.rollout.kernels.low_rank import load_up, two_products_beside, with_low_rank
from kedge.rollout.kernels.product import paired, tiled, two_products
from kedge.rollout.kernels.stream import Stream, inverse_root, load_squares
from kedge.rollout.tiles import Tile, beside


def gated(
    stream: Stream,
    gate_FW: Tensor,
    up_FW: Tensor,
    *,
    low: LowRank | None = None,
    eps: float,
    tile: Tile,
    chained: bool = False,
) -> Tensor:
    """silu(gate · x) · (up · x) of the normed stream x, (R, F). `low` are the adapters of both, the gate's first."""
    if low is not None:
        tile = beside(tile, columns=2 * tile.columns, ranks=2 * low.block)
    rows, width = stream.weighted_RW.shape
    inner = len(gate_FW)
    out_RF = stream.weighted_RW.new_empty(rows, inner)
    tiles = stream.squares_RN.shape[1]
    up_is_first = up_FW.data_ptr() < gate_FW.data_ptr()
    first_FW, second_FW = (up_FW, gate_FW) if up_is_first else (gate_FW, up_FW)
    launch(_gated, (triton.cdiv(rows, tile.rows), inner // tile.columns))(
        tiled(stream.weighted_RW, tile.rows, tile.depth),
        paired(first_FW, second_FW, tile.columns, tile.depth),
        None if low is None else paired(low.a_MZK[0], low.a_MZK[1], low.block, tile.depth),
        None if low is None else low.b_NZ,
        None if low is None else low.scale_MZ,
        stream.squares_RN,
        out_RF,
        rows,
        eps,
        WIDTH=width,
        INNER=inner,
        UP_IS_FIRST=up_is_first,
        TILES=tiles,
        TILES_PADDED=triton.next_power_of_2(tiles),
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
    return out_RF


@triton.jit
def _gated(
    x_tiles,
    w_tiles,
    a_tiles,
    b_ptr,
    scale_ptr,
    squares_ptr,
    out_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    UP_IS_FIRST: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    CHAINED: tl.constexpr,
):
    unclamped_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_R = tl.minimum(unclamped_R, rows - 1)
    first = tl.program_id(1) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    if RANKS > 0:
        gate_NZ, gate_scale_Z = load_up(b_ptr, scale_ptr, n, 0, RANKS, BLOCK_Z)
        up_NZ, up_scale_Z = load_up(b_ptr + INNER * RANKS, scale_ptr + RANKS, n, 0, RANKS, BLOCK_Z)
    follow(CHAINED)
    squares_RN = load_squares(squares_ptr, row_R, TILES, TILES_PADDED)
    row = tl.program_id(0) * BLOCK_R
    if RANKS > 0:
        gate_RN, up_RN, gate_RZ, up_RZ = two_products_beside(
            x_tiles, w_tiles, a_tiles, row, first, WIDTH, BLOCK_R, BLOCK_N, BLOCK_K, BLOCK_Z
        )
    else:
        gate_RN, up_RN = two_products(x_tiles, w_tiles, row, first, WIDTH, BLOCK_R, BLOCK_N, BLOCK_K)
    if UP_IS_FIRST:
        gate_RN, up_RN = up_RN, gate_RN
    scale_R1 = inverse_root(squares_RN, eps, WIDTH)[:, None]
    gate_RN, up_RN = gate_RN * scale_R1, up_RN * scale_R1
    if RANKS > 0:
        gate_RN = with_low_rank(gate_RN, gate_RZ * scale_R1, gate_NZ, gate_scale_Z)
        up_RN = with_low_rank(up_RN, up_RZ * scale_R1, up_NZ, up_scale_Z)
        for at in range(BLOCK_Z, RANKS, BLOCK_Z):
            gate_RZ, up_RZ = two_products(x_tiles, a_tiles, row, at, WIDTH, BLOCK_R, BLOCK_Z, BLOCK_K)
            gate_NZ, gate_scale_Z = load_up(b_ptr, scale_ptr, n, at, RANKS, BLOCK_Z)
            up_NZ, up_scale_Z = load_up(b_ptr + INNER * RANKS, scale_ptr + RANKS, n, at, RANKS, BLOCK_Z)
            gate_RN = with_low_rank(gate_RN, gate_RZ * scale_R1, gate_NZ, gate_scale_Z)
            up_RN = with_low_rank(up_RN, up_RZ * scale_R1, up_NZ, up_scale_Z)
    out_RN = gate_RN / (1 + tl.exp(-gate_RN)) * up_RN
    out_ptrs = out_ptr + row_R[:, None] * INNER + n
    tl.store(out_ptrs, out_RN.to(out_ptr.dtype.element_ty), mask=(unclamped_R < rows)[:, None])
