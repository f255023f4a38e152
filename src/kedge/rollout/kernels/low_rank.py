# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""Adapters beside a matrix, unmerged: x Aᵀ in the same pass over x as x Wᵀ, and (x Aᵀ) Bᵀ added to the result.

Every program multiplies its rows by all of A again, since a rank is small: that costs less than a kernel of its own.
Ranks come in blocks, of which the first goes with the matrix and any others go over x once more.
Shape letters: R slots, N columns of a tile, Z ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_beside(
    x_tiles,
    w_tiles,
    a_tiles,
    row,
    n,
    start,
    stop,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """`product` with a matrix, and with the first ranks of A."""
    out_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    low_RZ = tl.zeros([BLOCK_R, BLOCK_Z], tl.float32)
    for at in range(start, stop, BLOCK_K):
        x_RK = x_tiles.load([row, at])
        out_RN = tl.dot(x_RK, w_tiles.load([n, at]).T, out_RN, input_precision="ieee")
        low_RZ = tl.dot(x_RK, a_tiles.load([0, at]).T, low_RZ, input_precision="ieee")
    return out_RN, low_RZ


@triton.jit
def two_products_beside(
    x_tiles,
    w_tiles,
    a_tiles,
    row,
    n,
    DEPTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """`two_products` with two matrices, and with the first ranks of the A of each."""
    both_RN = tl.zeros([BLOCK_R, 2 * BLOCK_N], tl.float32)
    lows_RZ = tl.zeros([BLOCK_R, 2 * BLOCK_Z], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        x_RK = x_tiles.load([row, at])
        w_NK = w_tiles.load([0, n, at]).reshape([2 * BLOCK_N, BLOCK_K])
        a_ZK = a_tiles.load([0, 0, at]).reshape([2 * BLOCK_Z, BLOCK_K])
        both_RN = tl.dot(x_RK, w_NK.T, both_RN, input_precision="ieee")
        lows_RZ = tl.dot(x_RK, a_ZK.T, lows_RZ, input_precision="ieee")
    first_RN, second_RN = both_RN.reshape([BLOCK_R, 2, BLOCK_N]).permute(0, 2, 1).split()
    first_RZ, second_RZ = lows_RZ.reshape([BLOCK_R, 2, BLOCK_Z]).permute(0, 2, 1).split()
    return first_RN, second_RN, first_RZ, second_RZ


@triton.jit
def load_up(b_ptr, scale_ptr, n, at, RANKS: tl.constexpr, BLOCK_Z: tl.constexpr):
    """Of the outputs `n`, the block of B from rank `at`, and the scales of its ranks."""
    z = at + tl.arange(0, BLOCK_Z)
    return tl.load(b_ptr + n[:, None] * RANKS + z[None, :]), tl.load(scale_ptr + z)


@triton.jit
def with_low_rank(out_RN, low_RZ, b_NZ, scale_Z):
    """The product with a block of B is added; x Aᵀ is rounded to the type of the weights, as in the module."""
    return tl.dot((low_RZ * scale_Z[None, :]).to(b_NZ.dtype), b_NZ.T, out_RN, input_precision="ieee")
