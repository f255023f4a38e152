# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportIndexIssue=false
"""Products of some rows with some rows of a matrix (out, in), in float32: the inner loops of the other kernels."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def tiled(matrix: Tensor, rows: int, depth: int) -> Any:
    """A matrix as the copy engine reads it, in tiles; rows beyond its last are zeros."""
    return TensorDescriptor.from_tensor(matrix, [rows, depth])


def paired(first: Tensor, second: Tensor, rows: int, depth: int) -> Any:
    """Tiles of two matrices of one shape, a tile of each in one load. The second must lie behind the first in memory,
    by less than 2^40 bytes."""
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size()
    return TensorDescriptor(first, [2, *first.shape], [apart, first.shape[1], 1], [2, rows, depth])


@triton.jit
def product(x_tiles, w_tiles, row, n, start, stop, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """x[row …, start … stop] · w[n …, start … stop]ᵀ, in float32."""
    out_RN = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for at in range(start, stop, BLOCK_K):
        out_RN = tl.dot(x_tiles.load([row, at]), w_tiles.load([n, at]).T, out_RN, input_precision="ieee")
    return out_RN


@triton.jit
def two_products(
    x_tiles, w_tiles, row, n, DEPTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The products of the same rows with the same rows of each of two matrices, which come as one from `paired`."""
    both_RN = tl.zeros([BLOCK_R, 2 * BLOCK_N], tl.float32)
    for at in range(0, DEPTH, BLOCK_K):
        w_NK = w_tiles.load([0, n, at]).reshape([2 * BLOCK_N, BLOCK_K])
        both_RN = tl.dot(x_tiles.load([row, at]), w_NK.T, both_RN, input_precision="ieee")
    return both_RN.reshape([BLOCK_R, 2, BLOCK_N]).permute(0, 2, 1).split()
